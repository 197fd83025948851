//! Running a plan: one engine a thread, progress from this one.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::engine::{Engine, Task};
use crate::live::Live;
use crate::progress::{Event, Message, Progress};
use crate::recorder::Recorder;
use crate::socket::{connect, source_address};
use crate::{Arrivals, Error, Interval, Outcome, Plan, Sources};

/// The interval of progress reports.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);
/// Descriptors that are not connections: standard streams, epoll instances, what the caller has open.
const OTHER_DESCRIPTORS: u64 = 64;

/// Sends `plan` and returns its outcome. `progress` is called about ten times a second and once at the end. Setting
/// `cancel` ends the load within about 100 ms; requests under way then are counted as cancelled.
///
/// Raises the process's soft limit of file descriptors to its hard one, since every request may need one.
///
/// # Errors
/// [`Error::Plan`] for a plan that cannot be run, [`Error::System`] if the kernel refuses something that the engine
/// needs. Failed requests are no such error: they are counted in [`Outcome::errors`].
pub fn run(
    plan: &Plan,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Outcome, Error> {
    observe(plan, cancel, None, &mut |event| {
        if let Event::Progress(now) = event {
            progress(now);
        }
    })
}

/// Runs a plan as [`run`] does, and reports each interval of length `every` as well.
///
/// # Errors
/// The errors of [`run`].
pub fn observe(
    plan: &Plan,
    cancel: &AtomicBool,
    every: Option<Duration>,
    tell: &mut dyn FnMut(Event<'_>),
) -> Result<Outcome, Error> {
    observe_live(plan, cancel, every, &Live::new(plan), tell)
}

/// Runs a plan as [`observe`] does. Meanwhile other threads can read its counts and change its target.
///
/// # Errors
/// The errors of [`run`].
pub fn observe_live(
    plan: &Plan,
    cancel: &AtomicBool,
    every: Option<Duration>,
    live: &Live,
    tell: &mut dyn FnMut(Event<'_>),
) -> Result<Outcome, Error> {
    plan.check()?;
    check_descriptors(plan, raise_descriptor_limit())?;
    let mut opened = open_apart(plan, live, cancel);
    let start = Instant::now();
    // A thread that fails stops the others.
    let stop = AtomicBool::new(false);
    let notes = thread::scope(|scope| {
        let (messages, receiver) = channel();
        for thread in 0..plan.threads {
            let (messages, cancel) = (messages.clone(), &stop);
            let opened = std::mem::take(&mut opened[thread]);
            scope.spawn(move || {
                let done = messages.clone();
                let result = send(Task {
                    plan,
                    thread,
                    start,
                    interval: every,
                    cancel,
                    live,
                    messages,
                    opened,
                });
                // The receiver lives until every sender is gone.
                let _ = done.send(Message::Done { thread, result });
            });
        }
        drop(messages);
        let mut desk = Desk::new(plan, every);
        let mut failed = None;
        loop {
            match receiver.recv_timeout(PROGRESS_EVERY) {
                Ok(Message::Notes {
                    thread,
                    interval,
                    notes,
                }) => desk.take(thread, interval, *notes),
                Ok(Message::Done {
                    thread,
                    result: Ok(notes),
                }) => desk.close(thread, *notes),
                Ok(Message::Done {
                    result: Err(error), ..
                }) => failed = failed.or(Some(error)),
                Err(RecvTimeoutError::Timeout) => tell(Event::Progress(&look(live, start))),
                Err(RecvTimeoutError::Disconnected) => break,
            }
            while let Some(interval) = desk.finished() {
                tell(Event::Interval(&interval));
            }
            if failed.is_some() || cancel.load(Relaxed) {
                stop.store(true, Relaxed);
            }
        }
        failed.map_or(Ok(desk.all), Err)
    })?;
    tell(Event::Progress(&look(live, start)));
    let mut outcome = notes.outcome(plan);
    let asked = plan.stop.requests.map(|all| plan.shard.share(all));
    if asked.is_none_or(|n| outcome.planned < n) && !stop.load(Relaxed) {
        // The duration ended it: a quiet end is part of the load.
        outcome.elapsed = outcome.elapsed.max(plan.length().unwrap_or_default());
    }
    Ok(outcome)
}

/// Opens the connections that a plan needs beforehand: each thread's share of them, in turn. A connection that cannot
/// be opened is left out; its thread opens it later, as it does a lost one.
fn open_apart(plan: &Plan, live: &Live, cancel: &AtomicBool) -> Vec<Vec<OwnedFd>> {
    let mut opened: Vec<Vec<OwnedFd>> = (0..plan.threads).map(|_| Vec::new()).collect();
    let Arrivals::Kept {
        connections, apart, ..
    } = plan.arrivals
    else {
        return opened;
    };
    let sources = match plan.sources {
        Sources::System => 1,
        Sources::Loopback { count } => count as usize,
    };
    let lanes = plan.lanes();
    for number in 0..connections {
        if cancel.load(Relaxed) {
            break;
        }
        let thread = (0..plan.threads).find(|thread| plan.lane(*thread) == number % lanes);
        if let Some(thread) = thread {
            let from = source_address(plan.sources, (number % sources) as u32);
            opened[thread].extend(connect(live.target(), from));
        }
        // Also while another shard opens its own.
        thread::sleep(apart);
    }
    opened
}

fn send(task: Task<'_>) -> Result<Box<Recorder>, Error> {
    // The default slack lets the kernel wake a sleeper 50 µs late, which is more than many answers take.
    rustix::thread::set_current_timer_slack(NonZeroU64::new(1))
        .map_err(Error::system("set the timer slack"))?;
    Engine::new(task)?.run().map(Box::new)
}

/// Merges the threads' notes, by interval and as a whole.
struct Desk<'a> {
    plan: &'a Plan,
    every: Option<Duration>,
    all: Recorder,
    /// Intervals that some thread may still add to.
    open: BTreeMap<u64, Recorder>,
    /// The interval that each thread is in; `None` once it is done.
    threads: Vec<Option<u64>>,
    /// Connections that each thread has open, and had at most.
    connected: Vec<[u64; 2]>,
}

impl<'a> Desk<'a> {
    fn new(plan: &'a Plan, every: Option<Duration>) -> Self {
        Self {
            plan,
            every,
            all: Recorder::new(plan),
            open: BTreeMap::new(),
            threads: vec![Some(0); plan.threads],
            connected: vec![[0; 2]; plan.threads],
        }
    }

    fn take(&mut self, thread: usize, interval: u64, notes: Recorder) {
        self.threads[thread] = Some(interval + 1);
        self.add(thread, &notes);
        match self.open.entry(interval) {
            Entry::Occupied(mut open) => open.get_mut().add(&notes),
            Entry::Vacant(open) => drop(open.insert(notes)),
        }
    }

    fn add(&mut self, thread: usize, notes: &Recorder) {
        self.all.add(notes);
        self.connected[thread] = [notes.open, notes.open_max];
        [self.all.open, self.all.open_max] =
            [0, 1].map(|which| self.connected.iter().map(|of| of[which]).sum());
    }

    fn close(&mut self, thread: usize, notes: Recorder) {
        match self.every {
            Some(every) => {
                let last = u128::from(notes.last_end_ns) / every.as_nanos().max(1);
                let last = u64::try_from(last)
                    .unwrap_or(u64::MAX)
                    .max(self.threads[thread].unwrap_or(0));
                self.take(thread, last, notes);
            }
            None => self.add(thread, &notes),
        }
        self.threads[thread] = None;
    }

    /// The earliest interval, if no thread can add to it.
    fn finished(&mut self) -> Option<Interval> {
        let (every, first) = (self.every?, self.open.first_entry()?);
        let index = *first.key();
        if self.threads.iter().flatten().any(|&now| now <= index) {
            return None;
        }
        let notes = first.remove();
        let start = every.saturating_mul(u32::try_from(index).unwrap_or(u32::MAX));
        let whole = self.threads.iter().any(Option::is_some) || !self.open.is_empty();
        let end =
            Duration::from_nanos(self.all.last_end_ns).max(self.plan.length().unwrap_or_default());
        let length = if whole {
            every
        } else {
            end.saturating_sub(start).min(every)
        };
        Some(notes.interval(start, length))
    }
}

fn look(live: &Live, start: Instant) -> Progress {
    Progress {
        elapsed: start.elapsed(),
        ..live.progress()
    }
}

/// Raises the soft limit of open files to the hard one; returns the limit then in force.
pub fn raise_descriptor_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum.unwrap_or(u64::MAX),
        Err(_) => limit.current.unwrap_or(u64::MAX),
    }
}

fn check_descriptors(plan: &Plan, limit: u64) -> Result<(), Error> {
    let clients = match plan.arrivals {
        Arrivals::Closed { concurrency } => concurrency,
        Arrivals::Profile { at_most, .. } => at_most.unwrap_or(0),
        Arrivals::Kept { connections, .. } => connections,
        Arrivals::Open { .. } => 0,
    };
    if clients == 0 || (clients as u64).saturating_add(OTHER_DESCRIPTORS) <= limit {
        return Ok(());
    }
    Err(Error::Plan(format!(
        "{clients} simultaneous clients need more than the {limit} open files that this process may have: \
         ask for fewer or raise the limit (ulimit -Hn)"
    )))
}
