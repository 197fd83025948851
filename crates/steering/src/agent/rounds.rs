//! The thread that looks at all groups of a process, one after the other, and another for what takes longer than a look.
//!
//! With a thread for each group, fifty groups that get a hundred connections a second each would wake the machine forty
//! thousand times a second. One thread looks at all those where nothing waits at once, and the pause after that grows with
//! the time it took. A group where something waits or a worker is stuck is looked at as soon as if it were alone.

use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use wakeone_kernel::schedule;

use super::chores::Chores;
use super::rest::{ListenerSet, Waker};
use super::state::{Core, Look};

/// Looks at calm groups may take one part in so many of a CPU, all together, unless the pause were longer than this then.
const CALM_SHARE: u32 = 100;
const LONGEST_CALM: Duration = Duration::from_millis(50);
/// Groups that are not calm rest for this many times as long as the last looks at them took, but no longer than that. So looks of up
/// to 6 ms take a fifth of a CPU at most. With many workers that all have queues a look is long.
const LEISURE: u32 = 4;
const LONGEST_LEISURE: Duration = Duration::from_millis(25);
/// A calm group is looked at this part of its pause too early, if the thread is awake then: many come to be looked at together.
const EARLY_PART: u32 = 4;
/// How soon to come back to a group that somebody else works on.
const BUSY_ELSEWHERE: Duration = Duration::from_millis(1);

/// Looks at groups. Clones share the thread, which ends with the last of them.
#[derive(Debug, Clone, Default)]
pub struct Rounds(Arc<Mutex<Option<Started>>>);

#[derive(Debug)]
struct Started {
    shared: Arc<Shared>,
    chores: Arc<Chores>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    waker: Waker,
    stop: AtomicBool,
    seats: Mutex<Vec<Seated>>,
}

/// One of the groups.
#[derive(Debug)]
struct Seated {
    core: Arc<Mutex<Core>>,
    calls: Arc<Calls>,
    due: Instant,
    /// It is looked at so much earlier if the thread is awake.
    early: Duration,
    calm: bool,
    /// It rests until a connection comes to one of these.
    arrivals: Option<Arc<ListenerSet>>,
    /// Whether its log says that the thread has no priority, if it has none.
    told: bool,
}

/// Before these times no group is looked at, unless somebody asks for it.
#[derive(Debug, Clone, Copy)]
struct Turns {
    /// One that is calm.
    calm: Instant,
    /// Any other.
    hurried: Instant,
}

impl Turns {
    fn of(&self, calm: bool) -> Instant {
        match calm {
            true => self.calm,
            false => self.hurried,
        }
    }
}

