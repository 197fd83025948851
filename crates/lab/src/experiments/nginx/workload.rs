//! The workloads that nginx is measured under.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::net::SocketAddr;
use std::time::Duration;
use wakeone_load::{Mix, Plan};

use super::servers::{ALL, Kind};
use crate::error::Error;
use crate::experiment::{Context, Sample};
use crate::experiments::restart::{self, servers};
use crate::experiments::tills::workload::{STUCK_US, WORKERS, workloads};
use crate::under_test::ServerUnderTest;
use crate::{measure, nginx, steered};

/// Requests a second of the workloads in which a worker does nothing else for a while.
pub const RATE_PER_S: f64 = 500.0;
/// How long they last.
pub const LOAD_S: f64 = 4.0;
/// When the worker goes away.
const GONE_AFTER: Duration = Duration::from_millis(500);
/// The time for which it is taken away.
pub const GONE: Duration = Duration::from_millis(2500);

/// Requests a second while nginx is resized.
pub const RESIZED_RATE_PER_S: f64 = 6000.0;
/// Workers of the nginx that is resized, where there are not just one.
pub const RESIZED_WORKERS: usize = 8;
/// How often it is reloaded.
pub const RESIZED_RELOADS: usize = 8;
/// How long it serves between two reloads.
const RESIZED_PAUSE: Duration = Duration::from_millis(300);

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
    /// It is reloaded with one worker, with all of them, with one again.
    Resized,
}

/// All of them.
pub const WORKLOADS: [Workload; 5] = [
    Workload::Stuck,
    Workload::Cpu,
    Workload::Stopped,
    Workload::Busy,
    Workload::Resized,
];

/// Name of the variant in which no worker goes away.
pub const HEALTHY: &str = "healthy";

/// A variant: a workload, a way, and whether a worker goes away where the workload has that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variant {
    /// The requests that are sent.
    pub workload: Workload,
    /// The server that gets them.
    pub kind: Kind,
    /// No worker is taken away.
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
            Workload::Resized => "resized",
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
        if self == Workload::Resized {
            [Kind::Reuseport, Kind::Attach].map(with(false)).into()
        } else if self.loses_one() {
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
        let [_, stuck, cpu] = workloads(quick);
        match self {
            Workload::Stuck => stuck.seconds,
            Workload::Cpu => cpu.seconds,
            Workload::Stopped | Workload::Busy => LOAD_S + 1.0,
            Workload::Resized => RESIZED_PAUSE.as_secs_f64() * (RESIZED_RELOADS as f64 + 1.0) + 0.5,
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

    /// The reason why it cannot be measured here.
    pub fn lacks(self) -> Option<String> {
        let no_nginx = match self.workload {
            // It serves a fixed answer, and needs no handler that blocks.
            Workload::Resized => nginx::program().err(),
            _ => nginx::perl_module().err(),
        };
        no_nginx.or_else(|| self.kind.steered().then(steered::lacks).flatten())
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

    /// Sends the load. Meanwhile it takes one worker away, where the workload says so.
    ///
    /// # Errors
    /// When the load cannot be sent, or the worker does not go.
    pub fn load(
        self,
        running: &mut ServerUnderTest,
        context: &mut Context<'_>,
    ) -> Result<wakeone_load::Outcome, Error> {
        let plan = self.plan(running, context);
        if self.healthy || !self.workload.loses_one() {
            let found = measure::load(&plan, context)?;
            running.answers.client_saw(&found);
            return Ok(found);
        }
        let (address, worker) = (running.address, running.workers[WORKERS / 2]);
        let (found, kept) = std::thread::scope(|scope| {
            let lose = scope.spawn(move || lose_one(self.workload, address, worker));
            (measure::load(&plan, context), lose.join())
        });
        let others = kept
            .unwrap_or_else(|_| Err(Error::Server("a thread of the experiment panicked".into())))?;
        let found = found?;
        running.answers.client_saw(&found);
        running.answers.client_counted(others, 0);
        Ok(found)
    }

    fn plan(self, running: &ServerUnderTest, context: &Context<'_>) -> Plan {
        let [_, stuck, cpu] = workloads(context.settings.quick);
        match self.workload {
            Workload::Stuck => stuck.plan(running.address, context.seed),
            Workload::Cpu => cpu.plan(running.address, context.seed),
            // Resized has its own; see [`resize`].
            Workload::Stopped | Workload::Busy | Workload::Resized => measure::plan(
                running.address,
                measure::poisson(RATE_PER_S),
                measure::for_seconds(LOAD_S),
                Mix::one(format!("/work?us={STUCK_US}&kind=sleep")),
                context.seed,
            ),
        }
    }
}

/// Reloads nginx with one worker and with all of them by turns, under load, and counts what was not answered.
///
/// # Errors
/// When nginx or the load fails.
pub fn resize(kind: Kind, context: &mut Context<'_>) -> Result<Sample, Error> {
    let kind = match kind.steered() {
        true => servers::Kind::NginxToOneAttached,
        false => servers::Kind::NginxToOne,
    };
    let plan = |address, context: &Context<'_>| Plan {
        timeout: Duration::from_secs(5),
        ..measure::plan(
            address,
            measure::poisson(RESIZED_RATE_PER_S),
            measure::for_seconds(restart::LONGEST.as_secs_f64()),
            Mix::one("/"),
            context.seed,
        )
    };
    let mut sample = restart::measure_restarts(
        kind,
        RESIZED_WORKERS,
        plan,
        RESIZED_RELOADS,
        RESIZED_PAUSE,
        context,
    )?;
    // The lost requests are the result here, not a failure of the measurement.
    sample.metrics.retain(|name, _| !name.starts_with("errors"));
    Ok(sample)
}

/// Takes one worker away for a while. Returns how many requests that took.
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
