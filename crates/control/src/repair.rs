//! Repairs listeners that stopped listening: their agent was killed while it moved their queues. Their workers spin on
//! `EINVAL`, and the kernel has no listener to give their connections to.
//!
//! The agent first writes into the table which slot it works on ([`flag::MOVING`]), so that its successor knows. An
//! agent that is stopped there (SIGSTOP) keeps its mark. When it goes on it finds the listener open, and to open it
//! twice does no harm.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Relaxed;

use wakeone_bpf::Pinned;
use wakeone_bpf::table::{self, flag};
use wakeone_kernel::proc::process;
use wakeone_kernel::socket;

use crate::group_table;
use crate::paths::Paths;
use crate::state::{self, GroupDir, State, StateError};
use crate::status;
use crate::taken_out::TakenOut;

/// Repairs every group whose agent is gone or stopped. A running agent moves queues itself, and is left alone.
pub fn repair_all(paths: &Paths) {
    for name in status::names(paths).unwrap_or_default() {
        // The folder is taken only if there is something to do, so that an agent that starts now finds it free.
        let is_moving = |pinned| !moving(&pinned).is_empty();
        if !open(paths, &name).is_some_and(is_moving)
            && !TakenOut::of(&paths.runtime, &name).is_there()
            && !group_table::has_changed_entries(paths, &name)
        {
            continue;
        }
        match GroupDir::take(&paths.runtime, &name) {
            Ok(dir) => {
                for why in repair(paths, &dir) {
                    tracing::warn!(event = "degraded", "`{name}`: {why}");
                }
            }
            Err(StateError::Stopped { pid, .. }) => repair_beside(paths, &name, &pid),
            Err(_) => {}
        }
    }
}

/// The same for a group whose agent lives and is stopped: it may continue at any moment.
fn repair_beside(paths: &Paths, name: &str, agent: &str) {
    repair_entries(paths, name).iter().for_each(|why| {
        tracing::warn!(event = "degraded", "`{name}`: {why}");
    });
    let (Some(pinned), Ok(Some(state))) = (open(paths, name), state::load(&paths.runtime, name))
    else {
        return;
    };
    if state.boot != state::boot_id() {
        return;
    }
    let mut open = true;
    for slot in moving(&pinned) {
        let done = match reopen(&pinned, &state, slot) {
            Ok(()) => "was opened again".to_owned(),
            Err(why) => {
                open = false;
                format!("stays closed: {why}")
            }
        };
        tracing::warn!(
            event = "degraded",
            slot,
            "`{name}`: its agent (pid {agent}) is stopped in the middle of moving the queue of slot {slot}, whose listener {done}; continue it with `kill -CONT {agent}`"
        );
    }
    if open && let Err(error) = TakenOut::of(&paths.runtime, name).put_back() {
        tracing::warn!(event = "degraded", "`{name}`: {}", not_back(&error));
    }
}

fn not_back(error: &std::io::Error) -> String {
    format!(
        "a worker gets no connections: its listener cannot be put back into its epoll set: {error}; restart it"
    )
}

/// Makes the listeners of this group listen that were closed for a move when their agent died. Returns a sentence for each
/// slot where that failed.
pub fn repair(paths: &Paths, dir: &GroupDir) -> Vec<String> {
    let entries = repair_entries(paths, dir.name());
    if !entries.is_empty() {
        return entries;
    }
    let (Some(pinned), Ok(Some(state))) = (open(paths, dir.name()), dir.load()) else {
        return Vec::new();
    };
    if state.boot != state::boot_id() {
        return Vec::new();
    }
    let mut failures = Vec::new();
    for slot in moving(&pinned) {
        match reopen(&pinned, &state, slot) {
            Ok(()) => pinned.table().slot(slot).set_moving(false),
            Err(why) => failures.push(format!(
                "slot {slot} gets no connections: {why}; restart its worker"
            )),
        }
    }
    // Now that they listen, their workers may see them again.
    if failures.is_empty() {
        failures.extend(dir.taken_out().put_back().err().as_ref().map(not_back));
    }
    failures
}

/// Makes the entries of workers that share one queue as their server made them. Returns a sentence if that failed.
fn repair_entries(paths: &Paths, name: &str) -> Vec<String> {
    match group_table::repair_entries(paths, name) {
        Ok(()) => Vec::new(),
        Err(error) => vec![format!(
            "a worker may get no connections: its epoll entry cannot be made as it was: {error}; restart it"
        )],
    }
}

fn open(paths: &Paths, name: &str) -> Option<Pinned> {
    let pinned = Pinned::open(&paths.group_pins(name)).ok()?;
    (pinned.table().contract().load(Relaxed) == table::CONTRACT).then_some(pinned)
}

/// Returns the slots whose queues were being moved.
fn moving(pinned: &Pinned) -> Vec<usize> {
    let slots = (pinned.table().slots().load(Relaxed) as usize).min(table::MAX_SLOTS);
    let moving = |slot: &usize| pinned.table().slot(*slot).has(flag::MOVING);
    (0..slots).filter(moving).collect()
}

fn reopen(pinned: &Pinned, state: &State, slot: usize) -> Result<(), String> {
    let Some(known) = state.slots.get(slot) else {
        return Ok(());
    };
    // The sockets of a worker include those of UDP, which have a program and a table of their own. Only listeners are
    // closed for a move.
    let sockets = known.inodes.iter().zip(state.endpoints());
    let listeners = sockets.filter(|(_, endpoint)| !endpoint.udp);
    for (address, (inode, endpoint)) in listeners.enumerate() {
        // A socket that nobody holds any more is closed, and needs no repair.
        let Some(listener) = borrow(known, *inode) else {
            continue;
        };
        let limit = pinned.table().slot(slot).queue_limit().load(Relaxed);
        listen_again(&listener, endpoint.address, backlog(state, limit))
            .and_then(|()| {
                let put = pinned.put(address, slot, &listener);
                put.map_err(std::io::Error::other)
            })
            .map_err(|error| format!("its listener does not listen again: {error}"))?;
    }
    Ok(())
}

fn borrow(slot: &state::SlotRecord, inode: u64) -> Option<OwnedFd> {
    let worker = slot.worker.filter(|worker| worker.lives());
    worker
        .and_then(|worker| process::socket_of(worker.pid, inode))
        .or_else(|| process::socket_of_any(inode))
}

fn listen_again(listener: &OwnedFd, at: SocketAddr, backlog: i32) -> std::io::Result<()> {
    if socket::listens(listener) {
        return Ok(());
    }
    socket::listen_again(listener, at, backlog)
}

/// Returns the backlog. For our own servers it is written down. For an attached one, which has one address, it is the
/// limit that its agent saw.
fn backlog(state: &State, limit: u32) -> i32 {
    let limit = i32::try_from(limit).unwrap_or(i32::MAX);
    match (state.backlog, limit) {
        (1.., _) => state.backlog,
        // Longer than any: the kernel cuts it.
        (_, 0) => i32::MAX,
        (_, limit) => limit,
    }
}
