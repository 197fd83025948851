//! What ought to be seen, held against what was measured. Pure: works on a result read from a file.

use super::workload::{WORKERS, chance_of_uneven};
use super::{restart, summary};
use crate::experiment::Experiment;
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

/// Whose claim it is when it is nobody's but ours.
const OURS: &str = "Wakeone's own goal";
/// How far from even the shares may be beyond what chance explains.
const EVEN: f64 = 0.10;

/// All expectations of the experiment.
pub fn judge(outcome: &Outcome) -> Vec<Expectation> {
    let mut expectations = kept(outcome);
    expectations.extend(summary::judge(outcome));
    expectations.extend([
        Expectation::new(
            "stuck-as-good-as-one-queue",
            "With stuck workers, least-connections+rescue has at most 1.15 times the mean latency of one shared queue",
            OURS,
            outcome.ratio(RESCUE_TO_SHARED),
            |m| m <= 1.15,
        ),
        Expectation::new(
            "stuck-hash-is-worse",
            "With stuck workers, reuseport hash has at least 3 times the mean latency of least-connections+rescue",
            "Majkowski, 2017: a stuck worker stalls all that waits in its queue",
            outcome.ratio(HASH_TO_RESCUE),
            |m| m >= 3.0,
        ),
        evenness(outcome),
    ]);
    expectations.extend(measure::sound(outcome));
    expectations.extend([
        Expectation::new(
            "all-answered",
            "Every planned request of every variant is answered (requests missing)",
            OURS,
            missing(outcome),
            |m| m == 0.0,
        ),
        measure::counted_out(outcome),
    ]);
    expectations.extend(cpu(outcome));
    expectations
}

/// What is expected where connections are kept.
fn kept(outcome: &Outcome) -> Vec<Expectation> {
    let ours = outcome.values("kept/least-connections+rescue", "share_max_over_mean");
    vec![
        Expectation::new(
            "kept-exclusive-collapses",
            "With kept connections, one shared socket with EPOLLEXCLUSIVE has at least 10 times the mean latency of least-connections+rescue",
            "Majkowski, 2017: the busiest worker gets the load",
            outcome.ratio(KEPT_EXCLUSIVE_TO_OURS),
            |m| m >= 10.0,
        ),
        Expectation::new(
            "kept-as-good-as-hash",
            "With kept connections, least-connections+rescue has at most 1.1 times the mean latency of reuseport hash",
            OURS,
            outcome.ratio(KEPT_OURS_TO_HASH),
            |m| m <= 1.1,
        ),
        Expectation::new(
            "kept-even",
            "With kept connections, the busiest worker under least-connections+rescue answers at most 1.1 times its even share (worst round)",
            OURS,
            (!ours.is_empty()).then(|| stats::max(ours)),
            |m| m <= 1.1,
        ),
    ]
}

/// The source's own claims, at a size where both sides of a noisy machine agree with it.
fn cpu(outcome: &Outcome) -> Vec<Expectation> {
    let published = Published::parse(super::Tills.card().published);
    let ratio = |metric: &str| {
        Some(
            published.value("multiple queues", metric)?
                / published.value("single queue", metric)?,
        )
    };
    let cited = |metric: &str| {
        ratio(metric).map_or_else(String::new, |r| format!("Majkowski, 2017: {r:.2} times"))
    };
    vec![
        Expectation::new(
            "cpu-hash-scatters",
            "Under CPU load, latencies of reuseport hash deviate at least twice as much as those of one shared queue",
            cited("latency_ms_stddev"),
            outcome.ratio(CPU_DEVIATION),
            |m| m >= 2.0,
        ),
        Expectation::new(
            "cpu-means-alike",
            "Under CPU load, the means of reuseport hash and of one shared queue are within 25 % of each other",
            cited("latency_ms_mean"),
            outcome.ratio(CPU_MEAN),
            |m| (0.8..=1.25).contains(&m),
        ),
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
    let claim = if by_chance > EVEN {
        format!(
            "With stuck workers, the share of each worker under least-connections+rescue is within ±{:.0} % of even (±10 % at full size; {n:.0} requests are too few to tell it from chance, three standard deviations of which are {:.1} %)",
            limit * 100.0,
            by_chance * 100.0
        )
    } else {
        "With stuck workers, the share of each worker under least-connections+rescue is within ±10 % of even".into()
    };
    let furthest = variant.map(|v| {
        let shares = pooled_shares(v);
        shares
            .iter()
            .map(|s| (s * WORKERS as f64 - 1.0).abs())
            .fold(if shares.len() == WORKERS { 0.0 } else { 1.0 }, f64::max)
    });
    Expectation::new("stuck-shares-even", claim, OURS, furthest, |m| m <= limit)
}

fn missing(outcome: &Outcome) -> Option<f64> {
    let mut missing = 0.0;
    for variant in &outcome.variants {
        let workload = variant.name.split('/').next()?;
        if workload == restart::NAME {
            // What a restart loses is another column; see [`summary`].
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
            }],
            contrasts: Vec::new(),
            comparisons: std::iter::zip(names, ratios)
                .map(|(name, value)| ratio(name, value))
                .collect(),
            derived: vec![],
            expectations: vec![],
        }
    }

    /// What fails of all that concerns stuck and cpu.
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
            fail(kept(&outcome))
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
