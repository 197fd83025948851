//! The state of a slot that the agent keeps between two looks.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use wakeone_kernel::proc::doing::Acceptors;
use wakeone_model::backlog::Backlog;
use wakeone_model::judge::{ProgressBaseline, SlotHistory, SlotSample};
use wakeone_model::moves::Arrivals;
use wakeone_model::reads::Reads;

use super::pause::Pause;

/// How long a slot whose move failed is left alone.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A slot that the program does not choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Avoided {
    pub since_ns: u64,
    /// Its worker is gone, and others serve its queue.
    pub down: bool,
}

/// After so long without an arrival the next one is waited for. No sooner, as a wait costs more than a few looks.
const LONG_LULL: Duration = Duration::from_millis(50);
/// A connection may be counted some microseconds before it enters the queue (tcp_fastopen_create_child(), or a request
/// that another listener takes over). So a queue is read once more after a look without arrivals.
const READS: u8 = 2;

/// Tells whether something came to an accept queue since it was last read.
#[derive(Debug, Default)]
pub(super) struct Lull {
    arrivals: u64,
    /// When the last one was seen.
    since: Option<Instant>,
    /// How often the queue was read since.
    reads: u8,
}

impl Lull {
    /// Notes the arrivals so far. Returns whether the queue was read after each of them had entered it. If not, the caller
    /// reads it now.
    pub fn see(&mut self, arrivals: u64) -> bool {
        if std::mem::replace(&mut self.arrivals, arrivals) != arrivals {
            self.since = Some(Instant::now());
            self.reads = 0;
        }
        let was_read = self.reads == READS;
        self.reads = READS.min(self.reads + 1);
        was_read
    }

    /// Whether nothing came for a while, and still has not.
    pub fn lasts(&self, arrivals: u64) -> bool {
        let is_long = self.since.is_none_or(|since| since.elapsed() >= LONG_LULL);
        self.reads == READS && self.arrivals == arrivals && is_long
    }
}

/// Paces the reads of a queue of which nothing is taken: it is read again after half as long again.
#[derive(Debug, Default)]
pub(super) struct Standstill(Option<(SlotSample, Pause)>);

impl Standstill {
    /// Returns the last sample, if it is too early for another.
    pub fn repeat(&self, now: Instant) -> Option<SlotSample> {
        let (sample, pause) = self.0.as_ref()?;
        pause.lasts(now).then_some(*sample)
    }

    /// Notes a new sample.
    pub fn note(&mut self, now: Instant, sample: SlotSample) {
        let stands = |last: &SlotSample| {
            let waits = last.queued > 0 && sample.queued > 0;
            waits && sample.accepted == last.accepted
        };
        let mut pause = match self.0 {
            Some((last, pause)) if stands(&last) => pause,
            _ => Pause::none(now),
        };
        pause.grow(now, 2);
        self.0 = Some((sample, pause));
    }
}

/// One slot, as the agent knows it.
#[derive(Debug, Default)]
pub(super) struct SlotState {
    pub history: SlotHistory,
    /// While it is suspect: how much each slot had accepted when it became suspect.
    pub baseline: Option<ProgressBaseline>,
    /// Of UDP sockets: the reads seen so far.
    pub reads: Reads,
    /// Whether anything came since the queue was last read.
    pub lull: Lull,
    /// Of UDP sockets: when the queue is read again.
    pub standstill: Standstill,
    /// The processes of its worker that were seen to accept.
    pub acceptors: RefCell<Acceptors>,
    /// Since when it is stuck, if its mark lapsed and nothing was accepted since.
    pub on_trial_since_ns: Option<u64>,
    /// Of UDP sockets: how long datagrams have waited at each look.
    pub backlog: Backlog,
    /// When it was last given something.
    pub arrivals: Arrivals,
    /// Processes that serve its socket beside the worker in the table. If there is no worker: those that hold the
    /// socket, of which one may begin to serve it.
    pub others: Vec<u32>,
    /// Its worker was reported gone, and none has come since.
    pub bereft: bool,
    /// Set while the program does not choose it, so that its queue can be moved.
    pub avoided: Option<Avoided>,
    /// The last reason in the log why its queue is not moved.
    pub told_unmoved: Option<String>,
    /// When it may be tried again, so that a failing move is not repeated all the time.
    retry_at: Option<Instant>,
}

impl SlotState {
    /// Forgets the worker that it had.
    pub fn forget_worker(&mut self) {
        self.history = SlotHistory::default();
        self.acceptors = RefCell::default();
        self.on_trial_since_ns = None;
        self.avoided = None;
        self.others.clear();
        self.bereft = false;
    }

    /// Whether its worker is marked stuck.
    pub fn is_stuck(&self) -> bool {
        self.history.stuck_since_ns.is_some()
    }

    /// Notes that the program does not choose it from now on.
    pub fn avoid(&mut self, since_ns: u64, down: bool) {
        self.avoided.get_or_insert(Avoided { since_ns, down }).down = down;
    }

    /// Whether its last move did not fail just now.
    pub fn may_try(&self) -> bool {
        self.retry_at.is_none_or(|until| Instant::now() >= until)
    }

    /// Notes that a move failed.
    pub fn retry_later(&mut self) {
        self.retry_at = Some(Instant::now() + RETRY_AFTER);
    }

    /// Returns when no handshake will be under way there any more; `None`: new ones begin. `wait_ns`: how long one may
    /// take.
    pub fn quiet_ns(&self, wait_ns: u64) -> Option<u64> {
        let avoided = self.avoided?;
        Some(self.arrivals.quiet_ns(avoided.since_ns, wait_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_is_read_twice_after_each_arrival() {
        let mut lull = Lull::default();
        let arrivals = [0, 0, 0, 0, 1, 1, 1, 2, 3, 3, 3, 3];
        let unread = [2, 3, 6, 10, 11];
        for (look, arrivals) in arrivals.into_iter().enumerate() {
            assert_eq!(lull.see(arrivals), unread.contains(&look), "look {look}");
        }
        assert!(!lull.lasts(3), "it has only begun");
        std::thread::sleep(LONG_LULL);
        assert!(lull.lasts(3));
        assert!(!lull.lasts(4));
    }
}
