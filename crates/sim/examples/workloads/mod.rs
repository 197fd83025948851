//! The workloads of docs/policies.md.

use wakeone_sim::{
    Arrivals, Dispatch, Error, Faults, Kept, Kind, Load, Next, Outcome, Repeated, Service, Setup,
    Wake, run,
};

pub type Failure = Box<dyn std::error::Error>;

/// A load and its workers.
pub struct Workload {
    pub name: &'static str,
    pub arrivals: &'static str,
    pub service: Service,
    /// The busy part of the workers' time.
    pub busy: f64,
    /// The connections that its requests come over; `None`: each has one of its own.
    pub kept: Option<Kept>,
    pub setup: Setup,
}

impl Workload {
    /// Its workers, given connections in this way.
    pub fn setup(&self, way: Dispatch) -> Setup {
        Setup {
            way,
            ..self.setup.clone()
        }
    }

    /// Simulates its requests at these workers.
    pub fn simulate(&self, setup: Setup, requests: u64, seed: u64) -> Result<Outcome, Failure> {
        let per_s = self.busy * setup.capacity() / self.service.mean_s();
        let load = Load {
            arrivals: self.arrivals.parse::<Arrivals>()?.at(per_s),
            service: self.service.clone(),
            requests,
            kept: self.kept,
            seed,
        };
        Ok(run(&setup, &load)?)
    }
}

/// One request in a hundred takes 100 ms.
const STUCK: &str = "99:1.15ms,1:100ms";

fn workload(
    name: &'static str,
    arrivals: &'static str,
    service: &'static str,
    busy: f64,
    workers: usize,
    change: impl FnOnce(&mut Setup),
) -> Result<Workload, Error> {
    let mut setup = Setup::new(workers, Dispatch::Shared(Wake::LongestAsleep));
    change(&mut setup);
    Ok(Workload {
        name,
        arrivals,
        service: service.parse()?,
        busy,
        kept: None,
        setup,
    })
}

/// Each worker pauses every second, for so long, in s.
fn pauses(lasts_s: f64) -> Faults {
    let pauses = Some(Repeated {
        every_s: 1.0,
        lasts_s,
    });
    Faults {
        pauses,
        ..Faults::default()
    }
}

/// Connections that are kept: 16 for each of four workers. Each opens this long after the one before, in s.
fn kept(name: &'static str, apart_s: f64) -> Result<Workload, Error> {
    let kept = Some(Kept {
        connections: 64,
        next: Next::Any,
        apart_s,
    });
    Ok(Workload {
        kept,
        ..workload(name, "poisson", "1ms", 0.6, 4, |_| {})?
    })
}

/// Ten of the kinds for which the policies were chosen first.
pub fn workloads() -> Result<Vec<Workload>, Error> {
    [
        workload("steady", "poisson", "exp:1ms", 0.8, 4, |_| {}),
        workload("stuck", "poisson", STUCK, 0.535, 4, |_| {}),
        workload("stuck-64", "poisson", STUCK, 0.8, 64, |_| {}),
        workload("lognormal", "poisson", "lognormal:2ms:1.5", 0.7, 4, |_| {}),
        workload("pareto", "poisson", "pareto:2ms:2.2", 0.7, 4, |_| {}),
        workload("bursts", "bursts:2:100ms:0.2", "exp:1ms", 0.6, 4, |_| {}),
        workload("pauses", "poisson", "exp:1ms", 0.6, 4, |setup| {
            setup.faults = pauses(0.05);
        }),
        workload("cpu", "poisson", "300us", 0.8, 4, |setup| {
            setup.cpus = Some(2)
        }),
        workload("loops", "poisson", "exp:2ms", 0.7, 4, |setup| {
            setup.kind = Kind::EventLoop;
        }),
        workload("unequal", "poisson", "exp:1ms", 0.7, 4, |setup| {
            setup.speeds = vec![2.0, 1.0, 1.0, 1.0];
        }),
    ]
    .into_iter()
    .collect()
}

/// Workers that have several connections at a time. Those of the last two are kept.
#[allow(dead_code)] // one of the three searches takes none of them
pub fn of_many_connections() -> Result<Vec<Workload>, Error> {
    let loops = |setup: &mut Setup| setup.kind = Kind::EventLoop;
    let threads = |setup: &mut Setup| setup.kind = Kind::Threads(8);
    [
        workload("loops-stuck", "poisson", STUCK, 0.535, 4, loops),
        workload(
            "loops-bursts",
            "bursts:2:100ms:0.2",
            "exp:2ms",
            0.6,
            4,
            loops,
        ),
        workload("threads", "poisson", "lognormal:20ms:1.5", 0.8, 4, threads),
        workload("loops-pauses", "poisson", "exp:2ms", 0.6, 4, |setup| {
            setup.kind = Kind::EventLoop;
            setup.faults = pauses(0.1);
        }),
        kept("kept", 0.004),
        kept("kept-fast", 0.001),
    ]
    .into_iter()
    .collect()
}
