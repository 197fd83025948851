//! The result for a reader.

use super::{CARD, CONNECTIONS, WAYS, WORKERS, arm_name};
use crate::present::{Bar, Block, Chart, Kind, Row, Style, Table, number};
use crate::published::Published;
use crate::result::Outcome;
use crate::trials::pooled_shares;
use crate::ways::Way;
use crate::{stats, views};

pub fn present(outcome: &Outcome) -> Vec<Block> {
    let published = Published::parse(CARD.published);
    let mut blocks = views::meaning(
        ["six", "load", "ring"]
            .map(|word| CARD.say(word, outcome, &[]))
            .into_iter()
            .flatten(),
    );
    blocks.push(Block::Table(one_by_one(outcome, &published)));
    blocks.push(Block::Table(answers(outcome)));
    blocks.push(Block::Table(cpu_table(outcome, &published)));
    blocks.push(Block::Chart(Chart {
        title: "Who answered under the sustained load.".into(),
        note: "Share of each of the three workers, all rounds.".into(),
        kind: Kind::Shares {
            rows: WAYS
                .iter()
                .map(|way| (way.name().into(), shares(outcome, *way)))
                .filter(|r| !r.1.is_empty())
                .collect(),
        },
    }));
    blocks.push(Block::Chart(cpu(outcome, &published)));
    blocks
}

fn shares(outcome: &Outcome, way: Way) -> Vec<f64> {
    outcome
        .variant(&arm_name(way))
        .map_or_else(Vec::new, pooled_shares)
}

/// The first round's workers in the order of the connections, as the source prints one run.
fn sequence(outcome: &Outcome, way: Way) -> Vec<String> {
    let who = |n: usize| {
        outcome
            .values(&arm_name(way), &format!("answered_by_{n}"))
            .first()
            .copied()
    };
    (1..=CONNECTIONS)
        .map(|n| who(n).map_or_else(|| "–".into(), |w| format!("{w:.0}")))
        .collect()
}

fn one_by_one(outcome: &Outcome, published: &Published) -> Table {
    let said = |series: &str| {
        let workers = published.curve(series, "answered_by");
        let each = workers.iter().map(|(_, worker)| format!("{worker:.0}"));
        let got = |w: usize| workers.iter().filter(|p| p.1 == w as f64).count();
        let most = (0..WORKERS).map(got).max().unwrap_or(0).to_string();
        let name = std::iter::once(format!("(published) {series}"));
        Row::published(name.chain(each).chain([most]).collect())
    };
    let row = |way: Way| {
        let most = outcome.values(&arm_name(way), "most_of_six");
        let range = match (stats::least(most)?, stats::most(most)?) {
            (low, high) if low == high => number(low),
            (low, high) => format!("{low:.0} to {high:.0}"),
        };
        let cells = sequence(outcome, way).into_iter().chain([range]);
        Some(Row::named(way.name(), cells))
    };
    let places = (1..=CONNECTIONS).map(|n| format!("{n}."));
    let theirs = ["blocking accept", "epoll and accept"].map(said);
    Table::new(
        "Which worker answered the first, second … connection of the first round.",
        places.chain(["most, all rounds".into()]),
        theirs.into_iter().chain(WAYS.into_iter().filter_map(row)),
    )
}

fn answers(outcome: &Outcome) -> Table {
    let rows = WAYS.iter().filter_map(|way| {
        let shares = shares(outcome, *way);
        let over = outcome.median(&arm_name(*way), "share_max_over_mean")?;
        let cells = shares.iter().map(|s| format!("{:.1} %", s * 100.0));
        Some(Row::named(way.name(), cells.chain([number(over)])))
    });
    Table::new(
        "Sustained load: share of the answers of each worker, all rounds.",
        ["worker 0", "worker 1", "worker 2", "max/mean"],
        rows,
    )
}

fn cpu_table(outcome: &Outcome, published: &Published) -> Table {
    let dash = || "–".to_owned();
    let said = |series: &str| {
        let of = |metric: &str| {
            let mut figures = published.0.iter();
            let figure = figures.find(|f| f.series == series && f.metric == metric);
            figure.map_or_else(dash, |f| f.value.map_or_else(|| f.note.clone(), percent))
        };
        let mut cells = vec![format!("(published) {series}"), dash(), dash(), dash()];
        cells.extend([of("cpu_busiest"), of("cpu_idlest"), dash()]);
        Row::published(cells)
    };
    let row = |way: &Way| {
        let median = |metric: &str| outcome.median(&arm_name(*way), metric);
        let over = median("cpu_max_over_mean")?;
        let each = (0..WORKERS).map(|w| median(&format!("cpu_worker_{w}")));
        let ends = ["cpu_busiest", "cpu_idlest"].map(median);
        let cells = each.chain(ends).map(|v| v.map_or_else(dash, percent));
        Some(Row::named(way.name(), cells.chain([number(over)])))
    };
    let theirs = ["shared socket", "reuseport"].map(said);
    Table::new(
        "Sustained load: CPU of each worker process, and of the busiest and the idlest of each round; medians.",
        [
            "worker 0", "worker 1", "worker 2", "busiest", "idlest", "max/mean",
        ],
        theirs.into_iter().chain(WAYS.iter().filter_map(row)),
    )
}

fn percent(value: f64) -> String {
    format!("{} %", number(value))
}

fn cpu(outcome: &Outcome, published: &Published) -> Chart {
    let ends = published
        .value("reuseport", "cpu_busiest")
        .zip(published.value("reuseport", "cpu_idlest"));
    let mut bars: Vec<Bar> = Vec::new();
    if let Some((busiest, idlest)) = ends {
        bars.push(Bar {
            style: Style::published("published: reuseport", Way::ReuseportHash.colour()),
            value: idlest / busiest * 100.0,
            range: None,
        });
    }
    bars.extend(WAYS.iter().filter_map(|way| {
        let values = |metric| outcome.values(&arm_name(*way), metric);
        // That of the busiest is never 0; that of the idlest may be.
        let ratios = stats::paired_ratios(values("cpu_idlest"), values("cpu_busiest"));
        (!ratios.is_empty()).then(|| Bar {
            style: Style::ours(way.name(), way.colour()),
            value: stats::median(&ratios) * 100.0,
            range: Some((stats::min(&ratios) * 100.0, stats::max(&ratios) * 100.0)),
        })
    }));
    Chart::bars(
        "CPU of the idlest worker, in percent of that of the busiest.",
        "100 is even. The source shows only “almost no load” for the idlest worker of a shared socket.",
        ("%", false),
        bars,
    )
}
