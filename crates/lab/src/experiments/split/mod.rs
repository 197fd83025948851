//! Servers that share one listener, and the same servers split.

use serde_json::json;
use std::collections::BTreeMap;
use wakeone_load::{Arrivals, Mix, Plan};

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Pairing, Sample, Settings, parameters};
use crate::others::{GUNICORN, NGINX, Other, PREFORK, Sharing, WORKERS};
use crate::present::{Block, Chart, Style, Table};
use crate::result::{Expectation, Outcome, Variant};
use crate::under_test::ServerUnderTest;
use crate::views::{self, Of};
use crate::{apps, measure};

card!();

/// The experiment.
pub struct Split;

const USUAL_US: u64 = 1_000;
/// One request in this many is slow.
const SLOW_ONE_IN: u64 = 100;
/// Share of its time that each worker is stuck.
const STUCK: f64 = 0.25;
/// The servers.
const ALL: [Other; 3] = [GUNICORN, PREFORK, NGINX];
const WAYS: [Sharing; 3] = [Sharing::Shared, Sharing::Hash, Sharing::Split];
/// Clients of the closed loop.
const CLIENTS: usize = 32;
const STUCK_LOAD: &str = "stuck";
const FULL_LOAD: &str = "full";
/// How far from even the shares may be.
const EVEN: f64 = 0.10;

fn load_seconds(load: &str, quick: bool) -> f64 {
    match (load, quick) {
        (STUCK_LOAD, true) => 5.0,
        (STUCK_LOAD, false) => 20.0,
        (_, true) => 1.5,
        (_, false) => 4.0,
    }
}

/// Requests a second of the stuck workload. The machine serves this rate easily.
fn rate_per_s(kind: Other) -> f64 {
    match kind {
        GUNICORN => 300.0,
        PREFORK => 500.0,
        _ => 1000.0,
    }
}

/// Slow requests are the slower the fewer there are: workers are stuck for the same share of their time.
fn slow_us(kind: Other) -> u64 {
    let slow_per_s = rate_per_s(kind) / SLOW_ONE_IN as f64;
    (STUCK * WORKERS as f64 / slow_per_s * 1e6) as u64
}

fn arm_name(load: &str, kind: Other, way: Sharing) -> String {
    format!("{load}/{}/{}", kind.name, way.name())
}

fn variants() -> impl Iterator<Item = (&'static str, Other, Sharing)> {
    [STUCK_LOAD, FULL_LOAD].into_iter().flat_map(|load| {
        ALL.into_iter()
            .flat_map(move |kind| WAYS.map(move |way| (load, kind, way)))
    })
}

fn parse(name: &str) -> Result<(&'static str, Other, Sharing), Error> {
    variants()
        .find(|(load, kind, way)| arm_name(load, *kind, *way) == name)
        .ok_or_else(|| Error::Unknown(name.into()))
}

/// The comparisons of each server: the expectation, the load, the metric, and the ways above and below the line.
const COMPARISONS: [(&str, &str, &str, Sharing, Sharing); 3] = [
    (
        "{server}-stuck-p90-hash",
        STUCK_LOAD,
        "latency_ms_p90",
        Sharing::Split,
        Sharing::Hash,
    ),
    (
        "{server}-stuck-mean-shared",
        STUCK_LOAD,
        "latency_ms_mean",
        Sharing::Split,
        Sharing::Shared,
    ),
    (
        "{server}-full-throughput_per_s-shared",
        FULL_LOAD,
        "throughput_per_s",
        Sharing::Split,
        Sharing::Shared,
    ),
];

