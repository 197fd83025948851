//! One queue for all tills, or a queue a till? And what if somebody sent each customer to the right one?

mod best;
mod judge;
mod present;
mod summary;

use std::sync::LazyLock;

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Sample, Settings};
use crate::present::Block;
use crate::result::{Expectation, Outcome};
use crate::trials::{self, Trials};

card!(published);

/// Its loads and servers, which other experiments use too.
pub static TRIALS: LazyLock<Trials> = LazyLock::new(|| Trials::read(&CARD));

/// The experiment.
pub struct Tills;

impl Experiment for Tills {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let mut design = trials::design(&TRIALS, settings);
        let here = best::trampolines().into();
        design.parameters.insert(best::TRAMPOLINES.into(), here);
        design
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        trials::measure(&TRIALS, arm, context)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        judge::judge(outcome)
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        present::present(outcome)
    }

    fn brief(&self, outcome: &Outcome) -> Vec<Block> {
        summary::brief(outcome).unwrap_or_else(|| crate::present::brief(self.present(outcome)))
    }
}
