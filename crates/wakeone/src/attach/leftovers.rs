//! Removes the groups of an agent that was killed, if their network namespaces have ended since.

use std::collections::BTreeMap;

use wakeone_control::paths::Paths;
use wakeone_control::privileges::FOR_LOADING;
use wakeone_control::state::{self, State};
use wakeone_control::status;
use wakeone_kernel::capability;
use wakeone_kernel::proc::stat;
use wakeone_model::network::Network;

use crate::detach::detach;

/// Removes them. `there`: the network namespaces that exist, and the processes in each.
pub fn remove(paths: &Paths, there: &BTreeMap<u64, Vec<u32>>) {
    for name in status::names(paths).unwrap_or_default() {
        let state = state::load(&paths.runtime, &name).ok().flatten();
        if !state.is_some_and(|state| is_left(&state, there)) {
            continue;
        }
        match capability::with(&FOR_LOADING, || detach(paths, &name)) {
            Ok(_) => tracing::info!(
                event = "gone",
                "{name}: its server ended while no agent ran"
            ),
            Err(error) => tracing::warn!("{error}"),
        }
    }
}

fn is_left(state: &State, there: &BTreeMap<u64, Vec<u32>>) -> bool {
    let Some(network) = &state.network else {
        return false;
    };
    if !state.attached || state.supervisor.lives() {
        return false;
    }
    let Some(pids) = there.get(&network.namespace) else {
        return true;
    };
    // The kernel gives the number of a namespace that ended to the next.
    let container_of = |pid: &u32| {
        let cgroups = stat::text_of(*pid, "cgroup").unwrap_or_default();
        Network::of_cgroups(network.namespace, &cgroups).container
    };
    let is_there = |container| {
        pids.iter()
            .any(|pid| container_of(pid).as_ref() == Some(container))
    };
    network
        .container
        .as_ref()
        .is_some_and(|container| !is_there(container))
}
