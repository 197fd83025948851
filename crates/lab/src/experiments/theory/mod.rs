//! The simulator beside queueing theory.

use serde_json::json;
use wakeone_control::policy::Policy;
use wakeone_sim::{Arrivals, Dispatch, Kind, Load, Service, Setup, Wake, run, theory};

use super::simulated::simulates;
use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Sample, Settings, parameters};
use crate::present::{Block, Row, Table};
use crate::result::{Expectation, Outcome};

card!();

/// The experiment.
pub struct Theory;

const MEAN_S: f64 = 1e-3;
/// Within this of a theorem, or within the simulated mean's own interval.
const EXACT: f64 = 0.01;
/// Within this of an approximation.
const NEAR: f64 = 0.03;

/// The number that a simulation looks for.
enum Sought {
    /// The mean at this load, of 1, with this service; the formula gives the theory's mean in s.
    Mean(f64, &'static str, fn(f64, &Service) -> f64),
    /// The load at which p99 is ten times the mean service; the formula gives the theory's load.
    HighestLoad(fn() -> f64),
}

/// One point.
struct Point {
    name: &'static str,
    workers: usize,
    kind: Kind,
    way: Dispatch,
    sought: Sought,
    within: f64,
}

const ONE: Kind = Kind::Threads(1);
const SHARED: Dispatch = Dispatch::Shared(Wake::LongestAsleep);

const fn steered(policy: Policy) -> Dispatch {
    Dispatch::steered(policy as u32, None)
}

const HASH: Dispatch = steered(Policy::Hash);

const fn mean(
    name: &'static str,
    workers: usize,
    way: Dispatch,
    load: f64,
    service: &'static str,
    expected: fn(f64, &Service) -> f64,
) -> Point {
    Point {
        name,
        workers,
        kind: ONE,
        way,
        sought: Sought::Mean(load, service, expected),
        within: EXACT,
    }
}

fn mmc<const WORKERS: usize>(load: f64, service: &Service) -> f64 {
    let mean = service.mean_s();
    theory::mmc_mean_s(WORKERS, load * WORKERS as f64 / mean, mean)
}

fn mg1(load: f64, service: &Service) -> f64 {
    let mean = service.mean_s();
    theory::mg1_mean_s(load / mean, mean, service.mean_square_s2())
}

fn mg4(load: f64, service: &Service) -> f64 {
    let mean = service.mean_s();
    theory::mgc_mean_s(4, 4.0 * load / mean, mean, service.mean_square_s2())
}

fn sharing(load: f64, service: &Service) -> f64 {
    service.mean_s() / (1.0 - load)
}

const EXP: &str = "exp:1ms";

/// A name, workers, a way, and the highest load by theory.
const fn highest(
    name: &'static str,
    workers: usize,
    way: Dispatch,
    expected: fn() -> f64,
) -> Point {
    Point {
        name,
        workers,
        kind: ONE,
        way,
        sought: Sought::HighestLoad(expected),
        within: EXACT,
    }
}

fn points() -> Vec<Point> {
    let near = |point: Point| Point {
        within: NEAR,
        ..point
    };
    let looped = |point: Point| Point {
        kind: Kind::EventLoop,
        ..point
    };
    let shorter = |load, service: &Service| theory::shortest_of_two_mean_s(load, service.mean_s());
    let two = |load, service: &Service| theory::two_choices_mean_s(load, service.mean_s());
    let least = steered(Policy::LeastConnections);
    let two_choices = steered(Policy::TwoChoices);
    vec![
        mean("erlang/1-worker", 1, SHARED, 0.7, EXP, mmc::<1>),
        mean("erlang/4-workers", 4, SHARED, 0.8, EXP, mmc::<4>),
        mean("erlang/16-workers", 16, SHARED, 0.9, EXP, mmc::<16>),
        mean("erlang/64-workers", 64, SHARED, 0.95, EXP, mmc::<64>),
        mean("pollaczek-khinchine/constant", 8, HASH, 0.6, "1ms", mg1),
        mean("pollaczek-khinchine/exponential", 8, HASH, 0.6, EXP, mg1),
        mean(
            "pollaczek-khinchine/lognormal",
            8,
            HASH,
            0.6,
            "lognormal:1ms:1",
            mg1,
        ),
        mean(
            "pollaczek-khinchine/two-kinds",
            8,
            HASH,
            0.6,
            "9:1ms,1:5ms",
            mg1,
        ),
        looped(mean("sharing/constant", 8, HASH, 0.7, "1ms", sharing)),
        looped(mean(
            "sharing/two-kinds",
            8,
            HASH,
            0.7,
            "9:1ms,1:5ms",
            sharing,
        )),
        near(mean("lee-longton/constant", 4, SHARED, 0.8, "1ms", mg4)),
        near(mean(
            "lee-longton/two-kinds",
            4,
            SHARED,
            0.8,
            "9:1ms,1:5ms",
            mg4,
        )),
        mean("shorter-queue/0.7", 2, least, 0.7, EXP, shorter),
        mean("shorter-queue/0.95", 2, least, 0.95, EXP, shorter),
        mean("two-choices/0.7", 1024, two_choices, 0.7, EXP, two),
        mean("two-choices/0.9", 1024, two_choices, 0.9, EXP, two),
        highest("highest-load/hash", 4, HASH, || {
            theory::mmc_highest_load(1, 0.99, 10.0)
        }),
        highest("highest-load/one-queue-of-4", 4, SHARED, || {
            theory::mmc_highest_load(4, 0.99, 10.0)
        }),
        highest("highest-load/one-queue-of-16", 16, SHARED, || {
            theory::mmc_highest_load(16, 0.99, 10.0)
        }),
    ]
}

/// Requests of a point.
fn requests(settings: &Settings) -> u64 {
    if settings.quick {
        1_000_000
    } else {
        10_000_000
    }
}

/// How often the interval of a highest load is halved: to a thousandth.
const HALVINGS: i32 = 10;

impl Point {
    fn simulate(
        &self,
        load: f64,
        service: &Service,
        requests: u64,
        seed: u64,
    ) -> Result<wakeone_sim::Outcome, Error> {
        let setup = Setup {
            kind: self.kind,
            ..Setup::new(self.workers, self.way)
        };
        let per_s = load * self.workers as f64 / service.mean_s();
        let load = Load {
            arrivals: Arrivals::Poisson { per_s },
            service: service.clone(),
            requests,
            kept: None,
            seed,
        };
        simulates(run(&setup, &load))
    }

