//! `wakeone run -- CMD`: a server is started as it is, and whatever it opens is steered the way that fits.
//!
//! It is attached to as any other server that runs already. Its listeners decide the way: one queue that its workers
//! share, a queue for each, or none. Its processes are our descendants, so that neither root nor CAP_SYS_PTRACE is
//! needed where Yama lets only a parent look.

use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use wakeone_kernel::capability;
use wakeone_model::layout::counted;
use wakeone_model::listener::Protocol;
use wakeone_observe::{Found, Target, find};
use wakeone_supervisor::notify::{self, Watchdog};
use wakeone_supervisor::server::{Server, Signals};

use crate::attach::{
    AttachConfig, AttachManager, Event, Owners, Servers, Wanted, below_us, examine,
};
use crate::metrics::{self, Monitor};
use wakeone_control::paths::Paths;
use wakeone_control::repair::repair_all;

/// A server, and how it is to be steered.
#[derive(Debug, Clone)]
pub struct Options {
    /// The server, and its arguments.
    pub command: Vec<String>,
    /// How to steer what it opens; `None`: leave that as it is.
    pub config: Option<AttachConfig>,
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
    #[error("cannot start the server: {0}")]
    Start(String),
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

/// A server that opens no listener is reported to the service manager as ready after this time.
const LISTENS_NOWHERE: Duration = Duration::from_secs(10);

/// Work that is done beside the steering, in the same loop. `()` does nothing.
pub trait Beside {
    /// Variables that the server's environment gets.
    fn variables(&self) -> Vec<(&'static str, OsString)> {
        Vec::new()
    }

    /// The server was started, and nothing of it is steered yet. `monitor` serves metrics, if they can be served.
    fn begin(&mut self, _monitor: Option<&Arc<Monitor>>) {}

    /// The descriptors on which somebody may ask.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    /// Does what is due. Returns how long it can be left alone if nobody asks.
    fn attend(&mut self) -> Duration {
        Duration::MAX
    }

    /// Whether it looks after the server's UDP sockets, so that those are not steered here.
    fn has_datagrams(&self) -> bool {
        false
    }

    /// Whether the server is to be ended now. Returns true only once.
    fn is_over(&mut self) -> bool {
        false
    }
}

impl Beside for () {}

/// Starts a server, steers it, and returns its exit code when it is over. `log` gets whatever is worth a line.
///
/// # Errors
/// See [`Error`]. A failure to steer is none: the server runs on as it is.
pub fn run(options: &Options, log: &mut dyn FnMut(&Event)) -> Result<u8, Error> {
    run_beside(options, &mut (), log)
}

/// The same, with other work beside it.
///
/// # Errors
/// See [`run`].
pub fn run_beside(
    options: &Options,
    beside: &mut impl Beside,
    log: &mut dyn FnMut(&Event),
) -> Result<u8, Error> {
    let own = |what| move |source| Error::Own { what, source };
    let paths = Paths::of(&options.runtime_dir);
    repair_all(&paths);
    let http = options.metrics.map(metrics::bind).transpose();
    let http = http.map_err(Error::Metrics)?;
    let signals = Signals::take().map_err(own("taking signals"))?;
    let server = Server::start(&options.command, &beside.variables(), &signals);
    let mut server = server.map_err(Error::Start)?;
    let monitor = Monitor::start(http).map(Arc::new).inspect_err(|error| {
        // The server runs already: it works as well without metrics.
        tracing::warn!("no figures are served: {error}");
    });
    let monitor = monitor.ok();
    beside.begin(monitor.as_ref());
    let mut manager = AttachManager::new(paths).of_command(&options.command);
    if let Some(monitor) = monitor {
        manager.serve(monitor, options.metrics_tracing);
    }
    let targets = match beside.has_datagrams() {
        true => listeners(),
        false => vec![server_of_ours()],
    };
    let wanted = options.config.iter().flat_map(|config| {
        let wanted = |target: &Target| Wanted {
            target: target.clone(),
            config: config.clone(),
            owners: Owners::default(),
            servers: Servers::default(),
        };
        targets.iter().map(wanted)
    });
    manager.want(wanted.collect());
    let code = serve(
        &mut server,
        &mut manager,
        beside,
        &signals,
        options.grace,
        log,
    );
    manager.end();
    code.map_err(own("waiting for it"))
}

/// Daemons become our children, so the server is always below us.
fn server_of_ours() -> Target {
    Target::Pid(std::process::id())
}

/// Whether it has opened any listener yet.
fn listens() -> bool {
    !below_us(find(&server_of_ours()).unwrap_or_default()).is_empty()
}

/// Its listeners, without its UDP sockets.
fn listeners() -> Vec<Target> {
    let of = |protocol| Target::By(protocol, Box::new(server_of_ours()));
    [Protocol::Tcp, Protocol::Unix].map(of).into()
}

/// How each listener that the server has opened would be steered, a sentence each.
///
/// An error is the reason why it would be left as it is, as things are now: its workers may not wait yet.
pub fn ways() -> Vec<Result<String, String>> {
    let found = listeners()
        .into_iter()
        .flat_map(|target| find(&target).unwrap_or_default());
    below_us(found.collect()).iter().map(way).collect()
}

fn way(found: &Found) -> Result<String, String> {
    let candidate = examine(found).map_err(|error| error.to_string())?;
    let address = candidate.address();
    let missing = capability::missing();
    Ok(match &candidate.sharing {
        Some(sharing) => format!(
            "{address} would be steered: {} share one queue, and the right one is woken",
            counted(sharing.workers.len() as u64, "workers")
        ),
        None if missing.is_empty() => format!(
            "{address} would be steered: a program would choose among {}",
            counted(candidate.members.len() as u64, "sockets")
        ),
        None => format!(
            "{address} would be left as it is: it has a socket for each worker, and a program that chooses needs {}",
            missing.join(" and ")
        ),
    })
}

fn serve(
    server: &mut Server,
    manager: &mut AttachManager,
    beside: &mut impl Beside,
    signals: &Signals,
    grace: Duration,
    log: &mut dyn FnMut(&Event),
) -> io::Result<u8> {
    let (started, mut is_ready) = (Instant::now(), false);
    let mut watchdog = Watchdog::from_env();
    let (mut looked, mut followed) = (Instant::now(), Instant::now());
    loop {
        watchdog.feed();
        let patience = beside.attend();
        let pause = manager.pause(FOLLOW_EVERY);
        let left = pause.saturating_sub(followed.elapsed()).min(patience);
        let asked = beside.descriptors().into_iter().chain([signals.as_fd()]);
        let noticed = manager.wait(left, asked);
        for signal in signals.pending() {
            server.signal(signal);
        }
        if noticed || followed.elapsed() >= pause {
            manager.follow().iter().for_each(&mut *log);
            followed = Instant::now();
        }
        if looked.elapsed() >= LOOK_EVERY {
            manager.attach().iter().for_each(&mut *log);
            if !is_ready && (listens() || started.elapsed() >= LISTENS_NOWHERE) {
                notify::ready();
                is_ready = true;
            }
            looked = Instant::now();
        }
        if let Some(code) = server.reap(grace)? {
            return Ok(code);
        }
        if beside.is_over() {
            server.signal(rustix::process::Signal::TERM);
        }
    }
}
