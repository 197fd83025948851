//! One measurement, before the rounds are put together.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::distribution::Distribution;
use crate::slices::Slices;

/// One measurement of one variant.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// `(unit, value)` by metric name.
    pub metrics: BTreeMap<String, (String, f64)>,
    /// Distributions by name.
    pub distributions: BTreeMap<String, Distribution>,
    /// The counts of the load's slices, where it was sent in slices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slices: Option<Slices>,
    /// Words that belong to the numbers, as the reason of a refusal, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub notes: BTreeMap<String, String>,
}

impl Sample {
    /// Adds a number.
    pub fn put(&mut self, name: impl Into<String>, unit: &str, value: f64) {
        self.metrics.insert(name.into(), (unit.into(), value));
    }
}
