//! The cost of steering and of watching: connections a second with and without it, taken in slices of one load, the time
//! of a run of each program, and the CPU time of agents.

mod agents;
mod judge;
mod loads;
mod many;
mod present;
mod programs;
mod steering;
mod watched;

use serde_json::json;
use wakeone_bpf::run_stats::RunStats;
use wakeone_load::{Arrivals, Mix, Plan};

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Sample, Settings, parameters};
use crate::measure;
use crate::present::Block;
use crate::result::{Expectation, Outcome};
use crate::status;
use crate::ways::Way;
use agents::Agent;
use loads::{CLIENTS, Load, WORKERS};

card!();

/// The experiment.
pub struct Cost;

/// The variant that measures the programs where they are used, with the kernel's statistics on.
const UNDER_LOAD: &str = "programs/under-load";
/// How long nobody comes.
const IDLE_SECONDS: f64 = 10.0;
/// Slots to choose from, for the time of a run.
const SLOTS: [usize; 3] = [4, 64, 256];

impl Experiment for Cost {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let seconds = slices_seconds(settings);
        let mut design = Design {
            rounds: if settings.quick { 1 } else { 5 },
            steady: "throughput_per_s",
            parameters: parameters([
                ("workers", json!(WORKERS)),
                ("clients", json!(CLIENTS)),
                ("slices_s", json!(seconds)),
                ("load_s", json!(load_seconds(settings))),
                ("idle_s", json!(IDLE_SECONDS)),
                (
                    "request",
                    json!("GET /whoami, a connection a request, closed loop"),
                ),
            ]),
            ..Design::default()
        };
        for load in loads::ALL {
            let arm = arm(load.variant(), design.arms.len(), seconds + 2.0);
            design.offer(arm, &load.variant(), load.lacks());
        }
        let group = design.arms.len();
        let slots = slots(settings).iter();
        let by_slots = slots.map(|slots| arm(cell_name(*slots), group, 3.0));
        let under_load = arm(UNDER_LOAD.into(), group + 1, load_seconds(settings) + 0.5);
        let agents =
            agents::ALL.map(|agent| arm(agent.variant.into(), group + 2, 4.0 + IDLE_SECONDS));
        design
            .arms
            .extend(by_slots.chain([under_load]).chain(agents));
        design
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        if let Some(load) = Load::of(&arm.name) {
            let seconds = slices_seconds(context.settings);
            return load.measure(seconds, context);
        }
        if let Some(agent) = Agent::of(&arm.name) {
            return match agent.is_of_many() {
                true => many::measure(agent, IDLE_SECONDS, context),
                false => agent.measure(IDLE_SECONDS, context),
            };
        }
        if arm.name == UNDER_LOAD {
            return under_load(context);
        }
        let slots = SLOTS.into_iter().find(|n| cell_name(*n) == arm.name);
        let cell = programs::Cell {
            slots: slots.ok_or_else(|| Error::Unknown(arm.name.clone()))?,
            turns: 5,
            connections: 1000,
        };
        programs::measure(cell, context)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        judge::judge(outcome)
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        present::blocks(outcome)
    }
}

fn arm(name: String, group: usize, seconds: f64) -> Arm {
    Arm {
        name,
        group,
        seconds,
    }
}

fn slots(settings: &Settings) -> &'static [usize] {
    if settings.quick { &[4, 256] } else { &SLOTS }
}

fn cell_name(slots: usize) -> String {
    format!("programs/{slots}-slots")
}

/// A round of slices.
fn slices_seconds(settings: &Settings) -> f64 {
    if settings.quick { 12.0 } else { 35.0 }
}

fn load_seconds(settings: &Settings) -> f64 {
    if settings.quick { 1.0 } else { 3.0 }
}

/// Mean time of a run of each program under a load, from the kernel's own statistics.
fn under_load(context: &mut Context<'_>) -> Result<Sample, Error> {
    let counting = RunStats::enable().map_err(|e| {
        Error::Missing(format!(
            "asking the kernel to count the runs of BPF programs failed: {e}; it needs CAP_SYS_ADMIN"
        ))
    })?;
    let mut trial = Way::LeastConnections.start(WORKERS)?;
    let address = trial.address;
    let before = status::read()?;
    let found = trial.load(&plan(address, context), context)?;
    let after = status::read()?;
    let mut sample = Sample::default();
    trial.stop(&mut sample)?;
    drop(counting);
    sample.put("errors", "count", found.errors.values().sum::<u64>() as f64);
    sample.put("requests", "count", found.completed as f64);
    for (metric, program) in [("dispatch", "dispatc"), ("sock_ops", "count")] {
        let (runs, ns) = ran(&before, &after, address, program)?;
        sample.put(format!("{metric}_ns"), "ns", ns / runs);
        sample.put(
            format!("{metric}_runs_per_connection"),
            "ratio",
            runs / found.connections.max(1) as f64,
        );
    }
    Ok(sample)
}

fn plan(target: std::net::SocketAddr, context: &Context<'_>) -> Plan {
    let clients = Arrivals::Closed {
        concurrency: CLIENTS,
    };
    let end = measure::for_seconds(load_seconds(context.settings));
    measure::plan(target, clients, end, Mix::one("/whoami"), context.seed)
}

/// How often a program ran between two looks at the status, and how long that took in ns.
fn ran(
    before: &serde_json::Value,
    after: &serde_json::Value,
    address: std::net::SocketAddr,
    program: &str,
) -> Result<(f64, f64), Error> {
    let missing = || {
        Error::Server(format!(
            "`wakeone status --json` shows no run of the program {program} on {address}"
        ))
    };
    let (from, to) = (
        status::program(before, address, program).unwrap_or((0, 0)),
        status::program(after, address, program).ok_or_else(missing)?,
    );
    let (runs, ns) = (to.0.saturating_sub(from.0), to.1.saturating_sub(from.1));
    if runs == 0 {
        Err(missing())
    } else {
        Ok((runs as f64, ns as f64))
    }
}
