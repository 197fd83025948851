//! The ways of handing out connections, by name.

use anyhow::bail;
use wakeone_control::policy::Policy;
use wakeone_model::arming::ArmingConfig;
use wakeone_sim::{Dispatch, Variant, Wake};

use super::Args;
use super::arguments::{Shared, Tie};

/// A way of handing out connections, by name.
#[derive(Debug, Clone)]
pub struct Named {
    pub name: String,
    pub way: Dispatch,
}

/// Returns the ways to compare: those of one queue, then the policies of a queue each.
pub fn ways(args: &Args) -> anyhow::Result<Vec<Named>> {
    let mut ways: Vec<Named> = args.shared.iter().map(|one| shared(args, *one)).collect();
    let variant = variant(args)?;
    for policy in policies(args)? {
        let steered = |stuck_after_s| Dispatch::Steered {
            policy: policy.number(),
            variant,
            stuck_after_s,
        };
        ways.push(Named {
            name: policy.to_string(),
            way: steered(None),
        });
        // A connection that was accepted stays where it is.
        if args.keep_alive.is_none() {
            ways.push(Named {
                name: format!("{policy}+rescue"),
                way: steered(Some(args.stuck_after.as_secs_f64())),
            });
        }
    }
    Ok(ways)
}

fn shared(args: &Args, way: Shared) -> Named {
    let armed = |exclusive| {
        let mut config = ArmingConfig::default();
        config.look_every = args.look_every.unwrap_or(config.look_every);
        Dispatch::Armed { exclusive, config }
    };
    let (name, way) = match way {
        Shared::Accept => ("shared-accept", Dispatch::Shared(Wake::LongestAsleep)),
        Shared::Exclusive => (
            "shared-epoll-exclusive",
            Dispatch::Shared(Wake::FirstRegistered),
        ),
        Shared::WakeAll => ("shared-epoll-wake-all", Dispatch::Shared(Wake::All)),
        Shared::SteeredExclusive => ("steered-exclusive", armed(true)),
        Shared::SteeredWakeAll => ("steered-wake-all", armed(false)),
    };
    Named {
        name: name.into(),
        way,
    }
}

fn policies(args: &Args) -> anyhow::Result<Vec<Policy>> {
    let asked: Vec<&str> = args.policy.iter().map(String::as_str).collect();
    let policies: Vec<Policy> = match asked.as_slice() {
        [] => vec![Policy::Hash, Policy::TwoChoices, Policy::LeastConnections],
        // The simulation does not model which CPU gets a packet.
        ["all"] => Policy::ALL
            .into_iter()
            .filter(|one| *one != Policy::Cpu)
            .collect(),
        some => some
            .iter()
            .map(|name| name.parse::<Policy>())
            .collect::<Result<_, _>>()
            .map_err(anyhow::Error::msg)?,
    };
    if asked.len() > 1 && asked.contains(&"all") || policies.contains(&Policy::Cpu) {
        bail!("`all` stands alone, and `cpu` cannot be simulated: it depends on the network card");
    }
    Ok(policies)
}

fn variant(args: &Args) -> anyhow::Result<Variant> {
    Ok(match (args.tie, args.window) {
        (Tie::Freshest, 32) => Variant::Kernel,
        (Tie::Chance, 32) => Variant::Chance,
        (Tie::Freshest, 16) => Variant::Window16,
        (Tie::Freshest, 8) => Variant::Window8,
        (Tie::Freshest, 4) => Variant::Window4,
        (_, window) => bail!(
            "--window {window} cannot be simulated: give 4, 8, 16 or 32, and another than 32 only with --tie freshest"
        ),
    })
}
