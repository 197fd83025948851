//! The steerer of one queue: it looks as often as the real one, and `wakeone_model::arming` decides.

use wakeone_model::arming::{Arming, ArmingConfig, Change};

/// The state of the steerer.
#[derive(Debug)]
pub(crate) struct Steerer {
    arming: Arming,
    exclusive: bool,
    weights: Vec<u32>,
    /// Open connections of each worker.
    open: Vec<u64>,
}

impl Steerer {
    /// `weights`: one each, or none.
    pub(crate) fn new(
        config: ArmingConfig,
        exclusive: bool,
        workers: usize,
        weights: &[u32],
    ) -> Self {
        let mut steerer = Self {
            arming: Arming::new(config),
            exclusive,
            weights: weights.to_vec(),
            open: vec![0; workers],
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

    /// Looks at the counts, and at whether anything is queued. Returns the changes to make; they count as made.
    pub(crate) fn look(
        &mut self,
        queued: bool,
        waits: impl FnMut(usize) -> bool,
    ) -> Vec<(usize, Change)> {
        let counts = self.open.iter().copied().enumerate();
        self.arming.look(counts, queued, waits)
    }

    /// How long it is until the next look, in s.
    pub(crate) fn pause_s(&self) -> f64 {
        self.arming.pause().as_secs_f64()
    }
}
