//! A rolling restart as a pure state machine: what to do next, given what is seen. It touches no process itself.

use super::settle::Settling;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Longest wait for a slot's queue to empty before its worker is stopped; what is left then is moved to others.
pub const DRAIN: Duration = Duration::from_secs(5);

/// What is seen of a slot.
#[derive(Debug, Clone, Copy)]
pub struct View {
    /// Its worker runs.
    pub alive: bool,
    /// Its worker is ready.
    pub ready: bool,
    /// Connections in its queue.
    pub queued: u32,
    /// Connections open, queued ones included.
    pub active: u64,
}

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// No new connections for this slot.
    Drain(usize),
    /// Ask its worker to end (SIGTERM).
    Terminate(usize),
    /// It did not within the grace: make it end.
    Kill(usize),
    /// Start its new worker.
    Start(usize),
    /// The new worker is ready; on to the next.
    Replaced(usize),
    /// The new worker ended or did not get ready: the restart stops here, the workers not yet replaced stay.
    Failed(usize),
    /// All are replaced.
    Finished,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Draining(Settling),
    Stopping { kill_at: Option<Instant> },
    Starting { until: Instant },
}

/// A rolling restart under way.
#[derive(Debug)]
pub struct Roll {
    todo: VecDeque<usize>,
    at: Option<(usize, Step)>,
    grace: Duration,
    start_limit: Duration,
    replaced: usize,
    over: bool,
}

impl Roll {
    /// Restarts these slots, in this order: each worker has `grace` to end and its successor `start_limit` to get ready.
    pub fn new(
        slots: impl IntoIterator<Item = usize>,
        grace: Duration,
        start_limit: Duration,
    ) -> Self {
        Self {
            todo: slots.into_iter().collect(),
            at: None,
            grace,
            start_limit,
            replaced: 0,
            over: false,
        }
    }

    /// The slot being replaced: its worker's end is expected, and its start is the roll's to ask for.
    pub fn slot(&self) -> Option<usize> {
        self.at.map(|(slot, _)| slot)
    }

    /// Slots replaced so far, and slots not yet touched.
    pub fn progress(&self) -> (usize, usize) {
        (self.replaced, self.todo.len())
    }

    /// The next thing to do, `None` if there is only to wait. Ask again after doing it; after `Failed` and `Finished` it is over.
    pub fn step(&mut self, now: Instant, view: impl Fn(usize) -> View) -> Option<Action> {
        if self.over {
            return None;
        }
        let Some((slot, step)) = &mut self.at else {
            return Some(self.begin_next(now));
        };
        let (slot, seen) = (*slot, view(*slot));
        let settled = match step {
            Step::Draining(settling) => settling.is_over(now, seen.queued, seen.active),
            _ => false,
        };
        let (next, action) = match step {
            Step::Draining(_) | Step::Stopping { .. } if !seen.alive => (
                Some(Step::Starting {
                    until: now + self.start_limit,
                }),
                Action::Start(slot),
            ),
            Step::Draining(_) if settled => (
                Some(Step::Stopping {
                    kill_at: Some(now + self.grace),
                }),
                Action::Terminate(slot),
            ),
            Step::Stopping { kill_at: Some(at) } if now >= *at => {
                (Some(Step::Stopping { kill_at: None }), Action::Kill(slot))
            }
            Step::Starting { .. } if seen.ready => {
                self.replaced += 1;
                (None, Action::Replaced(slot))
            }
            Step::Starting { until } if !seen.alive || now >= *until => {
                self.over = true;
                (None, Action::Failed(slot))
            }
            _ => return None,
        };
        self.at = next.map(|step| (slot, step));
        Some(action)
    }

    fn begin_next(&mut self, now: Instant) -> Action {
        let Some(slot) = self.todo.pop_front() else {
            self.over = true;
            return Action::Finished;
        };
        self.at = Some((
            slot,
            Step::Draining(Settling::until(now + DRAIN.min(self.grace))),
        ));
        Action::Drain(slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: View = View {
        alive: true,
        ready: true,
        queued: 0,
        active: 0,
    };
    const BUSY: View = View {
        alive: true,
        ready: true,
        queued: 3,
        active: 3,
    };
    const DEAD: View = View {
        alive: false,
        ready: false,
        queued: 0,
        active: 0,
    };
    const NEW: View = View {
        alive: true,
        ready: false,
        queued: 0,
        active: 0,
    };

    /// Plays (tenths of a second since the start, what is seen, what must follow) through a roll of two slots.
    fn play(script: &[(u64, View, Option<Action>)]) -> Roll {
        let start = Instant::now();
        let mut roll = Roll::new([0, 1], Duration::from_secs(30), Duration::from_secs(20));
        for (line, (at, view, action)) in script.iter().enumerate() {
            assert_eq!(
                roll.step(start + Duration::from_millis(at * 100), |_| *view),
                *action,
                "line {line}"
            );
        }
        roll
    }

    #[test]
    fn one_after_the_other() {
        use Action::*;
        let roll = play(&[
            (0, IDLE, Some(Drain(0))),
            (0, BUSY, None),
            (1, IDLE, None),
            (2, IDLE, Some(Terminate(0))),
            (3, IDLE, None),
            (4, DEAD, Some(Start(0))),
            (4, NEW, None),
            (5, IDLE, Some(Replaced(0))),
            (5, IDLE, Some(Drain(1))),
            (5, IDLE, None),
            (6, IDLE, Some(Terminate(1))),
            (7, DEAD, Some(Start(1))),
            (7, IDLE, Some(Replaced(1))),
            (7, IDLE, Some(Finished)),
            (8, IDLE, None),
        ]);
        assert_eq!(roll.progress(), (2, 0));
    }

    #[test]
    fn a_queue_that_stays_and_a_worker_that_stays_are_not_waited_for_forever() {
        use Action::*;
        play(&[
            (0, BUSY, Some(Drain(0))),
            (49, BUSY, None),
            (50, BUSY, Some(Terminate(0))),
            (349, BUSY, None),
            (350, BUSY, Some(Kill(0))),
            (351, BUSY, None),
            (352, DEAD, Some(Start(0))),
        ]);
    }

    #[test]
    fn a_worker_already_dead_is_only_started() {
        use Action::*;
        play(&[
            (0, DEAD, Some(Drain(0))),
            (0, DEAD, Some(Start(0))),
            (1, IDLE, Some(Replaced(0))),
        ]);
    }

    #[test]
    fn a_successor_that_dies_or_hangs_stops_the_roll() {
        use Action::*;
        let script = [(0, IDLE, Some(Drain(0))), (0, DEAD, Some(Start(0)))];
        let roll = play(
            &[
                &script[..],
                &[(10, DEAD, Some(Failed(0))), (90, IDLE, None)],
            ]
            .concat(),
        );
        assert_eq!((roll.slot(), roll.progress()), (None, (0, 1)));
        play(
            &[
                &script[..],
                &[
                    (199, NEW, None),
                    (200, NEW, Some(Failed(0))),
                    (210, IDLE, None),
                ],
            ]
            .concat(),
        );
    }
}
