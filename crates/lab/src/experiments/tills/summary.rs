//! The whole story in one table: a row for each way of handing out connections, a column for each thing that can go wrong.

use super::{CARD, TRIALS};
use crate::present::{Block, Chart, Kind, Row, Table, Times, cell, number};
use crate::result::{Expectation, Outcome};
use crate::stats;
use crate::ways::{WITH_ROTATE, Way};

/// A cell is bad if it is this many times worse than the best of its column.
const BAD: f64 = 3.0;

/// A column: a workload, and the metric that judges it.
struct Column {
    workload: &'static str,
    head: &'static str,
    /// The unit in the drawing; empty where the head says it all.
    unit: &'static str,
    metric: &'static str,
}

const COLUMNS: [Column; 6] = [
    Column {
        workload: "kept",
        head: "kept",
        unit: "ms",
        metric: "latency_ms_mean",
    },
    Column {
        workload: BURST,
        head: "burst",
        unit: "×",
        metric: SHARE,
    },
    Column {
        workload: "stuck",
        head: "stuck",
        unit: "ms",
        metric: "latency_ms_mean",
    },
    Column {
        workload: "cpu",
        head: "cpu",
        unit: "ms",
        metric: "latency_ms_p99",
    },
    Column {
        workload: "full",
        head: "full",
        unit: "/s",
        metric: THROUGHPUT,
    },
    Column {
        workload: RESTART,
        head: "lost",
        unit: "",
        metric: LOST,
    },
];

/// Requests that were not answered.
pub const LOST: &str = "lost";
/// The busiest worker's share, in multiples of an even one.
pub const SHARE: &str = "share_max_over_mean";
const THROUGHPUT: &str = "throughput_per_s";
/// The load whose losses have a column of their own.
pub const RESTART: &str = "restart";
/// The load of connections that come at once.
pub const BURST: &str = "burst";

impl Column {
    /// Whether its load was to be measured. Results of earlier versions have fewer loads.
    fn is_planned(&self, outcome: &Outcome) -> bool {
        let head = format!("{}_", self.workload);
        let mut measured = WITH_ROTATE.iter();
        outcome
            .parameters
            .keys()
            .any(|name| name.starts_with(&head))
            || measured.any(|way| self.value(outcome, *way).is_some())
    }

    /// The value of a way in this column: its losses over all rounds, or the median of the rounds.
    fn value(&self, outcome: &Outcome, way: Way) -> Option<f64> {
        let name = format!("{}/{}", self.workload, way.name());
        if self.metric == LOST {
            let lost = outcome.values(&name, LOST);
            return (!lost.is_empty()).then(|| lost.iter().sum());
        }
        outcome.median(&name, self.metric)
    }

    /// How many times worse than the best way's it is. To lose none is as good as to lose one.
    fn times_worse(&self, outcome: &Outcome, way: Way) -> Option<f64> {
        let all: Vec<f64> = WITH_ROTATE
            .iter()
            .filter_map(|way| self.value(outcome, *way))
            .collect();
        let least = if self.metric == LOST {
            1.0
        } else {
            f64::MIN_POSITIVE
        };
        let value = self.value(outcome, way)?.max(least);
        Some(match self.metric {
            THROUGHPUT => stats::max(&all) / value,
            _ => value / stats::min(&all).max(least),
        })
    }
}

/// The columns of a result.
fn columns(outcome: &Outcome) -> impl Iterator<Item = &'static Column> {
    COLUMNS.iter().filter(|column| column.is_planned(outcome))
}

/// How many times worse a way is where it is worst; None unless every column was measured.
fn worst(outcome: &Outcome, way: Way) -> Option<f64> {
    worst_of(outcome, way, |_| true)
}

/// The same of some of the columns.
fn worst_of(outcome: &Outcome, way: Way, counts: impl Fn(&Column) -> bool) -> Option<f64> {
    let some = columns(outcome).filter(|column| counts(column));
    let each: Option<Vec<f64>> = some.map(|c| c.times_worse(outcome, way)).collect();
    each.filter(|all| !all.is_empty())
        .map(|all| stats::max(&all))
}

/// The ways that are the kernel's alone.
fn kernels() -> impl Iterator<Item = Way> {
    WITH_ROTATE.into_iter().filter(|way| !way.steered())
}

/// The expectations that each of the kernel's ways fails somewhere, and that Wakeone fails nowhere.
pub fn judge(outcome: &Outcome) -> Vec<Expectation> {
    let each: Option<Vec<f64>> = kernels().map(|way| worst(outcome, way)).collect();
    let worst_of_best = each.and_then(|all| stats::least(&all));
    let ours = worst(outcome, Way::LeastConnectionsRescue);
    let bad = BAD.to_string();
    let names = [("bad", &*bad)];
    vec![
        CARD.expect_of("each-kernel-way-fails-somewhere", &names, worst_of_best),
        CARD.expect_of("wakeone-fails-nowhere", &names, ours),
    ]
}

