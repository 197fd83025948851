//! Experiments that differ in numbers alone: servers, each under some load, compared with each other. Such an experiment is
//! its `card.toml`: this is the one engine for all of them.

pub mod beside;
pub mod judge;
pub mod load;
pub mod server;
mod show;
mod sizes;
pub mod table;
mod trial;

use std::sync::LazyLock;

use crate::card::Card;
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Pairing, Sample, Settings};
use crate::present::Block;
use crate::result::{Expectation, Outcome};
pub use show::{measured, of_load, pooled_shares, present};
pub use table::{Trials, Variant};

/// The plan of the measurement.
pub fn design(trials: &'static Trials, settings: &Settings) -> Design {
    let table = &trials.table;
    let quick = settings.quick;
    let mut design = Design {
        steady: &table.steady,
        ..trials.plan(quick)
    };
    let loads = trials.loads(quick);
    let planned = |variant: &Variant| loads.contains(&variant.load.name.as_str());
    for variant in trials.variants().filter(planned) {
        let name = variant.name();
        let arm = Arm {
            name: name.clone(),
            group: group(trials, &variant),
            seconds: variant.load.typical_s(quick) + 0.5,
        };
        design.offer(arm, &name, variant.who.lacks());
    }
    let mut pairings: Vec<Pairing> = Vec::new();
    for (_, judge) in table.judge.iter().flat_map(|one| one.all(&loads)) {
        for (a, b) in judge.ratio {
            let metric = judge.metric.clone();
            let name = format!("{metric}: {a} / {b}");
            pairings.push(Pairing { name, a, b, metric });
        }
    }
    let here = |name: &str| design.arms.iter().any(|arm| arm.name == name);
    pairings.retain(|one| here(&one.a) && here(&one.b));
    pairings.dedup();
    design.compare(pairings);
    design
}

/// The variants that are compared are near in time: those of a load, or where there is one load, those of a server.
fn group(trials: &'static Trials, variant: &Variant) -> usize {
    let of_load = trials
        .table
        .load
        .iter()
        .position(|load| load.name == variant.load.name);
    let head = |name: &str| name.split('/').next().map(str::to_owned);
    let alike = |other: &Variant| head(&other.name()) == head(&variant.name());
    match variant.alone {
        true => trials
            .variants()
            .position(|other| alike(&other))
            .unwrap_or(0),
        false => of_load.unwrap_or(0),
    }
}

/// Measures one variant once.
///
/// # Errors
/// When it cannot be measured.
pub fn measure(
    trials: &'static Trials,
    arm: &Arm,
    context: &mut Context<'_>,
) -> Result<Sample, Error> {
    let variant = trials.variants().find(|one| one.name() == arm.name);
    let variant = variant.ok_or_else(|| Error::Unknown(arm.name.clone()))?;
    trial::measure(trials, &variant, context)
}

/// An experiment that is its card.
pub struct Data(pub &'static LazyLock<Trials>);

impl Experiment for Data {
    fn card(&self) -> &'static Card {
        self.0.card
    }

    fn design(&self, settings: &Settings) -> Design {
        design(self.0, settings)
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        measure(self.0, arm, context)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        judge::judge(self.0, outcome)
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        present(self.0, outcome)
    }
}
