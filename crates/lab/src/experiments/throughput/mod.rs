//! Requests a second of 200 workers under load, when a connection wakes all of them or one.

use serde_json::json;
use wakeone_load::{Arrivals, Mix};
use wakeone_waitqueue::Policy;

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Sample, Settings, parameters};
use crate::present::{Block, Chart, Line, Row, Style, Table, cell, number};
use crate::process::Usage;
use crate::published::Published;
use crate::result::{Expectation, Outcome};
use crate::ways::{self, Way};
use crate::{measure, stats, views};

card!(published);

/// The experiment.
pub struct Throughput;

/// The source's number of processes.
const WORKERS: usize = 200;
/// The stock kernel's counterpart first.
const WAYS: [Way; 7] = [
    STOCK,
    Way::SharedEpollExclusive,
    Way::SharedAccept,
    Way::LeastConnections,
    PATCHED_STOCK,
    Way::Patched(Policy::TaskExclusive),
    Way::Patched(Policy::WakeOne),
];
/// The kernel of the papers as Linux 2.2 was.
const PATCHED_STOCK: Way = Way::Patched(Policy::WakeAll);
const STOCK: Way = Way::SharedEpollWakeAll;
/// From two numbers of connections, as `--quick` has, no trend can be told from chance.
const TREND: usize = 3;

const RATE: &str = "throughput_per_s";
const SLEEPS: &str = "voluntary_switches_per_request";
const CPU: &str = "server_cpu_us_per_request";

fn connections(quick: bool) -> Vec<usize> {
    if quick {
        vec![300, 1000]
    } else {
        (3..=10).map(|n| n * 100).collect()
    }
}

fn load_seconds(quick: bool) -> f64 {
    if quick { 1.0 } else { 2.0 }
}

fn ratio_name(clients: usize, way: Way) -> String {
    format!(
        "{clients} connections: requests/s of {} / those of {}",
        way.name(),
        stock_of(way).name()
    )
}

/// The other side of the comparison: the herd in epoll, or the one in accept() of the kernel of the papers.
fn stock_of(way: Way) -> Way {
    match way {
        Way::Patched(_) => PATCHED_STOCK,
        _ => STOCK,
    }
}

/// The ways that can be tried here.
fn here() -> Vec<Way> {
    WAYS.into_iter().filter(|way| way.is_here()).collect()
}

impl Experiment for Throughput {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let (clients, seconds) = (connections(settings.quick), load_seconds(settings.quick));
        let (mut arms, mut pairings) = (Vec::new(), Vec::new());
        for (group, clients) in clients.iter().enumerate() {
            let of = clients.to_string();
            arms.extend(ways::arms(&of, &here(), group, seconds + 1.5));
            let compared = here().into_iter().filter(|way| stock_of(*way) != *way);
            pairings.extend(compared.map(|way| {
                ways::pairing(ratio_name(*clients, way), &of, RATE, way, stock_of(way))
            }));
        }
        Design {
            rounds: if settings.quick { 3 } else { 5 },
            arms,
            pairings,
            steady: RATE,
            parameters: parameters([
                ("workers", json!(WORKERS)),
                ("connections", json!(clients)),
                ("load_s", json!(seconds)),
                (
                    "request",
                    json!("GET /whoami, a connection a request, closed loop"),
                ),
            ]),
        }
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let (clients, way) = parse_arm(&arm.name)?;
        let mut trial = way.start(WORKERS)?;
        let end = measure::for_seconds(load_seconds(context.settings.quick));
        let arrivals = Arrivals::Closed {
            concurrency: clients,
        };
        let mix = Mix::one("/whoami");
        let plan = measure::plan(trial.address, arrivals, end, mix, context.seed);
        let before = Usage::of_leaves(trial.pid());
        let found = trial.load(&plan, context)?;
        let used = Usage::of_leaves(trial.pid()).since(&before);
        let mut sample = measure::sample(&found, WORKERS);
        // Two hundred shares of each variant are no help to anyone; how uneven they are is kept.
        sample
            .metrics
            .retain(|name, _| !name.starts_with("share_worker_"));
        let each = |count: u64| count as f64 / found.completed.max(1) as f64;
        sample.put(SLEEPS, "ratio", each(used.voluntary_switches));
        sample.put(
            "involuntary_switches_per_request",
            "ratio",
            each(used.involuntary_switches),
        );
        sample.put(CPU, "us", each(used.cpu_ns) / 1000.0);
        trial.stop(&mut sample)?;
        Ok(sample)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let gain = |name: &str, way: Way| {
            let least = range(outcome, way).map(|r| r.0);
            CARD.expect_of(name, &[("way", way.name())], least)
        };
        let mut expected = vec![
            gain("exclusive-gain", Way::SharedEpollExclusive),
            gain("accept-gain", Way::SharedAccept),
            gain("least-connections-gain", Way::LeastConnections),
        ];
        for way in [
            Way::Patched(Policy::TaskExclusive),
            Way::Patched(Policy::WakeOne),
        ] {
            if range(outcome, way).is_some() {
                expected.push(gain("{way}-gain", way));
            }
        }
        let exclusive = ratios(outcome, Way::SharedEpollExclusive);
        if exclusive.len() >= TREND {
            // From 300 to 1,000 connections a gain within the bound changes by less than a third.
            let growth = stats::growth_exponent(&exclusive);
            expected.push(CARD.expect("gain-is-steady", growth));
        }
        expected.extend(measure::sound(outcome));
        expected
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        let mut blocks = views::meaning(meaning(outcome));
        blocks.push(Block::Table(ratio_table(outcome)));
        blocks.push(Block::Chart(ratio_chart(outcome)));
        let lines = |title: &str, note: &str, y: &str, metric: &str, log: bool| {
            let axes = ("simultaneous connections", y, log);
            let series = series(|way| curve(outcome, way, metric));
            Block::Chart(Chart::lines(title, note, axes, series))
        };
        let rates = "Requests a second, median of the rounds.";
        blocks.push(Block::Table(table(outcome, rates, RATE)));
        blocks.push(lines(
            "Requests a second.",
            "Higher is better. The source was not allowed to publish its own.",
            "requests/s",
            RATE,
            false,
        ));
        let sleeps = "Times that a worker went to sleep for each request, all workers together.";
        blocks.push(Block::Table(table(outcome, sleeps, SLEEPS)));
        blocks.push(lines(
        sleeps,
        "A worker that is woken for nothing sleeps again: this is the herd. Both axes are logarithmic.",
        "sleeps a request",
        SLEEPS,
        true,
    ));
        let cpu = "CPU time of all workers for each request, in µs.";
        blocks.push(Block::Table(table(outcome, cpu, CPU)));
        blocks
    }
}

