//! The loads that are sent in slices: on what server, and what takes turns.

use std::sync::LazyLock;
use std::time::Duration;

use wakeone_load::{Arrivals, Live, Mix, Plan, Stop};

use super::agents;
use super::steering::{Group, HASH, Parts, Rest, STEERED};
use super::watched::Doctor;
use crate::alternate::{self, Arms};
use crate::error::Error;
use crate::experiment::{Context, Sample};
use crate::measure;
use crate::slices::{Pair, Timing};
use crate::trials::server::{self, Server, Who};
use crate::under_test::ServerUnderTest;
use crate::ways::{Serving, Way};
use crate::{process, stats};
use wakeone_control::policy::Policy;

/// Workers of each server.
pub const WORKERS: usize = 4;
/// Clients of the closed loop: enough that no worker is ever without work, few enough that queues stay short.
pub const CLIENTS: usize = 64;
/// The counted part of a slice.
const COUNTED: Duration = Duration::from_millis(125);
/// The rest of a slice: several times the life of a connection.
const SETTLING: Duration = Duration::from_millis(25);
/// How long the guardian of a stopped agent takes at most until all entries are as the server made them.
const GUARDED: Duration = Duration::from_millis(50);
/// About how long a doctor takes to look around, over all switches of a block.
const LOOKING_AROUND: Duration = Duration::from_millis(150);

/// A load that is sent in slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// The kernel's hash, all of Wakeone's steering, and the hash once more, which shows the method's own error.
    Steering,
    /// One part of the steering after the other.
    Parts,
    /// Nobody watches, doctor watches without tracing, and with it.
    Watching,
    /// A server whose workers share one socket, as it is and attached to.
    OneQueue(Shared),
}

/// A server whose workers share one socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shared {
    /// The reference server with EPOLLEXCLUSIVE, and so many workers.
    Ours(usize),
    /// Another project's, by its name.
    Other(&'static str),
}

/// All of them.
pub const ALL: [Load; 7] = [
    Load::Steering,
    Load::Parts,
    Load::Watching,
    Load::OneQueue(Shared::Ours(4)),
    Load::OneQueue(Shared::Ours(64)),
    Load::OneQueue(Shared::Other("uvicorn-workers")),
    Load::OneQueue(Shared::Other("nginx-shared-fixed")),
];

/// A group with its program, and nothing else. It hands out connections as the kernel's hash does.
const CHOOSING: Parts = Parts {
    choosing: Some(Policy::Hash),
    ..HASH
};
/// The same with counts, by which the program does not choose.
const COUNTING: Parts = Parts {
    counting: true,
    ..CHOOSING
};
/// The same, and the program chooses by the counts.
const EVEN: Parts = Parts {
    choosing: Some(Policy::LeastConnections),
    ..COUNTING
};

/// The parts that each arm of [`Load::Parts`] runs.
const LADDER: [Parts; 5] = [HASH, CHOOSING, COUNTING, EVEN, STEERED];

/// Another project's server, by its name.
fn named(name: &str) -> Who {
    static ALL: LazyLock<Vec<Server>> = LazyLock::new(|| {
        let others = ["uvicorn-workers", "nginx-shared-fixed"];
        let all = others.map(|name| server::named(name, &toml::Table::new()));
        all.into_iter().flatten().collect()
    });
    let found = ALL.iter().find(|one| one.name == name);
    Who::Other(found.unwrap_or_else(|| panic!("no server {name}")))
}

impl Load {
    /// The variant's name.
    pub fn variant(self) -> String {
        match self {
            Load::Steering => "slices/steering".into(),
            Load::Parts => "slices/parts".into(),
            Load::Watching => "slices/watching".into(),
            Load::OneQueue(Shared::Ours(workers)) => format!("slices/one-queue-{workers}"),
            Load::OneQueue(Shared::Other(name)) => format!("slices/one-queue-{name}"),
        }
    }

    /// The load of a variant of this name.
    pub fn of(variant: &str) -> Option<Self> {
        ALL.into_iter().find(|load| load.variant() == variant)
    }

