//! The settings of `run --split`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use wakeone::attach::AttachConfig;
use wakeone_control::paths::Paths;
use wakeone_control::policy::{Affinity, Policy};
use wakeone_steering::agent::Rounds;

/// The options of `run --split`.
#[derive(Debug, Clone)]
pub struct Options {
    /// The server.
    pub command: Vec<String>,
    /// How a worker is chosen; `None`: the best policy that our privileges allow.
    pub policy: Option<Policy>,
    /// Keeps datagrams of one flow together, or not. `None`: unless one flow is too much for a reader.
    pub affinity: Option<Affinity>,
    /// How long datagrams may wait without one being received.
    pub stuck_after: Duration,
    /// How what the server opens by TCP is steered.
    pub listeners: AttachConfig,
    /// How long processes may take to end after the server's first one has.
    pub grace: Duration,
    /// Where groups keep their state.
    pub runtime_dir: PathBuf,
    /// Change nothing, print what would be done, and end the server.
    pub check: bool,
    /// Where to serve metrics.
    pub metrics: Option<SocketAddr>,
    /// Include waits and wake-ups in the metrics.
    pub metrics_tracing: bool,
}

/// The options with which groups are made.
#[derive(Debug, Clone)]
pub struct SplitConfig {
    /// Where groups have their folders and pins.
    pub paths: Paths,
    /// How long datagrams may wait without one being received.
    pub stuck_after: Duration,
    /// The policy that chooses among UDP queues.
    pub datagrams: Policy,
    /// Keeps datagrams of one flow together, or not. `None`: unless one flow is too much for a reader.
    pub affinity: Option<Affinity>,
    /// Look at all groups.
    pub rounds: Rounds,
}

impl SplitConfig {
    /// The part of the options that groups are made with.
    pub fn of(options: &Options) -> Self {
        let affinity = options.affinity.unwrap_or_default();
        let fits = |policy: &Policy| policy.fits_datagrams(affinity).is_ok();
        Self {
            paths: Paths::of(&options.runtime_dir),
            stuck_after: options.stuck_after,
            datagrams: options
                .policy
                .filter(fits)
                .unwrap_or(Policy::for_datagrams(affinity)),
            affinity: options.affinity,
            rounds: Rounds::new(),
        }
    }
}
