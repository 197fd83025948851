//! Compares the expectations with the measured numbers. It is pure: it works on a result read from a file.

use super::workload::{WORKERS, chance_of_uneven};
use super::{CARD, restart, summary};
use crate::published::Published;
use crate::result::{Expectation, Outcome, Variant};
use crate::{measure, stats};

pub const KEPT_EXCLUSIVE_TO_OURS: &str =
    "kept: mean of shared-epoll-exclusive / mean of least-connections+rescue";
pub const KEPT_OURS_TO_HASH: &str =
    "kept: mean of least-connections+rescue / mean of reuseport-hash";
pub const RESCUE_TO_SHARED: &str =
    "stuck: mean of least-connections+rescue / mean of shared-accept";
pub const HASH_TO_RESCUE: &str = "stuck: mean of reuseport-hash / mean of least-connections+rescue";
pub const RESCUE_TO_LEAST: &str =
    "stuck: mean of least-connections+rescue / mean of least-connections";
pub const P99_HASH_TO_RESCUE: &str =
    "stuck: p99 of reuseport-hash / p99 of least-connections+rescue";
pub const CPU_DEVIATION: &str =
    "cpu: deviation of reuseport-hash / deviation of shared-epoll-exclusive";
pub const CPU_MEAN: &str = "cpu: mean of reuseport-hash / mean of shared-epoll-exclusive";
pub const CPU_DEVIATION_OURS: &str =
    "cpu: deviation of reuseport-hash / deviation of least-connections+rescue";
pub const CPU_MEAN_OURS: &str =
    "cpu: mean of least-connections+rescue / mean of shared-epoll-exclusive";

/// All comparisons of the experiment.
pub const COMPARED: [&str; 10] = [
    KEPT_EXCLUSIVE_TO_OURS,
    KEPT_OURS_TO_HASH,
    RESCUE_TO_SHARED,
    HASH_TO_RESCUE,
    RESCUE_TO_LEAST,
    P99_HASH_TO_RESCUE,
    CPU_DEVIATION,
    CPU_MEAN,
    CPU_DEVIATION_OURS,
    CPU_MEAN_OURS,
];

/// How far from even the shares may be beyond what chance explains.
const EVEN: f64 = 0.10;

/// All expectations of the experiment.
pub fn judge(outcome: &Outcome) -> Vec<Expectation> {
    let mut expectations: Vec<Expectation> = kept(outcome).into();
    expectations.extend(summary::judge(outcome));
    expectations.extend([
        CARD.expect(
            "stuck-as-good-as-one-queue",
            outcome.ratio(RESCUE_TO_SHARED),
        ),
        CARD.expect("stuck-hash-is-worse", outcome.ratio(HASH_TO_RESCUE)),
        evenness(outcome),
    ]);
    expectations.extend(measure::sound(outcome));
    expectations.push(CARD.expect("all-answered", missing(outcome)));
    expectations.push(measure::counted_out(outcome));
    expectations.extend(cpu(outcome));
    expectations
}

/// The expectations where connections are kept.
fn kept(outcome: &Outcome) -> [Expectation; 3] {
    let ours = outcome.values("kept/least-connections+rescue", "share_max_over_mean");
    [
        CARD.expect(
            "kept-exclusive-collapses",
            outcome.ratio(KEPT_EXCLUSIVE_TO_OURS),
        ),
        CARD.expect("kept-as-good-as-hash", outcome.ratio(KEPT_OURS_TO_HASH)),
        CARD.expect("kept-even", stats::most(ours)),
    ]
}

/// The source's own claims, at a size where both sides of a noisy machine agree with it.
fn cpu(outcome: &Outcome) -> [Expectation; 2] {
    let published = Published::parse(CARD.published);
    let of = |series: &str, metric: &str| published.value(series, metric);
    let cited = |metric: &str| {
        let ratio = of("multiple queues", metric).zip(of("single queue", metric));
        ratio.map_or_else(String::new, |(a, b)| {
            format!("Majkowski, 2017: {:.2} times", a / b)
        })
    };
    let expect = |name: &str, metric: &str, comparison: &str| {
        let cited = cited(metric);
        CARD.expect_of(name, &[("cited", &*cited)], outcome.ratio(comparison))
    };
    [
        expect("cpu-hash-scatters", "latency_ms_stddev", CPU_DEVIATION),
        expect("cpu-means-alike", "latency_ms_mean", CPU_MEAN),
    ]
}

