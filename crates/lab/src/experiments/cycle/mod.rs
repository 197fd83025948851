//! A thousand connects to oneself: minutes or a blink, and why.

mod pair;

use serde_json::json;
use std::time::Duration;

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Sample, Settings, parameters};
use crate::present::{Bar, Block, Chart, Row, Style, Table, cell, number};
use crate::published::Published;
use crate::result::{Expectation, Outcome, Variant};
use crate::{stats, views};
use pair::Setup;

card!(published);

/// The experiment.
pub struct Cycle;

/// The source's numbers.
const CONNECTIONS: usize = 1000;
const SMALL: i32 = 10;
const LARGE: i32 = 1024;
/// A thousand connections that take longer are called slow.
const SLOW_S: f64 = 1.0;

/// All variants: name and setup.
fn setups() -> Vec<(String, Setup)> {
    let mut setups = Vec::new();
    for backlog in [SMALL, LARGE] {
        for one_cpu in [true, false] {
            for yielding in [false, true] {
                let cpus = if one_cpu { "one-cpu" } else { "two-cpus" };
                let client = if yielding { "yield" } else { "no-yield" };
                setups.push((
                    format!("backlog-{backlog}/{cpus}/{client}"),
                    Setup {
                        yielding,
                        one_cpu,
                        backlog,
                    },
                ));
            }
        }
    }
    setups
}

fn limit(settings: &Settings) -> Duration {
    Duration::from_secs(if settings.quick { 6 } else { 30 })
}

impl Experiment for Cycle {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let arm = |(name, setup): (String, Setup)| Arm {
            name,
            group: 0,
            seconds: if setup.backlog == SMALL {
                limit(settings).as_secs_f64() / 2.0
            } else {
                0.3
            },
        };
        Design {
            rounds: if settings.quick { 2 } else { 3 },
            arms: setups().into_iter().map(arm).collect(),
            // Whether a SYN is lost is chance; a spread of these times is the finding and not noise.
            steady: "",
            parameters: parameters([
                ("connections", json!(CONNECTIONS)),
                ("limit_s", json!(limit(settings).as_secs())),
            ]),
            ..Design::default()
        }
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let setup = setups()
            .into_iter()
            .find(|(name, _)| *name == arm.name)
            .map(|(_, setup)| setup);
        let setup = setup.ok_or_else(|| Error::Unknown(arm.name.clone()))?;
        let found = pair::run(setup, CONNECTIONS, limit(context.settings), context.cancel)?;
        context.check()?;
        let mut sample = Sample::default();
        let measured = found.elapsed.as_secs_f64();
        sample.put("measured_s", "s", measured);
        sample.put("connections", "count", found.connections as f64);
        sample.put(
            "elapsed_s",
            "s",
            measured * CONNECTIONS as f64 / found.connections.max(1) as f64,
        );
        sample.put("slow_connects", "count", found.slow_connects as f64);
        sample.put("user_s", "s", found.cpu.0.as_secs_f64());
        sample.put("system_s", "s", found.cpu.1.as_secs_f64());
        for (name, count) in found.counters {
            sample.put(name, "count", count as f64);
        }
        Ok(sample)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let large = rounds(outcome, |name| {
            name.starts_with(&format!("backlog-{LARGE}/"))
        });
        let times: Vec<f64> = large.iter().map(|r| r.0).collect();
        let drops: Vec<f64> = outcome
            .variants
            .iter()
            .filter(|v| v.name.starts_with(&format!("backlog-{LARGE}/")))
            .flat_map(|v| {
                ["listen_drops", "listen_overflows"].map(|m| stats::max(outcome.values(&v.name, m)))
            })
            .collect();
        let all = rounds(outcome, |_| true);
        let unexplained = all
            .iter()
            .filter(|(time, retries)| (*time > SLOW_S) != (*retries > 0.0))
            .count();
        let unexplained = (!all.is_empty()).then_some(unexplained as f64);
        vec![
            CARD.expect("right-backlog-drops-nothing", stats::most(&drops)),
            CARD.expect("right-backlog-is-fast", stats::most(&times)),
            CARD.expect("slow-means-retransmissions", unexplained),
            CARD.expect("yield-helps", unhelped(outcome)),
        ]
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        let published = Published::parse(CARD.published);
        let said = |series: &str| {
            let mut cells = vec![format!("(published) backlog 10, {series}")];
            cells.extend(["elapsed_s", "user_s", "system_s"].map(|metric| {
                let value = published.value(series, metric);
                value.map_or_else(|| "–".into(), seconds)
            }));
            cells.push("1,000".into());
            cells.resize(COLUMNS.len() + 1, "–".into());
            Row::published(cells)
        };
        let row = |v: &Variant| {
            let of = |(_, metric): (_, &str)| match v.median(metric) {
                Some(value) if metric.ends_with("_s") => seconds(value),
                value => cell(value),
            };
            Row::named(v.name.clone(), COLUMNS.map(of))
        };
        let theirs = ["no yield", "yield"].map(said);
        let rows = theirs.into_iter().chain(outcome.variants.iter().map(row));
        let told = ["one-cpu", "two-cpus", "large"];
        let told = told.iter().filter_map(|word| CARD.say(word, outcome, &[]));
        let mut blocks = views::meaning(told);
        blocks.extend([
        Block::Table(Table::new("Median of the rounds. Time for 1,000 connections, with the CPU time of the thread that connects; connections made within the time limit, and how many took more than half a second; accept queue overflows, drops, and SYNs sent again, counted in a network namespace in which nothing else happens.", COLUMNS.map(|c| c.0), rows)),
        Block::Chart(chart(outcome, &published)),
    ]);
        blocks
    }
}

