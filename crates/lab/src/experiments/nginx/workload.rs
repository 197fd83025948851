//! What is asked of nginx.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::net::SocketAddr;
use std::time::Duration;
use wakeone_load::{Mix, Plan};

use super::servers::{ALL, Kind, Running};
use crate::experiment::Context;
use crate::experiments::tills::workload::{STUCK_US, WORKERS, workloads};
use crate::{Error, measure};

/// Requests a second of the workloads in which a worker does nothing else for a while.
pub const RATE_PER_S: f64 = 500.0;
/// How long they last.
pub const LOAD_S: f64 = 4.0;
/// When the worker goes away.
const GONE_AFTER: Duration = Duration::from_millis(500);
/// For how long.
pub const GONE: Duration = Duration::from_millis(2500);

/// A workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Workload {
    /// That of `tills`: some requests are slow.
    Stuck,
    /// That of `tills`: all compute.
    Cpu,
    /// One worker is stopped.
    Stopped,
    /// One worker computes.
    Busy,
}

/// All of them.
pub const WORKLOADS: [Workload; 4] = [
    Workload::Stuck,
    Workload::Cpu,
    Workload::Stopped,
    Workload::Busy,
];

/// Name of the variant in which no worker goes away.
pub const HEALTHY: &str = "healthy";

/// A variant: a workload, a way, and whether a worker goes away where the workload has that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variant {
    /// What is asked.
    pub workload: Workload,
    /// Of whom.
    pub kind: Kind,
    /// Nobody goes away.
    pub healthy: bool,
}

impl Workload {
    /// First part of the variants' names.
    pub fn name(self) -> &'static str {
        match self {
            Workload::Stuck => "stuck",
            Workload::Cpu => "cpu",
            Workload::Stopped => "stopped",
            Workload::Busy => "busy",
        }
    }

    /// Whether one worker goes away for a while.
    pub fn loses_one(self) -> bool {
        matches!(self, Workload::Stopped | Workload::Busy)
    }

    /// Its variants.
    pub fn variants(self) -> Vec<Variant> {
        let with = |healthy| {
            move |kind| Variant {
                workload: self,
                kind,
                healthy,
            }
        };
        if self.loses_one() {
            let kinds = [Kind::Reuseport, Kind::Attach, Kind::AttachRescue];
            let healthy = with(true)(Kind::Reuseport);
            std::iter::once(healthy)
                .chain(kinds.map(with(false)))
                .collect()
        } else {
            ALL.map(with(false)).into()
        }
    }

    /// About how long one measurement takes, in seconds.
    pub fn seconds(self, quick: bool) -> f64 {
        let [stuck, cpu] = workloads(quick);
        match self {
            Workload::Stuck => stuck.seconds,
            Workload::Cpu => cpu.seconds,
            Workload::Stopped | Workload::Busy => LOAD_S + 1.0,
        }
    }
}

impl Variant {
    /// Its name.
    pub fn name(self) -> String {
        let way = if self.healthy {
            HEALTHY
        } else {
            self.kind.name()
        };
        format!("{}/{way}", self.workload.name())
    }

    /// The variant of this name.
    ///
    /// # Errors
    /// When there is none.
    pub fn parse(name: &str) -> Result<Self, Error> {
        WORKLOADS
            .into_iter()
            .flat_map(Workload::variants)
            .find(|variant| variant.name() == name)
            .ok_or_else(|| Error::Unknown(name.into()))
    }

    /// Sends the load, and has the worker go away meanwhile where it is to.
    ///
    /// # Errors
    /// When the load cannot be sent, or the worker does not go.
    pub fn load(
        self,
        nginx: &mut Running,
        context: &mut Context<'_>,
    ) -> Result<wakeone_load::Outcome, Error> {
        let plan = self.plan(nginx, context);
        if self.healthy || !self.workload.loses_one() {
            let found = measure::load(&plan, context)?;
            nginx.answers.client_saw(&found);
            return Ok(found);
        }
        let (address, worker) = (nginx.address, nginx.workers[WORKERS / 2]);
        let (found, kept) = std::thread::scope(|scope| {
            let lose = scope.spawn(move || lose_one(self.workload, address, worker));
            (measure::load(&plan, context), lose.join())
        });
        let others = kept
            .unwrap_or_else(|_| Err(Error::Server("a thread of the experiment panicked".into())))?;
        let found = found?;
        nginx.answers.client_saw(&found);
        nginx.answers.client_counted(others, 0);
        Ok(found)
    }

    fn plan(self, nginx: &Running, context: &Context<'_>) -> Plan {
        let [stuck, cpu] = workloads(context.settings.quick);
        match self.workload {
            Workload::Stuck => stuck.plan(nginx.address, context.seed),
            Workload::Cpu => cpu.plan(nginx.address, context.seed),
            Workload::Stopped | Workload::Busy => measure::plan(
                nginx.address,
                measure::poisson(RATE_PER_S),
                measure::for_seconds(LOAD_S),
                Mix::one(format!("/work?us={STUCK_US}&kind=sleep")),
                context.seed,
            ),
        }
    }
}

/// Takes one worker away for a while; how many requests that took.
fn lose_one(workload: Workload, address: SocketAddr, worker: u32) -> Result<u64, Error> {
    std::thread::sleep(GONE_AFTER);
    if workload == Workload::Busy {
        let path = format!("/work?us={}&kind=cpu", GONE.as_micros());
        crate::probe::body(address, &path)?;
        return Ok(1);
    }
    signal(worker, Signal::SIGSTOP)?;
    std::thread::sleep(GONE);
    signal(worker, Signal::SIGCONT)?;
    Ok(0)
}

fn signal(worker: u32, signal: Signal) -> Result<(), Error> {
    kill(Pid::from_raw(worker as i32), signal)
        .map_err(|e| Error::Server(format!("sending {signal} to a worker failed: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_variants_go_both_ways() {
        for variant in WORKLOADS.into_iter().flat_map(Workload::variants) {
            assert_eq!(Variant::parse(&variant.name()).unwrap(), variant);
        }
        for none in ["", "stuck", "stuck/healthy", "stopped/default", "x/y"] {
            assert!(Variant::parse(none).is_err(), "{none}");
        }
    }
}