    /// The names of its arms.
    pub fn arms(self) -> &'static [&'static str] {
        match self {
            Load::Steering => &["hash", "steered", "hash-again"],
            Load::Parts => &[
                "hash",
                "choosing",
                "counting",
                "least-connections",
                "steered",
            ],
            Load::Watching => &["unwatched", "watched-without-tracing", "watched"],
            Load::OneQueue(_) => &["as-it-is", "attached", "as-it-is-again"],
        }
    }

    /// The pairs that are compared.
    pub fn pairs(self) -> &'static [Pair] {
        match self {
            Load::Steering | Load::Watching | Load::OneQueue(_) => &[(1, 0), (2, 0)],
            Load::Parts => &[(1, 0), (2, 1), (3, 2), (4, 3), (4, 0)],
        }
    }

    /// The reason why it cannot be measured here.
    pub fn lacks(self) -> Option<String> {
        match self {
            Load::OneQueue(Shared::Other(name)) => named(name).lacks(),
            _ => None,
        }
    }

    /// Sends the load for about `seconds`.
    ///
    /// # Errors
    /// When it cannot be measured.
    pub fn measure(self, seconds: f64, context: &mut Context<'_>) -> Result<Sample, Error> {
        match self {
            Load::Steering => self.steering(&[HASH, STEERED, HASH], seconds, context),
            Load::Parts => self.steering(&LADDER, seconds, context),
            Load::Watching => self.watching(seconds, context),
            Load::OneQueue(shared) => self.one_queue(shared, seconds, context),
        }
    }

    fn timing(self, seconds: f64) -> Timing {
        let (settling, switching) = match self {
            Load::Watching => (SETTLING, LOOKING_AROUND),
            Load::OneQueue(_) => (SETTLING + GUARDED, Duration::ZERO),
            _ => (SETTLING, Duration::ZERO),
        };
        let arms = self.arms().len();
        Timing {
            settling,
            ..Timing::for_seconds(seconds, arms, COUNTED, settling + switching)
        }
    }

    fn steering(
        self,
        arms: &[Parts],
        seconds: f64,
        context: &mut Context<'_>,
    ) -> Result<Sample, Error> {
        let trial = Way::LeastConnectionsRescue.start(WORKERS)?;
        let group = Group::on(trial.address)?;
        let switch = |group: &mut Group, arm: usize| group.set(arms[arm]);
        let rescues = |group: Group, sample: &mut Sample| {
            sample.put("rescues", "count", group.rescues() as f64);
            Ok(())
        };
        self.on_one(trial, (group, None), switch, rescues, seconds, context)
    }

    fn watching(self, seconds: f64, context: &mut Context<'_>) -> Result<Sample, Error> {
        let trial = Way::ReuseportHash.start(WORKERS)?;
        let doctor = Doctor::of(trial.address)?;
        let views = [None, Some(false), Some(true)];
        let switch = |doctor: &mut Doctor, arm: usize| doctor.set(views[arm]);
        let its_cpu = |mut doctor: Doctor, sample: &mut Sample| {
            doctor.set(None)?;
            sample.put("watcher_cpu_percent", "%", doctor.cpu_percent());
            Ok(())
        };
        self.on_one(trial, (doctor, None), switch, its_cpu, seconds, context)
    }

    /// Measures one server, beside which the arms take turns. A process that steers it counts as a part of it.
    fn on_one<T>(
        self,
        mut trial: ServerUnderTest,
        (mut beside, steers): (T, Option<u32>),
        switch: impl Fn(&mut T, usize) -> Result<(), Error>,
        end: impl FnOnce(T, &mut Sample) -> Result<(), Error>,
        seconds: f64,
        context: &mut Context<'_>,
    ) -> Result<Sample, Error> {
        let plan = endless(trial.address, "/whoami", context);
        let first = std::iter::once(trial.pid()).chain(steers);
        let all: Vec<u32> = first.flat_map(process::tree).collect();
        let mut switch = |arm: usize, _: &Live| switch(&mut beside, arm);
        let live = Live::new(&plan);
        let (found, mut sample) =
            self.alternate(&plan, &live, seconds, &mut switch, &all, context)?;
        end(beside, &mut sample)?;
        trial.answers.client_saw(&found);
        trial.stop(&mut sample)?;
        Ok(sample)
    }

    fn one_queue(
        self,
        shared: Shared,
        seconds: f64,
        context: &mut Context<'_>,
    ) -> Result<Sample, Error> {
        let trial = match shared {
            Shared::Ours(workers) => Way::SharedEpollExclusive.start(workers)?,
            Shared::Other(name) => {
                ServerUnderTest::start(named(name).launch(Serving::Blocking, WORKERS)?)?
            }
        };
        let agent = agents::attach(trial.address, &[])?;
        // Its guardian makes all entries as the server made them when it is stopped.
        let pid = agent.pid();
        let rest = Rest(pid);
        let switch = |rest: &mut Rest, arm: usize| rest.set(arm != 1);
        let end = |rest: Rest, _: &mut Sample| {
            drop(rest);
            agent.stop()
        };
        self.on_one(trial, (rest, Some(pid)), switch, end, seconds, context)
    }

    fn alternate(
        self,
        plan: &Plan,
        live: &Live,
        seconds: f64,
        switch: &mut dyn FnMut(usize, &Live) -> Result<(), Error>,
        processes: &[u32],
        context: &mut Context<'_>,
    ) -> Result<(wakeone_load::Outcome, Sample), Error> {
        let arms = Arms {
            processes,
            names: self.arms(),
            pairs: self.pairs(),
            switch,
        };
        let done = alternate::alternate(plan, live, self.timing(seconds), arms, context)?;
        let (found, slices) = (done.outcome, done.slices);
        let mut sample = Sample::default();
        for (name, sleeps) in self.arms().iter().zip(done.sleeps) {
            sample.put(sleeps_metric(name), "ratio", sleeps);
        }
        let errors: u64 = found.errors.values().sum();
        sample.put("errors", "count", errors as f64);
        sample.put("requests", "count", found.completed as f64);
        for (arm, name) in slices.arms.iter().enumerate() {
            let rates = slices.rounds.iter().flatten().map(|block| block[arm]);
            let rates: Vec<f64> = rates.collect();
            sample.put(rate_metric(name), "1/s", stats::median(&rates));
        }
        sample.slices = Some(slices);
        Ok((found, sample))
    }
}

