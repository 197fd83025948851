//! A slot: listeners that live as long as the group, and the worker that serves them now.

use super::adopt::inode_of;
use super::backoff::Backoff;
use super::elsewhere::Whereabouts;
use super::process::{Ending, Process};
use super::retirement::Retirement;
use super::settle::SETTLE;
use super::spawn::{SpawnError, Way};
use super::state;
use std::net::SocketAddr;
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
    /// It was asked to end.
    pub asked: bool,
    /// Where it was seen to listen instead of accepting on what it was given.
    pub elsewhere: Option<SocketAddr>,
    /// When that was looked for last, and what was seen.
    pub looked: Option<(Instant, Whereabouts)>,
    /// The log says that it listens nowhere.
    pub told_nowhere: bool,
    /// The log says what it may lack, since it does not accept.
    pub told_silent: bool,
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
            asked: false,
            elsewhere: None,
            looked: None,
            told_nowhere: false,
            told_silent: false,
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
            asked: false,
            elsewhere: None,
            looked: None,
            told_nowhere: false,
            told_silent: false,
        }
    }

    /// Asks it to end.
    pub fn terminate(&mut self) {
        self.asked = true;
        self.process.terminate();
    }

    /// Whether an end like this is the one that it was asked for.
    pub fn ended_well(&self, ending: Ending) -> bool {
        let by_request = ending == Ending::Signal(nix::libc::SIGTERM) || ending == Ending::Gone;
        self.asked && (by_request || ending == Ending::Status(0))
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

/// A worker that was replaced, on its way to its end. Its listeners are the slot's spare ones.
#[derive(Debug)]
pub struct Retiring {
    /// The worker; `None`: it has ended.
    pub worker: Option<Worker>,
    /// How it is brought to its end.
    pub retirement: Retirement,
    /// Since when its listeners are chosen no more.
    pub since: Instant,
}

impl Retiring {
    /// One that gets no connections from now on.
    pub fn new(worker: Option<Worker>, grace: Duration) -> Self {
        let since = Instant::now();
        Self {
            worker,
            retirement: Retirement::new(since, grace),
            since,
        }
    }

    /// Whether its listeners can be closed: nobody serves them, and no handshake is under way there.
    pub fn is_over(&self) -> bool {
        self.worker.is_none() && self.since.elapsed() >= SETTLE
    }
}

/// A slot of the group.
#[derive(Debug)]
pub struct Slot {
    /// A listener for each address.
    pub listeners: Vec<OwnedFd>,
    /// A second listener for each address, for a new worker that starts beside the old one. Empty: there are none.
    pub spare: Vec<OwnedFd>,
    /// The worker that starts on the spare listeners.
    pub successor: Option<Worker>,
    /// The worker that had the spare listeners until it was replaced.
    pub retiring: Option<Retiring>,
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
            spare: Vec::new(),
            successor: None,
            retiring: None,
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

    /// The same with listeners for a second worker.
    pub fn with_spare(mut self, spare: Vec<OwnedFd>) -> Self {
        self.spare = spare;
        self
    }

    /// All of its workers: the one that serves, its successor, and the one before it.
    pub fn everyone(&self) -> impl Iterator<Item = &Worker> {
        let retiring = self.retiring.as_ref().and_then(|one| one.worker.as_ref());
        self.worker()
            .into_iter()
            .chain(&self.successor)
            .chain(retiring)
    }

    /// The same, to change them.
    pub fn everyone_mut(&mut self) -> impl Iterator<Item = &mut Worker> {
        let worker = match &mut self.phase {
            Phase::Running(worker) => Some(worker),
            Phase::Empty | Phase::Waiting { .. } => None,
        };
        let retiring = self.retiring.as_mut().and_then(|one| one.worker.as_mut());
        worker
            .into_iter()
            .chain(&mut self.successor)
            .chain(retiring)
    }

    /// The successor takes over: the worker before it retires, on what are the spare listeners then.
    pub fn switch(&mut self, grace: Duration) {
        let Some(successor) = self.successor.take() else {
            return;
        };
        std::mem::swap(&mut self.listeners, &mut self.spare);
        self.retiring = Some(Retiring::new(self.vacate(), grace));
        self.adopt(successor);
    }

    /// Takes [`Slot::switch`] back: the worker that retires serves again. Gives the one that had taken over, if the old one
    /// is there and was not asked to end.
    pub fn switch_back(&mut self, grace: Duration) -> Option<Worker> {
        let old = self.retiring.as_mut()?.worker.take_if(|old| !old.asked)?;
        std::mem::swap(&mut self.listeners, &mut self.spare);
        // The other listeners are closed when no handshake is under way there: the kernel moves their queues then.
        self.retiring = Some(Retiring::new(None, grace));
        let ended = self.vacate();
        self.adopt(old);
        ended
    }

    /// Closes the listeners for a second worker, if there is none.
    pub fn give_up_spare(&mut self) {
        if self.successor.is_none() && self.retiring.is_none() {
            self.spare.clear();
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
            inodes: inodes(&self.listeners),
            beside: self.beside(),
        }
    }

    fn beside(&self) -> Option<state::Beside> {
        let retiring = self.retiring.as_ref().and_then(|one| one.worker.as_ref());
        let worker = self.successor.as_ref().or(retiring)?;
        Some(state::Beside {
            worker: worker.process.identity(),
            inodes: inodes(&self.spare),
        })
    }
}

/// By which listeners are found among a process's descriptors.
pub fn inodes(listeners: &[OwnedFd]) -> Vec<u64> {
    let inode = |fd| inode_of(fd).unwrap_or(0);
    listeners.iter().map(inode).collect()
}
