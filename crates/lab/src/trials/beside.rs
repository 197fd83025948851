//! The events that a server meets under load: restarts, and workers that do nothing else for a while.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use wakeone_load::Plan;

use super::server::Who;
use super::sizes::Sizes;
use crate::error::{Error, joined};
use crate::experiment::Context;
use crate::under_test::ServerUnderTest;
use crate::{measure, probe};

/// Something that happens once, or a number of times.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub enum Beside {
    /// It is restarted, or reloaded, so often, and so many seconds pass before, between and after. Then the load ends.
    Restarts(usize, Sizes<f64>),
    /// One worker is stopped: after so many seconds, for so many.
    Stops(f64, f64),
    /// One worker is busy with a request of this path: after so many seconds, for so many. `{us}` stands for how long.
    Busy(f64, f64, String),
    /// One worker is busy with a request of this path, and the load begins a moment later.
    Pinned(Sizes<f64>, String),
}

/// The delay from the request that pins a worker to the others, so that it is under way then.
const HEAD_START: Duration = Duration::from_millis(300);

impl Beside {
    /// About how long it takes.
    pub fn seconds(&self, quick: bool) -> f64 {
        match self {
            Beside::Restarts(times, pause) => pause.of(quick) * (*times as f64 + 1.0) + 0.5,
            Beside::Stops(after, lasts) | Beside::Busy(after, lasts, _) => after + lasts,
            Beside::Pinned(lasts, _) => lasts.of(quick),
        }
    }

    /// Whether several generations of workers serve.
    pub fn restarts(&self) -> Option<usize> {
        match self {
            Beside::Restarts(times, _) => Some(*times),
            _ => None,
        }
    }

    /// It, as a parameter of a result.
    pub fn parameter(&self, quick: bool) -> serde_json::Value {
        let sized = |value: Sizes<f64>| Sizes::Same(value.of(quick));
        let this = match self {
            Beside::Restarts(times, pause) => Beside::Restarts(*times, sized(*pause)),
            Beside::Pinned(lasts, path) => Beside::Pinned(sized(*lasts), path.clone()),
            other => other.clone(),
        };
        serde_json::json!(this)
    }
}

/// A server under a load, and what becomes of it.
pub struct Trial<'a> {
    /// Who it is.
    pub who: Who,
    /// Its workers.
    pub workers: usize,
    /// The load.
    pub plan: &'a Plan,
    /// How long that typically takes, for the progress.
    pub typical_s: f64,
}

/// Sends a load while this happens. Enters the clients' counts, and returns also how long the restarts took together.
///
/// # Errors
/// When the load, or what happens beside it, fails.
pub fn load(
    trial: &Trial<'_>,
    server: &mut ServerUnderTest,
    beside: Option<&Beside>,
    context: &mut Context<'_>,
) -> Result<(wakeone_load::Outcome, Duration), Error> {
    let plan = trial.plan;
    match beside {
        None => Ok((server.load(plan, context)?, Duration::ZERO)),
        Some(Beside::Pinned(lasts, path)) => {
            let lasts = Duration::from_secs_f64(lasts.of(context.settings.quick));
            let (found, _) =
                load_while_pinned(server, plan, (&with_us(path, lasts), lasts), context)?;
            Ok((found, Duration::ZERO))
        }
        Some(Beside::Restarts(times, pause)) => {
            let pause = Duration::from_secs_f64(pause.of(context.settings.quick));
            under_restarts(trial, server, (*times, pause), context)
        }
        Some(lost) => {
            let (address, worker) = (server.address, server.workers[server.workers.len() / 2]);
            let (found, others) = std::thread::scope(|scope| {
                let lose = scope.spawn(move || lose_one(lost, address, worker));
                (measure::load(plan, context), lose.join())
            });
            let others = joined(others)?;
            let found = found?;
            server.answers.client_saw(&found);
            server.answers.client_counted(others, 0);
            Ok((found, Duration::ZERO))
        }
    }
}

fn with_us(path: &str, lasts: Duration) -> String {
    path.replace("{us}", &lasts.as_micros().to_string())
}

/// Sends a load while one worker is busy with a request for this path, which takes so long. Enters the clients' counts.
/// Returns also how long the worker was still busy when the load began, in s.
///
/// # Errors
/// When a request or the load fails.
pub fn load_while_pinned(
    server: &mut ServerUnderTest,
    plan: &Plan,
    (path, length): (&str, Duration),
    context: &mut Context<'_>,
) -> Result<(wakeone_load::Outcome, f64), Error> {
    let address = server.address;
    let begun = Instant::now();
    let (found, left_s, kept) = std::thread::scope(|scope| {
        let pin = scope.spawn(move || probe::body_within(address, path, length * 3));
        std::thread::sleep(HEAD_START);
        let left_s = length.saturating_sub(begun.elapsed()).as_secs_f64();
        (server.load(plan, context), left_s, pin.join())
    });
    joined(kept)?;
    server.answers.client_counted(1, 0);
    Ok((found?, left_s))
}

fn under_restarts(
    trial: &Trial<'_>,
    server: &mut ServerUnderTest,
    (times, pause): (usize, Duration),
    context: &mut Context<'_>,
) -> Result<(wakeone_load::Outcome, Duration), Error> {
    let over = AtomicBool::new(false);
    let (found, took) = std::thread::scope(|scope| {
        let (server, over) = (&mut *server, &over);
        let thread = scope.spawn(move || {
            let restart = |nth| trial.who.restart(server, trial.workers, nth);
            let took = restart_all(restart, times, pause);
            over.store(true, Ordering::Relaxed);
            took
        });
        let found = measure::load_until(trial.plan, over, trial.typical_s, context);
        (found, thread.join())
    });
    let took = joined(took)?;
    let found = found?;
    server.answers.client_saw(&found);
    Ok((found, took))
}

/// Restarts so many times, with a pause before each and one after the last. Returns the time without the pauses.
///
/// # Errors
/// Those of a restart.
pub fn restart_all(
    mut restart: impl FnMut(usize) -> Result<(), Error>,
    times: usize,
    pause: Duration,
) -> Result<Duration, Error> {
    let mut took = Duration::ZERO;
    for nth in 1..=times {
        std::thread::sleep(pause);
        let start = Instant::now();
        restart(nth)?;
        took += start.elapsed();
    }
    std::thread::sleep(pause);
    Ok(took)
}

/// Takes one worker away for a while. Returns how many requests that took.
fn lose_one(what: &Beside, address: SocketAddr, worker: u32) -> Result<u64, Error> {
    match what {
        Beside::Busy(after, lasts, path) => {
            std::thread::sleep(Duration::from_secs_f64(*after));
            let lasts = Duration::from_secs_f64(*lasts);
            probe::body(address, &with_us(path, lasts)).map(|_| 1)
        }
        Beside::Stops(after, lasts) => {
            std::thread::sleep(Duration::from_secs_f64(*after));
            signal(worker, Signal::SIGSTOP)?;
            std::thread::sleep(Duration::from_secs_f64(*lasts));
            signal(worker, Signal::SIGCONT).map(|()| 0)
        }
        _ => Ok(0),
    }
}

fn signal(worker: u32, signal: Signal) -> Result<(), Error> {
    kill(Pid::from_raw(worker.cast_signed()), signal)
        .map_err(|e| Error::Server(format!("sending {signal} to a worker failed: {e}")))
}
