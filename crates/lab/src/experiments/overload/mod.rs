//! Does moving queues do harm where the machine is what is slow?

use std::sync::OnceLock;
use std::time::Duration;

use serde_json::json;
use wakeone_load::{Arrivals, Mix};

use crate::experiment::{
    Arm, Card, Context, Design, Experiment, Sample, Settings, Source, parameters,
};
use crate::measure::Trial;
use crate::present::{Block, Row, Table, number};
use crate::result::{Expectation, Outcome};
use crate::ways::{self, Way};
use crate::{Error, answers, measure, stats, status};

/// The experiment.
pub struct Overload;

const WORKERS: usize = 4;
const USUAL_US: u64 = 300;
const LONG_US: u64 = 3_000;
const CLIENTS: usize = 32;
/// How long a client waits before it gives up.
const PATIENCE: Duration = Duration::from_secs(1);
const OURS: &str = "Wakeone's own goal";
/// The rates, as parts of what the machine serves.
const FACTORS: [&str; 2] = ["1.0", "1.2"];
/// Which of two equal ways loses more is chance: so large a part of the requests.
const CHANCE: f64 = 0.02;
const WAYS: [Way; 4] = [
    Way::SharedAccept,
    Way::ReuseportHash,
    Way::LeastConnections,
    Way::LeastConnectionsRescue,
];
/// What rescue is compared with.
const AGAINST: [Way; 3] = [Way::ReuseportHash, Way::LeastConnections, Way::SharedAccept];

const CARD: Card = Card {
    name: "overload",
    title: "Does rescue do harm under overload?",
    question: "Every CPU is busy and more comes than can be served: are more requests lost where queues are moved?",
    source: Source {
        short: "Wakeone",
        long: "Beyond the papers: what a rescue costs where nobody is stuck but everybody is slow.",
        url: "",
    },
    readme: include_str!("README.md"),
    published: "series,x,metric,unit,value,note\n",
};

fn seconds(quick: bool) -> f64 {
    if quick { 3.0 } else { 6.0 }
}

fn parse_arm(name: &str) -> Result<(f64, Way), Error> {
    let (factor, way) = ways::parse_arm(name, &WAYS)?;
    let factor = factor.parse().map_err(|_| Error::Unknown(name.into()))?;
    Ok((factor, way))
}

fn ratio_name(factor: &str, against: Way) -> String {
    format!(
        "at {factor} times what the machine serves: p99 of {} / p99 of {}",
        Way::LeastConnectionsRescue.name(),
        against.name()
    )
}

fn work() -> Mix {
    Mix::weighted([
        (9, format!("/work?us={USUAL_US}&kind=cpu")),
        (1, format!("/work?us={LONG_US}&kind=cpu")),
    ])
}

/// How many requests/s this machine serves, measured once.
fn served_per_s(context: &mut Context<'_>) -> Result<f64, Error> {
    static SERVED: OnceLock<f64> = OnceLock::new();
    if let Some(known) = SERVED.get() {
        return Ok(*known);
    }
    let mut trial = Trial::start(Way::SharedAccept, WORKERS)?;
    let clients = Arrivals::Closed {
        concurrency: CLIENTS,
    };
    let plan = measure::plan(
        trial.address,
        clients,
        measure::for_seconds(2.0),
        work(),
        context.seed,
    );
    let found = trial.load(&plan, context)?;
    trial.end(&mut Sample::default())?;
    let served = found.completed as f64 / found.elapsed.as_secs_f64();
    Ok(*SERVED.get_or_init(|| served))
}

impl Experiment for Overload {
    fn card(&self) -> &Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let seconds = seconds(settings.quick);
        let (mut arms, mut pairings) = (Vec::new(), Vec::new());
        for (group, factor) in FACTORS.into_iter().enumerate() {
            arms.extend(ways::arms(factor, &WAYS, group, seconds + 1.5));
            pairings.extend(AGAINST.map(|against| {
                let name = ratio_name(factor, against);
                ways::pairing(
                    name,
                    factor,
                    "latency_ms_p99",
                    Way::LeastConnectionsRescue,
                    against,
                )
            }));
        }
        Design {
            rounds: if settings.quick { 2 } else { 5 },
            arms,
            pairings,
            steady: "",
            parameters: parameters([
                ("workers", json!(WORKERS)),
                ("factors", json!(FACTORS)),
                ("load_s", json!(seconds)),
                ("usual_us", json!(USUAL_US)),
                ("long_us", json!(LONG_US)),
                ("timeout_ms", json!(PATIENCE.as_millis())),
            ]),
        }
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let (factor, way) = parse_arm(&arm.name)?;
        let rate = served_per_s(context)? * factor;
        let mut trial = Trial::start(way, WORKERS)?;
        let mut plan = measure::plan(
            trial.address,
            measure::poisson(rate),
            measure::for_seconds(seconds(context.settings.quick)),
            work(),
            context.seed,
        );
        plan.timeout = PATIENCE;
        let found = trial.load(&plan, context)?;
        let mut sample = measure::sample(&found, WORKERS);
        sample.put("offered_per_s", "1/s", rate);
        if way.steered() {
            let (rescues, moved) = status::moves(trial.address)?;
            sample.put("rescues", "count", rescues as f64);
            sample.put("connections_moved", "count", moved as f64);
        }
        trial.end(&mut sample)?;
        Ok(sample)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        judge(outcome)
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        present(outcome)
    }
}

