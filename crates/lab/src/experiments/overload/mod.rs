//! Does moving queues do harm where the machine itself is slow?

use std::sync::OnceLock;
use std::time::Duration;

use serde_json::json;
use wakeone_load::{Arrivals, Mix};

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Sample, Settings, parameters};
use crate::present::{Block, Row, Table, cell};
use crate::result::{Expectation, Outcome};
use crate::under_test::ServerUnderTest;
use crate::ways::{self, Serving, Way};
use crate::{answers, measure, stats, status};

card!();

/// The experiment.
pub struct Overload;

const WORKERS: usize = 4;
const USUAL_US: u64 = 300;
const LONG_US: u64 = 3_000;
const CLIENTS: usize = 32;
/// How long a client waits before it gives up.
const PATIENCE: Duration = Duration::from_secs(1);
/// The rates, as multiples of the machine's capacity.
const FACTORS: [&str; 2] = ["1.0", "1.2"];
const WAYS: [Way; 4] = [
    Way::SharedAccept,
    Way::ReuseportHash,
    Way::LeastConnections,
    Way::LeastConnectionsRescue,
];
/// The ways that rescue is compared with.
const AGAINST: [Way; 3] = [Way::ReuseportHash, Way::LeastConnections, Way::SharedAccept];

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

/// Starts a server. Where Wakeone steers, its queues are as long as `wakeone run` makes them by itself.
fn start(way: Way) -> Result<ServerUnderTest, Error> {
    let mut launch = way.launch(Serving::Blocking, WORKERS);
    if way.steered() {
        launch.line = launch.line.replace(" --backlog {backlog}", "");
    }
    ServerUnderTest::start(launch)
}

/// How many requests/s this machine serves, measured once.
fn served_per_s(context: &mut Context<'_>) -> Result<f64, Error> {
    static SERVED: OnceLock<f64> = OnceLock::new();
    if let Some(known) = SERVED.get() {
        return Ok(*known);
    }
    let mut trial = start(Way::SharedAccept)?;
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
    trial.stop(&mut Sample::default())?;
    let served = found.completed as f64 / found.elapsed.as_secs_f64();
    Ok(*SERVED.get_or_init(|| served))
}

impl Experiment for Overload {
    fn card(&self) -> &'static Card {
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
        let mut trial = start(way)?;
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
        trial.stop(&mut sample)?;
        Ok(sample)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        // Which of two equal ways loses more is chance, as far as the bounds go.
        let more_lost = |than: Way| {
            let of = |factor: &&str| {
                let rescue = lost(outcome, factor, Way::LeastConnectionsRescue)?;
                Some(rescue - lost(outcome, factor, than)?)
            };
            stats::most(&FACTORS.iter().filter_map(of).collect::<Vec<f64>>())
        };
        let slower = FACTORS.map(|factor| outcome.ratio(&ratio_name(factor, Way::ReuseportHash)));
        let slower: Vec<f64> = slower.into_iter().flatten().collect();
        vec![
            CARD.expect("rescue-loses-no-more", more_lost(Way::ReuseportHash)),
            CARD.expect("rescue-adds-no-loss", more_lost(Way::LeastConnections)),
            CARD.expect("rescue-is-no-slower", stats::most(&slower)),
            answers::agree(outcome),
        ]
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        let row = |factor: &str, way: Way| {
            let arm = ways::arm_name(factor, way);
            let median = |metric: &str| cell(outcome.median(&arm, metric));
            let lost =
                lost(outcome, factor, way).map_or("–".into(), |l| format!("{:.1} %", l * 1e2));
            let rest = [
                "latency_ms_mean",
                "latency_ms_p99",
                "rescues",
                "connections_moved",
            ];
            let cells = [median("offered_per_s"), lost]
                .into_iter()
                .chain(rest.map(median));
            Row::named(format!("{factor} {}", way.name()), cells)
        };
        let rows = FACTORS
            .iter()
            .flat_map(|factor| WAYS.map(|way| row(factor, way)));
        vec![Block::Table(Table::new(
            "Requests that were given up after a second, and the latency of the others in ms. Rows: the rate as a multiple of what the machine serves, and the way.",
            ["offered/s", "given up", "mean", "p99", "rescues", "moved"],
            rows,
        ))]
    }
}

/// Requests of a way that failed, as a part of all that were sent, over all rounds and rates in `factors`.
fn lost(outcome: &Outcome, factor: &str, way: Way) -> Option<f64> {
    let arm = ways::arm_name(factor, way);
    let sum = |metric: &str| outcome.values(&arm, metric).iter().sum::<f64>();
    let (errors, answered) = (sum("errors"), sum("requests"));
    (errors + answered > 0.0).then(|| errors / (errors + answered))
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
            failing(Overload.judge(&found)).contains(&"rescue-loses-no-more".to_owned())
        };
        assert!(!fails(119.0));
        assert!(fails(121.0));
    }
}
