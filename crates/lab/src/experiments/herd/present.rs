//! The result for a reader.

use wakeone_waitqueue::Policy;

use super::waiters::{self, SELECTING, Waiting};
use super::{CARD, PUBLISHED, curve, growth_of, measured};
use crate::present::{Block, Chart, Row, Style, Table, number};
use crate::published::Published;
use crate::result::Outcome;
use crate::{stats, views};

/// The ways of waiting in the kernel, and those in our own queue.
const KERNEL: std::ops::Range<usize> = 0..3;
const OURS: std::ops::Range<usize> = 3..7;
/// Those of the kernel of the papers.
const PATCHED: std::ops::Range<usize> = 7..11;

pub fn present(outcome: &Outcome) -> Vec<Block> {
    let published = Published::parse(CARD.published);
    let mut blocks = views::meaning([kernel_today(outcome, &published), policies_today(outcome)]);
    blocks.extend([
        Block::Table(settle_table(
            outcome,
            &published,
            KERNEL,
            "Settle time in µs: published in 2000 (Kernel, Taskex, Wake1), and of today's kernel (median of the taps).",
        )),
        Block::Chart(settle_chart(
            outcome,
            &published,
            KERNEL,
            "Time until the kernel's wait queue has settled.",
        )),
        Block::Table(settle_table(
            outcome,
            &published,
            OURS,
            "Settle time in µs: published in 2000 (Kernel, Taskex, Wake1), and of the paper's policies in our wait queue (median of the taps).",
        )),
        Block::Chart(settle_chart(
            outcome,
            &published,
            OURS,
            "Time until our wait queue has settled, under the paper's policies.",
        )),
        Block::Table(growth_table(outcome, &published)),
        Block::Table(wakeups_table(outcome, KERNEL, "today's kernel")),
        Block::Table(wakeups_table(outcome, OURS, "our wait queue")),
        Block::Chart(wakeups_chart(outcome)),
    ]);
    if measured(outcome).any(|w| matches!(w, Waiting::Patched(_))) {
        let first = blocks.iter().position(|b| matches!(b, Block::Table(_)));
        let first = first.unwrap_or(blocks.len());
        blocks.splice(first..first, patched(outcome, &published));
    }
    blocks
}

/// The paper's policies in the kernel, beside all others.
fn patched(outcome: &Outcome, published: &Published) -> [Block; 4] {
    [
        Block::Table(wakeups_table(outcome, PATCHED, PAPERS)),
        Block::Chart(wakeups_chart(outcome)),
        Block::Table(settle_table(
            outcome,
            published,
            PATCHED,
            "Settle time in µs: published in 2000 (Kernel, Taskex, Wake1), and of the paper's policies in the kernel (median of the taps). An emulated machine is many times slower: compare how it grows.",
        )),
        Block::Chart(settle_chart(
            outcome,
            published,
            0..PATCHED.end,
            "Time until the wait queue has settled: published, today's kernel, our wait queue and the kernel of the papers.",
        )),
    ]
}

/// The waker in a caption: threads that waited for each other at the socket's lock do not count.
const PAPERS: &str = "the kernel of the papers itself";

/// Its place in the palette: the paper's series and what stands for it have the same.
fn colour(waiting: Waiting) -> usize {
    match waiting {
        Waiting::WakeAll | Waiting::Queue(Policy::WakeAll) => 5,
        Waiting::Exclusive | Waiting::Queue(Policy::WakeOne) => 1,
        Waiting::Accept | Waiting::Queue(Policy::TaskExclusive) => 0,
        Waiting::Queue(Policy::AlwaysWake) => 4,
        Waiting::Patched(Policy::WakeAll) => 7,
        Waiting::Patched(Policy::TaskExclusive) => 3,
        Waiting::Patched(Policy::WakeOne) => 2,
        Waiting::Patched(Policy::AlwaysWake) => 6,
    }
}

