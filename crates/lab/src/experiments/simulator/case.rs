//! The loads, and how the simulator is set up for each.

use std::net::SocketAddr;
use std::time::Duration;

use wakeone::policy::Policy;
use wakeone_load::{Arrivals, Mix, Plan, Stop};
use wakeone_sim::{Dispatch, Faults, Setup, Variant, Wake};

use crate::experiments::tills::workload;
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
    load: Sent,
}

enum Sent {
    /// One of `tills`.
    OfTills(usize),
    /// As `spread`: requests that compute.
    Spread(f64),
    /// As `pinned`: clients that wait for their answers.
    Pinned,
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
const PINNED: &[Way] = &[Way::ReuseportHash, Way::LeastConnectionsRescue];

/// The rate of `spread`, in requests/s, and the CPU time of a request, in µs.
const SPREAD_PER_S: f64 = 1000.0;
const SPREAD_US: u64 = 100;
/// Of `pinned`: requests, clients, and µs of a request.
const PINNED_REQUESTS: u64 = 400;
const PINNED_CLIENTS: usize = 4;
const PINNED_US: u64 = 10_000;
/// The patience of `wakeone run --rescue`, in s.
const PATIENCE_S: f64 = 0.005;

/// All cases, at the full size or a smaller one.
pub fn cases(quick: bool) -> Vec<Case> {
    let of_tills = workload::workloads(quick);
    let ways = [KEPT, BLOCKING];
    let mut all: Vec<Case> = of_tills
        .iter()
        .zip(ways)
        .enumerate()
        .map(|(index, (workload, ways))| Case {
            name: workload.name,
            workers: workload::WORKERS,
            serving: workload.serving,
            ways,
            seconds: workload.seconds,
            pinned: None,
            load: Sent::OfTills(index),
        })
        .collect();
    let spread_s = if quick { 2.0 } else { 6.0 };
    let pinned_s = if quick { 3.0 } else { 6.0 };
    all.push(Case {
        name: "spread",
        workers: 3,
        serving: Serving::Blocking,
        ways: SPREAD,
        seconds: spread_s + 0.5,
        pinned: None,
        load: Sent::Spread(spread_s),
    });
    all.push(Case {
        name: "pinned",
        workers: 2,
        serving: Serving::Blocking,
        ways: PINNED,
        seconds: pinned_s + 1.0,
        pinned: Some(Duration::from_secs_f64(pinned_s)),
        load: Sent::Pinned,
    });
    all
}

impl Case {
    /// The load on a server.
    pub fn plan(&self, target: SocketAddr, quick: bool, seed: u64) -> Plan {
        match self.load {
            Sent::OfTills(index) => workload::workloads(quick)[index].plan(target, seed),
            Sent::Spread(seconds) => measure::plan(
                target,
                measure::poisson(SPREAD_PER_S),
                measure::for_seconds(seconds),
                Mix::one(format!("/work?us={SPREAD_US}&kind=cpu")),
                seed,
            ),
            Sent::Pinned => measure::plan(
                target,
                closed(PINNED_CLIENTS),
                requests(PINNED_REQUESTS),
                Mix::one(format!("/work?us={PINNED_US}&kind=sleep")),
                seed,
            ),
        }
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
        stop: requests(count),
        mix: Mix::one(plan.mix.entries[0].path.clone()),
        ..plan.clone()
    }
}

fn closed(concurrency: usize) -> Arrivals {
    Arrivals::Closed { concurrency }
}

fn requests(count: u64) -> Stop {
    Stop {
        requests: Some(count),
        duration: None,
    }
}

fn dispatch(way: Way) -> Dispatch {
    let steered = |policy: Policy, stuck_after_s| Dispatch::Steered {
        policy: policy.number(),
        variant: Variant::Kernel,
        stuck_after_s,
    };
    match way {
        Way::ReuseportHash => steered(Policy::Hash, None),
        Way::LeastConnections => steered(Policy::LeastConnections, None),
        Way::LeastConnectionsRescue => steered(Policy::LeastConnections, Some(PATIENCE_S)),
        Way::SharedEpollExclusive => Dispatch::Shared(Wake::FirstRegistered),
        _ => Dispatch::Shared(Wake::LongestAsleep),
    }
}
