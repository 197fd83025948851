//! The result for a reader.

use super::{CARD, COMPARED, LOCKS, MODES, Mode, SOCKET_LOCKS, THREADS, Variant, WAYS, Way};
use super::{datagrams_each, together};
use crate::present::{Block, Chart, Kind, Row, Style, Table, number};
use crate::published::Published;
use crate::result::Outcome;
use crate::views::{self, Of};

/// The source's series, our name of its lock, and its table.
pub const PUBLISHED: [(&str, &str, &str); 3] = [
    ("receive queue, accounting", "receive_queue", "I"),
    ("socket, accounting", "socket", "II"),
    ("receive queue, no accounting", "receive_queue", "III"),
];

pub fn present(outcome: &Outcome) -> Vec<Block> {
    let said = std::iter::once(conclusions(outcome));
    let mut blocks = views::meaning(said.chain(outcome.left_out()));
    blocks.push(Block::Heading("As published".into()));
    blocks.push(Block::Table(published()));
    for mode in MODES {
        if measured(outcome, mode).next().is_none() {
            continue;
        }
        blocks.push(Block::Heading(mode.title().into()));
        blocks.extend(meaning(outcome, mode).map(Block::Paragraph));
        for lock in LOCKS {
            blocks.extend(lock_table(outcome, mode, lock).map(Block::Table));
        }
        blocks.push(Block::Table(details(outcome, mode)));
        blocks.extend(chart(outcome, mode).map(Block::Chart));
    }
    blocks
}

fn measured(outcome: &Outcome, mode: Mode) -> impl Iterator<Item = Variant> {
    super::variants()
        .into_iter()
        .filter(move |v| v.mode == mode && outcome.variant(&v.to_string()).is_some())
}

/// The conclusions that this machine allows.
fn conclusions(outcome: &Outcome) -> String {
    let cpus = outcome.environment.cpus as usize;
    let waiters = cpus.saturating_sub(1);
    format!(
        "{cpus} CPUs, one of which sends; the source had four. No more than {waiters} can spin for a lock while another holds it. \
         What can be seen here is which locks are waited for, how the number of readers changes that, and that a socket each changes it; \
         not how long the queue before a lock gets where more processors read. Acquisitions and hold times are not to be had: \
         the kernel counts them only where it was built with CONFIG_LOCK_STAT, as the source built it. \
         CPU time and context switches a datagram stand beside the contentions, as what all of it costs together; cycles would need counters that a virtual machine may not have."
    )
}

/// The source's tables: times and counts as printed, the contentions for a million datagrams, and waits over hold times.
fn published() -> Table {
    let published = Published::parse(CARD.published);
    let columns = ["acquisitions", "hold_us_avg", "contentions", "wait_us_avg"];
    let mut rows = Vec::new();
    for (series, _, table) in PUBLISHED {
        for threads in THREADS {
            let at = |metric: &str| {
                let curve = published.curve(series, metric);
                let found = curve.into_iter().find(|(x, _)| *x == threads as f64);
                found.map(|(_, value)| value)
            };
            let cell = |value: Option<f64>| value.map_or_else(|| "–".into(), number);
            let lock = series.split(',').next().unwrap_or_default();
            let mut cells = vec![format!("{table}: {lock}"), threads.to_string()];
            cells.extend(columns.map(|metric| cell(at(metric))));
            cells.push(cell(at("contentions").map(|n| a_million(n, threads))));
            let (wait, hold) = (at("wait_us_total"), at("hold_us_total"));
            cells.push(cell(wait.zip(hold).map(|(wait, hold)| wait / hold * 100.0)));
            rows.push(Row::published(cells));
        }
    }
    let head = [
        "table",
        "reading",
        "acquisitions",
        "held µs",
        "contentions",
        "waited µs",
        "a million",
        "waited/held %",
    ];
    Table {
        caption: "Averages are of an acquisition and of a contention, and the contentions a million datagrams beside. Table III is without memory accounting. The heads of the source's tables say ms; see the method.".into(),
        head: head.map(str::to_owned).to_vec(),
        rows,
    }
}

/// The source sent 500,000 datagrams for each thread.
fn a_million(contentions: f64, threads: usize) -> f64 {
    contentions / (datagrams_each(false) * threads as u64) as f64 * 1e6
}

fn lock_title(lock: &str) -> &'static str {
    match lock {
        "receive_queue" => "sk_receive_queue.lock, where datagrams are put",
        "reader_queue" => "reader_queue.lock, where readers have them from",
        "socket" => "sk_lock.slock, of the socket as a whole",
        "wait_queue" => "sk_wq.wait.lock, where readers sleep and are woken",
        _ => "all other locks that the readers wait for",
    }
}

