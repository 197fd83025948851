//! A rolling restart as a pure state machine: it returns the next action for the observed state, and touches no
//! process itself.
//!
//! A slot with a spare listener starts its new worker first, beside the old one. Another slot stops its old worker
//! first, and the new one takes the same listener. If there is no room for one worker more, all slots do the latter
//! from then on.

use super::retirement::{self, Retirement};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The observed state of a slot.
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
    /// A second worker can be started beside the first.
    pub spare: bool,
    /// Whether that second worker is ready; `None`: there is none.
    pub successor: Option<bool>,
    /// A worker that was replaced has not ended yet.
    pub retiring: bool,
}

/// The next action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// No new connections for this slot.
    Drain(usize),
    /// Ask its worker to end.
    Terminate(usize),
    /// It did not end within the grace: kill it.
    Kill(usize),
    /// Start its new worker.
    Start(usize),
    /// Start its new worker beside the old one.
    StartBeside(usize),
    /// The new worker beside the old one is ready: it gets the connections, and the old one is to end.
    Switch(usize),
    /// The old worker has ended and the new one is ready: on to the next slot.
    Replaced(usize),
    /// The new worker ended or did not get ready, or none can be started. The restart stops here; the workers that
    /// are not yet replaced stay.
    Failed(usize),
    /// All are replaced.
    Finished,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Ending(Retirement),
    Starting { until: Instant },
    StartingBeside { until: Instant },
    Switched,
    Stopping,
}

