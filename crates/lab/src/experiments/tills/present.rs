//! The result for a reader: words computed from the numbers, tables, histograms and charts.

use super::CARD;
use super::judge::{self, pooled_shares};
use super::summary;
use super::workload::{STUCK_ONE_IN, STUCK_SLOW_US, WORKERS};
use crate::present::{Bar, Block, Chart, Histogram, Kind, Row, Style, Table, cell, number};
use crate::published::Published;
use crate::result::{Metric, Outcome, Variant};
use crate::stats;
use crate::views::{self, Of};
use crate::ways::{self, Way};

/// The published series, and our way that stands for it: NGINX's single queue was epoll on a shared socket.
const PUBLISHED: [(&str, Way); 2] = [
    ("single queue", Way::SharedEpollExclusive),
    ("multiple queues", Way::ReuseportHash),
];

pub fn present(outcome: &Outcome) -> Vec<Block> {
    let published = Published::parse(CARD.published);
    let mut blocks = vec![
        Block::Paragraph(summary::sentences(outcome)),
        Block::Chart(summary::chart(outcome)),
        Block::Table(summary::table(outcome)),
        Block::Heading("What it means".into()),
    ];
    blocks.extend(
        meaning(outcome, &published)
            .into_iter()
            .map(Block::Paragraph),
    );
    blocks.push(Block::Heading(
        "kept: 64 connections opened one after another, then 2,400 requests/s over them".into(),
    ));
    blocks.extend(workload(outcome, "kept", None));
    blocks.push(Block::Heading(
        "stuck: one request in a hundred takes a hundred times as long".into(),
    ));
    blocks.extend(workload(outcome, "stuck", None));
    blocks.push(Block::Heading(
        "cpu: every request takes CPU, 200 clients, as published".into(),
    ));
    blocks.extend(workload(outcome, "cpu", Some(&published)));
    blocks
}

/// The variants of a workload, in the order of [`ways::WITH_ROTATE`].
fn variants<'a>(outcome: &'a Outcome, workload: &str) -> Vec<(Way, &'a Variant)> {
    let find = |way: Way| Some((way, outcome.variant(&format!("{workload}/{}", way.name()))?));
    ways::WITH_ROTATE.into_iter().filter_map(find).collect()
}

fn workload(outcome: &Outcome, name: &str, published: Option<&Published>) -> Vec<Block> {
    let variants = variants(outcome, name);
    let mut blocks = vec![
        Block::Table(latencies(&variants, published)),
        Block::Chart(percentiles(name, &variants)),
        Block::Chart(means(name, &variants, published)),
    ];
    if let Some(published) = published {
        blocks.push(Block::Chart(doublings(name, &variants, published)));
        blocks.push(Block::Chart(deviations(&variants, published)));
    }
    blocks.push(Block::Table(shares_table(&variants)));
    blocks.push(Block::Chart(shares(name, &variants)));
    let mut histograms: Vec<Histogram> = Vec::new();
    if let Some(published) = published {
        histograms.extend(
            PUBLISHED
                .iter()
                .map(|(series, _)| published_histogram(published, series)),
        );
    }
    histograms.extend(
        variants
            .iter()
            .filter_map(|(way, variant)| histogram(way.name(), variant)),
    );
    blocks.push(Block::Histograms(histograms));
    blocks
}

const COLUMNS: [(&str, &str); 8] = [
    ("min", "latency_ms_min"),
    ("avg", "latency_ms_mean"),
    ("median", "latency_ms_p50"),
    ("p90", "latency_ms_p90"),
    ("p99", "latency_ms_p99"),
    ("p99.9", "latency_ms_p999"),
    ("max", "latency_ms_max"),
    ("dev", "latency_ms_stddev"),
];

/// Over all rounds: the smallest minimum, the largest maximum, the median of everything else.
fn over_rounds(metric: &Metric, name: &str) -> f64 {
    match name {
        "latency_ms_min" => metric.min,
        "latency_ms_max" => metric.max,
        _ => metric.median,
    }
}

fn latencies(variants: &[(Way, &Variant)], published: Option<&Published>) -> Table {
    let rounds = variants
        .first()
        .and_then(|(_, v)| v.metrics.get("latency_ms_mean"))
        .map_or(0, |m| m.values.len());
    let theirs = published.into_iter().flat_map(|published| {
        PUBLISHED.map(|(series, _)| {
            let of = |(_, metric): (&str, &str)| cell(published.value(series, metric));
            let name = std::iter::once(format!("(published) {series}"));
            Row::published(name.chain(COLUMNS.map(of)).collect())
        })
    });
    let ours = variants.iter().map(|(way, variant)| {
        let of = |name: &str| Some(over_rounds(variant.metrics.get(name)?, name));
        Row::named(way.name(), COLUMNS.map(|(_, name)| cell(of(name))))
    });
    Table::new(
        match rounds {
            1 => "Latency in ms; one round.".into(),
            n => format!("Latency in ms; median of {n} rounds, min and max of all."),
        },
        COLUMNS.map(|(head, _)| head),
        theirs.chain(ours),
    )
}

