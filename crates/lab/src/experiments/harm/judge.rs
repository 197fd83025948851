//! A cell has harm in each column in which the server is worse with us than as it is.

use super::{CARD, Cell, MOVES, RESTART, ours, pairing};
use crate::experiment::Pairing;
use crate::result::{Expectation, Outcome};
use crate::trials::server::How;
use crate::{measure, stats};

/// The metrics of which the ratio to the server as it is counts.
pub const RATIOS: [&str; 3] = ["latency_ms_mean", "latency_ms_p99", "busiest"];
/// The metrics that may not grow at all, all rounds together.
const SUMS: [&str; 3] = ["lost", "complaints", "failed"];
/// The metrics that may grow by a little, as other processes are measured too: CPUs in use without load, seconds until ready.
const MARGINS: [(&str, f64); 2] = [("idle_cpus", 0.2), ("ready_s", 1.0)];
/// How many times the value of the server as it is is no harm.
const BAR: f64 = 1.05;

/// The metrics in which a way is worse than the server as it is. None where either was not measured.
pub fn worse(outcome: &Outcome, cell: &Cell) -> Option<Vec<&'static str>> {
    let (ours, theirs) = (cell.name(), cell.with(How::AsItIs).name());
    let (found, before) = (outcome.variant(&ours)?, outcome.variant(&theirs)?);
    let total = |name: &str, metric: &str| outcome.values(name, metric).iter().sum::<f64>();
    let ratios = RATIOS.into_iter().filter(|metric| {
        let compared = pairing(cell, metric);
        excess(outcome, &compared).is_some_and(|times| times > BAR)
    });
    // A server that restarts may lose what it has just accepted, with us and without: how many is chance.
    let by_chance = cell.is(RESTART);
    let sums = SUMS.into_iter().filter(|metric| {
        let (more, less) = (total(&ours, metric), total(&theirs, metric));
        more > less && !(by_chance && is_chance(more as u64, less as u64))
    });
    let margins = MARGINS.into_iter().filter(|(metric, margin)| {
        let limit = before.median(metric).map(|value| value * BAR + margin);
        let most = found.metrics.get(*metric).map(|m| {
            if *metric == "ready_s" {
                m.median
            } else {
                m.max
            }
        });
        most.zip(limit).is_some_and(|(most, limit)| most > limit)
    });
    let mut all: Vec<&str> = ratios
        .chain(sums)
        .chain(margins.map(|(metric, _)| metric))
        .collect();
    if total(&ours, "active_at_end") > 0.0 {
        all.push("active_at_end");
    }
    let moves = outcome.values(&ours, "moves");
    if cell.is(MOVES) && !moves.is_empty() {
        let wanted = outcome.parameters.get("moves").and_then(|w| w.as_f64());
        if wanted.is_some_and(|wanted| stats::min(moves) < wanted) {
            all.push("moves");
        }
    }
    Some(all)
}

/// Whether one of two equal causes has so many more events than the other in one of a hundred cases or more.
fn is_chance(more: u64, less: u64) -> bool {
    let all = more + less;
    // The terms of the binomial distribution, from the last one down.
    let mut term = 0.5_f64.powi(i32::try_from(all).unwrap_or(i32::MAX));
    let mut tail = 0.0;
    for k in (more..=all).rev() {
        tail += term;
        term *= k as f64 / (all - k + 1) as f64;
    }
    tail >= 0.01
}

/// How many times the value as it is ours is, beyond the spread of the rounds: every round's ratio exceeds it, or the
/// median's does after a division by the spread of the rounds of the server as it is.
fn excess(outcome: &Outcome, compared: &Pairing) -> Option<f64> {
    let found = outcome
        .comparisons
        .iter()
        .find(|c| c.name == compared.name)?;
    let before = outcome.values(&compared.b, &compared.metric);
    let spread = stats::max(before) / stats::min(before);
    Some(stats::min(&found.ratios).max(found.median / spread))
}

/// The variants that are worse than as it is in some column.
pub fn all_worse(outcome: &Outcome) -> Vec<String> {
    let bad = |cell: &Cell| worse(outcome, cell).is_some_and(|columns| !columns.is_empty());
    ours().filter(bad).map(|cell| cell.name()).collect()
}

