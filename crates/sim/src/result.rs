//! A simulated load as a result of the lab, which `wakeone-lab report` draws.

use serde_json::{Map, Value, json};
use wakeone_result::Sample;
use wakeone_result::distribution::Distribution;
use wakeone_result::environment::Environment;
use wakeone_result::outcome::{Metric, Outcome, SCHEMA, Variant};

/// The experiment of which it is a result.
const NAME: &str = "sim";

/// A simulated load by the names of what is measured.
pub fn sample(found: &crate::Outcome) -> Sample {
    let mut sample = Sample::default();
    sample.put("latency_ms_mean", "ms", found.mean_s * 1e3);
    // A run of few requests does not tell how sure its mean is.
    if found.mean_error_s.is_finite() {
        sample.put("latency_ms_mean_error", "ms", found.mean_error_s * 1e3);
    }
    for (name, quantile) in [
        ("latency_ms_p50", 0.5),
        ("latency_ms_p90", 0.9),
        ("latency_ms_p99", 0.99),
        ("latency_ms_p999", 0.999),
    ] {
        sample.put(name, "ms", found.quantile_s(quantile) * 1e3);
    }
    sample.put("share_max_over_mean", "ratio", found.max_over_mean());
    sample.put("elapsed_s", "s", found.elapsed_s);
    sample.put("throughput_per_s", "1/s", found.answers_per_s());
    let counts = &found.counts;
    for (name, count) in [
        ("events", counts.events),
        ("rescues", counts.rescues),
        ("moved", counts.moved),
        ("changes", counts.changes),
        ("dropped_syns", counts.dropped_syns),
        ("given_up", counts.given_up),
        ("lost", counts.lost),
    ] {
        sample.put(name, "count", count as f64);
    }
    let latency = Distribution::from_ns(&found.latency);
    sample.distributions.insert("latency_ms".into(), latency);
    sample
}

/// A result of simulated loads, by name. `parameters` has at least the seed.
pub fn outcome(
    mut parameters: Map<String, Value>,
    all: impl IntoIterator<Item = (String, Sample)>,
    environment: Environment,
) -> Outcome {
    for (name, value) in [
        ("simulated", json!(true)),
        ("rounds", json!(1)),
        ("quick", json!(false)),
    ] {
        parameters.insert(name.into(), value);
    }
    let metric = |(name, (unit, value))| (name, Metric::new(unit, vec![value]));
    let variant = |(name, sample): (String, Sample)| Variant {
        name,
        metrics: sample.metrics.into_iter().map(metric).collect(),
        distributions: sample.distributions,
        slices: None,
        notes: Default::default(),
    };
    Outcome {
        schema: SCHEMA.into(),
        experiment: NAME.into(),
        version: env!("CARGO_PKG_VERSION").into(),
        commit: wakeone_result::COMMIT.into(),
        environment,
        parameters,
        variants: all.into_iter().map(variant).collect(),
        comparisons: Vec::new(),
        contrasts: Vec::new(),
        derived: Vec::new(),
        // The expectations are about another load.
        expectations: Vec::new(),
    }
}