fn lock_table(outcome: &Outcome, mode: Mode, lock: &str) -> Option<Table> {
    let with = |way, threads| Variant { mode, way, threads };
    let of = |way, threads, metric: &str| {
        let metric = format!("{lock}_{metric}");
        outcome.median(&with(way, threads).to_string(), &metric)
    };
    let row = |way: Way, what: &str, metric: &str| {
        let values = THREADS.map(|threads| of(way, threads, metric));
        let cells = values.map(|v| v.map_or_else(|| "–".into(), number));
        let label = format!("{}, {what}", way.name());
        let cells = std::iter::once(label).chain(cells).collect();
        values.iter().any(Option::is_some).then(|| Row::ours(cells))
    };
    let mut rows = Vec::new();
    for way in WAYS {
        rows.extend(row(way, "contentions", "contentions_per_million"));
        rows.extend(row(way, "wait µs", "wait_us_avg"));
    }
    if rows.is_empty() {
        return None;
    }
    let source = Published::parse(CARD.published);
    for (series, _, table) in PUBLISHED.iter().filter(|(_, of, _)| *of == lock) {
        let curve = |metric| source.curve(series, metric);
        let cells = |what: &str, values: Vec<String>| {
            let label = format!("table {table}, {what}");
            Row::published(std::iter::once(label).chain(values).collect())
        };
        let contentions = curve("contentions").into_iter();
        let contentions = contentions.map(|(x, n)| number(a_million(n, x as usize)));
        let waits = curve("wait_us_avg").into_iter().map(|(_, us)| number(us));
        rows.push(cells("contentions", contentions.collect()));
        rows.push(cells("wait µs", waits.collect()));
    }
    let mut head = vec![String::new()];
    head.extend(THREADS.map(|n| format!("{n} reading")));
    Some(Table {
        caption: format!(
            "{}: contentions a million datagrams read, and the average wait of one; medians of the rounds.",
            lock_title(lock)
        ),
        head,
        rows,
    })
}

fn meaning(outcome: &Outcome, mode: Mode) -> Option<String> {
    let with = |way| Variant {
        mode,
        way,
        threads: COMPARED,
    };
    let contended = |way| together(outcome, with(way), &SOCKET_LOCKS, "contentions_per_million");
    let share = |way| together(outcome, with(way), &SOCKET_LOCKS, "wait_share");
    let other = |way| together(outcome, with(way), &["other"], "contentions_per_million");
    Some(format!(
        "{COMPARED} readers: for the locks of one socket somebody waits {} times a million datagrams, {} % of the time in all; with a socket each, {} times and {} %. For all other locks the readers wait {} times and {} times.",
        number(contended(Way::Socket)?),
        number(share(Way::Socket)? * 100.0),
        number(contended(Way::Each)?),
        number(share(Way::Each)? * 100.0),
        number(other(Way::Socket)?),
        number(other(Way::Each)?),
    ))
}

fn details(outcome: &Outcome, mode: Mode) -> Table {
    let columns = [
        ("read/s", Of::Median("rate_per_s")),
        ("lost", Of::Median("lost")),
        ("CPU µs each", Of::Median("reader_cpu_us")),
        ("switches each", Of::Median("switches")),
    ];
    let row = |variant: Variant| {
        let label = format!("{}, {} reading", variant.way.name(), variant.threads);
        Some((label, outcome.variant(&variant.to_string())?))
    };
    let caption = "What it costs: CPU time and switches are the readers', a datagram.";
    views::table(caption, &columns, measured(outcome, mode).filter_map(row))
}

/// Contentions of all the sockets' locks over the readers, beside the source's two locks together.
fn chart(outcome: &Outcome, mode: Mode) -> Option<Chart> {
    let ours = |way: Way| {
        let at = |threads: usize| {
            let variant = Variant { mode, way, threads };
            let metric = "contentions_per_million";
            Some((
                threads as f64,
                together(outcome, variant, &SOCKET_LOCKS, metric)?,
            ))
        };
        let points = THREADS.into_iter().filter_map(at).collect();
        (Style::ours(way.name(), way.colour()), points)
    };
    let source = Published::parse(CARD.published);
    let published = |(series, _, table): (&str, &str, &str)| {
        let curve = source.curve(series, "contentions").into_iter();
        let points = curve.map(|(x, n)| (x, a_million(n, x as usize))).collect();
        (Style::published(format!("table {table}"), 0), points)
    };
    let mut series: Vec<(Style, Vec<(f64, f64)>)> = WAYS.map(ours).to_vec();
    series.retain(|(_, points)| !points.is_empty());
    if series.is_empty() {
        return None;
    }
    series.extend(PUBLISHED.map(published));
    Some(Chart {
        title: format!("{}.", mode.title()),
        note: "Lower is better. Ours are all locks of the sockets together, the source's one lock each.".into(),
        kind: Kind::Lines {
            x: "threads that read".into(),
            y: "contentions a million datagrams".into(),
            log: false,
            series,
        },
    })
}
