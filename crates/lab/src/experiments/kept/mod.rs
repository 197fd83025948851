//! Kept connections, and the servers that people run.

use serde_json::json;
use std::collections::BTreeMap;
use std::time::Duration;
use wakeone_load::{Arrivals, Mix, Plan, Spacing};

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Pairing, Sample, Settings, parameters};
use crate::others::{GUNICORN_THREADS, GUNICORN_UVICORN, NODE, Other, Sharing, UVICORN, WORKERS};
use crate::present::{Block, Chart, Row, Style, Table, number};
use crate::result::{Expectation, Outcome};
use crate::under_test::ServerUnderTest;
use crate::views::{self, Of};
use crate::{measure, stats};

card!();

/// The experiment.
pub struct Kept;

/// The servers.
const ALL: [Other; 4] = [UVICORN, GUNICORN_UVICORN, GUNICORN_THREADS, NODE];
/// How their users start them.
const COMMANDS: [&str; 4] = [
    "uvicorn --workers 4",
    "gunicorn -w 4 -k uvicorn.workers.UvicornWorker",
    "gunicorn -w 4 -k gthread --threads 2",
    "node cluster, SCHED_NONE",
];
/// As it is, and split.
const WAYS: [Sharing; 2] = [Sharing::Shared, Sharing::Split];
const CONNECTIONS: usize = 64;
const APART: Duration = Duration::from_millis(4);
const RATE_PER_S: f64 = 900.0;
const WORK_US: u64 = 2_000;
/// How much of what was asked a split server has to answer in time.
const KEEPS_UP: f64 = 0.95;

fn load_seconds(quick: bool) -> f64 {
    if quick { 4.0 } else { 10.0 }
}

fn arm_name(kind: Other, way: Sharing) -> String {
    format!("{}/{}", kind.name, way.name())
}

fn variants() -> impl Iterator<Item = (Other, Sharing)> {
    ALL.into_iter().flat_map(|kind| WAYS.map(|way| (kind, way)))
}

fn parse(name: &str) -> Result<(Other, Sharing), Error> {
    variants()
        .find(|(kind, way)| arm_name(*kind, *way) == name)
        .ok_or_else(|| Error::Unknown(name.into()))
}

impl Experiment for Kept {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let seconds = load_seconds(settings.quick);
        let mut design = Design {
            rounds: if settings.quick { 2 } else { 5 },
            // The rounds of an unchanged server differ: it is a matter of luck which worker gets the connections.
            steady: "",
            parameters: parameters([
                ("workers", json!(WORKERS)),
                ("connections", json!(CONNECTIONS)),
                ("apart_ms", json!(APART.as_millis())),
                ("rate_per_s", json!(RATE_PER_S)),
                ("work_us", json!(WORK_US)),
                ("load_s", json!(seconds)),
            ]),
            ..Design::default()
        };
        for (group, kind) in ALL.into_iter().enumerate() {
            for way in WAYS {
                let (name, seconds) = (arm_name(kind, way), seconds + 4.0);
                let arm = Arm {
                    name,
                    group,
                    seconds,
                };
                design.offer(arm, &arm_name(kind, way), kind.lacks(way));
            }
        }
        design.compare(ALL.map(|kind| Pairing {
            name: format!("{}: mean as it is / mean split", kind.name),
            a: arm_name(kind, Sharing::Shared),
            b: arm_name(kind, Sharing::Split),
            metric: "latency_ms_mean".into(),
        }));
        design
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let (kind, way) = parse(&arm.name)?;
        let mut running = ServerUnderTest::start(kind.launch(way)?)?;
        let plan = plan(running.address, context);
        let mut found = measure::load(&plan, context)?;
        running.answers.client_saw(&found);
        found.by_worker = by_rank(&found.by_worker);
        let mut sample = measure::sample(&found, WORKERS);
        running.stop(&mut sample)?;
        Ok(sample)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let mut all = Vec::new();
        for kind in ALL {
            let of = |metric: &str| outcome.values(&arm_name(kind, Sharing::Split), metric);
            if of("requests").is_empty() && kind.lacks(Sharing::Split).is_some() {
                continue;
            }
            let (keeps_up, rate) = (KEEPS_UP.to_string(), RATE_PER_S.to_string());
            let names = [
                ("server", kind.name),
                ("keeps_up", &*keeps_up),
                ("rate", &*rate),
            ];
            let busiest = stats::most(of("share_max_over_mean"));
            let rate = stats::least(of("throughput_per_s")).map(|rate| rate / RATE_PER_S);
            all.push(CARD.expect_of("{server}-even", &names, busiest));
            all.push(CARD.expect_of("{server}-keeps-up", &names, rate));
        }
        all.extend(measure::sound(outcome));
        all
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        let all = ALL.into_iter().zip(COMMANDS);
        let told = all.filter_map(|(kind, command)| meaning(outcome, kind, command));
        let mut blocks = views::meaning(told);
        blocks.extend([
            Block::Table(table(outcome)),
            Block::Chart(chart(outcome, "Mean latency.", "latency_ms_mean", "ms")),
            Block::Chart(chart(
                outcome,
                "Share of the busiest of four workers, in multiples of an even one.",
                "share_max_over_mean",
                "× even",
            )),
        ]);
        blocks.extend(outcome.left_out().map(Block::Paragraph));
        blocks
    }
}