/// Requests of a way that failed, as a part of all that were sent, over all rounds and rates in `factors`.
fn lost(outcome: &Outcome, factor: &str, way: Way) -> Option<f64> {
    let arm = ways::arm_name(factor, way);
    let sum = |metric: &str| outcome.values(&arm, metric).iter().sum::<f64>();
    let (errors, answered) = (sum("errors"), sum("requests"));
    (errors + answered > 0.0).then(|| errors / (errors + answered))
}

fn judge(outcome: &Outcome) -> Vec<Expectation> {
    let more_lost = |than: Way| {
        let of = |factor: &&str| {
            let rescue = lost(outcome, factor, Way::LeastConnectionsRescue)?;
            Some(rescue - lost(outcome, factor, than)?)
        };
        let all: Vec<f64> = FACTORS.iter().filter_map(of).collect();
        (!all.is_empty()).then(|| stats::max(&all))
    };
    let slower: Vec<f64> = FACTORS
        .iter()
        .filter_map(|factor| outcome.ratio(&ratio_name(factor, Way::ReuseportHash)))
        .collect();
    vec![
        Expectation::new(
            "rescue-loses-no-more",
            "The part of requests that fail with rescue, less that of the hash, is at most 0.02 (worst rate)",
            OURS,
            more_lost(Way::ReuseportHash),
            |m| m <= CHANCE,
        ),
        Expectation::new(
            "rescue-adds-no-loss",
            "The part of requests that fail with rescue, less that of least-connections without it, is at most 0.02 (worst rate)",
            OURS,
            more_lost(Way::LeastConnections),
            |m| m <= CHANCE,
        ),
        Expectation::new(
            "rescue-is-no-slower",
            "p99 with rescue is at most 1.2 times that of the hash (worst rate)",
            OURS,
            (!slower.is_empty()).then(|| stats::max(&slower)),
            |m| m <= 1.2,
        ),
        answers::agree(outcome),
    ]
}

fn present(outcome: &Outcome) -> Vec<Block> {
    let row = |factor: &str, way: Way| {
        let arm = ways::arm_name(factor, way);
        let cell = |metric: &str| outcome.median(&arm, metric).map_or("–".into(), number);
        let lost = lost(outcome, factor, way).map_or("–".into(), |l| format!("{:.1} %", l * 1e2));
        Row::ours(vec![
            format!("{factor} {}", way.name()),
            cell("offered_per_s"),
            lost,
            cell("latency_ms_mean"),
            cell("latency_ms_p99"),
            cell("rescues"),
            cell("connections_moved"),
        ])
    };
    let rows = FACTORS
        .iter()
        .flat_map(|factor| WAYS.map(|way| row(factor, way)));
    vec![Block::Table(Table {
        caption: "Requests that were given up after a second, and the latency of the others in ms. Rows: the rate as a multiple of what the machine serves, and the way.".into(),
        head: ["", "offered/s", "given up", "mean", "p99", "rescues", "moved"]
            .map(str::to_owned)
            .into(),
        rows: rows.collect(),
    })]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::tests::{failing, outcome};

    #[test]
    fn names_of_variants_go_both_ways() {
        assert_eq!(
            parse_arm(&ways::arm_name("1.2", Way::ReuseportHash)).unwrap(),
            (1.2, Way::ReuseportHash)
        );
        assert!(parse_arm("x/shared-accept").is_err());
    }

    #[test]
    fn who_loses_more_than_the_hash_fails() {
        let fails = |lost: f64| {
            let found = outcome(&[
                (
                    "1.2/least-connections+rescue",
                    &[("errors", &[lost]), ("requests", &[1000.0 - lost])],
                ),
                (
                    "1.2/reuseport-hash",
                    &[("errors", &[100.0]), ("requests", &[900.0])],
                ),
            ]);
            failing(judge(&found)).contains(&"rescue-loses-no-more".to_owned())
        };
        assert!(!fails(119.0));
        assert!(fails(121.0));
    }
}
