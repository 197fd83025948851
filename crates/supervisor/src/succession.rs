//! A new worker beside the old one: starts it, switches to it, and ends the old one.
//!
//! Each slot has a second listener for that, with the same number in the program's tables. One step changes which of
//! the two the program chooses. The old worker accepts the connections that wait in the other; if any are left, the
//! kernel moves them.

use super::report;
use super::retirement::Action;
use super::roll::Roll;
use super::slot::Worker;
use super::spawn::{Gate, SpawnError};
use super::watch::Watch;
use super::workers::RESTARTED_AT_ONCE;
use crate::Queue;
use nix::sys::signal::Signal;
use std::io;
use std::time::Instant;
use wakeone_control::privileges::FOR_THE_END;
use wakeone_kernel::{capability, socket};

impl Watch<'_> {
    /// Whether a second worker can be started in a slot.
    pub(super) fn can_start_beside(&self, slot: usize) -> bool {
        let place = &self.group.slots[slot];
        !place.spare.is_empty() && place.retiring.is_none() && self.steer.can_replace()
    }

    /// Starts a worker on a slot's spare listeners; it gets connections from [`Watch::switch`] on. If there is no
    /// room for it, the old one ends first.
    pub(super) fn start_beside(&mut self, slot: usize, roll: &mut Roll) {
        match self.try_start_beside(slot) {
            Ok(pid) => report::beside(slot, pid),
            Err(error) if error.is_shortage() => self.stop_first(slot, &error, roll),
            Err(error) => report::end(slot, &report::no_start(slot, &error)),
        }
    }

    fn try_start_beside(&mut self, slot: usize) -> Result<u32, SpawnError> {
        let spare = &self.group.slots[slot].spare;
        for (endpoint, listener) in self.group.endpoints.iter().zip(spare) {
            self.group
                .refresh(endpoint, listener)
                .map_err(|error| SpawnError::Exec(error.to_string()))?;
        }
        let gate = Gate::new().map_err(io::Error::from)?;
        let quic_id = self.steer.quic_id(slot, true);
        let worker = self.group.start_on(slot, spare, &gate, quic_id)?;
        let pid = worker.process.pid();
        self.group.slots[slot].successor = Some(worker);
        self.persist();
        gate.open(1);
        let until = Instant::now() + RESTARTED_AT_ONCE;
        let successor = &mut self.group.slots[slot].successor;
        if let Some(worker) = successor
            && let Err(error) = worker.arrive(until, &self.group.signals)
        {
            *successor = None;
            self.changed = true;
            return Err(error);
        }
        Ok(pid)
    }

    /// The worker beside the old one is ready: connections go to it, and the old one retires.
    pub(super) fn switch(&mut self, slot: usize, roll: &mut Roll) {
        let place = &self.group.slots[slot];
        let Some(pid) = place.successor.as_ref().map(|one| one.process.pid()) else {
            return;
        };
        if let Err(why) = self.steer.replace(slot, pid, &place.spare) {
            roll.give_up(report::not_switched(slot, &why));
            return self.end_successor(slot);
        }
        let grace = self.group.grace;
        self.group.slots[slot].switch(grace);
        self.begin_count(slot);
        self.changed = true;
        report::restart(slot, pid);
    }

    /// Handles the end of the worker that had taken over: the old one serves on, if it was not asked to end yet.
    /// Returns the worker that ended.
    pub(super) fn switch_back(&mut self, slot: usize) -> Option<Worker> {
        let place = &self.group.slots[slot];
        let old = place.retiring.as_ref()?.worker.as_ref()?;
        if old.asked.is_some() || self.closing.is_some() {
            return None;
        }
        let pid = old.process.pid();
        self.steer.replace(slot, pid, &place.spare).ok()?;
        self.changed = true;
        let grace = self.group.grace;
        self.group.slots[slot].switch_back(grace)
    }

    /// Ends a worker that was started beside another and is not wanted.
    pub(super) fn end_successor(&mut self, slot: usize) {
        if let Some(worker) = &mut self.group.slots[slot].successor {
            worker.asked = Some(Signal::SIGKILL);
            worker.process.kill();
        }
    }

    /// Handles second workers that have ended.
    pub(super) fn reap_beside(&mut self, slot: usize) -> std::io::Result<()> {
        let place = &mut self.group.slots[slot];
        let ending = place.successor.as_mut().map(|one| one.process.ended());
        if let Some(ending) = ending.transpose()?.flatten()
            && let Some(mut worker) = place.successor.take()
        {
            let story = match worker.never_began() {
                Some(error) => report::no_start(slot, &error),
                None => report::story(slot, &worker, ending, 0),
            };
            report::end(slot, &story);
            self.bury(slot, worker);
            self.close_spare(slot);
            self.changed = true;
        }
        let place = &mut self.group.slots[slot];
        if let Some(retiring) = &mut place.retiring {
            let ending = retiring.worker.as_mut().map(|one| one.process.ended());
            if let Some(ending) = ending.transpose()?.flatten()
                && let Some(worker) = retiring.worker.take()
            {
                report::end(slot, &report::story(slot, &worker, ending, 0));
                self.bury(slot, worker);
                self.changed = true;
            }
        }
        Ok(())
    }

    /// Continues to end workers that were replaced.
    pub(super) fn go_on_retiring(&mut self) {
        let now = Instant::now();
        let stop_signal = self.group.stop_signal;
        for slot in 0..self.group.slots.len() {
            let active = self.steer.active(slot);
            let left = match self.group.slots[slot].retiring {
                Some(_) => self.steer.left_behind(slot),
                None => None,
            };
            let place = &mut self.group.slots[slot];
            let Some(retiring) = &mut place.retiring else {
                continue;
            };
            if retiring.is_over() {
                place.retiring = None;
                self.steer.forget_replaced(slot);
                self.close_spare(slot);
                continue;
            }
            // The slot's open connections are those of both workers. Others accept the connections of a queue that all share.
            let queued = match self.group.queue {
                Queue::One => 0,
                Queue::Each => place.spare.iter().map(waiting).sum(),
            };
            let action = match left {
                Some(left) => {
                    let waits = (queued, active);
                    retiring.retirement.step_once_left(now, waits, left)
                }
                None => retiring.retirement.step(now, queued, active),
            };
            let Some(worker) = &mut retiring.worker else {
                continue;
            };
            match action {
                // While all workers drain, they are asked together.
                Some(Action::Terminate) => worker.terminate(stop_signal),
                Some(Action::Kill) => {
                    report::kill_one(slot);
                    worker.process.kill();
                }
                None => {}
            }
        }
    }

    /// Closes a slot's spare listeners until the next rolling restart: the kernel moves the connections that wait
    /// there. The sockets stay bound.
    fn close_spare(&mut self, slot: usize) {
        if self.group.queue == Queue::One {
            return; // they are everybody's
        }
        if self.group.opens_own() {
            return self.park_spare(slot);
        }
        for listener in &self.group.slots[slot].spare {
            if socket::listens(listener) {
                let _ = rustix::net::shutdown(listener, rustix::net::Shutdown::Read);
            }
        }
    }

    /// Prepares the end of all workers: those that get no connections yet end now, and spare listeners take none.
    pub(super) fn stop_succession(&mut self) {
        for slot in 0..self.group.slots.len() {
            let place = &mut self.group.slots[slot];
            if let Some(worker) = &mut place.successor {
                worker.terminate(self.group.stop_signal);
                self.close_spare(slot);
            } else if place.retiring.is_some() {
                let spare = &place.spare;
                capability::with(&FOR_THE_END, || {
                    for listener in spare.iter().filter(|one| socket::listens(one)) {
                        let _ = socket::drop_syns(listener);
                    }
                });
            }
        }
    }
}

fn waiting(listener: &std::os::fd::OwnedFd) -> u32 {
    socket::accept_queue(listener).map_or(0, |queue| queue.length)
}
