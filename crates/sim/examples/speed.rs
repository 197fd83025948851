//! Events a second of the simulator: `cargo run --release --package wakeone-sim --example speed [REQUESTS [NAME]]`.
//!
//! Prints a line for each way and number of workers, M/M/c at 80 % load: `NAME WORKERS EVENTS CPU_SECONDS MEAN_MS`.

use wakeone_sim::{Arrivals, Dispatch, Load, Service, Setup, Wake, run};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let requests: u64 = arguments.next().map_or(Ok(5_000_000), |n| n.parse())?;
    let only = arguments.next();
    let steered = Dispatch::steered;
    for workers in [4, 1024] {
        for (name, way) in [
            ("shared", Dispatch::Shared(Wake::LongestAsleep)),
            ("hash", steered(0, None)),
            ("two-choices", steered(4, None)),
            ("least-connections", steered(3, None)),
            ("least-connections+rescue", steered(3, Some(0.005))),
        ] {
            if only.as_ref().is_some_and(|only| only != name) {
                continue;
            }
            let load = Load {
                arrivals: Arrivals::Poisson {
                    per_s: 800.0 * workers as f64,
                },
                service: Service::Exponential(1e-3),
                requests,
                kept: None,
                seed: 1,
            };
            let before = cpu_s()?;
            let found = run(&Setup::new(workers, way), &load)?;
            println!(
                "{name} {workers} {} {:.3} {:.4}",
                found.counts.events,
                cpu_s()? - before,
                found.mean_s * 1e3
            );
        }
    }
    Ok(())
}

/// CPU time of this process so far, in s: a busy machine distorts it less than the time on the wall.
fn cpu_s() -> Result<f64, Box<dyn std::error::Error>> {
    let text = std::fs::read_to_string("/proc/self/schedstat")?;
    let ns: u64 = text.split(' ').next().unwrap_or_default().parse()?;
    Ok(ns as f64 / 1e9)
}
