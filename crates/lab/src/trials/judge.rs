//! The numbers of an experiment's expectations, from a result. It is pure: it works on a result read from a file.

use super::table::{Judge, Sound, Trials};
use crate::result::{Expectation, Outcome, Variant};
use crate::{answers, measure, stats};

impl Judge {
    /// The names of the variants that it looks at.
    pub fn variants(&self) -> impl Iterator<Item = &String> {
        let pairs = self.ratio.iter().chain(&self.minus);
        let of_pairs = pairs.flat_map(|(a, b)| [a, b]);
        of_pairs.chain(&self.worst).chain(&self.sum)
    }

    /// Whether it is of what was not to be measured, or could not be on that machine.
    fn is_left_out(&self, trials: &Trials, outcome: &Outcome) -> bool {
        let whole = trials.table.load.iter().filter(|load| load.whole);
        let heads: Vec<String> = whole.map(|load| format!("{}/", load.name)).collect();
        let not_planned = |name: &String| heads.iter().any(|head| name.starts_with(head));
        if is_quick(outcome) && self.variants().any(not_planned) {
            return true;
        }
        let left_out = outcome.parameters.get("left_out");
        let left_out = left_out.and_then(|all| all.as_object());
        self.variants()
            .any(|name| left_out.is_some_and(|all| all.contains_key(name)))
    }

    fn numbers(&self, outcome: &Outcome) -> Vec<f64> {
        let of = |name: &String| outcome.variant(name).and_then(|v| pooled(v, &self.metric));
        let ratios = self
            .ratio
            .iter()
            .filter_map(|(a, b)| outcome.ratio_of(&self.metric, a, b));
        let minus = self.minus.iter().filter_map(|(a, b)| Some(of(a)? - of(b)?));
        let rounds = self.worst.iter();
        let rounds = rounds.flat_map(|name| outcome.values(name, &self.metric).iter().copied());
        let sums = self.sum.iter();
        let sums = sums.filter_map(|name| stats::sum(outcome.values(name, &self.metric)));
        let all = ratios.chain(minus).chain(rounds).chain(sums);
        all.map(|value| value / self.per).collect()
    }
}

/// Whether it was measured with `--quick`.
fn is_quick(outcome: &Outcome) -> bool {
    let quick = outcome.parameters.get("quick");
    quick.and_then(|quick| quick.as_bool()).unwrap_or(false)
}

/// A metric of a variant over all rounds together: the sum. Of `lost_share` it is the part of all requests that failed.
pub fn pooled(variant: &Variant, metric: &str) -> Option<f64> {
    let sum = |metric: &str| stats::sum(&variant.metrics.get(metric)?.values);
    match metric {
        "lost_share" => {
            let (lost, answered) = (sum("errors")?, sum("requests")?);
            (lost + answered > 0.0).then(|| lost / (lost + answered))
        }
        other => sum(other),
    }
}

/// Compares the expectations with the measured numbers.
pub fn judge(trials: &Trials, outcome: &Outcome) -> Vec<Expectation> {
    let card = trials.card;
    let mut judged = Vec::new();
    let loads = trials.loads(is_quick(outcome));
    let judges = trials.table.judge.iter();
    for (names, one) in judges.flat_map(|judge| judge.all(&loads)) {
        let numbers = one.numbers(outcome);
        if one.is_left_out(trials, outcome) || (one.optional && numbers.is_empty()) {
            continue;
        }
        let names: Vec<(&str, &str)> = names.iter().map(|(n, v)| (*n, v.as_str())).collect();
        let worst = card.worst_of(&one.expect, &names, &numbers);
        judged.push(card.expect_of(&one.expect, &names, worst));
    }
    for sound in &trials.table.sound {
        judged.push(match sound {
            Sound::NoErrors => measure::no_errors(outcome),
            Sound::CountsAgree => answers::agree(outcome),
            Sound::NoneActive => measure::counted_out(outcome),
        });
    }
    judged
}
