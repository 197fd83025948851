//! Bursts that are divided exactly, where the kernel allows it.
//!
//! Between two looks nobody knows better than the kernel who took how many. Its programs refuse a worker that has its share
//! ([`wakeone_bpf::bursts`]); this tells them what the looks have found.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use wakeone_bpf::bursts::{Bursts, MOST};
use wakeone_control::privileges::FOR_LOADING;
use wakeone_kernel::capability;
use wakeone_kernel::proc::process;
use wakeone_kernel::schedule;
use wakeone_kernel::socket::arming::Waiter;
use wakeone_kernel::socket::entries::EDGE;
use wakeone_model::address::Address;

use crate::members::Shared;

/// A look that is later than that by so much ends the refusals.
const LATE: Duration = Duration::from_millis(100);

/// The shares of one listener's workers.
#[derive(Debug)]
pub(crate) struct Shares {
    bursts: Bursts,
    known: BTreeMap<usize, Known>,
}

/// A worker that takes part, as it was at the last look.
#[derive(Debug, Default)]
struct Known {
    refusals: u64,
    taken: (u64, u64),
}

impl Shares {
    /// Has bursts at a listener divided. `None`: the kernel or our privileges do not allow it, or it is a UNIX socket.
    pub fn of(shared: &Shared) -> Option<Self> {
        let Address::Inet(at) = shared.address else {
            return None;
        };
        let attached = capability::with(&FOR_LOADING, || Bursts::attach(shared.cookie, at.port()));
        let bursts = attached.inspect_err(|error| {
            tracing::debug!("{}: bursts are not divided: {error}", shared.address);
        });
        Some(Self {
            bursts: bursts.ok()?,
            known: BTreeMap::new(),
        })
    }

    /// A worker came. A process with several sets is left alone: nobody knows by which of them it accepts.
    pub fn enlist(&mut self, place: usize, waiter: &Waiter) {
        let (pid, set) = (waiter.entry.pid, waiter.entry.epoll);
        if place >= MOST || waiter.sets > 1 || self.bursts.has(pid) {
            return;
        }
        // An edge-triggered one would not be woken again.
        let again = waiter.entry.events & EDGE == 0;
        let done = process::descriptor_of(pid, set).and_then(|set| {
            let enlist = || self.bursts.enlist(place, pid, set.as_fd(), again);
            capability::with(&FOR_LOADING, enlist)
        });
        match done {
            Ok(()) => drop(self.known.insert(place, Known::default())),
            Err(error) => tracing::debug!("process {pid} is never refused: {error}"),
        }
    }

    /// A worker is gone.
    pub fn dismiss(&mut self, place: usize) {
        if self.known.remove(&place).is_some() {
            self.bursts.dismiss(place);
        }
    }

    /// A worker's connections are counted next.
    pub fn begin(&mut self, place: usize) {
        if let Some(known) = self.known.get_mut(&place) {
            known.taken = self.bursts.taken(place);
        }
    }

    /// Tells what a look has found of a worker. `weight`: 0 if it drains. `busy`: it did not take what waited.
    pub fn tell(&self, place: usize, connections: u64, weight: u32, busy: bool) {
        let Some(known) = self.known.get(&place) else {
            return;
        };
        self.bursts.tell(place, connections, known.taken);
        self.bursts.set_weight(place, weight);
        if busy {
            self.bursts.set_absent(place);
        }
    }

    /// Returns the workers that were refused since the last call.
    pub fn refused(&mut self) -> Vec<usize> {
        let was = |(place, known): (&usize, &mut Known)| {
            let now = self.bursts.refusals(*place);
            (std::mem::replace(&mut known.refusals, now) != now).then_some(*place)
        };
        self.known.iter_mut().filter_map(was).collect()
    }

    /// Workers may be refused until the next look, in so long.
    pub fn renew(&self, pause: Duration) {
        let until = schedule::monotonic_ns() + (pause + LATE).as_nanos() as u64;
        self.bursts.renew(until);
    }

    /// Nobody is refused until the next look.
    pub fn suspend(&self) {
        self.bursts.renew(0);
    }

    /// Whether a worker was refused for the first time in a burst since the last call.
    pub fn take_notice(&self) -> bool {
        self.bursts.take_notice()
    }
}

impl AsFd for Shares {
    /// A descriptor that is readable while there is a notice to take.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bursts.as_fd()
    }
}
