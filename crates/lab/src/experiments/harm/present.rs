//! The tables: a summary, and one for each server.

use super::judge::{refused, worse};
use super::subjects::{ALL, Subject};
use super::{Situation, Way, arm_name, cells, judge, pairing};
use crate::present::{Block, Row, Table, cell, number};
use crate::result::Outcome;

const OURS: [Way; 4] = [Way::Attach, Way::AttachRescue, Way::Run, Way::Split];
/// The columns of a server's table: a head, and its metric.
const COLUMNS: [(&str, &str); 9] = [
    ("lost", "lost"),
    ("mean ms", "latency_ms_mean"),
    ("p99 ms", "latency_ms_p99"),
    ("busiest", "busiest"),
    ("idle CPUs", "idle_cpus"),
    ("open left", "active_at_end"),
    ("errors said", "complaints"),
    ("ready s", "ready_s"),
    ("moves", "moves"),
];

/// How many cells are no worse.
pub fn meaning(outcome: &Outcome) -> String {
    let all = cells().flat_map(|(subject, situation)| {
        let ways = subject.ways(situation).into_iter().skip(1);
        ways.filter_map(move |way| {
            let name = arm_name(subject, situation, way);
            let refused = refused(outcome, &name).is_some();
            Some((refused, worse(outcome, subject, situation, way)?))
        })
    });
    let (mut good, mut bad, mut no) = (0, 0, 0);
    for (refused, worse) in all {
        match (refused, worse.is_empty()) {
            (true, _) => no += 1,
            (_, true) => good += 1,
            _ => bad += 1,
        }
    }
    format!(
        "{good} of {} servers, situations and ways are no worse with us than as they are, {bad} are worse, {no} were refused beforehand.",
        good + bad + no
    )
}

/// A row for each server, and for each way the columns that are worse.
pub fn summary(outcome: &Outcome) -> Table {
    let rows = ALL.iter().filter_map(|subject| {
        let found = OURS.map(|way| told(outcome, subject, way));
        let measured = found.iter().any(Option::is_some);
        let bad = |(nth, text): (usize, &Option<String>)| {
            let bad = text
                .as_ref()
                .is_some_and(|t| t != GOOD && !t.starts_with(REFUSED));
            bad.then_some(nth + 1)
        };
        let bad = found.iter().enumerate().filter_map(bad).collect();
        let cells = found.clone().map(|text| text.unwrap_or_else(|| cell(None)));
        measured.then(|| Row::named(subject.name, cells).marking(bad))
    });
    Table::new(
        "Where a server is worse with us than as it is. ✗: in what.",
        OURS.map(Way::name),
        rows,
    )
}

const GOOD: &str = "no worse";
const REFUSED: &str = "refused";

fn told(outcome: &Outcome, subject: &Subject, way: Way) -> Option<String> {
    let (mut bad, mut measured, mut refusals) = (Vec::new(), 0, 0);
    for situation in subject.situations {
        let Some(worse) = worse(outcome, subject, *situation, way) else {
            continue;
        };
        measured += 1;
        if refused(outcome, &arm_name(subject, *situation, way)).is_some() {
            refusals += 1;
        } else if !worse.is_empty() {
            let heads: Vec<&str> = worse.iter().map(|metric| head(metric)).collect();
            bad.push(format!("{}: {}", situation.name(), heads.join(", ")));
        }
    }
    match (measured, bad.is_empty()) {
        (0, _) => None,
        (n, true) if n == refusals => Some(REFUSED.into()),
        (_, true) => Some(GOOD.into()),
        _ => Some(bad.join("; ")),
    }
}

fn head(metric: &str) -> &str {
    let named = COLUMNS.iter().find(|(_, of)| *of == metric);
    named.map_or(metric, |(head, _)| *head)
}

/// A table for each server, and the reasons of refusals and failures.
pub fn servers(outcome: &Outcome) -> Vec<Block> {
    let mut blocks = Vec::new();
    for subject in ALL {
        let cells = subject
            .situations
            .iter()
            .flat_map(|s| subject.ways(*s).into_iter().map(move |w| (*s, w)));
        let rows: Vec<Row> = cells
            .clone()
            .filter_map(|(situation, way)| row(outcome, subject, situation, way))
            .collect();
        if rows.is_empty() {
            continue;
        }
        let caption = format!(
            "{}: lost and errors of all rounds together, else medians, and how many times as it is. ✗: worse.",
            subject.name
        );
        let heads = COLUMNS.map(|(head, _)| head);
        blocks.push(Block::Table(Table::new(caption, heads, rows)));
        for (situation, way) in cells {
            blocks.extend(notes(outcome, &arm_name(subject, situation, way)).map(Block::Paragraph));
        }
    }
    blocks
}

fn notes(outcome: &Outcome, name: &str) -> Option<String> {
    let notes = &outcome.variant(name)?.notes;
    let told: Vec<String> = notes
        .iter()
        .map(|(what, why)| format!("{what}: {why}"))
        .collect();
    (!told.is_empty()).then(|| format!("{name}: {}.", told.join("; ")))
}

fn row(outcome: &Outcome, subject: &Subject, situation: Situation, way: Way) -> Option<Row> {
    let name = arm_name(subject, situation, way);
    let found = outcome.variant(&name)?;
    let bad = match way {
        Way::AsItIs => Vec::new(),
        _ => worse(outcome, subject, situation, way).unwrap_or_default(),
    };
    let shown = |metric: &str| {
        let value = match metric {
            "lost" | "complaints" => found.metrics.get(metric).map(|m| m.values.iter().sum()),
            _ => found.median(metric),
        };
        let ratio = judge::RATIOS
            .contains(&metric)
            .then(|| outcome.ratio(&pairing(subject, situation, way, metric).name))
            .flatten();
        match ratio {
            Some(times) => format!("{} ×{}", cell(value), number(times)),
            None => cell(value),
        }
    };
    let marks = COLUMNS
        .iter()
        .enumerate()
        .filter(|(_, (_, metric))| bad.contains(metric));
    let mut marks: Vec<usize> = marks.map(|(nth, _)| nth + 1).collect();
    let mut label = format!("{} {}", situation.name(), way.name());
    for word in ["refused", "failed"] {
        if let Some(rounds) = found.metrics.get(word) {
            label = format!("{label}, {word} {} times", rounds.values.len());
        }
    }
    if bad.contains(&"failed") {
        marks.push(0);
    }
    let cells = COLUMNS.map(|(_, metric)| shown(metric));
    Some(Row::named(label, cells).marking(marks))
}