/// A rolling restart under way.
#[derive(Debug)]
pub struct Roll {
    todo: VecDeque<usize>,
    at: Option<(usize, Step)>,
    grace: Duration,
    start_limit: Duration,
    replaced: usize,
    /// There is room for one worker more, as far as we know.
    beside: bool,
    /// Why it stops, unless a new worker did not get ready.
    reason: Option<String>,
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
            beside: true,
            reason: None,
            over: false,
        }
    }

    /// Records that the new worker of the current slot cannot be started beside the old one: from now on old workers
    /// end first. The caller lets that slot drain.
    pub fn stop_first(&mut self, now: Instant) {
        self.beside = false;
        if let Some((_, step)) = &mut self.at {
            *step = Step::Ending(Retirement::new(now, self.grace));
        }
    }

    /// Stops at the current slot, for a reason.
    pub fn give_up(&mut self, reason: String) {
        self.reason = Some(reason);
        if let Some((_, step)) = &mut self.at {
            *step = Step::Stopping;
        }
    }

    /// Why it stops; `None` if a new worker did not get ready.
    pub fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }

    /// Whether a slot's new worker has connections, and the old one has not ended yet.
    pub fn has_switched(&self, slot: usize) -> bool {
        matches!(self.at, Some((at, Step::Switched)) if at == slot)
    }

    /// Whether the end of this slot's worker is expected. Then the roll decides when the next one starts.
    pub fn ends(&self, slot: usize) -> bool {
        let expected = |step| !matches!(step, Step::Switched | Step::Stopping);
        matches!(self.at, Some((at, step)) if at == slot && expected(step))
    }

    /// Slots replaced so far, and slots not yet touched.
    pub fn progress(&self) -> (usize, usize) {
        (self.replaced, self.todo.len())
    }

    /// Returns the next thing to do, `None` to wait. Call it again after doing that; after `Failed` and `Finished` it
    /// is over.
    pub fn step(&mut self, now: Instant, view: impl Fn(usize) -> View) -> Option<Action> {
        if self.over {
            return None;
        }
        let Some((slot, step)) = &mut self.at else {
            return Some(self.begin_next(now, view));
        };
        let (slot, seen) = (*slot, view(*slot));
        let until = now + self.start_limit;
        let (next, action) = match step {
            Step::Ending(_) if !seen.alive => (Some(Step::Starting { until }), Action::Start(slot)),
            Step::Ending(retirement) => {
                return retirement
                    .step(now, seen.queued, seen.active)
                    .map(|action| match action {
                        retirement::Action::Terminate => Action::Terminate(slot),
                        retirement::Action::Kill => Action::Kill(slot),
                    });
            }
            Step::StartingBeside { .. } if seen.successor == Some(true) => {
                (Some(Step::Switched), Action::Switch(slot))
            }
            Step::StartingBeside { until } if seen.successor.is_none() || now >= *until => {
                (None, Action::Failed(slot))
            }
            Step::Stopping => (None, Action::Failed(slot)),
            Step::Switched if !seen.retiring => (None, Action::Replaced(slot)),
            Step::Starting { .. } if seen.ready => (None, Action::Replaced(slot)),
            Step::Starting { until } if !seen.alive || now >= *until => {
                (None, Action::Failed(slot))
            }
            _ => return None,
        };
        self.replaced += usize::from(matches!(action, Action::Replaced(_)));
        self.over = matches!(action, Action::Failed(_));
        self.at = next.map(|step| (slot, step));
        Some(action)
    }

    fn begin_next(&mut self, now: Instant, view: impl Fn(usize) -> View) -> Action {
        let Some(slot) = self.todo.pop_front() else {
            self.over = true;
            return Action::Finished;
        };
        let seen = view(slot);
        let (step, action) = if self.beside && seen.spare && seen.alive {
            let until = now + self.start_limit;
            (Step::StartingBeside { until }, Action::StartBeside(slot))
        } else {
            let retirement = Retirement::new(now, self.grace);
            (Step::Ending(retirement), Action::Drain(slot))
        };
        self.at = Some((slot, step));
        action
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
        spare: false,
        successor: None,
        retiring: false,
    };
    const BUSY: View = View {
        alive: true,
        ready: true,
        queued: 3,
        active: 3,
        spare: false,
        successor: None,
        retiring: false,
    };
    const DEAD: View = View {
        alive: false,
        ready: false,
        queued: 0,
        active: 0,
        spare: false,
        successor: None,
        retiring: false,
    };
    const NEW: View = View {
        alive: true,
        ready: false,
        queued: 0,
        active: 0,
        spare: false,
        successor: None,
        retiring: false,
    };

    /// Plays (tenths of a second since the start, the observed state, the expected action) through a roll of two
    /// slots.
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
        assert_eq!((roll.ends(0), roll.progress()), (false, (0, 1)));
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

    /// A slot with a spare listener; `successor` and `retiring` as in [`View`].
    const fn beside(successor: Option<bool>, retiring: bool) -> View {
        View {
            spare: !retiring,
            successor,
            retiring,
            ..IDLE
        }
    }

    #[test]
    fn the_new_worker_starts_first_where_there_is_a_spare_listener() {
        use Action::*;
        let roll = play(&[
            (0, beside(None, false), Some(StartBeside(0))),
            (1, beside(Some(false), false), None),
            (20, beside(Some(true), false), Some(Switch(0))),
            (20, beside(None, true), None),
            (31, beside(None, false), Some(Replaced(0))),
            (31, beside(None, false), Some(StartBeside(1))),
            (32, beside(Some(true), false), Some(Switch(1))),
            (33, beside(None, false), Some(Replaced(1))),
            (33, beside(None, false), Some(Finished)),
        ]);
        assert_eq!(roll.progress(), (2, 0));
    }

    #[test]
    fn a_successor_beside_that_dies_or_hangs_stops_the_roll_and_touches_nobody() {
        use Action::*;
        let begun = (0, beside(None, false), Some(StartBeside(0)));
        let starting = beside(Some(false), false);
        let roll = play(&[begun, (9, beside(None, false), Some(Failed(0)))]);
        assert_eq!(roll.progress(), (0, 1));
        play(&[
            begun,
            (199, starting, None),
            (200, starting, Some(Failed(0))),
        ]);
    }

    #[test]
    fn where_there_is_no_room_beside_old_workers_end_first_from_then_on() {
        use Action::*;
        let start = Instant::now();
        let mut roll = Roll::new([0, 1], Duration::from_secs(30), Duration::from_secs(20));
        let step =
            |roll: &mut Roll, ms, view| roll.step(start + Duration::from_millis(ms), |_| view);
        let idle = beside(None, false);
        assert_eq!(step(&mut roll, 0, idle), Some(StartBeside(0)));
        roll.stop_first(start);
        assert!(roll.ends(0));
        for (ms, view, action) in [
            (0, idle, None),
            (100, idle, Some(Terminate(0))),
            (200, DEAD, Some(Start(0))),
            (300, idle, Some(Replaced(0))),
            (300, idle, Some(Drain(1))),
        ] {
            assert_eq!(step(&mut roll, ms, view), action, "at {ms} ms");
        }
        assert_eq!(roll.reason(), None);
    }

    #[test]
    fn one_that_gives_up_touches_no_other_slot_and_says_why() {
        use Action::*;
        let start = Instant::now();
        let mut roll = Roll::new([0, 1], Duration::from_secs(30), Duration::from_secs(20));
        assert_eq!(
            roll.step(start, |_| beside(None, false)),
            Some(StartBeside(0))
        );
        assert_eq!(
            roll.step(start, |_| beside(Some(true), false)),
            Some(Switch(0))
        );
        assert!(roll.has_switched(0) && !roll.has_switched(1));
        roll.give_up("it ended".to_owned());
        assert!(!roll.ends(0), "the new worker's end is no part of the roll");
        assert_eq!(roll.step(start, |_| beside(None, true)), Some(Failed(0)));
        assert_eq!(roll.step(start, |_| beside(None, false)), None);
        assert_eq!((roll.reason(), roll.progress()), (Some("it ended"), (0, 1)));
    }

    #[test]
    fn an_old_worker_that_dies_while_its_successor_starts_is_expected_to() {
        use Action::*;
        let gone = View {
            alive: false,
            ..beside(Some(false), false)
        };
        let roll = play(&[
            (0, beside(None, false), Some(StartBeside(0))),
            (1, gone, None),
        ]);
        assert!(roll.ends(0) && !roll.ends(1));
        let roll = play(&[
            (0, beside(None, false), Some(StartBeside(0))),
            (
                1,
                View {
                    successor: Some(true),
                    ..gone
                },
                Some(Switch(0)),
            ),
        ]);
        assert!(!roll.ends(0), "the new worker's end is no part of the roll");
    }
}
