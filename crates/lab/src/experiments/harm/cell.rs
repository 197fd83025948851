//! One server in one situation, in one way, once.

use hdrhistogram::Histogram;
use serde_json::Value;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use wakeone_load::{Arrivals, Mix, Plan, Spacing};

use super::subjects::{Subject, WORKERS, rescue_options};
use super::{Situation, Way, clients, load_seconds, moves};
use crate::error::Error;
use crate::experiment::{Context, Sample};
use crate::under_test::ServerUnderTest;
use crate::{measure, process, status};

/// Short requests a second.
pub const RATE_PER_S: f64 = 300.0;
/// How long a short request keeps its worker.
pub const USUAL_US: u64 = 2_000;
/// How long a long one does.
pub const LONG_US: u64 = 100_000;
/// Requests a second where most of them block their worker, and for how long.
const BUSY: (f64, u64) = (500.0, 6_000);
const CONNECTIONS: usize = 64;
const APART: Duration = Duration::from_millis(10);
const RESTARTS: usize = 2;
/// A request without an answer after this time is lost.
const PATIENCE: Duration = Duration::from_secs(5);
/// No load lasts longer than this, whatever becomes of a restart.
const LONGEST: f64 = 90.0;
/// For how long the server is watched without load.
const IDLE: Duration = Duration::from_millis(500);

/// Measures it. A refusal, and a server that does not start or end well, are results.
///
/// # Errors
/// When the user stops it, or this machine lacks something.
pub fn measure(
    subject: &Subject,
    situation: Situation,
    way: Way,
    context: &mut Context<'_>,
) -> Result<Sample, Error> {
    let found = attempt(subject, situation, way, context);
    let (metric, why) = match found {
        Err(Error::Refused(why)) => ("refused", why),
        Err(error @ (Error::Server(_) | Error::Counts { .. })) => ("failed", error.to_string()),
        other => return other,
    };
    let mut sample = Sample::default();
    sample.put(metric, "count", 1.0);
    sample.notes.insert(metric.into(), why);
    Ok(sample)
}

fn attempt(
    subject: &Subject,
    situation: Situation,
    way: Way,
    context: &mut Context<'_>,
) -> Result<Sample, Error> {
    let begun = Instant::now();
    let mut server = ServerUnderTest::start(subject.launch(situation, way)?)?;
    let ready = begun.elapsed();
    match way {
        Way::Attach => server.attach(subject.scheme, &[])?,
        Way::AttachRescue => {
            let options = [&["--rescue"], rescue_options(situation)].concat();
            server.attach(subject.scheme, &options)?;
        }
        _ => {}
    }
    let mut sample = under_load(&mut server, subject, situation, way, context)?;
    if situation == Situation::Moves {
        // Nobody would have workers pass for stuck so soon. It is asked whether something breaks.
        let times = |name: &str| name.starts_with("latency_ms") || name == "busiest";
        sample.metrics.retain(|name, _| !times(name));
    }
    if situation == Situation::Restart {
        // Several generations have served, each for another time.
        sample.metrics.remove("busiest");
    }
    sample.put("ready_s", "s", ready.as_secs_f64());
    at_rest(&mut server, subject, way, &mut sample)?;
    server.stop(&mut sample)?;
    Ok(sample)
}

/// The load, and the restarts under it.
fn under_load(
    server: &mut ServerUnderTest,
    subject: &Subject,
    situation: Situation,
    way: Way,
    context: &mut Context<'_>,
) -> Result<Sample, Error> {
    let load = Load::new(server, subject, situation, context)?;
    let over = AtomicBool::new(false);
    let quick = context.settings.quick;
    let (found, done) = std::thread::scope(|scope| {
        let over = &over;
        let server = &mut *server;
        let thread = scope.spawn(move || beside(server, subject, situation, way, (quick, over)));
        let found = load.send(over, context);
        over.store(true, Ordering::Relaxed);
        (found, thread.join())
    });
    let (mut sample, whole, open) = found?;
    done.unwrap_or_else(|_| Err(Error::Server("a thread of the experiment panicked".into())))?;
    match whole {
        Counted::ByLoad(outcome) => server.answers.client_saw(&outcome),
        Counted::Answers(whole) => server.answers.client_counted(whole, open),
    }
    // Which worker it was is of no matter, and processes of several generations have served.
    sample
        .metrics
        .retain(|name, _| !name.starts_with("share_worker_"));
    Ok(sample)
}

