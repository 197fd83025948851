//! The result for a reader.

use super::{CARD, CONNECTIONS, WAYS, WORKERS, arm_name};
use crate::present::{Bar, Block, Chart, Kind, Row, Style, Table, number};
use crate::published::Published;
use crate::result::Outcome;
use crate::stats;
use crate::ways::Way;

pub fn present(outcome: &Outcome) -> Vec<Block> {
    let published = Published::parse(CARD.published);
    let mut blocks = vec![Block::Heading("What it means".into())];
    blocks.extend(meaning(outcome).map(Block::Paragraph));
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
    let values = |w: usize| outcome.values(&arm_name(way), &format!("share_worker_{w}"));
    (0..WORKERS)
        .map(values)
        .filter(|v| !v.is_empty())
        .map(stats::mean)
        .collect()
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
    let mut head: Vec<String> = vec![String::new()];
    head.extend((1..=CONNECTIONS).map(|n| format!("{n}.")));
    head.push("most, all rounds".into());
    let mut rows = Vec::new();
    for series in ["blocking accept", "epoll and accept"] {
        let mut cells = vec![format!("(published) {series}")];
        let workers = published.curve(series, "answered_by");
        cells.extend(workers.iter().map(|(_, worker)| format!("{worker:.0}")));
        let most = (0..WORKERS)
            .map(|w| workers.iter().filter(|p| p.1 == w as f64).count())
            .max();
        cells.push(most.unwrap_or(0).to_string());
        rows.push(Row::published(cells));
    }
    for way in WAYS {
        let most = outcome.values(&arm_name(way), "most_of_six");
        if most.is_empty() {
            continue;
        }
        let mut cells = vec![way.name().to_owned()];
        cells.extend(sequence(outcome, way));
        cells.push(match (stats::min(most), stats::max(most)) {
            (low, high) if low == high => number(low),
            (low, high) => format!("{low:.0} to {high:.0}"),
        });
        rows.push(Row::ours(cells));
    }
    Table {
        caption: "Which worker answered the first, second … connection of the first round.".into(),
        head,
        rows,
    }
}

fn answers(outcome: &Outcome) -> Table {
    let rows = WAYS.iter().filter_map(|way| {
        let shares = shares(outcome, *way);
        let over = outcome.median(&arm_name(*way), "share_max_over_mean")?;
        let mut cells = vec![way.name().to_owned()];
        cells.extend(shares.iter().map(|s| format!("{:.1} %", s * 100.0)));
        cells.push(number(over));
        Some(Row::ours(cells))
    });
    Table {
        caption: "Sustained load: share of the answers of each worker, all rounds.".into(),
        head: ["", "worker 0", "worker 1", "worker 2", "max/mean"]
            .map(str::to_owned)
            .into(),
        rows: rows.collect(),
    }
}

fn cpu_table(outcome: &Outcome, published: &Published) -> Table {
    let dash = || "–".to_owned();
    let mut rows = Vec::new();
    for series in ["shared socket", "reuseport"] {
        let of = |metric: &str| {
            let figures = &published.0;
            let figure = figures
                .iter()
                .find(|f| f.series == series && f.metric == metric);
            figure.map_or_else(dash, |f| f.value.map_or_else(|| f.note.clone(), percent))
        };
        let mut cells = vec![format!("(published) {series}"), dash(), dash(), dash()];
        cells.extend([of("cpu_busiest"), of("cpu_idlest"), dash()]);
        rows.push(Row::published(cells));
    }
    rows.extend(WAYS.iter().filter_map(|way| {
        let median = |metric: &str| outcome.median(&arm_name(*way), metric);
        let over = median("cpu_max_over_mean")?;
        let each = (0..WORKERS).map(|w| median(&format!("cpu_worker_{w}")));
        let ends = ["cpu_busiest", "cpu_idlest"].map(median);
        let mut cells = vec![way.name().to_owned()];
        cells.extend(each.chain(ends).map(|v| v.map_or_else(dash, percent)));
        cells.push(number(over));
        Some(Row::ours(cells))
    }));
    let head = [
        "", "worker 0", "worker 1", "worker 2", "busiest", "idlest", "max/mean",
    ];
    Table {
        caption: "Sustained load: CPU of each worker process, and of the busiest and the idlest of each round; medians.".into(),
        head: head.map(str::to_owned).into(),
        rows,
    }
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
    Chart {
        title: "CPU of the idlest worker, in percent of that of the busiest.".into(),
        note: "100 is even. The source shows only “almost no load” for the idlest worker of a shared socket.".into(),
        kind: Kind::Bars {
            unit: "%".into(),
            bars,
            log: false,
        },
    }
}

fn meaning(outcome: &Outcome) -> Option<String> {
    let six = |way: Way| outcome.median(&arm_name(way), "most_of_six");
    let over = |way: Way| outcome.median(&arm_name(way), "cpu_max_over_mean");
    let (accept, exclusive) = (six(Way::SharedAccept)?, six(Way::SharedEpollExclusive)?);
    let holds = match (accept, exclusive) {
        (2.0, 6.0) => "Both findings of the source hold on this kernel: blocking accept goes round (2/2/2), epoll gives all six connections to the worker that slept last.".to_owned(),
        (a, e) => format!("The source's findings are not both seen here: of six connections one worker got {a:.0} with blocking accept (published: 2) and {e:.0} with EPOLLEXCLUSIVE (published: 6)."),
    };
    let rotate = match six(Way::SharedEpollRotate)? {
        2.0 => "Registering the listener anew after each accept makes epoll go round as well, with no change to the kernel.".to_owned(),
        n => format!("Registering the listener anew after each accept did not make epoll go round in this run (one worker got {n:.0})."),
    };
    let ours = over(Way::LeastConnections).map_or_else(String::new, |ours| {
        format!(
            " When connections keep coming, the busiest worker has {} times the mean CPU under EPOLLEXCLUSIVE, {} under the hash and {} under least-connections.",
            number(over(Way::SharedEpollExclusive).unwrap_or(f64::NAN)),
            number(over(Way::ReuseportHash).unwrap_or(f64::NAN)),
            number(ours)
        )
    });
    let ring = six(Way::SharedIoUring).map_or_else(
        || " io_uring was not measured: this kernel does not let us.".to_owned(),
        |most| {
            let over = over(Way::SharedIoUring).unwrap_or(f64::NAN);
            format!(
                " With io_uring's multishot accept on a shared socket the favourite got {} connections, and the busiest worker has {} times the mean CPU.",
                if most == 6.0 { "all six".into() } else { format!("{most:.0} of six") },
                number(over)
            )
        },
    );
    Some(format!("{holds} {rotate}{ours}{ring}"))
}
