//! Searches the rules for one queue that is steered: the third search of docs/policies.md.
//! `cargo run --release --package wakeone-sim --example arming [REQUESTS [WORKLOAD]]`.
//!
//! Simulates the workloads with four workers and with 64, whose workers wait with EPOLLEXCLUSIVE and without. Each rule is
//! the product's with one number changed. Prints latencies over those of the same workers that take connections in turn,
//! and share kept connections evenly.

#[path = "workloads/mod.rs"]
mod workloads;

use std::time::Duration;

use wakeone_model::arming::ArmingConfig;
use wakeone_sim::{Dispatch, Outcome, Setup, Wake};
use workloads::{Failure, Workload, of_many_connections, workloads};

/// The numbers of workers.
const SIZES: [usize; 2] = [4, 64];

/// The change that a rule makes.
type Change = fn(&mut ArmingConfig);

/// A rule's name, and how it differs from the product's.
const RULES: [(&str, Change); 27] = [
    ("product", |_| {}),
    ("look every 1 ms", |of| of.look_every = ms(1)),
    ("look every 2 ms", |of| of.look_every = ms(2)),
    ("look every 10 ms", |of| of.look_every = ms(10)),
    ("look every 20 ms", |of| of.look_every = ms(20)),
    ("slack 0", |of| of.slack = 0),
    ("slack 1", |of| of.slack = 1),
    ("slack 4", |of| of.slack = 4),
    ("armed: 1", |of| (of.least_armed, of.armed_of) = (1, NONE)),
    ("armed: 2", |of| of.armed_of = NONE),
    ("armed: 2, 1/8", |of| of.armed_of = 8),
    ("armed: 2, 1/2", |of| of.armed_of = 2),
    ("armed: 4", |of| (of.least_armed, of.armed_of) = (4, NONE)),
    ("no burst", |of| of.burst = u64::MAX),
    ("least of 1 look", |of| of.looks = 1),
    ("least of 2 looks", |of| of.looks = 2),
    ("least of 8 looks", |of| of.looks = 8),
    ("least of 16 looks", |of| of.looks = 16),
    ("passing 0", |of| of.passing = 0),
    ("passing 1", |of| of.passing = 1),
    ("passing 4", |of| of.passing = 4),
    ("no hurry", |of| of.hurried = of.look_every),
    ("waiting 1 look", |of| of.waiting_looks = 1),
    ("waiting 3 looks", |of| of.waiting_looks = 3),
    ("never open", |of| of.waiting_looks = u32::MAX),
    ("calm 1 look", |of| of.calm_looks = 1),
    ("calm 16 looks", |of| of.calm_looks = 16),
];

/// No part of the workers: the number alone decides.
const NONE: usize = usize::MAX;

const fn ms(time: u64) -> Duration {
    Duration::from_millis(time)
}

/// Workers that serve a workload, and how those do that share it ideally.
struct Case {
    workload: Workload,
    ideal: [f64; 2],
}

/// The results of a rule in all cases of one number of workers.
#[derive(Default)]
struct Sum {
    /// Logarithms of the mean's ratio where each request has its connection, and where connections are kept.
    passing: Vec<f64>,
    kept: Vec<f64>,
    worst: [f64; 2],
    worst_at: &'static str,
    /// The busiest worker's share over the mean where connections are kept.
    most: Vec<f64>,
    changes: u64,
    elapsed_s: f64,
}

impl Sum {
    fn add(&mut self, case: &Case, found: &Outcome) {
        let [mean, p99] = ratios(found, case.ideal);
        if case.workload.kept.is_some() {
            self.kept.push(mean.ln());
            self.most.push(found.max_over_mean());
            return;
        }
        self.passing.push(mean.ln());
        if mean > self.worst[0] {
            self.worst_at = case.workload.name;
        }
        self.worst = [self.worst[0].max(mean), self.worst[1].max(p99)];
        self.changes += found.counts.changes;
        self.elapsed_s += found.elapsed_s;
    }

    fn print(&self, name: &str) {
        let average = |all: &[f64]| all.iter().sum::<f64>() / all.len() as f64;
        println!(
            "  {name:<18}{:>8.3}{:>8.2}{:>8.2}{:>8.2}{:>8.2}{:>11.0}  {}",
            average(&self.passing).exp(),
            self.worst[0],
            self.worst[1],
            average(&self.kept).exp(),
            average(&self.most),
            self.changes as f64 / self.elapsed_s,
            self.worst_at,
        );
    }
}

fn ratios(found: &Outcome, ideal: [f64; 2]) -> [f64; 2] {
    [found.mean_s / ideal[0], found.quantile_s(0.99) / ideal[1]]
}

/// The same load on each of more workers. Connections that are kept are opened as fast.
fn with_workers(mut workload: Workload, workers: usize) -> Workload {
    let times = workers / workload.setup.workers;
    let setup = &mut workload.setup;
    setup.workers = workers;
    setup.cpus = setup.cpus.map(|cpus| cpus * times);
    setup.speeds = setup.speeds.repeat(times);
    if let Some(kept) = &mut workload.kept {
        kept.connections *= times;
    }
    workload
}

fn cases(workers: usize, only: Option<&str>, requests: u64) -> Result<Vec<Case>, Failure> {
    let mut cases = Vec::new();
    for workload in workloads()?.into_iter().chain(of_many_connections()?) {
        let left_out = only.is_some_and(|only| only != workload.name);
        if left_out || workload.setup.workers > SIZES[0] {
            continue;
        }
        let workload = with_workers(workload, workers);
        let in_turn = workload.setup(Dispatch::Shared(Wake::LongestAsleep));
        let ideal = workload.simulate(in_turn, requests, 1)?;
        cases.push(Case {
            workload,
            ideal: [ideal.mean_s, ideal.quantile_s(0.99)],
        });
    }
    Ok(cases)
}

fn simulate(cases: &[Case], requests: u64, way: Dispatch) -> Result<Sum, Failure> {
    let mut sum = Sum::default();
    for case in cases {
        let setup: Setup = case.workload.setup(way);
        // Sixty-four connections are few: chance decides more.
        let seeds = if case.workload.kept.is_some() { 8 } else { 1 };
        for seed in 1..=seeds {
            sum.add(
                case,
                &case
                    .workload
                    .simulate(setup.clone(), requests / seeds, seed)?,
            );
        }
    }
    Ok(sum)
}

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let requests: u64 = arguments.next().map_or(Ok(200_000), |n| n.parse())?;
    let only = arguments.next();
    let wakes = [
        ("exclusive", true, Wake::FirstRegistered),
        ("wake-all", false, Wake::All),
    ];
    for workers in SIZES {
        let cases = cases(workers, only.as_deref(), requests)?;
        for (name, exclusive, wake) in wakes {
            head(&format!("{workers}, {name}"));
            simulate(&cases, requests, Dispatch::Shared(wake))?.print("as it is");
            for (name, change) in RULES {
                let mut config = ArmingConfig::default();
                change(&mut config);
                let way = Dispatch::Armed { exclusive, config };
                simulate(&cases, requests, way)?.print(name);
            }
        }
    }
    Ok(())
}

fn head(workers: &str) {
    println!(
        "{workers:<20}{:>8}{:>8}{:>8}{:>8}{:>8}{:>11}",
        "mean", "worst", "p99", "kept", "most", "changes/s"
    );
}
