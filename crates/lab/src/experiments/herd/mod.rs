//! The thundering herd: how long a wait queue needs to settle after one connection, and whom it wakes.

mod waiters;

use serde_json::json;
use std::time::Duration;

use crate::experiment::{
    Arm, Card, Context, Design, Experiment, Pairing, Sample, Settings, Source,
};
use crate::present::{Block, Chart, Kind as ChartKind, Row, Style, Table, number};
use crate::published::Published;
use crate::result::{Expectation, Outcome};
use crate::trace::{Event, Kind, Trace};
use crate::{Error, stats};
use waiters::{Herd as Waiters, Waiting};

/// The experiment.
pub struct Herd;

const TAPS: usize = 10;
const ROUNDS: usize = 3;

const CARD: Card = Card {
    name: "herd",
    title: "The thundering herd",
    question: "A hundred to a thousand threads wait for a connection, and one comes: how long until all is quiet again, and how many were woken?",
    source: Source {
        short: "Molloy and Lever, 2000",
        long: "Steve Molloy and Chuck Lever, Accept() scalability on Linux, USENIX 2000, table I and figure I.",
        url: "https://www.usenix.org/legacy/events/usenix2000/freenix/full_papers/molloy/molloy_html/index.html",
    },
    readme: include_str!("README.md"),
    published: include_str!("published.csv"),
};

/// The published series, the way of waiting that stands for it, and its place in the palette.
const PUBLISHED: [(&str, Waiting); 3] = [
    ("Kernel", Waiting::WakeAll),
    ("Taskex", Waiting::Accept),
    ("Wake1", Waiting::Exclusive),
];

fn sizes(quick: bool) -> Vec<usize> {
    if quick {
        vec![100, 400, 1000]
    } else {
        (1..=10).map(|n| n * 100).collect()
    }
}

fn arm_name(waiting: Waiting, threads: usize) -> String {
    format!("{}/{threads}", waiting.name())
}

fn parse_arm(name: &str) -> Option<(Waiting, usize)> {
    let (way, threads) = name.split_once('/')?;
    Some((
        waiters::ALL.into_iter().find(|w| w.name() == way)?,
        threads.parse().ok()?,
    ))
}

/// Longer than the largest herd needs here by far.
fn rest(threads: usize) -> Duration {
    Duration::from_millis(10 + threads as u64 / 20)
}

impl Experiment for Herd {
    fn card(&self) -> &Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let mut arms = Vec::new();
        for (group, threads) in sizes(settings.quick).into_iter().enumerate() {
            arms.extend(waiters::ALL.map(|waiting| Arm {
                name: arm_name(waiting, threads),
                group,
                seconds: 0.1
                    + TAPS as f64 * (rest(threads).as_secs_f64() + 0.005)
                    + threads as f64 * 0.0004,
            }));
        }
        let mut design = Design {
            rounds: ROUNDS,
            arms,
            pairings: waiters::ALL.into_iter().map(growth).collect(),
            steady: "settle_us",
            parameters: serde_json::Map::new(),
        };
        for (name, value) in [
            ("threads", json!(sizes(settings.quick))),
            ("taps_per_round", json!(TAPS)),
        ] {
            design.parameters.insert(name.into(), value);
        }
        design
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let (waiting, threads) =
            parse_arm(&arm.name).ok_or_else(|| Error::Unknown(arm.name.clone()))?;
        let herd = Waiters::gather(waiting, threads)?;
        let trace = Trace::start(waiters::NAME)?;
        let before = herd.voluntary_switches();
        let mut taps = Vec::new();
        for tap in 0..TAPS {
            context.check()?;
            trace.clear()?;
            herd.tap(rest(threads))?;
            taps.push(settled(&trace.events()?).ok_or_else(|| {
                Error::Missing(format!(
                    "the trace of a tap on {threads} threads shows no wake-up"
                ))
            })?);
            (context.progress)((tap + 1) as f64 / TAPS as f64);
        }
        let switches = herd.voluntary_switches() - before;
        let settle: Vec<f64> = taps.iter().map(|t| t.0).collect();
        let wakeups: Vec<f64> = taps.iter().map(|t| t.1).collect();
        let mut sample = Sample::default();
        sample.put("settle_us", "us", stats::median(&settle));
        sample.put("wakeups_per_tap", "count", stats::mean(&wakeups));
        sample.put(
            "voluntary_switches_per_tap",
            "count",
            switches as f64 / TAPS as f64,
        );
        Ok(sample)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        judge(outcome)
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        present(outcome)
    }
}

fn growth(waiting: Waiting) -> Pairing {
    Pairing {
        name: growth_name(waiting),
        a: arm_name(waiting, 1000),
        b: arm_name(waiting, 100),
        metric: "settle_us".into(),
    }
}

fn growth_name(waiting: Waiting) -> String {
    format!(
        "settle(1,000 threads) / settle(100 threads), {}",
        waiting.name()
    )
}