    fn measure(&self, context: &mut Context<'_>) -> Result<Sample, Error> {
        let (requests, seed) = (requests(context.settings), context.seed);
        let mut sample = Sample::default();
        match self.sought {
            Sought::Mean(load, service, expected) => {
                let service = simulates(service.parse::<Service>())?;
                let found = self.simulate(load, &service, requests, seed)?;
                sample.put("found_ms", "ms", found.mean_s * 1e3);
                sample.put("found_ms_error", "ms", found.mean_error_s * 1e3);
                sample.put("theory_ms", "ms", expected(load, &service) * 1e3);
                sample.put(
                    "off",
                    "ratio",
                    found.mean_s / expected(load, &service) - 1.0,
                );
                sample.put("unsure", "ratio", found.mean_error_s / found.mean_s);
            }
            Sought::HighestLoad(expected) => {
                let found = self.highest(requests / 4, context)?;
                sample.put("found_load", "ratio", found);
                sample.put("theory_load", "ratio", expected());
                sample.put("off", "ratio", found / expected() - 1.0);
                // The uncertainty is the width at which the search ends.
                sample.put("unsure", "ratio", 0.5_f64.powi(HALVINGS));
            }
        }
        Ok(sample)
    }

    /// The highest load at which p99 is at most ten times the mean service.
    fn highest(&self, requests: u64, context: &mut Context<'_>) -> Result<f64, Error> {
        let service = Service::Exponential(MEAN_S);
        let (mut low, mut high) = (0.0, 1.0);
        for turn in 0..HALVINGS {
            context.check()?;
            (context.progress)(f64::from(turn) / f64::from(HALVINGS));
            let load = (low + high) / 2.0;
            let found = self.simulate(load, &service, requests, context.seed)?;
            if found.quantile_s(0.99) <= 10.0 * MEAN_S {
                low = load;
            } else {
                high = load;
            }
        }
        Ok((low + high) / 2.0)
    }
}

impl Experiment for Theory {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let arm = |point: Point| Arm {
            name: point.name.into(),
            group: 0,
            seconds: requests(settings) as f64 / 4e6,
        };
        Design {
            rounds: 1,
            arms: points().into_iter().map(arm).collect(),
            pairings: Vec::new(),
            steady: "",
            parameters: parameters([
                ("simulated", json!(true)),
                ("requests", json!(requests(settings))),
                ("service_mean_ms", json!(MEAN_S * 1e3)),
            ]),
        }
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let point = points().into_iter().find(|point| point.name == arm.name);
        let point = point.ok_or_else(|| Error::Unknown(arm.name.clone()))?;
        point.measure(context)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        points().iter().map(|point| judge(point, outcome)).collect()
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        present(outcome)
    }
}

