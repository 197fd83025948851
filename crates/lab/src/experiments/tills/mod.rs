//! One queue for all tills, or a queue a till? And what if somebody sent each customer to the right one?

mod judge;
mod present;
mod restart;
mod summary;
pub(super) mod workload;

use serde_json::json;

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{self, Arm, Context, Design, Experiment, Pairing, Sample, Settings};
use crate::present::Block;
use crate::result::{Expectation, Outcome};
use crate::under_test::ServerUnderTest;
use crate::ways::{self, Way};
use crate::{measure, status};
use workload::{
    CPU_CLIENTS, CPU_US, KEPT_APART, KEPT_CONNECTIONS, KEPT_RATE, KEPT_US, STUCK_ONE_IN,
    STUCK_RATE, STUCK_SLOW_US, STUCK_US, WORKERS, Workload,
};

card!(published);

/// The experiment.
pub struct Tills;

impl Experiment for Tills {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let workloads = workload::workloads(settings.quick);
        let arms = workloads.iter().enumerate().flat_map(|(group, workload)| {
            ways::arms(workload.name, &ways::WITH_ROTATE, group, workload.seconds)
        });
        let restarts = ways::arms(
            restart::NAME,
            &ways::WITH_ROTATE,
            workloads.len(),
            restart::seconds(settings.quick),
        );
        Design {
            rounds: if settings.quick { 2 } else { 5 },
            arms: arms.chain(restarts).collect(),
            pairings: pairings(),
            steady: "latency_ms_mean",
            parameters: parameters(&workloads),
        }
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let workloads = workload::workloads(context.settings.quick);
        let (of, way) = ways::parse_arm(&arm.name, &ways::WITH_ROTATE)?;
        if of == restart::NAME {
            return restart::measure(way, context);
        }
        let workload = workloads.iter().find(|workload| workload.name == of);
        let workload = workload.ok_or_else(|| Error::Unknown(arm.name.clone()))?;
        measure_one(workload, way, context)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        judge::judge(outcome)
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        present::present(outcome)
    }

    fn brief(&self, outcome: &Outcome) -> Vec<Block> {
        summary::brief(outcome)
    }
}

fn measure_one(workload: &Workload, way: Way, context: &mut Context<'_>) -> Result<Sample, Error> {
    let mut trial = ServerUnderTest::start(way.launch(workload.serving, WORKERS))?;
    let plan = workload.plan(trial.address, context.seed);
    let found = trial.load(&plan, context)?;
    let mut sample = measure::sample(&found, WORKERS);
    if way.steered() {
        sample.put(
            "active_at_end",
            "count",
            status::active_at_rest(trial.address)? as f64,
        );
    }
    trial.stop(&mut sample)?;
    Ok(sample)
}

fn parameters(workloads: &[Workload]) -> serde_json::Map<String, serde_json::Value> {
    let [kept, stuck, cpu] = [&workloads[0], &workloads[1], &workloads[2]];
    experiment::parameters([
        ("workers", json!(WORKERS)),
        ("kept_requests", json!(kept.requests)),
        ("kept_connections", json!(KEPT_CONNECTIONS)),
        ("kept_apart_ms", json!(KEPT_APART.as_millis())),
        ("kept_rate_per_s", json!(KEPT_RATE)),
        ("kept_us", json!(KEPT_US)),
        ("restart_rate_per_s", json!(restart::RATE_PER_S)),
        ("restart_us", json!(restart::WORK_US)),
        ("restarts", json!(restart::RESTARTS)),
        ("stuck_requests", json!(stuck.requests)),
        ("stuck_rate_per_s", json!(STUCK_RATE)),
        (
            "stuck_arrivals",
            json!("Poisson, open loop, a connection a request"),
        ),
        ("stuck_usual_us", json!(STUCK_US)),
        ("stuck_slow_us", json!(STUCK_SLOW_US)),
        ("stuck_slow_one_in", json!(STUCK_ONE_IN)),
        ("cpu_requests", json!(cpu.requests)),
        ("cpu_clients", json!(CPU_CLIENTS)),
        ("cpu_arrivals", json!("closed loop, a connection a request")),
        ("cpu_us", json!(CPU_US)),
    ])
}

/// The comparisons, by the names that the judge looks up: `cpu: deviation of A / deviation of B`.
fn pairings() -> Vec<Pairing> {
    let pairing = |name: &&str| {
        let (workload, ratio) = name.split_once(": ")?;
        let (a, b) = ratio.split_once(" / ")?;
        let (what, a) = a.split_once(" of ")?;
        let (_, b) = b.split_once(" of ")?;
        let what = if what == "deviation" { "stddev" } else { what };
        Some(Pairing {
            name: (*name).into(),
            a: format!("{workload}/{a}"),
            b: format!("{workload}/{b}"),
            metric: format!("latency_ms_{what}"),
        })
    };
    judge::COMPARED.iter().filter_map(pairing).collect()
}
