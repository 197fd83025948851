//! One row of ours beside the best of each column: how many times as bad it is there.

use std::sync::LazyLock;

use wakeone_bpf::probe::Probe;

use super::{CARD, summary};
use crate::result::{Expectation, Outcome};
use crate::stats;
use crate::ways::{WITH_ROTATE, Way};

/// What is better.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Better {
    /// A small number.
    Less,
    /// A large one.
    More,
}

/// A number by which the ways are compared.
struct Bar {
    expect: &'static str,
    workload: &'static str,
    metric: &'static str,
    better: Better,
}

const fn bar(expect: &'static str, workload: &'static str, metric: &'static str) -> Bar {
    Bar {
        expect,
        workload,
        metric,
        better: Better::Less,
    }
}

const BARS: [Bar; 6] = [
    bar("best-kept-mean", "kept", "latency_ms_mean"),
    bar("best-stuck-mean", "stuck", "latency_ms_mean"),
    bar("best-stuck-p99", "stuck", "latency_ms_p99"),
    bar("best-cpu-p99", "cpu", "latency_ms_p99"),
    bar("best-cpu-deviation", "cpu", "latency_ms_stddev"),
    Bar {
        better: Better::More,
        ..bar("best-throughput", "full", "throughput_per_s")
    },
];

/// The parameter that tells whether the kernel lets programs run at the entry of its functions.
pub const TRAMPOLINES: &str = "trampolines";

/// Whether it does. Without them a burst cannot be handed out exactly.
pub fn trampolines() -> bool {
    static HERE: LazyLock<bool> = LazyLock::new(|| {
        let probe = Probe::attach(1);
        probe.is_ok_and(|probe| !probe.slows_system_calls())
    });
    *HERE
}

impl Bar {
    /// How many times as bad as the best way it is, the median of the rounds. The best is that by the medians.
    fn times_the_best(&self, outcome: &Outcome, way: Way) -> Option<f64> {
        let name = |way: Way| format!("{}/{}", self.workload, way.name());
        let value = |way: &Way| {
            let median = outcome.median(&name(*way), self.metric)?;
            Some(match self.better {
                Better::Less => median,
                Better::More => -median,
            })
        };
        let measured = WITH_ROTATE.iter().filter(|way| value(way).is_some());
        let best = measured.min_by(|a, b| value(a).partial_cmp(&value(b)).unwrap())?;
        let (ours, theirs) = (name(way), name(*best));
        match self.better {
            Better::Less => outcome.ratio_of(self.metric, &ours, &theirs),
            Better::More => outcome.ratio_of(self.metric, &theirs, &ours),
        }
    }
}

/// How many times as bad as the best a way is where it is worst; None unless everything was measured.
fn worst(outcome: &Outcome, way: Way) -> Option<f64> {
    let each = BARS.iter().map(|bar| bar.times_the_best(outcome, way));
    let each: Option<Vec<f64>> = each.collect();
    each.map(|all| stats::max(&all))
}

/// The row of ours that is never far from the best.
fn row(outcome: &Outcome) -> Way {
    let ours = WITH_ROTATE.into_iter().filter(|way| way.steered());
    let all = ours.filter_map(|way| Some((way, worst(outcome, way)?)));
    let best = all.min_by(|(_, a), (_, b)| a.total_cmp(b));
    best.map_or(Way::OneQueue, |(way, _)| way)
}

/// The expectations that one row of ours is nearly the best in everything.
pub fn judge(outcome: &Outcome) -> Vec<Expectation> {
    let row = row(outcome);
    let names = [("row", row.name())];
    let each = |bar: &Bar| CARD.expect_of(bar.expect, &names, bar.times_the_best(outcome, row));
    let mut all: Vec<Expectation> = BARS.iter().map(each).collect();
    let of = |workload: &str, metric: &str| {
        let values = outcome.values(&format!("{workload}/{}", row.name()), metric);
        (!values.is_empty()).then_some(values)
    };
    let lost = of(summary::RESTART, summary::LOST).map(|values| values.iter().sum());
    all.push(CARD.expect_of("best-loses-none", &names, lost));
    let exact = outcome.parameters.get(TRAMPOLINES);
    if exact.and_then(|here| here.as_bool()) == Some(true) {
        let most = of(summary::BURST, summary::SHARE).map(stats::max);
        all.push(CARD.expect_of("burst-even", &names, most));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::tests::{self, Values, failing};

    /// An outcome in which each way has 1 everywhere, but a way has this factor in all that is not throughput.
    fn with(factors: &[(Way, f64)], throughput: f64, lost: f64) -> Outcome {
        let mut all: Vec<(String, Vec<Values<'static>>)> = Vec::new();
        let keep = |value: f64| -> &'static [f64] { Box::leak(Box::new([value, value])) };
        for way in WITH_ROTATE {
            let named = factors.iter().find(|(one, _)| *one == way);
            let factor = named.map_or(3.0, |(_, factor)| *factor);
            for bar in &BARS {
                let value = match bar.better {
                    Better::Less => factor,
                    Better::More if way == Way::OneQueue => throughput,
                    Better::More => 100.0,
                };
                let name = format!("{}/{}", bar.workload, way.name());
                all.push((name, vec![(bar.metric, keep(value))]));
            }
            let name = format!("{}/{}", summary::RESTART, way.name());
            all.push((name, vec![(summary::LOST, keep(lost))]));
            let name = format!("{}/{}", summary::BURST, way.name());
            all.push((name, vec![(summary::SHARE, keep(1.2))]));
        }
        // A name stands for one variant.
        let mut merged: Vec<(String, Vec<Values<'static>>)> = Vec::new();
        for (name, values) in all {
            match merged.iter_mut().find(|(one, _)| *one == name) {
                Some((_, before)) => before.extend(values),
                None => merged.push((name, values)),
            }
        }
        let all = merged.iter().map(|(n, v)| (n.as_str(), v.as_slice()));
        tests::outcome(&all.collect::<Vec<_>>())
    }

    const NEAR: [(Way, f64); 2] = [(Way::OneQueue, 1.04), (Way::SharedAccept, 1.0)];

    #[test]
    fn each_bar_bites() {
        assert!(failing(judge(&with(&NEAR, 96.0, 0.0))).is_empty());
        assert_eq!(
            failing(judge(&with(&NEAR, 95.0, 1.0))),
            ["best-throughput", "best-loses-none"]
        );
        let far = [(Way::OneQueue, 1.06), (Way::SharedAccept, 1.0)];
        let failed = failing(judge(&with(&far, 100.0, 0.0)));
        assert_eq!(
            failed,
            BARS[..5].iter().map(|bar| bar.expect).collect::<Vec<_>>()
        );
    }

    #[test]
    fn the_row_is_the_one_of_ours_that_is_nearest_and_bursts_count_where_they_can_be_exact() {
        let ours = [(Way::LeastConnections, 1.5), (Way::OneQueue, 1.4)];
        assert!(row(&with(&ours, 100.0, 0.0)) == Way::OneQueue);
        assert!(row(&with(&ours, 10.0, 0.0)) == Way::LeastConnections);
        let mut found = with(&NEAR, 100.0, 0.0);
        found.parameters.insert(TRAMPOLINES.into(), true.into());
        assert_eq!(failing(judge(&found)), ["burst-even"]);
    }
}
