//! The supervisor's loop: wait, then look at signals, deaths, restarts due, new workers, and what is under way.

use super::closing::{self, Closing};
use super::error::Error;
use super::process::{self, Ending};
use super::roll::{self, Roll};
use super::slot::{Phase, Worker};
use super::state::{SCHEMA, State};
use super::{Supervisor, listen, process::Identity, spawn};
use crate::steer::{Steer, SteerEvent};
use nix::sys::signal::Signal;
use rustix::event::{PollFd, PollFlags};
use rustix::process::Signal as SendSignal;
use rustix::time::Timespec;
use sd_notify::NotifyState;
use std::time::{Duration, Instant};

/// A worker of which nobody can say whether it accepts is taken to after this long.
const ALIVE_IS_READY: Duration = Duration::from_millis(500);
/// A worker that can be seen and is not seen to accept has this long to start.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How often to look while something is under way that no descriptor tells of.
const LOOK: Duration = Duration::from_millis(10);
/// How often to ask for events otherwise.
const IDLE: Duration = Duration::from_millis(200);

/// A run: the supervisor, and what is under way.
struct Watch<'a> {
    group: Supervisor,
    steer: &'a mut dyn Steer,
    roll: Option<Roll>,
    /// SIGHUP came during a roll: once more, from the start.
    roll_again: bool,
    closing: Option<Closing>,
    /// All workers were ready once.
    announced: bool,
    /// The slots changed since the state was written.
    changed: bool,
}

impl Supervisor {
    /// Starts the workers that are missing and keeps them running until SIGTERM or SIGINT, then ends them.
    ///
    /// # Errors
    /// The first workers cannot be started, or all end before they are ready: nothing is left then. What the loop
    /// itself cannot do (poll, read) ends it and leaves the workers serving, for the next supervisor to take over.
    pub fn run(self, steer: &mut dyn Steer) -> Result<(), Error> {
        let mut watch = Watch {
            group: self,
            steer,
            roll: None,
            roll_again: false,
            closing: None,
            announced: false,
            changed: true,
        };
        let result = watch.start().and_then(|()| watch.watch());
        if let Err(Error::Start(_) | Error::EndsAtOnce { .. }) = result {
            watch.abandon();
        }
        result
    }
}

