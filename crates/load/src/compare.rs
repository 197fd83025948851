//! Two results side by side, with the spread that shows whether their difference means anything.

use std::fmt;

use serde::Serialize;

use crate::summary::{IntervalSummary, Summary};
use crate::text::number;

/// A spread needs this many whole intervals of each result.
const INTERVALS_MIN: usize = 5;
/// An interval shorter than this part of the longest is a cut-off one and says nothing about rates.
const WHOLE: f64 = 0.9;

/// The meaning of a difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The middle halves of the intervals lie apart, B's above.
    Higher,
    /// The middle halves of the intervals lie apart, B's below.
    Lower,
    /// They overlap: these two results show no difference.
    WithinSpread,
    /// One number each: no spread is known.
    Unknown,
    /// It is that of the answered requests, and the results differ in how many were answered.
    ErrorsDiffer,
}

/// The shares of requests that failed, from 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct ErrorShares {
    pub a: f64,
    pub b: f64,
    /// They are further apart than chance explains.
    pub differ: bool,
}

impl ErrorShares {
    /// Chance explains three standard errors of the difference of two shares.
    fn new(a: &Summary, b: &Summary) -> Self {
        let ended = |s: &Summary| (s.error_count() + s.completed).max(1) as f64;
        let (of_a, of_b) = (ended(a), ended(b));
        let both = (a.error_count() + b.error_count()) as f64 / (of_a + of_b);
        let error = (both * (1.0 - both) * (1.0 / of_a + 1.0 / of_b)).sqrt();
        let (a, b) = (a.error_share(), b.error_share());
        Self {
            a,
            b,
            differ: (a - b).abs() > 3.0 * error,
        }
    }

    /// The verdict on a metric, where these shares change it. Failures come in clusters, so that a second without one says
    /// nothing.
    fn verdict(&self, metric: &MetricComparison) -> Verdict {
        match (metric.metric, metric.verdict) {
            (_, verdict) if !self.differ => verdict,
            ("errors" | "error_percent", _) if self.b > self.a => Verdict::Higher,
            ("errors" | "error_percent", _) => Verdict::Lower,
            (name, _) if of_answered(name) => Verdict::ErrorsDiffer,
            (name, Verdict::WithinSpread) if name.starts_with("latency_all") => {
                Verdict::ErrorsDiffer
            }
            (_, verdict) => verdict,
        }
    }
}

/// One metric of both results.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct MetricComparison {
    pub metric: &'static str,
    pub a: f64,
    pub b: f64,
    /// b / a; `None` where a is 0.
    pub ratio: Option<f64>,
    /// Lower and upper quartile over the intervals.
    pub a_quartiles: Option<[f64; 2]>,
    pub b_quartiles: Option<[f64; 2]>,
    pub verdict: Verdict,
}

/// A parameter that was not the same.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Difference {
    pub parameter: String,
    pub a: serde_json::Value,
    pub b: serde_json::Value,
}

/// Two results side by side.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Comparison {
    pub schema: &'static str,
    pub a: String,
    pub b: String,
    /// Parameters that were not the same: reasons for a difference that lie outside the server.
    pub differences: Vec<Difference>,
    pub error_shares: ErrorShares,
    pub metrics: Vec<MetricComparison>,
}

type OfWhole = fn(&Summary) -> f64;
type OfInterval = fn(&IntervalSummary) -> f64;

