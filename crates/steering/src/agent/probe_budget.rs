//! Limits how much an agent reads about the workers of its group.
//!
//! To see the state of a worker, the agent reads a dozen files of /proc for each of its threads. It also runs before
//! everybody else. If queues wait for many workers, its reads would take the time that these need to serve them.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::time::{Duration, Instant};

use wakeone_kernel::proc::doing::Looks;
use wakeone_model::judge::WorkerState;

use super::pause::Pause;

/// After reads that took some time the agent rests for this many times as long. So reads cost a fifth of a CPU at most.
/// (With a longer rest, a group of four is no longer looked at in each round.)
const REST: u32 = 4;

/// The reads of one agent, a round at a time. Each worker is looked at once in a round.
#[derive(Debug, Default)]
pub(crate) struct ProbeBudget {
    answers: RefCell<HashMap<usize, WorkerState>>,
    spent: Cell<Duration>,
    resting_until: Option<Instant>,
    /// When the round began.
    begun: Option<Instant>,
    /// The workers that were seen to do something else than to wait for connections, at each look. One is looked at again
    /// after as long as it has done so.
    elsewhere: RefCell<HashMap<usize, Pause>>,
    looks: Looks,
    /// How many connections each slot had accepted in the last round.
    accepted: Vec<u64>,
}

impl ProbeBudget {
    /// Begins a round. `accepted`: how many connections each slot has accepted so far.
    pub fn begin(&mut self, accepted: impl IntoIterator<Item = u64>) {
        self.begin_at(Instant::now(), accepted);
    }

    fn begin_at(&mut self, now: Instant, accepted: impl IntoIterator<Item = u64>) {
        self.begun = Some(now);
        self.resting_until = self.resting_until.filter(|until| now < *until);
        let accepted: Vec<u64> = accepted.into_iter().collect();
        let before = std::mem::replace(&mut self.accepted, accepted);
        let is_same = |slot: &usize| self.accepted.get(*slot) == before.get(*slot);
        let elsewhere = self.elsewhere.get_mut();
        elsewhere.retain(|slot, pause| is_same(slot) && !pause.is_stale(now));
    }

    /// Ends a round.
    pub fn end(&mut self) {
        self.answers.get_mut().clear();
        self.looks = Looks::default();
        let spent = self.spent.take();
        if !spent.is_zero() {
            self.resting_until = Some(Instant::now() + REST * spent);
        }
    }

    /// Returns the state of a slot's worker; unknown while the agent rests, or where it would see nothing new.
    pub fn ask(&self, slot: usize, look: impl FnOnce(&Looks) -> WorkerState) -> WorkerState {
        let seen = self.answers.borrow().get(&slot).copied();
        let is_early = || {
            let elsewhere = self.elsewhere.borrow();
            let pause = elsewhere.get(&slot).zip(self.begun);
            pause.is_some_and(|(pause, now)| pause.lasts(now))
        };
        match seen {
            Some(answer) => answer,
            None if self.resting_until.is_some() || is_early() => WorkerState::Unknown,
            None => self.insist(slot, || look(&self.looks)),
        }
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
        self.note(slot, answer);
        answer
    }

    fn note(&self, slot: usize, answer: WorkerState) {
        let mut elsewhere = self.elsewhere.borrow_mut();
        if !answer.is_elsewhere() {
            elsewhere.remove(&slot);
            return;
        }
        let now = self.begun.unwrap_or_else(Instant::now);
        let pause = elsewhere.entry(slot).or_insert_with(|| Pause::none(now));
        pause.grow(now, 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_looked_at_once_a_round_and_then_not_for_a_while() {
        let mut questions = ProbeBudget::default();
        let looks = Cell::new(0);
        let slow = |_: &Looks| {
            looks.set(looks.get() + 1);
            std::thread::sleep(Duration::from_millis(2));
            WorkerState::Busy
        };
        questions.begin([0; 4]);
        assert_eq!(questions.ask(0, slow), WorkerState::Busy);
        assert_eq!(questions.ask(0, slow), WorkerState::Busy);
        assert_eq!(questions.ask(1, slow), WorkerState::Busy);
        assert_eq!(looks.get(), 2);
        questions.end();
        let rested = Instant::now();
        loop {
            questions.begin([0; 4]);
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
    fn who_does_something_else_is_looked_at_after_as_long_again() {
        let mut questions = ProbeBudget::default();
        // Later than any rest of this test.
        let begun = Instant::now() + Duration::from_secs(60);
        let mut looks = Vec::new();
        for ms in 0..60 {
            questions.begin_at(begun + Duration::from_millis(ms), [7]);
            questions.ask(0, |_| {
                looks.push(ms);
                WorkerState::Busy
            });
            questions.end();
        }
        assert_eq!(looks, [0, 1, 2, 4, 8, 16, 26, 36, 46, 56]);
        // It has accepted since.
        questions.begin_at(begun + Duration::from_millis(60), [8]);
        let answer = questions.ask(0, |_| WorkerState::Waiting);
        assert_eq!(answer, WorkerState::Waiting);
    }

    #[test]
    fn a_round_without_questions_is_followed_by_no_rest() {
        let mut questions = ProbeBudget::default();
        questions.begin([0; 4]);
        questions.end();
        questions.begin([0; 4]);
        assert_eq!(
            questions.ask(3, |_| WorkerState::Waiting),
            WorkerState::Waiting
        );
    }
}
