//! The expectations that are not numbers of the card. It is pure: it works on a result read from a file.

use super::{CARD, TRIALS, best, summary};
use crate::result::{Expectation, Outcome};
use crate::trials;
use crate::trials::pooled_shares;

/// How far from even the shares may be beyond what chance explains.
const EVEN: f64 = 0.10;
/// One request of `stuck` in this many is a slow one.
const STUCK_ONE_IN: f64 = 100.0;
/// The share of its time that each worker of `stuck` is stuck: 1 % of 1,000 requests/s take 100 ms, over 4 workers.
const STUCK: f64 = 0.25;

/// All expectations of the experiment.
pub fn judge(outcome: &Outcome) -> Vec<Expectation> {
    let mut expectations = trials::judge::judge(&TRIALS, outcome);
    expectations.extend(summary::judge(outcome));
    expectations.extend(best::judge(outcome));
    expectations.push(evenness(outcome));
    expectations.push(CARD.expect("all-answered", missing(outcome)));
    expectations
}

/// How far from even (0.1 is ten percent) the share of a worker in `stuck` may be by chance alone: three standard
/// deviations for `n` requests.
///
/// Two things are drawn. The first is the worker that gets a request: binomial with chance 1/k, so the relative
/// deviation is √((k−1)/n). The second is the worker that gets one of the m = n/100 slow requests, during which it
/// takes nothing else. Its stuck time has the relative deviation √((k−1)/m). This time is the share f of all its time,
/// so the deviation is f/(1−f) as large in the requests that it takes. At 1,000 requests/s, 1 % of 100 ms over 4
/// workers, f is 0.25.
fn chance_of_uneven(n: f64) -> f64 {
    let k = TRIALS.table.workers as f64;
    let slow = n / STUCK_ONE_IN;
    let lever = STUCK / (1.0 - STUCK);
    3.0 * ((k - 1.0) / n + (k - 1.0) / slow * lever * lever).sqrt()
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
            .map(|s| (s * TRIALS.table.workers as f64 - 1.0).abs())
            .fold(
                if shares.len() == TRIALS.table.workers {
                    0.0
                } else {
                    1.0
                },
                f64::max,
            )
    });
    let names = [("within", &*within), ("limit", &*limit.to_string())];
    CARD.expect_of("stuck-shares-even", &names, furthest)
}

fn missing(outcome: &Outcome) -> Option<f64> {
    let mut missing = 0.0;
    for variant in &outcome.variants {
        let workload = variant.name.split('/').next()?;
        if workload == summary::RESTART {
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
    use crate::result::tests::outcome;

    #[test]
    fn chance_shrinks_with_the_sample_and_is_no_excuse_at_full_size() {
        assert!(chance_of_uneven(4_500.0) > 0.1);
        assert!(chance_of_uneven(50_000.0) < 0.1);
        assert!((chance_of_uneven(10_000.0) / chance_of_uneven(40_000.0) - 2.0).abs() < 1e-9);
    }

    #[test]
    fn ten_percent_is_the_limit_once_the_sample_can_tell() {
        let verdict = |n: f64, most: f64| {
            let (most, rest) = ([0.25 * most], [0.25 * (4.0 - most) / 3.0]);
            let shares = [&most, &rest, &rest, &rest];
            let names = [
                "share_worker_0",
                "share_worker_1",
                "share_worker_2",
                "share_worker_3",
            ];
            let mut metrics: Vec<_> = std::iter::zip(names, shares.map(|s| &s[..])).collect();
            let requests = [n];
            metrics.push(("requests", &requests));
            let found = outcome(&[("stuck/least-connections+rescue", &metrics)]);
            evenness(&found).holds
        };
        assert!(
            verdict(4_500.0, 1.12),
            "12 % off is chance in a small sample"
        );
        assert!(!verdict(50_000.0, 1.12), "and is not in a large one");
        assert!(verdict(50_000.0, 1.09));
    }

    #[test]
    fn who_has_not_answered_all_is_found() {
        let missing = |answered: &[f64]| {
            let variant = ("stuck/shared-accept", &[("requests", answered)][..]);
            let mut found = outcome(&[variant]);
            found.parameters.insert("stuck_requests".into(), 100.into());
            super::missing(&found)
        };
        assert_eq!(missing(&[100.0, 100.0]), Some(0.0));
        assert_eq!(missing(&[100.0, 98.0]), Some(2.0));
    }
}
