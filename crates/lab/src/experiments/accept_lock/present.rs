//! Reply rate against request rate, and the knees.

use super::driver::Client;
use super::{
    APACHES, CAPACITY, CARD, KNEE, LOCKS, UNLOCKED, arm_name, offered_at, parse_arm, ratio_name,
    replies_at,
};
use crate::present::{Block, Chart, Kind, Row, Style, Table, number};
use crate::result::{Outcome, Variant};
use crate::stats;

/// Everything.
pub fn present(outcome: &Outcome) -> Vec<Block> {
    let mut blocks = vec![Block::Heading("What it means".into())];
    blocks.extend(meaning(outcome).map(Block::Paragraph));
    blocks.push(Block::Paragraph(beside(outcome)));
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
    let gains: Vec<f64> = APACHES
        .iter()
        .filter_map(|lock| outcome.ratio(&ratio_name(lock)))
        .collect();
    let verdict = if gains.is_empty() {
        "The locks that Apache had were not measured"
    } else if stats::min(&gains) > 1.05 {
        "The source's finding holds: a server that lets all its processes into accept() keeps up to a higher rate"
    } else if stats::min(&gains) > 1.0 {
        "What the source found is hardly to be seen: the lock costs a few percent at most"
    } else {
        "The source's finding does not hold here for each of Apache's locks: with one of them the server keeps up as far as without"
    };
    Some(format!(
        "Without a lock the server keeps up to {} requests/s, {}. {verdict}.",
        number(free),
        others.join(", ")
    ))
}

/// What is known of httperf and of the source's own curves.
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

/// The knee of each series.
fn knees(outcome: &Outcome) -> Table {
    let row = |v: &Variant| {
        let knee = v.metrics.get(KNEE)?;
        let (client, lock) = parse_arm(&v.name).ok()?;
        let cell = |metric: &str| v.median(metric).map_or_else(|| "–".into(), number);
        let ratio = match (client, lock) {
            (Client::Load, UNLOCKED) => Some(1.0),
            (Client::Load, lock) => outcome.ratio(&ratio_name(lock)),
            (Client::Httperf, _) => None,
        };
        Some(Row::ours(vec![
            v.name.clone(),
            number(knee.median),
            number(knee.min),
            number(knee.max),
            cell(CAPACITY),
            ratio.map_or_else(|| "–".into(), number),
        ]))
    };
    let mut rows: Vec<Row> = outcome.variants.iter().filter_map(row).collect();
    rows.push(Row::published(vec![
        CARD.source.short.into(),
        "not in the text".into(),
        String::new(),
        String::new(),
        String::new(),
        "more than 1".into(),
    ]));
    Table {
        caption: "The knee: the highest request rate at which at least 97 % are answered in time."
            .into(),
        head: [
            "",
            "knee /s",
            "min",
            "max",
            "closed loop /s",
            "unlocked / this",
        ]
        .map(str::to_owned)
        .into(),
        rows,
    }
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
    Chart {
        title: "Reply rate against request rate, by the lock around accept().".into(),
        note: "A server keeps up as long as its line follows the dashed one. Medians of the rounds, in which the rates differ a little."
            .into(),
        kind: Kind::Lines {
            x: "requests/s".into(),
            y: "replies/s".into(),
            log: false,
            series,
        },
    }
}

/// The same in numbers.
fn replies(outcome: &Outcome) -> Table {
    let all = outcome.variants.iter().flat_map(percents);
    let percents: std::collections::BTreeSet<u32> = all.collect();
    let mut head = vec![String::new()];
    head.extend(percents.iter().map(|p| format!("{p} %")));
    let row = |v: &Variant| {
        let mut cells = vec![v.name.clone()];
        cells.extend(percents.iter().map(|percent| {
            let offered = v.median(&offered_at(*percent));
            let share = offered.and_then(|o| Some(v.median(&replies_at(*percent))? / o));
            share.map_or_else(|| "–".into(), |s| format!("{:.0} %", s * 100.0))
        }));
        Row::ours(cells)
    };
    Table {
        caption: "Share of the requests answered within their time. Columns: request rate, in percent of what the closed loop did.".into(),
        head,
        rows: outcome.variants.iter().map(row).collect(),
    }
}
