//! A load: the arrivals of requests, their work, and their connections.

use crate::arrivals::Arrivals;
use crate::error::Error;
use crate::service::Service;

/// Connections that are kept.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Kept {
    /// How many.
    pub connections: usize,
    /// The one that a request comes over.
    pub next: Next,
    /// How long after one the next is opened, in s.
    pub apart_s: f64,
}

/// The kept connection that a request comes over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Any of them: independent clients.
    Any,
    /// The one without a request for longest. Where each has one, the request waits. `wakeone load` does so.
    LongestIdle,
}

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
    pub kept: Option<Kept>,
    /// The seed of arrivals and work.
    pub seed: u64,
}

impl Load {
    /// How many requests at the beginning are not measured. It is the first tenth, because queues fill, and none where
    /// the work of each request is given: such a load is one that a machine had from its first request on.
    pub(crate) fn unmeasured(&self) -> u64 {
        match self.service {
            Service::Recorded(_) => 0,
            _ => self.requests / 10,
        }
    }

    /// The part of `workers` workers' time that it takes; not a number in a closed loop.
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
        if self.kept.is_some_and(|kept| kept.connections == 0) {
            return Err(Error("requests need at least one connection".into()));
        }
        if self
            .kept
            .is_some_and(|kept| !(kept.apart_s.is_finite() && kept.apart_s >= 0.0))
        {
            return Err(Error("connections are opened one after another".into()));
        }
        Ok(())
    }
}
