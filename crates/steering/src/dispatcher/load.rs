//! The pinned programs and maps of a group: those of an earlier agent, or new ones.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

use wakeone_bpf::table;
use wakeone_bpf::{self as bpf, LoadPlan, Loaded, Missing, Pinned};
use wakeone_model::listener::Protocol;

use super::error::Error;
use super::plan::Plan;

/// A group's programs and maps, and whether they come from an earlier agent.
pub(super) struct Found {
    pub pinned: Pinned,
    pub kept: bool,
    pub missing: Vec<Missing>,
}

/// Returns the pinned group of an earlier agent if it is to be taken over and fits; else a new one.
pub(super) fn open_or_load(
    plan: &Plan<'_>,
    addresses: usize,
    fits: impl Fn(&Pinned) -> bool,
) -> Result<Found, Error> {
    plan.paths
        .prepare()
        .map_err(|why| Error::no_place(plan.name, why))?;
    let dir = plan.paths.group_pins(plan.name);
    sweep_halves(&plan.paths.pins);
    let found = plan.adopt.then(|| find(&dir, addresses)).flatten();
    let same_kind = |pinned: &Pinned| {
        let datagrams = pinned.table().flags().load(Relaxed) & table::DATAGRAMS != 0;
        datagrams == (plan.protocol() == Protocol::Udp)
            && pinned.quic().is_some() == plan.is_quic()
            && pinned.looks_up() != plan.lookup.is_empty()
    };
    let load = LoadPlan {
        dir: &dir,
        addresses,
        cgroup: plan
            .cgroup
            .filter(|_| plan.protocol() == Protocol::Tcp || plan.is_quic()),
        read_queues: plan.read_queues,
        datagrams: plan.protocol() == Protocol::Udp,
        quic: plan.is_quic(),
        lookup: plan.lookup,
        joins: plan.joins,
    };
    if let Some(pinned) = found.filter(|pinned| same_kind(pinned) && fits(pinned)) {
        return Ok(renew(plan.name, &load, pinned));
    }
    bpf::empty_arrays(&dir);
    bpf::remove_pins(&dir).map_err(|source| Error::Kernel {
        name: plan.name.to_owned(),
        source: bpf::Error {
            step: format!("removing {}", dir.display()),
            source,
        },
    })?;
    let Loaded { pinned, missing } = bpf::load(&load).map_err(|error| {
        plan.paths.tidy();
        Error::of(plan.name)(error)
    })?;
    Ok(Found {
        pinned,
        kept: false,
        missing,
    })
}

/// Has a group that is taken over run the programs of this build. If they cannot be loaded the old ones stay: they
/// follow the same contract.
fn renew(name: &str, load: &LoadPlan<'_>, pinned: Pinned) -> Found {
    let mut found = Found {
        pinned,
        kept: true,
        missing: Vec::new(),
    };
    if found.pinned.table().build().load(Relaxed) == bpf::BUILD {
        return found;
    }
    match bpf::replace(load) {
        Ok(Loaded { pinned, missing }) => {
            tracing::info!(
                event = "note",
                "`{name}`: the programs of another build of wakeone were replaced; all counts stay"
            );
            found.pinned = pinned;
            found.missing = missing;
        }
        Err(error) => tracing::warn!(
            event = "degraded",
            "`{name}` keeps the programs of another build of wakeone: {error}; stop and start the group to replace them"
        ),
    }
    found
}

/// Returns the group that is pinned there, if it is whole, of this layout, and of as many addresses.
fn find(dir: &Path, addresses: usize) -> Option<Pinned> {
    let pinned = Pinned::open(dir).ok()?;
    let table = pinned.table();
    let fits = table.contract().load(Relaxed) == table::CONTRACT
        && pinned.addresses() == addresses
        && table.slots().load(Relaxed) as usize <= table::MAX_SLOTS;
    fits.then_some(pinned)
}

/// Removes half-made groups whose maker is gone.
pub fn sweep_halves(pins: &Path) -> Vec<PathBuf> {
    let mut swept = Vec::new();
    for entry in std::fs::read_dir(pins).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(rest) = name
            .to_str()
            .and_then(|name| name.strip_prefix(bpf::TEMPORARY))
        else {
            continue;
        };
        let maker = rest
            .split('-')
            .next()
            .and_then(|pid| pid.parse::<u32>().ok());
        let alive = maker.is_some_and(|pid| Path::new(&format!("/proc/{pid}")).exists());
        if !alive && bpf::remove_pins(&entry.path()).is_ok() {
            swept.push(entry.path());
        }
    }
    swept
}
