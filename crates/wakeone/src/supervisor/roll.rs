//! A rolling restart as a pure state machine: what to do next, given what is seen. It touches no process itself.

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
    Draining { until: Instant },
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
        let Some((slot, step)) = self.at else {
            let Some(slot) = self.todo.pop_front() else {
                self.over = true;
                return Some(Action::Finished);
            };
            self.at = Some((
                slot,
                Step::Draining {
                    until: now + DRAIN.min(self.grace),
                },
            ));
            return Some(Action::Drain(slot));
        };
        let seen = view(slot);
        let (next, action) = match step {
            Step::Draining { .. } | Step::Stopping { .. } if !seen.alive => (
                Some(Step::Starting {
                    until: now + self.start_limit,
                }),
                Action::Start(slot),
            ),
            Step::Draining { until } if seen.queued == 0 || now >= until => (
                Some(Step::Stopping {
                    kill_at: Some(now + self.grace),
                }),
                Action::Terminate(slot),
            ),
            Step::Stopping { kill_at: Some(at) } if now >= at => {
                (Some(Step::Stopping { kill_at: None }), Action::Kill(slot))
            }
            Step::Starting { .. } if seen.ready => {
                self.replaced += 1;
                (None, Action::Replaced(slot))
            }
            Step::Starting { until } if !seen.alive || now >= until => {
                self.over = true;
                (None, Action::Failed(slot))
            }
            _ => return None,
        };
        self.at = next.map(|step| (slot, step));
        Some(action)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: View = View {
        alive: true,
        ready: true,
        queued: 0,
    };
    const BUSY: View = View {
        alive: true,
        ready: true,
        queued: 3,
    };
    const DEAD: View = View {
        alive: false,
        ready: false,
        queued: 0,
    };
    const NEW: View = View {
        alive: true,
        ready: false,
        queued: 0,
    };

    /// Plays (seconds since the start, what is seen, what must follow) through a roll of two slots.
    fn play(script: &[(u64, View, Option<Action>)]) -> Roll {
        let start = Instant::now();
        let mut roll = Roll::new([0, 1], Duration::from_secs(30), Duration::from_secs(20));
        for (line, (at, view, action)) in script.iter().enumerate() {
            assert_eq!(
                roll.step(start + Duration::from_secs(*at), |_| *view),
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
            (1, IDLE, Some(Terminate(0))),
            (2, IDLE, None),
            (3, DEAD, Some(Start(0))),
            (3, NEW, None),
            (4, IDLE, Some(Replaced(0))),
            (4, IDLE, Some(Drain(1))),
            (4, IDLE, Some(Terminate(1))),
            (5, DEAD, Some(Start(1))),
            (5, IDLE, Some(Replaced(1))),
            (5, IDLE, Some(Finished)),
            (6, IDLE, None),
        ]);
        assert_eq!(roll.progress(), (2, 0));
    }

    #[test]
    fn a_queue_that_stays_and_a_worker_that_stays_are_not_waited_for_forever() {
        use Action::*;
        play(&[
            (0, BUSY, Some(Drain(0))),
            (4, BUSY, None),
            (5, BUSY, Some(Terminate(0))),
            (34, BUSY, None),
            (35, BUSY, Some(Kill(0))),
            (36, BUSY, None),
            (37, DEAD, Some(Start(0))),
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
    fn a_successor_that_dies_stops_the_roll() {
        use Action::*;
        let script = [
            (0, IDLE, Some(Drain(0))),
            (0, IDLE, Some(Terminate(0))),
            (1, DEAD, Some(Start(0))),
        ];
        let roll = play(&[&script[..], &[(2, DEAD, Some(Failed(0))), (9, IDLE, None)]].concat());
        assert_eq!((roll.slot(), roll.progress()), (None, (0, 1)));
        play(
            &[
                &script[..],
                &[
                    (20, NEW, None),
                    (21, NEW, Some(Failed(0))),
                    (22, IDLE, None),
                ],
            ]
            .concat(),
        );
    }
}