/// The deviation from theory, less the simulated number's own uncertainty.
fn judge(point: &Point, outcome: &Outcome) -> Expectation {
    let off = outcome.median(point.name, "off").map(f64::abs);
    let unsure = outcome.median(point.name, "unsure").unwrap_or(0.0);
    Expectation::new(
        point.name.replace(['/', '.'], "-"),
        format!(
            "{}: within {:.0} % of the theory's number, or within its own interval of {:.1} % (deviation)",
            point.name,
            point.within * 100.0,
            unsure * 100.0
        ),
        CARD.source.short.as_str(),
        off,
        // An interval as wide as the number would agree with anything.
        |off| off <= point.within.max(unsure) && unsure < 5.0 * EXACT,
    )
}

fn present(outcome: &Outcome) -> Vec<Block> {
    let row = |point: &Point| {
        let (found, expected, unit) = match point.sought {
            Sought::Mean(..) => ("found_ms", "theory_ms", " ms"),
            Sought::HighestLoad(_) => ("found_load", "theory_load", ""),
        };
        let number = |metric: &str| outcome.median(point.name, metric);
        let shown = |metric| number(metric).map_or_else(|| "–".into(), |v| format!("{v:.4}{unit}"));
        let percent =
            |metric| number(metric).map_or_else(|| "–".into(), |v| format!("{:+.2} %", v * 100.0));
        let unsure = percent("unsure").replace('+', "± ");
        Row::ours(vec![
            point.name.into(),
            shown(expected),
            shown(found),
            percent("off"),
            unsure,
        ])
    };
    vec![
        Block::Paragraph("Each row is a mean time, or a load, of 1, that the slowest one percent allows. The interval holds the true mean with 95 %.".into()),
        Block::Table(Table {
            caption: "The simulator beside queueing theory.".into(),
            head: ["", "theory", "simulated", "off", "interval"].map(str::to_owned).into(),
            rows: points().iter().map(row).collect(),
        }),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::tests::{failing, outcome};

    #[test]
    fn what_is_off_or_unsure_does_not_hold() {
        let judged = |off: f64, unsure: f64| {
            let values: [(&str, &[f64]); 2] = [("off", &[off]), ("unsure", &[unsure])];
            let all: Vec<_> = points()
                .iter()
                .map(|point| (point.name, &values[..]))
                .collect();
            failing(Theory.judge(&outcome(&all))).len()
        };
        assert_eq!(judged(-0.009, 0.001), 0);
        assert_eq!(judged(0.015, 0.02), 0, "within its own interval");
        assert_eq!(
            judged(0.015, 0.001),
            points().len() - 2,
            "approximations may be further off"
        );
        assert_eq!(judged(0.04, 0.001), points().len());
        assert_eq!(
            judged(0.0, 0.2),
            points().len(),
            "an interval that says nothing"
        );
        assert_eq!(failing(Theory.judge(&outcome(&[]))).len(), points().len());
    }
}
