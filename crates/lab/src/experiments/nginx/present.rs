//! The result for a reader.

use super::CARD;
use super::servers::Kind as Way;
use super::workload::{HEALTHY, Variant, WORKLOADS, Workload};
use crate::experiments::tills::workload::WORKERS;
use crate::present::{Block, Chart, Kind, Style, Table};
use crate::result::{Outcome, Variant as Measured};
use crate::stats;
use crate::views::{self, Of};

pub fn present(outcome: &Outcome) -> Vec<Block> {
    let mut blocks = views::meaning(meaning(outcome));
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
        ("avg", Of::Median("latency_ms_mean")),
        ("dev", Of::Median("latency_ms_stddev")),
        ("median", Of::Median("latency_ms_p50")),
        ("p99", Of::Median("latency_ms_p99")),
        ("max", Of::Median("latency_ms_max")),
        ("requests/s", Of::Median("throughput_per_s")),
        ("busiest/mean", Of::Median("share_max_over_mean")),
        ("errors", Of::Sum("errors")),
    ];
    // A reload has a count of its own.
    let lossy = found.iter().all(|(_, v)| !v.metrics.contains_key("errors"));
    let (all, errors) = columns.split_at(columns.len() - 1);
    let last = if lossy {
        &[("errors", Of::Sum("lost"))]
    } else {
        errors
    };
    let caption = "Latency in ms; medians of the rounds, errors of all.";
    let rows = found.iter().map(|(variant, v)| (label(*variant), *v));
    views::table(caption, &[all, last].concat(), rows)
}

fn percentiles(workload: Workload, found: &[(Variant, &Measured)]) -> Chart {
    views::percentiles(
        workload.name(),
        found.iter().map(|(v, found)| (style(*v), *found)),
    )
}

fn deviations(workload: Workload, found: &[(Variant, &Measured)]) -> Chart {
    let styled = found.iter().map(|(v, found)| (style(*v), *found));
    Chart::bars(
        format!("{}: deviation of the latency.", workload.name()),
        "How unlike each other the waits are. Median and range of the rounds.",
        ("ms", true),
        views::bars(styled, "latency_ms_stddev"),
    )
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

/// The conclusions. Each sentence follows from the numbers, whichever way they fell.
fn meaning(outcome: &Outcome) -> impl Iterator<Item = String> {
    let lost = [Workload::Stuck, Workload::Stopped, Workload::Busy];
    let told = lost.map(|workload| CARD.say(workload.name(), outcome, &[]));
    told.into_iter().chain([shares_meaning(outcome)]).flatten()
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
