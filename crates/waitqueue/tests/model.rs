//! Checks which waiters an operation wakes against a model so simple that it can be verified by eye.

use proptest::prelude::*;
use wakeone_waitqueue::{Kind, Policy, WaitQueue, Waiter, Waiting};

const WAITERS: usize = 6;

#[derive(Debug, Clone, Copy)]
enum Step {
    /// Waiter N enqueues; enqueues again where it was woken before; stays where it is else.
    Prepare(usize, Kind),
    /// Waiter N leaves, and passes on a wake-up that it was chosen for.
    Leave(usize),
    /// Waiter N, if woken, takes note of it.
    Sleep(usize),
    WakeOne,
    WakeAll,
    WakeAbnormal,
}

fn step() -> impl Strategy<Value = Step> {
    let kind = prop_oneof![2 => Just(Kind::Exclusive), 1 => Just(Kind::Select)];
    prop_oneof![
        6 => (0..WAITERS, kind).prop_map(|(n, kind)| Step::Prepare(n, kind)),
        1 => (0..WAITERS).prop_map(Step::Leave),
        2 => (0..WAITERS).prop_map(Step::Sleep),
        3 => Just(Step::WakeOne),
        1 => Just(Step::WakeAll),
        1 => Just(Step::WakeAbnormal),
    ]
}

fn policy() -> impl Strategy<Value = Policy> {
    prop_oneof![
        Just(Policy::WakeAll),
        Just(Policy::TaskExclusive),
        Just(Policy::WakeOne),
        Just(Policy::AlwaysWake),
    ]
}

/// The state of a waiter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Away,
    Waits,
    Woken,
    Chosen,
}

/// The line as a list, and the paper's rules word by word.
struct Model {
    policy: Policy,
    line: Vec<(usize, Kind)>,
    fate: [Fate; WAITERS],
}

impl Model {
    fn enqueue(&mut self, waiter: usize, kind: Kind) {
        let at_head = match self.policy {
            Policy::WakeAll | Policy::WakeOne => false,
            Policy::TaskExclusive | Policy::AlwaysWake => kind == Kind::Select,
        };
        let place = if at_head { 0 } else { self.line.len() };
        self.line.insert(place, (waiter, kind));
        self.fate[waiter] = Fate::Waits;
    }

    fn everybody(&mut self) -> usize {
        for (waiter, _) in &self.line {
            self.fate[*waiter] = Fate::Woken;
        }
        std::mem::take(&mut self.line).len()
    }

    /// Chooses the first of the line that `who` admits.
    fn first(&mut self, who: impl Fn(Kind) -> bool) -> usize {
        let Some(place) = self.line.iter().position(|(_, kind)| who(*kind)) else {
            return 0;
        };
        let (waiter, _) = self.line.remove(place);
        self.fate[waiter] = Fate::Chosen;
        1
    }

    fn wake_one(&mut self) -> usize {
        match self.policy {
            Policy::WakeAll => self.everybody(),
            Policy::WakeOne => self.first(|_| true),
            Policy::TaskExclusive | Policy::AlwaysWake => {
                let chosen = self.first(|kind| kind == Kind::Exclusive);
                let selects: Vec<usize> = self
                    .line
                    .iter()
                    .filter(|(_, kind)| *kind == Kind::Select)
                    .map(|(waiter, _)| *waiter)
                    .collect();
                self.line.retain(|(_, kind)| *kind != Kind::Select);
                for waiter in &selects {
                    self.fate[*waiter] = Fate::Woken;
                }
                chosen + selects.len()
            }
        }
    }

    fn wake_all(&mut self) -> usize {
        match self.policy {
            Policy::TaskExclusive => self.wake_one(),
            _ => self.everybody(),
        }
    }

    fn leave(&mut self, waiter: usize) {
        let chosen = self.fate[waiter] == Fate::Chosen;
        self.line.retain(|(other, _)| *other != waiter);
        self.fate[waiter] = Fate::Away;
        if chosen {
            match self.policy {
                Policy::WakeAll => {}
                Policy::WakeOne => drop(self.first(|_| true)),
                _ => drop(self.first(|kind| kind == Kind::Exclusive)),
            }
        }
    }
}

/// Does one step with both.
fn both<'q>(
    step: Step,
    queue: &'q WaitQueue,
    model: &mut Model,
    free: &mut [Option<&'q mut Waiter>],
    waiting: &mut [Option<Waiting<'q>>],
) -> Result<(), TestCaseError> {
    match step {
        Step::Prepare(n, kind) => match &mut waiting[n] {
            Some(place) => place.again(),
            // A thread waits once more with a waiter of its own; here each waiter waits at most once.
            None => {
                if let Some(waiter) = free[n].take() {
                    waiting[n] = Some(queue.prepare(waiter, kind));
                    model.enqueue(n, kind);
                }
            }
        },
        Step::Leave(n) => {
            if let Some(place) = waiting[n].take() {
                place.finish();
                model.leave(n);
            }
        }
        Step::Sleep(n) => {
            // Only a woken waiter may sleep here: there is no other thread that would wake it.
            if let Some(place) = waiting[n].as_mut().filter(|p| p.is_woken()) {
                place.sleep();
                // It goes away with nothing to pass on.
                waiting[n] = None;
                model.fate[n] = Fate::Away;
            }
        }
        Step::WakeOne => prop_assert_eq!(queue.wake_one(), model.wake_one()),
        Step::WakeAll => prop_assert_eq!(queue.wake_all(), model.wake_all()),
        Step::WakeAbnormal => prop_assert_eq!(queue.wake_abnormal(), model.everybody()),
    }
    prop_assert_eq!(queue.len(), model.line.len());
    for (n, place) in waiting.iter().enumerate() {
        let woken = place.as_ref().is_some_and(Waiting::is_woken);
        let expected = matches!(model.fate[n], Fate::Woken | Fate::Chosen);
        prop_assert_eq!(woken, expected, "waiter {} after {:?}", n, step);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn everybody_is_woken_whom_the_paper_says_and_nobody_else(
        policy in policy(),
        rounds in prop::collection::vec(prop::collection::vec(step(), 1..30), 1..4),
    ) {
        let queue = WaitQueue::new(policy);
        let mut waiters: [Waiter; WAITERS] = Default::default();
        // Waiters are used again from round to round: nothing of an earlier wait may show.
        for steps in rounds {
            let mut model = Model { policy, line: Vec::new(), fate: [Fate::Away; WAITERS] };
            let mut free: Vec<Option<&mut Waiter>> = waiters.iter_mut().map(Some).collect();
            let mut waiting: Vec<Option<Waiting<'_>>> = (0..WAITERS).map(|_| None).collect();
            for step in steps {
                both(step, &queue, &mut model, &mut free, &mut waiting)?;
            }
            drop(waiting);
            prop_assert!(queue.is_empty());
        }
    }
}
