//! The loads, and how the simulator is set up for each.

use std::net::SocketAddr;
use std::time::Duration;

use wakeone_control::policy::Policy;
use wakeone_load::{Arrivals, Mix, Plan, Stop};
use wakeone_sim::{Dispatch, Faults, Setup, Wake};

use crate::experiments::simulated::PATIENCE_S;
use crate::experiments::{PINNED, spread, tills};
use crate::measure;
use crate::ways::{Serving, Way};

/// A load that is measured and simulated.
pub struct Case {
    /// First part of the variants' names.
    pub name: &'static str,
    /// The workers of each variant.
    pub workers: usize,
    /// How they serve.
    pub serving: Serving,
    /// The ways of handing out connections.
    pub ways: &'static [Way],
    /// How long one load takes, in s.
    pub seconds: f64,
    /// For so long one worker is busy with a request that is not of the load.
    pub pinned: Option<Duration>,
    arrivals: Arrivals,
    mix: Mix,
    end: Stop,
}

/// Blocking workers that share a queue are woken in turn, or always the same one first.
const BLOCKING: &[Way] = &[
    Way::SharedAccept,
    Way::SharedEpollExclusive,
    Way::ReuseportHash,
    Way::LeastConnections,
    Way::LeastConnectionsRescue,
];
/// Where all are woken it is chance that decides who accepts, and no kernel says how.
const KEPT: &[Way] = &[
    Way::SharedEpollExclusive,
    Way::SharedEpollRotate,
    Way::ReuseportHash,
    Way::LeastConnections,
];
const SPREAD: &[Way] = &[
    Way::SharedAccept,
    Way::SharedEpollExclusive,
    Way::ReuseportHash,
    Way::LeastConnections,
];
const PINNED_WAYS: &[Way] = &[Way::ReuseportHash, Way::LeastConnectionsRescue];

/// Requests of `pinned`: more than the experiment of that name sends, so that chance decides less.
const PINNED_REQUESTS: u64 = 400;

/// All cases, at the full size or a smaller one.
pub fn cases(quick: bool) -> Vec<Case> {
    let ways = [("kept", KEPT), ("stuck", BLOCKING)];
    let of_tills = ways.map(|(name, ways)| {
        let load = tills::TRIALS.load(name);
        Case {
            name,
            workers: tills::TRIALS.table.workers,
            serving: load.serving,
            ways,
            seconds: load.typical_s(quick),
            pinned: None,
            end: load.stop(quick),
            arrivals: load.arrivals(None),
            mix: load.mix(),
        }
    });
    let mut all: Vec<Case> = of_tills.into();
    let spread_s = if quick { 2.0 } else { 6.0 };
    let pinned_s = if quick { 3.0 } else { 6.0 };
    all.push(Case {
        name: "spread",
        workers: spread::WORKERS,
        serving: Serving::Blocking,
        ways: SPREAD,
        seconds: spread_s + 0.5,
        pinned: None,
        arrivals: measure::poisson(spread::RATE_PER_S),
        mix: Mix::one(format!("/work?us={}&kind=cpu", spread::REQUEST_US)),
        end: measure::for_seconds(spread_s),
    });
    let pinned = PINNED.0.load("pinned");
    all.push(Case {
        name: "pinned",
        workers: PINNED.0.table.workers,
        serving: Serving::Blocking,
        ways: PINNED_WAYS,
        seconds: pinned_s + 1.0,
        pinned: Some(Duration::from_secs_f64(pinned_s)),
        arrivals: pinned.arrivals(None),
        mix: pinned.mix(),
        end: measure::for_requests(PINNED_REQUESTS),
    });
    all
}

impl Case {
    /// The load on a server.
    pub fn plan(&self, target: SocketAddr, seed: u64) -> Plan {
        let (arrivals, mix) = (self.arrivals.clone(), self.mix.clone());
        measure::plan(target, arrivals, self.end, mix, seed)
    }

    /// The same server, simulated. `pinned_s` is how long a worker is still busy with something else.
    pub fn setup(&self, way: Way, pinned_s: f64) -> Setup {
        let faults = Faults {
            stops: self
                .pinned
                .iter()
                .map(|_| wakeone_sim::Stop {
                    worker: 0,
                    at_s: 0.0,
                    lasts_s: pinned_s,
                    busy: true,
                })
                .collect(),
            ..Faults::default()
        };
        Setup {
            faults,
            ..Setup::new(self.workers, dispatch(way))
        }
    }
}

/// The usual requests of a plan, one after another, without other clients.
pub fn alone(plan: &Plan, count: u64) -> Plan {
    Plan {
        arrivals: closed(1),
        stop: measure::for_requests(count),
        mix: Mix::one(plan.mix.entries[0].path.clone()),
        ..plan.clone()
    }
}

fn closed(concurrency: usize) -> Arrivals {
    Arrivals::Closed { concurrency }
}

fn dispatch(way: Way) -> Dispatch {
    let steered = |policy: Policy, patience_s| Dispatch::steered(policy.number(), patience_s);
    match way {
        Way::ReuseportHash => steered(Policy::Hash, None),
        Way::LeastConnections => steered(Policy::LeastConnections, None),
        Way::LeastConnectionsRescue => steered(Policy::LeastConnections, Some(PATIENCE_S)),
        Way::SharedEpollExclusive => Dispatch::Shared(Wake::FirstRegistered),
        _ => Dispatch::Shared(Wake::LongestAsleep),
    }
}
