//! Simulated loads: the result of `wakeone sim`, and a run of its own.

use serde_json::json;
use wakeone_control::policy::Policy;
use wakeone_sim::result::sample;
use wakeone_sim::{Arrivals, Dispatch, Load, Service, Setup, Wake, run};

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Sample, Settings, parameters};
use crate::present::{Block, Chart, Line, Style};
use crate::result::{Expectation, Outcome, Variant};
use crate::views::{self, Of};

card!();

/// The experiment.
pub struct Simulated;

const WORKERS: usize = 4;
const RATE_PER_S: f64 = 1000.0;
const SERVICE: &str = "99:1.15ms,1:100ms";
/// The patience of `wakeone run --rescue`, in s.
pub(super) const PATIENCE_S: f64 = 0.005;

fn ways() -> [(&'static str, Dispatch); 5] {
    let steered = |policy: Policy, patience_s| Dispatch::steered(policy.number(), patience_s);
    let rescue = steered(Policy::LeastConnections, Some(PATIENCE_S));
    [
        ("shared-accept", Dispatch::Shared(Wake::LongestAsleep)),
        ("hash", steered(Policy::Hash, None)),
        ("two-choices", steered(Policy::TwoChoices, None)),
        ("least-connections", steered(Policy::LeastConnections, None)),
        ("least-connections+rescue", rescue),
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

const COLUMNS: [(&str, Of<'_>); 7] = [
    ("mean", Of::Median("latency_ms_mean")),
    ("p50", Of::Median("latency_ms_p50")),
    ("p90", Of::Median("latency_ms_p90")),
    ("p99", Of::Median("latency_ms_p99")),
    ("p99.9", Of::Median("latency_ms_p999")),
    ("busiest / mean", Of::Median("share_max_over_mean")),
    ("moved", Of::Median("moved")),
];

fn present(outcome: &Outcome) -> Vec<Block> {
    let caption = "Simulated latency in ms, the busiest worker's share over the mean, and connections that were moved.";
    let rows = outcome.variants.iter().map(|v| (v.name.clone(), v));
    let said = "All numbers are simulated: the choices are those of the programs in the kernel, the workers are a model.";
    vec![
        Block::Paragraph(said.into()),
        Block::Table(views::table(caption, &COLUMNS, rows)),
        Block::Chart(chart(outcome)),
    ]
}

/// A sweep as lines over the workers or the rate, one load as a distribution a way.
fn chart(outcome: &Outcome) -> Chart {
    let swept = |variant: &Variant| {
        let (point, way) = variant.name.split_once('/')?;
        let (what, value) = point.split_once('-')?;
        Some((what.to_owned(), value.parse::<f64>().ok()?, way.to_owned()))
    };
    let points: Option<Vec<(String, f64, String)>> = outcome.variants.iter().map(swept).collect();
    match points {
        Some(points) if !points.is_empty() => lines(outcome, &points),
        _ => {
            let all = outcome.variants.iter().enumerate();
            let styled = all.map(|(place, v)| (Style::ours(v.name.clone(), place), v));
            views::percentiles("Simulated", styled)
        }
    }
}

fn lines(outcome: &Outcome, points: &[(String, f64, String)]) -> Chart {
    let mut series: Vec<Line> = Vec::new();
    for (variant, (_, x, way)) in outcome.variants.iter().zip(points) {
        let Some(p99) = variant.median("latency_ms_p99") else {
            continue;
        };
        match series.iter_mut().find(|(style, _)| style.label == *way) {
            Some((_, line)) => line.push((*x, p99)),
            None => series.push((Style::ours(way.clone(), series.len()), vec![(*x, p99)])),
        }
    }
    Chart::lines(
        "The slowest one percent, simulated.",
        "Where a line has no point, the workers cannot serve the load.",
        (&points[0].0, "p99, ms", true),
        series,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::Watch;
    use crate::present::Kind;
    use crate::stats;
    use wakeone_sim::result::outcome;

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
            outcome(serde_json::Map::new(), all, Watch::start().finish())
        };
        let swept = of(&["workers-2/hash", "workers-4/hash"]);
        let Kind::Lines { x, series, .. } = chart(&swept).kind else {
            panic!("no lines");
        };
        assert_eq!(
            (x.as_str(), series.len(), series[0].1.len()),
            ("workers", 1, 2)
        );
        let one = of(&["hash", "two-choices"]);
        assert!(matches!(chart(&one).kind, Kind::Percentiles { series, .. } if series.len() == 2));
        assert_eq!(present(&one).len(), 3);
        assert_eq!(stats::median(one.values("hash", "rescues")), 0.0);
    }
}
