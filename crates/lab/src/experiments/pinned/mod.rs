//! One of two workers is kept for a while: before and after.

mod servers;

use serde_json::json;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;
use wakeone_load::{Arrivals, Mix, Plan, Stop};

use crate::experiment::{
    Arm, Card, Context, Design, Experiment, Pairing, Sample, Settings, Source, parameters,
};
use crate::present::{Bar, Block, Chart, Kind as ChartKind, Row, Style, Table, number};
use crate::result::{Expectation, Outcome};
use crate::{Error, measure, probe, stats};
use servers::{ALL, Kind, Running, WORKERS};

/// The experiment.
pub struct Pinned;

const REQUESTS: u64 = 80;
const CLIENTS: usize = 4;
const USUAL_US: u64 = 10_000;
/// So long after the request that pins a worker the others come: it is under way then.
const HEAD_START: Duration = Duration::from_millis(300);
/// A request that takes longer than this waited for the pinned worker.
const LATE_NS: u64 = 1_000_000_000;
const OURS: &str = "Wakeone's own goal";

const CARD: Card = Card {
    name: "pinned",
    title: "One of two workers is kept",
    question: "Two workers with one thread each, and one of them is kept for twelve seconds: what do eighty requests notice that want ten milliseconds?",
    source: Source {
        short: "Wakeone",
        long: "Beyond the papers: one slow request, as operators of servers with few threads a worker meet it.",
        url: "",
    },
    readme: include_str!("README.md"),
    published: "series,x,metric,unit,value,note\n",
};

/// Before and after.
const PAIRS: [(Kind, Kind); 2] = [
    (Kind::PumaHash, Kind::PumaRun),
    (Kind::GunicornHash, Kind::GunicornAttach),
];

fn pinned_s(quick: bool) -> u64 {
    if quick { 6 } else { 12 }
}

fn pair_name(before: Kind, after: Kind) -> String {
    format!("all eighty: time of {} / {}", before.name(), after.name())
}

impl Experiment for Pinned {
    fn card(&self) -> &Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let left_out: BTreeMap<&str, String> = ALL
            .into_iter()
            .filter_map(|kind| Some((kind.name(), kind.lacks()?)))
            .collect();
        let is_here = |kind: &Kind| !left_out.contains_key(kind.name());
        let arm = |kind: Kind| Arm {
            name: kind.name().into(),
            group: 0,
            seconds: pinned_s(settings.quick) as f64 + 2.0,
        };
        let pairing = |(before, after): &(Kind, Kind)| Pairing {
            name: pair_name(*before, *after),
            a: before.name().into(),
            b: after.name().into(),
            metric: "total_s".into(),
        };
        Design {
            rounds: if settings.quick { 2 } else { 3 },
            arms: ALL.into_iter().filter(is_here).map(arm).collect(),
            pairings: PAIRS
                .iter()
                .filter(|(a, b)| is_here(a) && is_here(b))
                .map(pairing)
                .collect(),
            steady: "",
            parameters: parameters([
                ("workers", json!(WORKERS)),
                ("requests", json!(REQUESTS)),
                ("clients", json!(CLIENTS)),
                ("usual_us", json!(USUAL_US)),
                ("pinned_s", json!(pinned_s(settings.quick))),
                ("left_out", json!(left_out)),
            ]),
        }
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let kind = ALL.into_iter().find(|kind| kind.name() == arm.name);
        let kind = kind.ok_or_else(|| Error::Unknown(arm.name.clone()))?;
        let mut server = Running::start(kind)?;
        let address = server.address;
        let pinned = Duration::from_secs(pinned_s(context.settings.quick));
        let (found, kept) = std::thread::scope(|scope| {
            let pin = scope.spawn(move || {
                let path = format!("/work?us={}", pinned.as_micros());
                probe::body_within(address, &path, pinned * 3)
            });
            std::thread::sleep(HEAD_START);
            (measure::load(&plan(address, context), context), pin.join())
        });
        kept.unwrap_or_else(|_| Err(Error::Server("a thread of the experiment panicked".into())))?;
        let found = found?;
        server.answers.client_saw(&found);
        server.answers.client_counted(1, 0);
        let mut sample = measure::sample(&found, 0);
        // Whose processes have which numbers says nothing here.
        sample.metrics.retain(|name, _| !name.starts_with("share_"));
        sample.put("total_s", "s", found.elapsed.as_secs_f64());
        let late = found.latency.count_between(LATE_NS, u64::MAX);
        sample.put("late", "count", late as f64);
        server.stop(&mut sample)?;
        Ok(sample)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        judge(outcome)
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        let mut blocks = vec![Block::Heading("What it means".into())];
        let said = PAIRS.iter().filter_map(|pair| meaning(outcome, *pair));
        blocks.extend(said.map(Block::Paragraph));
        blocks.push(Block::Table(table(outcome)));
        blocks.push(Block::Chart(chart(outcome)));
        blocks.extend(outcome.left_out().map(Block::Paragraph));
        blocks
    }
}

fn plan(target: SocketAddr, context: &Context<'_>) -> Plan {
    let arrivals = Arrivals::Closed {
        concurrency: CLIENTS,
    };
    let end = Stop {
        requests: Some(REQUESTS),
        duration: None,
    };
    let mix = Mix::one(format!("/work?us={USUAL_US}"));
    measure::plan(target, arrivals, end, mix, context.seed)
}

