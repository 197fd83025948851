//! A planned load once more, in the simulator: the same arrivals and the same requests.

use std::time::Duration;

use hdrhistogram::Histogram;
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};
use wakeone_load::{Arrivals, Plan, Schedule};
use wakeone_sim::{Kept, Load, Next, Service, Setup, run};

use crate::error::Error;
use crate::experiment::Sample;
use crate::experiments::simulated::simulates;
use crate::stats;

/// Simulations of one load. Each draws anew what is chance, as the hash of a client's port.
const DRAWS: u64 = 40;
/// The part of the simulations below the low end of the range, and above the high end.
const TAIL: f64 = 0.05;
/// No request takes less than this beyond the time that it asks for, in s.
const LEAST_S: f64 = 1e-6;

/// The time in s that a request of the lab asks for: `/work?us=1000&kind=sleep`.
pub fn asked_s(path: &str) -> f64 {
    let number = path.split_once("us=").map_or("", |(_, rest)| rest);
    let digits = number.split(|c: char| !c.is_ascii_digit()).next();
    digits
        .and_then(|us| us.parse::<f64>().ok())
        .map_or(0.0, |us| us * 1e-6)
}

/// The times of usual requests that find nobody before them, in s.
#[derive(Debug, Clone)]
pub struct Alone {
    /// From connect() to the last byte: the middle eight tenths of them, rising. The rest are the machine's pauses.
    whole_s: Vec<f64>,
    /// connect(): the kernel's work, which takes none of a worker's time. None over a kept connection.
    pub connect_s: f64,
}

impl Alone {
    /// The times of such requests.
    pub fn of(found: &wakeone_load::Outcome, keep_alive: bool) -> Self {
        let connect = if keep_alive {
            0.0
        } else {
            seconds(&found.phases.connect, 0.5)
        };
        Self::new(&found.latency, connect)
    }

    fn new(latency: &Histogram<u64>, connect_s: f64) -> Self {
        let middle = (10..=90).map(|percent| seconds(latency, f64::from(percent) / 100.0));
        Self {
            whole_s: middle.collect(),
            connect_s,
        }
    }

    /// The median from connect() to the last byte.
    pub fn median_s(&self) -> f64 {
        stats::median(&self.whole_s)
    }
}

fn seconds(of: &Histogram<u64>, quantile: f64) -> f64 {
    of.value_at_quantile(quantile) as f64 / 1e9
}

/// The load of a plan. A usual request takes longer alone than it asks for, even without connect(). Each request takes so
/// much longer as one of those, drawn by `seed`.
///
/// # Errors
/// When it cannot be simulated.
pub fn replay(plan: &Plan, alone: &Alone, seed: u64) -> Result<Load, Error> {
    let asked: Vec<f64> = plan.mix.entries.iter().map(|e| asked_s(&e.path)).collect();
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut more_s = || {
        let whole = alone.whole_s[random.random_range(0..alone.whole_s.len())];
        (whole - alone.connect_s - asked[0]).max(LEAST_S)
    };
    let due: Vec<_> = Schedule::new(plan, 0).collect();
    let works: Vec<f64> = due.iter().map(|due| asked[due.entry] + more_s()).collect();
    let moments = due.iter().map(|due| due.at_ns as f64 / 1e9).collect();
    let in_turn = |connections: usize, apart: Duration| Kept {
        connections,
        next: Next::LongestIdle,
        apart_s: apart.as_secs_f64(),
    };
    let (arrivals, kept) = match &plan.arrivals {
        Arrivals::Closed { concurrency } => (wakeone_sim::Arrivals::Closed(*concurrency), None),
        Arrivals::Kept {
            connections, apart, ..
        } => (recorded(moments)?, Some(in_turn(*connections, *apart))),
        _ => (recorded(moments)?, None),
    };
    Ok(Load {
        arrivals,
        requests: works.len() as u64,
        service: Service::Recorded(works.into()),
        kept,
        seed,
    })
}

fn recorded(moments: Vec<f64>) -> Result<wakeone_sim::Arrivals, Error> {
    simulates(wakeone_sim::Arrivals::recorded(moments))
}

/// The numbers that are compared, by their names: measured, and simulated.
pub const COMPARED: [(&str, &str); 3] = [
    ("latency_ms_mean", "simulated_ms_mean"),
    ("latency_ms_p90", "simulated_ms_p90"),
    ("share_max_over_mean", "simulated_share"),
];

