//! A load: the arrivals of requests, their work, and their connections.

use crate::arrivals::Arrivals;
use crate::error::Error;
use crate::service::Service;

/// A load on the workers.
#[derive(Debug, Clone, PartialEq)]
pub struct Load {
    /// The arrivals of its requests.
    pub arrivals: Arrivals,
    /// The work of a request.
    pub service: Service,
    /// The number of requests.
    pub requests: u64,
    /// Requests come over this many connections, opened beforehand one after another. `None`: each has a connection of
    /// its own.
    pub kept: Option<usize>,
    /// The seed of arrivals and work.
    pub seed: u64,
}

impl Load {
    /// The part of `workers` workers' time that it takes.
    pub fn utilisation(&self, workers: usize) -> f64 {
        self.arrivals.per_s() * self.service.mean_s() / workers as f64
    }

    /// Whether it can be simulated.
    ///
    /// # Errors
    /// The reason why it cannot.
    pub fn check(&self) -> Result<(), Error> {
        self.arrivals.check()?;
        self.service.check()?;
        if self.requests == 0 {
            return Err(Error("no request is no load: give at least one".into()));
        }
        if self.kept == Some(0) {
            return Err(Error("requests need at least one connection".into()));
        }
        Ok(())
    }
}