/// The comparisons of a server, each behind its expectation.
fn comparisons(kind: Other) -> [(&'static str, Pairing); 3] {
    COMPARISONS.map(|(expectation, load, metric, a, b)| {
        let what = metric.trim_start_matches("latency_ms_");
        let (server, above, below) = (kind.name, a.name(), b.name());
        let pairing = Pairing {
            name: format!("{server}, {load}: {what} of {above} / {below}"),
            a: arm_name(load, kind, a),
            b: arm_name(load, kind, b),
            metric: metric.into(),
        };
        (expectation, pairing)
    })
}

impl Experiment for Split {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let slow: BTreeMap<&str, u64> = ALL.map(|kind| (kind.name, slow_us(kind))).into();
        let rates: BTreeMap<&str, f64> = ALL.map(|kind| (kind.name, rate_per_s(kind))).into();
        let mut design = Design {
            rounds: if settings.quick { 3 } else { 5 },
            parameters: parameters([
                ("workers", json!(WORKERS)),
                ("usual_us", json!(USUAL_US)),
                ("slow_one_in", json!(SLOW_ONE_IN)),
                ("slow_us", json!(slow)),
                ("stuck_rate_per_s", json!(rates)),
                ("stuck_s", json!(load_seconds(STUCK_LOAD, settings.quick))),
                ("full_clients", json!(CLIENTS)),
                ("full_s", json!(load_seconds(FULL_LOAD, settings.quick))),
            ]),
            ..Design::default()
        };
        for (load, kind, way) in variants() {
            let arm = Arm {
                name: arm_name(load, kind, way),
                group: ALL.iter().position(|k| *k == kind).unwrap_or(0)
                    + if load == STUCK_LOAD { 0 } else { ALL.len() },
                seconds: load_seconds(load, settings.quick) + 1.5,
            };
            let missing = kind.is_missing();
            let what = if missing.is_some() {
                kind.name
            } else {
                way.name()
            };
            design.offer(arm, what, kind.lacks(way));
        }
        design.compare(
            ALL.into_iter()
                .flat_map(comparisons)
                .map(|(_, pairing)| pairing),
        );
        design
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let (load, kind, way) = parse(&arm.name)?;
        let mut running = ServerUnderTest::start(kind.launch(way)?)?;
        let mut found = measure::load(&plan(load, kind, &running, context), context)?;
        running.answers.client_saw(&found);
        found.by_worker = apps::by_place(&found.by_worker, &running.workers);
        let mut sample = measure::sample(&found, WORKERS);
        running.stop(&mut sample)?;
        Ok(sample)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let mut all = Vec::new();
        for kind in measured(outcome) {
            let server = [("server", kind.name)];
            let compared = comparisons(kind)
                .map(|(name, pairing)| CARD.expect_of(name, &server, outcome.ratio(&pairing.name)));
            all.extend(compared);
            let split = outcome.variant(&arm_name(STUCK_LOAD, kind, Sharing::Split));
            let requests = split.and_then(|v| v.median("requests")).unwrap_or(0.0);
            let chance = by_chance(requests.max(1.0));
            let limit = EVEN.max(chance);
            let names = [
                ("server", kind.name),
                ("limit", &*limit.to_string()),
                ("percent", &*format!("{:.0}", limit * 100.0)),
                ("requests", &*format!("{requests:.0}")),
                ("chance", &*format!("{:.0}", chance * 100.0)),
            ];
            all.push(CARD.expect_of("{server}-even", &names, split.and_then(uneven)));
        }
        all.extend(measure::sound(outcome));
        all
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        let here = measured(outcome);
        let told = |kind: &Other| CARD.say("server", outcome, &[("server", kind.name)]);
        let mut blocks = views::meaning(here.iter().filter_map(told));
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

fn plan(load: &str, kind: Other, running: &ServerUnderTest, context: &Context<'_>) -> Plan {
    let end = measure::for_seconds(load_seconds(load, context.settings.quick));
    let path = |us: u64| format!("/work?us={us}&kind=sleep");
    let (arrivals, mix) = if load == STUCK_LOAD {
        (
            measure::poisson(rate_per_s(kind)),
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
fn measured(outcome: &Outcome) -> Vec<Other> {
    let has = |kind: &Other| {
        outcome
            .variant(&arm_name(STUCK_LOAD, *kind, Sharing::Shared))
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

fn table(outcome: &Outcome, load: &str) -> Table {
    let columns = [
        ("avg ms", Of::Median("latency_ms_mean")),
        ("p50", Of::Median("latency_ms_p50")),
        ("p90", Of::Median("latency_ms_p90")),
        ("p99", Of::Median("latency_ms_p99")),
        ("requests/s", Of::Median("throughput_per_s")),
        ("busiest/mean", Of::Median("share_max_over_mean")),
        ("errors", Of::Sum("errors")),
    ];
    let caption = format!("{load}: medians of the rounds, errors of all.");
    views::table(caption, &columns, measured_in(outcome, load))
}

/// The variants of a load, by server and way.
fn measured_in<'a>(
    outcome: &'a Outcome,
    load: &str,
) -> impl Iterator<Item = (String, &'a Variant)> {
    let of = variants().filter(move |(of, ..)| *of == load);
    of.filter_map(|(load, kind, way)| {
        let found = outcome.variant(&arm_name(load, kind, way))?;
        Some((format!("{}/{}", kind.name, way.name()), found))
    })
}

fn percentiles(outcome: &Outcome, kind: Other) -> Chart {
    let drawn = WAYS.into_iter().filter_map(|way| {
        let found = outcome.variant(&arm_name(STUCK_LOAD, kind, way))?;
        Some((Style::ours(way.name(), way.colour()), found))
    });
    views::percentiles(&format!("{}, stuck", kind.name), drawn)
}

fn throughput(outcome: &Outcome) -> Chart {
    let colour = |name: &str| WAYS.into_iter().find(|way| name.ends_with(way.name()));
    let styled = measured_in(outcome, FULL_LOAD).map(|(name, found)| {
        let colour = colour(&name).map_or(0, Sharing::colour);
        (Style::ours(name, colour), found)
    });
    let note = "Higher is better. Median and range of the rounds.";
    let bars = views::bars(styled, "throughput_per_s");
    Chart::bars("full: requests/s.", note, ("/s", false), bars)
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
            let slow_per_s = rate_per_s(kind) / SLOW_ONE_IN as f64;
            let stuck = slow_per_s * slow_us(kind) as f64 * 1e-6 / WORKERS as f64;
            assert!((stuck - STUCK).abs() < 1e-6, "{}: {stuck}", kind.name);
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
        let named = comparisons(NGINX).map(|(_, pairing)| pairing.name);
        outcome.comparisons = std::iter::zip(named, ratios)
            .map(|(n, r)| ratio(n, r))
            .collect();
        let mut names = failing(Split.judge(&outcome));
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