fn settle_chart(
    outcome: &Outcome,
    published: &Published,
    which: std::ops::Range<usize>,
    title: &str,
) -> Chart {
    let theirs = PUBLISHED.into_iter().map(|(name, waiting)| {
        let style = Style::published(format!("{name}, 2000"), colour(waiting));
        (style, published.curve(name, "settle_us"))
    });
    let ours = waiters::ALL[which].iter().map(|w| {
        let style = Style::ours(w.name(), colour(*w));
        (style, curve(outcome, *w, "settle_us"))
    });
    Chart::lines(
        title,
        "Dashed: the paper, 2000. Solid: here. Both axes are logarithmic.",
        ("waiting threads", "settle time, µs", true),
        theirs.chain(ours),
    )
}

fn wakeups_chart(outcome: &Outcome) -> Chart {
    let drawn = measured(outcome).map(|w| {
        let points = match w {
            Waiting::Patched(_) => curve(outcome, w, "woken_by_connection"),
            _ => curve(outcome, w, "wakeups_per_tap"),
        };
        // Our queue is the dashed twin of the kernel's: where both wake the same, one line would hide the other.
        let style = Style {
            published: matches!(w, Waiting::Queue(_)),
            ..Style::ours(w.name(), colour(w))
        };
        (style, points)
    });
    Chart::lines(
        "Wake-ups for one connection.",
        "Counted by the scheduler's own tracepoints. Solid: the kernel, today's and the papers' (patched). Dashed: our wait queue. Both axes are logarithmic.",
        ("waiting threads", "wake-ups a connection", true),
        drawn,
    )
}

fn settle_table(
    outcome: &Outcome,
    published: &Published,
    which: std::ops::Range<usize>,
    caption: &str,
) -> Table {
    let ways = &waiters::ALL[which];
    let theirs = PUBLISHED.iter().map(|(name, _)| (*name).to_owned());
    let head = theirs.chain(ways.iter().map(|w| short(*w)));
    let row = |x: f64| {
        let theirs = PUBLISHED.iter();
        let theirs = theirs.map(|(name, _)| at(&published.curve(name, "settle_us"), x));
        let ours = ways.iter().map(|w| at(&curve(outcome, *w, "settle_us"), x));
        Row::named(number(x), theirs.chain(ours))
    };
    let sizes = published.curve("Kernel", "settle_us");
    let table = Table::new(caption, head, sizes.into_iter().map(|p| row(p.0)));
    table.by("threads")
}

/// The name under a caption that already names the queue.
fn short(waiting: Waiting) -> String {
    let name = waiting.name().trim_start_matches("queue-");
    name.trim_start_matches("patched-").to_owned()
}

fn wakeups_table(outcome: &Outcome, which: std::ops::Range<usize>, whose: &str) -> Table {
    let ways = &waiters::ALL[which];
    let sizes: Vec<f64> = curve(outcome, ways[0], "wakeups_per_tap")
        .into_iter()
        .map(|p| p.0)
        .collect();
    let row = |x: f64| {
        let cells = ways.iter().map(|w| {
            let of = |metric| at(&curve(outcome, *w, metric), x);
            let switches = of("voluntary_switches_per_tap");
            match w {
                Waiting::Patched(_) => format!("{} ({switches})", of("woken_by_connection")),
                _ => format!("{} ({switches})", of("wakeups_per_tap")),
            }
        });
        Row::named(number(x), cells)
    };
    let caption = format!(
        "Threads woken for one connection by {whose}, as the scheduler's tracepoints say; in brackets voluntary switches from /proc as a check."
    );
    let head = ways.iter().map(|w| short(*w));
    Table::new(caption, head, sizes.into_iter().map(row)).by("threads")
}

/// The value of a curve at `x`, for a table.
fn at(curve: &[(f64, f64)], x: f64) -> String {
    curve
        .iter()
        .find(|p| p.0 == x)
        .map_or_else(|| "–".into(), |p| number(p.1))
}