impl Watch<'_> {
    fn start(&mut self) -> Result<(), Error> {
        for slot in 0..self.group.slots.len() {
            if let Some(worker) = self.group.slots[slot].worker() {
                let pid = worker.process.pid();
                tracing::info!(
                    event = "adopted",
                    slot,
                    pid,
                    "worker {slot} (pid {pid}) was found running and is taken over"
                );
                self.steer.worker_up(slot, pid);
            } else if let Err(error) = self.spawn(slot) {
                if !self.group.adopted {
                    return Err(error.into());
                }
                self.retry_later(
                    slot,
                    Duration::ZERO,
                    &format!("worker {slot} cannot be started: {error}"),
                );
            }
        }
        self.persist();
        let outdated: Vec<usize> = (0..self.group.slots.len())
            .filter(|slot| self.worker(*slot).is_some_and(|worker| !worker.current))
            .collect();
        if !outdated.is_empty() {
            tracing::info!(
                event = "roll",
                "the command changed: the workers taken over are replaced, one at a time"
            );
            self.roll = Some(Roll::new(outdated, self.group.grace, START_LIMIT));
        }
        Ok(())
    }

    fn watch(&mut self) -> Result<(), Error> {
        loop {
            self.wait()?;
            self.read_signals()?;
            self.bury()?;
            self.revive();
            self.greet();
            self.go_on_rolling();
            if self.go_on_closing() {
                self.group.dir.forget();
                tracing::info!(event = "stopped", "stopped");
                return Ok(());
            }
            self.relay();
            if self.changed {
                self.persist();
            }
        }
    }

    fn worker(&self, slot: usize) -> Option<&Worker> {
        self.group.slots[slot].worker()
    }

    /// Sleeps until a signal comes, a worker ends, or something is due.
    fn wait(&self) -> Result<(), Error> {
        let mut fds = vec![PollFd::new(&self.group.signals, PollFlags::IN)];
        let pidfds: Vec<_> = self
            .group
            .slots
            .iter()
            .filter_map(|slot| slot.worker())
            .map(|worker| worker.process.pidfd())
            .collect();
        fds.extend(pidfds.iter().map(|pidfd| PollFd::new(pidfd, PollFlags::IN)));
        let timeout = Timespec::try_from(self.next_look()).unwrap_or(Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        });
        match rustix::event::poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(Error::System {
                what: "wait for workers",
                source: errno.into(),
            }),
        }
    }

    fn next_look(&self) -> Duration {
        let starting = self
            .group
            .slots
            .iter()
            .filter_map(|slot| slot.worker())
            .any(|worker| !worker.ready);
        if starting || self.roll.is_some() || self.closing.is_some() {
            return LOOK;
        }
        let now = Instant::now();
        let restarts = self.group.slots.iter().filter_map(|slot| match slot.phase {
            Phase::Waiting { until } => Some(until.saturating_duration_since(now)),
            _ => None,
        });
        restarts.fold(IDLE, Duration::min)
    }

    fn read_signals(&mut self) -> Result<(), Error> {
        let failed = |source| Error::System {
            what: "read signals",
            source,
        };
        while let Some(signal) = self.group.signals.next().map_err(failed)? {
            match signal {
                Signal::SIGHUP if self.closing.is_none() => self.begin_rolling(),
                Signal::SIGTERM | Signal::SIGINT => self.begin_closing(signal),
                _ => {}
            }
        }
        Ok(())
    }

    /// Starts the worker of a slot. It gets connections once it is ready; until then it drains.
    fn spawn(&mut self, slot: usize) -> Result<u32, spawn::SpawnError> {
        for (endpoint, listener) in self
            .group
            .endpoints
            .iter()
            .zip(&self.group.slots[slot].listeners)
        {
            if let Err(error) = listen::refresh(*endpoint, listener, self.group.backlog) {
                tracing::warn!(slot, "{error}");
            }
        }
        self.steer.drain(slot, true);
        let process = spawn::spawn(&self.group.order(slot), &self.group.slots[slot].listeners)?;
        let pid = process.pid();
        self.group.slots[slot].adopt(Worker::started(process));
        self.steer.worker_up(slot, pid);
        self.changed = true;
        Ok(pid)
    }

    /// Deals with workers that have ended: their queue is moved first, all else can wait.
    fn bury(&mut self) -> Result<(), Error> {
        for slot in 0..self.group.slots.len() {
            let Some(worker) = self.group.slots[slot].worker_mut() else {
                continue;
            };
            let failed = |source| Error::System {
                what: "look at a worker",
                source,
            };
            if let Some(ending) = worker.process.ended().map_err(failed)? {
                self.lose(slot, ending)?;
            }
        }
        process::reap_orphans();
        Ok(())
    }

    fn lose(&mut self, slot: usize, ending: Ending) -> Result<(), Error> {
        let queued = self.steer.queued(slot);
        self.steer.worker_down(slot);
        self.changed = true;
        let Phase::Running(worker) =
            std::mem::replace(&mut self.group.slots[slot].phase, Phase::Empty)
        else {
            return Ok(());
        };
        let pid = worker.process.pid();
        let moved = if queued > 0 {
            format!("; its queue of {queued} was moved")
        } else {
            String::new()
        };
        let story = format!("worker {slot} (pid {pid}) {ending}{moved}");
        if self.closing.is_some()
            || self
                .roll
                .as_ref()
                .is_some_and(|roll| roll.slot() == Some(slot))
        {
            tracing::info!(event = "end", slot, pid, queued, "{story}");
            return Ok(());
        }
        self.group.slots[slot].failed |= !worker.ready;
        if !self.announced && !self.group.adopted && self.group.slots.iter().all(|slot| slot.failed)
        {
            return Err(Error::EndsAtOnce {
                command: shown(&self.group.task.command),
                ending: ending.to_string(),
            });
        }
        self.retry_later(slot, worker.ran(), &story);
        Ok(())
    }

    fn retry_later(&mut self, slot: usize, ran: Duration, story: &str) {
        let delay = self.group.slots[slot]
            .backoff
            .after(ran, rand::random_range(-1.0..=1.0));
        self.group.slots[slot].phase = Phase::Waiting {
            until: Instant::now() + delay,
        };
        let (restart_ms, failures) = (
            delay.as_millis() as u64,
            self.group.slots[slot].backoff.failures(),
        );
        let often = if failures > 2 {
            format!(" (failed {failures} times)")
        } else {
            String::new()
        };
        tracing::warn!(
            event = "death",
            slot,
            restart_ms,
            failures,
            "{story}; restart in {restart_ms} ms{often}"
        );
    }

    /// Starts workers whose time has come.
    fn revive(&mut self) {
        if self.closing.is_some() {
            return;
        }
        let now = Instant::now();
        for slot in 0..self.group.slots.len() {
            if matches!(self.group.slots[slot].phase, Phase::Waiting { until } if until <= now) {
                match self.spawn(slot) {
                    Ok(pid) => tracing::info!(
                        event = "restart",
                        slot,
                        pid,
                        "worker {slot} restarted as pid {pid}"
                    ),
                    Err(error) => self.retry_later(
                        slot,
                        Duration::ZERO,
                        &format!("worker {slot} cannot be started: {error}"),
                    ),
                }
            }
        }
    }

    /// Lets workers that have become ready have connections.
    fn greet(&mut self) {
        for slot in 0..self.group.slots.len() {
            let Some(worker) = self.worker(slot).filter(|worker| !worker.ready) else {
                continue;
            };
            let (ran, pid) = (worker.ran(), worker.process.pid());
            let ready = match self.steer.accepting(slot) {
                Some(seen) => seen || (ran >= START_LIMIT && self.roll.is_none()),
                None => ran >= ALIVE_IS_READY,
            };
            if ready {
                if ran >= START_LIMIT {
                    tracing::warn!(
                        slot,
                        pid,
                        "worker {slot} (pid {pid}) was never seen to accept; it is given connections now"
                    );
                }
                self.steer.drain(slot, false);
                let slot = &mut self.group.slots[slot];
                slot.failed = false;
                slot.worker_mut()
                    .into_iter()
                    .for_each(|worker| worker.ready = true);
            }
        }
        let all_ready = || {
            self.group
                .slots
                .iter()
                .all(|slot| slot.worker().is_some_and(|worker| worker.ready))
        };
        if !self.announced && self.closing.is_none() && all_ready() {
            self.announce();
        }
    }

    fn announce(&mut self) {
        self.announced = true;
        let places: Vec<String> = self
            .group
            .endpoints
            .iter()
            .map(ToString::to_string)
            .collect();
        let pids: Vec<String> = self
            .group
            .slots
            .iter()
            .filter_map(|slot| slot.worker())
            .map(|worker| worker.process.pid().to_string())
            .collect();
        let (count, places, pids) = (pids.len(), places.join(", "), pids.join(" "));
        let workers = if count == 1 { "worker" } else { "workers" };
        tracing::info!(
            event = "ready",
            workers = count,
            listen = places,
            pids,
            "ready: {count} {workers} on {places} (pid {pids})"
        );
        let status = format!("{count} {workers} on {places}");
        notify(&[
            NotifyState::Ready,
            NotifyState::MainPid(std::process::id()),
            NotifyState::Status(&status),
        ]);
    }

    fn begin_rolling(&mut self) {
        if self.roll.is_some() {
            self.roll_again = true;
            tracing::info!(
                event = "roll",
                "SIGHUP: a rolling restart is under way; another follows it"
            );
            return;
        }
        tracing::info!(
            event = "roll",
            "SIGHUP: rolling restart, a worker at a time"
        );
        if let Ok(now) = NotifyState::monotonic_usec_now() {
            notify(&[NotifyState::Reloading, now]);
        }
        self.roll = Some(Roll::new(
            0..self.group.slots.len(),
            self.group.grace,
            START_LIMIT,
        ));
    }

    fn go_on_rolling(&mut self) {
        let Some(mut roll) = self.roll.take() else {
            return;
        };
        let now = Instant::now();
        while let Some(action) = roll.step(now, |slot| self.view(slot)) {
            if self.act(action, &roll) {
                notify(&[NotifyState::Ready]);
                if std::mem::take(&mut self.roll_again) {
                    self.begin_rolling();
                }
                return;
            }
        }
        self.roll = Some(roll);
    }

    fn view(&self, slot: usize) -> roll::View {
        let worker = self.worker(slot);
        roll::View {
            alive: worker.is_some(),
            ready: worker.is_some_and(|worker| worker.ready),
            queued: self.steer.queued(slot),
        }
    }

    /// Does what a roll asks for; says whether it is over.
    fn act(&mut self, action: roll::Action, roll: &Roll) -> bool {
        match action {
            roll::Action::Drain(slot) => self.steer.drain(slot, true),
            roll::Action::Terminate(slot) => self
                .worker(slot)
                .into_iter()
                .for_each(|worker| worker.process.signal(SendSignal::TERM)),
            roll::Action::Kill(slot) => {
                tracing::warn!(
                    event = "kill",
                    slot,
                    "worker {slot} did not end within the grace and is killed"
                );
                self.worker(slot)
                    .into_iter()
                    .for_each(|worker| worker.process.kill());
            }
            roll::Action::Start(slot) => match self.spawn(slot) {
                Ok(pid) => tracing::info!(
                    event = "restart",
                    slot,
                    pid,
                    "worker {slot} restarted as pid {pid}"
                ),
                Err(error) => self.retry_later(
                    slot,
                    Duration::ZERO,
                    &format!("worker {slot} cannot be started: {error}"),
                ),
            },
            roll::Action::Replaced(_) => {}
            roll::Action::Failed(slot) => {
                let (replaced, left) = roll.progress();
                tracing::error!(
                    event = "roll",
                    slot,
                    replaced,
                    left,
                    "the rolling restart stops: the new worker {slot} did not get ready; {left} workers run on as they were"
                );
                self.give_back(slot);
                return true;
            }
            roll::Action::Finished => {
                let (replaced, _) = roll.progress();
                tracing::info!(
                    event = "roll",
                    replaced,
                    "rolling restart done: {replaced} workers replaced"
                );
                return true;
            }
        }
        false
    }

    /// After a failed roll its slot is restarted as any other.
    fn give_back(&mut self, slot: usize) {
        if matches!(self.group.slots[slot].phase, Phase::Empty) {
            self.retry_later(slot, Duration::ZERO, &format!("worker {slot} is missing"));
        }
    }

    fn begin_closing(&mut self, signal: Signal) {
        let now = Instant::now();
        match &mut self.closing {
            Some(closing) if signal == Signal::SIGINT => closing.hurry(now),
            Some(_) => {}
            None => {
                tracing::info!(
                    event = "stopping",
                    "{signal}: no new connections; workers have {:?} to end",
                    self.group.grace
                );
                notify(&[NotifyState::Stopping]);
                self.roll = None;
                self.steer.close();
                self.closing = Some(Closing::new(now, self.group.grace));
            }
        }
    }

    /// Goes on with the shutdown, if one is under way; says whether it is done.
    fn go_on_closing(&mut self) -> bool {
        let Some(closing) = &mut self.closing else {
            return false;
        };
        let workers: Vec<&Worker> = self
            .group
            .slots
            .iter()
            .filter_map(|slot| slot.worker())
            .collect();
        let queued = (0..self.group.slots.len())
            .map(|slot| self.steer.queued(slot))
            .sum();
        match closing.step(Instant::now(), workers.len(), queued) {
            Some(closing::Action::Terminate) => workers
                .iter()
                .for_each(|worker| worker.process.signal(SendSignal::TERM)),
            Some(closing::Action::Kill) => {
                tracing::warn!(
                    event = "kill",
                    "{} workers did not end in time and are killed",
                    workers.len()
                );
                workers.iter().for_each(|worker| worker.process.kill());
            }
            Some(closing::Action::Finished) => return true,
            None => {}
        }
        false
    }

    /// Undoes a start that failed: nothing was served yet.
    fn abandon(&mut self) {
        for slot in &mut self.group.slots {
            if let Some(worker) = slot.worker_mut() {
                worker.process.kill();
                while !matches!(worker.process.ended(), Ok(Some(_)) | Err(_)) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
        self.group.dir.forget();
    }

    fn relay(&mut self) {
        for event in self.steer.events() {
            match event {
                SteerEvent::Stuck { slot, queued } => {
                    tracing::info!(
                        event = "stuck",
                        slot,
                        queued,
                        "worker {slot} is stuck with {queued} connections waiting"
                    );
                }
                SteerEvent::Rescued {
                    slot,
                    moved,
                    took_us,
                } => {
                    tracing::info!(
                        event = "rescue",
                        slot,
                        moved,
                        took_us,
                        "{moved} connections of worker {slot} were moved to others in {took_us} µs"
                    );
                }
                SteerEvent::Resumed { slot, after_ms } => {
                    tracing::info!(
                        event = "resumed",
                        slot,
                        after_ms,
                        "worker {slot} accepts again after {after_ms} ms"
                    );
                }
                SteerEvent::Note(note) => tracing::info!(event = "note", "{note}"),
            }
        }
    }

    /// Writes the state down. Failing that, we go on: only a takeover would miss it.
    fn persist(&mut self) {
        self.changed = false;
        let written = Identity::of(std::process::id())
            .map_err(|source| Error::System {
                what: "read its own start time",
                source,
            })
            .and_then(|supervisor| Ok(self.group.dir.store(&self.group.state(supervisor))?));
        if let Err(error) = written {
            tracing::warn!("{error}");
        }
    }
}

impl Supervisor {
    fn state(&self, supervisor: Identity) -> State {
        State {
            schema: SCHEMA,
            name: self.dir.name().to_owned(),
            boot: super::state::boot_id(),
            supervisor,
            listen: self.endpoints.clone(),
            backlog: self.backlog,
            task: self.task.clone(),
            slots: self.slots.iter().map(|slot| slot.state()).collect(),
        }
    }
}

/// A command line as a person would type it.
fn shown(command: &[String]) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:=,@%+{}".contains(&byte);
    let quote = |word: &String| {
        if !word.is_empty() && word.bytes().all(plain) {
            word.clone()
        } else {
            format!("'{}'", word.replace('\'', "'\\''"))
        }
    };
    command.iter().map(quote).collect::<Vec<_>>().join(" ")
}

/// Tells the service manager, if there is one.
fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::debug!("cannot notify the service manager: {error}");
    }
}
