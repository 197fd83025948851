//! Taking over the workers of a supervisor that was killed: they went on serving, and hold the listeners.

use super::listen::{self, Endpoint, ListenError};
use super::process::{Identity, Process};
use super::reserve::{self, Reserved};
use super::slot::{Retiring, Slot, Worker};
use super::spawn::names_any;
use crate::Queue;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;
use wakeone_control::state::{self, State, Task};
use wakeone_kernel::proc::process::{descriptor_by, socket_of, sockets_of};
use wakeone_kernel::socket::{self, inode_of};

/// Why workers that still run cannot be taken over.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// They listen elsewhere.
    #[error(
        "workers of an earlier `{name}` still serve {old} (pids {pids}): start with the same -l to take them over, or end them with `kill {pids}`"
    )]
    Elsewhere {
        /// The group.
        name: String,
        /// Where they listen.
        old: String,
        /// Their pids.
        pids: String,
    },
    /// There are more of them than wanted.
    #[error(
        "{found} workers of an earlier `{name}` still run (pids {pids}): start with -w {found} or more to take them over, or end them with `kill {pids}`"
    )]
    TooMany {
        /// The group.
        name: String,
        /// Slots up to the last that has a worker.
        found: usize,
        /// Their pids.
        pids: String,
    },
    /// They have other listeners than those that were asked for.
    #[error(
        "workers of an earlier `{name}` still run {how} (pids {pids}): start {how} to take them over, or end them with `kill {pids}`"
    )]
    Otherwise {
        /// The group.
        name: String,
        /// The option that they were started with or without.
        how: &'static str,
        /// Their pids.
        pids: String,
    },
    /// The kernel does not let us look into a worker.
    #[error(
        "cannot take the listeners of worker process {pid}: {source}; that needs root, or the same user and kernel.yama.ptrace_scope=0"
    )]
    Denied {
        /// The worker.
        pid: u32,
        /// What was refused.
        source: io::Error,
    },
    /// A slot's listener could not be replaced.
    #[error(transparent)]
    Listen(#[from] ListenError),
}

/// A group's sockets, and the workers that serve them.
#[derive(Debug)]
pub struct Sockets {
    /// The addresses where it listens, with the ports that were chosen for port 0.
    pub endpoints: Vec<Endpoint>,
    /// The reserving socket of each address whose listeners are on a private port.
    pub reserved: Vec<Option<Reserved>>,
    /// Sockets that hold the addresses of workers that open their own listeners; else empty.
    pub homes: Vec<OwnedFd>,
    /// Its slots. A slot whose worker died meanwhile has no worker, and a new socket, which does not listen yet.
    pub slots: Vec<Slot>,
    /// Which queues they have by TCP.
    pub queue: Queue,
    /// The length of each accept queue.
    pub backlog: i32,
}

/// Where a listener of each slot is bound.
#[derive(Debug)]
pub struct Place {
    /// The address that clients connect to.
    pub public: Endpoint,
    /// Where it is bound.
    pub bound: Endpoint,
    /// The listener that all slots have there; `None`: each has its own.
    pub shared: Option<OwnedFd>,
    /// The socket that holds it where workers open their own listeners: it never listens.
    pub home: Option<OwnedFd>,
}

impl Place {
    /// A place where each slot has a listener of its own.
    pub fn own(public: Endpoint, reserved: Option<&state::Reserved>) -> Self {
        Self {
            public,
            bound: reserve::bound_at(public, reserved),
            shared: None,
            home: None,
        }
    }

    /// A place where workers open their own listeners, which this socket holds.
    pub fn held(public: Endpoint, home: OwnedFd) -> Self {
        Self {
            home: Some(home),
            ..Self::own(public, None)
        }
    }

    /// A listener for one worker more, beside those that there are. It may not listen yet.
    ///
    /// # Errors
    /// It cannot be bound, or copied.
    pub fn one_more(&self) -> Result<OwnedFd, ListenError> {
        match self.shared.as_ref().or(self.home.as_ref()) {
            Some(listener) => listen::copy(self.public, listener),
            None => listen::bind_beside(self.bound),
        }
    }
}

