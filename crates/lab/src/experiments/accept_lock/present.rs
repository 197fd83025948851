//! Reply rate against request rate, and the knees.

use super::driver::Client;
use super::{
    CAPACITY, CARD, KNEE, LOCKS, SLEEPS, UNLOCKED, offered_at, parse_arm, ratio_name, replies_at,
};
use crate::present::{Block, Chart, Row, Style, Table, cell, number};
use crate::result::{Outcome, Variant};
use crate::views;

/// Everything.
pub fn present(outcome: &Outcome) -> Vec<Block> {
    let told = ["knees", "sleeps", "httperf", "source"];
    let told = told.iter().filter_map(|word| CARD.say(word, outcome, &[]));
    let mut blocks = views::meaning(told);
    blocks.push(Block::Table(knees(outcome)));
    blocks.push(Block::Chart(chart(outcome)));
    blocks.push(Block::Table(replies(outcome)));
    blocks
}

fn knees(outcome: &Outcome) -> Table {
    let row = |v: &Variant| {
        let knee = v.metrics.get(KNEE)?;
        let (client, lock) = parse_arm(&v.name).ok()?;
        let ratio = match (client, lock) {
            (Client::Load, UNLOCKED) => Some(1.0),
            (Client::Load, lock) => outcome.ratio(&ratio_name(lock)),
            (Client::Httperf, _) => None,
        };
        let ends = [knee.median, knee.min, knee.max].map(number);
        let rest = [v.median(CAPACITY), ratio, v.median(SLEEPS)].map(cell);
        Some(Row::named(v.name.clone(), ends.into_iter().chain(rest)))
    };
    let said = [
        "Molloy and Lever, 2000",
        "not in the text",
        "",
        "",
        "",
        "more than 1",
        "",
    ];
    let said = Row::published(said.map(str::to_owned).into());
    Table::new(
        "The knee: the highest request rate at which at least 97 % are answered in time.",
        [
            "knee /s",
            "min",
            "max",
            "closed loop",
            "unlocked / this",
            "sleeps each",
        ],
        outcome.variants.iter().filter_map(row).chain([said]),
    )
}

/// The percentages at which a variant was measured, rising.
fn percents(variant: &Variant) -> Vec<u32> {
    let names = variant.metrics.keys();
    let mut all: Vec<u32> = names
        .filter_map(|n| {
            n.strip_prefix(offered_at(0).trim_end_matches('0'))?
                .parse()
                .ok()
        })
        .collect();
    all.sort_unstable();
    all
}

/// `(offered, replied)` of a variant, medians of the rounds.
fn curve(variant: &Variant) -> Vec<(f64, f64)> {
    let at = |percent: u32| {
        Some((
            variant.median(&offered_at(percent))?,
            variant.median(&replies_at(percent))?,
        ))
    };
    percents(variant).into_iter().filter_map(at).collect()
}

fn chart(outcome: &Outcome) -> Chart {
    let line = |v: &Variant| {
        let (client, lock) = parse_arm(&v.name).ok()?;
        let place = LOCKS.iter().position(|l| *l == lock)?;
        let colour = [3, 5, 1, 2][place];
        let (label, colour) = match client {
            Client::Load => (lock.to_owned(), colour),
            Client::Httperf => (v.name.clone(), 6),
        };
        Some((Style::ours(label, colour), curve(v)))
    };
    let mut series: Vec<_> = outcome.variants.iter().filter_map(line).collect();
    let most = series
        .iter()
        .flat_map(|s| s.1.iter().map(|p| p.0))
        .fold(0.0, f64::max);
    series.push((Style::guide("all answered"), vec![(0.0, 0.0), (most, most)]));
    Chart::lines(
        "Reply rate against request rate, by the lock around accept().",
        "A server keeps up as long as its line follows the dashed one. Medians of the rounds, in which the rates differ a little.",
        ("requests/s", "replies/s", false),
        series,
    )
}

fn replies(outcome: &Outcome) -> Table {
    let all = outcome.variants.iter().flat_map(percents);
    let percents: std::collections::BTreeSet<u32> = all.collect();
    let row = |v: &Variant| {
        let at = |percent: &u32| {
            let offered = v.median(&offered_at(*percent));
            let share = offered.and_then(|o| Some(v.median(&replies_at(*percent))? / o));
            share.map_or_else(|| "–".into(), |s| format!("{:.0} %", s * 100.0))
        };
        Row::named(v.name.clone(), percents.iter().map(at))
    };
    Table::new(
        "Share of the requests answered within their time. Columns: request rate, in percent of what the closed loop did.",
        percents.iter().map(|p| format!("{p} %")),
        outcome.variants.iter().map(row),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::tests::outcome;

    #[test]
    fn curves_are_read_back_in_the_order_of_their_rates() {
        let (o30, o100, r30, r100) = (
            offered_at(30),
            offered_at(100),
            replies_at(30),
            replies_at(100),
        );
        let found = outcome(&[(
            "load/none",
            &[
                (&o100, &[1000.0, 1002.0, 1004.0]),
                (&r100, &[900.0]),
                (&o30, &[300.0]),
                (&r30, &[299.0]),
            ],
        )]);
        assert_eq!(curve(&found.variants[0]), [(300.0, 299.0), (1002.0, 900.0)]);
    }
}
