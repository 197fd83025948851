//! Carries out the actions of a shutdown.

use super::closing::{Action, Closing};
use super::report;
use super::watch::Watch;
use crate::notify::notify;
use nix::sys::signal::Signal;
use sd_notify::NotifyState;
use std::time::Instant;

impl Watch<'_> {
    /// SIGTERM or SIGINT: closes the group. SIGINT while closing: ends the grace.
    pub(super) fn begin_stopping(&mut self, signal: Signal) {
        let now = Instant::now();
        match &mut self.closing {
            Some(closing) if signal == Signal::SIGINT => closing.hurry(now),
            Some(_) => {}
            None => {
                notify(&[NotifyState::Stopping]);
                self.roll = None;
                self.stop_succession();
                if self.group.refuse {
                    self.steer.refuse();
                } else {
                    self.steer.close();
                }
                report::stopping(signal, self.group.grace, self.group.refuse);
                self.closing = Some(Closing::new(now, self.group.grace));
            }
        }
    }

    /// Continues the shutdown, if one is under way; returns whether it is done.
    pub(super) fn go_on_stopping(&mut self) -> bool {
        let Some(closing) = &mut self.closing else {
            return false;
        };
        let alive = self.group.everyone().count() + self.group.remains.count();
        let slots = 0..self.group.in_use;
        let queued: u32 = slots.clone().map(|slot| self.steer.queued(slot)).sum();
        let queued = queued.saturating_add(self.steer.queued_for_all());
        let active = slots.map(|slot| self.steer.active(slot)).sum();
        match closing.step(Instant::now(), alive, queued, active) {
            Some(Action::Terminate) => {
                let signal = self.group.stop_signal;
                self.group
                    .everyone_mut()
                    .for_each(|worker| worker.terminate(signal));
            }
            Some(Action::Kill) => {
                report::kill_all(alive);
                self.group
                    .everyone()
                    .for_each(|worker| worker.process.kill());
                self.group.remains.hurry(Instant::now());
            }
            Some(Action::Finished) => return true,
            None => {}
        }
        false
    }

    /// Undoes a start that failed: no connection was served yet.
    pub(super) fn abandon(&mut self) {
        for worker in self.group.everyone_mut() {
            worker.end_now();
        }
        self.group.remains.kill();
        self.group.dir.forget();
    }
}
