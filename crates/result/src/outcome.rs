//! The result of an experiment: typed data, the same for all of them, after `docs/schema/lab-result.schema.json`.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

use crate::distribution::Distribution;
use crate::environment::Environment;
use crate::slices::{Contrast, Per, Slices};
use crate::stats;

/// The value of `schema` in every result file of this shape.
pub const SCHEMA: &str = "wakeone-lab-result/1";

/// The JSON Schema (draft 2020-12) of a result file.
pub const SCHEMA_TEXT: &str = include_str!("../../../docs/schema/lab-result.schema.json");

/// Everything that one run of one experiment found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// [`SCHEMA`].
    pub schema: String,
    /// The experiment's name, as in `wakeone-lab list`.
    pub experiment: String,
    /// Version of Wakeone that measured.
    pub version: String,
    /// Git commit that it was built from; `unknown` where there was no git, `+changes` behind it where files differed.
    pub commit: String,
    /// The machine and how quiet it was.
    pub environment: Environment,
    /// The parameters of the run: seed, rounds, sizes, rates.
    pub parameters: serde_json::Map<String, serde_json::Value>,
    /// The measured numbers of each variant.
    pub variants: Vec<Variant>,
    /// Ratios of two variants, paired by round.
    pub comparisons: Vec<Comparison>,
    /// Ratios of two arms that took turns within one load, with how sure they are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub contrasts: Vec<Contrast>,
    /// Numbers computed over several variants, as the growth of a series.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub derived: Vec<Derived>,
    /// The expectations, and whether each of them holds.
    pub expectations: Vec<Expectation>,
}

/// One way of doing it, measured once in every round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Variant {
    /// `workload/way`, such as `stuck/least-connections`.
    pub name: String,
    /// The numbers, by name; the unit is in the name's middle or end and in [`Metric::unit`].
    pub metrics: BTreeMap<String, Metric>,
    /// Whole distributions, all rounds merged, by name (`latency_ms`).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub distributions: BTreeMap<String, Distribution>,
    /// The counts of its loads' slices, where they were sent in slices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slices: Option<Slices>,
    /// Words that belong to the numbers, by name; the last round's where rounds differ.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub notes: BTreeMap<String, String>,
}

/// One number, once a round, and its middle and ends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Metric {
    /// Unit of the values.
    pub unit: String,
    /// One value a round, in the order of the rounds.
    pub values: Vec<f64>,
    /// Median of the values.
    pub median: f64,
    /// The smallest value.
    pub min: f64,
    /// The largest value.
    pub max: f64,
}

/// `a / b` in one metric, round by round. A disturbance of the machine that both share in a round cancels out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Name of the comparison.
    pub name: String,
    /// The variant above the line.
    pub a: String,
    /// The variant below the line.
    pub b: String,
    /// The metric compared.
    pub metric: String,
    /// One ratio a round.
    pub ratios: Vec<f64>,
    /// Median of the ratios.
    pub median: f64,
}

/// A number computed over several variants.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Derived {
    /// Name of the number.
    pub name: String,
    /// The meaning of the number, as a sentence.
    pub meaning: String,
    /// Published rather than measured here.
    pub published: bool,
    /// Unit of the value.
    pub unit: String,
    /// The number.
    pub value: f64,
}

/// A claim, where it comes from, what was measured, and whether it holds here.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Expectation {
    /// Name of the expectation.
    pub name: String,
    /// The claim, with its limit.
    pub claim: String,
    /// The source of the claim.
    pub source: String,
    /// The number that was held against the claim; absent where it could not be measured.
    pub measured: Option<f64>,
    /// Whether it holds. A claim that could not be measured does not hold.
    pub holds: bool,
}

impl Metric {
    /// A metric from its value of each round.
    pub fn new(unit: impl Into<String>, values: Vec<f64>) -> Self {
        let (median, min, max) = (
            stats::median(&values),
            stats::min(&values),
            stats::max(&values),
        );
        Self {
            unit: unit.into(),
            values,
            median,
            min,
            max,
        }
    }
}

impl Variant {
    /// Median of a metric over the rounds.
    pub fn median(&self, metric: &str) -> Option<f64> {
        self.metrics.get(metric).map(|m| m.median)
    }
}

impl Expectation {
    /// An expectation that holds when `measured` is there and `test` is true of it.
    pub fn new(
        name: impl Into<String>,
        claim: impl Into<String>,
        source: impl Into<String>,
        measured: Option<f64>,
        test: impl Fn(f64) -> bool,
    ) -> Self {
        let measured = measured.filter(|m| m.is_finite());
        Self {
            name: name.into(),
            claim: claim.into(),
            source: source.into(),
            holds: measured.is_some_and(test),
            measured,
        }
    }
}

impl Outcome {
    /// The variant of this name.
    pub fn variant(&self, name: &str) -> Option<&Variant> {
        self.variants.iter().find(|v| v.name == name)
    }

    /// Median over the rounds of one metric of one variant.
    pub fn median(&self, variant: &str, metric: &str) -> Option<f64> {
        self.variant(variant)?.median(metric)
    }

    /// The values, a round each, of one metric of one variant; empty where there is none.
    pub fn values(&self, variant: &str, metric: &str) -> &[f64] {
        self.variant(variant)
            .and_then(|v| v.metrics.get(metric))
            .map_or(&[], |m| &m.values)
    }

    /// Names the variants that could not be measured, and why, as a sentence. It reads the parameter `left_out`, and
    /// gives each reason once.
    pub fn left_out(&self) -> Option<String> {
        let all = self.parameters.get("left_out")?.as_object()?;
        let mut by_reason: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (what, why) in all {
            let named = by_reason.entry(why.as_str().unwrap_or_default());
            named.or_default().push(what);
        }
        let said = by_reason.into_iter().map(|(why, named)| match named.len() {
            1..=4 => format!("{} ({why})", named.join(", ")),
            n => format!("{}, {} and {} more ({why})", named[0], named[1], n - 2),
        });
        let said: Vec<String> = said.collect();
        (!said.is_empty()).then(|| format!("Not measured: {}.", said.join("; ")))
    }

    /// Median of a comparison's ratios.
    pub fn ratio(&self, comparison: &str) -> Option<f64> {
        self.comparisons
            .iter()
            .find(|c| c.name == comparison)
            .map(|c| c.median)
    }

    /// Median of the ratios of two variants in a metric, round by round.
    pub fn ratio_of(&self, metric: &str, a: &str, b: &str) -> Option<f64> {
        let of = |name: &str| self.values(name, metric);
        let ratios = stats::paired_ratios(of(a), of(b));
        (!ratios.is_empty()).then(|| stats::median(&ratios))
    }

    /// The ratio of two arms of a variant that was measured in slices.
    pub fn contrast(&self, variant: &str, (a, b): (&str, &str), per: Per) -> Option<&Contrast> {
        let mut all = self.contrasts.iter();
        all.find(|c| c.variant == variant && c.a == a && c.b == b && c.per == per)
    }

    /// The derived number of this name.
    pub fn derived(&self, name: &str) -> Option<f64> {
        self.derived
            .iter()
            .find(|d| d.name == name)
            .map(|d| d.value)
    }

    /// Whether every expectation holds.
    pub fn holds(&self) -> bool {
        self.expectations.iter().all(|e| e.holds)
    }

    /// A whole number from the parameters.
    pub fn parameter_u64(&self, name: &str) -> Option<u64> {
        self.parameters.get(name)?.as_u64()
    }
}
