//! Servers of two workers with one thread each.

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::answers::Answers;
use crate::apps::{self, Count};
use crate::experiment::Sample;
use crate::process::{self, leaves};
use crate::scratch::Scratch;
use crate::server::{Server, free_address};
use crate::steered::Attached;
use crate::{Error, probe};

/// Workers of each.
pub const WORKERS: usize = 2;
/// How long one may take to start.
const PATIENCE: Duration = Duration::from_secs(15);

/// A server, and who hands out its connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Puma's cluster mode as it is: one socket that both workers wait for.
    PumaShared,
    /// Two single Pumas with a socket each; the kernel's hash chooses.
    PumaHash,
    /// The same under `wakeone run`.
    PumaRun,
    /// gunicorn with `--reuse-port`; the kernel's hash chooses.
    GunicornHash,
    /// The same, and `wakeone attach --rescue`.
    GunicornAttach,
}

/// All of them.
pub const ALL: [Kind; 5] = [
    Kind::PumaShared,
    Kind::PumaHash,
    Kind::PumaRun,
    Kind::GunicornHash,
    Kind::GunicornAttach,
];

impl Kind {
    /// Name of the variant.
    pub fn name(self) -> &'static str {
        match self {
            Kind::PumaShared => "puma/shared",
            Kind::PumaHash => "puma/hash",
            Kind::PumaRun => "puma/run",
            Kind::GunicornHash => "gunicorn/hash",
            Kind::GunicornAttach => "gunicorn/attach",
        }
    }

    /// Its place in the palette of the charts.
    pub fn colour(self) -> usize {
        match self {
            Kind::PumaShared => 0,
            Kind::PumaHash | Kind::GunicornHash => 2,
            Kind::PumaRun | Kind::GunicornAttach => 4,
        }
    }

    fn is_puma(self) -> bool {
        matches!(self, Kind::PumaShared | Kind::PumaHash | Kind::PumaRun)
    }

    /// Why it cannot be measured here.
    pub fn lacks(self) -> Option<String> {
        let (program, package) = if self.is_puma() {
            ("puma", "Puma")
        } else {
            ("gunicorn", "gunicorn")
        };
        if process::program(program).is_none() {
            return Some(format!("{package} is not installed"));
        }
        let missing = wakeone_kernel::capability::missing();
        let steered = matches!(self, Kind::PumaRun | Kind::GunicornAttach);
        (steered && !missing.is_empty()).then(|| format!("it needs {}", missing.join(", ")))
    }

    fn command(self, scratch: &Scratch, address: SocketAddr) -> Result<Command, Error> {
        let workers = WORKERS.to_string();
        let mut command = match self {
            Kind::PumaShared => {
                let mut command = puma(address);
                command.args(["-w", &workers]);
                command
            }
            Kind::PumaHash => under_run(&["--policy", "hash", "--no-rescue"], address)?,
            Kind::PumaRun => under_run(&["--policy", "least-connections", "--rescue"], address)?,
            Kind::GunicornHash | Kind::GunicornAttach => {
                let mut command = Command::new("gunicorn");
                command
                    .args(["--reuse-port", "--workers", &workers, "--timeout", "60"])
                    .args(["--pythonpath", &scratch.path().display().to_string()])
                    .args(["--bind", &address.to_string(), "wsgi:app"]);
                command
            }
        };
        command.current_dir(scratch.path());
        Ok(command)
    }
}

/// A Puma of one thread a worker, without the configuration that may be around.
fn puma(address: SocketAddr) -> Command {
    let mut command = Command::new("puma");
    command
        .args(["-C", "-", "-e", "production", "-t", "1:1", "-b"])
        .arg(format!("tcp://{address}"))
        .arg("config.ru");
    command
}

/// Pumas on the sockets that `wakeone run` hands them.
fn under_run(how: &[&str], address: SocketAddr) -> Result<Command, Error> {
    let executable = crate::process::own_program()?;
    let mut command = Command::new(executable);
    command
        .args(["run", "-w", &WORKERS.to_string(), "-l"])
        .arg(address.to_string())
        .args(how)
        .arg("--");
    let puma = puma(address);
    command.arg(puma.get_program()).args(puma.get_args());
    Ok(command)
}

/// A running server, steered or not. Dropping it detaches, ends it and removes its files.
pub struct Running {
    kind: Kind,
    /// Where it listens.
    pub address: SocketAddr,
    /// Its books and its clients'.
    pub answers: Answers,
    count: Count,
    attached: Option<Attached>,
    server: Server,
    _scratch: Scratch,
}

impl Running {
    /// Starts it, and returns when both workers are there.
    ///
    /// # Errors
    /// When they are not in time, or it cannot be steered.
    pub fn start(kind: Kind) -> Result<Self, Error> {
        let (scratch, address) = (Scratch::new("pinned")?, free_address()?);
        scratch.write("config.ru", apps::RACK)?;
        scratch.write("wsgi.py", apps::WSGI)?;
        let count = Count::new(&scratch)?;
        let mut command = kind.command(&scratch, address)?;
        count.tell(&mut command);
        let mut server = Server::start(kind.name(), &mut command, "")?;
        match kind {
            Kind::PumaShared => {}
            Kind::PumaHash | Kind::PumaRun => server.wait_said("ready:", 1, PATIENCE)?,
            _ => server.wait_said("Booting worker", WORKERS, PATIENCE)?,
        }
        let deadline = Instant::now() + PATIENCE;
        while leaves(server.pid()).len() < WORKERS || probe::body(address, "/").is_err() {
            if Instant::now() > deadline {
                return Err(Error::Server(format!("{} does not answer", kind.name())));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let mut answers = Answers::new()?;
        answers.client_counted(count.made()?, 0);
        let attached = match kind {
            Kind::GunicornAttach => Some(Attached::to(address, true)?),
            _ => None,
        };
        Ok(Self {
            kind,
            address,
            answers,
            count,
            attached,
            server,
            _scratch: scratch,
        })
    }

    /// Detaches, stops it and closes the books; the counts go into the sample.
    ///
    /// # Errors
    /// When it does not end well, or the counts contradict each other.
    pub fn stop(mut self, sample: &mut Sample) -> Result<(), Error> {
        if let Some(attached) = self.attached.take() {
            attached.end()?;
        }
        let made = self.count.made()?;
        drop(self.server);
        self.answers.close_with(made, self.kind.name(), sample)
    }
}
