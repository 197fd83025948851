//! Which worker is stuck: a pure judgement over the agent's samples.
//!
//! A worker is stuck when connections have waited in its queue for some time without one of them being accepted.
//! Meanwhile another worker has nothing to do, or has served its own queue many times over. The worker need not be
//! broken: one long request in a blocking worker is enough. In the image of the paper's critics, the connections
//! behind it wait at a clogged till while the next one is free.

/// A sample of one slot at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SlotSample {
    /// A worker runs here and may be given connections (up, not draining).
    pub serving: bool,
    /// Connections waiting in its accept queues.
    pub queued: u32,
    /// Connections that its queues can still take.
    pub room: u32,
    /// Connections accepted so far, in all. It is a difference of counters that are not read at one moment: it may
    /// lag for a look, so only what exceeds the highest seen is progress.
    pub accepted: u64,
    /// Connections open, queued ones included.
    pub active: u64,
}

/// The state of a worker, as far as /proc tells. The agent reads it only for workers where it matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerState {
    /// Some thread waits for connections: accept, epoll, poll or select.
    Waiting,
    /// No thread does: all of them sleep in something else.
    Busy,
    /// No thread does, and one of them is on a CPU or waits for one. /proc does not tell which.
    Running {
        /// The CPU time of the worker so far, in ns. It may lag by a scheduler's tick.
        cpu_ns: u64,
    },
    /// It is stopped (SIGSTOP, a debugger, a frozen cgroup).
    Stopped,
    /// It is gone, or a zombie.
    Gone,
    /// We may not look (another user's process, without CAP_SYS_PTRACE).
    Unknown,
}

/// A suspect that runs counts as stuck when it has had this part of the patience as CPU time. A worker that is woken
/// needs less of it to come to its accept.
const SUSPECT_CPU_PART: u64 = 5;

/// So often a slot is looked at, at least, in the time after which its worker is a suspect.
pub const LOOKS_A_PATIENCE: u32 = 4;

/// The history of a slot from one sample to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SlotHistory {
    accepted: u64,
    /// When it last accepted, or had nothing to accept, in ns.
    progress_ns: u64,
    /// Nothing waited at the last look.
    was_empty: bool,
    /// The CPU time that its worker had when it was first seen running as a suspect, in ns.
    suspect_cpu_ns: Option<u64>,
    /// Since when it is marked stuck, in ns.
    pub stuck_since_ns: Option<u64>,
    /// At the mark: its worker's open connections that were accepted, and its CPU time in ns.
    marked: (u64, u64),
    /// How often its mark lapsed, since it last accepted or was seen to wait.
    lapses: u32,
}

/// The patience of the judge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// How long connections may wait without one being accepted, in ns.
    pub stuck_after_ns: u64,
}

impl Limits {
    /// How much CPU time a suspect that runs has without an accept before it counts as stuck, in ns.
    fn suspect_cpu_ns(self) -> u64 {
        self.stuck_after_ns / SUSPECT_CPU_PART
    }
}

impl Default for Limits {
    /// 5 ms: well above a scheduler's tick, well below the least delay that a person notices.
    fn default() -> Self {
        Self {
            stuck_after_ns: 5_000_000,
        }
    }
}

/// Notes progress, and returns whether the slot's worker is suspect: connections wait and none was accepted for too
/// long. A slot that is already marked stuck is no new suspect.
pub fn suspect(now_ns: u64, look: &SlotSample, memory: &mut SlotHistory, limits: Limits) -> bool {
    // A connection that waits now may have come just before this look, however long ago the last one was.
    if std::mem::replace(&mut memory.was_empty, look.queued == 0) {
        let lately_ns = now_ns.saturating_sub(limits.stuck_after_ns / u64::from(LOOKS_A_PATIENCE));
        memory.progress_ns = memory.progress_ns.max(lately_ns);
    }
    if look.accepted > memory.accepted {
        memory.lapses = 0;
    }
    if look.queued == 0 || look.accepted > memory.accepted || !look.serving {
        memory.accepted = memory.accepted.max(look.accepted);
        memory.progress_ns = now_ns;
        memory.suspect_cpu_ns = None;
        return false;
    }
    memory.stuck_since_ns.is_none()
        && now_ns.saturating_sub(memory.progress_ns) >= limits.stuck_after_ns
}

