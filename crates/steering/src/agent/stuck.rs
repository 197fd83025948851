//! The part of a round that finds stuck workers, and looks after them until they are well again.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use wakeone_bpf::table::flag;
use wakeone_model::judge::{self, Limits, ProgressBaseline, SlotSample, WorkerState};

use super::state::Core;
use wakeone_control::steer::SteerEvent;

/// How long a worker must have been stuck for its return to be an event.
const NEWSWORTHY: Duration = Duration::from_secs(1);

impl Core {
    pub(super) fn judge(&mut self, samples: &[SlotSample]) {
        let now = self.now_ns();
        let limits = Limits {
            stuck_after_ns: self.config.stuck_after.as_nanos() as u64,
        };
        for slot in 0..samples.len() {
            self.see_read(slot, &samples[slot], now);
            let history = &mut self.slots[slot].history;
            let suspect = judge::suspect(now, &samples[slot], history, limits);
            if !history.is_on_trial() {
                self.pass_trial(slot, now);
            }
            if !suspect {
                self.slots[slot].baseline = None;
            }
            if let Some(since) = self.slots[slot].history.stuck_since_ns {
                self.look_after(slot, samples, now, since);
            } else if suspect && self.is_stuck(slot, samples, now, limits) {
                self.find_stuck(slot, &samples[slot], now);
            }
        }
    }

    /// Marks a slot. A worker whose mark lapsed is no news if it is stuck still.
    fn find_stuck(&mut self, slot: usize, sample: &SlotSample, now: u64) {
        let cpu_ns = self.cpu_ns(slot);
        self.slots[slot].history.mark(now, sample, cpu_ns);
        self.mark(slot, flag::STUCK, true);
        let since = self.now_ns();
        self.slots[slot].avoid(since, false);
        if self.slots[slot].on_trial_since_ns.is_none() {
            self.event(SteerEvent::Stuck {
                slot,
                queued: sample.queued,
                unit: self.transport.unit(),
            });
        }
    }

    /// Returns the CPU time of those who accept in a slot.
    fn cpu_ns(&self, slot: usize) -> u64 {
        let pid = self.dispatcher.table().slot(slot).pid().load(Relaxed);
        self.slots[slot].acceptors.borrow().cpu_ns(pid)
    }

    /// Whether a suspect is stuck.
    fn is_stuck(&mut self, slot: usize, samples: &[SlotSample], now: u64, limits: Limits) -> bool {
        let sooner = self.another_sooner(slot, samples, now, limits);
        let mut history = self.slots[slot].history;
        let stuck = judge::stuck(sooner, &mut history, limits, || self.probe(slot));
        self.slots[slot].history = history;
        stuck
    }

    /// Takes the stuck mark off a UDP socket that is read now and then: a read is a sign of life by itself.
    fn see_read(&mut self, slot: usize, sample: &SlotSample, now: u64) {
        let history = &self.slots[slot].history;
        let Some(since) = history.stuck_since_ns else {
            return;
        };
        if self.transport.read_is_recovery()
            && judge::recovered(sample, history, WorkerState::Unknown)
        {
            self.resume(slot, now, since);
        }
    }

    /// Takes the mark off a slot that is well again.
    pub(super) fn resume(&mut self, slot: usize, now: u64, since: u64) {
        self.unmark(slot, now, since);
        self.slots[slot].history.end_trial();
        self.slots[slot].on_trial_since_ns.get_or_insert(since);
        self.pass_trial(slot, now);
    }

    /// Takes the mark off a slot of which nobody knows whether it is well again. It gets connections, and is marked
    /// anew if they wait.
    fn lapse(&mut self, slot: usize, now: u64, since: u64) {
        self.unmark(slot, now, since);
        self.slots[slot].history.begin_trial();
        self.slots[slot].on_trial_since_ns.get_or_insert(since);
    }

    fn unmark(&mut self, slot: usize, now: u64, since: u64) {
        let state = &mut self.slots[slot];
        state.history.stuck_since_ns = None;
        state.avoided = None;
        self.mark(slot, flag::STUCK, false);
        let place = self.dispatcher.table().slot(slot);
        let stuck_ns = now.saturating_sub(since);
        place.stuck_ns().fetch_add(stuck_ns, Relaxed);
    }

    /// Reports a worker that is well again.
    fn pass_trial(&mut self, slot: usize, now: u64) {
        let Some(since) = self.slots[slot].on_trial_since_ns.take() else {
            return;
        };
        let stuck_ns = now.saturating_sub(since);
        // The end of a long request is no news. The return of a worker is, if it was away long enough for a person to
        // notice.
        if stuck_ns >= NEWSWORTHY.as_nanos() as u64 {
            let after_ms = stuck_ns / 1_000_000;
            self.event(SteerEvent::Resumed { slot, after_ms });
        }
    }

    /// Whether the mark of a slot whose queue is empty lapses.
    fn has_lapsed(&mut self, slot: usize, sample: &SlotSample, now: u64) -> bool {
        let rescue = self.config.rescue
            && self.transport.can_move().is_ok()
            && self.slots[slot].may_try()
            && self.budget.allows(now);
        let history = &self.slots[slot].history;
        judge::lapses(now, sample, history, rescue, || {
            let doing = self.probes.insist(slot, || self.worker_state(slot));
            (doing, self.cpu_ns(slot))
        })
    }

    /// Looks after a slot that is marked stuck: it is well again, or it is time to move its queue. That time comes when
    /// the handshakes under way have ended, and again if one came late.
    fn look_after(&mut self, slot: usize, samples: &[SlotSample], now: u64, since: u64) {
        let may_move = self.may_move(slot, samples);
        let worker = if may_move {
            // It is about to be acted on, so the budget for reads does not count.
            self.probes.insist(slot, || self.worker_state(slot))
        } else {
            self.probe(slot)
        };
        if judge::recovered(&samples[slot], &self.slots[slot].history, worker) {
            self.resume(slot, now, since);
        } else if may_move && worker.is_elsewhere() {
            self.move_queue(slot);
        } else if self.has_lapsed(slot, &samples[slot], now) {
            self.lapse(slot, now, since);
        }
    }

    /// Whether another worker would serve this slot's queue sooner.
    fn another_sooner(
        &mut self,
        slot: usize,
        samples: &[SlotSample],
        now: u64,
        limits: Limits,
    ) -> bool {
        let others = || {
            let all = samples.iter().enumerate();
            all.filter(|(other, _)| *other != slot && !self.slots[*other].is_stuck())
        };
        let baseline = &self.slots[slot].baseline;
        let sooner = others().any(|(other, one)| judge::idle(one, || self.probe(other)))
            || baseline
                .as_ref()
                .is_some_and(|baseline| baseline.overtaken(now, others(), limits));
        if !sooner {
            let start = || ProgressBaseline::start(now, samples);
            self.slots[slot].baseline.get_or_insert_with(start);
        }
        sooner
    }
}