fn parse_arm(name: &str) -> Result<(usize, Way), Error> {
    let (clients, way) = ways::parse_arm(name, &WAYS)?;
    let clients = clients.parse().map_err(|_| Error::Unknown(name.into()))?;
    Ok((clients, way))
}

/// The numbers of connections that were measured, rising.
fn measured(outcome: &Outcome) -> Vec<usize> {
    let all = outcome.variants.iter();
    let mut all: Vec<usize> = all
        .filter_map(|v| Some(parse_arm(&v.name).ok()?.0))
        .collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// The ways that a result has; those of the kernel of the papers only if it was measured there.
fn measured_ways(outcome: &Outcome) -> impl Iterator<Item = Way> {
    let has = |way: &Way| {
        let last = format!("/{}", way.name());
        outcome.variants.iter().any(|v| v.name.ends_with(&last))
    };
    WAYS.into_iter().filter(has)
}

/// The ratio to wake-all at each number of connections.
fn ratios(outcome: &Outcome, way: Way) -> Vec<(f64, f64)> {
    let at = |n: usize| Some((n as f64, outcome.ratio(&ratio_name(n, way))?));
    measured(outcome).into_iter().filter_map(at).collect()
}

/// Smallest and largest ratio over all numbers of connections; None where there is none.
fn range(outcome: &Outcome, way: Way) -> Option<(f64, f64)> {
    let values: Vec<f64> = ratios(outcome, way).iter().map(|r| r.1).collect();
    (!values.is_empty()).then(|| (stats::min(&values), stats::max(&values)))
}

fn series(points: impl Fn(Way) -> Vec<(f64, f64)>) -> Vec<Line> {
    let line = |way: Way| (Style::ours(way.name(), way.colour()), points(way));
    let lines = WAYS.into_iter().map(line);
    lines.filter(|(_, points)| !points.is_empty()).collect()
}

fn curve(outcome: &Outcome, way: Way, metric: &str) -> Vec<(f64, f64)> {
    let at = |n: usize| {
        let name = ways::arm_name(&n.to_string(), way);
        Some((n as f64, outcome.median(&name, metric)?))
    };
    measured(outcome).into_iter().filter_map(at).collect()
}

fn ratio_chart(outcome: &Outcome) -> Chart {
    let published = Published::parse(CARD.published);
    let said = published.curve("either patch / stock", "throughput_ratio");
    let mut lines = series(|way| ratios(outcome, way));
    lines.push((Style::published("either patch, 2000", 5), said));
    Chart::lines(
        "Requests a second, as a multiple of those under wake-all.",
        "Dashed: the source's words, \"just over 50%\". Median of the ratios within a round.",
        ("simultaneous connections", "times wake-all", false),
        lines,
    )
}

fn ratio_table(outcome: &Outcome) -> Table {
    let at = |n: usize, way: Way| outcome.ratio(&ratio_name(n, way));
    let caption = "Requests a second as a multiple of those under wake-all.";
    let compared: Vec<Way> = measured_ways(outcome)
        .filter(|way| stock_of(*way) != *way)
        .collect();
    let mut table = by_connections(outcome, caption, &compared, at);
    let said = measured(outcome)
        .into_iter()
        .map(|_| "just over 1.5".to_owned());
    let row = std::iter::once("either patch / stock".to_owned()).chain(said);
    table.rows.push(Row::published(row.collect()));
    table
}

/// A table with a column for each number of connections.
fn by_connections(
    outcome: &Outcome,
    caption: &str,
    ways: &[Way],
    at: impl Fn(usize, Way) -> Option<f64>,
) -> Table {
    let numbers = measured(outcome);
    let row = |way: &Way| Row::named(way.name(), numbers.iter().map(|n| cell(at(*n, *way))));
    Table::new(
        format!("{caption} Columns: simultaneous connections."),
        numbers.iter().map(usize::to_string),
        ways.iter().map(row),
    )
}

fn table(outcome: &Outcome, caption: &str, metric: &str) -> Table {
    let ways: Vec<Way> = measured_ways(outcome).collect();
    by_connections(outcome, caption, &ways, |n, way| {
        outcome.median(&ways::arm_name(&n.to_string(), way), metric)
    })
}

fn meaning(outcome: &Outcome) -> Option<String> {
    let most = *measured(outcome).last()?;
    let gain = range(outcome, Way::SharedEpollExclusive)?;
    let ours = range(outcome, Way::LeastConnections)?;
    let verdict = if CARD.holds("exclusive-gain", gain.0) {
        "so the source's \"just over 50%\" is reached and passed: its requests cost more beside the waking"
    } else if gain.1 > 1.1 {
        "less than the source's \"just over 50%\" at least somewhere: workers that are busy are not woken"
    } else {
        "so the source's \"just over 50%\" is not to be seen: workers that are busy are not woken"
    };
    let names = [
        ("least", &*number(gain.0)),
        ("most", &*number(gain.1)),
        ("ours_least", &*number(ours.0)),
        ("ours_most", &*number(ours.1)),
        ("clients", &*number(most as f64)),
        ("arm", &*most.to_string()),
        ("verdict", verdict),
    ];
    CARD.say("gain", outcome, &names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::tests::{SOUND, failing as fail, outcome, ratio};

    fn with(ratios: &[(usize, Way, f64)]) -> Outcome {
        let names: Vec<String> = ratios
            .iter()
            .map(|(n, way, _)| ways::arm_name(&n.to_string(), *way))
            .collect();
        let variants: Vec<_> = names.iter().map(|n| (n.as_str(), &SOUND[..])).collect();
        let comparison = |(n, way, value): &(usize, Way, f64)| ratio(ratio_name(*n, *way), *value);
        Outcome {
            comparisons: ratios.iter().map(comparison).collect(),
            ..outcome(&variants)
        }
    }

    fn failing(exclusive: [f64; 3], accept: f64, ours: f64) -> Vec<String> {
        let outcome = with(&[
            (300, Way::SharedEpollExclusive, exclusive[0]),
            (600, Way::SharedEpollExclusive, exclusive[1]),
            (1000, Way::SharedEpollExclusive, exclusive[2]),
            (300, Way::SharedAccept, accept),
            (1000, Way::LeastConnections, ours),
        ]);
        fail(Throughput.judge(&outcome))
    }

    #[test]
    fn each_limit_bites() {
        let good = [1.6, 1.8, 1.7];
        assert_eq!(failing(good, 1.6, 1.6), Vec::<String>::new());
        assert_eq!(failing([1.4, 1.6, 1.7], 1.6, 1.6), ["exclusive-gain"]);
        assert_eq!(failing(good, 1.4, 1.6), ["accept-gain"]);
        assert_eq!(failing(good, 1.6, 1.4), ["least-connections-gain"]);
        assert_eq!(failing([1.6, 2.0, 2.5], 1.6, 1.6), ["gain-is-steady"]);
        assert_eq!(failing([2.5, 2.0, 1.6], 1.6, 1.6), ["gain-is-steady"]);
    }

    #[test]
    fn two_points_are_no_trend() {
        let outcome = with(&[
            (300, Way::SharedEpollExclusive, 2.0),
            (1000, Way::SharedEpollExclusive, 9.0),
        ]);
        assert!(
            Throughput
                .judge(&outcome)
                .iter()
                .all(|e| e.name != "gain-is-steady")
        );
    }
}