impl SlotHistory {
    /// Nothing waited at this moment.
    pub fn nothing_waits(&mut self, now_ns: u64) {
        self.progress_ns = self.progress_ns.max(now_ns);
        self.was_empty = true;
    }

    /// It is stuck from now on. Its worker has had so much CPU time.
    pub fn mark(&mut self, now_ns: u64, look: &SlotSample, cpu_ns: u64) {
        self.stuck_since_ns = Some(now_ns);
        self.marked = (held(look), cpu_ns);
    }

    /// Its mark lapsed.
    pub fn begin_trial(&mut self) {
        self.lapses = self.lapses.saturating_add(1);
    }

    /// Its worker was seen to be well.
    pub fn end_trial(&mut self) {
        self.lapses = 0;
    }

    /// Whether its mark lapsed, and nobody has seen its worker to be well since.
    pub fn is_on_trial(&self) -> bool {
        self.lapses > 0
    }

    /// Records that the slot's queue was moved: its connections were not accepted here.
    pub fn moved(&mut self, look: &SlotSample) {
        self.accepted = look.accepted;
    }
}

/// Whether a suspect is stuck: it is seen outside accept, and another worker would do its work sooner (is [`idle`], or
/// has [`overtaken`] it).
///
/// A worker that waits for connections is never stuck, however long its queue: it was woken and has not run yet.
/// Nor is one that waits for a CPU: a running suspect must first have had [`Limits::suspect_cpu_ns`] without an accept.
/// And where all are as busy, no worker would serve the queue sooner: that is overload, not a stuck worker.
///
/// The state is read last, because reading it costs something.
pub fn stuck(
    another_sooner: bool,
    memory: &mut SlotHistory,
    limits: Limits,
    doing: impl FnOnce() -> WorkerState,
) -> bool {
    another_sooner
        && match doing() {
            WorkerState::Busy | WorkerState::Stopped => true,
            WorkerState::Running { cpu_ns } => {
                let before = *memory.suspect_cpu_ns.get_or_insert(cpu_ns);
                cpu_ns.saturating_sub(before) >= limits.suspect_cpu_ns()
            }
            WorkerState::Waiting | WorkerState::Gone | WorkerState::Unknown => false,
        }
}

impl WorkerState {
    /// Whether it is seen outside accept, so that what waits for it waits for something else first.
    pub fn is_elsewhere(self) -> bool {
        matches!(self, Self::Busy | Self::Running { .. } | Self::Stopped)
    }

    /// The state of a socket that two processes serve: the free one takes what waits there. One that cannot be seen might
    /// be free.
    #[must_use]
    pub fn freest(self, other: Self) -> Self {
        match (self, other) {
            (Self::Waiting, _) | (_, Self::Waiting) => Self::Waiting,
            (Self::Gone, state) | (state, Self::Gone) => state,
            (Self::Unknown, _) | (_, Self::Unknown) => Self::Unknown,
            (Self::Running { cpu_ns: one }, Self::Running { cpu_ns: other }) => Self::Running {
                cpu_ns: one.saturating_add(other),
            },
            (running @ Self::Running { .. }, _) | (_, running @ Self::Running { .. }) => running,
            (Self::Stopped, state) | (state, Self::Stopped) => state,
            (Self::Busy, Self::Busy) => Self::Busy,
        }
    }
}

