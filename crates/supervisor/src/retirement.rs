//! The end of one worker as a pure state machine: drain, ask, kill.

use super::settle::Settling;
use std::time::{Duration, Instant};

/// The longest wait for a worker's queue to empty before it is asked to end. The rest of the queue is then moved to
/// others.
pub const DRAIN: Duration = Duration::from_secs(5);

/// The next step in the end of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Ask it to end.
    Terminate,
    /// It did not end within the grace: kill it.
    Kill,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Draining(Settling),
    Stopping { kill_at: Option<Instant> },
}

/// A worker that gets no new connections and is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retirement {
    step: Step,
    begun: Instant,
    grace: Duration,
}

impl Retirement {
    /// Begins now: the worker has `grace` to end once it is asked to.
    pub fn new(now: Instant, grace: Duration) -> Self {
        Self {
            step: Step::Draining(Settling::until(now + DRAIN.min(grace))),
            begun: now,
            grace,
        }
    }

    /// The same for a worker that goes on with no connection once it is asked to end: it is asked when none is left, or after
    /// the grace, and gets a grace for the rest.
    pub fn step_once_left(
        &mut self,
        now: Instant,
        (queued, active): (u32, u64),
        left: u64,
    ) -> Option<Action> {
        if let Step::Draining(_) = self.step
            && left > 0
            && now < self.begun + self.grace
        {
            return None;
        }
        self.step(now, queued, active)
    }

    /// Returns the next thing to do about a living worker with so many connections queued and open; `None`: wait.
    pub fn step(&mut self, now: Instant, queued: u32, active: u64) -> Option<Action> {
        let due = match &mut self.step {
            Step::Draining(settling) => settling.is_over(now, queued, active),
            Step::Stopping { kill_at } => kill_at.is_some_and(|at| now >= at),
        };
        if !due {
            return None;
        }
        let (next, action) = match self.step {
            Step::Draining(_) => (Some(now + self.grace), Action::Terminate),
            Step::Stopping { .. } => (None, Action::Kill),
        };
        self.step = Step::Stopping { kill_at: next };
        Some(action)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays (tenths of a second, connections queued, connections open, what must follow) with a grace of 30 s.
    fn play(script: &[(u64, u32, u64, Option<Action>)]) {
        let start = Instant::now();
        let mut retirement = Retirement::new(start, Duration::from_secs(30));
        for (line, &(at, queued, active, action)) in script.iter().enumerate() {
            let now = start + Duration::from_millis(at * 100);
            let next = retirement.step(now, queued, active);
            assert_eq!(next, action, "line {line}");
        }
    }

    #[test]
    fn an_idle_worker_is_asked_soon_and_one_with_connections_a_little_later() {
        let ask = Some(Action::Terminate);
        play(&[(0, 0, 0, None), (1, 0, 0, ask), (2, 0, 0, None)]);
        play(&[(0, 0, 3, None), (9, 0, 3, None), (10, 0, 3, ask)]);
    }

    #[test]
    fn a_worker_that_would_drop_its_connections_is_asked_once_none_is_left() {
        let start = Instant::now();
        let step = |retirement: &mut Retirement, second, left| {
            retirement.step_once_left(start + Duration::from_secs(second), (0, 0), left)
        };
        for (left_until, asked) in [(7, 7), (100, 30)] {
            let mut retirement = Retirement::new(start, Duration::from_secs(30));
            for second in 0..asked {
                assert_eq!(step(&mut retirement, second, 3), None, "{second}");
            }
            let left = u64::from(asked < left_until);
            let asks = step(&mut retirement, asked, left);
            assert_eq!(asks, Some(Action::Terminate));
        }
    }

    #[test]
    fn a_queue_that_stays_and_a_worker_that_stays_are_not_waited_for_forever() {
        play(&[
            (0, 3, 3, None),
            (49, 3, 3, None),
            (50, 3, 3, Some(Action::Terminate)),
            (349, 3, 3, None),
            (350, 3, 3, Some(Action::Kill)),
            (351, 3, 3, None),
        ]);
    }
}
