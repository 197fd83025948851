//! The supervisor's loop: it waits, then handles signals, deaths, due restarts, new workers, and the operations under
//! way.

use super::closing::Closing;
use super::error::Error;
use super::hook::Hook;
use super::listen::Endpoint;
use super::process::Identity;
use super::remains;
use super::report;
use super::roll::Roll;
use super::slot::{Phase, Worker};
use super::{Queue, Supervisor};
use crate::notify::Watchdog;
use nix::sys::signal::Signal;
use rustix::event::{PollFd, PollFlags};
use rustix::time::Timespec;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use wakeone_control::move_log::MoveLog;
use wakeone_control::orphans::OrphanLog;
use wakeone_control::state::{self, State};
use wakeone_control::steer::Steer;
use wakeone_kernel::socket;

/// The first workers begin their commands within this time, or the supervisor continues without them.
const STARTED_AT_ONCE: Duration = Duration::from_secs(10);

/// How often to look while something is under way that no descriptor reports.
const LOOK: Duration = Duration::from_millis(10);
/// How often to ask for events otherwise.
const IDLE: Duration = Duration::from_millis(200);

/// A run: the supervisor, and the operations under way. Its parts are in `workers`, `rolling` and `stopping`.
pub(super) struct Watch<'a> {
    pub(super) group: Supervisor,
    pub(super) steer: &'a mut dyn Steer,
    pub(super) roll: Option<Roll>,
    /// SIGHUP arrived during a roll: another one follows, from the start.
    pub(super) roll_again: bool,
    pub(super) closing: Option<Closing>,
    /// When to look next at what workers have had and do.
    pub(super) wear_due: Instant,
    /// The command about a worker that hangs.
    pub(super) hook: Option<Hook>,
    /// All workers were ready once.
    pub(super) announced: bool,
    /// The slots changed since the state was written.
    pub(super) changed: bool,
    /// A listener that a worker shut down could not listen again.
    gave_up_listening: bool,
    watchdog: Watchdog,
    moves: MoveLog,
    pub(super) orphans: OrphanLog,
}

impl Supervisor {
    /// Starts the workers that are missing and keeps them running until SIGTERM or SIGINT, then ends them.
    ///
    /// # Errors
    /// The first workers cannot be started, or all end before they are ready: nothing is left then. A failure of the
    /// loop itself (poll, read) ends it and leaves the workers serving, for the next supervisor to take over.
    pub fn run(self, steer: &mut dyn Steer) -> Result<(), Error> {
        self.listen(|_| {})?; // if no caller did before
        let mut watch = Watch {
            group: self,
            steer,
            roll: None,
            roll_again: false,
            closing: None,
            wear_due: Instant::now(),
            hook: None,
            announced: false,
            changed: true,
            gave_up_listening: false,
            watchdog: Watchdog::from_env(),
            moves: MoveLog::default(),
            orphans: OrphanLog::default(),
        };
        let result = watch.start().and_then(|()| watch.watch());
        if result.as_ref().is_err_and(|error| !error.leaves_workers()) {
            watch.abandon();
        }
        result
    }

    pub(super) fn workers(&self) -> impl Iterator<Item = &Worker> {
        self.slots.iter().filter_map(|slot| slot.worker())
    }

    /// The workers in the slots, and the second workers of a rolling restart.
    pub(super) fn everyone(&self) -> impl Iterator<Item = &Worker> {
        self.slots.iter().flat_map(|slot| slot.everyone())
    }

    pub(super) fn everyone_mut(&mut self) -> impl Iterator<Item = &mut Worker> {
        self.slots.iter_mut().flat_map(|slot| slot.everyone_mut())
    }
}