/// Another worker must serve this many times its own queue before a suspect counts as overtaken. Chance and uneven
/// work do not come to that.
const LAPS: u64 = 8;
/// This many times the patience must pass before busy workers are compared. A worker that only waits for a CPU gets
/// one sooner.
const PATIENCES: u64 = 10;

/// The accepted connections of every slot at the moment when one became suspect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgressBaseline {
    since_ns: u64,
    accepted: Vec<u64>,
}

impl ProgressBaseline {
    /// Starts to compare.
    pub fn start(now_ns: u64, looks: &[SlotSample]) -> Self {
        Self {
            since_ns: now_ns,
            accepted: looks.iter().map(|look| look.accepted).collect(),
        }
    }

    /// Whether a worker among `others` (their slots and samples) has overtaken the suspect. Such a worker is busy all
    /// the time, so never idle, but has served many times its own queue since.
    ///
    /// This is the case of two workers with one thread each, of which one is held up. The other has always something
    /// to do while there are clients. The queue of the first one waits for as long as it is held up.
    pub fn overtaken<'a>(
        &self,
        now_ns: u64,
        others: impl Iterator<Item = (usize, &'a SlotSample)>,
        limits: Limits,
    ) -> bool {
        let patience_ns = limits.stuck_after_ns.saturating_mul(PATIENCES);
        if now_ns.saturating_sub(self.since_ns) < patience_ns {
            return false;
        }
        let served = |slot: usize, look: &SlotSample| {
            let then = self.accepted.get(slot).copied().unwrap_or(look.accepted);
            look.accepted.saturating_sub(then)
        };
        others.into_iter().any(|(slot, look)| {
            look.serving && served(slot, look) >= LAPS * (u64::from(look.queued) + 1)
        })
    }
}

/// Whether a slot's worker has nothing to do: nothing waits for it, and it has no connection at all or waits for
/// events on those it has.
pub fn idle(look: &SlotSample, doing: impl FnOnce() -> WorkerState) -> bool {
    look.serving && look.queued == 0 && (look.active == 0 || doing() == WorkerState::Waiting)
}

/// Whether a slot marked stuck works again: it accepted since, or waits for connections.
pub fn recovered(look: &SlotSample, memory: &SlotHistory, doing: WorkerState) -> bool {
    look.accepted > memory.accepted || doing == WorkerState::Waiting
}

/// How long a mark stays on a slot with an empty queue before it lapses. Doubled each time, up to the longest.
const LAPSE_AFTER_NS: u64 = 1_000_000_000;
const LONGEST_LAPSE_NS: u64 = 30_000_000_000;

/// Whether the mark of a slot with an empty queue lapses, although nobody saw its worker wait. The look that led to the
/// mark may have been wrong, or the worker waits in a way unknown to us. Without connections it can never prove that.
///
/// A worker that hangs must not get connections again and again. So it must live: it has had CPU time since. And its
/// connections must be moved if they wait again (`rescue`), or it has closed some since, as nobody does who hangs.
///
/// The worker is looked at last (its state, and its CPU time in ns), because that costs something.
pub fn lapses(
    now_ns: u64,
    look: &SlotSample,
    memory: &SlotHistory,
    rescue: bool,
    worker: impl FnOnce() -> (WorkerState, u64),
) -> bool {
    let Some(since_ns) = memory.stuck_since_ns else {
        return false;
    };
    let doubled = LAPSE_AFTER_NS << memory.lapses.min(5);
    let (had, cpu_ns) = memory.marked;
    look.serving
        && look.queued == 0
        && now_ns.saturating_sub(since_ns) >= doubled.min(LONGEST_LAPSE_NS)
        && (rescue || held(look) < had || look.active == 0)
        && match worker() {
            (WorkerState::Stopped | WorkerState::Gone, _) => false,
            (_, now) => now > cpu_ns,
        }
}

/// Connections that a worker has accepted and not closed.
fn held(look: &SlotSample) -> u64 {
    look.active.saturating_sub(look.queued.into())
}

