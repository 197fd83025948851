//! Simulated loads: the result of `wakeone sim`, and a run of its own.

use serde_json::{Map, Value, json};
use wakeone_sim::{Arrivals, Dispatch, Load, Service, Setup, Wake, run};

use crate::card::{Card, card};
use crate::distribution::Distribution;
use crate::environment::Environment;
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Sample, Settings, parameters};
use crate::present::{Block, Chart, Kind, Row, Style, Table, number};
use crate::result::{Expectation, Metric, Outcome, SCHEMA, Variant};

card!();

/// The experiment.
pub struct Simulated;

const WORKERS: usize = 4;
const RATE_PER_S: f64 = 1000.0;
const SERVICE: &str = "99:1.15ms,1:100ms";
/// The patience of `wakeone run --rescue`, in s.
pub(super) const PATIENCE_S: f64 = 0.005;

fn ways() -> [(&'static str, Dispatch); 5] {
    let number = |policy: wakeone::policy::Policy| policy.number();
    let least = number(wakeone::policy::Policy::LeastConnections);
    [
        ("shared-accept", Dispatch::Shared(Wake::LongestAsleep)),
        (
            "hash",
            Dispatch::steered(number(wakeone::policy::Policy::Hash), None),
        ),
        (
            "two-choices",
            Dispatch::steered(number(wakeone::policy::Policy::TwoChoices), None),
        ),
        ("least-connections", Dispatch::steered(least, None)),
        (
            "least-connections+rescue",
            Dispatch::steered(least, Some(PATIENCE_S)),
        ),
    ]
}

fn requests(settings: &Settings) -> u64 {
    if settings.quick { 60_000 } else { 1_000_000 }
}

impl Experiment for Simulated {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let arm = |(name, _): (&str, Dispatch)| Arm {
            name: name.into(),
            group: 0,
            seconds: requests(settings) as f64 / 2e6,
        };
        Design {
            rounds: 1,
            arms: ways().map(arm).into(),
            pairings: Vec::new(),
            steady: "",
            parameters: parameters([
                ("simulated", json!(true)),
                ("workers", json!(WORKERS)),
                ("rate_per_s", json!(RATE_PER_S)),
                ("service", json!(SERVICE)),
                ("requests", json!(requests(settings))),
            ]),
        }
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let way = ways().into_iter().find(|(name, _)| *name == arm.name);
        let (_, way) = way.ok_or_else(|| Error::Unknown(arm.name.clone()))?;
        let load = Load {
            arrivals: Arrivals::Poisson { per_s: RATE_PER_S },
            service: simulates(SERVICE.parse::<Service>())?,
            requests: requests(context.settings),
            kept: None,
            seed: context.seed,
        };
        Ok(sample(&simulates(run(&Setup::new(WORKERS, way), &load))?))
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let mean = |name: &str| outcome.median(name, "latency_ms_mean");
        let to_shared = |name: &str| Some(mean(name)? / mean("shared-accept")?);
        vec![
            CARD.expect(
                "rescue-is-near-one-queue",
                to_shared("least-connections+rescue"),
            ),
            CARD.expect("hash-is-far-from-it", to_shared("hash")),
        ]
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        present(outcome)
    }
}

/// Turns an error of the simulator into one of an experiment.
pub(super) fn simulates<T>(result: Result<T, wakeone_sim::Error>) -> Result<T, Error> {
    result.map_err(|error| Error::Missing(error.to_string()))
}

