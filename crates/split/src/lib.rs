//! `wakeone run --split`: a queue of its own for each thread or process of a server that receives from one UDP socket,
//! where the server knows nothing of Wakeone. Its TCP listeners are steered as by `wakeone run -- CMD`.
//!
//! The server is started as it is, with a preloaded library (`crates/shim`). When one of its threads or processes
//! first receives from a UDP socket that others receive from too, the library asks the broker here, over a UNIX
//! socket. The broker makes a second socket beside the shared one, in the same reuseport group. A process has it in
//! the shared one's place: under the same number, in that process only. A thread has it beside the shared one.

mod broker;
mod check;
mod config;
mod datagrams;
mod known;
mod left;
mod library;
mod program;
mod queue_group;
mod readers;
mod reason;
mod splitter;
#[cfg(test)]
mod tests;
mod worker;

use std::ffi::OsString;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use wakeone::attach::Event;
use wakeone::metrics::Monitor;
use wakeone::started::{self, Beside};
use wakeone_control::policy::Policy;
use wakeone_control::privileges;
use wakeone_kernel::capability;
use wakeone_supervisor::raise_descriptor_limit;

use self::broker::Broker;
use self::check::{LONGEST_CHECK, tell};
pub use self::config::Options;
use self::library::Library;
pub use self::library::sweep;
use self::readers::QueueGrant;
use self::splitter::Splitter;

/// How often to check the state of sockets and processes.
const FOLLOW_EVERY: Duration = Duration::from_millis(50);
/// The same while datagrams wait in an orphaned queue.
const DRAIN_EVERY: Duration = Duration::from_millis(2);

/// Why a server is not started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It cannot be started, or not be waited for.
    #[error(transparent)]
    Started(#[from] started::Error),
    /// There is no place for the library.
    #[error(
        "cannot write the library for the server's processes: {0}; it takes a folder that only root and you can write, as all above it, and that is not mounted noexec: of root /run or /var/lib/wakeone, else $XDG_RUNTIME_DIR, /run/user/UID, $XDG_CACHE_HOME or ~/.cache, or $TMPDIR"
    )]
    Library(io::Error),
    /// There is no socket for the broker.
    #[error("cannot split: opening the broker's socket: {0}")]
    Broker(io::Error),
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

/// Starts a server with its UDP sockets split, and returns its exit code when it is over. `log` gets what is worth a line
/// about its TCP listeners.
///
/// # Errors
/// See [`Error`]. A later failure leaves the server's processes with the socket that they share.
pub fn run(options: &Options, log: &mut dyn FnMut(&Event)) -> Result<u8, Error> {
    let missing = missing(options.policy)?;
    let command = options.command.first().cloned().unwrap_or_default();
    if let Some(obstacle) = program::obstacle(&command) {
        if options.check {
            tell(&format!("cannot split: {obstacle}"));
            return Ok(1);
        }
        tracing::warn!(event = "unsplit", "no UDP socket is split: {obstacle}");
    }
    let mut beside = Splitting {
        library: Library::write().map_err(Error::Library)?,
        broker: Broker::open().map_err(Error::Broker)?,
        splitter: Splitter::new(options, missing),
        followed: Instant::now(),
    };
    let server = started::Options {
        command: options.command.clone(),
        config: (!options.check).then(|| options.listeners.clone()),
        grace: options.grace,
        runtime_dir: options.runtime_dir.clone(),
        metrics: options.metrics,
        metrics_tracing: options.metrics_tracing,
    };
    let code = started::run_beside(&server, &mut beside, log);
    let splitter = beside.splitter;
    match &code {
        Ok(_) if splitter.check => splitter.report(),
        Ok(code) => splitter.tell_end(*code),
        Err(_) => {}
    }
    splitter.end();
    Ok(code?)
}

/// The privileges that steering by this policy needs and that we do not have.
fn missing(policy: Option<Policy>) -> Result<Option<String>, Error> {
    let missing = capability::missing();
    if missing.is_empty() {
        return Ok(None);
    }
    let missing = missing.join(" and ");
    match policy {
        None | Some(Policy::Hash) => Ok(Some(missing)),
        Some(policy) => Err(Error::NotAllowed { policy, missing }),
    }
}

/// The broker and its library, while the server runs.
struct Splitting {
    library: Library,
    broker: Broker<QueueGrant>,
    splitter: Splitter,
    followed: Instant,
}

impl Beside for Splitting {
    fn variables(&self) -> Vec<(&'static str, OsString)> {
        vec![
            ("LD_PRELOAD", with_ours(&self.library.path())),
            (wakeone_shim::VARIABLE, self.broker.variable().into()),
        ]
    }

    fn begin(&mut self, monitor: Option<&Arc<Monitor>>) {
        // Each group takes a few, and each conversation two. The server keeps the limit that it was started with.
        raise_descriptor_limit();
        privileges::keep_for_splitting();
        self.splitter.monitor = monitor.cloned();
        if self.splitter.check {
            tracing::info!(
                event = "check",
                "the server was started; waiting at most {} s for its workers",
                LONGEST_CHECK.as_secs()
            );
        }
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.broker.descriptors().collect()
    }

    fn attend(&mut self) -> Duration {
        self.broker.attend(&mut self.splitter);
        if self.followed.elapsed() >= FOLLOW_EVERY {
            self.splitter.follow();
            self.followed = Instant::now();
        }
        if self.splitter.drain_step() {
            DRAIN_EVERY
        } else if self.splitter.is_idle() {
            Duration::MAX
        } else {
            FOLLOW_EVERY.saturating_sub(self.followed.elapsed())
        }
    }

    fn has_datagrams(&self) -> bool {
        true
    }

    fn is_over(&mut self) -> bool {
        self.splitter.check_is_over()
    }
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