/// Every `(elapsed_s, syn_retransmissions)` of all rounds of the variants that `which` chooses.
fn rounds(outcome: &Outcome, which: impl Fn(&str) -> bool) -> Vec<(f64, f64)> {
    let of = |name: &str| {
        let times = outcome.values(name, "elapsed_s").iter().copied();
        times
            .zip(outcome.values(name, "syn_retransmissions").iter().copied())
            .collect::<Vec<_>>()
    };
    outcome
        .variants
        .iter()
        .filter(|v| which(&v.name))
        .flat_map(|v| of(&v.name))
        .collect()
}

/// How many setups contradict the source: both threads on one CPU, slow without yielding, and not ten times as fast with it.
/// (On two CPUs there is nobody to yield to.)
fn unhelped(outcome: &Outcome) -> Option<f64> {
    let mut count = 0;
    for (name, _) in setups().iter().filter(|(_, s)| s.one_cpu && !s.yielding) {
        let without = outcome.median(name, "elapsed_s")?;
        let with = outcome.median(&name.replace("/no-yield", "/yield"), "elapsed_s")?;
        count += usize::from(without > SLOW_S && without < 10.0 * with);
    }
    Some(count as f64)
}

const COLUMNS: [(&str, &str); 8] = [
    ("real s", "elapsed_s"),
    ("user s", "user_s"),
    ("system s", "system_s"),
    ("made", "connections"),
    ("slow", "slow_connects"),
    ("overflows", "listen_overflows"),
    ("drops", "listen_drops"),
    ("SYNs again", "syn_retransmissions"),
];

/// Seconds as `time` prints them.
fn seconds(value: f64) -> String {
    if value < 1.0 {
        format!("{value:.3}")
    } else {
        number(value)
    }
}

fn chart(outcome: &Outcome, published: &Published) -> Chart {
    let mut bars: Vec<Bar> = ["no yield", "yield"]
        .iter()
        .enumerate()
        .filter_map(|(i, series)| {
            let style =
                Style::published(format!("published, 2005: backlog 10, {series}"), [5, 4][i]);
            Some(Bar {
                style,
                value: published.value(series, "elapsed_s")?,
                range: None,
            })
        })
        .collect();
    bars.extend(outcome.variants.iter().filter_map(|v| {
        let colour = if v.name.ends_with("no-yield") { 5 } else { 4 };
        views::bar(Style::ours(v.name.clone(), colour), v, "elapsed_s")
    }));
    Chart::bars(
        "Time for a thousand connections.",
        "Scaled up where the time limit ended a variant earlier.",
        ("s", true),
        bars,
    )
}
