//! A slot: listeners that live as long as the group, and the worker that serves them now.

use super::backoff::Backoff;
use super::elsewhere::Whereabouts;
use super::process::{Ending, Process};
use super::retirement::Retirement;
use super::settle::SETTLE;
use super::spawn::{ExecPipe, SpawnError};
use super::state;
use super::wear::{Limits, Progress};
use nix::sys::signal::Signal;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};
use wakeone_kernel::socket::inode_of;

/// A worker process in its slot.
#[derive(Debug)]
pub struct Worker {
    /// The process.
    pub process: Process,
    /// When it was started, or taken over.
    pub since: Instant,
    /// It was seen to accept, or is taken to accept.
    pub ready: bool,
    /// It runs the group's task, not an earlier one.
    pub current: bool,
    /// The pipe that tells when it begins its command; `None` once it has.
    pub exec_pipe: Option<ExecPipe>,
    /// Its limits, once it serves.
    pub limits: Limits,
    /// The connections of its slot before it.
    pub before: u64,
    /// Its progress since it accepted last.
    pub progress: Progress,
    /// The signal by which it was asked to end.
    pub asked: Option<Signal>,
    /// The address where it was seen to listen, instead of accepting on the listeners that it was given.
    pub elsewhere: Option<SocketAddr>,
    /// The last look for that: when, and the result.
    pub looked: Option<(Instant, Whereabouts)>,
    /// The last look for listeners that it opens itself.
    pub looked_own: Option<Instant>,
    /// The log already says that it listens nowhere.
    pub told_nowhere: bool,
    /// The log already says why it may not accept.
    pub told_silent: bool,
}

impl Worker {
    /// A worker just started.
    pub fn started(process: Process, exec_pipe: ExecPipe) -> Self {
        Self {
            exec_pipe: Some(exec_pipe),
            ready: false,
            ..Self::adopted(process, true)
        }
    }

    /// Waits for it to begin its command, as [`ExecPipe::arrived`] does.
    ///
    /// # Errors
    /// It cannot become the command. Its process has ended then.
    pub fn arrive(&mut self, until: Instant, signals: impl AsFd) -> Result<(), SpawnError> {
        let Some(pipe) = &mut self.exec_pipe else {
            return Ok(());
        };
        let arrived = pipe.arrived(until, signals);
        if arrived.is_err() {
            self.end_now();
        }
        if arrived? {
            self.exec_pipe = None;
            self.since = Instant::now();
        }
        Ok(())
    }

    /// Kills it, and waits for its end.
    pub fn end_now(&mut self) {
        self.process.kill();
        while let Ok(None) = self.process.ended() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Notes whether it has begun its command meanwhile.
    pub fn look_whether_begun(&mut self) {
        if self.exec_pipe.take_if(|pipe| pipe.is_over()).is_some() {
            self.since = Instant::now();
        }
    }

    /// Why its process, which has ended, never became the command.
    pub fn never_began(&mut self) -> Option<SpawnError> {
        self.exec_pipe.take()?.reason().ok()?
    }

    /// A worker taken over: it served all along.
    pub fn adopted(process: Process, current: bool) -> Self {
        Self {
            process,
            since: Instant::now(),
            ready: true,
            current,
            exec_pipe: None,
            limits: Limits::default(),
            before: 0,
            progress: Progress::default(),
            asked: None,
            elsewhere: None,
            looked: None,
            looked_own: None,
            told_nowhere: false,
            told_silent: false,
        }
    }

    /// Asks it to end.
    pub fn terminate(&mut self, signal: Signal) {
        self.asked = Some(signal);
        self.process.terminate(signal);
    }

    /// Whether an ending like this was requested.
    pub fn ended_well(&self, ending: Ending) -> bool {
        self.asked.is_some_and(|signal| match ending {
            Ending::Status(status) => status == 0,
            Ending::Signal(number) => number == signal as i32,
            Ending::Gone => true,
        })
    }

    /// How long it has run (for one taken over: since then).
    pub fn ran(&self) -> Duration {
        self.since.elapsed()
    }
}

/// The worker of a slot.
#[derive(Debug)]
pub enum Phase {
    /// No worker, until a caller starts one.
    Empty,
    /// No worker until that time.
    Waiting {
        /// When to start a worker.
        until: Instant,
    },
    /// A worker.
    Running(Box<Worker>),
}

/// A worker that was replaced and is to end. Its listeners are the slot's spare ones.
#[derive(Debug)]
pub struct Retiring {
    /// The worker; `None`: it has ended.
    pub worker: Option<Worker>,
    /// The steps of its end.
    pub retirement: Retirement,
    /// Since when its listeners are not chosen any more.
    pub since: Instant,
}

impl Retiring {
    /// A worker that gets no connections from now on.
    pub fn new(worker: Option<Worker>, grace: Duration) -> Self {
        let since = Instant::now();
        Self {
            worker,
            retirement: Retirement::new(since, grace),
            since,
        }
    }

