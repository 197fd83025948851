//! The losses of a load while workers are killed, replaced, and left without a supervisor: only the connections that a
//! killed worker had accepted.
//!
//! The load is 300 connections/s for 6 s; with `WAKEONE_SOAK=1`, on an idle machine, 2,000/s for 20 s.

#[path = "support/mod.rs"]
mod support;

use rustix::process::Signal;
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use support::steered::{
    PREFORKED, assert_counts_are_exact, assert_nothing_left, isolated, signal_all, soak, status,
    worker,
};
use support::{Ground, slowness};
use wakeone_load::{Arrivals, ErrorKind, Mix, Outcome, Plan, Shard, Sources, Spacing, Stop};

const WORKERS: usize = 4;
const OPTIONS: [&str; 6] = ["-w", "4", "-l", "127.0.0.1:8080", "--name", "web"];

/// An open-loop load that goes on until it is ended, but at least for the wanted time.
struct Load {
    begun: Instant,
    enough: Duration,
    cancel: Arc<AtomicBool>,
    thread: JoinHandle<Outcome>,
}

impl Load {
    fn start(target: SocketAddr) -> Self {
        let (rate_per_s, enough) = if soak() {
            (2_000.0, Duration::from_secs(20))
        } else {
            (300.0, Duration::from_secs(6))
        };
        // A slow machine gets as many connections in a longer time. More than its workers can serve would overflow the
        // accept queues: there the kernel drops requests, and a worker gives up those that come too late.
        let (rate_per_s, enough) = (rate_per_s / f64::from(slowness()), enough * slowness());
        let plan = Plan {
            target: target.into(),
            host: "test".into(),
            arrivals: Arrivals::Open {
                rate_per_s,
                spacing: Spacing::Poisson,
            },
            // On a machine that is slow to replace workers the load lasts longer, up to this limit.
            stop: Stop {
                requests: None,
                duration: Some(enough + support::long_patience()),
            },
            mix: Mix::one("/work?us=1000&kind=sleep"),
            sources: Sources::Loopback { count: 200 },
            timeout: support::long_patience(),
            seed: 1,
            threads: 1,
            keep_alive: false,
            shard: Shard::default(),
        };
        let cancel = Arc::new(AtomicBool::new(false));
        let thread = {
            let cancel = cancel.clone();
            std::thread::spawn(move || {
                wakeone_load::run(&plan, &cancel, &mut |_| {}).expect("the load runs")
            })
        };
        Self {
            begun: Instant::now(),
            enough,
            cancel,
            thread,
        }
    }

    fn has_had_enough(&self) -> bool {
        self.begun.elapsed() >= self.enough
    }

    /// Ends the load and returns its outcome. The few requests under way at the end are neither answered nor lost.
    fn end(self) -> Outcome {
        std::thread::sleep(self.enough.saturating_sub(self.begun.elapsed()));
        self.cancel.store(true, Ordering::Relaxed);
        let outcome = self.thread.join().expect("load");
        eprintln!(
            "{} connections, {} answers, {} under way at the end, p99 {:.1} ms, errors {:?}",
            outcome.connections,
            outcome.completed,
            outcome.cancelled,
            outcome.latency.value_at_quantile(0.99) as f64 / 1e6,
            outcome.errors
        );
        assert_eq!(
            outcome.completed + outcome.error_count() + outcome.cancelled,
            outcome.planned
        );
        assert!(outcome.completed > 300, "{outcome:?}");
        outcome
    }
}

fn anyone() -> usize {
    (RandomState::new().hash_one(0) % WORKERS as u64) as usize
}

/// Kills all processes of a running worker, as the kernel's out-of-memory killer would.
fn kill_someone(ground: &Ground) -> bool {
    let group = status(ground, "web");
    let first = anyone();
    let up = (0..WORKERS)
        .map(|next| (first + next) % WORKERS)
        .find(|slot| group["slots"][*slot]["state"] == "up");
    let victim = up.and_then(|slot| worker(&group, slot));
    victim.is_some_and(|victim| {
        signal_all(victim, Signal::KILL);
        true
    })
}

#[test]
fn a_killed_worker_loses_what_it_had_accepted_and_nothing_else() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.run(&OPTIONS, &PREFORKED);
    let load = Load::start(run.ready());
    let mut kills = 0;
    while !load.has_had_enough() {
        std::thread::sleep(Duration::from_millis(500));
        kills += u64::from(kill_someone(&ground));
    }
    let outcome = load.end();
    assert!(kills >= 5, "only {kills} workers were killed");
    // A blocking worker has one connection in hand.
    let lost = outcome.error_count();
    eprintln!("{kills} workers killed, {lost} requests lost");
    assert!(lost <= kills, "{lost} lost by {kills} deaths");
    for kind in outcome.errors.keys() {
        assert!(
            matches!(kind, ErrorKind::Reset | ErrorKind::EofEarly),
            "{:?}",
            outcome.errors
        );
    }
    let group = assert_counts_are_exact(&ground, "web", outcome.connections);
    let restarts = support::steered::sum(&group, "restarts");
    assert!(restarts >= kills as i64, "{restarts} for {kills} kills");
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn a_rolling_restart_loses_nothing() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.run(&OPTIONS, &PREFORKED);
    let load = Load::start(run.ready());
    let before: Vec<_> = (0..WORKERS)
        .map(|slot| worker(&status(&ground, "web"), slot))
        .collect();
    let mut rolls = 0;
    while rolls == 0 || !load.has_had_enough() {
        run.signal(Signal::HUP);
        run.line("rolling restart done: 4 workers replaced");
        rolls += 1;
    }
    let outcome = load.end();
    eprintln!("{rolls} rolling restarts");
    assert!(outcome.errors.is_empty(), "{:?}", outcome.errors);
    let group = assert_counts_are_exact(&ground, "web", outcome.connections);
    for (slot, before) in before.into_iter().enumerate() {
        assert_ne!(worker(&group, slot), before);
    }
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn a_killed_supervisor_and_agent_lose_nothing_and_the_counts_stay_exact() {
    let Some(ground) = isolated() else { return };
    let mut first = ground.run(&OPTIONS, &PREFORKED);
    let load = Load::start(first.ready());
    let before: Vec<_> = (0..WORKERS)
        .map(|slot| worker(&status(&ground, "web"), slot))
        .collect();
    std::thread::sleep(Duration::from_secs(1));
    first.murder();
    std::thread::sleep(Duration::from_secs(2));
    let alone = status(&ground, "web");
    assert!(
        alone["supervisor_pid"].is_null() && alone["steered"] == true && alone["agent"] == false,
        "{alone}"
    );
    let mut second = ground.run(&OPTIONS, &PREFORKED);
    second.ready();
    let outcome = load.end();
    assert!(outcome.errors.is_empty(), "{:?}", outcome.errors);
    // One program counted from the first connection to the last, also those served while the supervisor was dead.
    let group = assert_counts_are_exact(&ground, "web", outcome.connections);
    for (slot, before) in before.into_iter().enumerate() {
        assert_eq!(worker(&group, slot), before, "nobody was restarted");
    }
    assert!(group["agent"] == true, "{group}");
    second.stop();
    assert_nothing_left(&ground);
}
