//! An experiment: a question, a source, a way of measuring one point, and a way of judging the whole.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::card::Card;
use crate::error::Error;
use crate::present::Block;
use crate::result::{Derived, Expectation, Outcome};

pub use wakeone_result::Sample;

/// The settings that the user chose on the command line.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Makes everything smaller, to see it work. Expectations allow for the smaller sample where they say so.
    pub quick: bool,
    /// How many rounds; None: the experiment's own number.
    pub rounds: Option<usize>,
    /// Seed of arrivals and of the order of variants.
    pub seed: u64,
    /// Only the variants whose name contains one of these; none: all. Expectations on the others do not hold then.
    pub only: Vec<String>,
}

/// One variant to measure.
#[derive(Debug, Clone, PartialEq)]
pub struct Arm {
    /// Name of the variant.
    pub name: String,
    /// Variants of one group are shuffled among themselves in each round, so that compared variants are near in time.
    pub group: usize,
    /// About how long one measurement takes, in seconds; for the time left.
    pub seconds: f64,
}

/// A comparison that the runner makes: `a / b` in one metric, round by round.
#[derive(Debug, Clone, PartialEq)]
pub struct Pairing {
    /// Name of the comparison.
    pub name: String,
    /// The variant above the line.
    pub a: String,
    /// The variant below the line.
    pub b: String,
    /// The metric.
    pub metric: String,
}

/// The plan of a measurement: variants, rounds and comparisons.
#[derive(Debug, Clone, Default)]
pub struct Design {
    /// How often each variant is measured.
    pub rounds: usize,
    /// The variants.
    pub arms: Vec<Arm>,
    /// The comparisons.
    pub pairings: Vec<Pairing>,
    /// The metric that should be the same in each round of a variant; a spread of it is reported as noise.
    pub steady: &'static str,
    /// Everything a reader needs to do it again.
    pub parameters: serde_json::Map<String, serde_json::Value>,
}

impl Design {
    /// Adds a variant. Where it `lacks` something it is left out instead, and the parameter `left_out` says why, by `what`.
    pub fn offer(&mut self, arm: Arm, what: &str, lacks: Option<String>) {
        let all = self.parameters.entry("left_out");
        let left_out = all.or_insert_with(|| serde_json::json!({}));
        match lacks {
            Some(why) => left_out[what] = why.into(),
            None => self.arms.push(arm),
        }
    }

    /// Adds comparisons. Where variants were left out, those that have both of theirs.
    pub fn compare(&mut self, pairings: impl IntoIterator<Item = Pairing>) {
        let left_out = self
            .parameters
            .get("left_out")
            .and_then(|all| all.as_object());
        let whole = left_out.is_none_or(serde_json::Map::is_empty);
        let here = |name: &str| self.arms.iter().any(|arm| arm.name == name);
        let measured = |p: &Pairing| whole || (here(&p.a) && here(&p.b));
        self.pairings.extend(pairings.into_iter().filter(measured));
    }

    /// The estimated time of so many rounds, in seconds.
    pub fn seconds(&self, rounds: usize) -> f64 {
        self.arms.iter().map(|arm| arm.seconds).sum::<f64>() * rounds as f64
    }
}

/// Parameters from names and values, as [`Design::parameters`] has them.
pub fn parameters<const N: usize>(
    pairs: [(&str, serde_json::Value); N],
) -> serde_json::Map<String, serde_json::Value> {
    pairs
        .map(|(name, value)| (name.into(), value))
        .into_iter()
        .collect()
}

/// The inputs of one measurement.
pub struct Context<'a> {
    /// The user's settings.
    pub settings: &'a Settings,
    /// Round, from 0.
    pub round: usize,
    /// Seed of this round: the same for all variants of it, so that they see the same arrivals.
    pub seed: u64,
    /// Set by Ctrl-C.
    pub cancel: &'a AtomicBool,
    /// The measurement calls this with the share done, 0 to 1.
    pub progress: &'a mut dyn FnMut(f64),
}

impl Context<'_> {
    /// An error once the user wants to stop.
    pub fn check(&self) -> Result<(), Error> {
        if self.cancel.load(Ordering::Relaxed) {
            Err(Error::Interrupted)
        } else {
            Ok(())
        }
    }
}

/// An experiment. `measure` touches the machine; everything else is pure and works on a result read from a file.
pub trait Experiment: Sync {
    /// Name, question, source, published data.
    fn card(&self) -> &'static Card;
    /// Returns the plan of the measurement under these settings.
    fn design(&self, settings: &Settings) -> Design;
    /// Measures one variant once. Leaves nothing behind, whatever happens.
    ///
    /// # Errors
    /// When it could not be measured.
    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error>;
    /// Numbers over several variants, as the growth of a series; most experiments have none.
    fn derive(&self, _outcome: &Outcome) -> Vec<Derived> {
        Vec::new()
    }
    /// Variants of which more rounds are measured, because the rounds that the design asks for may have shown chance. None
    /// by default. All variants of their groups get them, twice as many as before.
    fn doubtful(&self, _outcome: &Outcome) -> Vec<String> {
        Vec::new()
    }
    /// Compares the result with the expectations.
    fn judge(&self, outcome: &Outcome) -> Vec<Expectation>;
    /// Tables, charts and words for a reader, computed from the result.
    fn present(&self, outcome: &Outcome) -> Vec<Block>;
    /// Returns the part of it that fits one screen: by default the first table and the first sentences.
    fn brief(&self, outcome: &Outcome) -> Vec<Block> {
        crate::present::brief(self.present(outcome))
    }
}
