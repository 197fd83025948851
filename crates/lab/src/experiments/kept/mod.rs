//! Kept connections, and the servers that people run.

mod servers;

use serde_json::json;
use std::collections::BTreeMap;
use std::time::Duration;
use wakeone_load::{Arrivals, Mix, Plan, Spacing};

use crate::experiment::{
    Arm, Card, Context, Design, Experiment, Pairing, Sample, Settings, Source, parameters,
};
use crate::experiments::split::servers::Way;
use crate::present::{Bar, Block, Chart, Kind as ChartKind, Row, Style, Table, number};
use crate::result::{Expectation, Outcome};
use crate::{Error, measure, stats};
use servers::{ALL, Kind, Running, WAYS, WORKERS};

/// The experiment.
pub struct Kept;

const CONNECTIONS: usize = 64;
const APART: Duration = Duration::from_millis(4);
const RATE_PER_S: f64 = 900.0;
const WORK_US: u64 = 2_000;
/// How far from its even share the busiest worker of a split server may be.
const EVEN: f64 = 1.1;
/// How much of what was asked a split server has to answer in time.
const KEEPS_UP: f64 = 0.95;
const OURS: &str = "Wakeone's own goal";

const CARD: Card = Card {
    name: "kept",
    title: "Kept connections, and the servers that people run",
    question: "64 clients connect one after another and keep their connections: which workers of uvicorn, gunicorn and node get them, and how long do requests then take?",
    source: Source {
        short: "Majkowski, 2017",
        long: "Marek Majkowski, Why does one NGINX worker take all the load?, Cloudflare blog, 2017.",
        url: "https://blog.cloudflare.com/the-sad-state-of-linux-socket-balancing/",
    },
    readme: include_str!("README.md"),
    published: "series,x,metric,unit,value,note\n",
};

fn load_seconds(quick: bool) -> f64 {
    if quick { 4.0 } else { 10.0 }
}

fn arm_name(kind: Kind, way: Way) -> String {
    format!("{}/{}", kind.name(), way.name())
}

fn variants() -> impl Iterator<Item = (Kind, Way)> {
    ALL.into_iter().flat_map(|kind| WAYS.map(|way| (kind, way)))
}

fn parse(name: &str) -> Result<(Kind, Way), Error> {
    variants()
        .find(|(kind, way)| arm_name(*kind, *way) == name)
        .ok_or_else(|| Error::Unknown(name.into()))
}

impl Experiment for Kept {
    fn card(&self) -> &Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let seconds = load_seconds(settings.quick);
        let is_here = |(kind, way): &(Kind, Way)| kind.lacks(*way).is_none();
        let arms = variants().filter(is_here).map(|(kind, way)| Arm {
            name: arm_name(kind, way),
            group: ALL.iter().position(|k| *k == kind).unwrap_or(0),
            seconds: seconds + 4.0,
        });
        let left_out =
            variants().filter_map(|(kind, way)| Some((arm_name(kind, way), kind.lacks(way)?)));
        let left_out: BTreeMap<String, String> = left_out.collect();
        let pairings = ALL
            .into_iter()
            .filter(|kind| WAYS.iter().all(|way| kind.lacks(*way).is_none()))
            .map(|kind| Pairing {
                name: format!("{}: mean as it is / mean split", kind.name()),
                a: arm_name(kind, Way::Shared),
                b: arm_name(kind, Way::Split),
                metric: "latency_ms_mean".into(),
            });
        Design {
            rounds: if settings.quick { 2 } else { 5 },
            arms: arms.collect(),
            pairings: pairings.collect(),
            // As it is, a server's rounds differ: who gets the connections is a matter of luck.
            steady: "",
            parameters: parameters([
                ("workers", json!(WORKERS)),
                ("connections", json!(CONNECTIONS)),
                ("apart_ms", json!(APART.as_millis())),
                ("rate_per_s", json!(RATE_PER_S)),
                ("work_us", json!(WORK_US)),
                ("load_s", json!(seconds)),
                ("left_out", json!(left_out)),
            ]),
        }
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let (kind, way) = parse(&arm.name)?;
        let mut running = Running::start(kind, way)?;
        let plan = plan(running.address, context);
        let mut found = measure::load(&plan, context)?;
        running.answers.client_saw(&found);
        found.by_worker = by_rank(&found.by_worker);
        let mut sample = measure::sample(&found, WORKERS);
        running.stop(&mut sample)?;
        Ok(sample)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        judge(outcome)
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        let mut blocks = vec![Block::Heading("What it means".into())];
        let told = ALL.into_iter().filter_map(|kind| meaning(outcome, kind));
        blocks.extend(told.map(Block::Paragraph));
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
    Plan {
        keep_alive: true,
        ..measure::plan(target, arrivals, end, mix, context.seed)
    }
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

fn judge(outcome: &Outcome) -> Vec<Expectation> {
    let mut all = Vec::new();
    for kind in ALL {
        let of = |metric: &str| outcome.values(&arm_name(kind, Way::Split), metric).to_vec();
        if of("requests").is_empty() && kind.lacks(Way::Split).is_some() {
            continue;
        }
        let worst =
            |values: Vec<f64>, of: fn(&[f64]) -> f64| (!values.is_empty()).then(|| of(&values));
        all.push(Expectation::new(
            format!("{}-even", kind.name()),
            format!("{}: split, the busiest worker answers at most {EVEN} times its even share (worst round)", kind.name()),
            OURS,
            worst(of("share_max_over_mean"), stats::max),
            |m| m <= EVEN,
        ));
        all.push(Expectation::new(
            format!("{}-keeps-up", kind.name()),
            format!("{}: split, it answers at least {KEEPS_UP} of the {RATE_PER_S} requests/s (worst round)", kind.name()),
            OURS,
            worst(of("throughput_per_s"), stats::min).map(|rate| rate / RATE_PER_S),
            |m| m >= KEEPS_UP,
        ));
    }
    all.extend(measure::sound(outcome));
    all
}

fn meaning(outcome: &Outcome, kind: Kind) -> Option<String> {
    let of = |way: Way, metric: &str| outcome.values(&arm_name(kind, way), metric);
    let told = |way: Way| {
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
        "{}: {}. Under wakeone run --split: {}.",
        kind.command(),
        told(Way::Shared)?,
        told(Way::Split)?
    ))
}

