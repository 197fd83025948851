//! Faults of workers: pauses, stops and crashes.

use rand_xoshiro::Xoshiro256PlusPlus;

use crate::error::Error;
use crate::random::{exponential, stream};

/// A fault that each worker has independently, again and again.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Repeated {
    /// How long it is from the end of one to the next, in the mean, in s.
    pub every_s: f64,
    /// How long it lasts, in s.
    pub lasts_s: f64,
}

/// A worker that is stopped once, as by SIGSTOP.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stop {
    /// Which worker.
    pub worker: usize,
    /// When, in s.
    pub at_s: f64,
    /// How long, in s.
    pub lasts_s: f64,
    /// It is busy with a request that is not of the load, and so has a connection.
    pub busy: bool,
}

/// All faults of a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Faults {
    /// Workers do nothing for a while, as when a garbage collector stops them.
    pub pauses: Option<Repeated>,
    /// Workers crash and lose their requests in hand, and are back after a while.
    pub crashes: Option<Repeated>,
    /// Workers that are stopped.
    pub stops: Vec<Stop>,
}

impl Faults {
    /// Whether nothing goes wrong.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    pub(crate) fn check(&self, workers: usize) -> Result<(), Error> {
        let positive = |time: f64| time.is_finite() && time > 0.0;
        for repeated in self.pauses.iter().chain(&self.crashes) {
            if !(positive(repeated.every_s) && positive(repeated.lasts_s)) {
                return Err(Error(
                    "a pause or a crash has a mean distance and a length above 0".into(),
                ));
            }
        }
        for stop in &self.stops {
            if stop.worker >= workers {
                return Err(Error(format!(
                    "worker {} cannot be stopped: the last of {workers} is worker {}",
                    stop.worker,
                    workers - 1
                )));
            }
            if !(stop.at_s >= 0.0 && stop.at_s.is_finite() && positive(stop.lasts_s)) {
                return Err(Error("a stop has a moment and a length above 0".into()));
            }
        }
        Ok(())
    }
}

/// Draws when the next pause or crash comes.
#[derive(Debug)]
pub(crate) struct Draws {
    random: Xoshiro256PlusPlus,
}

impl Draws {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            random: stream(seed, 5),
        }
    }

    /// How long after the last one, in s.
    pub(crate) fn distance(&mut self, of: Repeated) -> f64 {
        exponential(&mut self.random) * of.every_s
    }
}
