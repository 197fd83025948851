//! The search of docs/policies.md: `cargo run --release --package wakeone-sim --example policies [REQUESTS [WORKLOAD]]`.
//!
//! Prints the mean, p90 and p99 for each workload, of one queue, and of each combination of policy, tie-break, window and
//! patience. Each
//! is divided by that of one shared queue. All combinations of a workload see the same requests.

#[path = "workloads/mod.rs"]
mod workloads;

use wakeone_bpf::contract::number::{
    HASH, LEAST_CONNECTIONS as LEAST, ROUND_ROBIN, SHORTEST_QUEUE as SHORTEST, TWO_CHOICES as TWO,
};
use wakeone_model::arming::ArmingConfig;
use wakeone_sim::{Dispatch, Outcome, Setup, Variant, Wake};
use workloads::{Failure, of_many_connections, workloads};

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
    ("chance", LEAST, Variant::Chance, None, false),
    (
        "chance, rescue 1 ms",
        LEAST,
        Variant::Chance,
        Some(0.001),
        false,
    ),
    (
        "chance, rescue 5 ms",
        LEAST,
        Variant::Chance,
        Some(0.005),
        false,
    ),
    (
        "chance, rescue 20 ms",
        LEAST,
        Variant::Chance,
        Some(0.020),
        false,
    ),
];

/// One queue in other orders than in turn: as epoll has it, and steered from outside.
fn one_queue() -> [(&'static str, Dispatch); 4] {
    let armed = |exclusive| Dispatch::Armed {
        exclusive,
        config: ArmingConfig::default(),
    };
    [
        (
            "one queue, exclusive",
            Dispatch::Shared(Wake::FirstRegistered),
        ),
        ("the same, steered", armed(true)),
        ("one queue, wake-all", Dispatch::Shared(Wake::All)),
        ("the same, steered", armed(false)),
    ]
}

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let requests: u64 = arguments.next().map_or(Ok(1_000_000), |n| n.parse())?;
    let only = arguments.next();
    for workload in workloads()?.into_iter().chain(of_many_connections()?) {
        if only.as_ref().is_some_and(|only| only != workload.name) {
            continue;
        }
        let shared = workload.simulate(workload.setup(workload.setup.way), requests, 1)?;
        let times = |one: &Outcome| [one.mean_s, one.quantile_s(0.9), one.quantile_s(0.99)];
        let ms = times(&shared).map(|s| s * 1e3);
        println!(
            "{:<26}{:>8}{:>8}{:>8}{:>8}{:>8}\n  one queue, ms           {:>8.2}{:>8.2}{:>8.2}",
            workload.name, "mean", "p90", "p99", "most", "moved", ms[0], ms[1], ms[2]
        );
        let row = |name: &str, setup: Setup| -> Result<(), Failure> {
            let found = workload.simulate(setup, requests, 1)?;
            let [mean, p90, p99] = times(&found).map(|s| s * 1e3);
            println!(
                "  {name:<24}{:>8.2}{:>8.2}{:>8.2}{:>8.2}{:>7.1}%",
                mean / ms[0],
                p90 / ms[1],
                p99 / ms[2],
                found.max_over_mean(),
                found.counts.moved as f64 * 100.0 / requests as f64,
            );
            Ok(())
        };
        for (name, way) in one_queue() {
            row(name, workload.setup(way))?;
        }
        for (name, policy, variant, stuck_after_s, weighed) in COMBINATIONS {
            // A connection that was accepted stays where it is.
            if stuck_after_s.is_some() && workload.kept.is_some() {
                continue;
            }
            if weighed && workload.setup.speeds.is_empty() {
                continue;
            }
            let way = Dispatch::Steered {
                policy,
                variant,
                stuck_after_s,
            };
            let mut setup = workload.setup(way);
            if weighed {
                setup.weights = setup.speeds.iter().map(|speed| *speed as u32).collect();
            }
            row(name, setup)?;
        }
    }
    Ok(())
}
