//! `wakeone run -- CMD`: a server is started as it is, and whatever it opens is steered the way that fits.
//!
//! It is attached to as any other server that runs already. Its listeners decide the way: one queue that its workers
//! share, a queue for each, or none. Its processes are our descendants, so that neither root nor CAP_SYS_PTRACE is
//! needed where Yama lets only a parent look.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use wakeone_observe::Target;
use wakeone_supervisor::server::{Server, Signals};

use crate::attach::{AttachConfig, AttachManager, Event, Wanted};
use crate::metrics::{self, Monitor};
use wakeone_control::paths::Paths;
use wakeone_control::repair::repair_all;

/// A server, and how it is to be steered.
#[derive(Debug, Clone)]
pub struct Options {
    /// The server, and its arguments.
    pub command: Vec<String>,
    /// How to steer what it opens.
    pub config: AttachConfig,
    /// How long processes that outlive its first one may take to end.
    pub grace: Duration,
    /// Where groups keep their state.
    pub runtime_dir: PathBuf,
    /// The address to serve metrics on.
    pub metrics: Option<SocketAddr>,
    /// Whether they include those of the kernel's tracepoints.
    pub metrics_tracing: bool,
}

/// Why a server is not started, or cannot be waited for.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command cannot be started.
    #[error("cannot start `{command}`: {source}")]
    Start {
        /// The program.
        command: String,
        /// Why.
        source: io::Error,
    },
    /// Something of our own failed.
    #[error("cannot steer the server: {what}: {source}")]
    Own {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// Metrics cannot be served there.
    #[error("{0}")]
    Metrics(String),
}

/// How often to look for listeners that the server opened or closed.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How often to follow what is steered.
const FOLLOW_EVERY: Duration = Duration::from_millis(50);

/// Starts a server, steers it, and returns its exit code when it is over. `log` gets whatever is worth a line.
///
/// # Errors
/// See [`Error`]. A failure to steer is none: the server runs on as it is.
pub fn run(options: &Options, log: &mut dyn FnMut(&Event)) -> Result<u8, Error> {
    let own = |what| move |source| Error::Own { what, source };
    let paths = Paths::of(&options.runtime_dir);
    repair_all(&paths);
    let http = options.metrics.map(metrics::bind).transpose();
    let http = http.map_err(Error::Metrics)?;
    let signals = Signals::take().map_err(own("taking signals"))?;
    let command = options.command.first().cloned().unwrap_or_default();
    let mut server =
        Server::start(&options.command, &[]).map_err(|source| Error::Start { command, source })?;
    let mut manager = AttachManager::new(paths).of_command(&options.command);
    match Monitor::start(http) {
        Ok(monitor) => manager.serve(monitor, options.metrics_tracing),
        Err(error) => tracing::warn!("no figures are served: {error}"),
    }
    manager.want(vec![Wanted {
        // Daemons become our children, so the server is always below us.
        target: Target::Pid(std::process::id()),
        config: options.config.clone(),
        owners: Vec::new(),
    }]);
    let code = serve(&mut server, &mut manager, &signals, options.grace, log);
    manager.end();
    code.map_err(own("waiting for it"))
}

fn serve(
    server: &mut Server,
    manager: &mut AttachManager,
    signals: &Signals,
    grace: Duration,
    log: &mut dyn FnMut(&Event),
) -> io::Result<u8> {
    let mut looked = Instant::now();
    loop {
        manager.wait(FOLLOW_EVERY, Some(signals.as_fd()));
        for signal in signals.pending() {
            server.signal(signal);
        }
        manager.follow().iter().for_each(&mut *log);
        if looked.elapsed() >= LOOK_EVERY {
            manager.attach().iter().for_each(&mut *log);
            looked = Instant::now();
        }
        if let Some(code) = server.reap(grace)? {
            return Ok(code);
        }
    }
}
