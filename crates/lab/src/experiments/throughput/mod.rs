//! Requests a second of 200 workers under load, when a connection wakes all of them or one.

use std::sync::LazyLock;

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Sample, Settings};
use crate::present::{Block, Chart, Row, Style, Table, cell, number};
use crate::published::Published;
use crate::result::{Expectation, Outcome};
use crate::trials::{self, Trials};
use crate::ways::Way;
use crate::{stats, views};
use wakeone_waitqueue::Policy;

card!(published);

/// Its loads and servers.
pub static TRIALS: LazyLock<Trials> = LazyLock::new(|| Trials::read(&CARD));

/// The experiment.
pub struct Throughput;

/// The ways that wake fewer than all.
const WAYS: [Way; 5] = [
    Way::SharedEpollExclusive,
    Way::SharedAccept,
    Way::LeastConnections,
    Way::Patched(Policy::TaskExclusive),
    Way::Patched(Policy::WakeOne),
];
/// From two numbers of connections, as `--quick` has, no trend can be told from chance.
const TREND: usize = 3;

/// The other side of the comparison: the herd in epoll, or the one in accept() of the kernel of the papers.
fn stock_of(way: Way) -> Way {
    match way {
        Way::Patched(_) => Way::Patched(Policy::WakeAll),
        _ => Way::SharedEpollWakeAll,
    }
}

impl Experiment for Throughput {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        trials::design(&TRIALS, settings)
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        trials::measure(&TRIALS, arm, context)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let mut expected = trials::judge::judge(&TRIALS, outcome);
        let exclusive = ratios(outcome, Way::SharedEpollExclusive);
        if exclusive.len() >= TREND {
            // From 300 to 1,000 connections a gain within the bound changes by less than a third.
            let growth = stats::growth_exponent(&exclusive);
            expected.push(CARD.expect("gain-is-steady", growth));
        }
        expected
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        let mut blocks = views::meaning(meaning(outcome));
        blocks.push(Block::Table(ratio_table(outcome)));
        blocks.push(Block::Chart(ratio_chart(outcome)));
        blocks.extend(trials::present(&TRIALS, outcome).into_iter().skip(1));
        blocks
    }
}

/// The ratio to wake-all at each number of connections that was measured.
fn ratios(outcome: &Outcome, way: Way) -> Vec<(f64, f64)> {
    let at = |n: &str| {
        let of = |way: Way| format!("{n}/{}", way.name());
        let ratio = outcome.ratio_of("throughput_per_s", &of(way), &of(stock_of(way)))?;
        Some((n.parse().ok()?, ratio))
    };
    TRIALS.loads(false).into_iter().filter_map(at).collect()
}

/// Smallest and largest ratio over all numbers of connections; None where there is none.
fn range(outcome: &Outcome, way: Way) -> Option<(f64, f64)> {
    let values: Vec<f64> = ratios(outcome, way).iter().map(|r| r.1).collect();
    (!values.is_empty()).then(|| (stats::min(&values), stats::max(&values)))
}

/// The ways that were measured, with their ratios.
fn measured(outcome: &Outcome) -> Vec<(Way, Vec<(f64, f64)>)> {
    let all = WAYS.map(|way| (way, ratios(outcome, way)));
    let measured = all.into_iter().filter(|(_, points)| !points.is_empty());
    measured.collect()
}

fn ratio_chart(outcome: &Outcome) -> Chart {
    let published = Published::parse(CARD.published);
    let said = published.curve("either patch / stock", "throughput_ratio");
    let line = |(way, points): (Way, _)| (Style::ours(way.name(), way.colour()), points);
    let lines = measured(outcome).into_iter().map(line);
    Chart::lines(
        "Requests a second, as a multiple of those under wake-all.",
        "Dashed: the source's words, \"just over 50%\". Median of the ratios within a round.",
        ("simultaneous connections", "times wake-all", false),
        lines.chain([(Style::published("either patch, 2000", 5), said)]),
    )
}

fn ratio_table(outcome: &Outcome) -> Table {
    let all = measured(outcome);
    let numbers: Vec<f64> = all
        .first()
        .map_or(Vec::new(), |(_, p)| p.iter().map(|p| p.0).collect());
    let row = |(way, points): &(Way, Vec<(f64, f64)>)| {
        let cells = points.iter().map(|(_, times)| cell(Some(*times)));
        Row::named(way.name(), cells)
    };
    let said = numbers.iter().map(|_| "just over 1.5".to_owned());
    let said = std::iter::once("either patch / stock".to_owned()).chain(said);
    Table::new(
        "Requests a second as a multiple of those under wake-all. Columns: simultaneous connections.",
        numbers.iter().map(|n| format!("{n:.0}")),
        all.iter().map(row).chain([Row::published(said.collect())]),
    )
}

fn meaning(outcome: &Outcome) -> Option<String> {
    let exclusive = ratios(outcome, Way::SharedEpollExclusive);
    let most = format!("{:.0}", exclusive.last()?.0);
    let gain = range(outcome, Way::SharedEpollExclusive)?;
    let ours = range(outcome, Way::LeastConnections)?;
    let names = [
        ("least", &*number(gain.0)),
        ("most", &*number(gain.1)),
        ("ours_least", &*number(ours.0)),
        ("ours_most", &*number(ours.1)),
        ("arm", &*most),
    ];
    CARD.say("gain", outcome, &names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::tests::outcome;

    /// An outcome in which EPOLLEXCLUSIVE has these multiples of the rate of wake-all.
    fn steady(gains: &[(usize, f64)]) -> Option<bool> {
        let (one, mut all) = ([1.0], Vec::new());
        for (n, gain) in gains {
            all.push((format!("{n}/shared-epoll-exclusive"), [*gain]));
            all.push((format!("{n}/shared-epoll-wake-all"), one));
        }
        let all: Vec<_> = all
            .iter()
            .map(|(name, rate)| (name, [("throughput_per_s", &rate[..])]))
            .collect();
        let all: Vec<_> = all.iter().map(|(n, m)| (n.as_str(), &m[..])).collect();
        let judged = Throughput.judge(&outcome(&all));
        let found = judged.iter().find(|e| e.name == "gain-is-steady");
        found.map(|e| e.holds)
    }

    #[test]
    fn a_gain_that_grows_or_shrinks_is_not_steady_and_two_points_are_no_trend() {
        assert_eq!(steady(&[(300, 1.6), (600, 1.8), (1000, 1.7)]), Some(true));
        assert_eq!(steady(&[(300, 1.6), (600, 2.0), (1000, 2.5)]), Some(false));
        assert_eq!(steady(&[(300, 2.5), (600, 2.0), (1000, 1.6)]), Some(false));
        assert_eq!(steady(&[(300, 2.0), (1000, 9.0)]), None);
    }
}
