//! A worker's life: start, ready, death, restart.

use super::Supervisor;
use super::closing::Closing;
use super::error::Error;
use super::process::{self, Ending};
use super::report;
use super::slot::{Phase, Worker};
use super::spawn::{self, Gate, Order, SpawnError};
use super::watch::Watch;
use super::wrapper;
use crate::notify::notify;
use rustix::io::Errno;
use sd_notify::NotifyState;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// A successor, in a slot whose workers are seen to accept, has this long to do so, or the roll stops.
pub(super) const START_LIMIT: Duration = Duration::from_secs(60);

/// Workers that are started while others serve begin their commands within this time, or the supervisor continues without
/// them.
pub(super) const RESTARTED_AT_ONCE: Duration = Duration::from_millis(200);

impl Supervisor {
    /// Starts a worker of a slot on these listeners. It also gets the sockets that reserve addresses.
    pub(super) fn start_on(
        &self,
        slot: usize,
        listeners: &[OwnedFd],
        gate: &Gate,
        quic_id: Option<u16>,
    ) -> Result<Worker, SpawnError> {
        let reserved = self.reserved.iter().flatten().map(|one| &one.socket);
        let given = listeners.iter().filter(|_| !self.opens_own());
        let sockets = given.chain(reserved);
        let order = Order {
            quic_id,
            ..self.order(slot)
        };
        let (process, exec_pipe) = spawn::begin(&order, sockets, gate)?;
        Ok(Worker::started(process, exec_pipe))
    }
}