/// Does what a situation has beside the load, and then ends the load. Most have nothing, and a load with an end of its own.
fn beside(
    server: &mut ServerUnderTest,
    subject: &Subject,
    situation: Situation,
    way: Way,
    (quick, over): (bool, &AtomicBool),
) -> Result<(), Error> {
    let seconds = Duration::from_secs_f64(load_seconds(situation, quick));
    let done = match situation {
        Situation::Restart => restart_all(subject, way, server, RESTARTS, seconds / 3),
        Situation::Roll => restart_all(subject, way, server, 1, seconds / 3),
        Situation::Moves => {
            let until = match way {
                Way::AsItIs => moves::Until::Elapsed(seconds),
                _ => moves::Until::Moves(moves::wanted(quick)),
            };
            moves::make(server.address, server.pid(), until, over)
        }
        _ => return Ok(()),
    };
    over.store(true, Ordering::Relaxed);
    done
}

fn restart_all(
    subject: &Subject,
    way: Way,
    server: &mut ServerUnderTest,
    restarts: usize,
    pause: Duration,
) -> Result<(), Error> {
    for nth in 1..=restarts {
        std::thread::sleep(pause);
        subject.restart(way, server, nth)?;
    }
    std::thread::sleep(pause);
    Ok(())
}

/// How the answers that clients got are entered into the counts.
enum Counted {
    /// From the outcome of the load.
    ByLoad(Box<wakeone_load::Outcome>),
    /// So many.
    Answers(u64),
}

/// The clients of a situation.
enum Load {
    /// A plan of requests over HTTP, in this situation.
    Plan(Box<Plan>, Situation),
    /// A command of the server's own.
    Command(std::process::Command),
    /// Clients that open their connections again.
    Reopen(SocketAddr),
}

impl Load {
    fn new(
        server: &ServerUnderTest,
        subject: &Subject,
        situation: Situation,
        context: &Context<'_>,
    ) -> Result<Self, Error> {
        if let Some(line) = subject.client {
            let mut seconds = load_seconds(situation, context.settings.quick);
            if situation == Situation::Restart {
                // It may take a while, and such a client does not wait for its end.
                seconds += 3.0;
            }
            let values = vec![
                ("seconds", seconds.to_string()),
                ("seed", (context.seed % 1_000_000).to_string()),
                ("situation", situation.name().to_owned()),
            ];
            return server.client(line, values).map(Self::Command);
        }
        Ok(match situation {
            Situation::Roll => Self::Reopen(server.address),
            _ => Self::Plan(
                Box::new(plan(server.address, situation, context)),
                situation,
            ),
        })
    }

    /// Sends it until its end, or until what happens beside it is over. Returns also the answers, and the requests without one.
    fn send(
        self,
        over: &AtomicBool,
        context: &mut Context<'_>,
    ) -> Result<(Sample, Counted, u64), Error> {
        match self {
            Load::Plan(plan, situation) => {
                let found = send_plan(&plan, situation, over, context)?;
                let sample = of_plan(&found);
                Ok((sample, Counted::ByLoad(Box::new(found)), 0))
            }
            Load::Command(mut command) => {
                let sample = clients::told(&mut command, Duration::from_secs_f64(LONGEST))?;
                Ok((sample, Counted::Answers(0), 0))
            }
            Load::Reopen(address) => {
                let found = clients::reopen(address, CONNECTIONS, APART, over);
                let sample = found.sample(WORKERS);
                Ok((sample, Counted::Answers(found.answered), found.lost))
            }
        }
    }
}

fn plan(target: SocketAddr, situation: Situation, context: &Context<'_>) -> Plan {
    let path = |us: u64| format!("/work?us={us}");
    let mix = match situation {
        Situation::Stuck => Mix::weighted([(99, path(USUAL_US)), (1, path(LONG_US))]),
        Situation::Busy => Mix::weighted([(90, path(BUSY.1)), (10, path(0))]),
        _ => Mix::one(path(USUAL_US)),
    };
    let arrivals = match situation {
        Situation::Kept => Arrivals::Kept {
            rate_per_s: RATE_PER_S,
            spacing: Spacing::Poisson,
            connections: CONNECTIONS,
            apart: APART,
        },
        Situation::Busy => measure::poisson(BUSY.0),
        _ => measure::poisson(RATE_PER_S),
    };
    let seconds = match situation {
        Situation::Restart | Situation::Moves => LONGEST,
        _ => load_seconds(situation, context.settings.quick),
    };
    let end = measure::for_seconds(seconds);
    Plan {
        timeout: PATIENCE,
        ..measure::plan(target, arrivals, end, mix, context.seed)
    }
}