/// Whether the others can take a queue: the kernel migrates past the target's backlog, so we must not.
pub fn fits(queued: u32, others: impl Iterator<Item = u32>) -> bool {
    others.fold(0_u64, |sum, room| sum + u64::from(room)) >= u64::from(queued)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn look(queued: u32, accepted: u64) -> SlotSample {
        SlotSample {
            serving: true,
            queued,
            room: 100,
            accepted,
            active: u64::from(queued) + 1,
        }
    }

    /// Looks one after another (at ms, queued, accepted), and whether each makes a suspect.
    #[test]
    fn a_suspect_leaves_connections_waiting_without_accepting_one() {
        for (name, looks) in [
            (
                "queue empty all along",
                &[(0, 0, 0, false), (9, 0, 0, false)][..],
            ),
            (
                "waits for less than 5 ms",
                &[(0, 0, 0, false), (2, 1, 0, false), (4, 1, 0, false)],
            ),
            (
                "waits for 5 ms",
                &[(0, 0, 0, false), (2, 1, 0, false), (6, 1, 0, true)],
            ),
            (
                "nobody knows since when it waits",
                &[(0, 0, 0, false), (90, 1, 0, false), (93, 1, 0, false)],
            ),
            (
                "and then for 5 ms",
                &[(0, 0, 0, false), (90, 1, 0, false), (94, 1, 0, true)],
            ),
            (
                "still does",
                &[(0, 1, 0, false), (5, 1, 0, true), (50, 3, 0, true)],
            ),
            (
                "slow, but accepts",
                &[(0, 1, 1, false), (4, 2, 2, false), (8, 3, 3, false)],
            ),
            (
                "accepts, then no more",
                &[(0, 1, 1, false), (4, 1, 2, false), (9, 1, 2, true)],
            ),
            (
                "a count that lags is no progress",
                &[(0, 1, 5, false), (3, 2, 4, false), (5, 2, 5, true)],
            ),
            (
                "its queue was moved",
                &[(0, 1, 0, false), (6, 0, 0, false), (7, 1, 0, false)],
            ),
        ] {
            let mut memory = SlotHistory::default();
            for (at, queued, accepted, expected) in looks {
                assert_eq!(
                    suspect(
                        at * MS,
                        &look(*queued, *accepted),
                        &mut memory,
                        Limits::default()
                    ),
                    *expected,
                    "{name}, at {at} ms"
                );
            }
        }
    }

    #[test]
    fn who_is_marked_or_does_not_serve_is_no_suspect() {
        let mut marked = SlotHistory {
            stuck_since_ns: Some(1),
            ..SlotHistory::default()
        };
        assert!(!suspect(
            99 * MS,
            &look(3, 0),
            &mut marked,
            Limits::default()
        ));
        let mut memory = SlotHistory::default();
        let draining = SlotSample {
            serving: false,
            ..look(3, 0)
        };
        assert!(!suspect(99 * MS, &draining, &mut memory, Limits::default()));
        // Nor at once when it serves again.
        assert!(!suspect(
            100 * MS,
            &look(3, 0),
            &mut memory,
            Limits::default()
        ));
    }

    #[test]
    fn patience_can_be_set() {
        let mut memory = SlotHistory::default();
        let limits = Limits {
            stuck_after_ns: 50 * MS,
        };
        assert!(!suspect(49 * MS, &look(1, 0), &mut memory, limits));
        assert!(suspect(50 * MS, &look(1, 0), &mut memory, limits));
    }

    #[test]
    fn only_who_is_seen_elsewhere_while_another_is_idle_is_stuck() {
        for (doing, another_idle, expected) in [
            (WorkerState::Busy, true, true),
            (WorkerState::Stopped, true, true),
            (WorkerState::Waiting, true, false),
            (WorkerState::Unknown, true, false),
            (WorkerState::Gone, true, false),
            (WorkerState::Busy, false, false),
            (WorkerState::Stopped, false, false),
        ] {
            let (mut memory, limits) = (SlotHistory::default(), Limits::default());
            assert_eq!(
                stuck(another_idle, &mut memory, limits, || doing),
                expected,
                "{doing:?} {another_idle}"
            );
        }
    }

    #[test]
    fn who_waits_for_a_cpu_is_not_stuck_until_it_has_had_one() {
        let (mut memory, limits) = (SlotHistory::default(), Limits::default());
        let stuck_at = |memory: &mut SlotHistory, cpu_ns| {
            stuck(true, memory, limits, || WorkerState::Running { cpu_ns })
        };
        assert!(!suspect(0, &look(0, 0), &mut memory, limits));
        assert!(!suspect(MS, &look(1, 0), &mut memory, limits));
        assert!(suspect(6 * MS, &look(1, 0), &mut memory, limits));
        assert!(!stuck_at(&mut memory, 70 * MS));
        assert!(!stuck_at(&mut memory, 70 * MS), "it had no CPU meanwhile");
        assert!(!stuck_at(&mut memory, 71 * MS - 1));
        assert!(stuck_at(&mut memory, 71 * MS), "a fifth of the patience");
        // It accepted, and is suspect anew.
        assert!(!suspect(7 * MS, &look(1, 1), &mut memory, limits));
        assert!(suspect(12 * MS, &look(1, 1), &mut memory, limits));
        assert!(!stuck_at(&mut memory, 90 * MS));
        assert!(stuck_at(&mut memory, 91 * MS));
    }

    #[test]
    fn who_computes_sleeps_or_is_stopped_is_elsewhere() {
        for (state, expected) in [
            (WorkerState::Busy, true),
            (WorkerState::Running { cpu_ns: 0 }, true),
            (WorkerState::Stopped, true),
            (WorkerState::Waiting, false),
            (WorkerState::Gone, false),
            (WorkerState::Unknown, false),
        ] {
            assert_eq!(state.is_elsewhere(), expected, "{state:?}");
        }
    }

    #[test]
    fn the_freest_of_several_processes_settles_it() {
        use WorkerState::{Busy, Gone, Running, Stopped, Unknown, Waiting};
        let (one, other) = (Running { cpu_ns: 5 }, Running { cpu_ns: 7 });
        assert_eq!(one.freest(other), Running { cpu_ns: 12 });
        assert_eq!(Busy.freest(one), one);
        assert_eq!(one.freest(Stopped), one);
        assert_eq!(Waiting.freest(one), Waiting);
        assert_eq!(one.freest(Waiting), Waiting);
        for other in [one, Busy, Stopped, Gone] {
            assert_eq!(Unknown.freest(other), Unknown);
            assert_eq!(other.freest(Unknown), Unknown);
            assert_eq!(Gone.freest(other), other);
            assert_eq!(other.freest(Gone), other);
        }
    }

    #[test]
    fn who_serves_its_queue_many_times_over_has_overtaken() {
        let limits = Limits::default();
        let lap = ProgressBaseline::start(0, &[look(2, 10), look(1, 100), look(0, 0)]);
        let overtaken = |at_ms: u64, queued, accepted| {
            let other = look(queued, accepted);
            lap.overtaken(at_ms * MS, [(1, &other)].into_iter(), limits)
        };
        assert!(overtaken(50, 1, 116));
        assert!(!overtaken(49, 1, 116), "too early to tell");
        assert!(!overtaken(50, 1, 115), "not often enough");
        assert!(!overtaken(50, 2, 116), "its queue is longer");
        assert!(
            !overtaken(500, 0, 99),
            "a count that lags is nothing served"
        );
        let draining = SlotSample {
            serving: false,
            ..look(0, 500)
        };
        assert!(!lap.overtaken(50 * MS, [(1, &draining)].into_iter(), limits));
        let came_later = look(0, 500);
        assert!(!lap.overtaken(50 * MS, [(3, &came_later)].into_iter(), limits));
    }

    /// A slot marked at 0 that had one connection open and one waiting; its worker had 5 ns of CPU time.
    fn marked(lapses: u32) -> SlotHistory {
        let mut memory = SlotHistory::default();
        (0..lapses).for_each(|_| memory.begin_trial());
        memory.mark(0, &look(1, 0), 5);
        memory
    }

    #[test]
    fn a_mark_on_an_empty_queue_lapses_if_its_worker_lives() {
        use WorkerState::{Busy, Gone, Running, Stopped};
        let running = Running { cpu_ns: 6 };
        for (name, rescue, queued, active, worker, expected) in [
            ("it had a CPU", true, 0, 1, (Busy, 6), true),
            ("it has one", true, 0, 1, (running, 6), true),
            (
                "it may not be seen",
                true,
                0,
                1,
                (WorkerState::Unknown, 6),
                true,
            ),
            ("it sleeps all along", true, 0, 1, (Busy, 5), false),
            ("it is stopped", true, 0, 1, (Stopped, 6), false),
            ("it is gone", true, 0, 1, (Gone, 6), false),
            ("connections wait", true, 1, 2, (Busy, 6), false),
            ("what waits is not moved", false, 0, 1, (Busy, 6), false),
            ("it closed the one it had", false, 0, 0, (Busy, 6), true),
            ("the same, but it had no CPU", false, 0, 0, (Busy, 5), false),
        ] {
            let look = SlotSample {
                active,
                ..look(queued, 0)
            };
            let lapsed = |at_ms: u64| lapses(at_ms * MS, &look, &marked(0), rescue, || worker);
            assert_eq!(lapsed(1_000), expected, "{name}");
            assert!(!lapsed(999), "{name}, too early");
        }
        let none = SlotHistory::default();
        assert!(!lapses(9_000 * MS, &look(0, 0), &none, true, || (Busy, 6)));
        let draining = SlotSample {
            serving: false,
            ..look(0, 0)
        };
        assert!(!lapses(9_000 * MS, &draining, &marked(0), true, || (
            Busy, 6
        )));
    }

    #[test]
    fn a_mark_that_comes_back_lapses_later_each_time_until_the_worker_accepts() {
        let lapsed = |memory: &SlotHistory, at_ms: u64| {
            lapses(at_ms * MS, &look(0, 0), memory, true, || {
                (WorkerState::Busy, 6)
            })
        };
        for (before, ms) in [
            (0, 1_000),
            (1, 2_000),
            (4, 16_000),
            (5, 30_000),
            (99, 30_000),
        ] {
            let memory = marked(before);
            assert!(!lapsed(&memory, ms - 1), "{before}");
            assert!(lapsed(&memory, ms), "{before}");
        }
        let mut memory = marked(3);
        memory.stuck_since_ns = None;
        // Its queue was moved: it accepted none of that.
        memory.moved(&look(0, 7));
        assert!(!suspect(MS, &look(1, 7), &mut memory, Limits::default()));
        assert!(memory.is_on_trial());
        assert!(!suspect(
            2 * MS,
            &look(1, 8),
            &mut memory,
            Limits::default()
        ));
        assert!(!memory.is_on_trial());
    }

    #[test]
    fn idle_is_who_has_nothing_to_do() {
        let never =
            || -> WorkerState { panic!("a worker without connections need not be looked at") };
        assert!(idle(
            &SlotSample {
                active: 0,
                ..look(0, 0)
            },
            never
        ));
        assert!(
            idle(&look(0, 0), || WorkerState::Waiting),
            "an event loop with idle connections"
        );
        assert!(!idle(&look(0, 0), || WorkerState::Busy));
        assert!(
            !idle(&look(1, 0), || WorkerState::Waiting),
            "it has something waiting already"
        );
        assert!(!idle(
            &SlotSample {
                serving: false,
                active: 0,
                ..look(0, 0)
            },
            || WorkerState::Waiting
        ));
    }

    #[test]
    fn recovered_is_who_accepts_or_waits_again() {
        let memory = SlotHistory {
            accepted: 7,
            ..SlotHistory::default()
        };
        assert!(recovered(&look(0, 8), &memory, WorkerState::Busy));
        assert!(recovered(&look(0, 7), &memory, WorkerState::Waiting));
        assert!(!recovered(&look(0, 7), &memory, WorkerState::Busy));
        assert!(!recovered(&look(0, 7), &memory, WorkerState::Stopped));
    }

    #[test]
    fn patience_begins_when_something_waits() {
        let mut memory = SlotHistory::default();
        let suspect_at = |memory: &mut SlotHistory, at_ms| {
            suspect(at_ms * MS, &look(1, 0), memory, Limits::default())
        };
        memory.nothing_waits(4 * MS);
        assert!(!suspect_at(&mut memory, 5));
        assert!(!suspect_at(&mut memory, 8));
        assert!(suspect_at(&mut memory, 9));
        // Looks of two threads may come in another order.
        memory.nothing_waits(MS);
        assert!(!suspect_at(&mut memory, 8));
    }

    #[test]
    fn what_was_moved_away_was_not_accepted() {
        let mut memory = SlotHistory::default();
        memory.moved(&look(0, 9));
        assert!(!recovered(&look(0, 9), &memory, WorkerState::Busy));
        assert!(recovered(&look(0, 10), &memory, WorkerState::Busy));
        // Less may be counted as accepted after a move: one more than that is progress.
        memory.moved(&look(0, 5));
        assert!(recovered(&look(0, 6), &memory, WorkerState::Busy));
    }

    #[test]
    fn a_queue_is_moved_only_where_it_fits() {
        assert!(fits(5, [2, 3].into_iter()));
        assert!(!fits(6, [2, 3].into_iter()));
        assert!(!fits(1, std::iter::empty()));
        assert!(fits(u32::MAX, [u32::MAX, u32::MAX].into_iter()));
    }

    /// Long after the mark.
    const LATER_NS: u64 = 60_000_000_000;

    fn having(queued: u32, active: u64) -> SlotSample {
        SlotSample {
            active,
            ..look(queued, 0)
        }
    }

    /// Whether a mark lapses without rescue, where the slot had `marked` when it was set, and has `now`.
    fn lapsed(marked: SlotSample, now: SlotSample) -> bool {
        let mut memory = SlotHistory::default();
        memory.mark(0, &marked, 5);
        lapses(LATER_NS, &now, &memory, false, || (WorkerState::Busy, 6))
    }

    #[test]
    fn a_worker_that_closes_connections_is_none_that_hangs() {
        assert!(lapsed(having(0, 3), having(0, 2)), "it closed one of three");
        assert!(!lapsed(having(0, 3), having(0, 3)), "it closed none");
        assert!(!lapsed(having(0, 3), having(0, 4)), "one came");
        assert!(lapsed(having(0, 3), having(0, 0)), "none is left");
        assert!(lapsed(having(0, 0), having(0, 0)), "it had none");
    }

    #[test]
    fn connections_that_wait_are_none_that_a_worker_has() {
        // Two of its three waited, and were moved.
        assert!(!lapsed(having(2, 3), having(0, 1)));
        assert!(!lapsed(having(2, 5), having(0, 3)));
        assert!(lapsed(having(2, 5), having(0, 2)));
    }

    #[test]
    fn a_trial_ends_when_the_worker_is_seen_to_be_well() {
        let mut memory = SlotHistory::default();
        memory.begin_trial();
        memory.begin_trial();
        assert!(memory.is_on_trial());
        memory.end_trial();
        assert!(!memory.is_on_trial());
    }
}
