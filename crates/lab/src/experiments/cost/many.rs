//! CPU time and memory of one `wakeone agent` that steers many groups: those of an nginx with as many addresses.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use wakeone_load::{Mix, Outcome};

use super::agents::{self, Agent, MANY, METRIC, SETTLE};
use crate::error::Error;
use crate::experiment::{Context, Sample};
use crate::nginx;
use crate::process::{cpu_ns, memory_bytes, tree};
use crate::under_test::ServerUnderTest;
use crate::{measure, status};

/// The metric: memory of the agent that is its own, or shared with its children.
pub const MEMORY: &str = "memory";
/// How long they may take to be steered.
const PATIENCE: Duration = Duration::from_secs(60);

/// Measures it over `seconds`. Each worker has a queue in each group, or they share one.
///
/// # Errors
/// When nginx or the agent does not start, or a group is not steered.
pub fn measure(agent: Agent, seconds: f64, context: &mut Context<'_>) -> Result<Sample, Error> {
    nginx::program().map_err(Error::Missing)?;
    let mut sample = Sample::default();
    let trial =
        ServerUnderTest::start(server(agent).launch(format!("nginx with {MANY} addresses")))?;
    let all = addresses(trial.address);
    let steering = agents::told_by_a_file(&targets(agent, &all))?;
    await_groups(context)?;
    agents::rest(SETTLE, context)?;
    let processes = tree(steering.pid());
    let cpu = || processes.iter().copied().map(cpu_ns).sum::<u64>();
    let (begun, before) = (Instant::now(), cpu());
    match agent.rate_per_s {
        None => agents::rest(Duration::from_secs_f64(seconds), context)?,
        Some(rate) => {
            let found = load(&all, rate, seconds, context)?;
            let errors = found
                .iter()
                .flat_map(|one| one.errors.values())
                .sum::<u64>();
            let completed: u64 = found.iter().map(|one| one.completed).sum();
            sample.put("errors", "count", errors as f64);
            sample.put("requests", "count", completed as f64);
        }
    }
    let spent = cpu().saturating_sub(before) as f64;
    sample.put(
        METRIC,
        "%",
        100.0 * spent / begun.elapsed().as_nanos() as f64,
    );
    let memory: u64 = processes.iter().copied().map(memory_bytes).sum();
    sample.put(MEMORY, "MB", memory as f64 / 1e6);
    steering.stop()?;
    Ok(sample)
}

/// The others are beside the server's own address, where nobody else listens.
fn address(number: u8) -> SocketAddr {
    let port = 20_000 + u16::from(number);
    (Ipv4Addr::new(127, 50, 0, number), port).into()
}

fn addresses(first: SocketAddr) -> Vec<SocketAddr> {
    let others = (1..MANY).map(address);
    std::iter::once(first).chain(others).collect()
}

fn server(agent: Agent) -> nginx::Setup {
    let queue = if agent.shares() { "" } else { "reuseport" };
    let listen = |number| format!("listen {} {queue};", address(number));
    let others: Vec<String> = (1..MANY).map(listen).collect();
    nginx::Setup {
        workers: agent.workers,
        listen: queue,
        http: "keepalive_timeout 0;",
        server: format!("{} location / {{ return 200; }}", others.join(" ")),
        ..nginx::Setup::default()
    }
}

fn targets(agent: Agent, all: &[SocketAddr]) -> String {
    let rescue = !agent.shares();
    let target = |at: &SocketAddr| format!("[[target]]\nlisten = \"{at}\"\nrescue = {rescue}\n");
    all.iter().map(target).collect()
}

fn await_groups(context: &Context<'_>) -> Result<(), Error> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let groups = status::read()?["groups"].as_array().map_or(0, Vec::len);
        if groups == usize::from(MANY) {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(Error::Server(format!(
                "{groups} of {MANY} groups are steered"
            )));
        }
        agents::rest(Duration::from_millis(100), context)?;
    }
}

/// A load on each group.
fn load(
    all: &[SocketAddr],
    rate_per_s: u32,
    seconds: f64,
    context: &Context<'_>,
) -> Result<Vec<Outcome>, Error> {
    let (over, found) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for (number, at) in all.iter().enumerate() {
            let (over, found) = (&over, &found);
            let seed = context.seed + number as u64;
            scope.spawn(move || {
                let end = measure::for_seconds(seconds);
                let arrivals = measure::poisson(rate_per_s.into());
                let plan = measure::plan(*at, arrivals, end, Mix::one("/"), seed);
                let done = wakeone_load::run(&plan, over, &mut |_| {});
                let done = done.map_err(|source| Error::Load {
                    target: plan.target.into(),
                    source,
                });
                found
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(done);
            });
        }
    });
    context.check()?;
    let found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    found.into_iter().collect()
}
