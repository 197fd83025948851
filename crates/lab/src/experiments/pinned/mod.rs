//! One of two workers is kept for a while: before and after.

mod servers;

use serde_json::json;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use wakeone_load::{Arrivals, Mix, Plan};

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Pairing, Sample, Settings, parameters};
use crate::present::{Block, Chart, Style, Table};
use crate::result::{Expectation, Outcome};
use crate::under_test::ServerUnderTest;
use crate::views::{self, Of};
use crate::{measure, probe, stats};
pub(super) use servers::WORKERS;
use servers::{ALL, GUNICORN_ATTACH, GUNICORN_HASH, Kind, PUMA_HASH, PUMA_RUN};

card!();

/// The experiment.
pub struct Pinned;

const REQUESTS: u64 = 80;
pub(super) const CLIENTS: usize = 4;
pub(super) const USUAL_US: u64 = 10_000;
/// The delay from the request that pins a worker to the others, so that it is under way then.
const HEAD_START: Duration = Duration::from_millis(300);
/// A request that takes longer than this waited for the pinned worker.
const LATE_NS: u64 = 1_000_000_000;

/// The pairs of variants: before and after.
const PAIRS: [(Kind, Kind); 2] = [(PUMA_HASH, PUMA_RUN), (GUNICORN_HASH, GUNICORN_ATTACH)];

fn pinned_s(quick: bool) -> u64 {
    if quick { 6 } else { 12 }
}

fn pair_name(before: Kind, after: Kind) -> String {
    format!("all eighty: time of {} / {}", before.name, after.name)
}

impl Experiment for Pinned {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let mut design = Design {
            rounds: if settings.quick { 2 } else { 3 },
            parameters: parameters([
                ("workers", json!(WORKERS)),
                ("requests", json!(REQUESTS)),
                ("clients", json!(CLIENTS)),
                ("usual_us", json!(USUAL_US)),
                ("pinned_s", json!(pinned_s(settings.quick))),
            ]),
            ..Design::default()
        };
        for kind in ALL {
            let arm = Arm {
                name: kind.name.into(),
                group: 0,
                seconds: pinned_s(settings.quick) as f64 + 2.0,
            };
            design.offer(arm, kind.name, kind.lacks());
        }
        design.compare(PAIRS.map(|(before, after)| Pairing {
            name: pair_name(before, after),
            a: before.name.into(),
            b: after.name.into(),
            metric: "total_s".into(),
        }));
        design
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let kind = ALL.into_iter().find(|kind| kind.name == arm.name);
        let kind = kind.ok_or_else(|| Error::Unknown(arm.name.clone()))?;
        let mut server = ServerUnderTest::start(kind.launch())?;
        let address = server.address;
        let pinned = Duration::from_secs(pinned_s(context.settings.quick));
        let pin = format!("/work?us={}", pinned.as_micros());
        let plan = plan(address, context);
        let (found, _) = load_while_pinned(&mut server, &plan, (pin, pinned), context)?;
        let mut sample = measure::sample(&found, 0);
        // The shares are left out: worker numbers mean nothing here.
        sample.metrics.retain(|name, _| !name.starts_with("share_"));
        sample.put("total_s", "s", found.elapsed.as_secs_f64());
        let late = found.latency.count_between(LATE_NS, u64::MAX);
        sample.put("late", "count", late as f64);
        server.stop(&mut sample)?;
        Ok(sample)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let late = |kind: Kind| outcome.values(kind.name, "late");
        let mut all = Vec::new();
        for (before, after) in PAIRS {
            let arm = after.name.replace('/', "-");
            let names = [
                ("arm", &*arm),
                ("before", before.name),
                ("after", after.name),
            ];
            let ratio = outcome.ratio(&pair_name(before, after));
            all.extend([
                CARD.expect_of("{arm}-before", &names, stats::least(late(before))),
                CARD.expect_of("{arm}-none-late", &names, stats::most(late(after))),
                CARD.expect_of("{arm}-sooner", &names, ratio),
            ]);
        }
        all.extend(measure::sound(outcome));
        all
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        let told = PAIRS.iter().filter_map(|pair| meaning(outcome, *pair));
        let mut blocks = views::meaning(told);
        blocks.push(Block::Table(table(outcome)));
        blocks.push(Block::Chart(chart(outcome)));
        blocks.extend(outcome.left_out().map(Block::Paragraph));
        blocks
    }
}

/// Sends a load while one worker is busy with a request for this path, which takes so long. Enters the clients' counts.
/// Returns also how long the worker was still busy when the load began, in s.
///
/// # Errors
/// When a request or the load fails.
pub(super) fn load_while_pinned(
    server: &mut ServerUnderTest,
    plan: &Plan,
    (path, length): (String, Duration),
    context: &mut Context<'_>,
) -> Result<(wakeone_load::Outcome, f64), Error> {
    let address = server.address;
    let begun = Instant::now();
    let (found, left_s, kept) = std::thread::scope(|scope| {
        let pin = scope.spawn(move || probe::body_within(address, &path, length * 3));
        std::thread::sleep(HEAD_START);
        let left_s = length.saturating_sub(begun.elapsed()).as_secs_f64();
        (server.load(plan, context), left_s, pin.join())
    });
    kept.unwrap_or_else(|_| Err(Error::Server("a thread of the experiment panicked".into())))?;
    server.answers.client_counted(1, 0);
    Ok((found?, left_s))
}

fn plan(target: SocketAddr, context: &Context<'_>) -> Plan {
    let arrivals = Arrivals::Closed {
        concurrency: CLIENTS,
    };
    let end = measure::for_requests(REQUESTS);
    let mix = Mix::one(format!("/work?us={USUAL_US}"));
    measure::plan(target, arrivals, end, mix, context.seed)
}

fn meaning(outcome: &Outcome, (before, after): (Kind, Kind)) -> Option<String> {
    let pinned = outcome.parameter_u64("pinned_s")?.to_string();
    let names = [
        ("before", before.name),
        ("after", after.name),
        ("pinned_s", &*pinned),
    ];
    CARD.say("pair", outcome, &names)
}

fn table(outcome: &Outcome) -> Table {
    let columns = [
        ("all, s", Of::Median("total_s")),
        ("late", Of::Median("late")),
        ("p50 ms", Of::Median("latency_ms_p50")),
        ("p99 ms", Of::Median("latency_ms_p99")),
        ("max ms", Of::Median("latency_ms_max")),
        ("errors", Of::Median("errors")),
    ];
    let caption = format!("The {REQUESTS} requests; medians of the rounds.");
    let rows = outcome.variants.iter().map(|v| (v.name.clone(), v));
    views::table(caption, &columns, rows)
}

fn chart(outcome: &Outcome) -> Chart {
    let drawn = ALL.into_iter().filter_map(|kind| {
        let found = outcome.variant(kind.name)?;
        Some((Style::ours(kind.name, kind.colour), found))
    });
    Chart::bars(
        format!("How long {REQUESTS} requests take while one of two workers is kept."),
        "Lower is better. Median and range of the rounds.",
        ("s", false),
        views::bars(drawn, "total_s"),
    )
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
        let name = pair_name(GUNICORN_HASH, GUNICORN_ATTACH);
        outcome.comparisons = vec![tests::ratio(name, ratio)];
        outcome
    }

    #[test]
    fn each_limit_bites() {
        let failed = |before, after, ratio| -> Vec<String> {
            let judged = Pinned.judge(&outcome(before, after, ratio)).into_iter();
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
