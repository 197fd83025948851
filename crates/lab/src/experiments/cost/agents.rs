//! CPU time of what steers: of the supervisor of `run`, of the agent that `attach` leaves behind, and of `agent`. While
//! nobody comes, and where workers share a queue also under load.

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use wakeone_load::Mix;

use crate::error::Error;
use crate::experiment::{Context, Sample};
use crate::process::{cpu_ns, tree, wakeone};
use crate::server::Server;
use crate::under_test::ServerUnderTest;
use crate::ways::Way;
use crate::{measure, status};

/// What steers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Steers {
    /// The supervisor of `wakeone run`, and the agent in it.
    Run,
    /// The agent of `wakeone attach --rescue`.
    Attach,
    /// `wakeone agent` with a target for each group, a port.
    Agent,
    /// The same, where workers share the queue of each group.
    AgentOfQueues,
    /// The agent of `wakeone attach` to workers that share a queue, and its guardian.
    OneQueue,
}

/// A process that is measured, with its children.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agent {
    /// The name in results.
    pub variant: &'static str,
    /// The process.
    steers: Steers,
    /// Its groups.
    groups: u8,
    /// Workers of the server.
    pub workers: usize,
    /// New connections a second, in each group; `None`: nobody comes.
    pub rate_per_s: Option<u32>,
    /// The most that it may take, a share of one CPU in %.
    pub most_percent: &'static str,
}

const fn idle(variant: &'static str, steers: Steers, most_percent: &'static str) -> Agent {
    Agent {
        variant,
        steers,
        groups: 1,
        workers: 4,
        rate_per_s: None,
        most_percent,
    }
}

/// The groups of an agent that has many.
pub const MANY: u8 = 50;

const fn many(variant: &'static str, steers: Steers, most_percent: &'static str) -> Agent {
    Agent {
        groups: MANY,
        workers: 2,
        ..idle(variant, steers, most_percent)
    }
}

/// More than 0.3 % is seen on the bill of a machine that does nothing.
pub const ALL: [Agent; 11] = [
    idle("idle/run", Steers::Run, "0.3"),
    idle("idle/attach", Steers::Attach, "0.3"),
    idle("idle/agent", Steers::Agent, "0.3"),
    idle("idle/one-queue", Steers::OneQueue, "0.1"),
    Agent {
        workers: 64,
        ..idle("idle/one-queue-64", Steers::OneQueue, "0.1")
    },
    Agent {
        rate_per_s: Some(1000),
        ..idle("busy/one-queue", Steers::OneQueue, "0.5")
    },
    Agent {
        workers: 64,
        rate_per_s: Some(1000),
        ..idle("busy/one-queue-64", Steers::OneQueue, "0.5")
    },
    many("idle/agent-of-50", Steers::Agent, "1"),
    Agent {
        rate_per_s: Some(100),
        ..many("busy/agent-of-50", Steers::Agent, "3")
    },
    many("idle/agent-of-50-queues", Steers::AgentOfQueues, "1"),
    Agent {
        rate_per_s: Some(100),
        ..many("busy/agent-of-50-queues", Steers::AgentOfQueues, "3")
    },
];

/// The metric: a share of one CPU.
pub const METRIC: &str = "idle_cpu_percent";

/// The time after which the start is over.
pub const SETTLE: Duration = Duration::from_secs(3);

impl Agent {
    /// Finds the variant of this name.
    pub fn of(name: &str) -> Option<Self> {
        ALL.into_iter().find(|agent| agent.variant == name)
    }

    /// Whether it has many groups: [`super::many`] measures it.
    pub fn is_of_many(self) -> bool {
        self.groups == MANY
    }

    /// Whether workers share a queue.
    pub fn shares(self) -> bool {
        matches!(self.steers, Steers::OneQueue | Steers::AgentOfQueues)
    }

    fn way(self) -> Way {
        match self.steers {
            Steers::Run => Way::LeastConnectionsRescue,
            _ if self.shares() => Way::SharedEpollExclusive,
            _ => Way::ReuseportHash,
        }
    }