    /// Whether its listeners can be closed: no worker serves them, and no handshake is under way there.
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
    /// The worker that serves them, if any.
    pub phase: Phase,
    /// The recent failures of its workers.
    pub backoff: Backoff,
    /// A worker of the slot ended before it was ready, and none has got ready since.
    pub failed: bool,
    /// A worker of the slot was seen to accept.
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
        self.phase = Phase::Running(Box::new(worker));
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

    /// The worker that serves them, or the one that starts beside it, with its listeners.
    pub fn with_listeners(&mut self, beside: bool) -> (Option<&mut Worker>, &mut Vec<OwnedFd>) {
        if beside {
            return (self.successor.as_mut(), &mut self.spare);
        }
        match &mut self.phase {
            Phase::Running(worker) => (Some(worker.as_mut()), &mut self.listeners),
            Phase::Empty | Phase::Waiting { .. } => (None, &mut self.listeners),
        }
    }

    /// Takes the worker out, which leaves the slot empty.
    pub fn vacate(&mut self) -> Option<Worker> {
        match std::mem::replace(&mut self.phase, Phase::Empty) {
            Phase::Running(worker) => Some(*worker),
            Phase::Empty | Phase::Waiting { .. } => None,
        }
    }

    /// The slot with listeners for a second worker.
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
            Phase::Running(worker) => Some(worker.as_mut()),
            Phase::Empty | Phase::Waiting { .. } => None,
        };
        let retiring = self.retiring.as_mut().and_then(|one| one.worker.as_mut());
        worker
            .into_iter()
            .chain(&mut self.successor)
            .chain(retiring)
    }

    /// The successor takes over. The worker before it retires, on the listeners that are the spare ones then.
    pub fn switch(&mut self, grace: Duration) {
        let Some(successor) = self.successor.take() else {
            return;
        };
        std::mem::swap(&mut self.listeners, &mut self.spare);
        self.retiring = Some(Retiring::new(self.vacate(), grace));
        self.adopt(successor);
    }

    /// Undoes [`Slot::switch`]: the worker that retires serves again. It must run, and must not have been asked to
    /// end. Returns the worker that had taken over.
    pub fn switch_back(&mut self, grace: Duration) -> Option<Worker> {
        let old = self
            .retiring
            .as_mut()?
            .worker
            .take_if(|old| old.asked.is_none())?;
        std::mem::swap(&mut self.listeners, &mut self.spare);
        // The other listeners are closed once no handshake is under way there: the kernel then moves their queues.
        self.retiring = Some(Retiring::new(None, grace));
        let ended = self.vacate();
        self.adopt(old);
        ended
    }

    /// Its worker, if it has one, retires as after [`Slot::switch`], and no other takes over.
    pub fn rest(&mut self, grace: Duration) {
        std::mem::swap(&mut self.listeners, &mut self.spare);
        self.retiring = Some(Retiring::new(self.vacate(), grace));
        self.backoff = Backoff::default();
        self.failed = false;
    }

    /// Closes the listeners for a second worker, if there is none.
    pub fn give_up_spare(&mut self) {
        if self.successor.is_none() && self.retiring.is_none() {
            self.spare.clear();
        }
    }

    /// Notes that its worker accepts.
    pub fn set_ready(&mut self) {
        self.failed = false;
        if let Some(worker) = self.worker_mut() {
            worker.ready = true;
        }
    }

    /// Its entry in the state file.
    pub fn state(&self) -> state::SlotRecord {
        state::SlotRecord {
            worker: self.worker().map(|worker| worker.process.identity()),
            current: self.worker().is_some_and(|worker| worker.current),
            inodes: inodes(&self.listeners),
            beside: self.beside(),
            orphaned: false,
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

/// The inodes of sockets, by which they are found among a process's descriptors.
pub fn inodes<'a>(sockets: impl IntoIterator<Item = &'a OwnedFd>) -> Vec<u64> {
    let inode = |fd| inode_of(fd).unwrap_or(0);
    sockets.into_iter().map(inode).collect()
}
