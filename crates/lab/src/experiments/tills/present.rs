//! The result for a reader: words computed from the numbers, tables, histograms and charts.

use super::{CARD, TRIALS, summary};
use crate::present::{Bar, Block, Chart, Histogram, Kind, Row, Style, Table, cell};
use crate::published::Published;
use crate::result::{Outcome, Variant};
use crate::ways::Way;
use crate::{trials, views};

/// The published series, and our way that stands for it: NGINX's single queue was epoll on a shared socket.
const PUBLISHED: [(&str, Way); 2] = [
    ("single queue", Way::SharedEpollExclusive),
    ("multiple queues", Way::ReuseportHash),
];

pub fn present(outcome: &Outcome) -> Vec<Block> {
    let mut blocks = vec![
        Block::Paragraph(summary::sentences(outcome)),
        Block::Chart(summary::chart(outcome)),
        Block::Table(summary::table(outcome)),
    ];
    let told = ["arming", "kept", "burst", "stuck", "cpu", "shares"]
        .map(|word| CARD.say(word, outcome, &[]));
    blocks.extend(views::meaning(told.into_iter().flatten()));
    for load in ["kept", "burst", "stuck", "cpu", "full"] {
        blocks.extend(trials::of_load(&TRIALS, outcome, load));
    }
    blocks.extend(beside_published(outcome));
    blocks
}

/// The source's figures, and ours of the same workload, `cpu`.
fn beside_published(outcome: &Outcome) -> Vec<Block> {
    let published = Published::parse(CARD.published);
    let variants = trials::measured(&TRIALS, outcome, "cpu");
    let of = |series: &str| {
        let of = |(_, metric): (&str, &str)| cell(published.value(series, metric));
        Row::named(format!("(published) {series}"), COLUMNS.map(of))
    };
    let theirs = PUBLISHED.map(|(series, _)| of(series));
    let theirs = theirs.map(|row| Row::published(row.cells));
    let caption = "cpu, as published: latency in ms.";
    let table = Table::new(caption, COLUMNS.map(|(head, _)| head), theirs);
    let mut histograms: Vec<Histogram> = PUBLISHED
        .map(|(series, _)| published_histogram(&published, series))
        .into();
    let ours = variants.iter();
    histograms.extend(ours.filter_map(|(of, found)| histogram(of.who.name(), found)));
    vec![
        Block::Table(table),
        Block::Chart(bars(&variants, &published, "latency_ms_mean")),
        Block::Chart(bars(&variants, &published, "latency_ms_stddev")),
        Block::Chart(doublings(&variants, &published)),
        Block::Histograms(histograms),
    ]
}

const COLUMNS: [(&str, &str); 5] = [
    ("min", "latency_ms_min"),
    ("avg", "latency_ms_mean"),
    ("median", "latency_ms_p50"),
    ("max", "latency_ms_max"),
    ("dev", "latency_ms_stddev"),
];

type Found<'a> = [(trials::Variant, &'a Variant)];

fn style(variant: &trials::Variant) -> Style {
    Style::ours(variant.who.name(), variant.who.colour())
}

/// The source's own kind of picture, for it and for us on one axis.
fn doublings(variants: &Found<'_>, published: &Published) -> Chart {
    let whole = |curve: Vec<(f64, f64)>| {
        curve
            .into_iter()
            .map(|(x, n)| (x as u64, n as u64))
            .collect()
    };
    let theirs = |(series, way): &(&str, Way)| {
        let style = Style::published(format!("published: {series}"), way.colour());
        (style, whole(published.curve(series, "latency_histogram")))
    };
    let mut rows: Vec<(Style, Vec<(u64, u64)>)> = PUBLISHED.iter().map(theirs).collect();
    let ours = |(of, v): &(trials::Variant, &Variant)| {
        Some((
            style(of),
            v.distributions.get("latency_ms")?.powers_of_two(),
        ))
    };
    rows.extend(variants.iter().filter_map(ours));
    Chart {
        title: "cpu: how alike the waits are.".into(),
        note:
            "One narrow peak is a server that one can rely on. Each column is twice the one before."
                .into(),
        kind: Kind::Doublings {
            unit: "ms".into(),
            rows,
        },
    }
}

/// A metric as published, and here.
fn bars(variants: &Found<'_>, published: &Published, metric: &str) -> Chart {
    let theirs = |(series, way): &(&str, Way)| {
        Some(Bar {
            style: Style::published(format!("published: {series}"), way.colour()),
            value: published.value(series, metric)?,
            range: None,
        })
    };
    let ours = variants.iter().map(|(of, v)| (style(of), *v));
    let mut bars: Vec<Bar> = PUBLISHED.iter().filter_map(theirs).collect();
    bars.extend(views::bars(ours, metric));
    let (what, note) = match metric {
        "latency_ms_mean" => ("mean", "Median of the rounds."),
        _ => (
            "deviation",
            "How unlike each other the waits are; the source calls that of multiple queues gigantic.",
        ),
    };
    let title = format!("cpu: {what} of the latency, as published and here.");
    Chart::bars(title, note, ("ms", false), bars)
}

fn histogram(way: &str, variant: &Variant) -> Option<Histogram> {
    let of = |name: &str| variant.metrics.get(name).map_or(f64::NAN, |m| m.median);
    let distribution = variant.distributions.get("latency_ms")?;
    Some(Histogram {
        title: format!("Duration in ms ({way})"),
        published: false,
        summary: format!(
            "min:{:.2} avg:{:.2} med={:.2} max:{:.2} dev:{:.2} count:{}",
            of("latency_ms_min"),
            of("latency_ms_mean"),
            of("latency_ms_p50"),
            of("latency_ms_max"),
            of("latency_ms_stddev"),
            distribution.total()
        ),
        unit: "value".into(),
        rows: distribution.powers_of_two(),
    })
}

fn published_histogram(published: &Published, series: &str) -> Histogram {
    let of = |name: &str| published.value(series, name).unwrap_or(f64::NAN);
    Histogram {
        title: format!("Duration in ms (published: {series})"),
        published: true,
        summary: format!(
            "min:{} avg:{} med={} max:{} dev:{} count:{}",
            of("latency_ms_min"),
            of("latency_ms_mean"),
            of("latency_ms_p50"),
            of("latency_ms_max"),
            of("latency_ms_stddev"),
            of("requests")
        ),
        unit: "value".into(),
        rows: published
            .curve(series, "latency_histogram")
            .iter()
            .map(|(x, count)| (*x as u64, *count as u64))
            .collect(),
    }
}
