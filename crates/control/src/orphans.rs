//! Processes that keep a listener of a group after the worker has ended that they inherited it from. They do not accept, and
//! the socket lives as long as they do.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use serde::Serialize;
use wakeone_kernel::proc::doing::{WorkerState, doing_below};
use wakeone_kernel::proc::stat::Stat;
use wakeone_kernel::proc::waits::Processes;

use crate::state::State;

/// A process that holds a slot's listener and does not accept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct Orphan {
    /// The process.
    pub pid: u32,
    /// The slot.
    pub slot: usize,
}

impl Orphan {
    /// Names it in a sentence.
    pub fn told(&self) -> String {
        format!(
            "process {} holds the listener of slot {} and does not accept: its worker has ended; no connection waits for it; end it by `kill {}`",
            self.pid, self.slot, self.pid
        )
    }
}

/// Finds those of a group among all processes.
pub fn find(state: &State, processes: &Processes) -> Vec<Orphan> {
    let slots: BTreeMap<u64, usize> = state
        .slots
        .iter()
        .enumerate()
        .flat_map(|(slot, record)| record.inodes.iter().map(move |inode| (*inode, slot)))
        .collect();
    let holders: HashSet<u32> = processes
        .held
        .iter()
        .filter(|held| slots.contains_key(&held.inode))
        .map(|held| held.pid)
        .collect();
    let parent = |pid: &u32| processes.identities.get(pid).map(|one| one.parent);
    let supervisor = state.supervisor.pid;
    // A process has its listeners from its parent. That of an orphan is gone; another one has adopted it.
    let is_root = |pid: u32| {
        parent(&pid).is_some_and(|parent| parent == supervisor || !holders.contains(&parent))
    };
    let related = kin(state, parent);
    let group = |pid: u32| Stat::of(pid).ok().map(|stat| stat.group);
    let ours = group(supervisor);
    let is_orphan = |pid: u32| {
        pid > 1 && is_root(pid) && !related.contains(&pid) && (ours.is_none() || group(pid) != ours)
    };
    let mut found: Vec<Orphan> = Vec::new();
    for held in &processes.held {
        let Some(slot) = slots.get(&held.inode).copied() else {
            continue;
        };
        let orphan = Orphan {
            pid: held.pid,
            slot,
        };
        let sleeps = || doing_below(held.pid, &state.slots[slot].inodes) == WorkerState::Busy;
        if !found.contains(&orphan) && is_orphan(held.pid) && sleeps() {
            found.push(orphan);
        }
    }
    found
}

/// The group's living workers, and all processes above them.
fn kin(state: &State, parent: impl Fn(&u32) -> Option<u32>) -> HashSet<u32> {
    let beside = state.slots.iter().filter_map(|slot| slot.beside.as_ref());
    let manned = state.slots.iter().filter(|slot| !slot.orphaned);
    let workers = manned.filter_map(|slot| slot.worker);
    let workers = workers.chain(beside.map(|beside| beside.worker));
    let mut kin = HashSet::from([state.supervisor.pid]);
    for worker in workers.filter(|worker| worker.lives()) {
        let above = std::iter::successors(Some(worker.pid), &parent);
        // A pid that is used again could make a circle.
        above.take_while(|pid| kin.insert(*pid)).for_each(drop);
    }
    kin
}

/// How long after a worker's end to look for what it left: helpers that notice its end have ended by then.
const LATER: Duration = Duration::from_secs(1);

/// Logs orphans, each once.
#[derive(Debug, Default)]
pub struct OrphanLog {
    due: Option<Instant>,
    told: HashSet<Orphan>,
}

impl OrphanLog {
    /// Looks a while from now: a worker has ended.
    pub fn look_soon(&mut self) {
        self.due.get_or_insert_with(|| Instant::now() + LATER);
    }

    /// Looks if that is due.
    pub fn look(&mut self, state: impl FnOnce() -> Option<State>) {
        if self.due.is_none_or(|due| Instant::now() < due) {
            return;
        }
        self.due = None;
        let Some(state) = state() else {
            return;
        };
        let found = find(&state, &Processes::read());
        for orphan in &found {
            if !self.told.contains(orphan) {
                tracing::warn!(
                    event = "orphan",
                    slot = orphan.slot,
                    pid = orphan.pid,
                    "{}",
                    orphan.told()
                );
            }
        }
        self.told = found.into_iter().collect();
    }
}
