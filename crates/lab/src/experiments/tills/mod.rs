//! One queue for all tills, or a queue a till? And what if somebody sent each customer to the right one?

mod judge;
mod present;
mod restart;
mod summary;
pub(super) mod workload;

use serde_json::json;

use crate::Error;
use crate::experiment::{
    Arm, Card, Context, Design, Experiment, Pairing, Sample, Settings, Source,
};
use crate::measure::Trial;
use crate::present::Block;
use crate::result::{Expectation, Outcome};
use crate::ways::{self, Way};
use crate::{measure, status};
use workload::{
    CPU_CLIENTS, CPU_US, KEPT_APART, KEPT_CONNECTIONS, KEPT_RATE, KEPT_US, STUCK_ONE_IN,
    STUCK_RATE, STUCK_SLOW_US, STUCK_US, WORKERS, Workload,
};

/// The experiment.
pub struct Tills;

const CARD: Card = Card {
    name: "tills",
    title: "One queue for all tills, or one each?",
    question: "How do six ways of handing out connections to four workers fare when connections are kept, when a few requests take long, when all of them take CPU, and in a restart?",
    source: Source {
        short: "Majkowski, 2017",
        long: "Marek Majkowski, Why does one NGINX worker take all the load?, Cloudflare blog, 2017.",
        url: "https://blog.cloudflare.com/the-sad-state-of-linux-socket-balancing/",
    },
    readme: include_str!("README.md"),
    published: include_str!("published.csv"),
};

impl Experiment for Tills {
    fn card(&self) -> &Card {
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
        let mut design = Design {
            rounds: if settings.quick { 2 } else { 5 },
            arms: arms.chain(restarts).collect(),
            pairings: pairings(),
            steady: "latency_ms_mean",
            parameters: serde_json::Map::new(),
        };
        for (name, value) in parameters(&workloads) {
            design.parameters.insert(name.into(), value);
        }
        design
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
    let mut trial = Trial::begin(format!("the server {}", way.name()), |address, answers| {
        way.start_serving(workload.serving, WORKERS, address, answers)
    })?;
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
    trial.end(&mut sample)?;
    Ok(sample)
}

fn parameters(workloads: &[Workload]) -> Vec<(&'static str, serde_json::Value)> {
    let [kept, stuck, cpu] = [&workloads[0], &workloads[1], &workloads[2]];
    vec![
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
    ]
}

/// The comparisons, by the names that the judge looks up.
fn pairings() -> Vec<Pairing> {
    let pairing = |name: &str, workload: &str, metric: &str, a: Way, b: Way| {
        ways::pairing(name, workload, &format!("latency_ms_{metric}"), a, b)
    };
    vec![
        pairing(
            judge::KEPT_EXCLUSIVE_TO_OURS,
            "kept",
            "mean",
            Way::SharedEpollExclusive,
            Way::LeastConnectionsRescue,
        ),
        pairing(
            judge::KEPT_OURS_TO_HASH,
            "kept",
            "mean",
            Way::LeastConnectionsRescue,
            Way::ReuseportHash,
        ),
        pairing(
            judge::RESCUE_TO_SHARED,
            "stuck",
            "mean",
            Way::LeastConnectionsRescue,
            Way::SharedAccept,
        ),
        pairing(
            judge::HASH_TO_RESCUE,
            "stuck",
            "mean",
            Way::ReuseportHash,
            Way::LeastConnectionsRescue,
        ),
        pairing(
            judge::RESCUE_TO_LEAST,
            "stuck",
            "mean",
            Way::LeastConnectionsRescue,
            Way::LeastConnections,
        ),
        pairing(
            judge::P99_HASH_TO_RESCUE,
            "stuck",
            "p99",
            Way::ReuseportHash,
            Way::LeastConnectionsRescue,
        ),
        pairing(
            judge::CPU_DEVIATION,
            "cpu",
            "stddev",
            Way::ReuseportHash,
            Way::SharedEpollExclusive,
        ),
        pairing(
            judge::CPU_MEAN,
            "cpu",
            "mean",
            Way::ReuseportHash,
            Way::SharedEpollExclusive,
        ),
        pairing(
            judge::CPU_DEVIATION_OURS,
            "cpu",
            "stddev",
            Way::ReuseportHash,
            Way::LeastConnectionsRescue,
        ),
        pairing(
            judge::CPU_MEAN_OURS,
            "cpu",
            "mean",
            Way::LeastConnectionsRescue,
            Way::SharedEpollExclusive,
        ),
    ]
}
