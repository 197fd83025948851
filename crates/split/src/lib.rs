//! `wakeone run --split`: a queue of its own for each worker of a server that shares one listening socket among them,
//! and knows nothing of Wakeone.
//!
//! The server is started as it is, with a preloaded library (`crates/shim`). When one of its processes first waits
//! for connections on a listener, the library asks the broker here, over a UNIX socket. The broker makes a second
//! socket beside the shared one, in the same reuseport group. The library puts it in the listener's place: under the
//! same number, in that process only. So each queue is held by its worker alone, and closes with it; the kernel then
//! moves its connections. The shared socket stays with the server's first process. Nobody accepts from it, and the
//! program does not choose it while another socket is available.

mod broker;
mod check;
mod config;
mod known;
mod library;
mod program;
mod queue_group;
mod reason;
mod splitter;
mod tcp;
#[cfg(test)]
mod tests;
mod udp;
mod unsplit;
mod worker;

use std::ffi::OsString;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wakeone_kernel::capability;

use self::broker::Broker;
use self::check::{LONGEST_CHECK, tell};
pub use self::config::Options;
use self::config::Steering;
use self::library::Library;
pub use self::library::sweep;
use self::splitter::{Granted, Splitter};
use wakeone::metrics::{self, Monitor};
use wakeone_control::paths::Paths;
use wakeone_control::policy::Policy;
use wakeone_control::privileges;
use wakeone_control::repair::repair_all;
use wakeone_supervisor::raise_descriptor_limit;
use wakeone_supervisor::server::{Server, Signals};

/// How often to check the state of sockets and processes.
const FOLLOW_EVERY: Duration = Duration::from_millis(50);
/// The same while datagrams wait in an orphaned queue.
const DRAIN_EVERY: Duration = Duration::from_millis(2);

/// Why a server is not started.
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
    /// There is no place for the library.
    #[error(
        "cannot write the library for the server's processes: {0}; it takes a folder that only root and you can write, as all above it, and that is not mounted noexec: of root /run or /var/lib/wakeone, else $XDG_RUNTIME_DIR, /run/user/UID, $XDG_CACHE_HOME or ~/.cache, or $TMPDIR"
    )]
    Library(io::Error),
    /// Something of our own failed.
    #[error("cannot split: {what}: {source}")]
    Own {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// Metrics cannot be served there.
    #[error("{0}")]
    Metrics(String),
    /// The chosen policy takes privileges that we do not have.
    #[error(
        "cannot steer by {policy}: it needs {missing}: start as root or with these capabilities, or leave --policy away"
    )]
    NotAllowed {
        /// The chosen policy.
        policy: Policy,
        /// The missing privileges.
        missing: String,
    },
}

/// Starts a server with its listeners split, and returns its exit code when it is over.
///
/// # Errors
/// See [`Error`]. A later failure leaves the server's processes with the listener that they share.
pub fn run(options: &Options) -> Result<u8, Error> {
    let own = |what| move |source| Error::Own { what, source };
    let steering = steering(options)?;
    let command = options.command.first().cloned().unwrap_or_default();
    if let Some(obstacle) = program::obstacle(&command) {
        if options.check {
            tell(&format!("cannot split: {obstacle}"));
            return Ok(1);
        }
        tracing::warn!(event = "unsplit", "nothing is split: {obstacle}");
    }
    repair_all(&Paths::of(&options.runtime_dir));
    let http = options.metrics.map(metrics::bind).transpose();
    let http = http.map_err(Error::Metrics)?;
    let signals = Signals::take().map_err(own("taking signals"))?;
    let library = Library::write().map_err(Error::Library)?;
    let mut broker = Broker::open().map_err(own("opening the broker's socket"))?;
    let variables = [
        ("LD_PRELOAD", with_ours(&library.path())),
        (wakeone_shim::VARIABLE, broker.variable().into()),
    ];
    let mut server = Server::start(&options.command, &variables)
        .map_err(|source| Error::Start { command, source })?;
    // Each group takes a few, and each conversation two. The server keeps the limit that it was started with.
    raise_descriptor_limit();
    privileges::keep_for_splitting();
    let mut splitter = Splitter::new(options, steering, server.pid());
    // The server runs already: it works as well without metrics.
    match Monitor::start(http) {
        Ok(monitor) => splitter.monitor = Some(monitor),
        Err(error) => tracing::warn!("no figures are served: {error}"),
    }
    if options.check {
        tracing::info!(
            event = "check",
            "the server was started; waiting at most {} s for it to listen, and for its workers to wait for connections",
            LONGEST_CHECK.as_secs()
        );
    }
    let code = serve(
        &mut broker,
        &mut splitter,
        &mut server,
        &signals,
        options.grace,
    );
    if splitter.check {
        splitter.report();
    } else {
        splitter.tell_end(code.as_ref().ok());
    }
    splitter.end();
    drop(library);
    code.map_err(own("waiting for the server"))
}

/// The steering that our privileges allow.
fn steering(options: &Options) -> Result<Steering, Error> {
    let missing = capability::missing();
    match (options.policy, missing.is_empty()) {
        (policy, true) => Ok(Steering::Full(policy.unwrap_or_default())),
        (None | Some(Policy::Hash), false) => {
            tracing::warn!(
                event = "degraded",
                "each worker gets a queue of its own, but nothing steers: that needs {}; the kernel's hash chooses, and the queue of a stuck worker waits for it",
                missing.join(" and ")
            );
            Ok(Steering::None)
        }
        (Some(policy), false) => Err(Error::NotAllowed {
            policy,
            missing: missing.join(" and "),
        }),
    }
}

/// Runs until the server has ended: see [`Server::reap`].
fn serve(
    broker: &mut Broker<Granted>,
    splitter: &mut Splitter,
    server: &mut Server,
    signals: &Signals,
    grace: Duration,
) -> io::Result<u8> {
    let mut followed = Instant::now();
    loop {
        let mut left = FOLLOW_EVERY.saturating_sub(followed.elapsed());
        if splitter.drain_step() {
            left = left.min(DRAIN_EVERY);
        }
        wait(broker, signals, left);
        for signal in signals.pending() {
            server.signal(signal);
        }
        broker.attend(splitter);
        if followed.elapsed() >= FOLLOW_EVERY {
            splitter.follow();
            followed = Instant::now();
        }
        if let Some(code) = server.reap(grace)? {
            return Ok(code);
        }
        if splitter.check_is_over() {
            server.signal(rustix::process::Signal::TERM);
        }
    }
}

fn wait(broker: &Broker<Granted>, signals: &Signals, at_most: Duration) {
    let mut wanted: Vec<PollFd<'_>> = broker
        .descriptors()
        .chain([signals.as_fd()])
        .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
        .collect();
    let limit = Timespec {
        tv_sec: 0,
        tv_nsec: at_most.subsec_nanos().into(),
    };
    let _ = poll(&mut wanted, Some(&limit));
}

/// The value of LD_PRELOAD: our library, and those that are named there already.
fn with_ours(library: &Path) -> OsString {
    let mut all = OsString::from(library);
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        all.push(":");
        all.push(others);
    }
    all
}
