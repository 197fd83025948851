//! The search of docs/policies.md: `cargo run --release --package wakeone-sim --example policies [REQUESTS [WORKLOAD]]`.
//!
//! Prints the mean, p90 and p99 for each workload and each combination of policy, tie-break, window and patience. Each
//! is divided by that of one shared queue. All combinations of a workload see the same requests.

use wakeone_sim::{
    Arrivals, Faults, Kind, Load, Outcome, Repeated, Setup, Variant, Wake, Way, run,
};

/// A load and its workers.
struct Workload {
    name: &'static str,
    arrivals: &'static str,
    service: &'static str,
    /// The busy part of the workers' time.
    busy: f64,
    setup: Setup,
}

fn workload(
    name: &'static str,
    arrivals: &'static str,
    service: &'static str,
    busy: f64,
    workers: usize,
    change: impl FnOnce(&mut Setup),
) -> Workload {
    let mut setup = Setup::new(workers, Way::Shared(Wake::LongestAsleep));
    change(&mut setup);
    Workload {
        name,
        arrivals,
        service,
        busy,
        setup,
    }
}

fn workloads() -> Vec<Workload> {
    const STUCK: &str = "99:1.15ms,1:100ms";
    vec![
        workload("steady", "poisson", "exp:1ms", 0.8, 4, |_| {}),
        workload("stuck", "poisson", STUCK, 0.535, 4, |_| {}),
        workload("stuck-64", "poisson", STUCK, 0.8, 64, |_| {}),
        workload("lognormal", "poisson", "lognormal:2ms:1.5", 0.7, 4, |_| {}),
        workload("pareto", "poisson", "pareto:2ms:2.2", 0.7, 4, |_| {}),
        workload("bursts", "bursts:2:100ms:0.2", "exp:1ms", 0.6, 4, |_| {}),
        workload("pauses", "poisson", "exp:1ms", 0.6, 4, |setup| {
            setup.faults = Faults {
                pauses: Some(Repeated {
                    every_s: 1.0,
                    lasts_s: 0.05,
                }),
                ..Faults::default()
            };
        }),
        workload("cpu", "poisson", "300us", 0.8, 4, |setup| {
            setup.cpus = Some(2)
        }),
        workload("loops", "poisson", "exp:2ms", 0.7, 4, |setup| {
            setup.kind = Kind::EventLoop;
        }),
        workload("unequal", "poisson", "exp:1ms", 0.7, 4, |setup| {
            setup.speeds = vec![2.0, 1.0, 1.0, 1.0];
        }),
    ]
}

const HASH: u32 = 0;
const ROUND_ROBIN: u32 = 1;
const LEAST: u32 = 3;
const TWO: u32 = 4;
const SHORTEST: u32 = 5;

/// Name, policy, how it is compiled, patience in s, whether workers are weighed by their speed.
type Combination = (&'static str, u32, Variant, Option<f64>, bool);

const COMBINATIONS: [Combination; 17] = [
    ("hash", HASH, Variant::Kernel, None, false),
    (
        "hash, rescue 5 ms",
        HASH,
        Variant::Kernel,
        Some(0.005),
        false,
    ),
    ("round-robin", ROUND_ROBIN, Variant::Kernel, None, false),
    ("shortest-queue", SHORTEST, Variant::Kernel, None, false),
    ("two-choices", TWO, Variant::Kernel, None, false),
    (
        "two-choices, rescue 5 ms",
        TWO,
        Variant::Kernel,
        Some(0.005),
        false,
    ),
    ("least", LEAST, Variant::Kernel, None, false),
    ("least, window 4", LEAST, Variant::Window4, None, false),
    ("least, window 16", LEAST, Variant::Window16, None, false),
    (
        "least, rescue 1 ms",
        LEAST,
        Variant::Kernel,
        Some(0.001),
        false,
    ),
    (
        "least, rescue 5 ms",
        LEAST,
        Variant::Kernel,
        Some(0.005),
        false,
    ),
    (
        "least, rescue 20 ms",
        LEAST,
        Variant::Kernel,
        Some(0.020),
        false,
    ),
    ("least, weighed", LEAST, Variant::Kernel, None, true),
    ("freshest", LEAST, Variant::Freshest, None, false),
    (
        "freshest, rescue 1 ms",
        LEAST,
        Variant::Freshest,
        Some(0.001),
        false,
    ),
    (
        "freshest, rescue 5 ms",
        LEAST,
        Variant::Freshest,
        Some(0.005),
        false,
    ),
    (
        "freshest, rescue 20 ms",
        LEAST,
        Variant::Freshest,
        Some(0.020),
        false,
    ),
];

type Failure = Box<dyn std::error::Error>;

fn simulate(
    workload: &Workload,
    way: Way,
    weighed: bool,
    requests: u64,
) -> Result<Outcome, Failure> {
    let mut setup = Setup {
        way,
        ..workload.setup.clone()
    };
    if weighed {
        setup.weights = setup.speeds.iter().map(|speed| *speed as u32).collect();
    }
    let service: wakeone_sim::Service = workload.service.parse()?;
    let per_s = workload.busy * setup.capacity() / service.mean_s();
    let load = Load {
        arrivals: workload.arrivals.parse::<Arrivals>()?.at(per_s),
        service,
        requests,
        kept: None,
        seed: 1,
    };
    Ok(run(&setup, &load)?)
}

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let requests: u64 = arguments.next().map_or(Ok(1_000_000), |n| n.parse())?;
    let only = arguments.next();
    for workload in workloads() {
        if only.as_ref().is_some_and(|only| only != workload.name) {
            continue;
        }
        let shared = simulate(&workload, workload.setup.way, false, requests)?;
        let times = |one: &Outcome| [one.mean_s, one.quantile_s(0.9), one.quantile_s(0.99)];
        let ms = times(&shared).map(|s| s * 1e3);
        println!(
            "{:<26}{:>8}{:>8}{:>8}{:>8}{:>8}\n  one queue, ms           {:>8.2}{:>8.2}{:>8.2}",
            workload.name, "mean", "p90", "p99", "most", "moved", ms[0], ms[1], ms[2]
        );
        for (name, policy, variant, stuck_after_s, weighed) in COMBINATIONS {
            if weighed && workload.setup.speeds.is_empty() {
                continue;
            }
            let way = Way::Steered {
                policy,
                variant,
                stuck_after_s,
            };
            let found = simulate(&workload, way, weighed, requests)?;
            let [mean, p90, p99] = times(&found).map(|s| s * 1e3);
            println!(
                "  {name:<24}{:>8.2}{:>8.2}{:>8.2}{:>8.2}{:>7.1}%",
                mean / ms[0],
                p90 / ms[1],
                p99 / ms[2],
                found.max_over_mean(),
                found.counts.moved as f64 * 100.0 / requests as f64,
            );
        }
    }
    Ok(())
}
