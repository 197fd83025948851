//! Servers that share one listener, and the same servers split.

pub(super) mod servers;

use serde_json::json;
use std::collections::BTreeMap;
use wakeone_load::{Arrivals, Mix, Plan};

use crate::experiment::{
    Arm, Card, Context, Design, Experiment, Pairing, Sample, Settings, Source, parameters,
};
use crate::present::{Bar, Block, Chart, Kind as ChartKind, Row, Style, Table, number};
use crate::result::{Expectation, Outcome, Variant};
use crate::{Error, apps, measure, stats};
use servers::{ALL, Kind, Running, WAYS, WORKERS, Way};

/// The experiment.
pub struct Split;

const OURS: &str = "Wakeone's own goal";
const USUAL_US: u64 = 1_000;
/// One request in so many is slow.
const SLOW_ONE_IN: u64 = 100;
/// Share of its time that each worker is stuck.
const STUCK: f64 = 0.25;
/// Clients of the closed loop.
const CLIENTS: usize = 32;
const STUCK_LOAD: &str = "stuck";
const FULL_LOAD: &str = "full";
/// How far from even the shares may be.
const EVEN: f64 = 0.10;

const CARD: Card = Card {
    name: "split",
    title: "A queue for each worker of servers that share one",
    question: "Servers whose workers share one listener are given a queue a worker without being changed: what does that cost, and what is it worth when workers get stuck?",
    source: Source {
        short: "Rivera et al., 2014",
        long: "Beyond Diego Rivera et al., Analysis of Linux UDP Sockets Concurrent Performance, 2014, section VI: one socket with a queue for each reader, so that no program has to be rewritten.",
        url: "",
    },
    readme: include_str!("README.md"),
    published: "series,x,metric,unit,value,note\n",
};

fn load_seconds(load: &str, quick: bool) -> f64 {
    match (load, quick) {
        (STUCK_LOAD, true) => 5.0,
        (STUCK_LOAD, false) => 20.0,
        (_, true) => 1.5,
        (_, false) => 4.0,
    }
}

/// Slow requests are the slower the fewer there are: workers are stuck for the same share of their time.
fn slow_us(kind: Kind) -> u64 {
    let slow_per_s = kind.rate_per_s() / SLOW_ONE_IN as f64;
    (STUCK * WORKERS as f64 / slow_per_s * 1e6) as u64
}

fn arm_name(load: &str, kind: Kind, way: Way) -> String {
    format!("{load}/{}/{}", kind.name(), way.name())
}

fn variants() -> impl Iterator<Item = (&'static str, Kind, Way)> {
    [STUCK_LOAD, FULL_LOAD].into_iter().flat_map(|load| {
        ALL.into_iter()
            .flat_map(move |kind| WAYS.map(move |way| (load, kind, way)))
    })
}

fn parse(name: &str) -> Result<(&'static str, Kind, Way), Error> {
    variants()
        .find(|(load, kind, way)| arm_name(load, *kind, *way) == name)
        .ok_or_else(|| Error::Unknown(name.into()))
}

/// What is compared of each server: load, metric, above and below the line, and what ought to be seen.
struct Comparison {
    load: &'static str,
    metric: &'static str,
    a: Way,
    b: Way,
    claim: &'static str,
    holds: fn(f64) -> bool,
}

const COMPARISONS: [Comparison; 3] = [
    Comparison {
        load: STUCK_LOAD,
        metric: "latency_ms_p90",
        a: Way::Split,
        b: Way::Hash,
        claim: "With stuck workers, the p90 split is at most half of that with its own listener a worker",
        holds: |m| m <= 0.5,
    },
    Comparison {
        load: STUCK_LOAD,
        metric: "latency_ms_mean",
        a: Way::Split,
        b: Way::Shared,
        claim: "With stuck workers, the mean split is at most 1.2 times that of the one shared socket",
        holds: |m| m <= 1.2,
    },
    Comparison {
        load: FULL_LOAD,
        metric: "throughput_per_s",
        a: Way::Split,
        b: Way::Shared,
        claim: "Split, it answers at least 0.9 times as many requests a second as with the one shared socket",
        holds: |m| m >= 0.9,
    },
];

impl Comparison {
    fn name(&self, kind: Kind) -> String {
        format!(
            "{}, {}: {} of {} / {}",
            kind.name(),
            self.load,
            self.metric.trim_start_matches("latency_ms_"),
            self.a.name(),
            self.b.name()
        )
    }
}

