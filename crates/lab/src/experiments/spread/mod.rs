//! Measures which worker gets each connection, one by one and under a sustained load.

mod present;

use serde_json::json;
use std::time::Duration;
use wakeone_load::Mix;

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Pairing, Sample, Settings, parameters};
use crate::present::Block;
use crate::result::{Expectation, Outcome};
use crate::under_test::ServerUnderTest;
use crate::ways::{self, Way};
use crate::{measure, papers, probe, process, stats};

card!(published);

/// The experiment.
pub struct Spread;

/// The source's number of workers.
pub(super) const WORKERS: usize = 3;
/// The source's number of connections.
const CONNECTIONS: usize = 6;
pub(super) const RATE_PER_S: f64 = 1000.0;
/// An emulated machine, on which the kernel of the papers runs, is about ten times slower.
const RATE_EMULATED_PER_S: f64 = 100.0;
pub(super) const REQUEST_US: u64 = 100;
/// Long enough for a worker to have gone back to sleep.
const PAUSE: Duration = Duration::from_millis(20);

/// The ways that are compared.
const WAYS: [Way; 8] = [
    Way::SharedAccept,
    Way::SharedEpollWakeAll,
    Way::SharedEpollExclusive,
    Way::SharedEpollRotate,
    Way::SharedIoUring,
    Way::ReuseportHash,
    Way::LeastConnections,
    Way::PatchedEpollRotate,
];

impl Experiment for Spread {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let seconds = load_seconds(settings);
        Design {
            rounds: if settings.quick { 3 } else { 7 },
            arms: ways::arms("spread", &here(), 0, seconds + 0.7),
            pairings: vec![Pairing {
                name: EXCLUSIVE_TO_OURS.into(),
                a: arm_name(Way::SharedEpollExclusive),
                b: arm_name(Way::LeastConnections),
                metric: "cpu_max_over_mean".into(),
            }],
            steady: "cpu_max_over_mean",
            parameters: parameters([
                ("workers", json!(WORKERS)),
                ("connections", json!(CONNECTIONS)),
                ("pause_ms", json!(PAUSE.as_millis() as u64)),
                ("load_rate_per_s", json!(rate_per_s())),
                ("load_s", json!(seconds)),
                ("request_cpu_us", json!(REQUEST_US)),
                ("left_out_because_forbidden", json!(forbidden())),
            ]),
        }
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let (_, way) = ways::parse_arm(&arm.name, &WAYS)?;
        let mut trial = way.start(WORKERS)?;
        let answered = one_by_one(trial.address)?;
        trial.answers.client_counted(answered.len() as u64, 0);
        let mut sample = sustained(&mut trial, context)?;
        trial.stop(&mut sample)?;
        let mut counts = [0; WORKERS];
        for (place, worker) in answered.iter().enumerate() {
            sample.put(
                format!("answered_by_{}", place + 1),
                "worker",
                *worker as f64,
            );
            if let Some(count) = counts.get_mut(*worker as usize) {
                *count += 1;
            }
        }
        sample.put(
            "most_of_six",
            "count",
            counts.iter().copied().max().unwrap_or(0) as f64,
        );
        Ok(sample)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let most = |way: Way| outcome.values(&arm_name(way), "most_of_six");
        let cpu = |way: Way| outcome.median(&arm_name(way), "cpu_max_over_mean");
        let limit = tie_limit(most(Way::LeastConnections).len());
        let (percent, limit) = (format!("{:.0}", limit * 100.0), limit.to_string());
        let mut expected = vec![
            CARD.expect("accept-two-each", stats::most(most(Way::SharedAccept))),
            CARD.expect(
                "exclusive-all-to-one",
                stats::least(most(Way::SharedEpollExclusive)),
            ),
            CARD.expect("rotate-two-each", stats::most(most(Way::SharedEpollRotate))),
            CARD.expect_of(
                "least-connections-spreads-ties",
                &[("limit", &limit), ("percent", &percent)],
                largest_share(outcome, Way::LeastConnections),
            ),
            CARD.expect("exclusive-cpu-uneven", cpu(Way::SharedEpollExclusive)),
            CARD.expect("least-connections-cpu-even", cpu(Way::LeastConnections)),
        ];
        let patched = most(Way::PatchedEpollRotate);
        if !patched.is_empty() {
            expected.push(CARD.expect("patched-rotate-two-each", stats::most(patched)));
            expected.push(CARD.expect("patched-rotate-cpu-even", cpu(Way::PatchedEpollRotate)));
        }
        expected.extend(measure::sound(outcome));
        expected
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        present::present(outcome)
    }
}

