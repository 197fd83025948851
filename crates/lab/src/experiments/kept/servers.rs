//! Servers of others whose event loops share one listener, as they are and split.

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::answers::Answers;
use crate::apps::{self, Count};
use crate::experiment::Sample;
use crate::experiments::split::servers::Way;
use crate::process::{self, leaves};
use crate::scratch::Scratch;
use crate::server::{Server, free_address};
use crate::{Error, probe, steered};

/// Workers of each.
pub const WORKERS: usize = 4;
const PATIENCE: Duration = Duration::from_secs(20);
/// How long the workers are left alone once one answers: the others come to wait, and each is given its queue.
const SETTLES: Duration = Duration::from_secs(1);

/// A server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// uvicorn with `--workers`.
    Uvicorn,
    /// gunicorn with uvicorn's worker class.
    GunicornUvicorn,
    /// gunicorn with its threaded workers.
    GunicornThreads,
    /// node's cluster, in which the workers accept (`SCHED_NONE`).
    Node,
}

/// All of them.
pub const ALL: [Kind; 4] = [
    Kind::Uvicorn,
    Kind::GunicornUvicorn,
    Kind::GunicornThreads,
    Kind::Node,
];

/// As it is, and split.
pub const WAYS: [Way; 2] = [Way::Shared, Way::Split];

impl Kind {
    /// First part of the variants' names.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Uvicorn => "uvicorn",
            Kind::GunicornUvicorn => "gunicorn-uvicorn",
            Kind::GunicornThreads => "gunicorn-gthread",
            Kind::Node => "node-cluster",
        }
    }

    /// How a user starts it.
    pub fn command(self) -> &'static str {
        match self {
            Kind::Uvicorn => "uvicorn --workers 4",
            Kind::GunicornUvicorn => "gunicorn -w 4 -k uvicorn.workers.UvicornWorker",
            Kind::GunicornThreads => "gunicorn -w 4 -k gthread --threads 2",
            Kind::Node => "node cluster, SCHED_NONE",
        }
    }

    /// The programs that it needs.
    fn programs(self) -> &'static [&'static str] {
        match self {
            Kind::Uvicorn => &["uvicorn"],
            Kind::GunicornUvicorn => &["gunicorn", "uvicorn"],
            Kind::GunicornThreads => &["gunicorn"],
            Kind::Node => &["node"],
        }
    }

    /// Why it cannot be measured here in this way.
    pub fn lacks(self, way: Way) -> Option<String> {
        let missing = self
            .programs()
            .iter()
            .find(|name| process::program(name).is_none());
        let missing = missing.map(|name| format!("{name} is not installed"));
        missing.or_else(|| (way == Way::Split).then(steered::lacks).flatten())
    }

    /// Processes without children, once all are there: the workers, and what Python starts beside them to clean up.
    fn processes(self) -> usize {
        WORKERS + usize::from(self == Kind::Uvicorn)
    }

    fn build(self, scratch: &Scratch, address: SocketAddr) -> Result<Command, Error> {
        let (host, port) = (address.ip().to_string(), address.port().to_string());
        let workers = WORKERS.to_string();
        let backlog = crate::ways::BACKLOG;
        let mut command = match self {
            Kind::Node => {
                let mut command = Command::new("node");
                command.arg(scratch.write("cluster.js", apps::CLUSTER)?);
                command.args([&port, &workers]);
                command
            }
            Kind::Uvicorn => {
                scratch.write("asgi.py", apps::ASGI)?;
                let mut command = Command::new("uvicorn");
                command.args(["--workers", &workers, "--host", &host, "--port", &port]);
                command.args(["--backlog", backlog, "--timeout-keep-alive", "75"]);
                command.args(["--lifespan", "off", "--no-access-log", "asgi:app"]);
                command
            }
            Kind::GunicornUvicorn | Kind::GunicornThreads => {
                let (class, app): (&[&str], _) = if self == Kind::GunicornUvicorn {
                    scratch.write("asgi.py", apps::ASGI)?;
                    (&["-k", "uvicorn.workers.UvicornWorker"], "asgi:app")
                } else {
                    scratch.write("wsgi.py", apps::WSGI)?;
                    (&["-k", "gthread", "--threads", "2"], "wsgi:app")
                };
                let mut command = Command::new("gunicorn");
                command.args(class);
                command.args(["--workers", &workers, "--backlog", backlog]);
                command.args(["--keep-alive", "75", "--bind", &address.to_string(), app]);
                command
            }
        };
        command.current_dir(scratch.path());
        Ok(command)
    }
}

/// A running server. Dropping it ends it and removes its files.
pub struct Running {
    what: String,
    /// Where it listens.
    pub address: SocketAddr,
    /// Its books and its clients'.
    pub answers: Answers,
    count: Count,
    server: Server,
    _scratch: Scratch,
}

impl Running {
    /// Starts it, and returns when it answers and all its workers are there.
    ///
    /// # Errors
    /// When it does not become ready.
    pub fn start(kind: Kind, way: Way) -> Result<Self, Error> {
        let (scratch, address) = (Scratch::new("kept")?, free_address()?);
        let count = Count::new(&scratch)?;
        let mut command = kind.build(&scratch, address)?;
        count.tell(&mut command);
        let server = Server::start(kind.name(), &mut way.wrap(command)?, "")?;
        let what = format!("{}/{}", kind.name(), way.name());
        await_workers(&server, &what, kind.processes(), address)?;
        let mut answers = Answers::new()?;
        answers.client_counted(count.made()?, 0);
        Ok(Self {
            what,
            address,
            answers,
            count,
            server,
            _scratch: scratch,
        })
    }

    /// Stops it and closes the books; the counts go into the sample.
    ///
    /// # Errors
    /// When the counts contradict each other.
    pub fn stop(self, sample: &mut Sample) -> Result<(), Error> {
        let made = self.count.made()?;
        drop(self.server);
        self.answers.close_with(made, &self.what, sample)
    }
}

fn await_workers(
    server: &Server,
    what: &str,
    processes: usize,
    address: SocketAddr,
) -> Result<(), Error> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if leaves(server.pid()).len() >= processes && probe::body(address, "/work?us=0").is_ok() {
            std::thread::sleep(SETTLES);
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(Error::Server(format!("{what} does not answer")));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
