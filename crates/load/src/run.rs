//! Running a plan: one engine a thread, progress from this one.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::engine::{Engine, Shown};
use crate::recorder::Recorder;
use crate::{Arrivals, Error, Outcome, Plan};

/// How often progress is told.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);
/// Descriptors that are not connections: standard streams, epoll instances, what the caller has open.
const OTHER_DESCRIPTORS: u64 = 64;

/// How far a load is.
#[derive(Debug, Clone, Copy, Default)]
pub struct Progress {
    /// Since the start.
    pub elapsed: Duration,
    /// Requests that have become due.
    pub planned: u64,
    /// Requests begun.
    pub started: u64,
    /// 2xx answers.
    pub completed: u64,
    /// Failures of all kinds.
    pub errors: u64,
    /// Requests under way.
    pub in_flight: u64,
}

/// Sends `plan` and says what came of it. `progress` is called about ten times a second and once at the end; setting
/// `cancel` ends the load within 50 ms, and requests then under way are counted as cancelled.
///
/// Raises the process's soft limit of file descriptors to its hard one, since every request may need one.
///
/// # Errors
/// [`Error::Plan`] for a plan that cannot be run, [`Error::System`] if the kernel refuses what the engine needs. Requests
/// that fail are no such error: they are counted in [`Outcome::errors`].
pub fn run(
    plan: &Plan,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Outcome, Error> {
    plan.check()?;
    check_descriptors(plan, raise_descriptor_limit())?;
    let shown: Vec<Shown> = (0..plan.threads).map(|_| Shown::default()).collect();
    let start = Instant::now();
    // A thread that fails stops the others.
    let stop = AtomicBool::new(false);
    let threads = thread::scope(|scope| {
        let (sender, receiver) = channel();
        for (number, shown) in shown.iter().enumerate() {
            let (sender, stop) = (sender.clone(), &stop);
            scope.spawn(move || {
                let result = engine(plan, number, start, stop, shown);
                // The receiver lives until every sender is gone.
                let _ = sender.send(result);
            });
        }
        drop(sender);
        let mut threads = Vec::with_capacity(plan.threads);
        let mut failed = None;
        loop {
            match receiver.recv_timeout(PROGRESS_EVERY) {
                Ok(Ok(recorder)) => threads.push(recorder),
                Ok(Err(error)) => failed = failed.or(Some(error)),
                Err(RecvTimeoutError::Timeout) => progress(&look(&shown, start)),
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if failed.is_some() || cancel.load(Relaxed) {
                stop.store(true, Relaxed);
            }
        }
        failed.map_or(Ok(threads), Err)
    })?;
    progress(&look(&shown, start));
    let mut outcome = Recorder::outcome(plan, threads);
    if outcome.cancelled == 0
        && plan.stop.requests.is_none_or(|n| outcome.planned < n)
        && !cancel.load(Relaxed)
    {
        // The duration ended it: a quiet end is part of the load.
        outcome.elapsed = outcome.elapsed.max(plan.stop.duration.unwrap_or_default());
    }
    Ok(outcome)
}

fn engine(
    plan: &Plan,
    number: usize,
    start: Instant,
    stop: &AtomicBool,
    shown: &Shown,
) -> Result<Recorder, Error> {
    // The default slack lets the kernel wake a sleeper 50 µs late, which is more than many answers take.
    rustix::thread::set_current_timer_slack(NonZeroU64::new(1))
        .map_err(Error::system("set the timer slack"))?;
    Engine::new(plan, number, start, stop, shown)?.run()
}

fn look(shown: &[Shown], start: Instant) -> Progress {
    let mut sum = Progress {
        elapsed: start.elapsed(),
        ..Progress::default()
    };
    for thread in shown {
        sum.planned += thread.planned.load(Relaxed);
        sum.started += thread.started.load(Relaxed);
        sum.completed += thread.completed.load(Relaxed);
        sum.errors += thread.errors.load(Relaxed);
        sum.in_flight += thread.in_flight.load(Relaxed);
    }
    sum
}

/// Raises the soft limit of open files to the hard one; gives the limit then in force.
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
    match plan.arrivals {
        Arrivals::Closed { concurrency } if concurrency as u64 + OTHER_DESCRIPTORS > limit => {
            Err(Error::Plan(format!(
                "{concurrency} simultaneous clients need more than the {limit} open files that this process may have: \
                 ask for fewer or raise the limit (ulimit -Hn)"
            )))
        }
        _ => Ok(()),
    }
}
