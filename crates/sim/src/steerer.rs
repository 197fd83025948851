//! The steerer of one queue: it looks as often as the real one, and `wakeone_model::arming` decides.

use std::time::Duration;

use wakeone_model::arming::{Arming, ArmingConfig, Change};
use wakeone_model::looks::{Budget, PROMPT};

/// The CPU time of a look, of each worker whose connections it counts, and of each change: about what they took on a CPU of 2023.
const LOOK: Duration = Duration::from_micros(12);
const WORKER: Duration = Duration::from_nanos(1_200);
const CHANGE: Duration = Duration::from_micros(30);

/// The state of the steerer.
#[derive(Debug)]
pub(crate) struct Steerer {
    arming: Arming,
    exclusive: bool,
    weights: Vec<u32>,
    /// Open connections of each worker.
    open: Vec<u64>,
    budget: Budget,
    /// When it last counted, and when it spent CPU time.
    counted_s: f64,
    spent_s: f64,
    /// When the next look is due, and whether it counts.
    due_s: f64,
    counts: bool,
}

impl Steerer {
    /// `weights`: one each, or none. `cpus`: one each, or so many.
    pub(crate) fn new(
        config: ArmingConfig,
        exclusive: bool,
        workers: usize,
        weights: &[u32],
        cpus: Option<usize>,
    ) -> Self {
        let mut steerer = Self {
            arming: Arming::new(config),
            exclusive,
            weights: weights.to_vec(),
            open: vec![0; workers],
            budget: Budget::of(cpus.unwrap_or(workers)),
            counted_s: 0.0,
            spent_s: 0.0,
            due_s: 0.0,
            counts: true,
        };
        steerer.weights.resize(workers, 1);
        (0..workers).for_each(|worker| steerer.join(worker));
        steerer
    }

    /// A worker has one more connection.
    #[inline]
    pub(crate) fn enter(&mut self, worker: usize) {
        self.open[worker] += 1;
    }

    /// A connection of a worker is closed.
    #[inline]
    pub(crate) fn leave(&mut self, worker: usize) {
        self.open[worker] -= 1;
    }

    /// A worker begins to wait for the queue.
    pub(crate) fn join(&mut self, worker: usize) {
        self.arming.join(worker, self.exclusive, self.open[worker]);
        self.arming.set(worker, self.weights[worker], false);
    }

    /// A worker has ended.
    pub(crate) fn end(&mut self, worker: usize) {
        self.arming.leave(worker);
    }

    /// A connection comes. Returns when a look follows that was due later.
    #[inline]
    pub(crate) fn ring(&mut self, now: f64) -> Option<f64> {
        let soon = now + PROMPT.as_secs_f64();
        (soon < self.due_s && self.arming.wants_bell()).then(|| {
            self.due_s = soon;
            self.counts |= self.budget.pace().prompt;
            soon
        })
    }

    /// Whether a look is due.
    pub(crate) fn is_due(&self, now: f64) -> bool {
        self.due_s <= now
    }

    /// Looks at the counts, and at whether anything is queued. Returns the changes to make; they count as made.
    pub(crate) fn look(
        &mut self,
        now: f64,
        queued: bool,
        waits: impl FnMut(usize) -> bool,
    ) -> Vec<(usize, Change)> {
        let (changes, workers) = match self.counts {
            true => {
                self.counted_s = now;
                let counts = self.open.iter().copied().enumerate();
                (self.arming.look(counts, queued, waits), self.open.len())
            }
            false => (self.arming.glance(queued, waits), 0),
        };
        let took = LOOK + WORKER * workers as u32 + CHANGE * changes.len() as u32;
        let spent_s = std::mem::replace(&mut self.spent_s, now);
        self.budget.spend(took, seconds(now - spent_s), self.counts);
        self.arming.set_pace(self.budget.pace());
        let since = seconds(now - self.counted_s);
        let next = self.budget.next(&self.arming.wants(), since);
        self.counts = next.counts;
        self.due_s = now + next.after.as_secs_f64();
        changes
    }

    /// When the next look is due, in s.
    pub(crate) fn due_s(&self) -> f64 {
        self.due_s
    }
}

fn seconds(time_s: f64) -> Duration {
    Duration::from_secs_f64(time_s)
}
