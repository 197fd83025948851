//! The outcome as plain numbers for JSON.

use std::collections::BTreeMap;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::{Arrivals, MixEntry, Outcome, Plan, Spacing};

/// The name and version of the form of [`Summary`].
pub const SCHEMA: &str = "wakeone-load/1";

/// A distribution in numbers, ms.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[allow(missing_docs)] // the names say it
pub struct Quantiles {
    pub count: u64,
    pub min: f64,
    pub mean: f64,
    pub stddev: f64,
    pub p50: f64,
    pub p75: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

impl Quantiles {
    /// From a histogram in ns.
    pub fn ms(histogram: &Histogram<u64>) -> Self {
        let at = |quantile| histogram.value_at_quantile(quantile) as f64 / 1e6;
        Self {
            count: histogram.len(),
            min: histogram.min() as f64 / 1e6,
            mean: histogram.mean() / 1e6,
            stddev: histogram.stdev() / 1e6,
            p50: at(0.5),
            p75: at(0.75),
            p90: at(0.9),
            p95: at(0.95),
            p99: at(0.99),
            p999: at(0.999),
            max: histogram.max() as f64 / 1e6,
        }
    }
}

/// One path of the mix.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct PathSummary {
    pub path: String,
    pub weight: u64,
    pub completed: u64,
    pub latency_ms: Quantiles,
}

/// What was asked.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct Parameters {
    pub target: String,
    pub loop_kind: &'static str,
    pub rate_per_s: Option<f64>,
    pub spacing: Option<Spacing>,
    pub concurrency: Option<usize>,
    pub requests: Option<u64>,
    pub duration_s: Option<f64>,
    pub mix: Vec<MixEntry>,
    pub sources: u32,
    pub timeout_s: f64,
    pub seed: u64,
    pub threads: usize,
    pub keep_alive: bool,
}

/// The whole outcome, for JSON.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct Summary {
    pub schema: &'static str,
    pub parameters: Parameters,
    pub elapsed_s: f64,
    pub planned: u64,
    pub started: u64,
    pub completed: u64,
    pub cancelled: u64,
    pub connections: u64,
    pub bytes_received: u64,
    pub throughput_per_s: f64,
    /// From the planned time: correct under coordinated omission.
    pub latency_ms: Quantiles,
    /// From `connect()`.
    pub service_ms: Quantiles,
    pub connect_ms: Quantiles,
    pub wait_ms: Quantiles,
    pub first_byte_ms: Quantiles,
    /// How late the generator itself was.
    pub lateness_ms: Quantiles,
    pub paths: Vec<PathSummary>,
    pub by_worker: BTreeMap<String, u64>,
    pub share_max_over_mean: Option<f64>,
    pub by_status: BTreeMap<u16, u64>,
    pub errors: BTreeMap<String, u64>,
}

impl Summary {
    /// Of what `plan` came to.
    pub fn new(plan: &Plan, outcome: &Outcome) -> Self {
        let path = |(entry, path): (&MixEntry, &crate::PathOutcome)| PathSummary {
            path: path.path.clone(),
            weight: entry.weight,
            completed: path.completed,
            latency_ms: Quantiles::ms(&path.latency),
        };
        Self {
            schema: SCHEMA,
            parameters: Parameters::new(plan),
            elapsed_s: outcome.elapsed.as_secs_f64(),
            planned: outcome.planned,
            started: outcome.started,
            completed: outcome.completed,
            cancelled: outcome.cancelled,
            connections: outcome.connections,
            bytes_received: outcome.bytes_received,
            throughput_per_s: outcome.throughput_per_s(),
            latency_ms: Quantiles::ms(&outcome.latency),
            service_ms: Quantiles::ms(&outcome.service),
            connect_ms: Quantiles::ms(&outcome.phases.connect),
            wait_ms: Quantiles::ms(&outcome.phases.wait),
            first_byte_ms: Quantiles::ms(&outcome.phases.first_byte),
            lateness_ms: Quantiles::ms(&outcome.lateness),
            paths: plan
                .mix
                .entries
                .iter()
                .zip(&outcome.by_path)
                .map(path)
                .collect(),
            by_worker: outcome.by_worker.clone(),
            share_max_over_mean: outcome.share_max_over_mean(),
            by_status: outcome.by_status.clone(),
            errors: outcome
                .errors
                .iter()
                .map(|(kind, n)| (kind.to_string(), *n))
                .collect(),
        }
    }
}

impl Parameters {
    fn new(plan: &Plan) -> Self {
        let (loop_kind, rate_per_s, spacing, concurrency) = match plan.arrivals {
            Arrivals::Open {
                rate_per_s,
                spacing,
            } => ("open", Some(rate_per_s), Some(spacing), None),
            Arrivals::Closed { concurrency } => ("closed", None, None, Some(concurrency)),
        };
        Self {
            target: plan.target.to_string(),
            loop_kind,
            rate_per_s,
            spacing,
            concurrency,
            requests: plan.stop.requests,
            duration_s: plan.stop.duration.map(|d| d.as_secs_f64()),
            mix: plan.mix.entries.clone(),
            sources: match plan.sources {
                crate::Sources::System => 0,
                crate::Sources::Loopback { count } => count,
            },
            timeout_s: plan.timeout.as_secs_f64(),
            seed: plan.seed,
            threads: plan.threads,
            keep_alive: plan.keep_alive,
        }
    }
}