fn plan(target: std::net::SocketAddr, context: &Context<'_>) -> Plan {
    let arrivals = Arrivals::Kept {
        rate_per_s: RATE_PER_S,
        spacing: Spacing::Poisson,
        connections: CONNECTIONS,
        apart: APART,
    };
    let end = measure::for_seconds(load_seconds(context.settings.quick));
    let mix = Mix::one(format!("/work?us={WORK_US}"));
    measure::plan(target, arrivals, end, mix, context.seed)
}

/// Workers by their rank, the busiest first: process ids differ from round to round.
fn by_rank(answers: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let mut counts: Vec<u64> = answers.values().copied().collect();
    counts.sort_unstable_by(|a, b| b.cmp(a));
    (0..)
        .map(|rank: usize| rank.to_string())
        .zip(counts)
        .collect()
}

fn meaning(outcome: &Outcome, kind: Other, command: &str) -> Option<String> {
    let of = |way: Sharing, metric: &str| outcome.values(&arm_name(kind, way), metric);
    let told = |way: Sharing| {
        let [mean, share] = ["latency_ms_mean", "share_max_over_mean"].map(|m| of(way, m));
        (!mean.is_empty()).then(|| {
            format!(
                "mean {} ms in its worst round, in which at most {:.0} % of the answers came from one worker",
                number(stats::max(mean)),
                stats::max(share) * 100.0 / WORKERS as f64
            )
        })
    };
    Some(format!(
        "{command}: {}. Under wakeone run --split: {}.",
        told(Sharing::Shared)?,
        told(Sharing::Split)?
    ))
}

fn table(outcome: &Outcome) -> Table {
    let columns = ["throughput_per_s", "latency_ms_mean", "latency_ms_p99"].map(Of::Ends);
    let row = |(kind, way): (Other, Sharing)| {
        let name = arm_name(kind, way);
        let found = outcome.variant(&name)?;
        let busiest = stats::most(outcome.values(&name, "share_max_over_mean"))?;
        let busiest = format!("{:.0} %", busiest * 100.0 / WORKERS as f64);
        let ends = columns.map(|of| of.cell(found));
        let rates = outcome.values(&name, "throughput_per_s");
        let late = stats::min(rates) < KEEPS_UP * RATE_PER_S;
        let row = Row::named(name.clone(), ends.into_iter().chain([busiest]));
        Some(row.marking(if late { vec![1] } else { Vec::new() }))
    };
    Table::new(
        format!(
            "{RATE_PER_S} requests/s of {} ms on {CONNECTIONS} kept connections: smallest and largest of the rounds; the busiest worker's largest share. ✗: does not keep up.",
            WORK_US / 1000
        ),
        ["answers/s", "mean ms", "p99 ms", "busiest"],
        variants().filter_map(row),
    )
}

fn chart(outcome: &Outcome, title: &str, metric: &str, unit: &str) -> Chart {
    let named = |(kind, way): (Other, Sharing)| {
        let name = arm_name(kind, way);
        let found = outcome.variant(&name)?;
        Some((Style::ours(name, way.colour()), found))
    };
    let bars = views::bars(variants().filter_map(named), metric);
    let log = metric == "latency_ms_mean";
    Chart::bars(title, "Median and range of the rounds.", (unit, log), bars)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::tests::{SOUND, failing, outcome};

    #[test]
    fn names_of_variants_go_both_ways() {
        for (kind, way) in variants() {
            assert_eq!(parse(&arm_name(kind, way)).unwrap(), (kind, way));
        }
        assert!(parse("uvicorn/hash").is_err());
    }

    #[test]
    fn workers_are_told_by_rank() {
        let answers = [("712".to_owned(), 5), ("99".to_owned(), 20)].into();
        let ranked = by_rank(&answers);
        assert_eq!(measure::by_worker(&ranked, 4), [20, 5, 0, 0]);
    }

    #[test]
    fn each_limit_bites() {
        let failed = |busiest: f64, rate: f64| {
            let (busiest, rate) = ([1.0, busiest], [900.0, rate]);
            let mut metrics = SOUND.to_vec();
            metrics.extend([
                ("requests", &[9.0][..]),
                ("share_max_over_mean", &busiest[..]),
                ("throughput_per_s", &rate[..]),
            ]);
            let names: Vec<String> = ALL.map(|kind| arm_name(kind, Sharing::Split)).into();
            let variants: Vec<_> = names
                .iter()
                .map(|n| (n.as_str(), metrics.as_slice()))
                .collect();
            failing(Kept.judge(&outcome(&variants)))
        };
        assert_eq!(failed(1.1, 855.0), Vec::<String>::new());
        let all = |what: &str| ALL.map(|kind| format!("{}-{what}", kind.name)).to_vec();
        assert_eq!(failed(1.11, 900.0), all("even"));
        assert_eq!(failed(1.0, 854.0), all("keeps-up"));
    }
}
