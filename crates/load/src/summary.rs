//! The outcome as plain numbers, for JSON and for comparing.

use std::collections::BTreeMap;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::outcome::all;
use crate::whole::encode;
use crate::{
    Arrivals, Interval, MixEntry, Outcome, PathOutcome, Plan, Sources, Spacing, StageOutcome,
};

/// The name and version of the form of [`Summary`].
pub const SCHEMA: &str = "wakeone-load/1";

/// A distribution in numbers, ms.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct PathSummary {
    pub path: String,
    pub weight: u64,
    pub completed: u64,
    #[serde(default)]
    pub errors: u64,
    pub latency_ms: Quantiles,
    #[serde(default)]
    pub latency_all_ms: Option<Quantiles>,
}

/// One stage of a rate profile.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct StageSummary {
    pub from_per_s: f64,
    pub to_per_s: f64,
    /// `None`: as long as the load.
    pub length_s: Option<f64>,
    pub planned: u64,
    pub completed: u64,
    pub errors: u64,
    pub latency_ms: Quantiles,
    #[serde(default)]
    pub latency_all_ms: Option<Quantiles>,
}

/// The requests that ended within one interval.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct IntervalSummary {
    pub start_s: f64,
    pub length_s: f64,
    pub planned: u64,
    pub completed: u64,
    pub errors: u64,
    pub latency_ms_p50: f64,
    pub latency_ms_p99: f64,
    pub latency_ms_max: f64,
    #[serde(default)]
    pub latency_all_ms_p99: Option<f64>,
    pub service_ms_p99: f64,
    #[serde(default)]
    pub connections_open: u64,
}

/// The parameters of the load.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Parameters {
    pub target: String,
    /// `open` or `closed`.
    pub loop_kind: String,
    /// The rate of an open loop; that of a profile is in its stages.
    pub rate_per_s: Option<f64>,
    pub spacing: Option<Spacing>,
    /// Clients of a closed loop, most clients at a time of an open one.
    pub concurrency: Option<usize>,
    pub requests: Option<u64>,
    pub duration_s: Option<f64>,
    pub mix: Vec<MixEntry>,
    #[serde(default = "get")]
    pub method: String,
    #[serde(default)]
    pub tls: bool,
    /// 0: the system's own address.
    pub sources: u32,
    pub timeout_s: f64,
    pub seed: u64,
    pub threads: usize,
    pub keep_alive: bool,
}

/// The method of results that do not name one.
fn get() -> String {
    "GET".to_owned()
}

/// The whole outcome.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Summary {
    pub schema: String,
    pub parameters: Parameters,
    pub elapsed_s: f64,
    pub planned: u64,
    pub started: u64,
    pub completed: u64,
    pub cancelled: u64,
    pub connections: u64,
    /// The most that were open at a time.
    #[serde(default)]
    pub connections_open_max: u64,
    #[serde(default)]
    pub connections_open_end: u64,
    pub bytes_received: u64,
    pub throughput_per_s: f64,
    /// From the planned time: correct under coordinated omission.
    pub latency_ms: Quantiles,
    /// The same of all requests that ended: a failed one counts as a wait of the timeout or more. `None` in results of
    /// earlier versions.
    #[serde(default)]
    pub latency_all_ms: Option<Quantiles>,
    /// From `connect()`, or from the send on a kept connection: the latency that a client without a plan would report.
    pub service_ms: Quantiles,
    pub connect_ms: Quantiles,
    pub wait_ms: Quantiles,
    pub first_byte_ms: Quantiles,
    pub receive_ms: Quantiles,
    /// How late requests were begun.
    pub lateness_ms: Quantiles,
    pub paths: Vec<PathSummary>,
    pub stages: Vec<StageSummary>,
    pub intervals: Vec<IntervalSummary>,
    pub by_worker: BTreeMap<String, u64>,
    pub share_max_over_mean: Option<f64>,
    pub by_status: BTreeMap<u16, u64>,
    pub errors: BTreeMap<String, u64>,
    /// The whole histograms, ns, in the compressed V2 form that HdrHistogram libraries read, in base64.
    pub latency_ns_hdr: String,
    /// The same of `service_ms`.
    pub service_ns_hdr: String,
}

impl Summary {
    /// Summarises the outcome of `plan`; `intervals` as reported while it ran, or none.
    pub fn new(plan: &Plan, outcome: &Outcome, intervals: &[Interval]) -> Self {
        Self::of(Parameters::new(plan), outcome, intervals)
    }

