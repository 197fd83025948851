//! How a group is to be steered, and why it cannot be: checked before anything is done.

use std::net::SocketAddr;
use std::time::Duration;

use wakeone_control::paths::DATAGRAM_SUFFIX;
use wakeone_control::policy::{Affinity, Policy};
use wakeone_control::state::{self, MOST_SLOTS};
use wakeone_kernel::capability::{self, Capability};
use wakeone_steering::dispatcher;
use wakeone_supervisor::address::Address;
use wakeone_supervisor::{self, Options, group_name, opens_own};

/// How connections are to be steered. Settings that were left open may fall back to less; settings that were made may
/// not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SteeringConfig {
    /// How a worker is chosen; `None`: least-connections or the best that works here, and shortest-queue for datagrams
    /// that are not QUIC.
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

pub(super) fn check(options: &Options, config: &SteeringConfig) -> Result<(), Error> {
    check_datagrams(options, config)?;
    check_lookup(options, config)?;
    check_own(options)?;
    if let Some((slot, _)) = config
        .weights
        .iter()
        .find(|(slot, _)| *slot >= options.workers)
    {
        return Err(Error::Usage(format!(
            "--weight {slot}=… names no slot: {} workers have the slots 0 to {}",
            options.workers,
            options.workers.saturating_sub(1)
        )));
    }
    check_weights(&config.weights).map_err(|why| Error::Usage(format!("--weight {why}")))?;
    if config.stuck_after < Duration::from_millis(1) {
        return Err(Error::Usage(
            "--stuck-after takes 1ms or more: below that a worker that was just woken looks stuck"
                .into(),
        ));
    }
    Ok(())
}

/// Checks that each pair can be a slot and its weight; else says what is wrong, with the weight first.
///
/// # Errors
/// One sentence without its beginning.
pub fn check_weights(weights: &[(usize, u32)]) -> Result<(), String> {
    match weights
        .iter()
        .find(|(slot, weight)| *slot >= MOST_SLOTS || !(1..=65535).contains(weight))
    {
        None => Ok(()),
        Some((slot, weight)) if *slot >= MOST_SLOTS => Err(format!(
            "{slot}={weight} cannot be: slots are 0 to {}",
            MOST_SLOTS - 1
        )),
        Some((slot, weight)) => Err(format!("{slot}={weight} cannot be: a weight is 1 to 65535")),
    }
}

/// Refuses options that do not go with datagrams, or only with them.
fn check_datagrams(options: &Options, config: &SteeringConfig) -> Result<(), Error> {
    let protocols = Protocols::of(options);
    let usage = |why: String| Err(Error::Usage(why));
    if config.affinity.is_some() && !protocols.udp {
        return usage("--affinity is for datagrams, and no -l is a udp:// address".into());
    }
    if protocols.udp && !protocols.tcp {
        let affinity = config.affinity.unwrap_or_default();
        let fits = config.policy.map(|policy| policy.fits_datagrams(affinity));
        if let Some(Err(why)) = fits {
            return usage(format!("--policy {why}"));
        }
        if config.rescue == Some(true) {
            return usage(
                "--rescue cannot be for UDP alone: what waits in a UDP socket cannot be moved; a stuck worker gets nothing more without it".into(),
            );
        }
    }
    if protocols.udp
        && protocols.tcp
        && !state::is_name(&datagram_name(&group_name(options)?, protocols))
    {
        return usage(
            "the group's name is too long for one with TCP and UDP; give a --name".into(),
        );
    }
    Ok(())
}

/// Refuses options that do not go with listeners on private ports.
fn check_lookup(options: &Options, config: &SteeringConfig) -> Result<(), Error> {
    let usage = |why: &str| Err(Error::Usage(why.into()));
    if !options.lookup {
        return Ok(());
    }
    if !Protocols::of(options).tcp {
        return usage(
            "--lookup is for connections, and every -l is a udp:// address; leave it away",
        );
    }
    if config.metrics_tracing {
        return usage(
            "--lookup and --metrics-tracing cannot be together: the tracepoints' probes look at one port; leave one away",
        );
    }
    needs_program("--lookup", "leave --lookup away")
}

/// Refuses workers that open their own listeners where no program can have them share an address.
fn check_own(options: &Options) -> Result<(), Error> {
    if !opens_own(options) {
        return Ok(());
    }
    needs_program(
        "{port} in the command",
        "give the workers a listener by {fd}, if they take one",
    )
}

/// Refuses what takes a program where none may be loaded.
fn needs_program(what: &str, instead: &str) -> Result<(), Error> {
    let missing = capability::missing();
    if missing.is_empty() || capability::has_over_all(Capability::CAP_SYS_ADMIN) {
        return Ok(());
    }
    Err(Error::Refused(format!(
        "{what} needs {}: start as root or with these capabilities, or {instead}",
        missing.join(" and ")
    )))
}