/// The metric that has the median of an arm's slices.
pub fn rate_metric(arm: &str) -> String {
    format!("{}_per_s", word(arm))
}

/// The metric that has how often a process of the server slept for a connection.
pub fn sleeps_metric(arm: &str) -> String {
    format!("{}_sleeps_per_connection", word(arm))
}

fn word(arm: &str) -> String {
    arm.replace(|c: char| !c.is_ascii_alphanumeric(), "_")
}

/// A load that connects, asks, reads and closes again and again, until it is cancelled.
fn endless(target: std::net::SocketAddr, path: &str, context: &Context<'_>) -> Plan {
    let clients = Arrivals::Closed {
        concurrency: CLIENTS,
    };
    let never = Stop {
        requests: Some(u64::MAX),
        duration: None,
    };
    measure::plan(target, clients, never, Mix::one(path), context.seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_variants_go_both_ways_and_pairs_name_arms() {
        for load in ALL {
            assert_eq!(Load::of(&load.variant()), Some(load));
            let arms = load.arms().len();
            assert!(load.pairs().iter().all(|(a, b)| a.max(b) < &arms));
        }
        assert_eq!(Load::of("slices/none"), None);
        assert_eq!(LADDER.len(), Load::Parts.arms().len());
    }

    #[test]
    fn metrics_have_names_that_the_schema_takes() {
        assert_eq!(rate_metric("least-connections"), "least_connections_per_s");
    }
}