/// A simulated load by the names of what is measured.
pub fn sample(found: &wakeone_sim::Outcome) -> Sample {
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
        experiment: CARD.name.clone(),
        version: env!("CARGO_PKG_VERSION").into(),
        commit: env!("WAKEONE_COMMIT").into(),
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

const COLUMNS: [(&str, &str); 7] = [
    ("mean", "latency_ms_mean"),
    ("p50", "latency_ms_p50"),
    ("p90", "latency_ms_p90"),
    ("p99", "latency_ms_p99"),
    ("p99.9", "latency_ms_p999"),
    ("busiest / mean", "share_max_over_mean"),
    ("moved", "moved"),
];

fn present(outcome: &Outcome) -> Vec<Block> {
    let head = std::iter::once("").chain(COLUMNS.map(|column| column.0));
    let cell = |variant: &Variant, metric: &str| {
        let value = variant.median(metric);
        value.map_or_else(|| "–".into(), number)
    };
    let row = |variant: &Variant| {
        let cells = COLUMNS.map(|(_, metric)| cell(variant, metric));
        Row::ours(std::iter::once(variant.name.clone()).chain(cells).collect())
    };
    let table = Block::Table(Table {
        caption: "Simulated latency in ms, the busiest worker's share over the mean, and connections that were moved."
            .into(),
        head: head.map(str::to_owned).collect(),
        rows: outcome.variants.iter().map(row).collect(),
    });
    let mut blocks = vec![
        Block::Paragraph(
            "All numbers are simulated: the choices are those of the programs in the kernel, the workers are a model."
                .into(),
        ),
        table,
    ];
    blocks.extend(chart(outcome).map(Block::Chart));
    blocks
}

/// A sweep as lines over the workers or the rate, one load as a distribution a way.
fn chart(outcome: &Outcome) -> Option<Chart> {
    let swept = |variant: &Variant| {
        let (point, way) = variant.name.split_once('/')?;
        let (what, value) = point.split_once('-')?;
        Some((what.to_owned(), value.parse::<f64>().ok()?, way.to_owned()))
    };
    let points: Option<Vec<(String, f64, String)>> = outcome.variants.iter().map(swept).collect();
    match points {
        Some(points) if !points.is_empty() => Some(lines(outcome, &points)),
        _ => distributions(outcome),
    }
}

fn lines(outcome: &Outcome, points: &[(String, f64, String)]) -> Chart {
    let mut series: Vec<(Style, Vec<(f64, f64)>)> = Vec::new();
    for (variant, (_, x, way)) in outcome.variants.iter().zip(points) {
        let Some(p99) = variant.median("latency_ms_p99") else {
            continue;
        };
        match series.iter_mut().find(|(style, _)| style.label == *way) {
            Some((_, line)) => line.push((*x, p99)),
            None => series.push((Style::ours(way.clone(), series.len()), vec![(*x, p99)])),
        }
    }
    Chart {
        title: "The slowest one percent, simulated.".into(),
        note: "Where a line has no point, the workers cannot serve the load.".into(),
        kind: Kind::Lines {
            x: points
                .first()
                .map_or_else(String::new, |point| point.0.clone()),
            y: "p99, ms".into(),
            log: true,
            series,
        },
    }
}

fn distributions(outcome: &Outcome) -> Option<Chart> {
    let of = |(place, variant): (usize, &Variant)| {
        let latency = variant.distributions.get("latency_ms")?.clone();
        Some((Style::ours(variant.name.clone(), place), latency))
    };
    let series: Vec<_> = outcome.variants.iter().enumerate().filter_map(of).collect();
    (!series.is_empty()).then(|| Chart {
        title: "Latency, simulated.".into(),
        note: "Each line is one way of handing out the same connections.".into(),
        kind: Kind::Percentiles {
            unit: "ms".into(),
            series,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::Watch;
    use crate::stats;

    #[test]
    fn a_sweep_is_drawn_as_lines_and_one_load_as_distributions() {
        let load = Load {
            arrivals: Arrivals::Poisson { per_s: 500.0 },
            service: Service::Exponential(1e-3),
            requests: 1_000,
            kept: None,
            seed: 1,
        };
        let found = run(&Setup::new(2, ways()[1].1), &load).unwrap();
        let of = |names: &[&str]| {
            let all = names
                .iter()
                .map(|name| ((*name).to_owned(), sample(&found)));
            outcome(Map::new(), all, Watch::start().finish())
        };
        let swept = of(&["workers-2/hash", "workers-4/hash"]);
        let Some(Kind::Lines { x, series, .. }) = chart(&swept).map(|chart| chart.kind) else {
            panic!("no lines");
        };
        assert_eq!(
            (x.as_str(), series.len(), series[0].1.len()),
            ("workers", 1, 2)
        );
        let one = of(&["hash", "two-choices"]);
        assert!(
            matches!(chart(&one).map(|c| c.kind), Some(Kind::Percentiles { series, .. }) if series.len() == 2)
        );
        assert_eq!(present(&one).len(), 3);
        assert_eq!(stats::median(one.values("hash", "rescues")), 0.0);
    }
}