/// `(time in µs from the first wake-up to the last sleep, number of wake-ups)`; None for a trace without wake-ups.
fn settled(events: &[Event]) -> Option<(f64, f64)> {
    let first = events.iter().find(|e| e.kind == Kind::Waking)?;
    let last = events.iter().rev().find(|e| e.kind == Kind::Asleep)?;
    let wakeups = events.iter().filter(|e| e.kind == Kind::Waking).count();
    Some((last.at_us - first.at_us, wakeups as f64))
}

fn judge(outcome: &Outcome) -> Vec<Expectation> {
    let mut expectations = Vec::new();
    for waiting in waiters::ALL {
        let (name, ratio) = (waiting.name(), outcome.ratio(&growth_name(waiting)));
        expectations.push(if waiting == Waiting::WakeAll {
            Expectation::new(
                "wake-all-grows",
                "wake-all: settle(1,000 threads) is at least 5 times settle(100)",
                "Molloy and Lever, 2000: 37.7 times",
                ratio,
                |m| m >= 5.0,
            )
        } else {
            let published = if waiting == Waiting::Accept {
                "2.73 times (Taskex)"
            } else {
                "0.89 times (Wake1)"
            };
            Expectation::new(
                format!("{name}-constant"),
                format!("{name}: settle(1,000 threads) is at most twice settle(100)"),
                format!("Molloy and Lever, 2000: {published}"),
                ratio,
                |m| m <= 2.0,
            )
        });
        let woken = outcome.median(&arm_name(waiting, 1000), "wakeups_per_tap");
        expectations.push(if waiting == Waiting::WakeAll {
            Expectation::new(
                "wake-all-wakes-all",
                "wake-all: a connection wakes at least 900 of 1,000 threads",
                "Molloy and Lever, 2000",
                woken,
                |m| m >= 900.0,
            )
        } else {
            Expectation::new(
                format!("{name}-wakes-one"),
                format!("{name}: a connection costs at most 2 wake-ups among 1,000 threads"),
                "Molloy and Lever, 2000",
                woken,
                |m| m <= 2.0,
            )
        });
    }
    expectations
}

/// The measured `(threads, value)` of a way of waiting, rising.
fn curve(outcome: &Outcome, waiting: Waiting, metric: &str) -> Vec<(f64, f64)> {
    let mut points: Vec<(f64, f64)> = outcome
        .variants
        .iter()
        .filter_map(|v| {
            let (way, threads) = parse_arm(&v.name)?;
            (way == waiting).then_some((threads as f64, v.median(metric)?))
        })
        .collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

fn colour(waiting: Waiting) -> usize {
    match waiting {
        Waiting::WakeAll => 5,
        Waiting::Exclusive => 1,
        Waiting::Accept => 0,
    }
}

fn present(outcome: &Outcome) -> Vec<Block> {
    let published = Published::parse(CARD.published);
    let mut series: Vec<(Style, Vec<(f64, f64)>)> = Vec::new();
    for (name, waiting) in PUBLISHED {
        series.push((
            Style::published(format!("{name}, 2000"), colour(waiting)),
            published.curve(name, "settle_us"),
        ));
    }
    for waiting in waiters::ALL {
        series.push((
            Style::ours(waiting.name(), colour(waiting)),
            curve(outcome, waiting, "settle_us"),
        ));
    }
    vec![
        Block::Heading("What it means".into()),
        Block::Paragraph(meaning(outcome, &published)),
        Block::Table(table(outcome, &published)),
        Block::Chart(Chart {
            title: "Time until the wait queue has settled.".into(),
            note: "Dashed: the paper, 2000. Solid: here. Both axes are logarithmic.".into(),
            kind: ChartKind::Lines {
                x: "waiting threads".into(),
                y: "settle time, µs".into(),
                log: true,
                series: without_empty(series),
            },
        }),
        Block::Table(growth_table(outcome, &published)),
        Block::Table(wakeups_table(outcome)),
        Block::Chart(Chart {
            title: "Wake-ups for one connection.".into(),
            note: "Counted by the scheduler's own tracepoints. Both axes are logarithmic.".into(),
            kind: ChartKind::Lines {
                x: "waiting threads".into(),
                y: "wake-ups a connection".into(),
                log: true,
                series: without_empty(
                    waiters::ALL
                        .into_iter()
                        .map(|w| {
                            (
                                Style::ours(w.name(), colour(w)),
                                curve(outcome, w, "wakeups_per_tap"),
                            )
                        })
                        .collect(),
                ),
            },
        }),
    ]
}

fn without_empty(series: Vec<(Style, Vec<(f64, f64)>)>) -> Vec<(Style, Vec<(f64, f64)>)> {
    series.into_iter().filter(|s| !s.1.is_empty()).collect()
}

fn table(outcome: &Outcome, published: &Published) -> Table {
    let mut head: Vec<String> = vec!["threads".into()];
    head.extend(PUBLISHED.map(|(name, _)| format!("{name} (publ.)")));
    head.extend(waiters::ALL.map(|w| w.name().to_owned()));
    let row = |x: f64| {
        let mut cells = vec![number(x)];
        cells.extend(PUBLISHED.map(|(name, _)| at(&published.curve(name, "settle_us"), x)));
        cells.extend(waiters::ALL.map(|w| at(&curve(outcome, w, "settle_us"), x)));
        Row::ours(cells)
    };
    let sizes = published.curve("Kernel", "settle_us");
    Table {
        caption: "Settle time in µs: published, and here (median of the taps).".into(),
        head,
        rows: sizes.into_iter().map(|p| row(p.0)).collect(),
    }
}

fn wakeups_table(outcome: &Outcome) -> Table {
    let mut head: Vec<String> = vec!["threads".into()];
    head.extend(waiters::ALL.map(|w| w.name().to_owned()));
    head.extend(waiters::ALL.map(|w| format!("{} (/proc)", w.name())));
    let row = |x: f64| {
        let mut cells = vec![number(x)];
        for metric in ["wakeups_per_tap", "voluntary_switches_per_tap"] {
            cells.extend(waiters::ALL.map(|w| at(&curve(outcome, w, metric), x)));
        }
        Row::ours(cells)
    };
    let sizes = curve(outcome, Waiting::Accept, "wakeups_per_tap");
    Table {
        caption: "Threads woken for one connection, by the scheduler's tracepoints, and voluntary switches from /proc as a check.".into(),
        head,
        rows: sizes.into_iter().map(|p| row(p.0)).collect(),
    }
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
        let exponent =
            stats::growth_exponent(&points).map_or_else(|| "–".into(), |e| format!("{e:.2}"));
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
        waiters::ALL.map(|w| Row::ours(row(w.name().into(), curve(outcome, w, "settle_us")))),
    );
    Table {
        caption: "Growth: e of settle ~ threads^e (1 is linear, 0 constant), and settle(1,000)/settle(100).".into(),
        head: ["", "e", "1,000/100"].map(str::to_owned).into(),
        rows,
    }
}

