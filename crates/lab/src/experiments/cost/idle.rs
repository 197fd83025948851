//! CPU time without a client: of the supervisor of `run`, of the agent that `attach` leaves behind, and of `agent`.

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::experiment::{Context, Sample};
use crate::process::{cpu_ns, wakeone};
use crate::server::Server;
use crate::status;
use crate::ways::Way;

/// The process that is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Idle {
    /// The supervisor of `wakeone run`, and the agent in it.
    Run,
    /// The agent of `wakeone attach --rescue`.
    Attach,
    /// `wakeone agent` with one target, a port.
    Agent,
}

/// All of them.
pub const ALL: [Idle; 3] = [Idle::Run, Idle::Attach, Idle::Agent];

/// The metric: a share of one CPU.
pub const METRIC: &str = "idle_cpu_percent";

/// The time after which the start is over.
const SETTLE: Duration = Duration::from_secs(3);

impl Idle {
    /// The name in results.
    pub fn variant(self) -> &'static str {
        match self {
            Idle::Run => "idle/run",
            Idle::Attach => "idle/attach",
            Idle::Agent => "idle/agent",
        }
    }

    /// Finds the variant of this name.
    pub fn of(name: &str) -> Option<Self> {
        ALL.into_iter().find(|idle| idle.variant() == name)
    }

    fn way(self) -> Way {
        match self {
            Idle::Run => Way::LeastConnectionsRescue,
            Idle::Attach | Idle::Agent => Way::ReuseportHash,
        }
    }

    /// Starts a server of `workers` workers and the process that steers it. Leaves both alone for a while, and then
    /// measures the CPU time over `seconds`.
    ///
    /// # Errors
    /// When they do not start, or nothing steers.
    pub fn measure(
        self,
        workers: usize,
        seconds: f64,
        context: &Context<'_>,
    ) -> Result<Sample, Error> {
        let mut sample = Sample::default();
        let trial = self.way().start(workers)?;
        let address = trial.address;
        let steers = Steers::start(self, address)?;
        let pid = steers.0.as_ref().map_or(trial.pid(), Server::pid);
        rest(SETTLE, context)?;
        if !status::read()?.to_string().contains(&address.to_string()) {
            return Err(Error::Server(format!("nothing steers {address}")));
        }
        let (begun, before) = (Instant::now(), cpu_ns(pid));
        rest(Duration::from_secs_f64(seconds), context)?;
        let spent = cpu_ns(pid).saturating_sub(before) as f64;
        let share = spent / begun.elapsed().as_nanos() as f64;
        sample.put(METRIC, "%", share * 100.0);
        steers.end()?;
        trial.stop(&mut Sample::default())?;
        Ok(sample)
    }
}

/// The process that steers the server, where that is not its own supervisor.
struct Steers(Option<Server>);

impl Steers {
    fn start(idle: Idle, address: SocketAddr) -> Result<Self, Error> {
        let mut command = Command::new(wakeone()?);
        let what = format!("wakeone of {}", idle.variant());
        let (ready, folder) = match idle {
            Idle::Run => return Ok(Self(None)),
            Idle::Attach => {
                let address = address.to_string();
                command.args(["attach", &address, "--rescue", "--foreground"]);
                ("attached", None)
            }
            Idle::Agent => {
                let folder = tempfile::tempdir().map_err(failed)?;
                let file = folder.path().join("agent.toml");
                let port = address.port();
                let text = format!("[[target]]\nlisten = \":{port}\"\nrescue = true\n");
                std::fs::write(&file, text).map_err(failed)?;
                command.args(["agent", "--config"]).arg(&file);
                // The group's name: it is steered.
                ("at-", Some(folder))
            }
        };
        let server = Server::start(&what, &mut command, ready);
        drop(folder);
        server.map(|server| Self(Some(server)))
    }

    fn end(self) -> Result<(), Error> {
        self.0.map_or(Ok(()), Server::stop)
    }
}

fn failed(error: std::io::Error) -> Error {
    Error::Server(format!(
        "writing the configuration of an agent failed: {error}"
    ))
}

/// Does nothing for a while, until the user stops it.
fn rest(time: Duration, context: &Context<'_>) -> Result<(), Error> {
    let end = Instant::now() + time;
    while Instant::now() < end {
        std::thread::sleep(Duration::from_millis(100));
        context.check()?;
    }
    Ok(())
}