/// The request of the new supervisor.
pub struct Wanted<'a> {
    /// The addresses to listen on.
    pub endpoints: &'a [Endpoint],
    /// The number of slots.
    pub slots: usize,
    /// So many of them have workers.
    pub workers: usize,
    /// The command of the workers, and its account.
    pub task: &'a Task,
    /// The backlog asked for.
    pub backlog: Option<i32>,
    /// Bind listeners for a second worker of each slot.
    pub spare: bool,
    /// How long a worker that was being replaced has to end.
    pub grace: Duration,
    /// Whether TCP listeners are to be on private ports.
    pub lookup: bool,
    /// Which queues those of living workers must be; `None`: any.
    pub queue: Option<Queue>,
    /// Whether workers open their own listeners.
    pub opens_own: bool,
}

impl Wanted<'_> {
    /// Returns the length of each accept queue.
    pub fn backlog_of(&self, queue: Queue) -> i32 {
        let queues = match queue {
            Queue::One => 1,
            Queue::Each => self.workers,
        };
        listen::backlog(self.backlog, queues)
    }
}

/// Takes over the workers of `state` that still run; `None` if none does.
///
/// # Errors
/// A worker runs, and differs from what is wanted, or cannot be taken over. Nothing was changed then.
pub fn adopt(state: &State, wanted: &Wanted<'_>) -> Result<Option<Sockets>, AdoptError> {
    let mut living = living(state)?;
    if living.iter().all(Option::is_none) {
        return Ok(None);
    }
    let pids: Vec<String> = living
        .iter()
        .flatten()
        .map(|found| found.process.pid().to_string())
        .collect();
    let (name, pids) = (state.name.clone(), pids.join(" "));
    let endpoints = state.endpoints();
    if !same_places(wanted.endpoints, &endpoints) {
        let old: Vec<String> = state.listen.iter().map(ToString::to_string).collect();
        return Err(AdoptError::Elsewhere {
            name,
            old: old.join(", "),
            pids,
        });
    }
    let lookup = state.reserved.iter().any(Option::is_some);
    if lookup != (wanted.lookup && endpoints.iter().any(|at| !at.udp)) {
        let how = if lookup {
            "with --lookup"
        } else {
            "without --lookup"
        };
        return Err(AdoptError::Otherwise { name, how, pids });
    }
    let opens_own = names_any(&state.task.command, "port", endpoints.len());
    if opens_own != wanted.opens_own {
        let how = match opens_own {
            true => "with {port} in the command",
            false => "without {port} in the command",
        };
        return Err(AdoptError::Otherwise { name, how, pids });
    }
    let (queue, how) = match state.one_queue {
        true => (Queue::One, "with --queue one"),
        false => (Queue::Each, "with --queue each"),
    };
    if wanted.queue.is_some_and(|wanted| wanted != queue) {
        return Err(AdoptError::Otherwise { name, how, pids });
    }
    let found = living
        .iter()
        .rposition(Option::is_some)
        .map_or(0, |last| last + 1);
    if found > wanted.slots {
        return Err(AdoptError::TooMany { name, found, pids });
    }
    living.resize_with(wanted.slots, || None);

    let backlog = wanted.backlog_of(queue);
    let places = places(state, &living, wanted, backlog)?;
    let reserved = take_reserved(state, &living)?;
    let same_task = state.task == *wanted.task;
    let mut slots = Vec::with_capacity(wanted.slots);
    for (index, found) in living.into_iter().enumerate() {
        let current = state.slots.get(index).is_some_and(|old| old.current);
        let current = same_task && current;
        slots.push(adopt_slot(found, current, &places, backlog, wanted)?);
    }
    Ok(Some(Sockets {
        endpoints,
        reserved,
        homes: places.into_iter().filter_map(|place| place.home).collect(),
        slots,
        queue,
        backlog,
    }))
}