    /// The same of a plan that is known by its parameters.
    pub fn of(parameters: Parameters, outcome: &Outcome, intervals: &[Interval]) -> Self {
        Self {
            schema: SCHEMA.to_owned(),
            elapsed_s: outcome.elapsed.as_secs_f64(),
            planned: outcome.planned,
            started: outcome.started,
            completed: outcome.completed,
            cancelled: outcome.cancelled,
            connections: outcome.connections,
            connections_open_max: outcome.connections_open_max,
            connections_open_end: outcome.connections_open_end,
            bytes_received: outcome.bytes_received,
            throughput_per_s: outcome.throughput_per_s(),
            latency_ms: Quantiles::ms(&outcome.latency),
            latency_all_ms: Some(Quantiles::ms(&all(&outcome.latency, &outcome.failed))),
            service_ms: Quantiles::ms(&outcome.service),
            connect_ms: Quantiles::ms(&outcome.phases.connect),
            wait_ms: Quantiles::ms(&outcome.phases.wait),
            first_byte_ms: Quantiles::ms(&outcome.phases.first_byte),
            receive_ms: Quantiles::ms(&outcome.phases.receive),
            lateness_ms: Quantiles::ms(&outcome.lateness),
            paths: parameters
                .mix
                .iter()
                .zip(&outcome.by_path)
                .map(PathSummary::new)
                .collect(),
            stages: outcome.by_stage.iter().map(StageSummary::new).collect(),
            intervals: intervals.iter().map(IntervalSummary::new).collect(),
            by_worker: outcome.by_worker.clone(),
            share_max_over_mean: outcome.share_max_over_mean(),
            by_status: outcome.by_status.clone(),
            errors: outcome
                .errors
                .iter()
                .map(|(kind, n)| (kind.to_string(), *n))
                .collect(),
            latency_ns_hdr: encode(&outcome.latency),
            service_ns_hdr: encode(&outcome.service),
            parameters,
        }
    }

    /// All failures.
    pub fn error_count(&self) -> u64 {
        self.errors.values().sum()
    }

    /// The share of failures among the requests that ended, from 0 to 1.
    pub fn error_share(&self) -> f64 {
        let failed = self.error_count();
        match failed + self.completed {
            0 => 0.0,
            ended => failed as f64 / ended as f64,
        }
    }
}

impl PathSummary {
    fn new((entry, path): (&MixEntry, &PathOutcome)) -> Self {
        Self {
            path: path.path.clone(),
            weight: entry.weight,
            completed: path.completed,
            errors: path.failed.len(),
            latency_ms: Quantiles::ms(&path.latency),
            latency_all_ms: Some(Quantiles::ms(&all(&path.latency, &path.failed))),
        }
    }
}

impl StageSummary {
    fn new(stage: &StageOutcome) -> Self {
        let length = stage.stage.length;
        Self {
            from_per_s: stage.stage.from_per_s,
            to_per_s: stage.stage.to_per_s,
            length_s: (length < Duration::MAX).then_some(length.as_secs_f64()),
            planned: stage.planned,
            completed: stage.completed,
            errors: stage.errors,
            latency_ms: Quantiles::ms(&stage.latency),
            latency_all_ms: Some(Quantiles::ms(&all(&stage.latency, &stage.failed))),
        }
    }
}

impl IntervalSummary {
    fn new(interval: &Interval) -> Self {
        let ms = |histogram: &Histogram<u64>, quantile| {
            histogram.value_at_quantile(quantile) as f64 / 1e6
        };
        Self {
            start_s: interval.start.as_secs_f64(),
            length_s: interval.length.as_secs_f64(),
            planned: interval.planned,
            completed: interval.completed,
            errors: interval.errors.values().sum(),
            latency_ms_p50: ms(&interval.latency, 0.5),
            latency_ms_p99: ms(&interval.latency, 0.99),
            latency_ms_max: ms(&interval.latency, 1.0),
            latency_all_ms_p99: Some(ms(&all(&interval.latency, &interval.failed), 0.99)),
            service_ms_p99: ms(&interval.service, 0.99),
            connections_open: interval.connections_open,
        }
    }
}

impl Parameters {
    /// Those of a plan, whichever part of it is sent from here.
    pub fn new(plan: &Plan) -> Self {
        let (loop_kind, rate_per_s, spacing, concurrency) = match &plan.arrivals {
            Arrivals::Open {
                rate_per_s,
                spacing,
            } => ("open", Some(*rate_per_s), Some(*spacing), None),
            Arrivals::Profile {
                spacing, at_most, ..
            } => ("open", None, Some(*spacing), *at_most),
            Arrivals::Kept {
                rate_per_s,
                spacing,
                connections,
                ..
            } => (
                "open",
                Some(*rate_per_s),
                Some(*spacing),
                Some(*connections),
            ),
            Arrivals::Closed { concurrency } => ("closed", None, None, Some(*concurrency)),
        };
        Self {
            target: plan.target.to_string(),
            loop_kind: loop_kind.to_owned(),
            rate_per_s,
            spacing,
            concurrency,
            requests: plan.stop.requests,
            duration_s: plan.stop.duration.map(|d| d.as_secs_f64()),
            mix: plan.mix.entries.clone(),
            method: plan.mix.form.method().to_owned(),
            tls: plan.mix.form.tls.is_some(),
            sources: match plan.sources {
                Sources::System => 0,
                Sources::Loopback { count } => count,
            },
            timeout_s: plan.timeout.as_secs_f64(),
            seed: plan.seed,
            threads: plan.threads,
            keep_alive: plan.keep_alive,
        }
    }
}