impl Watch<'_> {
    /// Starts the workers of slots, side by side; returns those that could not be started. Each gets connections once it
    /// is ready; until then it drains.
    ///
    /// The state names them before they run their commands, see [`Gate`]. If it cannot be written, they run all the same.
    pub(super) fn spawn_all(
        &mut self,
        slots: &[usize],
        within: Duration,
    ) -> Vec<(usize, SpawnError)> {
        let gate = Gate::new();
        let begun: Vec<_> = slots
            .iter()
            .map(|slot| (*slot, self.begin(*slot, &gate)))
            .collect();
        self.persist();
        if let Ok(gate) = gate {
            gate.open(begun.iter().filter(|(_, begun)| begun.is_ok()).count());
        }
        let until = Instant::now() + within;
        let arrive = |(slot, begun): (usize, Result<(), SpawnError>)| {
            let result = begun.and_then(|()| self.arrived(slot, until));
            result.err().map(|error| (slot, error))
        };
        begun.into_iter().filter_map(arrive).collect()
    }

    fn begin(&mut self, slot: usize, gate: &Result<Gate, Errno>) -> Result<(), SpawnError> {
        let gate = gate.as_ref().map_err(|errno| io::Error::from(*errno))?;
        let listeners = &self.group.slots[slot].listeners;
        for (endpoint, listener) in self.group.endpoints.iter().zip(listeners) {
            if let Err(error) = self.group.refresh(endpoint, listener) {
                tracing::warn!(slot, "{error}");
            }
        }
        self.steer.drain(slot, true);
        let quic_id = self.steer.quic_id(slot, false);
        let worker = self.group.start_on(slot, listeners, gate, quic_id)?;
        self.group.slots[slot].adopt(worker);
        Ok(())
    }

    fn arrived(&mut self, slot: usize, until: Instant) -> Result<(), SpawnError> {
        let group = &mut self.group;
        let Some(worker) = group.slots[slot].worker_mut() else {
            return Ok(());
        };
        let pid = worker.process.pid();
        if let Err(error) = worker.arrive(until, &group.signals) {
            group.slots[slot].vacate();
            self.changed = true;
            return Err(error);
        }
        if worker.exec_pipe.is_some() && Instant::now() >= until {
            report::on_its_way(slot, pid, &group.task.command);
        }
        if !group.opens_own() {
            self.steer.worker_up(slot, pid);
        }
        Ok(())
    }

    /// Starts successors, now or, if that fails, later. All together have [`RESTARTED_AT_ONCE`] to begin their commands:
    /// the loop stands still meanwhile.
    pub(super) fn restart(&mut self, slots: &[usize]) {
        for (slot, error) in self.spawn_all(slots, RESTARTED_AT_ONCE) {
            self.retry_later(slot, Duration::ZERO, &report::no_start(slot, &error));
        }
        for slot in slots {
            if let Some(worker) = self.worker(*slot) {
                report::restart(*slot, worker.process.pid());
            }
        }
    }

    pub(super) fn retry_later(&mut self, slot: usize, ran: Duration, story: &str) {
        let slot_state = &mut self.group.slots[slot];
        let delay = slot_state
            .backoff
            .after(ran, rand::random_range(-1.0..=1.0));
        slot_state.phase = Phase::Waiting {
            until: Instant::now() + delay,
        };
        report::retry(slot, story, delay, slot_state.backoff.failures());
    }

    /// Handles workers that have ended.
    pub(super) fn reap(&mut self) -> Result<(), Error> {
        let failed = |source| Error::System {
            what: "look at a worker",
            source,
        };
        for slot in 0..self.group.slots.len() {
            let worker = self.group.slots[slot].worker_mut();
            let ending = worker
                .map_or(Ok(None), |worker| worker.process.ended())
                .map_err(failed)?;
            if let Some(ending) = ending {
                self.on_exit(slot, ending)?;
            }
            self.reap_beside(slot).map_err(failed)?;
        }
        let group = &self.group;
        process::reap_orphans(|pid| {
            group.remains.has(pid)
                || self.hook.as_ref().is_some_and(|hook| hook.is(pid))
                || group.everyone().any(|one| one.process.pid() == pid)
        });
        Ok(())
    }

    /// Handles the end of a worker. Its queue is moved first; everything else can wait.
    fn on_exit(&mut self, slot: usize, ending: Ending) -> Result<(), Error> {
        let queued = self.steer.queued(slot);
        if let Some(roll) = self.roll.as_mut().filter(|roll| roll.has_switched(slot)) {
            roll.give_up(report::ended_soon(slot));
        }
        if let Some(worker) = self.switch_back(slot) {
            report::switched_back(slot, &report::story(slot, &worker, ending, queued));
            self.bury(slot, worker);
            return Ok(());
        }
        self.steer.worker_down(slot);
        self.park(slot);
        self.changed = true;
        let Some(mut worker) = self.group.slots[slot].vacate() else {
            return Ok(());
        };
        let never_began = worker.never_began();
        let story = match &never_began {
            Some(error) => report::no_start(slot, error),
            None => report::story(slot, &worker, ending, queued),
        };
        let (ready, ran) = (worker.ready, worker.ran());
        self.bury(slot, worker);
        let rolled = self.roll.as_ref().is_some_and(|roll| roll.ends(slot));
        if self.closing.is_some() || rolled {
            report::end(slot, &story);
            return Ok(());
        }
        if let Some(error) = never_began
            && !self.announced
            && !self.group.adopted
        {
            return Err(error.into());
        }
        self.group.slots[slot].failed |= !ready;
        let all_failed = self.group.slots_in_use().iter().all(|slot| slot.failed);
        if all_failed && !self.announced && !self.group.adopted {
            let command = &self.group.task.command;
            let advice = wrapper::advice(command).unwrap_or_else(|| {
                let command = report::shown(command);
                format!("what it says is above, or run it alone: {command}")
            });
            return Err(Error::EndsAtOnce { advice, ending });
        }
        self.retry_later(slot, ran, &story);
        Ok(())
    }

    /// Has what a worker left in its process group end too.
    pub(super) fn bury(&mut self, slot: usize, worker: Worker) {
        let closing = self.closing.as_ref().map(Closing::kill_at);
        let kill_at = closing.unwrap_or_else(|| Instant::now() + self.group.grace);
        self.group.remains.add(slot, worker.process, kill_at);
        self.orphans.look_soon();
    }

    /// Starts workers whose restart is due.
    pub(super) fn restart_due(&mut self) {
        if self.closing.is_some() {
            return;
        }
        let now = Instant::now();
        let is_due = |slot: &usize| matches!(self.group.slots[*slot].phase, Phase::Waiting { until } if until <= now);
        let due: Vec<usize> = (0..self.group.in_use).filter(is_due).collect();
        if !due.is_empty() {
            self.restart(&due);
        }
    }

    /// Gives connections to workers that have become ready.
    pub(super) fn mark_ready(&mut self) {
        for slot in 0..self.group.in_use {
            for worker in self.group.slots[slot].everyone_mut() {
                worker.look_whether_begun();
            }
            if self.worker(slot).is_some_and(|worker| !worker.ready) {
                self.greet_worker(slot);
            }
            if self.group.slots[slot]
                .successor
                .as_ref()
                .is_some_and(|one| !one.ready)
            {
                self.greet_successor(slot);
            }
        }
        let all_ready = self
            .group
            .slots_in_use()
            .iter()
            .all(|slot| slot.worker().is_some_and(|worker| worker.ready));
        if all_ready && !self.announced && self.closing.is_none() {
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
        let sentence = report::ready(self.group.workers(), &places.join(", "));
        let pid = NotifyState::MainPid(std::process::id());
        notify(&[NotifyState::Ready, pid, NotifyState::Status(&sentence)]);
    }
}
