//! Virtual time, and the CPUs that workers share in it.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// A request that a worker is busy with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Running {
    /// How much every worker will have done when it is finished, in s of work.
    finish: f64,
    /// The worker that is busy with it.
    pub worker: usize,
    /// When it came.
    pub arrived: f64,
}

impl Eq for Running {}

impl Ord for Running {
    /// The first to finish is the greatest: `BinaryHeap` gives that first.
    fn cmp(&self, other: &Self) -> Ordering {
        let by_time = other.finish.total_cmp(&self.finish);
        by_time.then(other.worker.cmp(&self.worker))
    }
}

impl PartialOrd for Running {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// All requests under way. Busy workers share the CPUs evenly: each gets done as much as the others, at most a second of
/// work in a second. So one number, what each has done since the beginning, tells when all of them finish.
#[derive(Debug)]
pub(crate) struct Clock {
    now: f64,
    done: f64,
    cpus: f64,
    running: BinaryHeap<Running>,
}

impl Clock {
    /// `cpus`: infinite where work is waiting for something else.
    pub(crate) fn new(cpus: f64) -> Self {
        Self {
            now: 0.0,
            done: 0.0,
            cpus,
            running: BinaryHeap::with_capacity(64),
        }
    }

    pub(crate) fn now(&self) -> f64 {
        self.now
    }

    /// Work that gets done for each worker in a second.
    fn speed(&self) -> f64 {
        (self.cpus / self.running.len() as f64).min(1.0)
    }

    /// When the next request is finished.
    pub(crate) fn next(&self) -> Option<f64> {
        let next = self.running.peek()?;
        Some(self.now + (next.finish - self.done).max(0.0) / self.speed())
    }

    /// Goes on to a moment before which nothing finishes.
    pub(crate) fn advance(&mut self, to: f64) {
        if !self.running.is_empty() {
            self.done += (to - self.now) * self.speed();
        }
        self.now = to;
    }

    /// A worker begins.
    pub(crate) fn begin(&mut self, worker: usize, arrived: f64, work: f64) {
        self.running.push(Running {
            finish: self.done + work,
            worker,
            arrived,
        });
    }

    /// Goes on to the moment `at`, when the next request is finished, and ends it.
    pub(crate) fn finish(&mut self, at: f64) -> Option<Running> {
        let next = *self.running.peek()?;
        self.now = at;
        self.done = next.finish;
        self.running.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times and workers of all that finishes.
    fn finished(clock: &mut Clock) -> Vec<(f64, usize)> {
        std::iter::from_fn(|| {
            let at = clock.next()?;
            clock.finish(at).map(|running| (at, running.worker))
        })
        .collect()
    }

    #[test]
    fn each_worker_with_a_cpu_works_for_itself() {
        let mut clock = Clock::new(2.0);
        clock.begin(0, 0.0, 3.0);
        clock.begin(1, 0.0, 1.0);
        assert_eq!(finished(&mut clock), [(1.0, 1), (3.0, 0)]);
    }

    #[test]
    fn three_on_two_cpus_have_two_thirds_each() {
        let mut clock = Clock::new(2.0);
        for worker in 0..3 {
            clock.begin(worker, 0.0, 2.0);
        }
        let times: Vec<f64> = finished(&mut clock).iter().map(|(at, _)| *at).collect();
        assert_eq!(times, [3.0, 3.0, 3.0]);
    }

    #[test]
    fn who_comes_later_slows_the_others_from_then_on() {
        let mut clock = Clock::new(1.0);
        clock.begin(0, 0.0, 2.0);
        clock.advance(1.0);
        clock.begin(1, 1.0, 0.5);
        // Half each: the later one needs a second, the first has a half left then.
        assert_eq!(finished(&mut clock), [(2.0, 1), (2.5, 0)]);
    }
}
