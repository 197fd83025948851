//! Workers that open their own listeners, as `{port}` in their command tells. A program has these sockets share their
//! address (`bpf/join.bpf.c`). The supervisor holds the address by a socket that never listens. Once a worker listens
//! there, it duplicates the worker's listener, and from then on treats it as one that it made itself.

use super::Supervisor;
use super::elsewhere;
use super::listen::{self, Endpoint, ListenError};
use super::report;
use super::slot::{self, Slot};
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
/// A worker that listens elsewhere after this long is named.
const LOOK_ELSEWHERE: Duration = Duration::from_secs(2);

const MULTIPATH: &str = "it listens by Multipath TCP, for which the kernel lets no program choose; have it listen by plain TCP (Go: `env GODEBUG=multipathtcp=0` before the command)";
const OUTSIDE: &str = "it was bound outside of the group's cgroup, which the server must not leave";

/// The listeners that a worker has opened itself.
enum Opened {
    /// It listens at all addresses, in their order.
    All(Vec<OwnedFd>),
    /// At some address nobody of it listens.
    NotYet,
    /// It listens there, and others cannot: the reason, as the end of a sentence.
    Alone(SocketAddr, &'static str),
}

/// Looks for the listeners that a process, or one below it, has opened at these addresses.
///
/// # Errors
/// It may not be looked at, or its listener cannot be duplicated.
fn opened(pid: u32, endpoints: &[Endpoint]) -> io::Result<Opened> {
    let mut listeners = Vec::with_capacity(endpoints.len());
    for endpoint in endpoints {
        let there = diag::sockets_at(Protocol::Tcp, Which::Listening, endpoint.address)?;
        let at = |inode: u64| {
            there
                .iter()
                .any(|one| one.local == endpoint.address && one.socket.inode == inode)
        };
        let held = tree(pid).find_map(|one| {
            let held = sockets_of(one).ok()?;
            let mut own = held.iter().filter(|(_, inode)| at(*inode));
            own.next().map(|(fd, _)| (one, *fd))
        });
        let Some((holder, fd)) = held else {
            return Ok(Opened::NotYet);
        };
        let listener = descriptor_of(holder, fd)?;
        if socket::is_mptcp(&listener) {
            return Ok(Opened::Alone(endpoint.address, MULTIPATH));
        }
        if !sockopt::socket_reuseport(&listener)? {
            return Ok(Opened::Alone(endpoint.address, OUTSIDE));
        }
        listeners.push(listener);
    }
    Ok(Opened::All(listeners))
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
    /// Whether the worker of a slot, or its successor, has the listeners of its place. One that opens its own has them
    /// once it listens.
    pub(super) fn has_listeners(&mut self, slot: usize, beside: bool) -> bool {
        let place = &self.group.slots[slot];
        let (worker, listeners) = match beside {
            false => (place.worker(), &place.listeners),
            true => (place.successor.as_ref(), &place.spare),
        };
        if !self.group.opens_own() || listeners.iter().all(socket::listens) {
            return true;
        }
        let Some((pid, ran)) = worker.map(|one| (one.process.pid(), one.ran())) else {
            return false;
        };
        if self.own_looked[slot].is_some_and(|when| when.elapsed() < LOOK) {
            return false;
        }
        self.own_looked[slot] = Some(Instant::now());
        match opened(pid, &self.group.endpoints) {
            Ok(Opened::All(listeners)) => return self.take_own(slot, pid, listeners, beside),
            Ok(Opened::NotYet) if ran < LOOK_ELSEWHERE => {}
            Ok(Opened::NotYet) => self.name_elsewhere(slot, pid, beside),
            Ok(Opened::Alone(at, why)) => self.tell_own(slot, &report::alone(slot, pid, at, why)),
            Err(error) => self.tell_own(slot, &report::unseen_own(slot, pid, &error)),
        }
        false
    }

    fn take_own(&mut self, slot: usize, pid: u32, listeners: Vec<OwnedFd>, beside: bool) -> bool {
        if beside {
            self.group.slots[slot].spare = listeners;
            self.changed = true;
            return true;
        }
        if let Err(why) = self.steer.serve_own(slot, pid, &listeners) {
            self.tell_own(slot, &report::not_taken(slot, pid, &why));
            return false;
        }
        self.group.slots[slot].listeners = listeners;
        self.changed = true;
        true
    }

    /// Names the address where a worker listens instead.
    fn name_elsewhere(&mut self, slot: usize, pid: u32, beside: bool) {
        let Some(at) = elsewhere::look(pid, &[], &[]).elsewhere else {
            return;
        };
        let place = &mut self.group.slots[slot];
        let worker = match beside {
            false => place.worker_mut(),
            true => place.successor.as_mut(),
        };
        if let Some(worker) = worker
            && worker.elsewhere.replace(at) != Some(at)
        {
            let wanted: Vec<String> = self
                .group
                .endpoints
                .iter()
                .map(Endpoint::to_string)
                .collect();
            report::own_elsewhere(slot, pid, &elsewhere::shown(at), &wanted.join(" and "));
        }
    }

    /// Logs why a worker's listeners cannot be taken, once for each worker.
    fn tell_own(&mut self, slot: usize, sentence: &str) {
        for worker in self.group.slots[slot].everyone_mut() {
            if !worker.ready && !std::mem::replace(&mut worker.told_nowhere, true) {
                tracing::error!(event = "own", slot, "{sentence}");
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