fn table(outcome: &Outcome) -> Table {
    let columns = [
        ("answers/s", "throughput_per_s"),
        ("mean ms", "latency_ms_mean"),
        ("p99 ms", "latency_ms_p99"),
    ];
    let range = |name: &str, metric: &str| {
        let found = outcome.variant(name)?.metrics.get(metric)?;
        Some(if number(found.min) == number(found.max) {
            number(found.min)
        } else {
            format!("{} … {}", number(found.min), number(found.max))
        })
    };
    let row = |(kind, way): (Kind, Way)| {
        let name = arm_name(kind, way);
        let busiest = outcome.values(&name, "share_max_over_mean");
        let rates = outcome.values(&name, "throughput_per_s");
        if busiest.is_empty() {
            return None;
        }
        let mut cells = vec![name.clone()];
        cells.extend(columns.map(|(_, m)| range(&name, m).unwrap_or_else(|| "–".into())));
        cells.push(format!(
            "{:.0} %",
            stats::max(busiest) * 100.0 / WORKERS as f64
        ));
        let late = stats::min(rates) < KEEPS_UP * RATE_PER_S;
        Some(Row::ours(cells).marking(if late { vec![1] } else { Vec::new() }))
    };
    Table {
        caption: format!(
            "{RATE_PER_S} requests/s of {} ms on {CONNECTIONS} kept connections: smallest and largest of the rounds; the busiest worker's largest share. ✗: does not keep up.",
            WORK_US / 1000
        ),
        head: std::iter::once("")
            .chain(columns.map(|(head, _)| head))
            .chain(["busiest"])
            .map(str::to_owned)
            .collect(),
        rows: variants().filter_map(row).collect(),
    }
}

fn chart(outcome: &Outcome, title: &str, metric: &str, unit: &str) -> Chart {
    let bar = |(kind, way): (Kind, Way)| {
        let name = arm_name(kind, way);
        let found = outcome.variant(&name)?.metrics.get(metric)?;
        Some(Bar {
            style: Style::ours(name, way.colour()),
            value: found.median,
            range: Some((found.min, found.max)),
        })
    };
    Chart {
        title: title.into(),
        note: "Median and range of the rounds.".into(),
        kind: ChartKind::Bars {
            unit: unit.into(),
            bars: variants().filter_map(bar).collect(),
            log: metric == "latency_ms_mean",
        },
    }
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
            let names: Vec<String> = ALL.map(|kind| arm_name(kind, Way::Split)).into();
            let variants: Vec<_> = names
                .iter()
                .map(|n| (n.as_str(), metrics.as_slice()))
                .collect();
            failing(judge(&outcome(&variants)))
        };
        assert_eq!(failed(1.1, 855.0), Vec::<String>::new());
        let all = |what: &str| ALL.map(|kind| format!("{}-{what}", kind.name())).to_vec();
        assert_eq!(failed(1.11, 900.0), all("even"));
        assert_eq!(failed(1.0, 854.0), all("keeps-up"));
    }
}
