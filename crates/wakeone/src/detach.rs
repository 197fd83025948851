//! Removes what a group left behind: its program, pins, cgroup and state, whole or half-made.

use std::collections::{BTreeMap, HashSet};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use serde::Serialize;
use wakeone_bpf::chooser::{Chooser, Choosers};
use wakeone_bpf::table::REPLACED;
use wakeone_bpf::{self as bpf, Pinned};
use wakeone_kernel::cgroup;
use wakeone_kernel::proc::process;
use wakeone_kernel::socket;
use wakeone_kernel::socket::diag::{self, Which};
use wakeone_model::listener::Protocol;

use wakeone_control::control;
use wakeone_control::group_table::GroupTable;
use wakeone_control::named;
use wakeone_control::paths::{DATAGRAM_SUFFIX, Paths};
use wakeone_control::policy::Policy;
use wakeone_control::repair::repair;
use wakeone_control::state::Identity;
use wakeone_control::state::{self, GroupDir, ListenAt, State, StateError};
use wakeone_control::status::{self, Group};
use wakeone_steering::dispatcher::sweep_halves;

/// The things that were removed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The group.
    pub name: String,
    /// Reuseport groups from which the program was detached.
    pub detached: usize,
    /// Whether there were pins.
    pub pins: bool,
    /// Cgroups removed.
    pub cgroups: Vec<PathBuf>,
    /// Workers that go on serving, with the kernel's own choice.
    pub serving_pids: Vec<u32>,
    /// It was an attached server, and its agent ended.
    pub attached: bool,
    /// Its workers share one queue, and are woken again as the server made it.
    pub one_queue: bool,
    /// It was steered. An agent that waits for its server to come back steers nobody.
    pub steered: bool,
}

/// Why a group was left as it is.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no such group.
    #[error("there is no group `{name}`; {known}")]
    Unknown {
        /// The name that was asked for.
        name: String,
        /// The groups that exist instead.
        known: String,
    },
    /// An address is that of groups in several network namespaces.
    #[error("{what} means {names}, each in a network namespace of its own; name one of them")]
    Ambiguous {
        /// The address.
        what: String,
        /// The groups.
        names: String,
    },
    /// Its supervisor lives and would go on as if it were steered; or its folder is not available.
    #[error(transparent)]
    State(#[from] StateError),
    /// Its workers would get no connections.
    #[error(
        "cannot detach `{name}`: its workers run with --lookup, and only its programs give them connections (pids {pids}); take them over with the same `wakeone run`, or end them with `kill {pids}`"
    )]
    Needed {
        /// The group.
        name: String,
        /// Its workers.
        pids: String,
    },
    /// A listener that an agent left closed cannot be opened. The pins stay, as only they tell that it is closed.
    #[error("cannot detach `{name}`: {}", why.join("; "))]
    Closed {
        /// The group.
        name: String,
        /// A sentence for each slot.
        why: Vec<String>,
    },
    /// Its program is attached, and the sockets cannot be reached to detach it. The pins stay, for another attempt.
    #[error(
        "cannot detach `{name}`: its program chooses at {at}, and no process that may be seen holds a socket there"
    )]
    Held {
        /// The group.
        name: String,
        /// The addresses.
        at: String,
    },
    /// Something could not be removed.
    #[error("cannot detach `{name}`: {what} cannot be removed: {source}")]
    Remove {
        /// The group.
        name: String,
        /// The thing that cannot be removed.
        what: String,
        /// Why.
        source: std::io::Error,
    },
}

/// Removes one group. Its workers, if any live, go on serving.
///
/// # Errors
/// See [`Error`].
pub fn detach(paths: &Paths, name: &str) -> Result<Report, Error> {
    paths.check().map_err(StateError::from)?;
    let names = status::names(paths).unwrap_or_default();
    if !names.iter().any(|known| known == name) && paths.cgroups_of(name).is_empty() {
        let known = named::known(&names);
        return Err(Error::Unknown {
            name: name.to_owned(),
            known,
        });
    }
    // Read first, as an agent that ends removes its state.
    let before = state::load(&paths.runtime, name).ok().flatten();
    let one_queue = GroupTable::open(paths, name).map(|table| table.is_one_queue());
    let dir = take(paths, name)?;
    // Repaired first: removing the program also removes the record of an unfinished move.
    let closed = repair(paths, &dir);
    if !closed.is_empty() {
        return Err(Error::Closed {
            name: name.to_owned(),
            why: closed,
        });
    }
    let mut report = Report {
        name: name.to_owned(),
        attached: before.is_some_and(|state| state.attached),
        steered: one_queue.is_ok(),
        one_queue: one_queue.unwrap_or(false),
        ..Report::default()
    };
    let state = dir.load();
    let parts = parts(name, state.as_ref().ok().and_then(Option::as_ref));
    match state {
        Ok(Some(state)) if !state.reserved.is_empty() => unneeded(&state)?,
        Ok(Some(state)) if state.is_split() => leave_to_hash(paths, name),
        state => {
            let mut programs = Programs::of(paths, &parts);
            if let Ok(Some(state)) = state {
                release(&state, &mut programs, &mut report);
            }
            for part in &parts {
                release_known(paths, part, &mut programs, &mut report)?;
            }
        }
    }
    let failed = |what: String| {
        move |source| Error::Remove {
            name: name.to_owned(),
            what,
            source,
        }
    };
    for pins in parts.iter().map(|part| paths.group_pins(part)) {
        report.pins |= pins.exists();
        bpf::remove_pins(&pins).map_err(failed(pins.display().to_string()))?;
    }
    for path in paths.cgroups_of(name) {
        cgroup::remove(&path).map_err(failed(path.display().to_string()))?;
        report.cgroups.push(path);
    }
    dir.forget();
    drop(dir);
    paths.tidy();
    Ok(report)
}