/// Simulates a load with other draws each time. Adds the median of each number, the ends of the range that most of them
/// have, and how far beyond it the measured number lies, as a ratio: 0.1 is 10 % above the high end. A latency begins with
/// connect().
///
/// # Errors
/// When it cannot be simulated.
pub fn beside(sample: &mut Sample, setup: &Setup, plan: &Plan, alone: &Alone) -> Result<(), Error> {
    let mut found: [Vec<f64>; 3] = Default::default();
    for draw in 0..DRAWS {
        let one = simulates(run(
            setup,
            &replay(plan, alone, plan.seed.wrapping_add(draw))?,
        ))?;
        let numbers = [
            (one.mean_s + alone.connect_s) * 1e3,
            (one.quantile_s(0.9) + alone.connect_s) * 1e3,
            one.max_over_mean(),
        ];
        found
            .iter_mut()
            .zip(numbers)
            .for_each(|(all, n)| all.push(n));
    }
    for ((measured, simulated), mut all) in COMPARED.into_iter().zip(found) {
        all.sort_by(f64::total_cmp);
        let Some((unit, value)) = sample.metrics.get(measured).cloned() else {
            continue;
        };
        let beyond = beyond(value, &all);
        sample.put(simulated, &unit, stats::median(&all));
        sample.put(format!("{simulated}_low"), &unit, end(&all, TAIL));
        sample.put(format!("{simulated}_high"), &unit, end(&all, 1.0 - TAIL));
        sample.put(format!("{simulated}_beyond"), "ratio", beyond);
    }
    Ok(())
}

fn end(sorted: &[f64], part: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * part).round() as usize]
}

/// How far a number lies beyond the range: negative below it, 0 within it.
fn beyond(value: f64, sorted: &[f64]) -> f64 {
    let (low, high) = (end(sorted, TAIL), end(sorted, 1.0 - TAIL));
    (value / low - 1.0).min(0.0) + (value / high - 1.0).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure;
    use wakeone_load::Mix;

    #[test]
    fn paths_say_how_long_they_take() {
        assert_eq!(asked_s("/work?us=1000&kind=sleep"), 0.001);
        assert_eq!(asked_s("/work?kind=cpu&us=300"), 0.0003);
        assert_eq!(asked_s("/whoami"), 0.0);
    }

    #[test]
    fn the_same_requests_come_at_the_same_times() {
        let mix = Mix::weighted([(9, "/work?us=1000"), (1, "/work?us=50000")]);
        let to = "127.0.0.1:80".parse().unwrap();
        let end = measure::for_seconds(2.0);
        let plan = measure::plan(to, measure::poisson(500.0), end, mix, 7);
        let mut latency = Histogram::new(3).unwrap();
        latency.record_n(1_300_000, 95).unwrap();
        latency.record_n(80_000_000, 5).unwrap();
        let alone = Alone::new(&latency, 0.0001);
        assert!((alone.median_s() - 0.0013).abs() < 1e-5);
        let load = replay(&plan, &alone, 1).unwrap();
        let due: Vec<_> = Schedule::new(&plan, 0).collect();
        assert_eq!(load.requests, due.len() as u64);
        let Service::Recorded(works) = &load.service else {
            panic!("{:?}", load.service)
        };
        let slow = due.iter().filter(|due| due.entry == 1).count();
        let long = works.iter().filter(|work| **work > 0.05).count();
        assert!(slow > 0 && slow == long);
        assert!((works.iter().copied().fold(1.0, f64::min) - 0.0012).abs() < 1e-5);
        assert!(
            works.iter().all(|work| *work < 0.052),
            "a pause of the machine is none of the work"
        );
        let span = (due.last().unwrap().at_ns - due[0].at_ns) as f64 / 1e9;
        let rate = (due.len() - 1) as f64 / span;
        assert!((load.arrivals.per_s() / rate - 1.0).abs() < 1e-6);
    }

    #[test]
    fn a_number_within_the_range_is_not_off() {
        let all: Vec<f64> = (0..=20).map(f64::from).map(|n| 10.0 + n).collect();
        assert_eq!([11.0, 20.0, 29.0].map(|v| beyond(v, &all)), [0.0; 3]);
        assert!((beyond(31.9, &all) - 0.1).abs() < 1e-12);
        assert!((beyond(9.9, &all) + 0.1).abs() < 1e-12);
    }
}