impl Watch<'_> {
    fn start(&mut self) -> Result<(), Error> {
        let mut missing = Vec::new();
        for slot in 0..self.group.in_use {
            if let Some(worker) = self.worker(slot) {
                let pid = worker.process.pid();
                report::adopted(slot, pid);
                if !worker.ready {
                    continue;
                }
                self.steer.worker_up(slot, pid);
                self.begin_count(slot);
                self.steer.drain(slot, false); // the last supervisor may have died while it drained
            } else {
                missing.push(slot);
            }
        }
        for (slot, error) in self.spawn_all(&missing, STARTED_AT_ONCE) {
            if !self.group.adopted {
                return Err(error.into());
            }
            self.retry_later(slot, Duration::ZERO, &report::no_start(slot, &error));
        }
        self.persist();
        self.orphans.look_soon(); // of workers that ended while nobody watched
        self.replace_outdated();
        Ok(())
    }

    fn watch(&mut self) -> Result<(), Error> {
        loop {
            self.watchdog.feed();
            self.wait()?;
            self.read_signals()?;
            self.reap()?;
            self.keep_listening();
            self.group.remains.go_on(Instant::now());
            self.restart_due();
            self.mark_ready();
            self.go_on_retiring();
            self.go_on_rolling();
            self.go_on_scaling();
            self.replace_worn();
            if self.go_on_stopping() {
                self.group.dir.forget();
                report::stopped();
                return Ok(());
            }
            let seen = self.moves.pass(Instant::now(), self.steer.events());
            seen.into_iter().for_each(report::steering);
            self.name_orphans();
            if self.changed {
                self.persist();
            }
            self.group.dir.catch_up();
        }
    }

    /// The listeners that all share, which one worker may shut down for all.
    fn kept_listening(&self) -> impl Iterator<Item = (&Endpoint, &OwnedFd)> {
        let all = self.group.shared();
        all.filter(|_| self.closing.is_none() && !self.gave_up_listening)
    }

    /// Has those listen again that a worker shut down.
    fn keep_listening(&mut self) {
        let mut failed = false;
        for (endpoint, listener) in self.kept_listening() {
            if socket::listens(listener) {
                continue;
            }
            match self.group.refresh(endpoint, listener) {
                Ok(()) => report::listens_again(endpoint),
                Err(error) => {
                    tracing::error!("a worker shut down {endpoint}: {error}");
                    failed = true;
                }
            }
        }
        self.gave_up_listening |= failed;
    }

    /// Names processes that keep a listener. Those that were asked to end have some time for that.
    fn name_orphans(&mut self) {
        let group = &self.group;
        if self.closing.is_none() && group.remains.count() == 0 {
            self.orphans
                .look(|| Some(group.state(Identity::of(std::process::id()).ok()?)));
        }
    }

    pub(super) fn worker(&self, slot: usize) -> Option<&Worker> {
        self.group.slots[slot].worker()
    }

    /// Sleeps until a signal comes, a worker ends, or something is due.
    fn wait(&self) -> Result<(), Error> {
        let pidfds: Vec<_> = self
            .group
            .everyone()
            .map(|worker| worker.process.pidfd())
            .collect();
        let mut fds = vec![PollFd::new(&self.group.signals, PollFlags::IN)];
        fds.extend(pidfds.iter().map(|pidfd| PollFd::new(pidfd, PollFlags::IN)));
        // Without a flag poll tells that one was shut down (POLLHUP).
        let shared = self.kept_listening();
        fds.extend(shared.map(|(_, one)| PollFd::new(one, PollFlags::empty())));
        let due = Timespec::try_from(self.next_look()).ok();
        match rustix::event::poll(&mut fds, due.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(Error::System {
                what: "wait for workers",
                source: errno.into(),
            }),
        }
    }

    fn next_look(&self) -> Duration {
        let starting = self.group.everyone().any(|worker| !worker.ready);
        let retiring = self.group.slots.iter().any(|slot| slot.retiring.is_some());
        if starting || retiring || self.roll.is_some() || self.closing.is_some() {
            return LOOK;
        }
        let now = Instant::now();
        let restarts = self.group.slots.iter().filter_map(|slot| match slot.phase {
            Phase::Waiting { until } => Some(until.saturating_duration_since(now)),
            _ => None,
        });
        restarts
            .chain(self.watchdog.due())
            .chain((self.group.remains.count() > 0).then_some(remains::LOOK))
            .fold(IDLE, Duration::min)
    }

    fn read_signals(&mut self) -> Result<(), Error> {
        let failed = |source| Error::System {
            what: "read signals",
            source,
        };
        while let Some(signal) = self.group.signals.next().map_err(failed)? {
            match signal {
                Signal::SIGHUP if self.closing.is_none() => self.begin_rolling(),
                Signal::SIGTTIN if self.closing.is_none() => self.scale(signal, 1),
                Signal::SIGTTOU if self.closing.is_none() => self.scale(signal, -1),
                Signal::SIGTERM | Signal::SIGINT => self.begin_stopping(signal),
                _ => {}
            }
        }
        Ok(())
    }

    /// Writes the state down. If that fails, we continue and try again later: only a takeover would miss it.
    pub(super) fn persist(&mut self) {
        self.changed = false;
        match Identity::of(std::process::id()) {
            Ok(own) => {
                let fixed = self.fixed().map(str::to_owned);
                let state = self.group.state(own);
                self.group.dir.keep(&State { fixed, ..state });
            }
            Err(source) => tracing::warn!(
                "{}",
                Error::System {
                    what: "read its own start time",
                    source,
                }
            ),
        }
    }
}

impl Supervisor {
    fn state(&self, supervisor: Identity) -> State {
        State {
            attached: false,
            one_queue: self.queue == Queue::One,
            reserved: self.reserved_state(),
            schema: state::SCHEMA,
            name: self.dir.name().to_owned(),
            boot: state::boot_id(),
            supervisor,
            listen: self.endpoints.iter().copied().map(Into::into).collect(),
            backlog: self.backlog,
            task: self.task.clone(),
            slots: self.slots.iter().map(|slot| self.record(slot)).collect(),
            workers: self.workers,
            serving: self.serving(),
            fixed: None,
            network: None,
        }
    }
}
