//! Reply rate against request rate, and the knees.

use super::driver::Client;
use super::{
    APACHES, CAPACITY, KNEE, LOCKS, SLEEPS, UNLOCKED, arm_name, offered_at, parse_arm, ratio_name,
    replies_at,
};
use crate::present::{Block, Chart, Row, Style, Table, cell, number};
use crate::result::{Outcome, Variant};
use crate::{stats, views};

/// Everything.
pub fn present(outcome: &Outcome) -> Vec<Block> {
    let mut blocks = views::meaning(meaning(outcome).into_iter().chain([beside(outcome)]));
    blocks.push(Block::Table(knees(outcome)));
    blocks.push(Block::Chart(chart(outcome)));
    blocks.push(Block::Table(replies(outcome)));
    blocks
}

fn ours(lock: &str) -> String {
    arm_name(Client::Load, lock)
}

fn meaning(outcome: &Outcome) -> Option<String> {
    let knee = |lock: &str| outcome.median(&ours(lock), KNEE);
    let free = knee(UNLOCKED)?;
    let others = LOCKS[1..].iter().filter_map(|lock| {
        let (knee, ratio) = (knee(lock)?, outcome.ratio(&ratio_name(lock))?);
        Some(format!(
            "up to {} with {lock} (without is {} times)",
            number(knee),
            number(ratio)
        ))
    });
    let others: Vec<String> = others.collect();
    let gains = APACHES.iter();
    let gains: Vec<f64> = gains
        .filter_map(|lock| outcome.ratio(&ratio_name(lock)))
        .collect();
    let sleeps = |lock: &str| outcome.median(&ours(lock), SLEEPS);
    let why = match (sleeps(UNLOCKED), sleeps(APACHES[0])) {
        (Some(free), Some(locked)) => format!(
            " For each request a worker goes to sleep {} times without a lock and {} times with {}.",
            number(free),
            number(locked),
            APACHES[0]
        ),
        _ => String::new(),
    };
    Some(format!(
        "Without a lock the server keeps up to {} requests/s, {}. {}.{why}",
        number(free),
        others.join(", "),
        verdict(&gains)
    ))
}

/// Tells whether the source's finding holds. `gains` are the knees without a lock over those with Apache's locks.
fn verdict(gains: &[f64]) -> &'static str {
    let (least, most) = (stats::min(gains), stats::max(gains));
    if gains.is_empty() {
        "The locks that Apache had were not measured"
    } else if least > 1.05 {
        "The source's finding holds: a server that lets all its processes into accept() keeps up to a higher rate"
    } else if most < 0.95 {
        "The source found the opposite: here the server keeps up to a higher rate with either of Apache's locks"
    } else {
        "The source's finding, that the server without a lock keeps up to a higher rate, is not to be seen clearly here"
    }
}

/// Compares httperf's knee with ours, and gives the reason why none of the source's curves are drawn.
fn beside(outcome: &Outcome) -> String {
    let (ours, theirs) = (
        outcome.median(&ours(UNLOCKED), KNEE),
        outcome.median(&arm_name(Client::Httperf, UNLOCKED), KNEE),
    );
    let httperf = match (ours, theirs) {
        (Some(ours), Some(theirs)) => format!(
            "Driven by httperf, the unlocked server keeps up to {} requests/s, {} times what it does for our own client.",
            number(theirs),
            number(theirs / ours)
        ),
        _ => "httperf was not installed here, so that only our own client drove the server.".into(),
    };
    format!(
        "{httperf} The source's curves (figure II) are a picture whose numbers are not in its text; none are drawn here."
    )
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
    fn words_follow_the_figures() {
        assert!(verdict(&[1.2, 1.1]).contains("finding holds"));
        assert!(verdict(&[0.7, 0.9]).contains("opposite"));
        assert!(verdict(&[1.2, 0.9]).contains("not to be seen clearly"));
        assert!(verdict(&[]).contains("not measured"));
    }

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
        let without = beside(&found);
        assert!(without.contains("not installed"), "{without}");
    }
}