/// Makes a slot of the workers that were found for it. A second worker, of a rolling restart that nobody continues,
/// is to end.
fn adopt_slot(
    found: Option<Living>,
    current: bool,
    places: &[Place],
    backlog: i32,
    wanted: &Wanted<'_>,
) -> Result<Slot, AdoptError> {
    let take = |process: &Process, inodes: &[u64]| take_listeners(process, inodes, places, backlog);
    let bind = || -> Result<Vec<OwnedFd>, AdoptError> {
        let bound = places.iter().map(Place::one_more);
        Ok(bound.collect::<Result<_, _>>()?)
    };
    let listeners = match &found {
        Some(living) => take(&living.process, &living.inodes)?,
        None => bind()?,
    };
    let mut slot = Slot::new(listeners);
    let beside = found.and_then(|living| {
        let mut worker = Worker::adopted(living.process, current);
        // One that opens its own listeners may not have listened when its supervisor died.
        worker.ready = !wanted.opens_own || slot.listeners.iter().all(socket::listens);
        slot.adopt(worker);
        living.beside
    });
    match beside {
        Some((process, inodes)) => {
            slot.spare = take(&process, &inodes)?;
            let worker = Worker::adopted(process, current);
            slot.retiring = Some(Retiring::new(Some(worker), wanted.grace));
        }
        None if wanted.spare => slot.spare = bind()?,
        None => {}
    }
    Ok(slot)
}

/// A worker that still runs, and its listeners.
struct Living {
    process: Process,
    inodes: Vec<u64>,
    beside: Option<(Process, Vec<u64>)>,
}

fn living(state: &State) -> Result<Vec<Option<Living>>, AdoptError> {
    let this_boot = state.boot == state::boot_id();
    let find = |identity: Identity| {
        if !this_boot {
            return Ok(None);
        }
        Process::adopt(identity).map_err(|source| AdoptError::Denied {
            pid: identity.pid,
            source,
        })
    };
    let find_both = |slot: &state::SlotRecord| {
        let first = slot.worker.map(find).transpose()?.flatten();
        let first = first.map(|process| (process, slot.inodes.clone()));
        let beside = slot.beside.as_ref();
        let second = beside.map(|beside| find(beside.worker)).transpose()?;
        let second = second.flatten().zip(beside.map(|one| one.inodes.clone()));
        // If the first worker has ended, the second one serves.
        let (first, beside) = match first {
            Some(first) => (Some(first), second),
            None => (second, None),
        };
        Ok(first.map(|(process, inodes)| Living {
            process,
            inodes,
            beside,
        }))
    };
    state.slots.iter().map(find_both).collect()
}

/// Whether the wanted addresses are those of the state; port 0 matches any port.
fn same_places(wanted: &[Endpoint], were: &[Endpoint]) -> bool {
    let same = |(wanted, was): (&Endpoint, &Endpoint)| {
        let mut wanted = *wanted;
        if wanted.address.port() == 0 {
            wanted.address.set_port(was.address.port());
        }
        wanted == *was
    };
    wanted.len() == were.len() && wanted.iter().zip(were).all(same)
}

/// The addresses, and the listeners that the living workers share there.
fn places(
    state: &State,
    living: &[Option<Living>],
    wanted: &Wanted<'_>,
    backlog: i32,
) -> Result<Vec<Place>, AdoptError> {
    let place = |(at, public): (usize, Endpoint)| {
        if wanted.opens_own {
            let owner = state.task.account.as_ref().map(|account| account.uid);
            return Ok(Place::held(public, listen::hold_beside(public, owner)?));
        }
        let reserved = state.reserved.get(at).and_then(Option::as_ref);
        let mut place = Place::own(public, reserved);
        if state.one_queue && !public.udp {
            let listener = match held_by_any(living, at) {
                Some(listener) => listener,
                None => listen::bind_shared(public, wanted.task.nonblocking)?,
            };
            listen::listen(public, &listener, backlog)?;
            place.shared = Some(listener);
        }
        Ok(place)
    };
    state
        .endpoints()
        .into_iter()
        .enumerate()
        .map(place)
        .collect()
}

