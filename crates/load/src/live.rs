//! A running load: its counts so far, and the server that it goes to.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use wakeone_model::address::Address;

use crate::{Plan, Progress};

/// Counts and target of a running load. Any thread may read and change them while [`crate::observe_live`] sends.
#[derive(Debug)]
pub struct Live {
    targets: Vec<Address>,
    aim: AtomicUsize,
    threads: Vec<Shown>,
}

/// The counts of one sending thread. Each has cache lines of its own, because the threads write them after each
/// answer.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Shown {
    planned: AtomicU64,
    started: AtomicU64,
    completed: AtomicU64,
    errors: AtomicU64,
    in_flight: AtomicU64,
}

impl Live {
    /// Makes one for a plan that goes only to its own target.
    pub fn new(plan: &Plan) -> Self {
        Self::among(plan, [plan.target])
    }

    /// Makes one for a plan that can be aimed at each of these servers, the first one to begin with. The plan's own
    /// target is not among them unless it is named.
    ///
    /// # Panics
    /// Without any target.
    pub fn among(plan: &Plan, targets: impl IntoIterator<Item: Into<Address>>) -> Self {
        let targets: Vec<Address> = targets.into_iter().map(Into::into).collect();
        assert!(!targets.is_empty(), "a load goes somewhere");
        Self {
            targets,
            aim: AtomicUsize::new(0),
            threads: (0..plan.threads).map(|_| Shown::default()).collect(),
        }
    }

    /// Directs new connections to the target of this number from now on; open ones stay where they are. A number
    /// beyond the last target means the last one.
    pub fn aim(&self, target: usize) {
        self.aim.store(target.min(self.targets.len() - 1), Relaxed);
    }

    /// The target of new connections.
    pub fn target(&self) -> Address {
        self.targets[self.aim.load(Relaxed)]
    }

    /// 2xx answers so far, each counted when it is whole.
    pub fn completed(&self) -> u64 {
        let each = self
            .threads
            .iter()
            .map(|shown| shown.completed.load(Relaxed));
        each.sum()
    }

    /// All counts so far, as [`Progress`] without the time.
    pub(crate) fn progress(&self) -> Progress {
        let mut sum = Progress::default();
        for thread in &self.threads {
            sum.planned += thread.planned.load(Relaxed);
            sum.started += thread.started.load(Relaxed);
            sum.completed += thread.completed.load(Relaxed);
            sum.errors += thread.errors.load(Relaxed);
            sum.in_flight += thread.in_flight.load(Relaxed);
        }
        sum
    }

    pub(crate) fn show(&self, thread: usize, now: &Progress) {
        let shown = &self.threads[thread];
        shown.planned.store(now.planned, Relaxed);
        shown.started.store(now.started, Relaxed);
        shown.completed.store(now.completed, Relaxed);
        shown.errors.store(now.errors, Relaxed);
        shown.in_flight.store(now.in_flight, Relaxed);
    }

    pub(crate) fn answered(&self, thread: usize, completed: u64) {
        self.threads[thread].completed.store(completed, Relaxed);
    }
}