impl Experiment for Split {
    fn card(&self) -> &Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let mut lacks: BTreeMap<&str, String> = ALL
            .into_iter()
            .filter_map(|kind| Some((kind.name(), kind.lacks()?)))
            .collect();
        let missing = wakeone_kernel::capability::missing();
        if !missing.is_empty() {
            lacks.insert(
                Way::Split.name(),
                format!("it needs {}", missing.join(", ")),
            );
        }
        let is_here = |kind: Kind, way: Way| {
            !lacks.contains_key(kind.name()) && !lacks.contains_key(way.name())
        };
        let here: Vec<_> = variants()
            .filter(|(_, kind, way)| is_here(*kind, *way))
            .collect();
        let arm = |(load, kind, way): &(&str, Kind, Way)| Arm {
            name: arm_name(load, *kind, *way),
            group: ALL.iter().position(|k| k == kind).unwrap_or(0)
                + if *load == STUCK_LOAD { 0 } else { ALL.len() },
            seconds: load_seconds(load, settings.quick) + 1.5,
        };
        let pairing = |kind: Kind| {
            COMPARISONS.iter().map(move |of| Pairing {
                name: of.name(kind),
                a: arm_name(of.load, kind, of.a),
                b: arm_name(of.load, kind, of.b),
                metric: of.metric.into(),
            })
        };
        let whole = |kind: &Kind| WAYS.into_iter().all(|way| is_here(*kind, way));
        let slow: BTreeMap<&str, u64> = ALL.map(|kind| (kind.name(), slow_us(kind))).into();
        let rates: BTreeMap<&str, f64> = ALL.map(|kind| (kind.name(), kind.rate_per_s())).into();
        Design {
            rounds: if settings.quick { 3 } else { 5 },
            arms: here.iter().map(arm).collect(),
            pairings: ALL.into_iter().filter(whole).flat_map(pairing).collect(),
            steady: "",
            parameters: parameters([
                ("workers", json!(WORKERS)),
                ("usual_us", json!(USUAL_US)),
                ("slow_one_in", json!(SLOW_ONE_IN)),
                ("slow_us", json!(slow)),
                ("stuck_rate_per_s", json!(rates)),
                ("stuck_s", json!(load_seconds(STUCK_LOAD, settings.quick))),
                ("full_clients", json!(CLIENTS)),
                ("full_s", json!(load_seconds(FULL_LOAD, settings.quick))),
                ("left_out", json!(lacks)),
            ]),
        }
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let (load, kind, way) = parse(&arm.name)?;
        let mut running = Running::start(kind, way)?;
        let mut found = measure::load(&plan(load, kind, &running, context), context)?;
        running.answers.client_saw(&found);
        found.by_worker = apps::by_place(&found.by_worker, &running.workers);
        let mut sample = measure::sample(&found, WORKERS);
        running.stop(&mut sample)?;
        Ok(sample)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        judge(outcome)
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        let mut blocks = vec![Block::Heading("What it means".into())];
        let here = measured(outcome);
        blocks.extend(
            here.iter()
                .filter_map(|kind| meaning(outcome, *kind))
                .map(Block::Paragraph),
        );
        for load in [STUCK_LOAD, FULL_LOAD] {
            blocks.push(Block::Table(table(outcome, load)));
        }
        for kind in here {
            blocks.push(Block::Chart(percentiles(outcome, kind)));
        }
        blocks.push(Block::Chart(throughput(outcome)));
        blocks.extend(outcome.left_out().map(Block::Paragraph));
        blocks
    }
}

fn plan(load: &str, kind: Kind, running: &Running, context: &Context<'_>) -> Plan {
    let end = measure::for_seconds(load_seconds(load, context.settings.quick));
    let path = |us: u64| format!("/work?us={us}&kind=sleep");
    let (arrivals, mix) = if load == STUCK_LOAD {
        (
            measure::poisson(kind.rate_per_s()),
            Mix::weighted([(SLOW_ONE_IN - 1, path(USUAL_US)), (1, path(slow_us(kind)))]),
        )
    } else {
        let closed = Arrivals::Closed {
            concurrency: CLIENTS,
        };
        (closed, Mix::one(path(0)))
    };
    measure::plan(running.address, arrivals, end, mix, context.seed)
}

