//! The tables: a summary, and one for each server.

use super::judge::{refused, worse};
use super::{Cell, cells, judge, ours, pairing};
use crate::present::{Block, Row, Table, cell, number};
use crate::result::Outcome;
use crate::trials::server::How;

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
    let all = ours().filter_map(|cell| Some((cell.name(), worse(outcome, &cell)?)));
    let (refusals, others): (Vec<_>, Vec<_>) =
        all.partition(|(name, _)| refused(outcome, name).is_some());
    let good = others.iter().filter(|(_, worse)| worse.is_empty()).count();
    let (bad, no) = (others.len() - good, refusals.len());
    format!(
        "{good} of {} servers, situations and ways are no worse with us than as they are, {bad} are worse, {no} were refused beforehand.",
        good + bad + no
    )
}

/// The names of the servers, in order.
fn servers_in_order() -> Vec<&'static str> {
    let mut names: Vec<&str> = cells().map(|cell| cell.server.name.as_str()).collect();
    names.dedup();
    names
}

/// The ways of servers with a socket for each worker, and of those with one queue.
const KINDS: [(&str, &[How]); 2] = [
    (
        "A socket for each worker",
        &[How::Attach, How::AttachRescue, How::Run, How::Split],
    ),
    (
        "One socket for all workers",
        &[
            How::Attach,
            How::RunCommand,
            How::PlainAttach,
            How::PlainRunCommand,
        ],
    ),
];

/// A row for each server, and for each way the columns that are worse. A table for each kind of server.
pub fn summaries(outcome: &Outcome) -> impl Iterator<Item = Table> {
    let all = KINDS.iter().map(|kind| summary(outcome, kind));
    all.filter(|table| !table.rows.is_empty())
}

fn summary(outcome: &Outcome, (kind, ways): &(&str, &[How])) -> Table {
    let is_of_kind = |name: &&'static str| {
        let mut of_it = cells().filter(|cell| cell.server.name == *name);
        of_it.any(|cell| cell.server.is_one_queue()) == ways.contains(&How::RunCommand)
    };
    let servers = servers_in_order().into_iter().filter(is_of_kind);
    let rows = servers.filter_map(|server| {
        let found: Vec<_> = ways.iter().map(|how| told(outcome, server, *how)).collect();
        let measured = found.iter().any(Option::is_some);
        let bad = |(nth, text): (usize, &Option<String>)| {
            let bad = text
                .as_ref()
                .is_some_and(|t| t != GOOD && !t.starts_with(REFUSED));
            bad.then_some(nth + 1)
        };
        let bad = found.iter().enumerate().filter_map(bad).collect();
        let cells = found
            .into_iter()
            .map(|text| text.unwrap_or_else(|| cell(None)));
        measured.then(|| Row::named(server, cells).marking(bad))
    });
    Table::new(
        format!("{kind}: where a server is worse with us than as it is. ✗: in what."),
        ways.iter().map(|how| how.name()),
        rows,
    )
}

const GOOD: &str = "no worse";
const REFUSED: &str = "refused";

fn told(outcome: &Outcome, server: &str, how: How) -> Option<String> {
    let (mut bad, mut measured, mut refusals) = (Vec::new(), 0, 0);
    let of_it = ours().filter(|cell| cell.server.name == server && cell.server.how == how);
    for cell in of_it {
        let Some(worse) = worse(outcome, &cell) else {
            continue;
        };
        measured += 1;
        if refused(outcome, &cell.name()).is_some() {
            refusals += 1;
        } else if !worse.is_empty() {
            let heads: Vec<&str> = worse.iter().map(|metric| head(metric)).collect();
            bad.push(format!("{}: {}", cell.load.name, heads.join(", ")));
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
    for server in servers_in_order() {
        let of_it = || cells().filter(|cell| cell.server.name == server);
        let rows: Vec<Row> = of_it().filter_map(|cell| row(outcome, &cell)).collect();
        if rows.is_empty() {
            continue;
        }
        let caption = format!(
            "{server}: lost and errors of all rounds together, else medians, and how many times as it is. ✗: worse."
        );
        let heads = COLUMNS.map(|(head, _)| head);
        blocks.push(Block::Table(Table::new(caption, heads, rows)));
        let noted = of_it().filter_map(|cell| notes(outcome, &cell.name()));
        blocks.extend(noted.map(Block::Paragraph));
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

fn row(outcome: &Outcome, of: &Cell) -> Option<Row> {
    let found = outcome.variant(&of.name())?;
    let bad = match of.server.how {
        How::AsItIs => Vec::new(),
        _ => worse(outcome, of).unwrap_or_default(),
    };
    let shown = |metric: &str| {
        let value = match metric {
            "lost" | "complaints" => found.metrics.get(metric).map(|m| m.values.iter().sum()),
            _ => found.median(metric),
        };
        let ratio = judge::RATIOS
            .contains(&metric)
            .then(|| outcome.ratio(&pairing(of, metric).name))
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
    let mut label = format!("{} {}", of.load.name, of.server.how.name());
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