fn shares_table(variants: &[(Way, &Variant)]) -> Table {
    let row = |(way, variant): &(Way, &Variant)| {
        let shares = pooled_shares(variant);
        let share = |w| {
            shares
                .get(w)
                .map_or_else(|| "–".into(), |s| format!("{:.1} %", s * 100.0))
        };
        let rest = [
            Of::Median("share_max_over_mean"),
            Of::Median("throughput_per_s"),
            Of::Sum("errors"),
        ];
        let rest = rest.map(|of| of.cell(variant));
        Row::named(way.name(), (0..WORKERS).map(share).chain(rest))
    };
    let workers = (0..WORKERS).map(|worker| format!("worker {worker}"));
    let rest = ["max/mean", "requests/s", "errors"].map(str::to_owned);
    Table::new(
        "Who answered: the share of each worker, all rounds.",
        workers.chain(rest),
        variants.iter().map(row),
    )
}

fn style(way: Way) -> Style {
    Style::ours(way.name(), way.colour())
}

fn percentiles(name: &str, variants: &[(Way, &Variant)]) -> Chart {
    views::percentiles(name, styled(variants))
}

fn styled<'a>(variants: &[(Way, &'a Variant)]) -> impl Iterator<Item = (Style, &'a Variant)> {
    variants.iter().map(|(way, v)| (style(*way), *v))
}

/// The source's own kind of picture, for it and for us on one axis.
fn doublings(name: &str, variants: &[(Way, &Variant)], published: &Published) -> Chart {
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
    let ours = |(way, v): &(Way, &Variant)| {
        Some((
            style(*way),
            v.distributions.get("latency_ms")?.powers_of_two(),
        ))
    };
    rows.extend(variants.iter().filter_map(ours));
    Chart {
        title: format!("{name}: how alike the waits are."),
        note:
            "One narrow peak is a server that one can rely on. Each column is twice the one before."
                .into(),
        kind: Kind::Doublings {
            unit: "ms".into(),
            rows,
        },
    }
}

fn published_bars(published: &Published, metric: &str) -> Vec<Bar> {
    let bar = |(series, way): &(&str, Way)| {
        Some(Bar {
            style: Style::published(format!("published: {series}"), way.colour()),
            value: published.value(series, metric)?,
            range: None,
        })
    };
    PUBLISHED.iter().filter_map(bar).collect()
}

fn means(name: &str, variants: &[(Way, &Variant)], published: Option<&Published>) -> Chart {
    let mut bars = published.map_or_else(Vec::new, |p| published_bars(p, "latency_ms_mean"));
    bars.extend(views::bars(styled(variants), "latency_ms_mean"));
    let title = format!("{name}: mean latency.");
    Chart::bars(title, "Median of the rounds.", ("ms", false), bars)
}

fn deviations(variants: &[(Way, &Variant)], published: &Published) -> Chart {
    let mut bars = published_bars(published, "latency_ms_stddev");
    bars.extend(views::bars(styled(variants), "latency_ms_stddev"));
    Chart::bars(
        "cpu: deviation of the latency.",
        "How unlike each other the waits are; the source calls that of multiple queues gigantic.",
        ("ms", false),
        bars,
    )
}

fn shares(name: &str, variants: &[(Way, &Variant)]) -> Chart {
    Chart {
        title: format!("{name}: who answered."),
        note: "Share of each of the four workers, all rounds.".into(),
        kind: Kind::Shares {
            rows: variants
                .iter()
                .map(|(way, v)| (way.name().to_owned(), pooled_shares(v)))
                .collect(),
        },
    }
}

