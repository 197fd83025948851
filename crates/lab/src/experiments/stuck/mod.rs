//! Measures how long a worker may be stuck before its clients notice.

use serde_json::json;
use wakeone_load::{Mix, Plan};

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Sample, Settings, parameters};
use crate::present::{Block, Chart, Row, Style, Table, cell};
use crate::result::{Expectation, Outcome};
use crate::ways::{self, Way};
use crate::{measure, stats, views};

card!();

/// The experiment.
pub struct Stuck;

const WORKERS: usize = 4;
const RATE_PER_S: f64 = 1000.0;
const USUAL_US: u64 = 1000;
const WAYS: [Way; 4] = [
    Way::SharedAccept,
    Way::ReuseportHash,
    Way::LeastConnections,
    Way::LeastConnectionsRescue,
];

fn stuck_ms(quick: bool) -> &'static [u64] {
    if quick {
        &[10, 30, 100]
    } else {
        &[10, 30, 100, 300, 1000]
    }
}

fn load_seconds(quick: bool) -> f64 {
    if quick { 3.0 } else { 8.0 }
}

fn arm_name(ms: u64, way: Way) -> String {
    ways::arm_name(&format!("{ms}ms"), way)
}

fn parse_arm(name: &str) -> Result<(u64, Way), Error> {
    let (of, way) = ways::parse_arm(name, &WAYS)?;
    let ms = of.strip_suffix("ms").and_then(|ms| ms.parse().ok());
    Ok((ms.ok_or_else(|| Error::Unknown(name.into()))?, way))
}

fn ratio_name(ms: u64, a: Way, b: Way) -> String {
    format!(
        "stuck for {ms} ms: mean of {} / mean of {}",
        a.name(),
        b.name()
    )
}

/// The comparisons at each stuck time.
const PAIRS: [(Way, Way); 3] = [
    (Way::LeastConnectionsRescue, Way::SharedAccept),
    (Way::ReuseportHash, Way::LeastConnectionsRescue),
    (Way::LeastConnectionsRescue, Way::LeastConnections),
];

impl Experiment for Stuck {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let seconds = load_seconds(settings.quick);
        let (mut arms, mut pairings) = (Vec::new(), Vec::new());
        for (group, ms) in stuck_ms(settings.quick).iter().enumerate() {
            let of = format!("{ms}ms");
            arms.extend(ways::arms(&of, &WAYS, group, seconds + 0.5));
            pairings.extend(
                PAIRS.map(|(a, b)| {
                    ways::pairing(ratio_name(*ms, a, b), &of, "latency_ms_mean", a, b)
                }),
            );
        }
        Design {
            rounds: if settings.quick { 2 } else { 3 },
            arms,
            pairings,
            // A round has few slow requests, so their places decide; the ratios see the same ones.
            steady: "",
            parameters: parameters([
                ("workers", json!(WORKERS)),
                ("rate_per_s", json!(RATE_PER_S)),
                ("load_s", json!(seconds)),
                ("usual_us", json!(USUAL_US)),
                ("stuck_ms", json!(stuck_ms(settings.quick))),
            ]),
        }
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let (ms, way) = parse_arm(&arm.name)?;
        let mut trial = way.start(WORKERS)?;
        let found = trial.load(&plan(trial.address, ms, context), context)?;
        let mut sample = measure::sample(&found, WORKERS);
        trial.stop(&mut sample)?;
        sample.put("all_latency_ms_mean", "ms", found.latency.mean() / 1e6);
        if let Some(usual) = found.by_path.first() {
            measure::latency(&mut sample, &usual.latency);
            let distribution = crate::distribution::Distribution::from_ns(&usual.latency);
            sample
                .distributions
                .insert("latency_ms".into(), distribution);
        }
        Ok(sample)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let over = |from: u64, (a, b): (Way, Way)| -> Vec<f64> {
            let times = measured(outcome).into_iter().filter(|ms| *ms >= from);
            times
                .filter_map(|ms| outcome.ratio(&ratio_name(ms, a, b)))
                .collect()
        };
        let mut expected = vec![
            CARD.expect(
                "rescue-as-good-as-one-queue",
                stats::most(&over(100, PAIRS[0])),
            ),
            CARD.expect("hash-is-worse", stats::least(&over(100, PAIRS[1]))),
            CARD.expect("rescue-never-costs", stats::most(&over(0, PAIRS[2]))),
        ];
        expected.extend(measure::sound(outcome));
        expected
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        let mut blocks = views::meaning(meaning(outcome));
        for (title, metric) in [
            (
                "Mean latency of the usual requests, in ms.",
                "latency_ms_mean",
            ),
            ("Slowest one percent of them, in ms.", "latency_ms_p99"),
        ] {
            blocks.push(Block::Table(table(outcome, title, metric)));
            let line = |way: Way| {
                (
                    Style::ours(way.name(), way.colour()),
                    curve(outcome, way, metric),
                )
            };
            blocks.push(Block::Chart(Chart::lines(
                title,
                "Over how long a worker is stuck at a time. Both axes are logarithmic.",
                ("stuck for, ms", "ms", true),
                WAYS.map(line),
            )));
        }
        blocks
    }
}

/// One request in `ms` is stuck for `ms`: a thousand of them a second keep one worker stuck in the mean, whatever `ms` is.
fn plan(target: std::net::SocketAddr, ms: u64, context: &Context<'_>) -> Plan {
    let path = |us: u64| format!("/work?us={us}&kind=sleep");
    let mix = Mix::weighted([(ms - 1, path(USUAL_US)), (1, path(ms * 1000))]);
    let end = measure::for_seconds(load_seconds(context.settings.quick));
    measure::plan(target, measure::poisson(RATE_PER_S), end, mix, context.seed)
}

/// The stuck times that were measured, rising.
fn measured(outcome: &Outcome) -> Vec<u64> {
    let mut all: Vec<u64> = outcome
        .variants
        .iter()
        .filter_map(|v| Some(parse_arm(&v.name).ok()?.0))
        .collect();
    all.sort_unstable();
    all.dedup();
    all
}

fn curve(outcome: &Outcome, way: Way, metric: &str) -> Vec<(f64, f64)> {
    measured(outcome)
        .into_iter()
        .filter_map(|ms| Some((ms as f64, outcome.median(&arm_name(ms, way), metric)?)))
        .collect()
}

fn table(outcome: &Outcome, title: &str, metric: &str) -> Table {
    let times = measured(outcome);
    let row = |way: Way| {
        let at = |ms: &u64| cell(outcome.median(&arm_name(*ms, way), metric));
        Row::named(way.name(), times.iter().map(at))
    };
    Table::new(
        format!("{title} Columns: how long a worker is stuck at a time."),
        times.iter().map(|ms| format!("{ms} ms")),
        WAYS.map(row),
    )
}

fn meaning(outcome: &Outcome) -> Option<String> {
    let longest = *measured(outcome).last()?;
    let mean = |way: Way| outcome.median(&arm_name(longest, way), "latency_ms_mean");
    let verdict = if mean(Way::LeastConnectionsRescue)? <= 2.0 * mean(Way::SharedAccept)? {
        "With rescue, clients notice about as little as with one shared queue"
    } else {
        "With rescue, clients still notice more than with one shared queue"
    };
    let names = [("longest", &*longest.to_string()), ("verdict", verdict)];
    CARD.say("longest", outcome, &names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_variants_go_both_ways() {
        for way in WAYS {
            assert_eq!(parse_arm(&arm_name(300, way)).unwrap(), (300, way));
        }
        assert!(parse_arm("x").is_err());
        assert!(parse_arm("x/shared-accept").is_err());
    }
}