fn send_plan(
    plan: &Plan,
    situation: Situation,
    over: &AtomicBool,
    context: &mut Context<'_>,
) -> Result<wakeone_load::Outcome, Error> {
    let (cancel, report) = (context.cancel, &mut *context.progress);
    let typical = load_seconds(situation, context.settings.quick);
    let found = wakeone_load::run(plan, over, &mut |now| {
        if cancel.load(Ordering::Relaxed) {
            over.store(true, Ordering::Relaxed);
        }
        report(now.elapsed.as_secs_f64() / typical);
    });
    let found = found.map_err(|source| Error::Load {
        target: plan.target,
        source,
    })?;
    context.check()?;
    Ok(found)
}

/// The metrics of a load over HTTP. The latency is that of the usual requests, where there are others.
fn of_plan(found: &wakeone_load::Outcome) -> Sample {
    let mut sample = measure::sample(found, 0);
    let lost = found.errors.values().sum();
    if let Some(usual) = found.by_path.first() {
        latency_of_all(&mut sample, &usual.latency, lost);
    }
    sample.put("lost", "count", lost as f64);
    sample.put("planned", "count", (found.planned - found.cancelled) as f64);
    // Where clients choose anew for each request, shares tell of the load alone.
    sample.metrics.remove("share_max_over_mean");
    if found.by_worker.len() > 1 {
        let mut counts: Vec<u64> = found.by_worker.values().copied().collect();
        counts.resize(counts.len().max(WORKERS), 0);
        sample.put("busiest", "ratio", crate::stats::max_over_mean(&counts));
    }
    sample
}

/// The latency of all requests. A lost one counts as one that took as long as its client is patient. Else a server that loses
/// those that wait would pass for a fast one. That of the answered ones stands beside it, and is not judged.
fn latency_of_all(sample: &mut Sample, answered: &Histogram<u64>, lost: u64) {
    sample.put("answered_ms_mean", "ms", answered.mean() / 1e6);
    let p99 = answered.value_at_quantile(0.99) as f64;
    sample.put("answered_ms_p99", "ms", p99 / 1e6);
    let mut all = answered.clone();
    if lost > 0 {
        let patience = all.high().min(PATIENCE.as_nanos() as u64);
        let _ = all.record_n(patience, lost);
    }
    measure::latency(sample, &all);
}

/// The state in which the load leaves the server: its CPU time, what it said, and what is still counted as open.
fn at_rest(
    server: &mut ServerUnderTest,
    subject: &Subject,
    way: Way,
    sample: &mut Sample,
) -> Result<(), Error> {
    if way != Way::AsItIs && subject.scheme.is_empty() {
        let open = status::active_at_rest(server.address)?;
        sample.put("active_at_end", "count", open as f64);
        sample.put("moves", "count", status::moves(server.address)?.0 as f64);
    }
    std::thread::sleep(IDLE);
    let cpu = |pids: &[u32]| -> u64 { pids.iter().map(|pid| process::cpu_ns(*pid)).sum() };
    let pids = process::tree(server.pid());
    let before = cpu(&pids);
    let start = Instant::now();
    std::thread::sleep(IDLE);
    let used = cpu(&pids).saturating_sub(before) as f64;
    sample.put(
        "idle_cpus",
        "ratio",
        used / start.elapsed().as_nanos() as f64,
    );
    let bad = |line: &&String| COMPLAINTS.iter().any(|word| line.contains(word));
    let complaints: Vec<String> = server.said().iter().filter(bad).cloned().collect();
    sample.put("complaints", "count", complaints.len() as f64);
    if let Some(first) = complaints.first() {
        sample.notes.insert("complaint".into(), first.clone());
    }
    Ok(())
}

/// Words of servers that something went wrong in.
const COMPLAINTS: [&str; 4] = ["Traceback", "panicked", "a worker ended", "did not end"];

/// The result that a client of the server's own printed.
pub fn of_told(told: &Value) -> Option<Sample> {
    let number = |name: &str| told.get(name)?.as_f64();
    let mut histogram = Histogram::<u64>::new_with_bounds(1, 600_000_000_000, 3).ok()?;
    for ms in told.get("latency_ms")?.as_array()? {
        histogram.record((ms.as_f64()? * 1e6) as u64).ok()?;
    }
    let mut sample = Sample::default();
    let lost = number("lost")?;
    latency_of_all(&mut sample, &histogram, lost as u64);
    sample.put("lost", "count", lost);
    sample.put("planned", "count", number("sent")?);
    sample.distributions.insert(
        "latency_ms".into(),
        crate::distribution::Distribution::from_ns(&histogram),
    );
    Some(sample)
}