/// The metrics compared: name, value of a whole result, and value of an interval where that shows the spread. A value that
/// there is not, as in a result of an earlier version, is NaN.
const METRICS: [(&str, OfWhole, Option<OfInterval>); 14] = [
    (
        "throughput_per_s",
        |s| s.throughput_per_s,
        Some(|i| i.completed as f64 / i.length_s),
    ),
    ("latency_ms_mean", |s| s.latency_ms.mean, None),
    (
        "latency_ms_p50",
        |s| s.latency_ms.p50,
        Some(|i| if_any(i.completed, i.latency_ms_p50)),
    ),
    ("latency_ms_p90", |s| s.latency_ms.p90, None),
    (
        "latency_ms_p99",
        |s| s.latency_ms.p99,
        Some(|i| if_any(i.completed, i.latency_ms_p99)),
    ),
    ("latency_ms_p999", |s| s.latency_ms.p999, None),
    (
        "latency_ms_max",
        |s| s.latency_ms.max,
        Some(|i| if_any(i.completed, i.latency_ms_max)),
    ),
    (
        "latency_all_ms_p50",
        |s| s.latency_all_ms.map_or(f64::NAN, |q| q.p50),
        None,
    ),
    (
        "latency_all_ms_p99",
        |s| s.latency_all_ms.map_or(f64::NAN, |q| q.p99),
        Some(|i| {
            if_any(
                i.completed + i.errors,
                i.latency_all_ms_p99.unwrap_or(f64::NAN),
            )
        }),
    ),
    (
        "service_ms_p99",
        |s| s.service_ms.p99,
        Some(|i| if_any(i.completed, i.service_ms_p99)),
    ),
    ("connect_ms_p99", |s| s.connect_ms.p99, None),
    (
        "share_max_over_mean",
        |s| s.share_max_over_mean.unwrap_or(0.0),
        None,
    ),
    (
        "errors",
        |s| s.error_count() as f64,
        Some(|i| i.errors as f64),
    ),
    (
        "error_percent",
        |s| 100.0 * s.error_share(),
        Some(|i| 100.0 * i.errors as f64 / (i.errors + i.completed).max(1) as f64),
    ),
];

/// A time of so many requests; NaN if there are none.
fn if_any(requests: u64, ms: f64) -> f64 {
    if requests > 0 { ms } else { f64::NAN }
}

/// Whether a metric leaves the failed requests out. Then it compares nothing where unequal shares failed: the requests that
/// one server answered late may be those that the other did not answer.
fn of_answered(metric: &str) -> bool {
    ["latency_ms", "service_ms", "connect_ms"]
        .iter()
        .any(|name| metric.starts_with(name))
}

impl Comparison {
    /// Compares `a` and `b`, each a name and a result.
    pub fn new(a: (&str, &Summary), b: (&str, &Summary)) -> Self {
        let error_shares = ErrorShares::new(a.1, b.1);
        let mut metrics: Vec<_> = METRICS
            .into_iter()
            .map(|metric| compare(metric, a.1, b.1))
            .filter(|metric| !metric.a.is_nan() && !metric.b.is_nan())
            .collect();
        for metric in &mut metrics {
            metric.verdict = error_shares.verdict(metric);
        }
        Self {
            schema: "wakeone-load-comparison/1",
            a: a.0.to_owned(),
            b: b.0.to_owned(),
            differences: differences(a.1, b.1),
            error_shares,
            metrics,
        }
    }
}

fn compare(
    (metric, whole, interval): (&'static str, OfWhole, Option<OfInterval>),
    a: &Summary,
    b: &Summary,
) -> MetricComparison {
    let spread = |summary: &Summary| interval.and_then(|of| quartiles(summary, of));
    let (a_quartiles, b_quartiles) = (spread(a), spread(b));
    let verdict = match (a_quartiles, b_quartiles) {
        (Some([_, a_high]), Some([b_low, _])) if b_low > a_high => Verdict::Higher,
        (Some([a_low, _]), Some([_, b_high])) if b_high < a_low => Verdict::Lower,
        (Some(_), Some(_)) => Verdict::WithinSpread,
        _ => Verdict::Unknown,
    };
    let (a, b) = (whole(a), whole(b));
    MetricComparison {
        metric,
        a,
        b,
        ratio: (a != 0.0).then(|| b / a),
        a_quartiles,
        b_quartiles,
        verdict,
    }
}

fn quartiles(summary: &Summary, of: OfInterval) -> Option<[f64; 2]> {
    let longest = summary
        .intervals
        .iter()
        .map(|i| i.length_s)
        .fold(0.0, f64::max);
    let whole = summary
        .intervals
        .iter()
        .filter(|i| i.length_s >= WHOLE * longest && longest > 0.0);
    let mut values: Vec<f64> = whole.map(of).filter(|value| !value.is_nan()).collect();
    if values.len() < INTERVALS_MIN {
        return None;
    }
    values.sort_by(f64::total_cmp);
    let at = |part: f64| values[(part * (values.len() - 1) as f64).round() as usize];
    Some([at(0.25), at(0.75)])
}

fn differences(a: &Summary, b: &Summary) -> Vec<Difference> {
    let fields = |s: &Summary| serde_json::to_value(&s.parameters).unwrap_or_default();
    let (a, b) = (fields(a), fields(b));
    let names = a.as_object().into_iter().flatten().map(|(name, _)| name);
    names
        .filter(|name| a[*name] != b[*name])
        .map(|name| Difference {
            parameter: name.clone(),
            a: a[name].clone(),
            b: b[name].clone(),
        })
        .collect()
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "A: {}\nB: {}\n", self.a, self.b)?;
        writeln!(
            f,
            "{:<20}{:>9}{:>9}{:>7}   A, B: middle half of the intervals",
            "", "A", "B", "B/A"
        )?;
        for metric in &self.metrics {
            let ratio = metric
                .ratio
                .map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
            let (a, b) = (number(metric.a), number(metric.b));
            let name = metric.metric;
            let line = format!("{name:<20}{a:>9}{b:>9}{ratio:>7}   {}", metric.spread());
            writeln!(f, "{}", line.trim_end())?;
        }
        for d in &self.differences {
            writeln!(
                f,
                "asked differently: {} {} against {}",
                d.parameter, d.a, d.b
            )?;
        }
        let ErrorShares { a, b, differ } = self.error_shares;
        if differ {
            let [a, b] = [a, b].map(|share| number(100.0 * share));
            writeln!(
                f,
                "errors differ: {a} % of A's requests failed and {b} % of B's, and latency_ms, service_ms and connect_ms are \
                 of the others; compare latency_all_ms, where failures count as waits"
            )?;
        }
        if self.metrics.iter().all(|m| m.a_quartiles.is_none()) {
            let least = INTERVALS_MIN;
            writeln!(
                f,
                "no spread: a result of {least} whole seconds and more has one"
            )?;
        }
        writeln!(
            f,
            "one run each: a difference counts once it shows again in runs A B A B"
        )
    }
}

