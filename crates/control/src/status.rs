//! A snapshot of every group that is steered now, read from its pins and its state, whether or not its agent lives.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

use serde::Serialize;
use wakeone_bpf::RunStatistics;
use wakeone_bpf::table::{
    self, CLOSING, DATAGRAMS, EXITS, ONE_QUEUE, REPLACED, SHARED, Table, flag,
};
use wakeone_kernel::proc::process;
use wakeone_kernel::proc::waits::Processes;
use wakeone_kernel::schedule;
use wakeone_model::listener::Protocol;
use wakeone_model::network::Network;

use crate::group_table::GroupTable;
use crate::orphans::{self, Orphan};
use crate::paths::{DATAGRAM_SUFFIX, Paths};
use crate::policy::{Affinity, Policy};
use crate::state::Identity;
use crate::state::{self, ListenAt, State};

/// The ways out in which the kernel chose instead of the policy.
const FALLBACKS: [&str; 3] = ["no_slot", "select_failed", "bad_policy"];

/// All groups of a runtime folder.
#[derive(Debug, Clone, Serialize)]
pub struct Status {
    /// By name.
    pub groups: Vec<Group>,
}

/// One group.
#[derive(Debug, Clone, Serialize)]
pub struct Group {
    /// Its name.
    pub name: String,
    /// The addresses that it listens on.
    pub listen: Vec<String>,
    /// The network namespace of its sockets, where that is another one than that of its agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<Network>,
    /// `tcp`, `unix`, or `udp` for a group of UDP sockets, where nothing is open, moved or counted out.
    pub protocol: &'static str,
    /// For UDP: how the datagrams of a flow are kept together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Affinity>,
    /// For UDP: flows that have more datagrams than their worker can read, while others are idle.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heavy_flows: Option<u32>,
    /// For UDP: such flows that are spread over all workers, which shared one socket before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spread_flows: Option<u32>,
    /// Whether our program places its connections; else the kernel or another program chooses.
    pub steered: bool,
    /// Whether the server has set a program of its own in place of ours, or taken ours away.
    pub replaced: bool,
    /// Connections that wait in the one queue that its workers share, or in those of several addresses; absent if each
    /// worker has its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queued: Option<u32>,
    /// The limit of that queue, or of those together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_limit: Option<u32>,
    /// How a worker is chosen; absent if our program does not steer the group.
    pub policy: Option<Policy>,
    /// The supervisor's pid, if it lives.
    pub supervisor_pid: Option<u32>,
    /// Whether it is an attached server; `supervisor_pid` is then the agent's.
    pub attached: bool,
    /// Whether it is a server that `wakeone run` started as it is; `supervisor_pid` is that process.
    pub started: bool,
    /// Whether an agent looks after it: it moves queues, and keeps the queue lengths fresh.
    pub agent: bool,
    /// Whether connections are counted.
    pub counting: bool,
    /// Whether it takes no new connections any more.
    pub closing: bool,
    /// Connections that the kernel placed because our program could not.
    pub fallbacks: u64,
    /// Every way out of the program, counted.
    pub exits: BTreeMap<&'static str, u64>,
    /// Connections that were moved while they waited and are still open.
    pub moved_live: u64,
    /// Connections by which active counts were found wrong, and mended.
    pub drift_mended: u64,
    /// Its slots.
    pub slots: Vec<Slot>,
    /// Processes that hold a listener of a slot and do not accept, as their worker has ended; see
    /// [`Group::find_orphans`]. Only `status` fills it in.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub orphans: Vec<Orphan>,
    /// Run statistics of its programs; all 0 unless the kernel keeps any (`kernel.bpf_stats_enabled`).
    pub programs: Vec<RunStatistics>,
}

