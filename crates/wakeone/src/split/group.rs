//! What split listeners of TCP and split UDP sockets have in common as steered groups: slots for their queues, what is
//! written down (for `status`, and for `detach` should `wakeone run` be killed), and the end.

use std::io;
use std::time::Instant;

use wakeone_kernel::capability;

use super::shared::FOR_LOADING;
use crate::agent::Agent;
use crate::move_log::MoveLog;
use crate::seat::Lent;
use crate::steer::Steer;
use crate::supervisor::listen::Endpoint;
use crate::supervisor::process::Identity;
use crate::supervisor::state::{self, GroupDir, State, Task};

/// A socket of the group, and who serves it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seated {
    /// Its slot. Where the kernel's hash chooses it is numbered in the order of the list instead.
    pub slot: Option<usize>,
    /// The process that serves it.
    pub pid: Option<u32>,
    /// The socket's inode.
    pub inode: u64,
}

/// What to write down.
#[derive(Debug)]
pub(super) struct Record<'a> {
    /// The group's name.
    pub name: String,
    /// Where it listens.
    pub listen: Endpoint,
    /// Length of each accept queue.
    pub backlog: i32,
    /// Who steers it, if anybody does.
    pub agent: Option<&'a Agent>,
    /// Its sockets that are served.
    pub seated: Vec<Seated>,
}

impl Record<'_> {
    /// Writes it into the group's folder, now or as soon as that can be done. Steering goes on meanwhile.
    pub fn store(self, dir: &GroupDir) {
        let listen = self.listen;
        match self.state() {
            Ok(state) => dir.keep(&state),
            Err(error) => tracing::warn!("{listen}: {error}"),
        }
    }

    fn state(self) -> io::Result<State> {
        let slots = match self.agent {
            Some(agent) => agent.tell(|d| d.slots()).unwrap_or(0),
            None => self.seated.len(),
        };
        let empty = || state::Slot {
            worker: None,
            current: true,
            inodes: Vec::new(),
            beside: None,
        };
        let mut table: Vec<state::Slot> =
            std::iter::repeat_with(empty).take(slots.max(1)).collect();
        for (number, seated) in self.seated.iter().enumerate() {
            let at = match self.agent {
                Some(_) => seated.slot,
                None => Some(number),
            };
            if let Some(slot) = at.and_then(|at| table.get_mut(at)) {
                slot.worker = seated.pid.and_then(|pid| Identity::of(pid).ok());
                slot.inodes = vec![seated.inode];
            }
        }
        Ok(State {
            schema: state::SCHEMA,
            name: self.name,
            boot: state::boot_id(),
            supervisor: Identity::of(std::process::id())?,
            listen: vec![self.listen],
            backlog: self.backlog.max(0),
            task: Task {
                command: vec![state::SPLIT.into()],
                account: None,
                keep_caps: Vec::new(),
            },
            slots: table,
            attached: true,
            reserved: Vec::new(),
        })
    }
}

/// Gives a queue a slot, or the one that it has to whom it is with now; None where it cannot be chosen. `at`: the address, for
/// what is said of that.
pub(super) fn seat(
    agent: &mut Agent,
    at: &str,
    slot: Option<usize>,
    cookie: u64,
    lent: Lent,
) -> Option<usize> {
    let slot = match slot {
        Some(slot) => {
            agent.tell(|d| d.lend(slot, lent));
            slot
        }
        None => match agent.tell(|d| d.join(cookie, lent))? {
            Ok(slot) => slot,
            Err(error) => {
                tracing::warn!("{at}: process {}: {error}", lent.pid);
                return None;
            }
        },
    };
    agent.worker_up(slot, lent.pid);
    Some(slot)
}

/// Nobody has the socket any more: takes program, pins and state away.
pub(super) fn end(agent: Option<Agent>, dir: Option<&GroupDir>) {
    if let Some(agent) = agent {
        capability::with(&FOR_LOADING, || agent.end());
    }
    if let Some(dir) = dir {
        dir.forget();
    }
}

/// What an agent saw.
pub(super) fn events(
    agent: &mut Option<Agent>,
    moves: &mut MoveLog,
) -> Vec<crate::steer::SteerEvent> {
    let seen = agent.as_mut().map(Steer::events).unwrap_or_default();
    moves.pass(Instant::now(), seen)
}
