//! Carries out the actions of a rolling restart.

use super::report;
use super::roll::{Action, Roll, View};
use super::slot::Phase;
use super::spawn::{self, SpawnError};
use super::watch::Watch;
use super::workers::START_LIMIT;
use crate::notify::notify;
use sd_notify::NotifyState;
use std::time::{Duration, Instant};

impl Watch<'_> {
    /// SIGHUP: restarts all workers, now or after the roll that is under way.
    pub(super) fn begin_rolling(&mut self) {
        if self.roll.is_some() {
            self.roll_again = true;
            return report::roll_follows();
        }
        if let Ok(now) = NotifyState::monotonic_usec_now() {
            notify(&[NotifyState::Reloading, now]);
        }
        let all = (0..self.group.in_use).collect();
        self.roll("SIGHUP", all);
    }

    /// After a takeover: replaces workers whose command differs from the present one.
    pub(super) fn replace_outdated(&mut self) {
        let outdated = |slot: &usize| self.worker(*slot).is_some_and(|worker| !worker.current);
        let slots: Vec<usize> = (0..self.group.in_use).filter(outdated).collect();
        if !slots.is_empty() {
            self.roll("the command changed", slots);
        }
    }

    pub(super) fn roll(&mut self, why: &str, slots: Vec<usize>) {
        report::roll_begins(why);
        self.roll = Some(Roll::new(slots, self.group.grace, START_LIMIT));
    }

    pub(super) fn go_on_rolling(&mut self) {
        let Some(mut roll) = self.roll.take() else {
            return;
        };
        let now = Instant::now();
        while let Some(action) = roll.step(now, |slot| self.view(slot)) {
            if self.act(action, &mut roll) {
                notify(&[NotifyState::Ready]);
                if std::mem::take(&mut self.roll_again) {
                    self.begin_rolling();
                }
                return;
            }
        }
        self.roll = Some(roll);
    }

    fn view(&self, slot: usize) -> View {
        let worker = self.worker(slot);
        let place = &self.group.slots[slot];
        View {
            alive: worker.is_some(),
            ready: worker.is_some_and(|worker| worker.ready),
            queued: self.steer.queued(slot),
            active: self.steer.active(slot),
            spare: self.can_start_beside(slot),
            successor: place.successor.as_ref().map(|worker| worker.ready),
            retiring: place.retiring.is_some(),
        }
    }

    /// Does what a roll asks for; returns whether it is over.
    fn act(&mut self, action: Action, roll: &mut Roll) -> bool {
        match action {
            Action::Drain(slot) => self.drain_for(slot, roll),
            Action::Terminate(slot) => {
                let signal = self.group.stop_signal;
                if let Some(worker) = self.group.slots[slot].worker_mut() {
                    worker.terminate(signal);
                }
            }
            Action::Kill(slot) => {
                report::kill_one(slot);
                self.worker(slot)
                    .into_iter()
                    .for_each(|worker| worker.process.kill());
            }
            Action::Start(slot) => self.restart(&[slot]),
            Action::StartBeside(slot) => self.start_beside(slot, roll),
            Action::Switch(slot) => self.switch(slot, roll),
            Action::Replaced(_) => {}
            Action::Failed(slot) => self.fail(slot, roll),
            Action::Finished => report::roll_done(roll),
        }
        matches!(action, Action::Failed(_) | Action::Finished)
    }

    /// Lets a slot drain whose old worker is to end before the new one starts. If no other could be started, the old
    /// one stays.
    fn drain_for(&mut self, slot: usize, roll: &mut Roll) {
        match spawn::has_room(&self.group.order(slot)) {
            Ok(()) => self.steer.drain(slot, true),
            Err(error) => roll.give_up(report::no_room(slot, &error)),
        }
    }

    fn fail(&mut self, slot: usize, roll: &Roll) {
        self.wear_again_later();
        self.end_successor(slot);
        let kept = self.worker(slot).is_some_and(|worker| worker.ready);
        report::roll_failed(slot, roll, kept);
        if matches!(self.group.slots[slot].phase, Phase::Empty) {
            self.retry_later(slot, Duration::ZERO, &format!("worker {slot} is missing"));
        }
    }

    /// There is no room for one worker more: in this rolling restart, the old ones end first. If descriptors are
    /// short, the spare listeners are closed for good, which leaves some for the next worker.
    pub(super) fn stop_first(&mut self, slot: usize, why: &SpawnError, roll: &mut Roll) {
        if why.lacks_descriptors() {
            for place in &mut self.group.slots {
                place.give_up_spare();
            }
        }
        report::stop_first(why);
        roll.stop_first(Instant::now());
        self.drain_for(slot, roll);
    }
}
