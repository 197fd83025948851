//! Taking over the workers of a supervisor that was killed: they went on serving, and hold the listeners.

use super::listen::{self, Endpoint, ListenError};
use super::process::Process;
use super::slot::{Slot, Worker};
use super::state::{self, State, Task};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use wakeone_kernel::process::sockets_of;

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
    /// The kernel does not let us look into one.
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

/// A group taken over.
#[derive(Debug)]
pub struct Adopted {
    /// Where it listens: the ports that were chosen where 0 was asked for.
    pub endpoints: Vec<Endpoint>,
    /// Its slots; those whose worker died meanwhile have a new socket, which does not listen yet, and no worker.
    pub slots: Vec<Slot>,
}

/// What the new supervisor was asked for.
pub struct Wanted<'a> {
    /// Where to listen.
    pub endpoints: &'a [Endpoint],
    /// How many slots.
    pub slots: usize,
    /// What workers run.
    pub task: &'a Task,
    /// The listeners' backlog.
    pub backlog: i32,
}

/// Takes over what still runs of `state`; `None` when nothing does.
///
/// # Errors
/// Something runs, and is not what was asked for, or cannot be taken. Nothing was changed then.
pub fn adopt(state: &State, wanted: &Wanted<'_>) -> Result<Option<Adopted>, AdoptError> {
    let mut living = living(state)?;
    if living.iter().all(Option::is_none) {
        return Ok(None);
    }
    let pids: Vec<String> = living
        .iter()
        .flatten()
        .map(|process| process.pid().to_string())
        .collect();
    let (name, pids) = (state.name.clone(), pids.join(" "));
    if !same_places(wanted.endpoints, &state.listen) {
        let old: Vec<String> = state.listen.iter().map(ToString::to_string).collect();
        return Err(AdoptError::Elsewhere {
            name,
            old: old.join(", "),
            pids,
        });
    }
    let found = living
        .iter()
        .rposition(Option::is_some)
        .map_or(0, |last| last + 1);
    if found > wanted.slots {
        return Err(AdoptError::TooMany { name, found, pids });
    }
    living.resize_with(wanted.slots, || None);

    let same_task = state.task == *wanted.task;
    let mut slots = Vec::with_capacity(wanted.slots);
    for (index, process) in living.into_iter().enumerate() {
        let old = state.slots.get(index);
        let listeners = match (&process, old) {
            (Some(process), Some(old)) => {
                take_listeners(process, &old.inodes, &state.listen, wanted.backlog)?
            }
            _ => state
                .listen
                .iter()
                .map(|at| listen::bind_beside(*at))
                .collect::<Result<_, _>>()?,
        };
        let mut slot = Slot::new(listeners);
        if let Some(process) = process {
            slot.adopt(Worker::adopted(
                process,
                same_task && old.is_some_and(|old| old.current),
            ));
        }
        slots.push(slot);
    }
    Ok(Some(Adopted {
        endpoints: state.listen.clone(),
        slots,
    }))
}

fn living(state: &State) -> Result<Vec<Option<Process>>, AdoptError> {
    let this_boot = state.boot == state::boot_id();
    let find = |slot: &state::Slot| match slot.worker {
        Some(identity) if this_boot => {
            Process::adopt(identity).map_err(|source| AdoptError::Denied {
                pid: identity.pid,
                source,
            })
        }
        _ => Ok(None),
    };
    state.slots.iter().map(find).collect()
}

/// Whether the places wanted are those that were; port 0 is content with any.
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

/// The worker's listeners, one an address. One that it has closed is made anew.
fn take_listeners(
    process: &Process,
    inodes: &[u64],
    endpoints: &[Endpoint],
    backlog: i32,
) -> Result<Vec<OwnedFd>, AdoptError> {
    let denied = |source| AdoptError::Denied {
        pid: process.pid(),
        source,
    };
    let open = sockets_of(process.pid()).map_err(denied)?;
    let mut listeners = Vec::with_capacity(endpoints.len());
    for (inode, endpoint) in inodes.iter().zip(endpoints) {
        let numbers = open
            .iter()
            .filter(|(_, found)| found == inode)
            .map(|(number, _)| *number);
        let taken = numbers
            .filter_map(|number| take_fd(process.pidfd(), number, *inode, *endpoint).transpose())
            .next();
        let listener = match taken.transpose().map_err(denied)? {
            Some(listener) => {
                listen::listen(*endpoint, &listener, backlog)?;
                listener
            }
            None => listen::bind_beside(*endpoint)?,
        };
        listeners.push(listener);
    }
    Ok(listeners)
}

/// A duplicate of a process's descriptor, if it is the listener that we look for.
fn take_fd(
    pidfd: BorrowedFd<'_>,
    number: i32,
    inode: u64,
    endpoint: Endpoint,
) -> io::Result<Option<OwnedFd>> {
    let fd = match pidfd_getfd(pidfd, number, PidfdGetfdFlags::empty()) {
        Ok(fd) => fd,
        Err(rustix::io::Errno::BADF) => return Ok(None), // closed since we looked
        Err(errno) => return Err(errno.into()),
    };
    let is_it = inode_of(&fd)? == inode && listen::address_of(&fd) == Ok(endpoint.address);
    Ok(is_it.then_some(fd))
}

/// The inode of a descriptor, which names a socket as long as it lives.
///
/// # Errors
/// What fstat(2) says.
pub fn inode_of(fd: impl AsFd) -> io::Result<u64> {
    Ok(rustix::fs::fstat(fd)?.st_ino)
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