/// Returns the names of a group's pins: sockets of UDP beside those of TCP have a program of their own.
fn parts(name: &str, state: Option<&State>) -> Vec<String> {
    let mut parts = vec![name.to_owned()];
    let has = |udp| {
        let is = |one: &ListenAt| (one.protocol() == Protocol::Udp) == udp;
        state.is_some_and(|state| state.listen.iter().any(is))
    };
    if has(true) && has(false) {
        parts.push(format!("{name}{DATAGRAM_SUFFIX}"));
    }
    parts
}

/// Returns the groups that a name, an address or a process means (see [`named::groups`]). An unknown text is taken as a
/// name, so that the error shows it. An address means the one of our own network namespace, if there is a group.
///
/// # Errors
/// [`Error::Ambiguous`]: there are groups in several other namespaces.
pub fn meant(paths: &Paths, what: &str) -> Result<Vec<String>, Error> {
    let names = status::names(paths).unwrap_or_default();
    let found = in_one_network(what, named::groups(paths, what).unwrap_or_default())?;
    let whole = |name: String| match name.strip_suffix(DATAGRAM_SUFFIX) {
        // The UDP part of a group is removed with the rest of it.
        Some(rest) if names.iter().any(|name| name == rest) => rest.to_owned(),
        _ => name,
    };
    let mut found: Vec<String> = found.into_iter().map(|group| whole(group.name)).collect();
    found.sort();
    found.dedup();
    if found.is_empty() {
        found.push(what.to_owned());
    }
    Ok(found)
}

/// Those in our own network namespace, or in the only other one.
fn in_one_network(what: &str, found: Vec<Group>) -> Result<Vec<Group>, Error> {
    let (own, others): (Vec<Group>, Vec<Group>) =
        found.into_iter().partition(|one| one.network.is_none());
    if !own.is_empty() {
        return Ok(own);
    }
    let is_of_first = |one: &Group| one.namespace() == others.first().and_then(Group::namespace);
    if others.iter().all(is_of_first) {
        return Ok(others);
    }
    let names: Vec<String> = others.into_iter().map(|group| group.name).collect();
    Err(Error::Ambiguous {
        what: what.to_owned(),
        names: names.join(", "),
    })
}

/// Takes the group's folder. The agent of an attached server ends when asked to, and detaches by itself; a supervisor
/// of workers does not end.
fn take(paths: &Paths, name: &str) -> Result<GroupDir, Error> {
    let taken = match GroupDir::take(&paths.runtime, name) {
        Err(error @ (StateError::Taken { .. } | StateError::Stopped { .. })) => error,
        other => return Ok(other?),
    };
    let agent = state::load(&paths.runtime, name)
        .ok()
        .flatten()
        // One with a command, as `run -- CMD` or --split, would end its server.
        .filter(|state| {
            state.attached && state.task.command.is_empty() && state.boot == state::boot_id()
        })
        .map(|state| state.supervisor)
        .filter(Identity::lives);
    let Some(pid) = agent.and_then(|agent| Pid::from_raw(agent.pid as i32)) else {
        return Err(taken.into());
    };
    // CONT too: a stopped agent would not see TERM.
    for signal in [Signal::TERM, Signal::CONT] {
        let _ = kill_process(pid, signal);
    }
    let start = Instant::now();
    while start.elapsed() < AGENT_ENDS {
        std::thread::sleep(Duration::from_millis(10));
        if let Ok(dir) = GroupDir::take(&paths.runtime, name) {
            return Ok(dir);
        }
    }
    Err(taken.into())
}

/// How long an agent may take to detach.
const AGENT_ENDS: Duration = Duration::from_secs(10);

/// Leaves a split UDP socket whose `wakeone run` is gone to a program that chooses by hash, which needs no agent. One
/// socket of the group has no reader, and the kernel's own hash would choose it too. So the program stays on the
/// sockets, without pins, and goes with them.
fn leave_to_hash(paths: &Paths, name: &str) {
    let _ = control::change_policy(paths, name, Policy::Hash);
}

/// Refuses while workers live whose listeners are on a private port.
fn unneeded(state: &State) -> Result<(), Error> {
    let workers = state.slots.iter().filter_map(|slot| slot.worker);
    let pids: Vec<String> = workers
        .filter(Identity::lives)
        .map(|worker| worker.pid.to_string())
        .collect();
    if pids.is_empty() {
        return Ok(());
    }
    Err(Error::Needed {
        name: state.name.clone(),
        pids: pids.join(" "),
    })
}

