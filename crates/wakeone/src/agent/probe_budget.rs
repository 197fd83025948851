//! Limits how much an agent reads about the workers of its group.
//!
//! To see the state of a worker, the agent reads a dozen files of /proc for each of its threads. It also runs before
//! everybody else. If queues wait for many workers, its reads would take the time that these need to serve them.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::time::{Duration, Instant};

use wakeone_model::judge::WorkerState;

/// After reads that took some time the agent rests for this many times as long. So reads cost a fifth of a CPU at most.
/// (With a longer rest, a group of four is no longer looked at in each round.)
const REST: u32 = 4;

/// The reads of one agent, a round at a time. Each worker is looked at once in a round.
#[derive(Debug, Default)]
pub(crate) struct ProbeBudget {
    answers: RefCell<HashMap<usize, WorkerState>>,
    spent: Cell<Duration>,
    resting_until: Option<Instant>,
}

impl ProbeBudget {
    /// Begins a round.
    pub fn begin(&mut self) {
        let now = Instant::now();
        self.resting_until = self.resting_until.filter(|until| now < *until);
    }

    /// Ends a round.
    pub fn end(&mut self) {
        self.answers.get_mut().clear();
        let spent = self.spent.take();
        if !spent.is_zero() {
            self.resting_until = Some(Instant::now() + REST * spent);
        }
    }

    /// Returns the state of a slot's worker; unknown while the agent rests.
    pub fn ask(&self, slot: usize, look: impl FnOnce() -> WorkerState) -> WorkerState {
        if self.resting_until.is_some() {
            return WorkerState::Unknown;
        }
        self.insist(slot, look)
    }

    /// The same even while the agent rests: for a slot that it is about to act on.
    pub fn insist(&self, slot: usize, look: impl FnOnce() -> WorkerState) -> WorkerState {
        if let Some(answer) = self.answers.borrow().get(&slot) {
            return *answer;
        }
        let begun = Instant::now();
        let answer = look();
        self.spent.set(self.spent.get() + begun.elapsed());
        self.answers.borrow_mut().insert(slot, answer);
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_looked_at_once_a_round_and_then_not_for_a_while() {
        let mut questions = ProbeBudget::default();
        let looks = Cell::new(0);
        let slow = || {
            looks.set(looks.get() + 1);
            std::thread::sleep(Duration::from_millis(2));
            WorkerState::Busy
        };
        questions.begin();
        assert_eq!(questions.ask(0, slow), WorkerState::Busy);
        assert_eq!(questions.ask(0, slow), WorkerState::Busy);
        assert_eq!(questions.ask(1, slow), WorkerState::Busy);
        assert_eq!(looks.get(), 2);
        questions.end();
        let rested = Instant::now();
        loop {
            questions.begin();
            let answer = questions.ask(0, slow);
            questions.end();
            if answer == WorkerState::Busy {
                break;
            }
            assert_eq!(answer, WorkerState::Unknown);
        }
        // Two looks of at least 2 ms.
        assert!(rested.elapsed() >= REST * Duration::from_millis(4));
        assert_eq!(looks.get(), 3);
    }

    #[test]
    fn a_round_without_questions_is_followed_by_no_rest() {
        let mut questions = ProbeBudget::default();
        questions.begin();
        questions.end();
        questions.begin();
        assert_eq!(
            questions.ask(3, || WorkerState::Waiting),
            WorkerState::Waiting
        );
    }
}
