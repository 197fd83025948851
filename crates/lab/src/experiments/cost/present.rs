//! Tables, charts and words.

use wakeone_control::policy::Policy;

use super::judge;
use super::loads::{self, Load, rate_metric, sleeps_metric};
use super::{SLOTS, UNDER_LOAD, agents, cell_name, programs};
use crate::present::{Bar, Block, Chart, Row, Style, Table, cell, number};
use crate::result::Outcome;
use crate::views;

/// Everything for a reader.
pub fn blocks(outcome: &Outcome) -> Vec<Block> {
    let mut blocks = views::meaning(meaning(outcome));
    blocks.extend(in_slices(outcome).map(Block::Table));
    blocks.extend(ratios(outcome).map(Block::Chart));
    blocks.extend(by_slots(outcome).map(Block::Table));
    blocks.extend(growth(outcome).map(Block::Chart));
    blocks.extend(at_rest(outcome).map(Block::Table));
    blocks.extend(outcome.left_out().map(Block::Paragraph));
    blocks
}

fn meaning(outcome: &Outcome) -> Option<String> {
    let steered = judge::surest(outcome, Load::Steering, ("steered", "hash"))?;
    let verdict = if steered.low >= 0.98 {
        "at most a fiftieth of the connections"
    } else if steered.high < 0.98 {
        "more than a fiftieth of the connections"
    } else {
        "about a fiftieth of the connections, or less: this run cannot tell"
    };
    let of_runs = runs(outcome).unwrap_or_default();
    Some(format!(
        "Steering costs {verdict}: {} times as many {} as by the kernel's hash, where nothing but the steering is switched off and on.{of_runs}",
        steered.shown(),
        steered.per.name()
    ))
}

/// The time that the programs take of a connection.
fn runs(outcome: &Outcome) -> Option<String> {
    let of = |metric: &str| outcome.median(UNDER_LOAD, metric);
    let (dispatch, runs) = (of("dispatch_ns")?, of("dispatch_runs_per_connection")?);
    let (sock_ops, ends) = (of("sock_ops_ns")?, of("sock_ops_runs_per_connection")?);
    Some(format!(
        " Under load its programs take {} ns ({} runs a connection) and {} ns ({} runs): {} µs of a whole connection, what the kernel's statistics themselves take included.",
        number(dispatch),
        number(runs),
        number(sock_ops),
        number(ends),
        number((dispatch * runs + sock_ops * ends) / 1000.0)
    ))
}

fn in_slices(outcome: &Outcome) -> Option<Table> {
    let row = |c: &crate::slices::Contrast| {
        let rate = |arm: &str| cell(outcome.median(&c.variant, &rate_metric(arm)));
        let sleeps = |arm: &str| {
            let median = outcome.median(&c.variant, &sleeps_metric(arm));
            median.map_or_else(|| "–".into(), |sleeps| format!("{sleeps:.2}"))
        };
        let cells = [
            c.per.name().into(),
            format!("{:.3}", c.ratio),
            format!("{:.3} to {:.3}", c.low, c.high),
            c.slices.to_string(),
            rate(&c.a),
            rate(&c.b),
            sleeps(&c.a),
            sleeps(&c.b),
        ];
        Row::named(format!("{}: {} / {}", c.variant, c.a, c.b), cells)
    };
    let head = [
        "for",
        "ratio",
        "95 % interval",
        "slices",
        "above /s",
        "below /s",
        "sleeps above",
        "sleeps below",
    ];
    (!outcome.contrasts.is_empty()).then(|| Table::new(
        "Connections (connect, accept, reply, close) of two arms that took turns, and how often a process of the server slept for one.",
        head,
        outcome.contrasts.iter().map(row),
    ))
}

fn ratios(outcome: &Outcome) -> Option<Chart> {
    let bar = |c: &crate::slices::Contrast| {
        let colour = loads::ALL.iter().position(|l| l.variant() == c.variant);
        Bar {
            style: Style::ours(
                format!("{} / {}, {}", c.a, c.b, c.per.name()),
                colour.unwrap_or(0),
            ),
            value: c.ratio,
            range: Some((c.low, c.high)),
        }
    };
    let bars: Vec<Bar> = outcome.contrasts.iter().map(bar).collect();
    let note =
        "1 costs nothing. The range is the 95 % interval; a colour is a server and its load.";
    let title = "Connections, as a ratio of two arms.";
    (!bars.is_empty()).then(|| Chart::bars(title, note, ("", false), bars))
}

/// The numbers of slots that were measured.
fn cells(outcome: &Outcome) -> Vec<usize> {
    let mut all = SLOTS.to_vec();
    all.retain(|slots| outcome.variant(&cell_name(*slots)).is_some());
    all
}

fn by_slots(outcome: &Outcome) -> Option<Table> {
    let cells = cells(outcome);
    let row = |title: &str, metric: &str| {
        let at = |slots: &usize| cell(outcome.median(&cell_name(*slots), metric));
        Row::named(title, cells.iter().map(at))
    };
    let policies = Policy::ALL.map(|policy| row(policy.name(), &programs::metric(policy)));
    let others = [
        row("a program that does nothing", "empty_ns"),
        row("one that only selects, by the hash", "select_ns"),
        row("counting (sock_ops)", "sock_ops_ns"),
        row(
            "runs of it for a connection",
            "sock_ops_runs_per_connection",
        ),
    ];
    (!cells.is_empty()).then(|| Table::new(
        "ns a run by policy and slots. Each has in it what the kernel's statistics take themselves: the time of a program that does nothing.",
        cells.iter().map(|slots| format!("{slots} slots")),
        policies.into_iter().chain(others),
    ))
}

/// The CPU time of what steers.
fn at_rest(outcome: &Outcome) -> Option<Table> {
    let row = |agent: &agents::Agent| {
        let share = outcome.median(agent.variant, agents::METRIC)?;
        let load = match agent.rate_per_s {
            None => "nobody".into(),
            Some(rate) => format!("{rate}/s"),
        };
        let cells = [agent.workers.to_string(), load, format!("{share:.3}")];
        Some(Row::named(agent.variant, cells))
    };
    let rows: Vec<Row> = agents::ALL.iter().filter_map(row).collect();
    (!rows.is_empty()).then(|| {
        Table::new(
            "Share of one CPU, in %, that steering takes while nobody comes, and while connections come.",
            ["workers", "connections", "% of a CPU"],
            rows,
        )
    })
}

fn growth(outcome: &Outcome) -> Option<Chart> {
    let cells = cells(outcome);
    let line = |policy: Policy| {
        let point = |slots: &usize| {
            let ns = outcome.median(&cell_name(*slots), &programs::metric(policy))?;
            Some((*slots as f64, ns))
        };
        let points = cells.iter().filter_map(point).collect();
        (Style::ours(policy.name(), policy.number() as usize), points)
    };
    (cells.len() > 1).then(|| {
        Chart::lines(
            "Time of a choice.",
            "Both axes are logarithmic. Flat is independent of how many workers there are.",
            ("slots", "ns a run", true),
            Policy::ALL.map(line),
        )
    })
}