/// Requests of other threads.
#[derive(Debug, Default)]
struct Calls {
    /// To look at once.
    look: AtomicBool,
    /// A connection came while the group rested.
    came: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Rounds {
    /// Returns one without groups. Its threads start with the first.
    pub fn new() -> Self {
        Self::default()
    }

    /// Starts the threads, if they do not run: in the network namespace of this thread, and with the capabilities that it has now.
    ///
    /// # Errors
    /// Out of descriptors or threads.
    pub fn start(&self) -> io::Result<()> {
        self.started().map(drop)
    }

    /// Whether the threads run.
    pub fn is_started(&self) -> bool {
        lock(&self.0).is_some()
    }

    fn started(&self) -> io::Result<(Arc<Shared>, Arc<Chores>)> {
        let mut started = lock(&self.0);
        if let Some(one) = &*started {
            return Ok((Arc::clone(&one.shared), Arc::clone(&one.chores)));
        }
        let shared = Arc::new(Shared {
            waker: Waker::new()?,
            stop: AtomicBool::new(false),
            seats: Mutex::default(),
        });
        let chores = Arc::new(Chores::start()?);
        let its = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("agent".into());
        let thread = Some(thread.spawn(move || its.run())?);
        *started = Some(Started {
            shared: Arc::clone(&shared),
            chores: Arc::clone(&chores),
            thread,
        });
        Ok((shared, chores))
    }

    /// Has a group looked at from now on, until the seat is dropped.
    ///
    /// # Errors
    /// The threads cannot be started.
    pub(super) fn join(&self, core: &Arc<Mutex<Core>>) -> io::Result<Seat> {
        let (shared, chores) = self.started()?;
        let calls = Arc::new(Calls::default());
        lock(&shared.seats).push(Seated {
            core: Arc::clone(core),
            calls: Arc::clone(&calls),
            due: Instant::now(),
            early: Duration::ZERO,
            calm: false,
            arrivals: None,
            told: false,
        });
        let caller = Caller { shared, calls };
        caller.call();
        Ok(Seat {
            caller,
            chores,
            _rounds: self.clone(),
        })
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.shared.stop.store(true, Release);
        self.shared.waker.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Asks for a look at one group.
#[derive(Debug, Clone)]
pub(super) struct Caller {
    shared: Arc<Shared>,
    calls: Arc<Calls>,
}

impl Caller {
    /// Has the group looked at now.
    pub fn call(&self) {
        self.calls.look.store(true, Release);
        self.shared.waker.wake();
    }
}

/// A group's place among those that are looked at. Dropping this ends it, after the look that is under way.
#[derive(Debug)]
pub(super) struct Seat {
    caller: Caller,
    pub chores: Arc<Chores>,
    _rounds: Rounds,
}

impl Seat {
    /// Returns what asks for a look.
    pub fn caller(&self) -> &Caller {
        &self.caller
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let is_other = |seated: &Seated| !Arc::ptr_eq(&seated.calls, &self.caller.calls);
        lock(&self.caller.shared.seats).retain(is_other);
    }
}

impl Shared {
    fn run(&self) {
        let no_priority = schedule::real_time().err();
        let now = Instant::now();
        let mut turns = Turns {
            calm: now,
            hurried: now,
        };
        while !self.stop.load(Acquire) {
            let sleep = self.round(&mut turns, no_priority.as_ref());
            let sets = sleep.rests.iter().map(|(set, _)| &**set);
            for came in self.waker.sleep(sleep.time, sets) {
                sleep.rests[came].1.came.store(true, Release);
            }
        }
    }

    /// Looks at all groups whose turn it is.
    fn round(&self, turns: &mut Turns, no_priority: Option<&io::Error>) -> Sleep {
        let mut seats = lock(&self.seats);
        let begun = Instant::now();
        let (mut calmly, mut hurriedly) = (Duration::ZERO, Duration::ZERO);
        for seated in seats.iter_mut() {
            let called = seated.calls.look.swap(false, AcqRel);
            let came = seated.calls.came.swap(false, AcqRel);
            if !called && !came && !seated.is_due(begun, turns) {
                continue;
            }
            let core = Arc::clone(&seated.core);
            let core = match core.try_lock() {
                Ok(core) => core,
                Err(TryLockError::Poisoned(core)) => core.into_inner(),
                Err(TryLockError::WouldBlock) => {
                    seated.put_off(begun, called, came);
                    continue;
                }
            };
            let spent = seated.look(core, came, no_priority);
            match seated.calm {
                true => calmly += spent,
                false => hurriedly += spent,
            }
        }
        if !calmly.is_zero() {
            turns.calm = begun + (calmly * CALM_SHARE).min(LONGEST_CALM);
        }
        if !hurriedly.is_zero() {
            turns.hurried = Instant::now() + (hurriedly * LEISURE).min(LONGEST_LEISURE);
        }
        Sleep::until_due(&seats, turns)
    }
}

impl Seated {
    fn is_due(&self, now: Instant, turns: &Turns) -> bool {
        now + self.early >= self.due && now >= turns.of(self.calm)
    }

    /// Looks at the group, and notes when to look again. Returns how long it took.
    fn look(
        &mut self,
        mut core: MutexGuard<'_, Core>,
        came: bool,
        no_priority: Option<&io::Error>,
    ) -> Duration {
        let begun = Instant::now();
        if let Some(error) = no_priority
            && !std::mem::replace(&mut self.told, true)
        {
            core.note_no_priority(error);
        }
        if came {
            core.came();
        }
        let Look { pause, calm } = core.tick();
        let spent = begun.elapsed();
        let (pause, arrivals) = core.rest(pause);
        self.due = Instant::now() + pause;
        self.early = match calm {
            true => pause / EARLY_PART,
            false => Duration::ZERO,
        };
        // One that rests for long is none of those that share a time.
        self.calm = calm && arrivals.is_none();
        self.arrivals = arrivals;
        spent
    }

    /// Comes back soon to a group that somebody else works on.
    fn put_off(&mut self, now: Instant, called: bool, came: bool) {
        self.calls.look.fetch_or(called, AcqRel);
        self.calls.came.fetch_or(came, AcqRel);
        self.due = now + BUSY_ELSEWHERE;
        self.early = Duration::ZERO;
        self.calm = false;
    }
}

/// For how long to sleep, and on what.
struct Sleep {
    time: Duration,
    rests: Vec<(Arc<ListenerSet>, Arc<Calls>)>,
}

impl Sleep {
    fn until_due(seats: &[Seated], turns: &Turns) -> Self {
        let now = Instant::now();
        let due = |seated: &Seated| seated.due.max(turns.of(seated.calm));
        let next = seats.iter().map(due).min();
        let rest = |seated: &Seated| {
            let set = seated.arrivals.as_ref()?;
            Some((Arc::clone(set), Arc::clone(&seated.calls)))
        };
        Self {
            // Without groups it sleeps until there is one.
            time: next.map_or(Duration::MAX, |next| next.saturating_duration_since(now)),
            rests: seats.iter().filter_map(rest).collect(),
        }
    }
}