fn judge(outcome: &Outcome) -> Vec<Expectation> {
    let late = |kind: Kind| outcome.values(kind.name(), "late");
    let mut all = Vec::new();
    for (before, after) in PAIRS {
        let (waited, spared) = (late(before), late(after));
        let name = after.name().replace('/', "-");
        all.push(Expectation::new(
            format!("{name}-before"),
            format!(
                "{}: in each round some of the {REQUESTS} wait for the pinned worker (fewest)",
                before.name()
            ),
            OURS,
            (!waited.is_empty()).then(|| stats::min(waited)),
            |m| m >= 1.0,
        ));
        all.push(Expectation::new(
            format!("{name}-none-late"),
            format!(
                "{}: none of the {REQUESTS} waits for the pinned worker (most)",
                after.name()
            ),
            OURS,
            (!spared.is_empty()).then(|| stats::max(spared)),
            |m| m == 0.0,
        ));
        all.push(Expectation::new(
            format!("{name}-sooner"),
            format!(
                "All {REQUESTS} take at least 3 times as long under {} as under {}",
                before.name(),
                after.name()
            ),
            OURS,
            outcome.ratio(&pair_name(before, after)),
            |m| m >= 3.0,
        ));
    }
    all.extend(measure::sound(outcome));
    all
}

fn meaning(outcome: &Outcome, (before, after): (Kind, Kind)) -> Option<String> {
    let of = |kind: Kind, metric: &str| outcome.median(kind.name(), metric);
    Some(format!(
        "With one of two workers kept for {} s, {REQUESTS} requests of {} ms take {} s under {}, {} of them waiting for the worker that is kept; under {} they take {} s and {} wait.",
        outcome.parameter_u64("pinned_s")?,
        USUAL_US / 1000,
        number(of(before, "total_s")?),
        before.name(),
        number(of(before, "late")?),
        after.name(),
        number(of(after, "total_s")?),
        number(of(after, "late")?),
    ))
}

fn table(outcome: &Outcome) -> Table {
    let columns = [
        ("all, s", "total_s"),
        ("late", "late"),
        ("p50 ms", "latency_ms_p50"),
        ("p99 ms", "latency_ms_p99"),
        ("max ms", "latency_ms_max"),
        ("errors", "errors"),
    ];
    let row = |v: &crate::result::Variant| {
        let cell = |metric: &str| v.median(metric).map_or_else(|| "–".into(), number);
        let mut cells = vec![v.name.clone()];
        cells.extend(columns.map(|(_, metric)| cell(metric)));
        Row::ours(cells)
    };
    Table {
        caption: format!("The {REQUESTS} requests; medians of the rounds."),
        head: std::iter::once("")
            .chain(columns.map(|(head, _)| head))
            .map(str::to_owned)
            .collect(),
        rows: outcome.variants.iter().map(row).collect(),
    }
}

fn chart(outcome: &Outcome) -> Chart {
    let bar = |kind: Kind| {
        let total = outcome.variant(kind.name())?.metrics.get("total_s")?;
        Some(Bar {
            style: Style::ours(kind.name(), kind.colour()),
            value: total.median,
            range: Some((total.min, total.max)),
        })
    };
    Chart {
        title: format!("How long {REQUESTS} requests take while one of two workers is kept."),
        note: "Lower is better. Median and range of the rounds.".into(),
        kind: ChartKind::Bars {
            unit: "s".into(),
            bars: ALL.into_iter().filter_map(bar).collect(),
            log: false,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::tests::{self, SOUND};

    fn outcome(before: f64, after: f64, ratio: f64) -> Outcome {
        let of = |late: &'static [f64]| {
            let mut all = SOUND.to_vec();
            all.push(("late", late));
            all
        };
        let (before, after): (&[f64], &[f64]) = (
            Box::leak(Box::new([9.0, before])),
            Box::leak(Box::new([0.0, after])),
        );
        let (a, b) = (of(before), of(after));
        let mut outcome = tests::outcome(&[("gunicorn/hash", &a[..]), ("gunicorn/attach", &b[..])]);
        let name = pair_name(Kind::GunicornHash, Kind::GunicornAttach);
        outcome.comparisons = vec![tests::ratio(name, ratio)];
        outcome
    }

    #[test]
    fn each_limit_bites() {
        let failed = |before, after, ratio| -> Vec<String> {
            let judged = judge(&outcome(before, after, ratio)).into_iter();
            let of_gunicorn =
                judged.filter(|e| !e.name.starts_with("puma") && e.name != "counts-agree");
            of_gunicorn.filter(|e| !e.holds).map(|e| e.name).collect()
        };
        assert_eq!(failed(1.0, 0.0, 3.0), Vec::<String>::new());
        assert_eq!(failed(0.0, 0.0, 3.0), ["gunicorn-attach-before"]);
        assert_eq!(failed(1.0, 1.0, 3.0), ["gunicorn-attach-none-late"]);
        assert_eq!(failed(1.0, 0.0, 2.9), ["gunicorn-attach-sooner"]);
    }
}
