//! The result for a reader.

use super::servers::Kind as Way;
use super::workload::{HEALTHY, Variant, WORKLOADS, Workload};
use crate::experiments::tills::workload::WORKERS;
use crate::present::{Bar, Block, Chart, Kind, Row, Style, Table, number};
use crate::result::{Outcome, Variant as Measured};
use crate::stats;

pub fn present(outcome: &Outcome) -> Vec<Block> {
    let mut blocks = vec![Block::Heading("What it means".into())];
    blocks.extend(meaning(outcome).into_iter().map(Block::Paragraph));
    for workload in WORKLOADS {
        let found = measured(outcome, workload);
        if found.is_empty() {
            continue;
        }
        blocks.push(Block::Heading(title(workload).into()));
        blocks.push(Block::Table(table(&found)));
        if workload == Workload::Resized {
            continue;
        }
        blocks.push(Block::Chart(percentiles(workload, &found)));
        if !workload.loses_one() {
            blocks.push(Block::Chart(deviations(workload, &found)));
        }
        blocks.push(Block::Chart(shares_chart(workload, &found)));
    }
    blocks.extend(outcome.left_out().map(Block::Paragraph));
    blocks
}

fn title(workload: Workload) -> &'static str {
    match workload {
        Workload::Stuck => "stuck: one request in a hundred takes a hundred times as long",
        Workload::Cpu => "cpu: every request computes, 200 clients",
        Workload::Stopped => "stopped: one of four workers is stopped for a while",
        Workload::Busy => "busy: one of four workers computes for a while",
        Workload::Resized => {
            "resized: reloaded with one worker, with eight, with one … at 6,000 requests/s"
        }
    }
}

/// The measured variants of a workload, in order.
fn measured(outcome: &Outcome, workload: Workload) -> Vec<(Variant, &Measured)> {
    let find = |variant: Variant| Some((variant, outcome.variant(&variant.name())?));
    workload.variants().into_iter().filter_map(find).collect()
}

fn label(variant: Variant) -> &'static str {
    if variant.healthy {
        HEALTHY
    } else {
        variant.kind.name()
    }
}

fn style(variant: Variant) -> Style {
    let colour = if variant.healthy {
        5
    } else {
        variant.kind.colour()
    };
    Style::ours(label(variant), colour)
}

/// Share of each worker over all rounds, the largest first: the process ids differ from round to round.
fn shares(found: &Measured) -> Vec<f64> {
    let of = |worker: usize| Some(&found.metrics.get(&format!("share_worker_{worker}"))?.values);
    let workers: Vec<&Vec<f64>> = (0..WORKERS).map_while(of).collect();
    let rounds = workers.first().map_or(0, |values| values.len());
    let mut sums = vec![0.0; workers.len()];
    for round in 0..rounds {
        let mut of_round: Vec<f64> = workers
            .iter()
            .filter_map(|w| w.get(round).copied())
            .collect();
        of_round.sort_by(|a, b| b.total_cmp(a));
        for (sum, share) in sums.iter_mut().zip(of_round) {
            *sum += share / rounds as f64;
        }
    }
    sums
}

fn table(found: &[(Variant, &Measured)]) -> Table {
    let columns = [
        ("avg", "latency_ms_mean"),
        ("dev", "latency_ms_stddev"),
        ("median", "latency_ms_p50"),
        ("p99", "latency_ms_p99"),
        ("max", "latency_ms_max"),
        ("requests/s", "throughput_per_s"),
        ("busiest/mean", "share_max_over_mean"),
    ];
    let row = |(variant, found): &(Variant, &Measured)| {
        let cell = |metric: &str| found.median(metric).map_or_else(|| "–".into(), number);
        let errors = found.metrics.get("errors").or(found.metrics.get("lost"));
        let mut cells = vec![label(*variant).to_owned()];
        cells.extend(columns.map(|(_, metric)| cell(metric)));
        cells.push(errors.map_or_else(|| "–".into(), |m| number(m.values.iter().sum())));
        Row::ours(cells)
    };
    Table {
        caption: "Latency in ms; medians of the rounds, errors of all.".into(),
        head: std::iter::once("")
            .chain(columns.map(|(head, _)| head))
            .chain(["errors"])
            .map(str::to_owned)
            .collect(),
        rows: found.iter().map(row).collect(),
    }
}

