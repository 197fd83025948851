//! One server under one load, once.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::Duration;

use super::beside::{self, Trial};
use super::load::Load;
use super::server::Who;
use super::table::{Trials, Variant};
use crate::distribution::Distribution;
use crate::error::Error;
use crate::experiment::{Context, Sample};
use crate::launch::Launch;
use crate::measure as metrics;
use crate::process::Usage;
use crate::under_test::ServerUnderTest;
use wakeone_load::Arrivals;

/// More workers than this have no shares of their own in a result.
const MOST_SHARES: usize = 16;

/// Measures it.
///
/// # Errors
/// When the server or the load fails.
pub fn measure(
    trials: &'static Trials,
    variant: &Variant,
    context: &mut Context<'_>,
) -> Result<Sample, Error> {
    let (load, who) = (variant.load, variant.who);
    let offered = capacity(trials, load, context)?;
    let workers = trials.workers_of(load);
    let mut server = ServerUnderTest::start(launch(load, who, workers)?)?;
    let quick = context.settings.quick;
    let plan = load.plan(server.address, quick, offered, context.seed);
    let trial = Trial {
        who,
        workers,
        plan: &plan,
        typical_s: load.typical_s(quick),
    };
    if let Some(seconds) = load.warm_up_s {
        let mut first = plan.clone();
        first.stop = metrics::for_seconds(seconds);
        server.load(&first, context)?;
    }
    let before = load.usage.then(|| Usage::with_own(server.pid()));
    let beside = load
        .beside
        .as_ref()
        .filter(|_| load.undisturbed != who.name());
    let (mut found, took) = beside::load(&trial, &mut server, beside, context)?;
    if matches!(who, Who::Other(_)) {
        found.by_worker = by_rank(&found.by_worker);
    }
    let mut sample = sample(load, &found, workers);
    if let Some(before) = before {
        used(&mut sample, &before, Usage::with_own(server.pid()), &found);
    }
    if let Some(times) = beside.and_then(|what| what.restarts()) {
        after_restarts(&mut sample);
        let each_ms = took.as_secs_f64() * 1e3 / times as f64;
        sample.put("restart_ms", "ms", each_ms);
    }
    if let Some(rate) = offered {
        sample.put("offered_per_s", "1/s", rate);
    }
    if who.is_counted() {
        server.await_steered()?;
        let group = server.state();
        let (rescues, moved) = group.moves()?;
        sample.put("rescues", "count", rescues as f64);
        sample.put("connections_moved", "count", moved as f64);
        let open = group.active_at_rest()?;
        sample.put("active_at_end", "count", open as f64);
    }
    server.stop(&mut sample)?;
    Ok(sample)
}

fn launch(load: &Load, who: Who, workers: usize) -> Result<Launch, Error> {
    let mut launch = who.launch(load.serving, workers)?;
    if load.own_backlog && who.is_counted() {
        launch.line = launch.line.replace(" --backlog {backlog}", "");
    }
    Ok(launch)
}

/// The rate of a load that depends on how much this machine serves, which is measured once.
fn capacity(
    trials: &'static Trials,
    load: &Load,
    context: &mut Context<'_>,
) -> Result<Option<f64>, Error> {
    static SERVED: OnceLock<f64> = OnceLock::new();
    let Some((times, server, clients)) = &load.of_capacity else {
        return Ok(None);
    };
    if let Some(served) = SERVED.get() {
        return Ok(Some(served * times));
    }
    let who = trials.who(server);
    let mut running = ServerUnderTest::start(launch(load, who, trials.workers_of(load))?)?;
    let closed = Arrivals::Closed {
        concurrency: *clients,
    };
    let end = metrics::for_seconds(2.0);
    let plan = metrics::plan(running.address, closed, end, load.mix(), context.seed);
    let found = running.load(&plan, context)?;
    running.stop(&mut Sample::default())?;
    let served = found.completed as f64 / found.elapsed.as_secs_f64();
    Ok(Some(SERVED.get_or_init(|| served) * times))
}

fn sample(load: &Load, found: &wakeone_load::Outcome, workers: usize) -> Sample {
    let mut sample = metrics::sample(found, workers);
    let lost: u64 = found.errors.values().sum();
    // Many shares of each variant are no help to anyone; how uneven they are is kept.
    let few = |name: &str| workers <= MOST_SHARES || !name.starts_with("share_worker_");
    sample.metrics.retain(|name, _| few(name));
    sample.put("lost", "count", lost as f64);
    sample.put("planned", "count", (found.planned - found.cancelled) as f64);
    sample.put("total_s", "s", found.elapsed.as_secs_f64());
    if let Some(ms) = load.late_ms {
        let late = found.latency.count_between(ms * 1_000_000, u64::MAX);
        sample.put("late", "count", late as f64);
    }
    if let Some(usual) = found.by_path.first().filter(|_| load.usual) {
        metrics::latency(&mut sample, &usual.latency);
        let distribution = Distribution::from_ns(&usual.latency);
        sample
            .distributions
            .insert("latency_ms".into(), distribution);
    }
    sample
}

/// CPU time and switches for each answer.
fn used(
    sample: &mut Sample,
    before: &(Usage, Duration),
    (now, own): (Usage, Duration),
    found: &wakeone_load::Outcome,
) {
    let used = now.since(&before.0);
    let own = (own - before.1).as_secs_f64();
    let mut put = |name: &str, unit: &str, count: f64| {
        sample.put(name, unit, count / found.completed.max(1) as f64);
    };
    put("server_cpu_us", "us", used.cpu_ns as f64 / 1e3);
    put("client_cpu_us", "us", own * 1e6);
    for (name, count) in [
        ("voluntary", used.voluntary_switches),
        ("involuntary", used.involuntary_switches),
    ] {
        put(
            &format!("{name}_switches_per_request"),
            "ratio",
            count as f64,
        );
    }
    let busy = own / found.elapsed.as_secs_f64();
    sample.put("client_busy", "ratio", busy);
}

/// Workers of several generations bear the same names, so that shares say nothing; and the lost requests are the result, not a
/// failure of the measurement.
fn after_restarts(sample: &mut Sample) {
    let tells = |name: &str| !name.starts_with("share_") && !name.starts_with("errors");
    sample.metrics.retain(|name, _| tells(name));
}

/// Workers by their rank, the busiest first: process ids differ from round to round.
fn by_rank(answers: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let mut counts: Vec<u64> = answers.values().copied().collect();
    counts.sort_unstable_by(|a, b| b.cmp(a));
    (0..)
        .map(|rank: usize| rank.to_string())
        .zip(counts)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_told_by_rank() {
        let answers = [("712".to_owned(), 5), ("99".to_owned(), 20)].into();
        let ranked = by_rank(&answers);
        assert_eq!(metrics::by_worker(&ranked, 4), [20, 5, 0, 0]);
    }
}