fn histogram(way: &str, variant: &Variant) -> Option<Histogram> {
    let of = |name: &str| {
        variant
            .metrics
            .get(name)
            .map_or(f64::NAN, |m| over_rounds(m, name))
    };
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

/// The conclusions. Each sentence follows from the numbers, whichever way they fell.
fn meaning(outcome: &Outcome, published: &Published) -> Vec<String> {
    [
        kept_meaning(outcome),
        stuck_meaning(outcome),
        cpu_meaning(outcome, published),
        shares_meaning(outcome),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn kept_meaning(outcome: &Outcome) -> Option<String> {
    let of = |way: Way, metric: &str| outcome.median(&format!("kept/{}", way.name()), metric);
    let share = |way| of(way, "share_max_over_mean").map(|s| s * 100.0 / WORKERS as f64);
    let told = |way| {
        Some(format!(
            "{:.0} % of the answers come from the busiest worker and the mean is {} ms",
            share(way)?,
            number(of(way, "latency_ms_mean")?)
        ))
    };
    Some(format!(
        "Where connections are kept, who got the connection does all its work. With one shared socket and EPOLLEXCLUSIVE {}; under the kernel's hash {}; with least-connections {}.",
        told(Way::SharedEpollExclusive)?,
        told(Way::ReuseportHash)?,
        told(Way::LeastConnectionsRescue)?,
    ))
}

fn stuck_meaning(outcome: &Outcome) -> Option<String> {
    let mean = |way: Way| outcome.median(&format!("stuck/{}", way.name()), "latency_ms_mean");
    let (shared, hash) = (mean(Way::SharedAccept)?, mean(Way::ReuseportHash)?);
    let (least, rescue) = (
        mean(Way::LeastConnections)?,
        mean(Way::LeastConnectionsRescue)?,
    );
    let to_shared = outcome.ratio(judge::RESCUE_TO_SHARED)?;
    let to_rescue = outcome.ratio(judge::HASH_TO_RESCUE)?;
    let against_hash = if to_rescue > 1.1 {
        format!(
            "{} times as long under the kernel's hash",
            number(to_rescue)
        )
    } else {
        format!(
            "no longer under the kernel's hash here ({} times)",
            number(to_rescue)
        )
    };
    let against_shared = match to_shared {
        r if r < 0.95 => format!("and less than with one shared queue ({} times)", number(r)),
        r if r <= 1.15 => format!(
            "as long as with one shared queue ({} times), the best that is possible for workers that block",
            number(r)
        ),
        r => format!("but {} times as long as with one shared queue", number(r)),
    };
    let rescue_alone = match outcome.ratio(judge::RESCUE_TO_LEAST)? {
        r if r < 0.95 => format!(
            "Choosing well is worth {} → {} ms; what waited behind a worker that got stuck afterwards is what rescue moves.",
            number(hash),
            number(least)
        ),
        r if r <= 1.05 => format!(
            "Choosing well is worth {} → {} ms; moving queues added nothing in this run.",
            number(hash),
            number(least)
        ),
        r => format!(
            "Choosing well is worth {} → {} ms; with rescue it took {} times as long in this run, which it should not.",
            number(hash),
            number(least),
            number(r)
        ),
    };
    Some(format!(
        "While one request in {STUCK_ONE_IN} keeps its worker for {} ms, a client of least-connections with rescue waits {} ms in the mean: {against_hash} ({} ms), {against_shared} ({} ms). {rescue_alone} (Times are medians of the rounds; factors are paired by round, so that a noisy one counts once.)",
        STUCK_SLOW_US / 1000,
        number(rescue),
        number(hash),
        number(shared),
    ))
}

fn cpu_meaning(outcome: &Outcome, published: &Published) -> Option<String> {
    let ratio = |metric: &str| {
        Some(
            published.value("multiple queues", metric)?
                / published.value("single queue", metric)?,
        )
    };
    let deviation = outcome.ratio(judge::CPU_DEVIATION)?;
    let ours = outcome.ratio(judge::CPU_DEVIATION_OURS)?;
    let verdict = if deviation >= 2.0 {
        "still holds on this kernel"
    } else if outcome.environment.warnings.is_empty() {
        "is not seen on this machine"
    } else {
        "is not seen in this run, which was noisy"
    };
    let steered = match ours {
        r if r >= 1.5 => format!(
            "Steered by connections, a server with a queue a worker keeps its sockets apart and deviates {} times less than under the hash",
            number(r)
        ),
        r if r >= 0.95 => format!(
            "Steering by connections changes little here: the hash deviates {} times as much",
            number(r)
        ),
        r => format!(
            "Steering by connections deviates more than the hash here ({} times)",
            number(1.0 / r)
        ),
    };
    let mean = outcome.ratio(judge::CPU_MEAN_OURS)?;
    Some(format!(
        "Under CPU load, the source saw the mean stay ({} times) and the deviation explode ({} times) from one queue to a queue a worker; here it is {} and {} times, so its finding {verdict}. {steered}, at {} times the mean of the shared queue.",
        number(ratio("latency_ms_mean")?),
        number(ratio("latency_ms_stddev")?),
        number(outcome.ratio(judge::CPU_MEAN)?),
        number(deviation),
        number(mean),
    ))
}

fn shares_meaning(outcome: &Outcome) -> Option<String> {
    let shares = |name: &str| {
        outcome
            .variant(name)
            .map(pooled_shares)
            .filter(|s| s.len() == WORKERS)
    };
    let epoll = shares("stuck/shared-epoll-exclusive")?;
    let ours = shares("stuck/least-connections+rescue")?;
    let (most, least) = (stats::max(&epoll) * 100.0, stats::min(&epoll) * 100.0);
    let lifo = if stats::max(&epoll) > 1.5 / WORKERS as f64 {
        "the kernel wakes the first worker that waits, always in one order, so one is the busiest"
    } else {
        "no worker was favoured much in this run"
    };
    Some(format!(
        "Who did the work: with a shared epoll the busiest worker of stuck answered {most:.0} % and the idlest {least:.0} % ({lifo}); with least-connections and rescue {:.0} % and {:.0} %.",
        stats::max(&ours) * 100.0,
        stats::min(&ours) * 100.0
    ))
}