const EXCLUSIVE_TO_OURS: &str =
    "busiest worker's CPU over the mean: shared-epoll-exclusive / least-connections";

fn arm_name(way: Way) -> String {
    ways::arm_name("spread", way)
}

fn rate_per_s() -> f64 {
    if papers::is_here() {
        RATE_EMULATED_PER_S
    } else {
        RATE_PER_S
    }
}

/// The ways that can be tried here.
fn here() -> Vec<Way> {
    WAYS.into_iter().filter(|way| way.is_here()).collect()
}

/// The ways that this kernel does not let us try.
fn forbidden() -> Vec<&'static str> {
    let ways = WAYS.into_iter().filter(|way| !way.is_here());
    ways.map(Way::name).collect()
}

fn load_seconds(settings: &Settings) -> f64 {
    if settings.quick { 1.5 } else { 4.0 }
}

/// The workers that answer connections made one after another.
fn one_by_one(address: std::net::SocketAddr) -> Result<Vec<u64>, Error> {
    std::thread::sleep(PAUSE);
    let mut answered = Vec::new();
    for _ in 0..CONNECTIONS {
        answered.push(probe::who_answers(address, "/whoami")?);
        std::thread::sleep(PAUSE);
    }
    Ok(answered)
}

/// A load that keeps coming, and the CPU time that each worker process had for it.
fn sustained(trial: &mut ServerUnderTest, context: &mut Context<'_>) -> Result<Sample, Error> {
    let mix = Mix::one(format!("/work?us={REQUEST_US}&kind=cpu"));
    let end = measure::for_seconds(load_seconds(context.settings));
    let arrivals = measure::poisson(rate_per_s());
    let plan = measure::plan(trial.address, arrivals, end, mix, context.seed);
    let workers = process::leaves(trial.pid());
    let before: Vec<u64> = workers.iter().map(|pid| process::cpu_ns(*pid)).collect();
    let found = trial.load(&plan, context)?;
    let used: Vec<u64> = workers
        .iter()
        .zip(before)
        .map(|(pid, b)| process::cpu_ns(*pid).saturating_sub(b))
        .collect();
    let mut sample = measure::sample(&found, WORKERS);
    sample.put("cpu_max_over_mean", "ratio", stats::max_over_mean(&used));
    let elapsed = found.elapsed.as_nanos() as f64;
    let most = used.iter().copied().max().unwrap_or(0) as f64;
    let least = used.iter().copied().min().unwrap_or(0) as f64;
    sample.put("cpu_busiest", "percent", most / elapsed * 100.0);
    sample.put("cpu_idlest", "percent", least / elapsed * 100.0);
    for (worker, ns) in used.iter().enumerate() {
        let percent = *ns as f64 / elapsed * 100.0;
        sample.put(format!("cpu_worker_{worker}"), "percent", percent);
    }
    Ok(sample)
}

/// The largest share of the connections made one by one, all rounds together, that one worker got.
fn largest_share(outcome: &Outcome, way: Way) -> Option<f64> {
    let answered: Vec<f64> = (1..=CONNECTIONS)
        .flat_map(|n| outcome.values(&arm_name(way), &format!("answered_by_{n}")))
        .copied()
        .collect();
    let of = |worker: usize| answered.iter().filter(|a| **a == worker as f64).count();
    let most = (0..WORKERS).map(of).max()?;
    (!answered.is_empty()).then(|| most as f64 / answered.len() as f64)
}

/// The share of a worker that chance does not exceed when equals are drawn from: the mean and three standard deviations.
fn tie_limit(rounds: usize) -> f64 {
    let share = 1.0 / WORKERS as f64;
    share + 3.0 * (share * (1.0 - share) / (rounds * CONNECTIONS) as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_chance_is_what_the_readme_says() {
        let percent = |rounds| (tie_limit(rounds) * 100.0).round();
        assert_eq!((percent(3), percent(7)), (67.0, 55.0));
        assert!(
            tie_limit(10_000) < 0.34,
            "many connections leave chance no room"
        );
    }

    #[test]
    fn what_the_kernel_forbids_is_not_planned_and_said() {
        let settings = Settings::default();
        let design = Spread.design(&settings);
        assert_eq!(design.arms.len() + forbidden().len(), WAYS.len());
    }
}
