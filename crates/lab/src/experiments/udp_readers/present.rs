//! The result for a reader.

use super::more_cpus;
use super::{COMPARED, MODES, Mode, PAIRS, THREADS, Variant, WAYS, Way, pair_name};
use crate::present::{Block, Chart, Row, Style, Table, cell, number};
use crate::result::Outcome;
use crate::views::{self, Of};

pub fn present(outcome: &Outcome) -> Vec<Block> {
    let mut blocks = views::meaning([conclusions(outcome)]);
    for (mode, pinned) in MODES.into_iter().flat_map(|m| [(m, false), (m, true)]) {
        let here = |way: Way| !curve(outcome, mode, pinned, way, "time_s").is_empty();
        if !WAYS.into_iter().any(here) {
            continue;
        }
        blocks.push(Block::Heading(title(mode, pinned)));
        blocks.extend(meaning(outcome, mode, pinned).map(Block::Paragraph));
        blocks.push(Block::Table(table(outcome, mode, pinned)));
        blocks.push(Block::Table(details(outcome, mode, pinned)));
        blocks.push(Block::Chart(chart(outcome, mode, pinned)));
    }
    blocks.extend(more_cpus::present(outcome));
    blocks
}

fn title(mode: Mode, pinned: bool) -> String {
    format!(
        "{}{}",
        mode.title(),
        if pinned { ", threads pinned" } else { "" }
    )
}

/// The conclusions that this machine allows.
fn conclusions(outcome: &Outcome) -> String {
    format!(
        "{} CPUs, which the sender shares with the readers except where all waits beforehand. Where there are fewer CPUs than readers and sender, what is seen is what sharing costs, not what more processors would gain. The source draws its figures and prints no numbers; it had four.",
        outcome.environment.cpus
    )
}

fn curve(outcome: &Outcome, mode: Mode, pinned: bool, way: Way, metric: &str) -> Vec<(usize, f64)> {
    let of = |threads: usize| {
        let name = Variant {
            mode,
            pinned,
            way,
            threads,
        };
        Some((threads, outcome.median(&name.to_string(), metric)?))
    };
    THREADS.into_iter().filter_map(of).collect()
}

fn meaning(outcome: &Outcome, mode: Mode, pinned: bool) -> Option<String> {
    let both = |pairs: &[(Way, Way)]| {
        let ratio = |(a, b): &(Way, Way)| outcome.ratio(&pair_name(mode, pinned, *a, *b));
        Some((number(ratio(&pairs[0])?), number(ratio(&pairs[1])?)))
    };
    let (hash, shared) = both(&PAIRS[..2])?;
    let mut said = format!(
        "One flow, {COMPARED} readers: in turn they read {hash} times as fast as by the kernel's hash, which gives all to one of them, and {shared} times as fast as from one socket"
    );
    if let Some((hash, shared)) = both(&PAIRS[2..4]) {
        said += &format!("; by the CPU that got it, {hash} and {shared}");
    }
    said += ".";
    if let Some((hash, shared)) = both(&PAIRS[4..]) {
        said += &format!(
            " The program that reads one socket, split, in turn: {hash} times as fast as with a socket each and the hash, and {shared} times as fast as it is."
        );
    }
    said.extend(sender_busy(outcome, mode, pinned).map(|busy| {
        format!(
            " With the hash the sender is busy for {:.0} % of the time: nobody who reads can make that more than {} times as fast.",
            busy * 100.0,
            number(1.0 / busy)
        )
    }));
    Some(said)
}

/// The share of the time in which the sender is busy where one thread gets all; None if it is at most half.
fn sender_busy(outcome: &Outcome, mode: Mode, pinned: bool) -> Option<f64> {
    let hash = Variant {
        mode,
        pinned,
        way: Way::HashOne,
        threads: COMPARED,
    };
    let of = |metric| outcome.median(&hash.to_string(), metric);
    let busy = (of("sender_cpu_us")? * 1e-6 * of("rate_per_s")?).min(1.0);
    // A sender that never stops is busy however much is read.
    (matches!(mode, Mode::Constant | Mode::Batches) && busy > 0.5).then_some(busy)
}

fn table(outcome: &Outcome, mode: Mode, pinned: bool) -> Table {
    let row = |way: Way| {
        let found = curve(outcome, mode, pinned, way, "time_s");
        let at = |threads: usize| {
            let value = found.iter().find(|(n, _)| *n == threads);
            cell(value.map(|(_, seconds)| *seconds))
        };
        (!found.is_empty()).then(|| Row::named(way.name(), THREADS.map(at)))
    };
    let datagrams = outcome.parameter_u64("datagrams").unwrap_or(0) as f64;
    Table::new(
        format!(
            "Seconds to read {} units of 10 bytes; medians of the rounds.",
            number(datagrams)
        ),
        THREADS.map(|n| format!("{n} reading")),
        WAYS.into_iter().filter_map(row),
    )
}

fn details(outcome: &Outcome, mode: Mode, pinned: bool) -> Table {
    let columns = [
        ("read/s", Of::Median("rate_per_s")),
        ("lost", Of::Median("lost")),
        ("CPU µs each", Of::Median("reader_cpu_us")),
        ("sender's", Of::Median("sender_cpu_us")),
        ("switches each", Of::Median("switches")),
        ("busiest/mean", Of::Median("share_max_over_mean")),
    ];
    let row = |way: Way| {
        let variant = Variant {
            mode,
            pinned,
            way,
            threads: COMPARED,
        };
        Some((way.name(), outcome.variant(&variant.to_string())?))
    };
    let caption = format!(
        "{COMPARED} readers; CPU time and switches are the readers', a datagram; the sender's CPU time is also the kernel's for all that happens until a datagram is in a socket and its reader woken."
    );
    views::table(caption, &columns, WAYS.into_iter().filter_map(row))
}

fn chart(outcome: &Outcome, mode: Mode, pinned: bool) -> Chart {
    let series = |way: Way| {
        let points = curve(outcome, mode, pinned, way, "time_s");
        let points = points.into_iter().map(|(n, s)| (n as f64, s)).collect();
        (Style::ours(way.name(), way.colour()), points)
    };
    Chart::lines(
        format!("{}.", title(mode, pinned)),
        "Lower is better. The source's figures have the same axes.",
        ("threads that read", "seconds", false),
        WAYS.map(series),
    )
}