impl MetricComparison {
    fn spread(&self) -> String {
        let verdict = match self.verdict {
            Verdict::Higher => "B higher",
            Verdict::Lower => "B lower",
            Verdict::WithinSpread | Verdict::Unknown => "no difference",
            Verdict::ErrorsDiffer => "errors differ",
        };
        let (Some([a_low, a_high]), Some([b_low, b_high])) = (self.a_quartiles, self.b_quartiles)
        else {
            return match self.verdict {
                Verdict::ErrorsDiffer => verdict.to_owned(),
                _ => String::new(),
            };
        };
        let [a_low, a_high, b_low, b_high] = [a_low, a_high, b_low, b_high].map(number);
        format!("{a_low}…{a_high}, {b_low}…{b_high}: {verdict}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::plan;
    use crate::{Plan, Sources};

    /// A result whose intervals complete about `per_s` requests.
    fn result(per_s: u64, intervals: usize, seed: u64) -> Summary {
        let plan = Plan {
            sources: Sources::System,
            seed,
            ..plan()
        };
        let outcome = crate::recorder::Recorder::new(&plan).outcome(&plan);
        let mut summary = Summary::new(&plan, &outcome, &[]);
        summary.throughput_per_s = per_s as f64;
        summary.intervals = (0..intervals)
            .map(|n| IntervalSummary {
                start_s: n as f64,
                length_s: 1.0,
                planned: per_s,
                completed: per_s + n as u64 % 3,
                errors: 0,
                latency_ms_p50: 1.0,
                latency_ms_p99: 2.0,
                latency_ms_max: 3.0,
                latency_all_ms_p99: Some(2.0),
                service_ms_p99: 2.0,
                connections_open: 1,
            })
            .collect();
        summary
    }

    fn verdict(a: &Summary, b: &Summary) -> Verdict {
        let comparison = Comparison::new(("a", a), ("b", b));
        comparison
            .metrics
            .iter()
            .find(|m| m.metric == "throughput_per_s")
            .unwrap()
            .verdict
    }

    #[test]
    fn a_difference_counts_only_beyond_the_spread() {
        let base = result(1000, 10, 1);
        assert_eq!(verdict(&base, &result(1001, 10, 1)), Verdict::WithinSpread);
        assert_eq!(verdict(&base, &result(1100, 10, 1)), Verdict::Higher);
        assert_eq!(verdict(&base, &result(900, 10, 1)), Verdict::Lower);
        assert_eq!(verdict(&base, &result(900, 3, 1)), Verdict::Unknown);
        // A second without an answer has no latency.
        let silent = IntervalSummary {
            completed: 0,
            latency_ms_p50: 0.0,
            ..base.intervals[0].clone()
        };
        let mostly = [vec![silent; 3], result(1000, 7, 1).intervals].concat();
        let mostly = Summary {
            intervals: mostly,
            ..base.clone()
        };
        assert_eq!(quartiles(&mostly, METRICS[2].2.unwrap()), Some([1.0, 1.0]));
        // A cut-off last interval does not count as a slow one.
        let mut cut = result(1000, 6, 1);
        cut.intervals.push(IntervalSummary {
            length_s: 0.1,
            completed: 1,
            ..cut.intervals[0].clone()
        });
        assert_eq!(
            quartiles(&cut, METRICS[0].2.unwrap()),
            Some([1000.0, 1002.0])
        );
    }

    /// The verdict on a metric.
    fn of(comparison: &Comparison, name: &str) -> Verdict {
        let metric = comparison.metrics.iter().find(|m| m.metric == name);
        metric.expect(name).verdict
    }

    #[test]
    fn latencies_of_answered_requests_are_not_compared_where_shares_of_errors_differ() {
        let with_errors = |n: u64, seed| {
            let mut result = result(1000, 10, seed);
            result.completed = 10_000 - n;
            result.errors = [("timeout".to_owned(), n)].into();
            for interval in &mut result.intervals {
                interval.errors = n / 10;
                interval.latency_all_ms_p99 = Some(if n > 0 { 2000.0 } else { 2.0 });
            }
            result
        };
        let none = with_errors(0, 1);
        let comparison = Comparison::new(("a", &none), ("b", &with_errors(500, 2)));
        assert!(comparison.error_shares.differ);
        for metric in ["latency_ms_p99", "latency_ms_p999", "service_ms_p99"] {
            assert_eq!(of(&comparison, metric), Verdict::ErrorsDiffer, "{metric}");
        }
        for metric in ["latency_all_ms_p99", "error_percent"] {
            assert_eq!(of(&comparison, metric), Verdict::Higher, "{metric}");
        }
        let text = comparison.to_string();
        assert!(text.contains("errors differ: 0 % of A's requests failed and 5.00 % of B's"));
        // All failures in one second: its neighbours are no sign that there are none.
        let mut clustered = with_errors(500, 2);
        for (second, interval) in clustered.intervals.iter_mut().enumerate() {
            interval.errors = if second == 3 { 500 } else { 0 };
            interval.latency_all_ms_p99 = Some(if second == 3 { 2000.0 } else { 2.0 });
        }
        let comparison = Comparison::new(("a", &none), ("b", &clustered));
        let metric = |name| of(&comparison, name);
        assert_eq!(metric("latency_all_ms_p99"), Verdict::ErrorsDiffer);
        assert_eq!(metric("error_percent"), Verdict::Higher);
        // Equal shares, and unequal ones by chance, are no reason not to compare.
        for (a, b) in [(500, 500), (500, 520), (0, 5)] {
            let (a, b) = (with_errors(a, 1), with_errors(b, 2));
            let comparison = Comparison::new(("a", &a), ("b", &b));
            assert!(!comparison.error_shares.differ);
            assert_eq!(of(&comparison, "latency_ms_p99"), Verdict::WithinSpread);
        }
    }

    #[test]
    fn a_result_of_an_earlier_version_is_compared_without_what_it_lacks() {
        let mut old = result(1000, 10, 1);
        old.latency_all_ms = None;
        old.intervals
            .iter_mut()
            .for_each(|interval| interval.latency_all_ms_p99 = None);
        let comparison = Comparison::new(("a", &old), ("b", &result(1000, 10, 2)));
        assert_eq!(of(&comparison, "latency_ms_p99"), Verdict::WithinSpread);
        let lacks = |m: &MetricComparison| m.metric.starts_with("latency_all");
        assert!(!comparison.metrics.iter().any(lacks));
    }

    #[test]
    fn what_was_asked_differently_is_named() {
        let comparison = Comparison::new(("a", &result(1, 1, 1)), ("b", &result(1, 1, 2)));
        let named: Vec<_> = comparison
            .differences
            .iter()
            .map(|d| d.parameter.as_str())
            .collect();
        assert_eq!(named, ["seed"]);
        assert!(
            comparison
                .to_string()
                .contains("asked differently: seed 1 against 2")
        );
    }
}
