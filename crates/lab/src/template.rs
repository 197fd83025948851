//! Texts with names in braces that stand for something else: for words of the experiment, or for numbers of its result.

use crate::present::number;
use crate::result::Outcome;
use crate::stats;

/// A text in which each `{name}` of these is replaced by its value.
pub fn fill<'a, V: AsRef<str> + 'a>(
    text: &str,
    names: impl IntoIterator<Item = (&'a str, V)>,
) -> String {
    let mut text = text.to_owned();
    for (name, value) in names {
        text = text.replace(&format!("{{{name}}}"), value.as_ref());
    }
    text
}

/// A text in which numbers of a result are named: `{VARIANT METRIC}` is the median of the rounds, `{most VARIANT METRIC}` the
/// largest, `{least …}` the smallest and `{sum …}` the sum; `{ratio COMPARISON}` is the median of the ratios. None where one of
/// them was not measured.
pub fn numbers(text: &str, outcome: &Outcome) -> Option<String> {
    let mut pieces = text.split('{');
    let mut told = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let (name, rest) = piece.split_once('}')?;
        told += &number(value(name, outcome)?);
        told += rest;
    }
    Some(told)
}

fn value(name: &str, outcome: &Outcome) -> Option<f64> {
    if let Some(comparison) = name.strip_prefix("ratio ") {
        let made = || {
            let (metric, variants) = comparison.split_once(": ")?;
            let (a, b) = variants.split_once(" / ")?;
            outcome.ratio_of(metric, a, b)
        };
        return outcome.ratio(comparison).or_else(made);
    }
    let (what, metric) = name.rsplit_once(' ')?;
    match what.split_once(' ') {
        Some(("most", variant)) => stats::most(outcome.values(variant, metric)),
        Some(("least", variant)) => stats::least(outcome.values(variant, metric)),
        Some(("sum", variant)) => stats::sum(outcome.values(variant, metric)),
        _ => outcome.median(what, metric),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::tests::{outcome, ratio};

    #[test]
    fn names_stand_for_words_and_for_numbers() {
        let mut found = outcome(&[("a/b", &[("ms", &[1.0, 3.0, 2.0])])]);
        found.comparisons = vec![ratio("a / b", 0.5)];
        let text = fill(
            "{who}: {a/{who} ms} ms, {ratio a / b} times.",
            [("who", "b")],
        );
        assert_eq!(
            numbers(&text, &found).as_deref(),
            Some("b: 2 ms, 0.50 times.")
        );
        for missing in ["{a/c ms}", "{a/b s}", "{ratio a / c}", "{who}", "{a/b ms"] {
            assert_eq!(numbers(missing, &found), None, "{missing}");
        }
    }
}