/// Takes the listener at one address from any of the workers that share it; `None`: all have closed it.
fn held_by_any(living: &[Option<Living>], at: usize) -> Option<OwnedFd> {
    living.iter().flatten().find_map(|one| {
        let inode = *one.inodes.get(at)?;
        socket_of(one.process.pid(), inode)
    })
}

fn take_reserved(
    state: &State,
    living: &[Option<Living>],
) -> Result<Vec<Option<Reserved>>, ListenError> {
    let workers: Vec<&Process> = living.iter().flatten().map(|one| &one.process).collect();
    let take = |(known, public): (&Option<state::Reserved>, Endpoint)| {
        let known = known.as_ref();
        known
            .map(|known| Reserved::take_over(public, known, &workers))
            .transpose()
    };
    let mut taken: Vec<_> = state
        .reserved
        .iter()
        .zip(state.endpoints())
        .map(take)
        .collect::<Result<_, _>>()?;
    taken.resize_with(state.listen.len(), || None);
    Ok(taken)
}

/// Takes the worker's listeners, one for each address. A listener that it has closed is made anew.
fn take_listeners(
    process: &Process,
    inodes: &[u64],
    places: &[Place],
    backlog: i32,
) -> Result<Vec<OwnedFd>, AdoptError> {
    let denied = |source| AdoptError::Denied {
        pid: process.pid(),
        source,
    };
    let open = match sockets_of(process.pid()) {
        Err(_) if process.has_ended() => Vec::new(), // just now, as one does whose supervisor died while it started
        other => other.map_err(denied)?,
    };
    let mut listeners = Vec::with_capacity(places.len());
    for (inode, place) in inodes.iter().zip(places) {
        if place.shared.is_some() {
            listeners.push(place.one_more()?);
            continue;
        }
        let numbers = open
            .iter()
            .filter(|(_, found)| found == inode)
            .map(|(number, _)| *number);
        let taken = numbers
            .filter_map(|number| take_fd(process, number, *inode, place).transpose())
            .next();
        let listener = match taken.transpose().map_err(denied)? {
            Some(listener) => {
                listen::listen(place.public, &listener, backlog)?;
                listener
            }
            None => place.one_more()?,
        };
        listeners.push(listener);
    }
    Ok(listeners)
}

/// Duplicates a process's descriptor, if it is the wanted listener.
fn take_fd(
    process: &Process,
    number: i32,
    inode: u64,
    place: &Place,
) -> io::Result<Option<OwnedFd>> {
    let gone = [rustix::io::Errno::BADF, rustix::io::Errno::SRCH].map(|errno| errno.raw_os_error());
    let fd = match descriptor_by(process.pidfd(), process.pid(), number) {
        Ok(fd) => fd,
        // Closed, or ended, since we looked.
        Err(error)
            if error
                .raw_os_error()
                .is_some_and(|errno| gone.contains(&errno)) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    // A listener on a private port shows its public address, as long as the program for that is loaded.
    let at = listen::address_of(&fd);
    let is_there = at == Ok(place.public.address) || at == Ok(place.bound.address);
    Ok((is_there && inode_of(&fd)? == inode).then_some(fd))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str, dual_stack: bool) -> Endpoint {
        Endpoint {
            address: text.parse().expect("address"),
            dual_stack,
            udp: false,
        }
    }

    #[test]
    fn places_are_the_same_or_not() {
        let were = [at("127.0.0.1:80", false), at("[::]:81", true)];
        assert!(same_places(&were, &were));
        assert!(same_places(&[at("127.0.0.1:0", false), were[1]], &were));
        assert!(
            !same_places(&[were[1], were[0]], &were),
            "the order is that of the descriptors"
        );
        assert!(!same_places(&were[..1], &were));
        assert!(!same_places(&[were[0], at("[::]:81", false)], &were));
        assert!(!same_places(&[at("127.0.0.2:0", false), were[1]], &were));
    }
}
