//! The queue: its waiters, their order, and which of them an event wakes.

use rustix::io::Errno;
use rustix::thread::futex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::spin::Spin;

/// Which waiters an event wakes. The sections are those of Molloy and Lever, 2000.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// All waiters, whatever the waker asks for: Linux 2.2.
    WakeAll,
    /// The sleeper decides, with a flag at enqueuing (3.1): exclusive waiters stand at the tail, all others at the
    /// head. The waker walks from the head and stops behind the first exclusive one.
    TaskExclusive,
    /// The waker decides (3.2): one, or all. Waiters have no say.
    WakeOne,
    /// The waker decides, but waiters that asked for it stand at the front and are woken each time (3.3).
    AlwaysWake,
}

/// The wish of a waiter when it enqueues; how the queue treats it depends on its [`Policy`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Wants the event for itself, as accept() does. `TaskExclusive`: exclusive. `AlwaysWake`: woken when its turn comes.
    Exclusive,
    /// Wants to hear of every event, as select() does, and takes nothing. `TaskExclusive`: not exclusive.
    /// `AlwaysWake`: always woken. Under `WakeOne` it cannot say so: the obstacle that section 3.2 names.
    Select,
}

/// How a sleep ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slept {
    /// The queue chose this waiter.
    Woken,
    /// Time ran out; the waiter is still enqueued.
    TimedOut,
}

/// In the queue, not chosen.
const WAITING: u32 = 0;
/// Woken together with all others: there is nothing to pass on.
const WOKEN: u32 = 1;
/// Woken as the one waiter that the event was meant for.
const CHOSEN: u32 = 2;

/// A thread's means to wait: its futex word. One is enough for a thread's life.
#[derive(Debug, Default)]
pub struct Waiter(Arc<AtomicU32>);

impl Waiter {
    /// A waiter that waits for nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

/// A wait queue.
///
/// Waiting goes as in the kernel, and in this order no wake-up is lost: [`WaitQueue::prepare`] enqueues, *then* the
/// condition is checked, then [`Waiting::sleep`], then the condition again. A waker makes the condition true first and
/// wakes afterwards. [`WaitQueue::wait_until`] does it all.
#[derive(Debug)]
pub struct WaitQueue {
    policy: Policy,
    line: Spin<Line>,
}

/// The line of waiters, by a place that falls towards the head and rises towards the tail.
#[derive(Debug, Default)]
struct Line {
    waiting: BTreeMap<i64, Entry>,
    head: i64,
    tail: i64,
}

#[derive(Debug)]
struct Entry {
    word: Arc<AtomicU32>,
    kind: Kind,
}

/// How far a waker walks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Walk {
    /// To the end.
    All,
    /// To the first waiter, which it wakes.
    First,
    /// To the first exclusive waiter; it and all before it are woken.
    FirstExclusive,
}

impl WaitQueue {
    /// An empty queue.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        Self {
            policy,
            line: Spin::default(),
        }
    }

    /// The policy it was made with.
    #[must_use]
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// How many wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.line.lock().waiting.len()
    }

    /// Whether no thread waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Enqueues a waiter (the kernel's `prepare_to_wait`). The condition must be checked after this, before sleeping.
    pub fn prepare<'q>(&'q self, waiter: &'q mut Waiter, kind: Kind) -> Waiting<'q> {
        let mut waiting = Waiting {
            queue: self,
            word: &waiter.0,
            kind,
            place: None,
        };
        waiting.again();
        waiting
    }

    /// Sleeps until `ready` returns something (the kernel's `wait_event`). It is called before, and after each
    /// wake-up; it may take the thing it finds.
    pub fn wait_until<T>(
        &self,
        waiter: &mut Waiter,
        kind: Kind,
        mut ready: impl FnMut() -> Option<T>,
    ) -> T {
        if let Some(found) = ready() {
            return found;
        }
        let mut waiting = self.prepare(waiter, kind);
        loop {
            if let Some(found) = ready() {
                return found;
            }
            waiting.sleep();
            // This look uses up the wake-up that was slept for.
            if let Some(found) = ready() {
                return found;
            }
            waiting.again();
        }
    }

    /// Wakes for an event that one waiter can use up, as a new connection; returns how many were woken.
    ///
    /// `WakeAll`: all waiters. `TaskExclusive`: all that are not exclusive, and one that is. `WakeOne`: the first in
    /// line. `AlwaysWake`: all that asked for it, and the first of the others.
    pub fn wake_one(&self) -> usize {
        self.wake(match self.policy {
            Policy::WakeAll => Walk::All,
            Policy::TaskExclusive | Policy::AlwaysWake => Walk::FirstExclusive,
            Policy::WakeOne => Walk::First,
        })
    }

    /// Wakes for an event that all should hear of; returns how many were woken.
    ///
    /// Under `TaskExclusive` the waker has no such choice: this is [`WaitQueue::wake_one`].
    pub fn wake_all(&self) -> usize {
        self.wake(match self.policy {
            Policy::TaskExclusive => Walk::FirstExclusive,
            Policy::WakeAll | Policy::WakeOne | Policy::AlwaysWake => Walk::All,
        })
    }

    /// Wakes all waiters under every policy, exclusive ones included: the special handling of abnormal situations, as
    /// a listener that closes. Returns how many were woken.
    pub fn wake_abnormal(&self) -> usize {
        self.wake(Walk::All)
    }

    fn wake(&self, walk: Walk) -> usize {
        let woken = self.line.lock().take(walk);
        // Outside the lock, because a woken waiter takes it next.
        for word in &woken {
            rouse(word);
        }
        woken.len()
    }

    /// Passes the wake-up of a chosen waiter that goes away without a look to another one. A waiter that is always
    /// woken has heard of the event already.
    fn pass_on(&self) {
        let mut line = self.line.lock();
        let next = match self.policy {
            Policy::WakeAll => None,
            Policy::WakeOne => line.take(Walk::First).pop(),
            Policy::TaskExclusive | Policy::AlwaysWake => line.take_exclusive(),
        };
        drop(line);
        if let Some(word) = next {
            rouse(&word);
        }
    }
}

