//! The metrics of a load.

use hdrhistogram::Histogram;
use serde_json::Value;
use std::time::Duration;

use super::TRIALS;
use crate::experiment::Sample;
use crate::measure;

/// A request without an answer after this time is lost.
const PATIENCE: Duration = Duration::from_secs(5);

/// The metrics of a load over HTTP. The latency is that of the usual requests, where there are others.
pub fn of_plan(found: &wakeone_load::Outcome) -> Sample {
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
        counts.resize(counts.len().max(TRIALS.table.workers), 0);
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
