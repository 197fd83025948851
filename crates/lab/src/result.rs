//! The result of an experiment.

pub use wakeone_result::outcome::*;

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::environment::Watch;

    #[test]
    fn each_reason_is_said_once() {
        let mut outcome = outcome(&[]);
        assert_eq!(outcome.left_out(), None);
        let none = serde_json::json!({"a": "no x", "b": "no y", "c": "no x", "d": "no x", "e": "no x", "f": "no x"});
        outcome.parameters.insert("left_out".into(), none);
        let said = "Not measured: a, c and 3 more (no x); b (no y).";
        assert_eq!(outcome.left_out().as_deref(), Some(said));
    }

    /// A metric's name and its values, one a round.
    pub type Values<'a> = (&'a str, &'a [f64]);

    /// The counts of a run in which server and client agree.
    pub const SOUND: [Values<'static>; 4] = [
        ("errors", &[0.0]),
        ("server_requests", &[9.0]),
        ("client_answers", &[9.0]),
        ("client_unanswered", &[0.0]),
    ];

    /// A comparison that came to this.
    pub fn ratio(name: impl Into<String>, median: f64) -> Comparison {
        Comparison {
            name: name.into(),
            a: String::new(),
            b: String::new(),
            metric: String::new(),
            ratios: vec![median],
            median,
        }
    }

    /// The names of those that do not hold.
    pub fn failing(judged: Vec<Expectation>) -> Vec<String> {
        let bad = judged.into_iter().filter(|e| !e.holds);
        bad.map(|e| e.name).collect()
    }

    /// An outcome with these variants and nothing else.
    pub fn outcome(variants: &[(&str, &[Values<'_>])]) -> Outcome {
        let metric =
            |(name, values): &Values<'_>| ((*name).to_owned(), Metric::new("", values.to_vec()));
        let variant = |(name, metrics): &(&str, &[Values<'_>])| Variant {
            name: (*name).to_owned(),
            metrics: metrics.iter().map(metric).collect(),
            distributions: BTreeMap::new(),
            slices: None,
            notes: BTreeMap::new(),
        };
        Outcome {
            derived: Vec::new(),
            schema: SCHEMA.into(),
            experiment: "test".into(),
            version: "0".into(),
            commit: "0".into(),
            environment: Watch::start().finish(),
            parameters: serde_json::Map::new(),
            variants: variants.iter().map(variant).collect(),
            comparisons: Vec::new(),
            contrasts: Vec::new(),
            expectations: Vec::new(),
        }
    }
}