/// The servers that were measured, in order.
fn measured(outcome: &Outcome) -> Vec<Kind> {
    let has = |kind: &Kind| {
        outcome
            .variant(&arm_name(STUCK_LOAD, *kind, Way::Shared))
            .is_some()
    };
    ALL.into_iter().filter(has).collect()
}

/// How far from even the share of the furthest worker is, over all rounds together.
fn uneven(variant: &Variant) -> Option<f64> {
    let of = |worker: usize| variant.metrics.get(&format!("share_worker_{worker}"));
    let mut furthest: f64 = 0.0;
    let rounds = of(0)?.values.len();
    // Workers have other process ids in each round: a round at a time.
    for round in 0..rounds {
        for worker in 0..WORKERS {
            let share = of(worker)?.values.get(round)?;
            furthest = furthest.max((share * WORKERS as f64 - 1.0).abs());
        }
    }
    Some(furthest)
}

/// Three standard deviations of chance of the share of one worker: see `tills`, whose workload this is.
fn by_chance(requests: f64) -> f64 {
    let others = WORKERS as f64 - 1.0;
    let lever = STUCK / (1.0 - STUCK);
    3.0 * (others / requests + others / (requests / SLOW_ONE_IN as f64) * lever * lever).sqrt()
}

fn judge(outcome: &Outcome) -> Vec<Expectation> {
    let mut all = Vec::new();
    for kind in measured(outcome) {
        for of in &COMPARISONS {
            let metric = of.metric.trim_start_matches("latency_ms_");
            all.push(Expectation::new(
                format!("{}-{}-{metric}-{}", kind.name(), of.load, of.b.name()),
                format!("{}: {}", kind.name(), of.claim),
                OURS,
                outcome.ratio(&of.name(kind)),
                of.holds,
            ));
        }
        let split = outcome.variant(&arm_name(STUCK_LOAD, kind, Way::Split));
        let requests = split.and_then(|v| v.median("requests")).unwrap_or(0.0);
        let limit = EVEN.max(by_chance(requests.max(1.0)));
        all.push(Expectation::new(
            format!("{}-even", kind.name()),
            format!(
                "{}: split, each worker's share of the stuck workload is within ±{:.0} % of even in each round ({requests:.0} requests; chance alone comes to {:.0} %)",
                kind.name(),
                limit * 100.0,
                by_chance(requests.max(1.0)) * 100.0
            ),
            OURS,
            split.and_then(uneven),
            |m| m <= limit,
        ));
    }
    all.extend(measure::sound(outcome));
    all
}

fn meaning(outcome: &Outcome, kind: Kind) -> Option<String> {
    let of = |load, way, metric| outcome.median(&arm_name(load, kind, way), metric);
    let p90 = |way| of(STUCK_LOAD, way, "latency_ms_p90").map(number);
    let mean = |way| of(STUCK_LOAD, way, "latency_ms_mean").map(number);
    Some(format!(
        "{} with stuck workers: mean {} ms and p90 {} ms with its one shared socket, {} and {} with a listener a worker of its own, {} and {} split. Under full load it answers {} times as many requests split as shared.",
        kind.name(),
        mean(Way::Shared)?,
        p90(Way::Shared)?,
        mean(Way::Hash)?,
        p90(Way::Hash)?,
        mean(Way::Split)?,
        p90(Way::Split)?,
        number(outcome.ratio(&COMPARISONS[2].name(kind))?),
    ))
}

fn table(outcome: &Outcome, load: &str) -> Table {
    let columns = [
        ("avg ms", "latency_ms_mean"),
        ("p50", "latency_ms_p50"),
        ("p90", "latency_ms_p90"),
        ("p99", "latency_ms_p99"),
        ("requests/s", "throughput_per_s"),
        ("busiest/mean", "share_max_over_mean"),
    ];
    let row = |(of, kind, way): (&str, Kind, Way)| {
        let found = outcome.variant(&arm_name(of, kind, way))?;
        let cell = |metric: &str| found.median(metric).map_or_else(|| "–".into(), number);
        let mut cells = vec![format!("{}/{}", kind.name(), way.name())];
        cells.extend(columns.map(|(_, metric)| cell(metric)));
        let errors: f64 = outcome.values(&found.name, "errors").iter().sum();
        cells.push(number(errors));
        Some(Row::ours(cells))
    };
    Table {
        caption: format!("{load}: medians of the rounds, errors of all."),
        head: std::iter::once("")
            .chain(columns.map(|(head, _)| head))
            .chain(["errors"])
            .map(str::to_owned)
            .collect(),
        rows: variants()
            .filter(|(of, ..)| *of == load)
            .filter_map(row)
            .collect(),
    }
}

