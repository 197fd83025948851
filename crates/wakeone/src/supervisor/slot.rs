//! A slot: listeners that live as long as the group, and the worker that serves them now.

use super::adopt::inode_of;
use super::backoff::Backoff;
use super::process::Process;
use super::spawn::{SpawnError, Way};
use super::state;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// A worker process in its slot.
#[derive(Debug)]
pub struct Worker {
    /// The process.
    pub process: Process,
    /// When it was started, or taken over.
    pub since: Instant,
    /// It was seen to accept, or is taken to.
    pub ready: bool,
    /// It runs the group's task, not an earlier one.
    pub current: bool,
    /// It has not begun its command yet.
    pub way: Option<Way>,
}

impl Worker {
    /// A worker just started.
    pub fn started(process: Process, way: Option<Way>) -> Self {
        Self {
            process,
            since: Instant::now(),
            ready: false,
            current: true,
            way,
        }
    }

    /// Notes whether it has begun its command meanwhile.
    pub fn look_on_its_way(&mut self) {
        if self.way.take_if(|way| way.is_over()).is_some() {
            self.since = Instant::now();
        }
    }

    /// Why its process, which has ended, never became the command.
    pub fn never_began(&mut self) -> Option<SpawnError> {
        self.way.take()?.reason().ok()?
    }

    /// A worker taken over: it served all along.
    pub fn adopted(process: Process, current: bool) -> Self {
        Self {
            process,
            since: Instant::now(),
            ready: true,
            current,
            way: None,
        }
    }

    /// How long it has run (for one taken over: since then).
    pub fn ran(&self) -> Duration {
        self.since.elapsed()
    }
}

/// Who is in the slot.
#[derive(Debug)]
pub enum Phase {
    /// Nobody, until told otherwise.
    Empty,
    /// Nobody until then.
    Waiting {
        /// When to start a worker.
        until: Instant,
    },
    /// A worker.
    Running(Worker),
}

/// A slot of the group.
#[derive(Debug)]
pub struct Slot {
    /// A listener for each address.
    pub listeners: Vec<OwnedFd>,
    /// Who serves them.
    pub phase: Phase,
    /// How its workers failed lately.
    pub backoff: Backoff,
    /// A worker of it ended before it was ready, and none has got ready since.
    pub failed: bool,
    /// A worker of it was seen to accept.
    pub seen: bool,
}

impl Slot {
    /// An empty slot.
    pub fn new(listeners: Vec<OwnedFd>) -> Self {
        Self {
            listeners,
            phase: Phase::Empty,
            backoff: Backoff::default(),
            failed: false,
            seen: false,
        }
    }

    /// Puts a worker in.
    pub fn adopt(&mut self, worker: Worker) {
        self.phase = Phase::Running(worker);
    }

    /// The worker, if there is one.
    pub fn worker(&self) -> Option<&Worker> {
        if let Phase::Running(worker) = &self.phase {
            Some(worker)
        } else {
            None
        }
    }

    /// The worker, to change it.
    pub fn worker_mut(&mut self) -> Option<&mut Worker> {
        if let Phase::Running(worker) = &mut self.phase {
            Some(worker)
        } else {
            None
        }
    }

    /// Takes the worker out; nobody is in the slot then.
    pub fn vacate(&mut self) -> Option<Worker> {
        match std::mem::replace(&mut self.phase, Phase::Empty) {
            Phase::Running(worker) => Some(worker),
            Phase::Empty | Phase::Waiting { .. } => None,
        }
    }

    /// Its worker accepts.
    pub fn set_ready(&mut self) {
        self.failed = false;
        if let Some(worker) = self.worker_mut() {
            worker.ready = true;
        }
    }

    /// As it is written down.
    pub fn state(&self) -> state::Slot {
        state::Slot {
            worker: self.worker().map(|worker| worker.process.identity()),
            current: self.worker().is_some_and(|worker| worker.current),
            inodes: self
                .listeners
                .iter()
                .map(|fd| inode_of(fd).unwrap_or(0))
                .collect(),
        }
    }
}
