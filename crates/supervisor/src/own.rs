//! Workers that open their own listeners, as `{port}` in their command tells. A program has these sockets share their
//! address (`bpf/join.bpf.c`). The supervisor holds the address by a socket that never listens. Once a worker listens
//! there, it duplicates the worker's listener, and from then on treats it as one that it made itself.

use super::Supervisor;
use super::elsewhere;
use super::listen::{self, Endpoint, ListenError};
use super::ready::LOOK_ELSEWHERE;
use super::report;
use super::slot::{self, Slot, Worker};
use super::watch::Watch;
use rustix::net::sockopt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use wakeone_control::state::SlotRecord;
use wakeone_kernel::proc::process::{descriptor_of, sockets_of, tree};
use wakeone_kernel::socket;
use wakeone_kernel::socket::diag::{self, Which};
use wakeone_model::listener::Protocol;

/// How often to look for a worker's listeners while it starts: it reads all of its descriptors.
const LOOK: Duration = Duration::from_millis(20);

const MULTIPATH: &str = "it listens by Multipath TCP, for which the kernel lets no program choose; have it listen by plain TCP (Go: `env GODEBUG=multipathtcp=0` before the command)";
const OUTSIDE: &str = "it was bound outside of the group's cgroup, which the server must not leave";

/// The listeners that a process, or one below it, has opened at these addresses, in their order; `None`: not all yet.
///
/// # Errors
/// Why they cannot be had, as the end of a sentence.
fn opened(pid: u32, endpoints: &[Endpoint]) -> Result<Option<Vec<OwnedFd>>, String> {
    let unseen =
        |error: io::Error| format!("its listener cannot be looked at: {error}; that needs root");
    let mut listeners = Vec::with_capacity(endpoints.len());
    for Endpoint { address, .. } in endpoints {
        let Some(listener) = opened_at(pid, *address).map_err(unseen)? else {
            return Ok(None);
        };
        let alone = |why: &str| Err(format!("its listener on {address} cannot be shared: {why}"));
        if socket::is_mptcp(&listener) {
            return alone(MULTIPATH);
        }
        if !sockopt::socket_reuseport(&listener).unwrap_or(false) {
            return alone(OUTSIDE);
        }
        listeners.push(listener);
    }
    Ok(Some(listeners))
}

fn opened_at(pid: u32, address: SocketAddr) -> io::Result<Option<OwnedFd>> {
    let there = diag::sockets_at(Protocol::Tcp, Which::Listening, address)?;
    let all = there.iter().filter(|one| one.local == address);
    let inodes: Vec<u64> = all.map(|one| one.socket.inode).collect();
    let held = tree(pid).find_map(|one| {
        let held = sockets_of(one).ok()?;
        let mut own = held.iter().filter(|(_, inode)| inodes.contains(inode));
        own.next().map(|(fd, _)| (one, *fd))
    });
    held.map(|(holder, fd)| descriptor_of(holder, fd))
        .transpose()
}

impl Supervisor {
    /// Whether the workers open their own listeners.
    pub fn opens_own(&self) -> bool {
        !self.homes.is_empty()
    }

    /// A slot's entry in the state file. Sockets that hold the addresses are no listeners of its worker.
    pub(super) fn record(&self, slot: &Slot) -> SlotRecord {
        let homes = slot::inodes(&self.homes);
        let mut record = slot.state();
        let beside = record.beside.iter_mut().flat_map(|one| &mut one.inodes);
        for inode in record.inodes.iter_mut().chain(beside) {
            if homes.contains(inode) {
                *inode = 0;
            }
        }
        record
    }

    /// Copies of the sockets that hold the addresses.
    fn homes(&self) -> Result<Vec<OwnedFd>, ListenError> {
        let homes = self.endpoints.iter().zip(&self.homes);
        homes.map(|(at, home)| listen::copy(*at, home)).collect()
    }
}

impl Watch<'_> {
    /// Whether the worker of a slot, or the one that starts beside it, has the listeners of its place. One that opens its own
    /// has them once it listens.
    pub(super) fn has_listeners(&mut self, slot: usize, beside: bool) -> bool {
        let opens_own = self.group.opens_own();
        let (worker, listeners) = self.group.slots[slot].with_listeners(beside);
        if !opens_own || listeners.iter().all(socket::listens) {
            return true;
        }
        let Some(worker) =
            worker.filter(|one| one.looked_own.is_none_or(|when| when.elapsed() >= LOOK))
        else {
            return false;
        };
        worker.looked_own = Some(Instant::now());
        let pid = worker.process.pid();
        let taken = match opened(pid, &self.group.endpoints) {
            Ok(Some(opened)) if beside => Ok(opened),
            Ok(Some(opened)) => match self.steer.serve_own(slot, pid, &opened) {
                Ok(()) => Ok(opened),
                Err(why) => Err(format!("its listener cannot be steered: {why}")),
            },
            Ok(None) => {
                name_elsewhere(slot, worker, &self.group.endpoints);
                return false;
            }
            Err(why) => Err(why),
        };
        match taken {
            Ok(opened) => {
                *listeners = opened;
                self.changed = true;
                true
            }
            Err(why) => {
                if !std::mem::replace(&mut worker.told_nowhere, true) {
                    report::own_refused(slot, pid, &why);
                }
                false
            }
        }
    }

    /// The worker of a slot has ended, which had opened its own listeners: the kernel moves what waits there once they are
    /// closed.
    pub(super) fn park(&mut self, slot: usize) {
        if !self.group.opens_own() {
            return;
        }
        match self.group.homes() {
            Ok(homes) => {
                self.steer.park(slot, &homes);
                self.group.slots[slot].listeners = homes;
            }
            Err(error) => tracing::warn!(slot, "the listeners of slot {slot} stay: {error}"),
        }
    }

    /// The same for the spare listeners of a slot, which are not chosen.
    pub(super) fn park_spare(&mut self, slot: usize) {
        if let Ok(homes) = self.group.homes() {
            self.group.slots[slot].spare = homes;
        }
    }
}

/// Names the address where a worker listens instead.
fn name_elsewhere(slot: usize, worker: &mut Worker, wanted: &[Endpoint]) {
    if worker.ran() < LOOK_ELSEWHERE {
        return;
    }
    if let Some(at) = worker.whereabouts(&[], &[]).elsewhere
        && worker.elsewhere.replace(at) != Some(at)
    {
        let wanted: Vec<String> = wanted.iter().map(Endpoint::to_string).collect();
        let pid = worker.process.pid();
        report::own_elsewhere(slot, pid, &elsewhere::shown(at), &wanted.join(" and "));
    }
}