/// Share of each worker over all rounds together: the workers are the same ones in each.
pub fn pooled_shares(variant: &Variant) -> Vec<f64> {
    let share = |worker: usize| {
        variant
            .metrics
            .get(&format!("share_worker_{worker}"))
            .map(|m| stats::mean(&m.values))
    };
    (0..).map_while(share).collect()
}

fn evenness(outcome: &Outcome) -> Expectation {
    let variant = outcome.variant("stuck/least-connections+rescue");
    let n: f64 = outcome
        .values("stuck/least-connections+rescue", "requests")
        .iter()
        .sum();
    let by_chance = if n > 0.0 { chance_of_uneven(n) } else { 0.0 };
    let limit = by_chance.max(EVEN);
    let within = if by_chance > EVEN {
        format!(
            "±{:.0} % of even (±10 % at full size; {n:.0} requests are too few to tell it from chance, three standard deviations of which are {:.1} %)",
            limit * 100.0,
            by_chance * 100.0
        )
    } else {
        "±10 % of even".into()
    };
    let furthest = variant.map(|v| {
        let shares = pooled_shares(v);
        shares
            .iter()
            .map(|s| (s * WORKERS as f64 - 1.0).abs())
            .fold(if shares.len() == WORKERS { 0.0 } else { 1.0 }, f64::max)
    });
    let names = [("within", &*within), ("limit", &*limit.to_string())];
    CARD.expect_of("stuck-shares-even", &names, furthest)
}