/// The table.
pub fn table(outcome: &Outcome) -> Table {
    let row = |way: Way| {
        let values: Vec<_> = columns(outcome).map(|c| c.value(outcome, way)).collect();
        if values.iter().all(Option::is_none) {
            return None;
        }
        let is_bad = |column: &Column| {
            let times = column.times_worse(outcome, way);
            times.is_some_and(|times| times >= BAD)
        };
        let bad = (1..).zip(columns(outcome)).filter(|(_, c)| is_bad(c));
        let row = Row::named(&CARD.words[way.name()], values.into_iter().map(cell));
        Some(row.marking(bad.map(|(at, _)| at).collect()))
    };
    Table::new(
        format!(
            "Latency in ms (mean; of cpu the p99) where connections are kept, where one request in a hundred is slow, and where all compute; the busiest worker's share of a burst, in multiples of an even one; connections/s under full load; connections lost in {} restarts. ✗: at least {BAD} times worse than the best.",
            restarts(outcome)
        ),
        columns(outcome).map(|c| c.head),
        WITH_ROTATE.into_iter().filter_map(row),
    )
}

/// The table as a drawing.
pub fn chart(outcome: &Outcome) -> Chart {
    let cell = |column: &Column, way: Way| {
        Some(Times {
            value: column.value(outcome, way)?,
            times: column.times_worse(outcome, way)?,
        })
    };
    let row = |way: Way| {
        let cells: Vec<_> = columns(outcome).map(|column| cell(column, way)).collect();
        let measured = cells.iter().any(Option::is_some);
        measured.then(|| (CARD.words[way.name()].clone(), cells))
    };
    let head = |column: &Column| match column.unit {
        "" => column.head.to_owned(),
        unit => format!("{}, {unit}", column.head),
    };
    Chart {
        title: "Each way, and how many times the best of each column it is.".into(),
        note: format!(
            "Short bars are good, on a logarithmic axis; the thin line is {BAD} times the best, and ✗ marks what reaches it."
        ),
        kind: Kind::Times {
            heads: columns(outcome).map(head).collect(),
            bad: BAD,
            rows: WITH_ROTATE.into_iter().filter_map(row).collect(),
        },
    }
}

/// Restarts of one way in all rounds.
fn restarts(outcome: &Outcome) -> u64 {
    let beside = TRIALS.load(RESTART).beside.as_ref();
    let each = beside.and_then(|what| what.restarts()).unwrap_or(0);
    each as u64 * outcome.parameter_u64("rounds").unwrap_or(1)
}

/// Sentences that follow from the numbers: one on the kernel's ways, and one on each of Wakeone's.
pub fn sentences(outcome: &Outcome) -> String {
    let all: Vec<f64> = kernels().filter_map(|way| worst(outcome, way)).collect();
    let failing = all.iter().filter(|times| **times >= BAD).count();
    let theirs = match (failing, all.len()) {
        (_, 0) => {
            "Not every column was measured, so the ways cannot be compared as a whole.".to_owned()
        }
        (n, m) if n == m => "Each of the kernel's ways fails somewhere.".to_owned(),
        (n, m) => format!("{n} of the kernel's {m} ways fail somewhere in this run."),
    };
    let each = match worst(outcome, Way::LeastConnectionsRescue) {
        Some(times) if times < BAD => format!(
            " Wakeone with a queue each fails in none: where it is worst, it is {} times the best.",
            number(times)
        ),
        Some(times) => format!(
            " Wakeone with a queue each fails as well in this run: {} times the best.",
            number(times)
        ),
        None => String::new(),
    };
    theirs + &each + &one_queue(outcome)
}

/// The sentence on one queue. A kernel without trampolines lets one worker take most of a burst.
fn one_queue(outcome: &Outcome) -> String {
    let ways = WITH_ROTATE.into_iter().filter(|way| way.is_one_queue());
    let of = |way| {
        let burst = worst_of(outcome, way, |column| column.workload == BURST);
        let others = worst_of(outcome, way, |column| column.workload != BURST);
        Some((others?, burst))
    };
    let found = ways
        .filter_map(of)
        .min_by(|one, other| one.0.total_cmp(&other.0));
    match found {
        None => String::new(),
        Some((others, Some(burst))) if burst > others => format!(
            " With one queue it is at most {} times the best, and in bursts {} times.",
            number(others),
            number(burst)
        ),
        Some((others, _)) => format!(
            " With one queue it is at most {} times the best.",
            number(others)
        ),
    }
}