/// One slot.
#[derive(Debug, Clone, Serialize)]
pub struct Slot {
    /// Its number.
    pub slot: usize,
    /// Its worker.
    pub pid: Option<u32>,
    /// `up`, `stuck`, `draining` or `down`.
    pub state: &'static str,
    /// Where workers share one queue: whether it is woken for connections.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub armed: Option<bool>,
    /// Its share relative to the others'.
    pub weight: u32,
    /// Connections open, those that wait included.
    pub active: i64,
    /// Connections waiting to be accepted, at the last look.
    pub queued: u32,
    /// The limit of the queue.
    pub queue_limit: u32,
    /// For UDP: memory of the datagrams that wait to be read, in bytes, at the last look.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waiting_bytes: Option<u32>,
    /// For UDP: the size of the receive buffers, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub buffer_bytes: Option<u32>,
    /// For UDP: datagrams that its sockets had no room for, since they were made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropped: Option<u64>,
    /// Times the program chose it.
    pub selected: u64,
    /// Its part of all choices, 0 to 1.
    pub selected_share: f64,
    /// Connections that completed their handshake here.
    pub established: u64,
    /// Connections counted out.
    pub closed: u64,
    /// Waiting connections that came from another slot.
    pub migrated_in: u64,
    /// Waiting connections that went to another slot.
    pub migrated_out: u64,
    /// Times its queue was moved.
    pub rescues: u64,
    /// Connections moved by that.
    pub rescued: u64,
    /// Time that its worker was seen stuck, in ms.
    pub stuck_ms: u64,
    /// Workers started again here.
    pub restarts: u64,
}

/// Reads every group.
///
/// # Errors
/// The runtime folder cannot be read: only root may read it.
pub fn read(paths: &Paths) -> io::Result<Status> {
    let mut groups = Vec::new();
    for name in names(paths)? {
        let state = state_of(paths, &name);
        let table = GroupTable::open(paths, &name).ok();
        let table = table.filter(GroupTable::is_ours);
        if state.is_some() || table.is_some() {
            groups.push(group(name, state.as_ref(), table.as_ref()));
        }
    }
    Ok(Status { groups })
}

impl Group {
    /// The inode of the network namespace of its sockets, where that is another one than that of its agent.
    pub fn namespace(&self) -> Option<u64> {
        self.network.as_ref().map(|network| network.namespace)
    }

    /// Returns its orphans among all processes.
    pub fn find_orphans(&self, paths: &Paths, processes: &Processes) -> Vec<Orphan> {
        let state = state_of(paths, &self.name);
        state.map_or_else(Vec::new, |state| orphans::find(&state, processes))
    }
}

/// Returns a group's state. The UDP part of a group shares the state of its other part.
fn state_of(paths: &Paths, name: &str) -> Option<State> {
    let load = |name: &str| state::load(&paths.runtime, name).ok().flatten();
    load(name).or_else(|| load(name.strip_suffix(DATAGRAM_SUFFIX)?))
}

/// Returns the names of groups that have a state or pins.
///
/// # Errors
/// A folder exists and cannot be read.
pub fn names(paths: &Paths) -> io::Result<Vec<String>> {
    let mut names =
        state::names(&paths.runtime).map_err(|error| io::Error::other(error.to_string()))?;
    names.extend(folder_names(&paths.pins)?);
    names.retain(|name| !name.starts_with(wakeone_bpf::TEMPORARY));
    names.sort();
    names.dedup();
    Ok(names)
}

