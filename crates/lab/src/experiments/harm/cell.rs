//! One server in one situation, in one way, once.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use wakeone_load::Plan;

use super::sample::of_plan;
use super::{Cell, MOVES, RESTART, ROLL, TRIALS, clients, moves};
use crate::error::{Error, joined};
use crate::experiment::{Context, Sample};
use crate::trials::beside::{Beside, restart_all};
use crate::trials::load::LONGEST_S;
use crate::trials::server::{How, Who};
use crate::under_test::ServerUnderTest;
use crate::{measure, process};

const CONNECTIONS: usize = 64;
const APART: Duration = Duration::from_millis(10);
/// For how long the server is watched without load.
const IDLE: Duration = Duration::from_millis(500);

/// Measures it. A refusal, and a server that does not start or end well, are results.
///
/// # Errors
/// When the user stops it, or this machine lacks something.
pub fn measure(cell: &Cell, context: &mut Context<'_>) -> Result<Sample, Error> {
    let found = attempt(cell, context);
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

fn attempt(cell: &Cell, context: &mut Context<'_>) -> Result<Sample, Error> {
    let begun = Instant::now();
    let launch = cell.server.launch(TRIALS.table.workers, cell.options())?;
    let mut server = ServerUnderTest::start_alone(launch)?;
    let ready = begun.elapsed();
    // That takes its time, and is none of the server's.
    server.steer()?;
    let mut sample = under_load(&mut server, cell, context)?;
    if cell.is(MOVES) {
        // Nobody would have workers pass for stuck so soon. It is asked whether something breaks.
        let times = |name: &str| name.starts_with("latency_ms") || name == "busiest";
        sample.metrics.retain(|name, _| !times(name));
    }
    if cell.is(RESTART) {
        // Several generations have served, each for another time.
        sample.metrics.remove("busiest");
    }
    sample.put("ready_s", "s", ready.as_secs_f64());
    at_rest(&mut server, cell, &mut sample)?;
    server.stop(&mut sample)?;
    Ok(sample)
}

/// The load, and the restarts under it.
fn under_load(
    server: &mut ServerUnderTest,
    cell: &Cell,
    context: &mut Context<'_>,
) -> Result<Sample, Error> {
    let load = Load::new(server, cell, context)?;
    let over = AtomicBool::new(false);
    let quick = context.settings.quick;
    let (found, done) = std::thread::scope(|scope| {
        let over = &over;
        let server = &mut *server;
        let thread = scope.spawn(move || beside(server, cell, quick, over));
        let found = load.send(over, cell.load.typical_s(quick), context);
        over.store(true, Ordering::Relaxed);
        (found, thread.join())
    });
    let (mut sample, whole, open) = found?;
    joined(done)?;
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
    cell: &Cell,
    quick: bool,
    over: &AtomicBool,
) -> Result<(), Error> {
    let done = match &cell.load.beside {
        Some(Beside::Restarts(times, pause)) => {
            let (who, workers) = (Who::Other(cell.server), TRIALS.table.workers);
            let pause = Duration::from_secs_f64(pause.of(quick));
            restart_all(|nth| who.restart(server, workers, nth), *times, pause).map(drop)
        }
        _ if cell.is(MOVES) => {
            let until = match cell.server.how {
                How::AsItIs => {
                    moves::Until::Elapsed(Duration::from_secs_f64(if quick { 2.0 } else { 5.0 }))
                }
                _ => moves::Until::Moves(moves::wanted(quick)),
            };
            moves::make(server.address, server.pid(), until, over)
        }
        _ => return Ok(()),
    };
    over.store(true, Ordering::Relaxed);
    done
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
    /// A plan of requests over HTTP.
    Plan(Box<Plan>),
    /// A command of the server's own.
    Command(std::process::Command),
    /// Clients that open their connections again.
    Reopen(SocketAddr),
}

impl Load {
    fn new(server: &ServerUnderTest, cell: &Cell, context: &Context<'_>) -> Result<Self, Error> {
        let quick = context.settings.quick;
        if !cell.server.client.is_empty() {
            let mut seconds = cell.load.lasts_s(quick);
            if cell.is(RESTART) {
                // It may take a while, and such a client does not wait for its end.
                seconds += 2.5;
            }
            let values = vec![
                ("seconds", seconds.to_string()),
                ("seed", (context.seed % 1_000_000).to_string()),
                ("situation", cell.load.name.clone()),
            ];
            return server
                .client(&cell.server.client, values)
                .map(Self::Command);
        }
        let plan = || cell.load.plan(server.address, quick, None, context.seed);
        Ok(match cell.is(ROLL) {
            true => Self::Reopen(server.address),
            false => Self::Plan(Box::new(plan())),
        })
    }

    /// Sends it until its end, or until what happens beside it is over. Returns also the answers, and the requests without one.
    fn send(
        self,
        over: &AtomicBool,
        typical_s: f64,
        context: &mut Context<'_>,
    ) -> Result<(Sample, Counted, u64), Error> {
        match self {
            Load::Plan(plan) => {
                let found = measure::load_until(&plan, over, typical_s, context)?;
                let sample = of_plan(&found);
                Ok((sample, Counted::ByLoad(Box::new(found)), 0))
            }
            Load::Command(mut command) => {
                let sample = clients::told(&mut command, Duration::from_secs_f64(LONGEST_S))?;
                Ok((sample, Counted::Answers(0), 0))
            }
            Load::Reopen(address) => {
                let found = clients::reopen(address, CONNECTIONS, APART, over);
                let sample = found.sample(TRIALS.table.workers);
                Ok((sample, Counted::Answers(found.answered), found.lost))
            }
        }
    }
}

/// The state in which the load leaves the server: its CPU time, what it said, and what is still counted as open.
fn at_rest(server: &mut ServerUnderTest, cell: &Cell, sample: &mut Sample) -> Result<(), Error> {
    if cell.server.is_steered() {
        server.await_steered()?;
        let group = server.state();
        let open = group.active_at_rest()?;
        sample.put("active_at_end", "count", open as f64);
        sample.put("moves", "count", group.moves()?.0 as f64);
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