/// The part of the result that fits one screen; None where not one way was measured in every column.
pub fn brief(outcome: &Outcome) -> Option<Vec<Block>> {
    let measured = kernels().any(|way| worst(outcome, way).is_some());
    measured.then(|| {
        vec![
            Block::Table(table(outcome)),
            Block::Paragraph(sentences(outcome)),
        ]
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::tests::{self, Values, failing};

    /// An outcome in which every cell is 1 (of `lost`: 0), but for these.
    fn with(changed: &[(&str, f64)]) -> Outcome {
        let mut all: Vec<(String, Vec<Values<'static>>)> = Vec::new();
        for way in WITH_ROTATE {
            for column in &COLUMNS {
                let name = format!("{}/{}", column.workload, way.name());
                let usual = if column.metric == LOST { 0.0 } else { 1.0 };
                let value = changed
                    .iter()
                    .find(|(n, _)| *n == name)
                    .map_or(usual, |(_, v)| *v);
                let values: &'static [f64] = Box::leak(Box::new([value]));
                all.push((name, vec![(column.metric, values)]));
            }
        }
        let all: Vec<_> = all
            .iter()
            .map(|(n, v)| (n.as_str(), v.as_slice()))
            .collect();
        tests::outcome(&all)
    }

    const EACH_FAILS: [(&str, f64); 4] = [
        ("kept/shared-accept", 3.0),
        ("kept/shared-epoll-exclusive", 900.0),
        ("full/shared-epoll-rotate", 0.25),
        ("stuck/reuseport-hash", 7.0),
    ];

    #[test]
    fn each_limit_bites() {
        assert_eq!(failing(judge(&with(&EACH_FAILS))), Vec::<String>::new());
        assert_eq!(
            failing(judge(&with(&EACH_FAILS[1..]))),
            ["each-kernel-way-fails-somewhere"]
        );
        let mut ours = EACH_FAILS.to_vec();
        ours.push(("cpu/least-connections+rescue", 3.0));
        assert_eq!(failing(judge(&with(&ours))), ["wakeone-fails-nowhere"]);
    }

    #[test]
    fn bad_cells_are_marked_and_the_words_follow() {
        let outcome = with(&EACH_FAILS);
        let marked: Vec<Vec<usize>> = table(&outcome).rows.into_iter().map(|r| r.bad).collect();
        let none = vec![];
        let kernels = [vec![1], vec![1], vec![5], vec![3]];
        let ours = vec![none; WITH_ROTATE.len() - kernels.len()];
        assert_eq!(marked, [&kernels[..], &ours].concat());
        assert!(sentences(&outcome).starts_with(
            "Each of the kernel's ways fails somewhere. Wakeone with a queue each fails in none"
        ));
        let burst = |times| {
            sentences(&with(&[
                ("burst/one-queue-wake-all", times),
                ("cpu/one-queue", 2.0),
            ]))
        };
        assert!(
            burst(4.0)
                .ends_with("With one queue it is at most 1 times the best, and in bursts 4 times.")
        );
        assert!(burst(1.0).ends_with("With one queue it is at most 1 times the best."));
        assert!(sentences(&with(&EACH_FAILS[1..])).starts_with("3 of the kernel's 4 ways fail"));
    }

    #[test]
    fn the_drawing_has_what_the_table_has() {
        let outcome = with(&EACH_FAILS);
        let Kind::Times { heads, bad, rows } = chart(&outcome).kind else {
            panic!("another kind");
        };
        let with_units = [
            "kept, ms",
            "burst, ×",
            "stuck, ms",
            "cpu, ms",
            "full, /s",
            "lost",
        ];
        assert_eq!(heads, with_units);
        let bad_at = |cells: &[Option<Times>]| -> Vec<usize> {
            let cells = (1..).zip(cells);
            cells
                .filter(|(_, cell)| cell.is_some_and(|cell| cell.times >= bad))
                .map(|(at, _)| at)
                .collect()
        };
        for ((label, cells), row) in rows.iter().zip(table(&outcome).rows) {
            assert_eq!((label, bad_at(cells)), (&row.cells[0], row.bad));
        }
        assert_eq!(rows.len(), WITH_ROTATE.len());
        let Kind::Times { rows, .. } = chart(&tests::outcome(&[])).kind else {
            panic!("another kind");
        };
        assert_eq!(rows, []);
    }

    #[test]
    fn what_was_not_measured_does_not_hold() {
        assert!(
            judge(&tests::outcome(&[]))
                .iter()
                .all(|e| !e.holds && e.measured.is_none())
        );
    }
}
