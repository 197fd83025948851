//! Converts the load generator's outcome to the metrics of a sample; the names are the same in all experiments.

use hdrhistogram::Histogram;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use wakeone_load::{Arrivals, Mix, Plan, Shard, Sources, Spacing, Stop};

use crate::card::{Card, OWN_GOAL};
use crate::distribution::Distribution;
use crate::error::Error;
use crate::experiment::{Context, Sample};
use crate::result::{self, Expectation};
use crate::{answers, stats};

/// How long a request may take in most experiments: longer than any should.
const PATIENCE: Duration = Duration::from_secs(30);

/// A load from one thread, a new connection for each request unless they are kept. It comes from a thousand addresses
/// of 127.0.0.0/8: from one, a connection a request would run out of ports.
pub fn plan(target: SocketAddr, arrivals: Arrivals, stop: Stop, mix: Mix, seed: u64) -> Plan {
    let keep_alive = matches!(arrivals, Arrivals::Kept { .. });
    Plan {
        target: target.into(),
        host: "localhost".into(),
        arrivals,
        stop,
        mix,
        sources: Sources::Loopback { count: 1000 },
        timeout: PATIENCE,
        seed,
        threads: 1,
        keep_alive,
        shard: Shard::default(),
    }
}

/// An end after a time.
pub fn for_seconds(seconds: f64) -> Stop {
    Stop {
        requests: None,
        duration: Some(Duration::from_secs_f64(seconds)),
    }
}

/// An end after so many requests.
pub fn for_requests(count: u64) -> Stop {
    Stop {
        requests: Some(count),
        duration: None,
    }
}

/// Independent clients: an open loop with Poisson arrivals.
pub fn poisson(rate_per_s: f64) -> Arrivals {
    Arrivals::Open {
        rate_per_s,
        spacing: Spacing::Poisson,
    }
}

/// The expectations of every experiment: no request fails, and the server's count agrees with the client's.
pub fn sound(outcome: &result::Outcome) -> [Expectation; 2] {
    [no_errors(outcome), answers::agree(outcome)]
}

/// The expectation that no request of any variant fails.
pub fn no_errors(outcome: &result::Outcome) -> Expectation {
    Expectation::new(
        "no-errors",
        "No request of any variant fails",
        OWN_GOAL,
        stats::sum(&of_all(outcome, "errors")),
        |m| m == 0.0,
    )
}

/// The expectation of experiments with steered variants that `active_at_end` is 0. `active_at_end` is the number of
/// connections that `wakeone status` still counts as open when all clients have gone.
pub fn counted_out(outcome: &result::Outcome) -> Expectation {
    Expectation::new(
        "active-returns-to-0",
        "Every active count of the steered variants is back at 0 at the end (largest sum left)",
        OWN_GOAL,
        stats::most(&of_all(outcome, "active_at_end")),
        |m| m == 0.0,
    )
}

/// The expectation `complete` of a card: nothing was left out.
pub fn complete(card: &Card, outcome: &result::Outcome) -> Expectation {
    let left_out = outcome.parameters.get("left_out");
    let left_out = left_out.and_then(|all| all.as_object());
    let missing = left_out.map_or(0, serde_json::Map::len) as f64;
    card.expect(
        "complete",
        (!outcome.variants.is_empty()).then_some(missing),
    )
}

/// The values of a metric in all rounds of all variants.
fn of_all(outcome: &result::Outcome, metric: &str) -> Vec<f64> {
    let metrics = outcome
        .variants
        .iter()
        .filter_map(|v| v.metrics.get(metric));
    metrics.flat_map(|m| m.values.iter().copied()).collect()
}

/// Sends a load, with progress, until it is done or the user stops it.
///
/// # Errors
/// When the plan cannot be run, or on Ctrl-C.
pub fn load(plan: &Plan, context: &mut Context<'_>) -> Result<wakeone_load::Outcome, Error> {
    let cancel = context.cancel;
    let (planned, lasts) = (plan.stop.requests, plan.stop.duration);
    let share = |now: &wakeone_load::Progress| {
        let by_count = planned.map_or(0.0, |n| now.completed as f64 / n.max(1) as f64);
        let by_time = lasts.map_or(0.0, |d| now.elapsed.as_secs_f64() / d.as_secs_f64());
        by_count.max(by_time)
    };
    send(plan, cancel, share, context)
}