/// Whether it was refused beforehand in each round.
pub fn refused<'a>(outcome: &'a Outcome, name: &str) -> Option<&'a str> {
    let found = outcome.variant(name)?;
    let lost = found.metrics.contains_key("lost");
    (!lost)
        .then(|| found.notes.get("refused").map(String::as_str))
        .flatten()
}

/// An expectation for each server, situation and way that was measured, and one that all servers were there.
pub fn all(outcome: &Outcome) -> Vec<Expectation> {
    let mut all = Vec::new();
    for cell in ours() {
        let name = cell.name();
        if outcome.variant(&name).is_none() {
            continue;
        }
        let bad = worse(outcome, &cell);
        let columns = bad.as_deref().unwrap_or_default().join(", ");
        let columns = if columns.is_empty() { "none" } else { &columns };
        let names = [("cell", &*name), ("columns", columns)];
        let count = bad.map(|bad| bad.len() as f64);
        all.push(CARD.expect_of("{cell}", &names, count));
    }
    all.push(measure::complete(&CARD, outcome));
    all
}

#[cfg(test)]
mod tests {
    use super::super::Harm;
    use super::*;
    use crate::experiment::Experiment;
    use crate::result::Comparison;
    use crate::result::tests::{self, SOUND, Values, failing, outcome};

    const NOTHING: Values<'static> = ("moves", &[0.0]);

    /// Judges gunicorn in a steady load, by the means of five rounds each, its losses while attached, and another metric.
    fn judged(theirs: [f64; 5], ours: [f64; 5], lost: f64, more: Values<'_>) -> Vec<String> {
        let mut all = super::ours();
        let cell = all.find(|cell| cell.name() == "gunicorn-sync/steady/attach");
        let compared = pairing(&cell.unwrap(), "latency_ms_mean");
        let lost = [lost];
        let of = |mean: [f64; 5]| (mean, SOUND[1..].to_vec());
        let ((after, mut attached), (before, mut as_it_is)) = (of(ours), of(theirs));
        attached.extend([("latency_ms_mean", &after[..]), ("lost", &lost[..]), more]);
        as_it_is.extend([("latency_ms_mean", &before[..]), ("lost", &[1.0][..])]);
        as_it_is.push(("idle_cpus", &[0.0]));
        let mut found = outcome(&[(&compared.a, &attached), (&compared.b, &as_it_is)]);
        let ratios = stats::paired_ratios(&ours, &theirs);
        found.comparisons = vec![Comparison {
            median: stats::median(&ratios),
            ratios,
            ..tests::ratio(compared.name, 0.0)
        }];
        failing(Harm.judge(&found))
    }

    #[test]
    fn harm_is_what_lies_beyond_the_spread_of_the_rounds() {
        let (even, wide) = ([1.0; 5], [1.0, 2.0, 1.0, 1.0, 1.0]);
        let bad = ["gunicorn-sync/steady/attach"];
        assert!(judged(even, [1.05; 5], 1.0, NOTHING).is_empty());
        assert_eq!(judged(even, [1.06; 5], 1.0, NOTHING), bad);
        // The median alone is enough where rounds as it is are alike, and not where they differ as much.
        let mixed = [1.0, 1.2, 1.2, 1.2, 1.2];
        assert_eq!(judged(even, mixed, 1.0, NOTHING), bad);
        assert!(judged(wide, mixed, 1.0, NOTHING).is_empty());
    }

    #[test]
    fn a_few_more_events_are_chance() {
        assert!(is_chance(1, 0) && is_chance(6, 0) && is_chance(10, 2));
        assert!(!is_chance(7, 0) && !is_chance(12, 2));
    }

    #[test]
    fn losses_spinning_and_drift_are_harm() {
        let (even, bad) = ([1.0; 5], ["gunicorn-sync/steady/attach"]);
        assert_eq!(judged(even, even, 2.0, NOTHING), bad);
        assert_eq!(judged(even, even, 1.0, ("idle_cpus", &[0.0, 1.0])), bad);
        assert!(judged(even, even, 1.0, ("idle_cpus", &[0.1])).is_empty());
        assert_eq!(judged(even, even, 1.0, ("active_at_end", &[1.0])), bad);
        assert_eq!(judged(even, even, 0.0, ("failed", &[1.0])), bad);
    }
}