fn folder_names(dir: &Path) -> io::Result<Vec<String>> {
    match std::fs::read_dir(dir) {
        Ok(entries) => {
            let names = entries
                .flatten()
                .filter_map(|entry| entry.file_name().into_string().ok());
            Ok(names.filter(|name| state::is_name(name)).collect())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Returns a group as its state and its pins describe it.
pub fn group(name: String, state: Option<&State>, open: Option<&GroupTable>) -> Group {
    let table = open.map(GroupTable::table);
    let flags = table.map_or(0, |table| table.flags().load(Relaxed));
    let replaced = flags & REPLACED != 0;
    let one_queue = table.filter(|_| flags & ONE_QUEUE != 0);
    let listen = listen(state, table.map(|_| flags & DATAGRAMS != 0));
    let all_of = |protocol| !listen.is_empty() && listen.iter().all(|at| at.protocol() == protocol);
    let exits: BTreeMap<_, _> = table
        .map(|table| EXITS.into_iter().zip(table.exits()).collect())
        .unwrap_or_default();
    Group {
        name,
        protocol: match () {
            () if all_of(Protocol::Udp) || flags & DATAGRAMS != 0 => "udp",
            () if all_of(Protocol::Unix) => "unix",
            () => "tcp",
        },
        affinity: table.and_then(Affinity::of),
        heavy_flows: heavy(table, flags & SHARED == 0),
        spread_flows: heavy(table, flags & SHARED != 0),
        listen: listen
            .iter()
            .map(|at| {
                let is_udp = at.protocol() == Protocol::Udp;
                let protocol = if is_udp { "udp://" } else { "" };
                format!("{protocol}{}", at.address())
            })
            .collect(),
        network: state.and_then(|state| state.network.clone()),
        steered: table.is_some() && !replaced,
        replaced,
        queued: one_queue.map(|table| table.slot(0).queued().load(Relaxed)),
        queue_limit: one_queue.map(|table| table.slot(0).queue_limit().load(Relaxed)),
        policy: table
            .filter(|_| !replaced)
            .and_then(|table| Policy::of_number(table.policy().load(Relaxed))),
        supervisor_pid: state
            .filter(|state| state.boot == state::boot_id() && state.supervisor.lives())
            .map(|state| state.supervisor.pid),
        attached: state.is_some_and(|state| state.attached),
        started: state.is_some_and(|state| {
            state.attached && !state.is_split() && !state.task.command.is_empty()
        }),
        agent: table.is_some_and(agent_lives),
        counting: open.is_some_and(GroupTable::counting),
        closing: flags & CLOSING != 0,
        fallbacks: FALLBACKS.iter().filter_map(|way| exits.get(way)).sum(),
        exits,
        moved_live: table.map_or(0, Table::moved_live),
        drift_mended: table.map_or(0, |table| table.drift_mended().load(Relaxed)),
        orphans: Vec::new(),
        slots: table
            .map(|table| slots(table, state))
            .unwrap_or_else(|| state.map(unsteered_slots).unwrap_or_default()),
        programs: open.map(GroupTable::run_statistics).unwrap_or_default(),
    }
}

/// Returns how many flows of a UDP group are too much for one worker; 0 if that is told elsewhere.
fn heavy(table: Option<&Table>, applies: bool) -> Option<u32> {
    let table = table.filter(|table| table.flags().load(Relaxed) & DATAGRAMS != 0)?;
    Some(table.heavy_flows().load(Relaxed)).map(|count| if applies { count } else { 0 })
}

/// Returns the addresses of a group's part: of UDP or of others if it is steered, else all.
fn listen(state: Option<&State>, udp: Option<bool>) -> Vec<ListenAt> {
    let all = state.into_iter().flat_map(|state| &state.listen);
    let is_udp = |at: &ListenAt| at.protocol() == Protocol::Udp;
    all.filter(|at| udp.is_none_or(|udp| is_udp(at) == udp))
        .copied()
        .collect()
}

fn agent_lives(table: &Table) -> bool {
    let age = schedule::coarse_ns().saturating_sub(table.heartbeat_ns().load(Relaxed));
    age <= table.heartbeat_limit_ns().load(Relaxed)
}

fn slots(table: &Table, state: Option<&State>) -> Vec<Slot> {
    let recorded = |slot: usize| state?.slots.get(slot)?.worker;
    let count = (table.slots().load(Relaxed) as usize).min(table::MAX_SLOTS);
    let selected: u64 = (0..count)
        .map(|slot| table.slot(slot).selected().load(Relaxed))
        .sum();
    (0..count)
        .map(|slot| one_slot(table, slot, recorded(slot), selected))
        .collect()
}

/// Whether the worker in the table lives. `recorded`: the same in the state, which tells processes of one number apart.
fn is_alive(pid: u32, recorded: Option<Identity>) -> bool {
    match recorded.filter(|worker| worker.pid == pid) {
        Some(worker) => worker.lives(),
        None => process::state(pid).is_some_and(|state| !matches!(state, 'Z' | 'X')),
    }
}

fn one_slot(
    table: &Table,
    number: usize,
    recorded: Option<Identity>,
    selected_in_all: u64,
) -> Slot {
    let place = table.slot(number);
    let worker = Some(place.pid().load(Relaxed)).filter(|pid| *pid != 0);
    let living = worker.filter(|pid| is_alive(*pid, recorded));
    let selected = place.selected().load(Relaxed);
    let flags = table.flags().load(Relaxed);
    let (udp, one_queue) = (flags & DATAGRAMS != 0, flags & ONE_QUEUE != 0);
    let (waiting, limit) = match one_queue {
        true => (0, 0),
        false => (
            place.queued().load(Relaxed),
            place.queue_limit().load(Relaxed),
        ),
    };
    Slot {
        slot: number,
        pid: living,
        state: match place.flags().load(Relaxed) {
            _ if worker.is_some() && living.is_none() => "down",
            flags if flags & flag::UP == 0 => "down",
            flags if flags & flag::DRAINING != 0 => "draining",
            flags if flags & flag::STUCK != 0 => "stuck",
            _ => "up",
        },
        armed: one_queue.then(|| place.has(flag::ARMED)),
        weight: place.weight().load(Relaxed),
        active: place.active().load(Relaxed),
        queued: if udp { 0 } else { waiting },
        queue_limit: if udp { 0 } else { limit },
        waiting_bytes: udp.then_some(waiting),
        buffer_bytes: udp.then_some(limit),
        dropped: udp.then(|| place.dropped().load(Relaxed)),
        selected,
        selected_share: if selected_in_all == 0 {
            0.0
        } else {
            selected as f64 / selected_in_all as f64
        },
        established: place.established().load(Relaxed),
        closed: place.closed().load(Relaxed),
        migrated_in: place.migrated_in().load(Relaxed),
        migrated_out: place.migrated_out().load(Relaxed),
        rescues: place.rescues().load(Relaxed),
        rescued: place.rescued().load(Relaxed),
        stuck_ms: place.stuck_ns().load(Relaxed) / 1_000_000,
        restarts: place.restarts().load(Relaxed),
    }
}

/// Returns the slots of a group without a program, with their workers.
fn unsteered_slots(state: &State) -> Vec<Slot> {
    // The last ones may be room for more workers.
    let used = state.slots.iter().rposition(|slot| slot.worker.is_some());
    let used = state.workers.max(used.map_or(0, |last| last + 1));
    let slots = state.slots.iter().enumerate();
    let slots = slots.take(if state.workers == 0 { usize::MAX } else { used });
    let living = |slot: &state::SlotRecord| slot.worker.filter(Identity::lives);
    let slot = |(number, slot): (usize, &state::SlotRecord)| Slot {
        slot: number,
        pid: living(slot).map(|worker| worker.pid),
        state: if living(slot).is_some() { "up" } else { "down" },
        armed: None,
        weight: 1,
        active: 0,
        queued: 0,
        queue_limit: 0,
        waiting_bytes: None,
        buffer_bytes: None,
        dropped: None,
        selected: 0,
        selected_share: 0.0,
        established: 0,
        closed: 0,
        migrated_in: 0,
        migrated_out: 0,
        rescues: 0,
        rescued: 0,
        stuck_ms: 0,
        restarts: 0,
    };
    slots.map(slot).collect()
}