    /// Starts a server and the process that steers it. Leaves both alone for a while, and then measures the CPU time over
    /// `seconds`.
    ///
    /// # Errors
    /// When they do not start, or nothing steers.
    pub fn measure(self, seconds: f64, context: &mut Context<'_>) -> Result<Sample, Error> {
        let mut sample = Sample::default();
        let mut trial = self.way().start(self.workers)?;
        let address = trial.address;
        let steers = Running::start(self, address)?;
        let pid = steers.0.as_ref().map_or(trial.pid(), Server::pid);
        rest(SETTLE, context)?;
        if !status::read()?.to_string().contains(&address.to_string()) {
            return Err(Error::Server(format!("nothing steers {address}")));
        }
        // The workers of `wakeone run` are below it, and none of it.
        let all = match self.steers {
            Steers::Run => vec![pid],
            _ => tree(pid),
        };
        let cpu = || all.iter().copied().map(cpu_ns).sum::<u64>();
        let (begun, before) = (Instant::now(), cpu());
        self.pass(seconds, &mut trial, &mut sample, context)?;
        let spent = cpu().saturating_sub(before) as f64;
        let share = spent / begun.elapsed().as_nanos() as f64;
        sample.put(METRIC, "%", share * 100.0);
        steers.end()?;
        trial.stop(&mut sample)?;
        Ok(sample)
    }

    /// Lets the time pass, with a load or without.
    fn pass(
        self,
        seconds: f64,
        trial: &mut ServerUnderTest,
        sample: &mut Sample,
        context: &mut Context<'_>,
    ) -> Result<(), Error> {
        let Some(rate) = self.rate_per_s else {
            return rest(Duration::from_secs_f64(seconds), context);
        };
        let (arrivals, end) = (measure::poisson(rate.into()), measure::for_seconds(seconds));
        let request = Mix::one("/work?us=1000&kind=sleep");
        let plan = measure::plan(trial.address, arrivals, end, request, context.seed);
        let found = trial.load(&plan, context)?;
        sample.put("errors", "count", found.errors.values().sum::<u64>() as f64);
        sample.put("requests", "count", found.completed as f64);
        Ok(())
    }
}

/// The process that steers the server, where that is not its own supervisor.
struct Running(Option<Server>);

impl Running {
    fn start(agent: Agent, address: SocketAddr) -> Result<Self, Error> {
        let server = match agent.steers {
            Steers::Run => return Ok(Self(None)),
            Steers::OneQueue => attach(address, &[]),
            Steers::Attach => attach(address, &["--rescue"]),
            Steers::Agent | Steers::AgentOfQueues => told_by_a_file(&target(address)),
        };
        server.map(|server| Self(Some(server)))
    }

    fn end(self) -> Result<(), Error> {
        self.0.map_or(Ok(()), Server::stop)
    }
}

/// Starts an agent that attaches to a server with these options. It is a child of this process.
///
/// # Errors
/// What `wakeone attach` says.
pub fn attach(address: SocketAddr, options: &[&str]) -> Result<Server, Error> {
    let mut command = Command::new(wakeone()?);
    command.args(["attach", &address.to_string(), "--foreground"]);
    command.args(options);
    Server::start("wakeone attach", &mut command, "attached")
}

fn target(address: SocketAddr) -> String {
    let port = address.port();
    format!("[[target]]\nlisten = \":{port}\"\nrescue = true\n")
}

/// Starts `wakeone agent` with these targets.
///
/// # Errors
/// What it says.
pub fn told_by_a_file(targets: &str) -> Result<Server, Error> {
    let folder = tempfile::tempdir().map_err(failed)?;
    let file = folder.path().join("agent.toml");
    std::fs::write(&file, targets).map_err(failed)?;
    let mut command = Command::new(wakeone()?);
    command.args(["agent", "--config"]).arg(&file);
    // The group's name: it is steered.
    Server::start("wakeone agent", &mut command, "at-")
}

fn failed(error: std::io::Error) -> Error {
    Error::Server(format!(
        "writing the configuration of an agent failed: {error}"
    ))
}

/// Does nothing for a while, until the user stops it.
///
/// # Errors
/// When the user does.
pub fn rest(time: Duration, context: &Context<'_>) -> Result<(), Error> {
    let end = Instant::now() + time;
    while Instant::now() < end {
        std::thread::sleep(Duration::from_millis(100));
        context.check()?;
    }
    Ok(())
}
