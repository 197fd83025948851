//! Whether `--stuck-after` should follow the service times: the second search of docs/policies.md.
//! `cargo run --release --package wakeone-sim --example patience [REQUESTS [SEEDS [WORKLOAD]]]`.
//!
//! Simulates the ten workloads with their service times as they are, a tenth of them, and ten times them. Each rule makes
//! a patience from the service times that the same workers show at 2 % load, where nothing waits. No agent could know
//! them better. Prints the mean latency and p99 of each rule over those of 5 ms, for the same requests.

#[path = "workloads/mod.rs"]
mod workloads;

use wakeone_bpf::contract::number::LEAST_CONNECTIONS as LEAST;
use wakeone_sim::{Dispatch, Outcome, Service, Variant, Wake};
use workloads::{Failure, Workload, workloads};

const SCALES: [f64; 3] = [0.1, 1.0, 10.0];
/// The simulated agent looks four times within its patience, and at most every half millisecond.
const SHORTEST_S: f64 = 0.001;
const DEFAULT_S: f64 = 0.005;

/// Service times as seen at low load, in s.
struct Seen {
    mean: f64,
    median: f64,
    p90: f64,
    p99: f64,
}

/// A rule's name, its patience in s for the service times seen, and how the policy is compiled.
type Rule = (&'static str, fn(&Seen) -> f64, Variant);

const RULES: [Rule; 11] = [
    ("chance", |_| DEFAULT_S, Variant::Chance),
    ("1 ms", |_| 0.001, Variant::Kernel),
    ("2 ms", |_| 0.002, Variant::Kernel),
    ("20 ms", |_| 0.020, Variant::Kernel),
    ("3 mean", |seen| 3.0 * seen.mean, Variant::Kernel),
    ("5 mean", |seen| 5.0 * seen.mean, Variant::Kernel),
    ("3 p50", |seen| 3.0 * seen.median, Variant::Kernel),
    ("5 p50", |seen| 5.0 * seen.median, Variant::Kernel),
    ("2 p90", |seen| 2.0 * seen.p90, Variant::Kernel),
    ("p99", |seen| seen.p99, Variant::Kernel),
    (
        "<5 ms",
        |seen| (5.0 * seen.median).min(DEFAULT_S),
        Variant::Kernel,
    ),
];

fn scaled(service: &Service, by: f64) -> Service {
    match service {
        Service::Constant(time) => Service::Constant(time * by),
        Service::Exponential(mean) => Service::Exponential(mean * by),
        Service::Lognormal(mean, deviation) => Service::Lognormal(mean * by, *deviation),
        Service::Pareto(mean, shape) => Service::Pareto(mean * by, *shape),
        Service::Mix(parts) => {
            Service::Mix(parts.iter().map(|(w, time)| (*w, time * by)).collect())
        }
        Service::Recorded(works) => Service::Recorded(works.iter().map(|time| time * by).collect()),
    }
}

/// The service times that the workers show where nothing waits.
fn seen(workload: &Workload, requests: u64) -> Result<Seen, Failure> {
    let quiet = Workload {
        busy: 0.02,
        service: workload.service.clone(),
        setup: workload.setup(Dispatch::Shared(Wake::LongestAsleep)),
        ..*workload
    };
    let found = quiet.simulate(quiet.setup.clone(), requests, 99)?;
    Ok(Seen {
        mean: found.mean_s,
        median: found.quantile_s(0.5),
        p90: found.quantile_s(0.9),
        p99: found.quantile_s(0.99),
    })
}

/// The mean and p99 under a patience, for each seed.
fn under(
    workload: &Workload,
    patience_s: f64,
    variant: Variant,
    requests: u64,
    seeds: u64,
) -> Result<Vec<[f64; 2]>, Failure> {
    let way = Dispatch::Steered {
        policy: LEAST,
        variant,
        stuck_after_s: Some(patience_s.max(SHORTEST_S)),
    };
    let times = |found: Outcome| [found.mean_s, found.quantile_s(0.99)];
    (1..=seeds)
        .map(|seed| {
            Ok(times(workload.simulate(
                workload.setup(way),
                requests,
                seed,
            )?))
        })
        .collect()
}

/// The geometric mean of the ratios, seed by seed.
fn ratio(mine: &[[f64; 2]], default: &[[f64; 2]], which: usize) -> f64 {
    let logarithms = mine
        .iter()
        .zip(default)
        .map(|(a, b)| (a[which] / b[which]).ln());
    (logarithms.sum::<f64>() / mine.len() as f64).exp()
}

fn line(name: &str, ratios: &[f64]) -> String {
    let ratios: Vec<String> = ratios.iter().map(|r| format!("{r:>9.2}")).collect();
    format!("{name:<22}{}", ratios.concat())
}

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let requests: u64 = arguments.next().map_or(Ok(200_000), |n| n.parse())?;
    let seeds: u64 = arguments.next().map_or(Ok(3), |n| n.parse())?;
    let only = arguments.next();
    let names: Vec<String> = RULES.iter().map(|rule| format!("{:>9}", rule.0)).collect();
    println!("{:<22}{}", "over 5 ms", names.concat());
    let mut worst = [[0_f64; RULES.len()]; 2];
    for scale in SCALES {
        for mut workload in workloads()? {
            if only.as_ref().is_some_and(|only| only != workload.name) {
                continue;
            }
            workload.service = scaled(&workload.service, scale);
            let seen = seen(&workload, requests.min(100_000))?;
            let default = under(&workload, DEFAULT_S, Variant::Kernel, requests, seeds)?;
            let mut ratios = [[0.0; RULES.len()]; 2];
            for (at, (_, patience_s, variant)) in RULES.into_iter().enumerate() {
                let mine = under(&workload, patience_s(&seen), variant, requests, seeds)?;
                for which in 0..2 {
                    ratios[which][at] = ratio(&mine, &default, which);
                    worst[which][at] = worst[which][at].max(ratios[which][at]);
                }
            }
            let name = format!("{} x{scale}", workload.name);
            println!("{}", line(&format!("{name} mean"), &ratios[0]));
            println!("{}", line(&format!("{name} p99"), &ratios[1]));
        }
    }
    println!("{}", line("worst mean", &worst[0]));
    println!("{}", line("worst p99", &worst[1]));
    Ok(())
}