/// Wakes the one thread that sleeps on `word`, if it sleeps already; else it sees the changed word.
fn rouse(word: &AtomicU32) {
    // Waking can only fail for a bad address or flag.
    let _ = futex::wake(word, futex::Flags::PRIVATE, 1);
}

impl Line {
    fn enqueue(&mut self, policy: Policy, kind: Kind, word: &Arc<AtomicU32>) -> i64 {
        let front =
            matches!(policy, Policy::TaskExclusive | Policy::AlwaysWake) && kind == Kind::Select;
        let place = if front {
            self.head -= 1;
            self.head
        } else {
            self.tail += 1;
            self.tail
        };
        word.store(WAITING, Ordering::Relaxed);
        let entry = Entry {
            word: word.clone(),
            kind,
        };
        self.waiting.insert(place, entry);
        place
    }

    /// Takes the waiters that a walk wakes from the line, head first, and marks them.
    fn take(&mut self, walk: Walk) -> Vec<Arc<AtomicU32>> {
        let mut woken = Vec::new();
        while let Some((_, entry)) = self.waiting.pop_first() {
            let last = match walk {
                Walk::All => false,
                Walk::First => true,
                Walk::FirstExclusive => entry.kind == Kind::Exclusive,
            };
            // Release: the woken waiter sees all that the waker did before, and it may not take the lock again.
            let mark = if last { CHOSEN } else { WOKEN };
            entry.word.store(mark, Ordering::Release);
            woken.push(entry.word);
            if last {
                break;
            }
        }
        woken
    }

    /// Takes the first exclusive waiter, past all others.
    fn take_exclusive(&mut self) -> Option<Arc<AtomicU32>> {
        let exclusive = self
            .waiting
            .iter()
            .find(|(_, e)| e.kind == Kind::Exclusive)
            .map(|(place, _)| *place)?;
        let entry = self.waiting.remove(&exclusive)?;
        entry.word.store(CHOSEN, Ordering::Release);
        Some(entry.word)
    }
}

/// A place in the queue. Dropping it leaves the queue (the kernel's `finish_wait`).
///
/// Unlike in the kernel, a waiter that was chosen, has not slept since, and leaves, passes the wake-up on to the next.
/// So it may leave before or after it took the thing it waited for, or in a panic. No thread sleeps beside a waiting
/// event.
#[derive(Debug)]
#[must_use = "leaving the queue is all that letting it go does"]
pub struct Waiting<'q> {
    queue: &'q WaitQueue,
    word: &'q Arc<AtomicU32>,
    kind: Kind,
    /// Its place in the line; `None` once a sleep has ended with a wake-up.
    place: Option<i64>,
}

impl Waiting<'_> {
    /// Enqueues again after a sleep that ended in a wake-up; does nothing for a waiter that stands in line or was chosen
    /// meanwhile. The condition must be checked after this, before sleeping.
    pub fn again(&mut self) {
        if self.place.is_none() {
            let mut line = self.queue.line.lock();
            self.place = Some(line.enqueue(self.queue.policy, self.kind, self.word));
        }
    }

    /// Whether the queue has chosen this waiter since it enqueued.
    #[must_use]
    pub fn is_woken(&self) -> bool {
        self.word.load(Ordering::Acquire) != WAITING
    }

    /// Sleeps until the queue chooses this waiter; returns at once where it has already.
    pub fn sleep(&mut self) {
        self.sleep_until(None);
    }

    /// Sleeps for at most `timeout`. A waiter that gives up then drops the [`Waiting`], which passes on a wake-up that
    /// came just then.
    pub fn sleep_for(&mut self, timeout: Duration) -> Slept {
        self.sleep_until(Instant::now().checked_add(timeout))
    }

    fn sleep_until(&mut self, deadline: Option<Instant>) -> Slept {
        while !self.is_woken() {
            let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Slept::TimedOut;
            }
            let left = left.and_then(|l| rustix::time::Timespec::try_from(l).ok());
            match futex::wait(self.word, futex::Flags::PRIVATE, WAITING, left.as_ref()) {
                Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => {}
                Err(error) => unreachable!("waiting on a futex word of our own failed: {error}"),
            }
        }
        self.place = None;
        Slept::Woken
    }

    /// Leaves the queue; the same as dropping it.
    pub fn finish(self) {}
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let Some(place) = self.place else { return };
        // The mark is only made under the lock: after this look it can no longer change.
        let mut line = self.queue.line.lock();
        line.waiting.remove(&place);
        let chosen = self.word.load(Ordering::Relaxed) == CHOSEN;
        drop(line);
        if chosen {
            self.queue.pass_on();
        }
    }
}