fn growth_table(outcome: &Outcome, published: &Published) -> Table {
    let row = |name: String, points: Vec<(f64, f64)>| {
        let exponent = stats::growth_exponent(&points).map_or_else(|| "–".into(), exponent);
        let ends = points
            .first()
            .zip(points.last())
            .filter(|(a, b)| a.0 == 100.0 && b.0 == 1000.0);
        let ratio = ends.map_or_else(|| "–".into(), |(a, b)| number(b.1 / a.1));
        vec![name, exponent, ratio]
    };
    let mut rows: Vec<Row> = PUBLISHED
        .iter()
        .map(|(name, _)| {
            Row::published(row(
                format!("(published) {name}"),
                published.curve(name, "settle_us"),
            ))
        })
        .collect();
    rows.extend(
        measured(outcome).map(|w| Row::ours(row(w.name().into(), curve(outcome, w, "settle_us")))),
    );
    Table {
        caption: "Growth: e of settle ~ threads^e (1 is linear, 0 constant), and settle(1,000)/settle(100).".into(),
        head: ["", "e", "1,000/100"].map(str::to_owned).into(),
        rows,
    }
}

/// An exponent with two decimals; no minus before a zero.
fn exponent(value: f64) -> String {
    format!("{:.2}", (value * 100.0).round() / 100.0 + 0.0)
}

/// Wake-ups for one connection in the largest herd.
fn woken(outcome: &Outcome, waiting: Waiting) -> f64 {
    curve(outcome, waiting, "wakeups_per_tap")
        .last()
        .map_or(f64::NAN, |p| p.1)
}

/// Tells which of the paper's findings hold for today's kernel.
fn kernel_today(outcome: &Outcome, published: &Published) -> String {
    let theirs =
        stats::growth_exponent(&published.curve("Kernel", "settle_us")).unwrap_or(f64::NAN);
    let (Some(all), Some(exclusive), Some(accept)) = (
        growth_of(outcome, Waiting::WakeAll),
        growth_of(outcome, Waiting::Exclusive),
        growth_of(outcome, Waiting::Accept),
    ) else {
        return "Not all of the kernel's ways of waiting were measured.".into();
    };
    format!(
        "For who asks for all, without EPOLLEXCLUSIVE, the settle time grows as threads^{} (2000: threads^{}), and one connection wakes {} threads of the largest herd. With EPOLLEXCLUSIVE it grows as threads^{}, and {} are woken; in blocking accept as threads^{}, and {} are woken. The paper's two patches promised that it stays constant.",
        exponent(all),
        exponent(theirs),
        number(woken(outcome, Waiting::WakeAll)),
        exponent(exclusive),
        number(woken(outcome, Waiting::Exclusive)),
        exponent(accept),
        number(woken(outcome, Waiting::Accept)),
    )
}

/// Tells how the paper's policies, built as it describes them, behave today.
fn policies_today(outcome: &Outcome) -> String {
    let of = |policy: Policy| {
        let grows = exponent(growth_of(outcome, Waiting::Queue(policy))?);
        let woken = number(woken(outcome, Waiting::Queue(policy)));
        Some((grows, woken))
    };
    let (Some(all), Some(task), Some(one), Some(always)) = (
        of(Policy::WakeAll),
        of(Policy::TaskExclusive),
        of(Policy::WakeOne),
        of(Policy::AlwaysWake),
    ) else {
        return "Not all of the paper's policies were measured.".into();
    };
    format!(
        "The paper's policies in a wait queue of our own, on futexes: waking all grows as threads^{} and wakes {}; task exclusive (threads^{}) wakes {}, wake one (threads^{}) {}. The hybrid that the paper thought the soundest and nobody had implemented, always wake (threads^{}), wakes {}: one that accepts, and each of the {SELECTING} threads that wait select()-like and want to hear of every connection.",
        all.0, all.1, task.0, task.1, one.0, one.1, always.0, always.1
    )
}