/// Which programs choose where the group listens. A server may have set its own in place of ours, and keeps that.
struct Programs {
    ours: Vec<Pinned>,
    looks: BTreeMap<(bool, u16), Option<Vec<Chooser>>>,
}

impl Programs {
    fn of(paths: &Paths, parts: &[String]) -> Self {
        let pins = parts.iter().map(|part| paths.group_pins(part));
        Self {
            ours: pins.filter_map(|pins| Pinned::open(&pins).ok()).collect(),
            looks: BTreeMap::new(),
        }
    }

    /// Whether another program than ours chooses at an address. Where that cannot be seen, its agent may have noted it.
    fn are_foreign(&mut self, protocol: Protocol, address: SocketAddr) -> bool {
        let at = (protocol == Protocol::Udp, address.port());
        let look = || Choosers::of(protocol, address.port())?.look(None);
        let seen = self.looks.entry(at).or_insert_with(|| look().ok());
        let chooses = |one: &Pinned| seen.as_ref().and_then(|seen| one.chooses(seen));
        let noted = |one: &Pinned| one.table().flags().load(Relaxed) & REPLACED != 0;
        match self.ours.iter().find_map(chooses) {
            Some(ours) => !ours,
            None => self.ours.iter().any(noted),
        }
    }
}

/// Detaches the program from the listeners that living workers hold.
fn release(state: &State, programs: &mut Programs, report: &mut Report) {
    // No program is attached to a UNIX socket, and none is taken off.
    let foreign = |at: &ListenAt| {
        let endpoint = at.endpoint();
        endpoint.is_none_or(|at| programs.are_foreign(at.protocol(), at.address))
    };
    let foreign: Vec<bool> = state.listen.iter().map(foreign).collect();
    let mut done = vec![false; state.listen.len()];
    for slot in &state.slots {
        let Some(worker) = slot.worker.filter(|worker| worker.lives()) else {
            continue;
        };
        report.serving_pids.push(worker.pid);
        let held = process::sockets_of(worker.pid).unwrap_or_default();
        for (address, inode) in slot.inodes.iter().enumerate().take(done.len()) {
            let listener = held
                .iter()
                .find(|(_, held)| held == inode)
                .and_then(|(fd, _)| process::descriptor_of(worker.pid, *fd).ok());
            // One member stands for its whole group.
            if let (false, false, Some(listener)) = (done[address], foreign[address], listener) {
                done[address] = socket::detach_reuseport(&listener).is_ok();
            }
        }
    }
    report.detached = done.into_iter().filter(|done| *done).count();
}

/// Detaches the program from the rest of the listeners that it knows, whoever holds them: workers may have been replaced
/// since the state was written, and an agent that was killed early has left none.
fn release_known(
    paths: &Paths,
    name: &str,
    programs: &mut Programs,
    report: &mut Report,
) -> Result<(), Error> {
    let Ok(pinned) = Pinned::open(&paths.group_pins(name)) else {
        return Ok(());
    };
    let known: HashSet<u64> = pinned.known_listeners().into_iter().collect();
    let mut done: BTreeMap<(SocketAddr, u32), bool> = BTreeMap::new();
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        let living = diag::sockets(protocol, Which::Listening, 0).unwrap_or_default();
        for one in living
            .iter()
            .filter(|one| known.contains(&one.socket.cookie))
        {
            let done = done.entry((one.local, one.interface)).or_default();
            *done |= programs.are_foreign(protocol, one.local);
            // One member stands for its whole group.
            if !*done && let Some(listener) = process::socket_of_any(one.socket.inode) {
                *done = match socket::detach_reuseport(&listener) {
                    Ok(()) => {
                        report.detached += 1;
                        true
                    }
                    // It has no program, perhaps since we detached it from another member.
                    Err(error) => error.kind() == ErrorKind::NotFound,
                };
            }
        }
    }
    let held = done.into_iter().filter(|(_, done)| !done);
    let held: Vec<String> = held.map(|((at, _), _)| at.to_string()).collect();
    if held.is_empty() {
        return Ok(());
    }
    Err(Error::Held {
        name: name.to_owned(),
        at: held.join(", "),
    })
}

/// Removes every group that no supervisor holds, and the remains of half-finished starts.
///
/// # Errors
/// The first group that could not be removed; groups with a living supervisor are passed over.
pub fn detach_all(paths: &Paths) -> Result<Vec<Report>, Error> {
    paths.check().map_err(StateError::from)?;
    sweep_halves(&paths.pins);
    let mut reports = Vec::new();
    for name in status::names(paths).unwrap_or_default() {
        match detach(paths, &name) {
            Ok(report) => reports.push(report),
            Err(Error::State(StateError::Taken { .. } | StateError::Stopped { .. })) => {}
            // The UDP part of a group went with the rest of it.
            Err(Error::Unknown { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    paths.tidy();
    Ok(reports)
}
