//! Checks of a group's options, before anything is done.

use std::time::Duration;

use wakeone_kernel::capability::{self, Capability};

use super::config::{Error, Protocols, SteeringConfig, datagram_name};
use wakeone_control::policy::Policy;
use wakeone_control::state;
use wakeone_control::state::MOST_SLOTS;
use wakeone_supervisor::{Options, group_name};

pub(super) fn check(options: &Options, config: &SteeringConfig) -> Result<(), Error> {
    check_datagrams(options, config)?;
    check_lookup(options, config)?;
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
        if let Some(Err(why)) = config.policy.map(Policy::fits_datagrams) {
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
    let missing = capability::missing();
    if !missing.is_empty() && !capability::has_over_all(Capability::CAP_SYS_ADMIN) {
        return Err(Error::Refused(format!(
            "--lookup needs {}: start as root or with these capabilities, or leave --lookup away",
            missing.join(" and ")
        )));
    }
    Ok(())
}
