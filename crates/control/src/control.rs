//! Changes of a group that another process steers, by its table.

use std::sync::atomic::Ordering::Relaxed;

use wakeone_bpf as bpf;
use wakeone_bpf::table::flag;

use crate::group_table::GroupTable;
use crate::paths::Paths;
use crate::policy::{Affinity, Policy};

/// The reason, unless it is that there is none by this name.
fn beside_absence(error: &bpf::Error) -> String {
    match error.source.kind() {
        std::io::ErrorKind::NotFound => String::new(),
        _ => format!(" ({error})"),
    }
}

/// Why the policy of a running group was not changed.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// No program of ours chooses for it.
    #[error(
        "cannot change how `{name}` is steered: no such group is steered here{}; `wakeone status` lists those that are",
        beside_absence(source)
    )]
    NotSteered {
        /// The group.
        name: String,
        /// The error from opening its table.
        source: bpf::Error,
    },
    /// Its program is of another version.
    #[error(
        "cannot change how `{0}` is steered: another version of wakeone steers it; restart it with this one"
    )]
    OtherVersion(String),
    /// The policy needs counts that nobody keeps.
    #[error(
        "cannot steer `{name}` by {policy}: its connections are not counted (see `wakeone status`); shortest-queue needs no counts"
    )]
    Uncounted {
        /// The group.
        name: String,
        /// The policy that was asked for.
        policy: Policy,
    },
    /// The policy does not fit its sockets.
    #[error("cannot steer `{name}` by {why}")]
    Unfit {
        /// The group.
        name: String,
        /// The policy, the reason, and what fits.
        why: String,
    },
    /// The slot is not one of its own.
    #[error("cannot drain slot {slot} of `{name}`: it has no such slot (see `wakeone status`)")]
    NoSlot {
        /// The group.
        name: String,
        /// The slot that was asked for.
        slot: usize,
    },
}

/// Changes the policy of a group that another process runs, and returns its previous one.
///
/// # Errors
/// See [`PolicyError`].
pub fn change_policy(
    paths: &Paths,
    name: &str,
    policy: Policy,
) -> Result<Option<Policy>, PolicyError> {
    let open = open_group(paths, name)?;
    let table = open.table();
    let affinity = Affinity::of(table);
    let fits = match open.is_one_queue() {
        true => policy.fits_one_queue(),
        false => match affinity {
            Some(affinity) => policy.fits_datagrams(affinity),
            None => Ok(()),
        },
    };
    fits.map_err(|why| PolicyError::Unfit {
        name: name.to_owned(),
        why,
    })?;
    let counts = open.counting() || affinity == Some(Affinity::Quic);
    if policy.needs_counts() && !counts {
        return Err(PolicyError::Uncounted {
            name: name.to_owned(),
            policy,
        });
    }
    Ok(Policy::of_number(
        table.policy().swap(policy.number(), Relaxed),
    ))
}

/// Drains a slot of a group that another process runs, or ends that. It gets no new connections while others can get
/// them.
///
/// # Errors
/// See [`PolicyError`]; there is no such slot.
pub fn change_drain(paths: &Paths, name: &str, slot: usize, on: bool) -> Result<(), PolicyError> {
    let open = open_group(paths, name)?;
    let table = open.table();
    if slot >= table.slots().load(Relaxed) as usize {
        return Err(PolicyError::NoSlot {
            name: name.to_owned(),
            slot,
        });
    }
    table.slot(slot).mark(flag::DRAINING, on);
    Ok(())
}

/// Opens the table of a group of this version.
fn open_group(paths: &Paths, name: &str) -> Result<GroupTable, PolicyError> {
    let open = GroupTable::open(paths, name).map_err(|source| PolicyError::NotSteered {
        name: name.to_owned(),
        source,
    })?;
    if !open.is_ours() {
        return Err(PolicyError::OtherVersion(name.to_owned()));
    }
    Ok(open)
}