/// Sends a load until it is `over`, or the user stops it; it typically takes so long. Requests under way then count as neither
/// answered nor lost.
///
/// # Errors
/// Those of [`load`].
pub fn load_until(
    plan: &Plan,
    over: &AtomicBool,
    typical_s: f64,
    context: &mut Context<'_>,
) -> Result<wakeone_load::Outcome, Error> {
    let cancel = context.cancel;
    let share = |now: &wakeone_load::Progress| {
        if cancel.load(Ordering::Relaxed) {
            over.store(true, Ordering::Relaxed);
        }
        now.elapsed.as_secs_f64() / typical_s
    };
    send(plan, over, share, context)
}

fn send(
    plan: &Plan,
    over: &AtomicBool,
    share: impl Fn(&wakeone_load::Progress) -> f64,
    context: &mut Context<'_>,
) -> Result<wakeone_load::Outcome, Error> {
    let report = &mut *context.progress;
    let found = wakeone_load::run(plan, over, &mut |now| report(share(now)));
    let found = found.map_err(|source| Error::Load {
        target: plan.target.into(),
        source,
    })?;
    context.check()?;
    Ok(found)
}

/// The result of one load, in the metrics that every load has.
///
/// `latency_ms_*` counts from the planned time of each request (from sending it in a closed loop). `share_worker_N` is
/// each worker's share of the answers. `share_max_over_mean` is 1 where all workers got the same.
pub fn sample(outcome: &wakeone_load::Outcome, workers: usize) -> Sample {
    let mut sample = Sample::default();
    latency(&mut sample, &outcome.latency);
    let counts = by_worker(&outcome.by_worker, workers);
    shares(&mut sample, &counts);
    let errors: u64 = outcome.errors.values().sum();
    sample.put("errors", "count", errors as f64);
    for (kind, count) in &outcome.errors {
        sample.put(format!("errors_{kind}"), "count", *count as f64);
    }
    sample.put("requests", "count", outcome.completed as f64);
    sample.put(
        "throughput_per_s",
        "1/s",
        outcome.completed as f64 / outcome.elapsed.as_secs_f64().max(1e-9),
    );
    sample
        .distributions
        .insert("latency_ms".into(), Distribution::from_ns(&outcome.latency));
    sample
}

/// The latency metrics of a histogram of nanoseconds.
pub fn latency(sample: &mut Sample, histogram: &Histogram<u64>) {
    let mut put = |name: &str, ns: f64| sample.put(format!("latency_ms_{name}"), "ms", ns / 1e6);
    put("mean", histogram.mean());
    put("stddev", histogram.stdev());
    put("min", histogram.min() as f64);
    for (name, quantile) in [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)] {
        put(name, histogram.value_at_quantile(quantile) as f64);
    }
    put("max", histogram.max() as f64);
}

/// Each worker's share of the whole, and how far from even the largest is.
pub fn shares(sample: &mut Sample, counts: &[u64]) {
    let total = counts.iter().sum::<u64>().max(1) as f64;
    for (worker, count) in counts.iter().enumerate() {
        sample.put(
            format!("share_worker_{worker}"),
            "ratio",
            *count as f64 / total,
        );
    }
    sample.put("share_max_over_mean", "ratio", stats::max_over_mean(counts));
}

/// Answers of workers 0 to `workers - 1`, those that never answered included. Answers with any other name (or none) are
/// counted behind them, so that nothing vanishes from the shares.
pub fn by_worker(answers: &std::collections::BTreeMap<String, u64>, workers: usize) -> Vec<u64> {
    let mut counts = vec![0; workers];
    for (name, count) in answers {
        match name.parse::<usize>().ok().filter(|n| *n < workers) {
            Some(worker) => counts[worker] += count,
            None => counts.push(*count),
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_and_unknown_workers_are_counted() {
        let answers = [
            ("0".to_owned(), 5),
            ("2".to_owned(), 7),
            ("stranger".to_owned(), 1),
        ]
        .into();
        assert_eq!(by_worker(&answers, 4), [5, 0, 7, 0, 1]);
    }

    #[test]
    fn milliseconds_from_nanoseconds() {
        let mut histogram = Histogram::<u64>::new_with_bounds(1, 60_000_000_000, 3).unwrap();
        histogram.record_n(1_000_000, 99).unwrap();
        histogram.record(101_000_000).unwrap();
        let mut found = Sample::default();
        latency(&mut found, &histogram);
        let near = |name: &str, value: f64| {
            let (unit, found) = &found.metrics[name];
            assert!(
                unit == "ms" && (found / value - 1.0).abs() < 0.002,
                "{name}: {found}"
            );
        };
        near("latency_ms_mean", 2.0);
        near("latency_ms_p50", 1.0);
        near("latency_ms_max", 101.0);
        near("latency_ms_stddev", 9.95);
    }
}
