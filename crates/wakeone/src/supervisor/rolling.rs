//! Doing what a rolling restart asks for.

use super::report;
use super::roll::{Action, Roll, View};
use super::slot::{Phase, Worker};
use super::watch::{Watch, notify};
use super::workers::START_LIMIT;
use sd_notify::NotifyState;
use std::time::{Duration, Instant};

impl Watch<'_> {
    /// SIGHUP: all workers, now or after the roll that is under way.
    pub(super) fn begin_rolling(&mut self) {
        if self.roll.is_some() {
            self.roll_again = true;
            return report::roll_follows();
        }
        if let Ok(now) = NotifyState::monotonic_usec_now() {
            notify(&[NotifyState::Reloading, now]);
        }
        let all = (0..self.group.slots.len()).collect();
        self.roll("SIGHUP", all);
    }

    /// After a takeover: workers that run another command than the one asked for now.
    pub(super) fn replace_outdated(&mut self) {
        let outdated = |slot: &usize| self.worker(*slot).is_some_and(|worker| !worker.current);
        let slots: Vec<usize> = (0..self.group.slots.len()).filter(outdated).collect();
        if !slots.is_empty() {
            self.roll("the command changed", slots);
        }
    }

    fn roll(&mut self, why: &str, slots: Vec<usize>) {
        report::roll_begins(why);
        self.roll = Some(Roll::new(slots, self.group.grace, START_LIMIT));
    }

    pub(super) fn go_on_rolling(&mut self) {
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

    /// Does what a roll asks for; says whether it is over.
    fn act(&mut self, action: Action, roll: &Roll) -> bool {
        match action {
            Action::Drain(slot) => self.steer.drain(slot, true),
            Action::Terminate(slot) => self.group.slots[slot]
                .worker_mut()
                .into_iter()
                .for_each(Worker::terminate),
            Action::Kill(slot) => {
                report::kill_one(slot);
                self.worker(slot)
                    .into_iter()
                    .for_each(|worker| worker.process.kill());
            }
            Action::Start(slot) => self.restart(slot),
            Action::StartBeside(slot) => self.start_beside(slot),
            Action::Switch(slot) => self.switch(slot),
            Action::Replaced(_) => {}
            Action::Failed(slot) => {
                self.end_successor(slot);
                let kept = self.worker(slot).is_some_and(|worker| worker.ready);
                report::roll_failed(slot, roll, kept);
                if matches!(self.group.slots[slot].phase, Phase::Empty) {
                    self.retry_later(slot, Duration::ZERO, &format!("worker {slot} is missing"));
                }
            }
            Action::Finished => report::roll_done(roll),
        }
        matches!(action, Action::Failed(_) | Action::Finished)
    }
}
