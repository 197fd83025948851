//! A folder an experiment: what was published, how it is measured here, how it is judged.

mod cost;
mod cycle;
mod herd;
mod spread;
mod tills;

use crate::experiment::Experiment;

/// All experiments, in the order in which they are best read.
pub fn all() -> &'static [&'static dyn Experiment] {
    &[
        &herd::Herd,
        &spread::Spread,
        &tills::Tills,
        &cycle::Cycle,
        &cost::Cost,
    ]
}
