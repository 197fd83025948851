//! The presentation of an experiment: sentences, and for each load a table and charts.

use std::collections::BTreeSet;

use super::judge::pooled;
use super::server::Who;
use super::table::{Show, Trials, Variant};
use crate::present::{Block, Chart, Kind, Row, Style, Table, cell};
use crate::result::{Outcome, Variant as Measured};
use crate::stats;
use crate::views::{self, Of};

/// The presentation.
pub fn present(trials: &'static Trials, outcome: &Outcome) -> Vec<Block> {
    let (card, show) = (trials.card, &trials.table.show);
    let told = show.say.iter();
    let told = told.filter_map(|word| card.say(word, outcome, &[]));
    let mut blocks = views::meaning(told);
    for load in &trials.table.load {
        blocks.extend(of_load(trials, outcome, &load.name));
    }
    for metric in &show.over {
        blocks.extend(over(trials, outcome, metric));
    }
    blocks.extend(outcome.left_out().map(Block::Paragraph));
    blocks
}

/// The table and the charts of a load, below its title.
pub fn of_load(trials: &'static Trials, outcome: &Outcome, load: &str) -> Vec<Block> {
    let (show, found) = (&trials.table.show, measured(trials, outcome, load));
    if found.is_empty() || show.columns.is_empty() {
        return Vec::new();
    }
    let title = trials.card.words.get(&format!("load-{load}"));
    let title = title.map(|title| Block::Heading(title.clone()));
    let charts = show.charts.iter();
    let charts = charts.filter_map(|what| chart(what, load, &found));
    let table = Block::Table(table(show, &found));
    let blocks = title.into_iter().chain([table]);
    blocks.chain(charts.map(Block::Chart)).collect()
}

/// A metric of all servers over the loads, whose names are numbers: a table and lines.
fn over(trials: &'static Trials, outcome: &Outcome, metric: &str) -> [Block; 2] {
    let of = |load: &str| measured(trials, outcome, load);
    let mut loads = trials.loads(false);
    loads.retain(|load| !of(load).is_empty());
    let all = loads.iter().flat_map(|load| of(load));
    let mut servers: Vec<Who> = all.map(|(variant, _)| variant.who).collect();
    let mut seen = BTreeSet::new();
    servers.retain(|who| seen.insert(who.name()));
    let at = |who: &Who, load: &str| outcome.median(&format!("{load}/{}", who.name()), metric);
    let (title, unit) = named(metric);
    let row = |who: &Who| Row::named(who.name(), loads.iter().map(|load| cell(at(who, load))));
    let x = &*trials.table.show.x;
    let caption = format!("{title}. Columns: {x}.");
    let table = Table::new(caption, loads.iter().copied(), servers.iter().map(row));
    let line = |who: &Who| {
        let point = |load: &&str| Some((load.parse().ok()?, at(who, load)?));
        let points = loads.iter().filter_map(point);
        (Style::ours(who.name(), who.colour()), points.collect())
    };
    let (note, axes) = ("Median of the rounds.", (x, unit, false));
    let chart = Chart::lines(format!("{title}."), note, axes, servers.iter().map(line));
    [Block::Table(table), Block::Chart(chart)]
}

type Found<'a> = [(Variant, &'a Measured)];

/// The measured variants of a load, in order.
pub fn measured<'a>(
    trials: &'static Trials,
    outcome: &'a Outcome,
    load: &str,
) -> Vec<(Variant, &'a Measured)> {
    let of_load = trials.variants().filter(|one| one.load.name == load);
    of_load
        .filter_map(|one| Some((one, outcome.variant(&one.name())?)))
        .collect()
}

fn table(show: &Show, found: &Found<'_>) -> Table {
    let row = |(variant, found): &(Variant, &Measured)| {
        let cells = show.columns.iter().map(|(_, what)| shown(what, found));
        Row::named(variant.who.name(), cells)
    };
    Table::new(
        "Times in ms. Medians of the rounds; what is lost, of all.",
        show.columns.iter().map(|(head, _)| head.clone()),
        found.iter().map(row),
    )
}

fn shown(what: &str, found: &Measured) -> String {
    match what.split_once(' ') {
        Some(("sum", metric)) => Of::Sum(metric).cell(found),
        Some(("ends", metric)) => Of::Ends(metric).cell(found),
        Some(("part", metric)) => {
            pooled(found, metric).map_or_else(|| cell(None), |part| format!("{:.1} %", part * 1e2))
        }
        _ => Of::Median(what).cell(found),
    }
}

fn style(variant: &Variant) -> Style {
    Style::ours(variant.who.name(), variant.who.colour())
}

fn chart(what: &str, load: &str, found: &Found<'_>) -> Option<Chart> {
    let styled = || found.iter().map(|(variant, v)| (style(variant), *v));
    match what {
        "percentiles" => Some(views::percentiles(load, styled())),
        "shares" => Some(shares(load, found)),
        metric => {
            let bars = views::bars(styled(), metric);
            let values: Vec<f64> = bars.iter().map(|bar| bar.value).collect();
            let (title, unit) = named(metric);
            let log = stats::max(&values) > 30.0 * stats::min(&values) && stats::min(&values) > 0.0;
            let note = "Median and range of the rounds.";
            let title = format!("{load}: {title}.");
            (!bars.is_empty()).then(|| Chart::bars(title, note, (unit, log), bars))
        }
    }
}

/// A metric in words, and its unit.
fn named(metric: &str) -> (&str, &str) {
    match metric {
        "latency_ms_mean" => ("mean latency", "ms"),
        "server_cpu_us" => ("CPU time of the server for each answer", "µs"),
        "voluntary_switches_per_request" => (
            "how often a worker went to sleep for each request, all workers together",
            "sleeps a request",
        ),
        "latency_ms_p99" => ("latency that one request in a hundred exceeds", "ms"),
        "latency_ms_stddev" => ("deviation of the latency", "ms"),
        "throughput_per_s" => ("answers a second", "/s"),
        "share_max_over_mean" => (
            "the busiest worker's share, in multiples of an even one",
            "× even",
        ),
        "total_s" => ("how long all requests took", "s"),
        "lost" => ("requests lost", "lost"),
        other => (other, ""),
    }
}

/// Share of each worker: the mean of the rounds.
pub fn pooled_shares(found: &Measured) -> Vec<f64> {
    let share = |worker: usize| {
        let metric = found.metrics.get(&format!("share_worker_{worker}"));
        metric.map(|m| stats::mean(&m.values))
    };
    (0..).map_while(share).collect()
}

fn shares(load: &str, found: &Found<'_>) -> Chart {
    let row =
        |(variant, v): &(Variant, &Measured)| (variant.who.name().to_owned(), pooled_shares(v));
    Chart {
        title: format!("{load}: who answered."),
        note: "Share of each worker, all rounds. Those of other projects' servers are in order of their shares.".into(),
        kind: Kind::Shares {
            rows: found.iter().map(row).collect(),
        },
    }
}
