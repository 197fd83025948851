//! How a group is to be steered, and why it cannot be.

use std::net::SocketAddr;
use std::time::Duration;

use wakeone_control::paths::DATAGRAM_SUFFIX;
use wakeone_control::policy::{Affinity, Policy};
use wakeone_steering::dispatcher;
use wakeone_supervisor::address::Address;
use wakeone_supervisor::{self, Options};

/// How connections are to be steered. Settings that were left open may fall back to less; settings that were made may
/// not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SteeringConfig {
    /// How a worker is chosen; `None`: least-connections or the best that works here, and shortest-queue for datagrams.
    /// In a group that also listens by TCP, a policy that goes by connections is for TCP, and datagrams use their own.
    pub policy: Option<Policy>,
    /// How datagrams of one flow are kept together; `None`: flow, as far as that works here.
    pub affinity: Option<Affinity>,
    /// Move the queues of stuck workers; `None`: if that works here.
    pub rescue: Option<bool>,
    /// How long a worker may leave connections waiting while another is idle.
    pub stuck_after: Duration,
    /// Weights of slots whose weight is not 1.
    pub weights: Vec<(usize, u32)>,
    /// The address to serve metrics on.
    pub metrics: Option<SocketAddr>,
    /// Whether they include those of the kernel's tracepoints.
    pub metrics_tracing: bool,
}

impl Default for SteeringConfig {
    fn default() -> Self {
        Self {
            policy: None,
            affinity: None,
            rescue: None,
            stuck_after: Duration::from_millis(5),
            weights: Vec::new(),
            metrics: None,
            metrics_tracing: false,
        }
    }
}

/// Why a group could not be started, or had to stop.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The supervisor's reason.
    #[error(transparent)]
    Supervisor(#[from] wakeone_supervisor::Error),
    /// The steering that was asked for is not possible.
    #[error(transparent)]
    Steering(#[from] dispatcher::Error),
    /// We refuse the steering that was asked for, for a reason of our own.
    #[error("{0}")]
    Refused(String),
    /// The settings are wrong, or do not go together.
    #[error("{0}")]
    Usage(String),
}

impl Error {
    /// Whether the arguments were wrong (exit code 2), not the world (1).
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Supervisor(error) => error.is_usage(),
            Self::Usage(_) => true,
            Self::Steering(_) | Self::Refused(_) => false,
        }
    }
}

/// The protocols that a group listens by.
#[derive(Debug, Clone, Copy)]
pub(super) struct Protocols {
    pub tcp: bool,
    pub udp: bool,
}

impl Protocols {
    pub fn of(options: &Options) -> Self {
        let mut addresses = options.listen.iter();
        Self {
            tcp: addresses.clone().any(|address| !address.is_udp()),
            udp: addresses.any(Address::is_udp),
        }
    }
}

/// Returns the name of the group of UDP sockets. If there are listeners too, those have the plain name.
pub(super) fn datagram_name(name: &str, protocols: Protocols) -> String {
    if protocols.tcp {
        format!("{name}{DATAGRAM_SUFFIX}")
    } else {
        name.to_owned()
    }
}
