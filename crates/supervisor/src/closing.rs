//! The end of a group as a pure state machine: drain, ask, kill.

use super::settle::Settling;
use std::time::{Duration, Instant};

/// The next step of a shutdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Ask all workers to end.
    Terminate,
    /// The grace is over: make them end.
    Kill,
    /// No worker is left.
    Finished,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Draining,
    Stopping,
    Killed,
}

/// A shutdown under way. Queues have half the grace to empty, so that the other half is left for requests that are
/// being served.
#[derive(Debug)]
pub struct Closing {
    step: Step,
    settling: Settling,
    kill_at: Instant,
}

impl Closing {
    /// A shutdown that begins now.
    pub fn new(now: Instant, grace: Duration) -> Self {
        Self {
            step: Step::Draining,
            settling: Settling::until(now + grace / 2),
            kill_at: now + grace,
        }
    }

    /// When the grace ends.
    pub fn kill_at(&self) -> Instant {
        self.kill_at
    }

    /// Ends the grace: the next step kills.
    pub fn hurry(&mut self, now: Instant) {
        self.kill_at = now;
    }

    /// Returns the next thing to do; `None`: wait. There are `alive` workers, with `queued` connections in their
    /// queues and `active` ones open.
    pub fn step(&mut self, now: Instant, alive: usize, queued: u32, active: u64) -> Option<Action> {
        let (next, action) = match self.step {
            _ if alive == 0 => return Some(Action::Finished),
            Step::Draining | Step::Stopping if now >= self.kill_at => (Step::Killed, Action::Kill),
            Step::Draining if self.settling.is_over(now, queued, active) => {
                (Step::Stopping, Action::Terminate)
            }
            _ => return None,
        };
        self.step = next;
        Some(action)
    }
}

#[cfg(test)]
mod tests {
    use super::Action::{Finished, Kill, Terminate};
    use super::*;

    /// Plays (seconds, workers alive, connections queued, what must follow) with a grace of 30 s.
    fn play(hurry_at: Option<u64>, script: &[(u64, usize, u32, Option<Action>)]) {
        let start = Instant::now();
        let mut closing = Closing::new(start, Duration::from_secs(30));
        for (line, &(at, alive, queued, action)) in script.iter().enumerate() {
            let now = start + Duration::from_secs(at);
            if hurry_at == Some(at) {
                closing.hurry(now);
            }
            assert_eq!(
                closing.step(now, alive, queued, queued.into()),
                action,
                "line {line}"
            );
        }
    }

    #[test]
    fn drains_asks_and_ends() {
        play(
            None,
            &[
                (0, 2, 5, None),
                (1, 2, 0, None),
                (2, 2, 0, Some(Terminate)),
                (2, 2, 0, None),
                (3, 1, 0, None),
                (4, 0, 0, Some(Finished)),
            ],
        );
    }

    #[test]
    fn a_queue_that_stays_gets_half_the_grace() {
        play(
            None,
            &[
                (14, 2, 5, None),
                (15, 2, 5, Some(Terminate)),
                (29, 2, 5, None),
                (30, 2, 5, Some(Kill)),
                (31, 2, 5, None),
            ],
        );
    }

    #[test]
    fn hurry_kills_at_once() {
        play(
            Some(2),
            &[
                (0, 2, 5, None),
                (2, 2, 5, Some(Kill)),
                (2, 2, 5, None),
                (3, 0, 0, Some(Finished)),
            ],
        );
        play(
            Some(2),
            &[
                (0, 2, 0, None),
                (1, 2, 0, Some(Terminate)),
                (2, 2, 0, Some(Kill)),
                (3, 0, 0, Some(Finished)),
            ],
        );
    }

    #[test]
    fn nobody_to_wait_for_is_the_end() {
        play(None, &[(0, 0, 0, Some(Finished))]);
    }
}