fn percentiles(workload: Workload, found: &[(Variant, &Measured)]) -> Chart {
    let series = found.iter().filter_map(|(variant, found)| {
        let distribution = found.distributions.get("latency_ms")?;
        Some((style(*variant), distribution.clone()))
    });
    Chart {
        title: format!("{}: how long the slowest wait.", workload.name()),
        note: "Lower is better. Every step to the right is ten times rarer; both axes are logarithmic.".into(),
        kind: Kind::Percentiles {
            unit: "latency, ms".into(),
            series: series.collect(),
        },
    }
}

fn deviations(workload: Workload, found: &[(Variant, &Measured)]) -> Chart {
    let bar = |(variant, found): &(Variant, &Measured)| {
        let metric = found.metrics.get("latency_ms_stddev")?;
        Some(Bar {
            style: style(*variant),
            value: metric.median,
            range: Some((metric.min, metric.max)),
        })
    };
    Chart {
        title: format!("{}: deviation of the latency.", workload.name()),
        note: "How unlike each other the waits are. Median and range of the rounds.".into(),
        kind: Kind::Bars {
            unit: "ms".into(),
            bars: found.iter().filter_map(bar).collect(),
            log: true,
        },
    }
}

fn shares_chart(workload: Workload, found: &[(Variant, &Measured)]) -> Chart {
    let row = |(variant, found): &(Variant, &Measured)| (label(*variant).to_owned(), shares(found));
    Chart {
        title: format!("{}: who answered.", workload.name()),
        note: "Share of each of the four workers, the busiest of each round first.".into(),
        kind: Kind::Shares {
            rows: found.iter().map(row).collect(),
        },
    }
}

/// What the numbers say, whichever way they fell.
fn meaning(outcome: &Outcome) -> Vec<String> {
    let lost = [Workload::Stopped, Workload::Busy].map(|workload| lost_meaning(outcome, workload));
    std::iter::once(stuck_meaning(outcome))
        .chain(lost)
        .chain([shares_meaning(outcome)])
        .flatten()
        .collect()
}

fn median(outcome: &Outcome, workload: Workload, way: &str, metric: &str) -> Option<f64> {
    outcome.median(&format!("{}/{way}", workload.name()), metric)
}

fn stuck_meaning(outcome: &Outcome) -> Option<String> {
    let mean = |way: Way| median(outcome, Workload::Stuck, way.name(), "latency_ms_mean");
    Some(format!(
        "While some requests keep their workers from everything else for a tenth of a second, a client waits {} ms in the mean with nginx as it is, {} ms with accept_mutex, {} ms with reuseport; attaching to that makes it {} ms, and {} ms with rescue.",
        number(mean(Way::Default)?),
        number(mean(Way::AcceptMutex)?),
        number(mean(Way::Reuseport)?),
        number(mean(Way::Attach)?),
        number(mean(Way::AttachRescue)?),
    ))
}

fn lost_meaning(outcome: &Outcome, workload: Workload) -> Option<String> {
    let p99 = |way: &str| median(outcome, workload, way, "latency_ms_p99");
    let what = if workload == Workload::Stopped {
        "stopped"
    } else {
        "computing"
    };
    Some(format!(
        "With one of four workers {what}, one request in a hundred waits at least {} ms with reuseport alone, {} ms attached to, {} ms with rescue; in a healthy group it is {} ms.",
        number(p99(Way::Reuseport.name())?),
        number(p99(Way::Attach.name())?),
        number(p99(Way::AttachRescue.name())?),
        number(p99(HEALTHY)?),
    ))
}

fn shares_meaning(outcome: &Outcome) -> Option<String> {
    let busiest = |way: Way| {
        let name = format!("stuck/{}", way.name());
        Some(stats::max(&shares(outcome.variant(&name)?)) * 100.0)
    };
    Some(format!(
        "The busiest of the four workers answered {:.0} % of the stuck workload's requests with nginx as it is, {:.0} % with accept_mutex, {:.0} % with reuseport, and {:.0} % with reuseport attached to, with rescue.",
        busiest(Way::Default)?,
        busiest(Way::AcceptMutex)?,
        busiest(Way::Reuseport)?,
        busiest(Way::AttachRescue)?,
    ))
}
