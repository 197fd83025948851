//! Up to which request rate a preforked server keeps up, with a lock around accept() and without.

mod driver;
mod httperf;
mod present;
mod sweep;

use serde_json::json;

use crate::card::{Card, card};
use crate::cpus::Apart;
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Pairing, Sample, Settings, parameters};
use crate::launch::BACKLOG;
use crate::measure;
use crate::present::Block;
use crate::result::{Expectation, Outcome};
use driver::{Client, Driven};

card!(published);

/// The experiment.
pub struct AcceptLock;

/// The source's number of processes.
const WORKERS: usize = 20;
/// The kinds of `--accept-lock`, the source's patched server first.
const LOCKS: [&str; 4] = [UNLOCKED, "pthread", "flock", "fcntl"];
const UNLOCKED: &str = "none";
/// The locks that Apache 1.3 had.
const APACHES: [&str; 2] = ["fcntl", "flock"];
/// Clients of the closed loop that finds out about how much the server can do.
const CLIENTS: usize = 64;

const KNEE: &str = "knee_per_s";
const CAPACITY: &str = "capacity_per_s";
const SLEEPS: &str = "voluntary_switches_per_request";
const LOST_CPU: &str = "involuntary_switches_per_request";

/// How much is measured.
#[derive(Debug, Clone, Copy)]
struct Size {
    /// The offered rates, in percent of the closed loop's rate; rising.
    percents: &'static [u32],
    /// How long each lasts.
    step_s: f64,
    /// How long the closed loop lasts.
    capacity_s: f64,
    /// How often the knee's surroundings are halved.
    halvings: usize,
}

impl Size {
    fn of(quick: bool) -> Self {
        if quick {
            Self {
                percents: &[30, 60, 80, 100, 130],
                step_s: 0.4,
                capacity_s: 0.4,
                halvings: 2,
            }
        } else {
            Self {
                percents: &[30, 45, 60, 70, 80, 90, 100, 115, 130],
                step_s: 2.0,
                capacity_s: 1.0,
                halvings: 4,
            }
        }
    }

    /// About how long one sweep takes, in seconds.
    fn seconds(&self) -> f64 {
        let steps = (self.percents.len() + self.halvings) as f64;
        1.0 + self.capacity_s + steps * (self.step_s + 0.15)
    }
}

/// Long enough that a moment without the CPU does not overflow it: a SYN that is dropped comes again after a second, and the
/// knee would be that of the queue. Apache's was 511.
fn backlog() -> Option<usize> {
    BACKLOG.parse().ok()
}

fn arm_name(client: Client, lock: &str) -> String {
    format!("{}/{lock}", client.name())
}

fn parse_arm(name: &str) -> Result<(Client, &'static str), Error> {
    let parts = name.split_once('/').and_then(|(client, lock)| {
        Some((
            Client::ALL.into_iter().find(|c| c.name() == client)?,
            LOCKS.into_iter().find(|l| *l == lock)?,
        ))
    });
    parts.ok_or_else(|| Error::Unknown(name.into()))
}

fn ratio_name(lock: &str) -> String {
    format!("knee without a lock / knee with {lock}")
}

fn offered_at(percent: u32) -> String {
    format!("offered_per_s_at_{percent}")
}

fn replies_at(percent: u32) -> String {
    format!("replies_per_s_at_{percent}")
}