fn missing(outcome: &Outcome) -> Option<f64> {
    let mut missing = 0.0;
    for variant in &outcome.variants {
        let workload = variant.name.split('/').next()?;
        if workload == restart::NAME {
            // The losses of a restart have a column of their own; see [`summary`].
            continue;
        }
        let planned = outcome.parameter_u64(&format!("{workload}_requests"))? as f64;
        missing += variant
            .metrics
            .get("requests")?
            .values
            .iter()
            .map(|answered| (planned - answered).abs())
            .sum::<f64>();
    }
    (!outcome.variants.is_empty()).then_some(missing)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::tests::{Values, failing as fail, outcome as of_variants, ratio};
    use crate::result::{Metric, SCHEMA};

    fn outcome(
        ratios: [f64; 4],
        shares: [f64; 4],
        requests: f64,
        errors: f64,
        active: f64,
    ) -> Outcome {
        let metric = |value: f64| Metric::new("", vec![value]);
        let mut metrics: std::collections::BTreeMap<String, Metric> = [
            ("requests", requests),
            ("errors", errors),
            ("server_requests", requests),
            ("client_answers", requests),
            ("client_unanswered", 0.0),
            ("active_at_end", active),
        ]
        .map(|(n, v)| (n.to_owned(), metric(v)))
        .into();
        for (worker, share) in shares.iter().enumerate() {
            metrics.insert(format!("share_worker_{worker}"), metric(*share));
        }
        let names = [RESCUE_TO_SHARED, HASH_TO_RESCUE, CPU_DEVIATION, CPU_MEAN];
        Outcome {
            schema: SCHEMA.into(),
            experiment: "tills".into(),
            version: String::new(),
            commit: String::new(),
            environment: crate::environment::Watch::start().finish(),
            parameters: serde_json::json!({"stuck_requests": 10_000})
                .as_object()
                .unwrap()
                .clone(),
            variants: vec![Variant {
                name: "stuck/least-connections+rescue".into(),
                metrics,
                distributions: Default::default(),
                slices: None,
                notes: Default::default(),
            }],
            contrasts: Vec::new(),
            comparisons: std::iter::zip(names, ratios)
                .map(|(name, value)| ratio(name, value))
                .collect(),
            derived: vec![],
            expectations: vec![],
        }
    }

    /// The names of the expectations of stuck and cpu that fail.
    fn failing(outcome: &Outcome) -> Vec<String> {
        let others = kept(outcome).into_iter().chain(summary::judge(outcome));
        let others: Vec<String> = others.map(|e| e.name).collect();
        let mut names = fail(judge(outcome));
        names.retain(|name| !others.contains(name));
        names
    }

    #[test]
    fn each_limit_of_kept_bites() {
        let failed = |to_ours: f64, to_hash: f64, busiest: f64| {
            let busiest = [1.0, busiest];
            let ours: &[Values<'_>] = &[("share_max_over_mean", &busiest)];
            let mut outcome = of_variants(&[("kept/least-connections+rescue", ours)]);
            outcome.comparisons = vec![
                ratio(KEPT_EXCLUSIVE_TO_OURS, to_ours),
                ratio(KEPT_OURS_TO_HASH, to_hash),
            ];
            fail(kept(&outcome).into())
        };
        assert_eq!(failed(10.0, 1.1, 1.1), Vec::<String>::new());
        assert_eq!(failed(9.9, 1.1, 1.1), ["kept-exclusive-collapses"]);
        assert_eq!(failed(10.0, 1.11, 1.1), ["kept-as-good-as-hash"]);
        assert_eq!(failed(10.0, 1.1, 1.11), ["kept-even"]);
    }

    #[test]
    fn each_limit_bites() {
        const EVEN: [f64; 4] = [0.25; 4];
        let good = || outcome([1.0, 5.0, 10.0, 1.03], EVEN, 10_000.0, 0.0, 0.0);
        assert_eq!(failing(&good()), Vec::<String>::new());
        assert_eq!(
            failing(&outcome([1.16, 5.0, 10.0, 1.0], EVEN, 10_000.0, 0.0, 0.0)),
            ["stuck-as-good-as-one-queue"]
        );
        assert_eq!(
            failing(&outcome([1.0, 2.9, 10.0, 1.0], EVEN, 10_000.0, 0.0, 0.0)),
            ["stuck-hash-is-worse"]
        );
        assert_eq!(
            failing(&outcome([1.0, 5.0, 1.9, 1.0], EVEN, 10_000.0, 0.0, 0.0)),
            ["cpu-hash-scatters"]
        );
        assert_eq!(
            failing(&outcome([1.0, 5.0, 9.0, 1.3], EVEN, 10_000.0, 0.0, 0.0)),
            ["cpu-means-alike"]
        );
        assert_eq!(
            failing(&outcome(
                [1.0, 5.0, 9.0, 1.0],
                [0.4, 0.2, 0.2, 0.2],
                10_000.0,
                0.0,
                0.0
            )),
            ["stuck-shares-even"]
        );
        assert_eq!(
            failing(&outcome([1.0, 5.0, 9.0, 1.0], EVEN, 9_999.0, 1.0, 0.0)),
            ["no-errors", "all-answered"]
        );
        assert_eq!(
            failing(&outcome([1.0, 5.0, 9.0, 1.0], EVEN, 10_000.0, 0.0, 1.0)),
            ["active-returns-to-0"]
        );
    }

    #[test]
    fn ten_percent_is_the_limit_once_the_sample_can_tell() {
        let shares = [0.25 * 1.12, 0.25 * 0.96, 0.25 * 0.96, 0.25 * 0.96];
        let verdict = |n: f64| evenness(&outcome([1.0; 4], shares, n, 0.0, 0.0)).holds;
        assert!(verdict(4_500.0), "12 % off is chance in a small sample");
        assert!(!verdict(50_000.0), "and is not in a large one");
    }

    #[test]
    fn what_was_not_measured_does_not_hold() {
        let mut empty = outcome([1.0; 4], [0.25; 4], 1.0, 0.0, 0.0);
        empty.variants.clear();
        empty.comparisons.clear();
        assert!(
            judge(&empty)
                .iter()
                .all(|e| !e.holds && e.measured.is_none())
        );
    }
}