fn meaning(outcome: &Outcome, published: &Published) -> String {
    let exponent = |w: Waiting| stats::growth_exponent(&curve(outcome, w, "settle_us"));
    let theirs =
        stats::growth_exponent(&published.curve("Kernel", "settle_us")).unwrap_or(f64::NAN);
    let (Some(all), Some(exclusive), Some(accept)) = (
        exponent(Waiting::WakeAll),
        exponent(Waiting::Exclusive),
        exponent(Waiting::Accept),
    ) else {
        return "Not all ways of waiting were measured.".into();
    };
    let herd = if all >= 0.7 {
        "The herd is still there for who asks for it: without EPOLLEXCLUSIVE"
    } else {
        "The herd is smaller than it was: without EPOLLEXCLUSIVE"
    };
    let woken = |w: Waiting| {
        curve(outcome, w, "wakeups_per_tap")
            .last()
            .map_or(f64::NAN, |p| p.1)
    };
    let constant = if exclusive.abs() <= 0.3 && accept.abs() <= 0.3 {
        "stays nearly constant"
    } else {
        "grows as well here"
    };
    format!(
        "{herd} the settle time grows as threads^{all:.2} (2000: threads^{theirs:.2}), and one connection wakes {} threads of the largest herd. With EPOLLEXCLUSIVE (threads^{exclusive:.2}, {} woken) and in blocking accept (threads^{accept:.2}, {} woken) it {constant}, as the paper's two patches promised.",
        number(woken(Waiting::WakeAll)),
        number(woken(Waiting::Exclusive)),
        number(woken(Waiting::Accept)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settling_is_from_the_first_wake_up_to_the_last_sleep() {
        let event = |at_us, kind| Event {
            at_us,
            kind,
            thread: 1,
        };
        let events = [
            event(5.0, Kind::Asleep),
            event(10.0, Kind::Waking),
            event(11.0, Kind::Waking),
            event(50.0, Kind::Asleep),
        ];
        assert_eq!(settled(&events), Some((40.0, 2.0)));
        assert_eq!(settled(&events[..1]), None);
    }

    #[test]
    fn the_published_ratios_are_those_of_the_csv() {
        let published = Published::parse(CARD.published);
        let ratio = |name: &str| {
            let curve = published.curve(name, "settle_us");
            assert_eq!(curve.len(), 10);
            curve[9].1 / curve[0].1
        };
        let rounded = |r: f64| (r * 100.0).round() / 100.0;
        assert_eq!(
            (
                rounded(ratio("Kernel")),
                rounded(ratio("Taskex")),
                rounded(ratio("Wake1"))
            ),
            (37.65, 2.73, 0.89)
        );
    }

    #[test]
    fn names_of_variants_go_both_ways() {
        for waiting in waiters::ALL {
            assert_eq!(parse_arm(&arm_name(waiting, 700)), Some((waiting, 700)));
        }
        assert_eq!(parse_arm("nobody/100"), None);
    }
}