impl Experiment for AcceptLock {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let size = Size::of(settings.quick);
        let arm = |client: Client, lock: &str| Arm {
            name: arm_name(client, lock),
            group: 0,
            seconds: size.seconds(),
        };
        let mut arms: Vec<Arm> = LOCKS.map(|lock| arm(Client::Load, lock)).into();
        let httperf = httperf::find().is_some();
        if httperf {
            arms.push(arm(Client::Httperf, UNLOCKED));
        }
        let pairing = |lock: &&str| Pairing {
            name: ratio_name(lock),
            a: arm_name(Client::Load, UNLOCKED),
            b: arm_name(Client::Load, lock),
            metric: KNEE.into(),
        };
        Design {
            rounds: if settings.quick { 2 } else { 3 },
            arms,
            pairings: LOCKS[1..].iter().map(pairing).collect(),
            steady: KNEE,
            parameters: parameters([
                ("workers", json!(WORKERS)),
                ("backlog", json!(backlog())),
                ("capacity_clients", json!(CLIENTS)),
                ("capacity_s", json!(size.capacity_s)),
                ("rates_percent_of_capacity", json!(size.percents)),
                ("rate_s", json!(size.step_s)),
                ("halvings", json!(size.halvings)),
                ("keeps_up_at_share", json!(sweep::KEPT)),
                ("httperf_installed", json!(httperf)),
                (
                    "request",
                    json!("GET /whoami, a connection a request, open loop, evenly spaced"),
                ),
            ]),
        }
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let (client, lock) = parse_arm(&arm.name)?;
        let size = Size::of(context.settings.quick);
        let apart = Apart::new()?;
        let mut driven = Driven::start(client, lock, &apart)?;
        let capacity = driven.capacity(size.capacity_s, context)?;
        let rates = size.percents.iter();
        let rates: Vec<f64> = rates.map(|p| capacity * f64::from(*p) / 100.0).collect();
        let steps = (rates.len() + size.halvings) as f64;
        let mut done = 0.0;
        let found = sweep::sweep(&rates, size.halvings, |rate| {
            done += 1.0;
            (context.progress)(done / steps);
            driven.step(rate, size.step_s, context)
        })?;
        let mut sample = Sample::default();
        sample.put(KNEE, "1/s", found.knee);
        sample.put(CAPACITY, "1/s", capacity);
        sample.put("knee_over_capacity", "ratio", found.knee / capacity);
        for (percent, step) in size.percents.iter().zip(&found.grid) {
            sample.put(offered_at(*percent), "1/s", step.offered);
            sample.put(replies_at(*percent), "1/s", step.replied);
        }
        sample.put("cpus_apart", "count", f64::from(u8::from(apart.possible())));
        driven.end(&mut sample)?;
        Ok(sample)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let above = |lock: &str| {
            let ratio = outcome.ratio(&ratio_name(lock));
            CARD.expect_of("no-lock-above-{lock}", &[("lock", lock)], ratio)
        };
        let mut expected: Vec<Expectation> = APACHES.map(above).into();
        expected.extend(measure::sound(outcome));
        expected
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        present::present(outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::tests::{self, SOUND, outcome, ratio};

    #[test]
    fn names_of_variants_go_both_ways() {
        for client in Client::ALL {
            for lock in LOCKS {
                let name = arm_name(client, lock);
                assert_eq!(parse_arm(&name).unwrap(), (client, lock));
            }
        }
        for none in ["", "load", "load/other", "ab/none"] {
            assert!(parse_arm(none).is_err(), "{none}");
        }
    }

    #[test]
    fn each_limit_bites() {
        let failing = |fcntl: f64, flock: f64, errors: f64| {
            let errors = [errors];
            let mut counts = SOUND;
            counts[0].1 = &errors;
            let found = Outcome {
                comparisons: vec![
                    ratio(ratio_name("fcntl"), fcntl),
                    ratio(ratio_name("flock"), flock),
                ],
                ..outcome(&[("load/none", &counts)])
            };
            tests::failing(AcceptLock.judge(&found))
        };
        assert_eq!(failing(1.1, 1.2, 0.0), Vec::<String>::new());
        assert_eq!(failing(0.9, 1.2, 0.0), ["no-lock-above-fcntl"]);
        assert_eq!(failing(1.1, 0.9, 0.0), ["no-lock-above-flock"]);
        assert_eq!(failing(1.1, 1.2, 1.0), ["no-errors"]);
    }
}