fn percentiles(outcome: &Outcome, kind: Kind) -> Chart {
    let series = WAYS.into_iter().filter_map(|way| {
        let found = outcome.variant(&arm_name(STUCK_LOAD, kind, way))?;
        let distribution = found.distributions.get("latency_ms")?;
        Some((Style::ours(way.name(), way.colour()), distribution.clone()))
    });
    Chart {
        title: format!("{}, stuck: how long the slowest wait.", kind.name()),
        note: "Lower is better. Every step to the right is ten times rarer; both axes are logarithmic.".into(),
        kind: ChartKind::Percentiles {
            unit: "latency, ms".into(),
            series: series.collect(),
        },
    }
}

fn throughput(outcome: &Outcome) -> Chart {
    let bar = |(_, kind, way): (&str, Kind, Way)| {
        let found = outcome.variant(&arm_name(FULL_LOAD, kind, way))?;
        let rate = found.metrics.get("throughput_per_s")?;
        Some(Bar {
            style: Style::ours(format!("{}/{}", kind.name(), way.name()), way.colour()),
            value: stats::median(&rate.values),
            range: Some((rate.min, rate.max)),
        })
    };
    Chart {
        title: "full: requests/s.".into(),
        note: "Higher is better. Median and range of the rounds.".into(),
        kind: ChartKind::Bars {
            unit: "/s".into(),
            bars: variants()
                .filter(|(load, ..)| *load == FULL_LOAD)
                .filter_map(bar)
                .collect(),
            log: false,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::tests::{failing, outcome, ratio};

    #[test]
    fn names_of_variants_go_both_ways() {
        for (load, kind, way) in variants() {
            assert_eq!(
                parse(&arm_name(load, kind, way)).unwrap(),
                (load, kind, way)
            );
        }
        assert!(parse("stuck/gunicorn").is_err());
    }

    #[test]
    fn workers_are_stuck_for_a_quarter_of_their_time() {
        for kind in ALL {
            let slow_per_s = kind.rate_per_s() / SLOW_ONE_IN as f64;
            let stuck = slow_per_s * slow_us(kind) as f64 * 1e-6 / WORKERS as f64;
            assert!((stuck - STUCK).abs() < 1e-6, "{kind:?}: {stuck}");
        }
    }

    fn failed(ratios: [f64; 3], share: f64) -> Vec<String> {
        let (most, rest) = (share, (1.0 - share) / 3.0);
        let values: [&'static [f64]; 2] =
            [Box::leak(Box::new([most])), Box::leak(Box::new([rest]))];
        let split: &[(&str, &[f64])] = &[
            ("errors", &[0.0]),
            ("requests", &[1e6]),
            ("share_worker_0", values[0]),
            ("share_worker_1", values[1]),
            ("share_worker_2", values[1]),
            ("share_worker_3", values[1]),
        ];
        let mut outcome = outcome(&[
            ("stuck/nginx/shared", &[("errors", &[0.0])]),
            ("stuck/nginx/split", split),
        ]);
        let named = COMPARISONS.iter().map(|of| of.name(Kind::Nginx));
        outcome.comparisons = named.zip(ratios).map(|(n, r)| ratio(n, r)).collect();
        let mut names = failing(judge(&outcome));
        names.retain(|name| name != "counts-agree");
        names
    }

    #[test]
    fn each_limit_bites() {
        assert_eq!(failed([0.5, 1.2, 0.9], 0.27), Vec::<String>::new());
        assert_eq!(failed([0.51, 1.2, 0.9], 0.27), ["nginx-stuck-p90-hash"]);
        assert_eq!(failed([0.5, 1.21, 0.9], 0.27), ["nginx-stuck-mean-shared"]);
        assert_eq!(
            failed([0.5, 1.2, 0.89], 0.27),
            ["nginx-full-throughput_per_s-shared"]
        );
        assert_eq!(failed([0.5, 1.2, 0.9], 0.28), ["nginx-even"]);
    }
}
