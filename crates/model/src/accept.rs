//! Which accept model a server uses: a pure judgement over snapshots of its processes.
//!
//! The models are named by the usual terms: blocking accept() shared by processes; an epoll set in each of them that
//! wakes all or one (EPOLLEXCLUSIVE); a mutex around accept; one acceptor that hands connections on; a socket for each
//! worker.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::layout;
use crate::listener::{EDGE, EXCLUSIVE, Process, ProcessSnapshot, Protocol, Wait};

/// How a worker learns of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Means {
    /// It blocks in accept(), first in, first out.
    Accept,
    /// It blocks in a receive call.
    Receive,
    /// poll or select: every waiting worker is woken.
    Poll,
    /// Level-triggered epoll: every waiting worker is woken.
    EpollWakeAll,
    /// Edge-triggered epoll without EPOLLEXCLUSIVE.
    EpollEdge,
    /// EPOLLEXCLUSIVE: one worker is woken, the first in the order of registration that waits.
    EpollExclusive,
    /// A ring with an accept in it.
    IoUring,
    /// No process was seen to wait.
    Unseen,
}

/// The way that workers share listening sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Shape {
    /// One thread of one process takes all of them and serves them.
    Single,
    /// Processes share one socket.
    Shared,
    /// Threads of one process share one socket.
    SharedByThreads,
    /// Processes share one socket, one at a time: a mutex around accept.
    Mutex,
    /// One thread takes all and hands them to other threads.
    HandsToThreads,
    /// One process takes all and passes the descriptors to others.
    PassesDescriptors,
    /// A socket for each process.
    SocketPerWorker,
    /// A socket for each thread of one process.
    SocketPerThread,
    /// Several sockets have the address, and are no reuseport group.
    NoGroup,
    /// No process was seen to take any.
    Unknown,
}

/// How sure the judgement is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Confidence {
    /// One of several that would look like it.
    Possible,
    /// Nothing else that is in use looks like it.
    Likely,
    /// It was seen.
    Certain,
}

/// The accept model of a listener.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptModel {
    /// How the workers share the sockets.
    pub shape: Shape,
    /// How they learn of one.
    pub means: Means,
    /// How sure.
    pub confidence: Confidence,
    /// The observations, a sentence each.
    pub evidence: Vec<String>,
    /// Processes that take connections.
    pub workers: Vec<u32>,
}

impl AcceptModel {
    /// A short name, `shared-epoll-exclusive` say, for tables and programs.
    pub fn name(&self) -> String {
        let means = match self.means {
            Means::Accept => "accept",
            Means::Receive => "receive",
            Means::Poll => "poll",
            Means::EpollWakeAll => "epoll-wake-all",
            Means::EpollEdge => "epoll-edge",
            Means::EpollExclusive => "epoll-exclusive",
            Means::IoUring => "io-uring",
            Means::Unseen => "unseen",
        };
        match self.shape {
            Shape::Single => {
                // With one waiter there is nobody else to wake.
                let means = means.strip_suffix("-wake-all").unwrap_or(means);
                format!(
                    "single-{}",
                    means.strip_suffix("-exclusive").unwrap_or(means)
                )
            }
            Shape::Shared => format!("shared-{means}"),
            Shape::SharedByThreads => format!("threads-{means}"),
            Shape::Mutex => "accept-mutex".into(),
            Shape::HandsToThreads => "hands-to-threads".into(),
            Shape::PassesDescriptors => "passes-descriptors".into(),
            Shape::SocketPerWorker => "socket-per-worker".into(),
            Shape::SocketPerThread => "socket-per-thread".into(),
            Shape::NoGroup => "no-group".into(),
            Shape::Unknown if self.means == Means::IoUring => "io-uring".into(),
            Shape::Unknown => "unknown".into(),
        }
    }

    /// Describes the model for a person.
    pub fn describe(&self) -> &'static str {
        match (self.shape, self.means) {
            (Shape::Single, _) => "one worker takes every connection",
            (Shape::Shared | Shape::SharedByThreads, Means::Accept) => {
                "workers block in accept() on one socket; the kernel wakes one, first in, first out"
            }
            (Shape::Shared | Shape::SharedByThreads, Means::Receive) => {
                "workers block in a receive call on one socket; the kernel wakes one"
            }
            (Shape::Shared | Shape::SharedByThreads, Means::Poll) => {
                "workers poll one socket; every connection wakes all that wait"
            }
            (Shape::Shared | Shape::SharedByThreads, Means::EpollWakeAll) => {
                "workers have one socket in their epoll sets, without EPOLLEXCLUSIVE; every connection wakes all that wait"
            }
            (Shape::Shared | Shape::SharedByThreads, Means::EpollEdge) => {
                "workers have one socket in edge-triggered epoll sets; a connection may wake several"
            }
            (Shape::Shared | Shape::SharedByThreads, Means::EpollExclusive) => {
                "workers have one socket in their epoll sets with EPOLLEXCLUSIVE; the kernel wakes the first that waits, always in one order"
            }
            (Shape::Shared | Shape::SharedByThreads, _) => "workers share one socket",
            (Shape::Mutex, _) => {
                "workers share one socket, one at a time waits for it (a mutex around accept)"
            }
            (Shape::HandsToThreads, _) => {
                "one thread takes every connection and hands it to others"
            }
            (Shape::PassesDescriptors, _) => {
                "one process takes every connection and passes its descriptor to others"
            }
            (Shape::SocketPerWorker, _) => "each worker has a socket of its own (SO_REUSEPORT)",
            (Shape::SocketPerThread, _) => "each thread has a socket of its own (SO_REUSEPORT)",
            (Shape::NoGroup, _) => {
                "its sockets have one address and are no group: the kernel spreads nothing over them"
            }
            (Shape::Unknown, _) => "nobody was seen to wait for its connections",
        }
    }
}

/// The sockets that each process waited for, and by what means, over all snapshots. The units of a process are its
/// epoll sets with a socket in them, or its threads in accept, receive or poll.
#[derive(Default)]
struct Watching {
    /// By process: `(unit, inode, means)`.
    by_process: BTreeMap<u32, BTreeSet<(u64, u64, Means)>>,
    /// Snapshots in which exactly one process waited.
    alone: usize,
    /// Snapshots in which several did.
    together: usize,
    /// Processes with an io_uring that hold a socket.
    rings: BTreeSet<u32>,
}

impl Watching {
    fn see(snapshots: &[ProcessSnapshot]) -> Self {
        let mut all = Self::default();
        let heirs = heirs(snapshots);
        for sighting in snapshots {
            let mut now = 0;
            let processes = sighting.processes.iter();
            for process in processes.filter(|one| !heirs.contains(&one.pid)) {
                let units = units(process);
                if process.rings && !process.holds.is_empty() && units.is_empty() {
                    all.rings.insert(process.pid);
                }
                now += usize::from(waits_now(process));
                if !units.is_empty() {
                    all.by_process.entry(process.pid).or_default().extend(units);
                }
            }
            all.alone += usize::from(now == 1);
            all.together += usize::from(now > 1);
        }
        all
    }

    fn means(&self) -> Means {
        let means: BTreeSet<Means> = self.each().map(|(_, _, means)| means).collect();
        // A worker that polls and then blocks in accept (Apache with one Listen) is woken by its poll.
        let strongest = [
            Means::EpollWakeAll,
            Means::Poll,
            Means::EpollEdge,
            Means::EpollExclusive,
            Means::Accept,
            Means::Receive,
        ];
        strongest
            .into_iter()
            .find(|m| means.contains(m))
            .unwrap_or(Means::Unseen)
    }

    fn each(&self) -> impl Iterator<Item = (u64, u64, Means)> + '_ {
        self.by_process.values().flatten().copied()
    }

    fn inodes(&self) -> BTreeSet<u64> {
        self.each().map(|(_, inode, _)| inode).collect()
    }

    /// The most units that one process waits with.
    fn units_of_one(&self) -> usize {
        let units = |set: &BTreeSet<(u64, u64, Means)>| {
            let units: BTreeSet<u64> = set.iter().map(|u| u.0).collect();
            units.len()
        };
        self.by_process.values().map(units).max().unwrap_or(0)
    }
}

/// Epoll sets and threads share one number space here; descriptors are shifted out of the way of thread ids.
const EPOLL_UNIT: u64 = 1 << 40;

fn units(process: &Process) -> Vec<(u64, u64, Means)> {
    let mut units: Vec<(u64, u64, Means)> = process
        .polls
        .iter()
        .filter(|polled| process.holds.contains(&polled.inode))
        .map(|polled| {
            let means = if polled.events & EXCLUSIVE != 0 {
                Means::EpollExclusive
            } else if polled.events & EDGE != 0 {
                Means::EpollEdge
            } else {
                Means::EpollWakeAll
            };
            (
                EPOLL_UNIT + polled.epoll.unsigned_abs() as u64,
                polled.inode,
                means,
            )
        })
        .collect();
    for thread in &process.threads {
        let unit = u64::from(thread.tid);
        match &thread.wait {
            Wait::Accept(inode) => units.push((unit, *inode, Means::Accept)),
            Wait::Receive(inode) => units.push((unit, *inode, Means::Receive)),
            Wait::Poll(inodes) => units.extend(inodes.iter().map(|i| (unit, *i, Means::Poll))),
            // A set that may not be read, of a process that has the socket nowhere else: most likely that one.
            Wait::PollUnseen if process.polls.is_empty() => {
                units.extend(process.holds.iter().map(|i| (unit, *i, Means::Poll)));
            }
            _ => {}
        }
    }
    units
}

/// Whether some thread waits for the socket at this moment. A socket may be in an epoll set that no thread waits on,
/// because the process works or waits for a mutex: then no thread waits for it.
pub fn waits_now(process: &Process) -> bool {
    process.threads.iter().any(|thread| match &thread.wait {
        Wait::PollUnseen => process.polls.is_empty() && !process.holds.is_empty(),
        wait => !waited_for(process, wait).is_empty(),
    })
}

/// Processes that only inherited the epoll set in which their parent waits: a process pool, say. They have the same set
/// under the same number, and no thread of theirs was seen to wait in it.
fn heirs(snapshots: &[ProcessSnapshot]) -> BTreeSet<u32> {
    let all = || snapshots.iter().flat_map(|s| &s.processes);
    let sets = |process: &Process| -> BTreeSet<(i32, u64)> {
        let polls = process.polls.iter();
        polls.map(|one| (one.epoll, one.inode)).collect()
    };
    let parents: BTreeMap<u32, BTreeSet<(i32, u64)>> =
        all().map(|one| (one.pid, sets(one))).collect();
    let inherits = |one: &&Process| {
        let own = sets(one);
        let parent = parents.get(&one.parent);
        !own.is_empty() && parent.is_some_and(|parent| own.is_subset(parent))
    };
    let mut heirs: BTreeSet<u32> = all().filter(inherits).map(|one| one.pid).collect();
    for process in all().filter(|one| waits_now(one)) {
        heirs.remove(&process.pid);
    }
    heirs
}

/// Processes seen waiting for each socket, by its inode.
pub fn waiters(snapshots: &[ProcessSnapshot]) -> BTreeMap<u64, BTreeSet<u32>> {
    let mut waiters: BTreeMap<u64, BTreeSet<u32>> = BTreeMap::new();
    let heirs = heirs(snapshots);
    let all = snapshots.iter().flat_map(|s| &s.processes);
    for process in all.filter(|one| !heirs.contains(&one.pid)) {
        for (_, inode, _) in units(process) {
            waiters.entry(inode).or_default().insert(process.pid);
        }
    }
    waiters
}

/// The threads that wait for each socket, where some process has threads that wait for different ones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Threads {
    /// Thread ids by the socket's inode.
    pub waiters: BTreeMap<u64, BTreeSet<u32>>,
    /// The process of each thread.
    pub processes: BTreeMap<u32, u32>,
}

/// Returns the threads that are the workers, if threads have sockets of their own. A loop that is blocked keeps those
/// connections waiting that its own socket has, however free the process's other loops are.
pub fn threads(snapshots: &[ProcessSnapshot]) -> Option<Threads> {
    let heirs = heirs(snapshots);
    let mut sockets: BTreeMap<u32, BTreeSet<u64>> = BTreeMap::new();
    let mut found = Threads::default();
    let all = snapshots.iter().flat_map(|s| &s.processes);
    for process in all.filter(|one| !heirs.contains(&one.pid)) {
        for thread in &process.threads {
            for inode in waited_for(process, &thread.wait) {
                found.waiters.entry(inode).or_default().insert(thread.tid);
                found.processes.insert(thread.tid, process.pid);
                sockets.entry(thread.tid).or_default().insert(inode);
            }
        }
    }
    let is_apart = |(one, its): (&u32, &BTreeSet<u64>)| {
        let process = found.processes.get(one);
        let mut others = sockets
            .iter()
            .filter(|(tid, _)| found.processes.get(tid) == process);
        others.any(|(_, others)| its.is_disjoint(others))
    };
    sockets.iter().any(is_apart).then_some(found)
}

/// The listener's sockets that a thread waits for.
fn waited_for(process: &Process, wait: &Wait) -> Vec<u64> {
    let holds = |inode: &u64| process.holds.contains(inode);
    match wait {
        Wait::Accept(inode) | Wait::Receive(inode) => {
            vec![*inode].into_iter().filter(holds).collect()
        }
        Wait::Poll(inodes) => inodes.iter().copied().filter(holds).collect(),
        Wait::Epoll(epoll) => {
            let polls = process.polls.iter().filter(|one| one.epoll == *epoll);
            polls.map(|one| one.inode).filter(holds).collect()
        }
        _ => Vec::new(),
    }
}

/// Processes that hold a socket as a last resort and do not accept from it, by its inode. Such a process is the only
/// holder of a socket that no process was seen to wait for. It has no connections, and is the parent of all that wait
/// for sockets of their own. A master that opens its workers' address before they do is like that.
pub fn fallback_holders(snapshots: &[ProcessSnapshot]) -> BTreeMap<u64, u32> {
    let waiters = waiters(snapshots);
    let waits = |pid: u32| waiters.values().any(|pids| pids.contains(&pid));
    let idle = |pid: u32| {
        let seen = snapshots.iter().flat_map(|s| &s.processes);
        let mut own = seen.filter(|p| p.pid == pid);
        own.all(|p| p.connections == 0)
    };
    let last = snapshots.last().map_or(&[][..], |s| &s.processes);
    let is_parent = |pid: u32| {
        let mut workers = last.iter().filter(|p| waits(p.pid)).peekable();
        workers.peek().is_some() && workers.all(|p| p.parent == pid)
    };
    let mut holders = lone_holders(snapshots);
    holders.retain(|_, pid| !waits(*pid) && idle(*pid) && is_parent(*pid));
    holders
}

/// The only holder of each socket that no process was seen to wait for, by its inode.
fn lone_holders(snapshots: &[ProcessSnapshot]) -> BTreeMap<u64, u32> {
    let waiters = waiters(snapshots);
    let last = snapshots.last().map_or(&[][..], |s| &s.processes);
    let mut holders: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    for process in last {
        for inode in process.holds.iter().filter(|i| !waiters.contains_key(*i)) {
            holders.entry(*inode).or_default().push(process.pid);
        }
    }
    let alone = holders.into_iter().filter(|(_, pids)| pids.len() == 1);
    alone.map(|(inode, pids)| (inode, pids[0])).collect()
}

/// Identifies the accept model that the snapshots show.
pub fn identify(protocol: Protocol, snapshots: &[ProcessSnapshot]) -> AcceptModel {
    let watching = Watching::see(snapshots);
    let mut model = AcceptModel {
        shape: Shape::Unknown,
        means: watching.means(),
        confidence: Confidence::Certain,
        evidence: Vec::new(),
        workers: watching.by_process.keys().copied().collect(),
    };
    if watching.by_process.is_empty() {
        nobody(&watching, snapshots, &mut model);
        return model;
    }
    model.evidence.push(waits(&watching, protocol));
    let processes = watching.by_process.len();
    let inodes = watching.inodes().len();
    if inodes > 1 {
        own_sockets(&watching, snapshots, &mut model);
    } else if let Some(others) = mutex(&watching, snapshots) {
        model.shape = Shape::Mutex;
        model.confidence = others.confidence;
        model.workers = others.workers;
        model.evidence.push(others.evidence);
    } else if processes > 1 {
        model.shape = Shape::Shared;
    } else if watching.units_of_one() > 1 {
        model.shape = Shape::SharedByThreads;
    } else if let Some(busy) = busy_beside_one(snapshots, &model.workers) {
        model.shape = Shape::SocketPerWorker;
        model.confidence = Confidence::Likely;
        model.evidence.push(count(
            busy.len(),
            "process with a socket of its own was not seen to wait: it is busy",
            "processes with a socket of their own were not seen to wait: they are busy",
        ));
        model.workers.extend(busy);
    } else {
        one_acceptor(snapshots, &mut model);
    }
    model
}

fn nobody(watching: &Watching, snapshots: &[ProcessSnapshot], model: &mut AcceptModel) {
    if !watching.rings.is_empty() {
        model.means = Means::IoUring;
        model.confidence = Confidence::Likely;
        model.workers = watching.rings.iter().copied().collect();
        model.shape = match (watching.rings.len(), sockets(snapshots)) {
            (1, 1) => Shape::Single,
            (1, _) => Shape::SocketPerThread,
            (_, 1) => Shape::Shared,
            _ => Shape::SocketPerWorker,
        };
        model.evidence.push(format!(
            "{} and an io_uring, and no other way to wait for it was seen",
            count(
                watching.rings.len(),
                "process holds the socket",
                "processes hold the socket"
            )
        ));
        return;
    }
    model.confidence = Confidence::Possible;
    model.evidence.push(
        "no process was seen in accept, poll or epoll with its socket: all are busy, or may not be seen".into(),
    );
}

fn sockets(snapshots: &[ProcessSnapshot]) -> usize {
    let held: BTreeSet<u64> = snapshots
        .iter()
        .flat_map(|s| &s.processes)
        .flat_map(|p| p.holds.iter().copied())
        .collect();
    held.len()
}

fn count(n: usize, one: &str, many: &str) -> String {
    layout::count(n as u64, one, many)
}

fn waits(watching: &Watching, protocol: Protocol) -> String {
    let how: BTreeSet<&str> = watching
        .each()
        .map(|(_, _, means)| match means {
            Means::Accept => "in accept()",
            Means::Receive => "in a receive call",
            Means::Poll => "in poll or select",
            Means::EpollWakeAll => "with epoll, without EPOLLEXCLUSIVE",
            Means::EpollEdge => "with edge-triggered epoll",
            Means::EpollExclusive => "with epoll and EPOLLEXCLUSIVE",
            Means::IoUring | Means::Unseen => "unseen",
        })
        .collect();
    let how: Vec<&str> = how.into_iter().collect();
    format!(
        "{} for {} {protocol} {}, {}",
        match watching.by_process.len() {
            1 => "1 process waits".into(),
            n => format!("{n} processes wait"),
        },
        match watching.inodes().len() {
            1 => "one".into(),
            n => n.to_string(),
        },
        if watching.inodes().len() == 1 {
            "socket"
        } else {
            "sockets"
        },
        how.join(" and ")
    )
}

fn own_sockets(watching: &Watching, snapshots: &[ProcessSnapshot], model: &mut AcceptModel) {
    let shared = watching.inodes().into_iter().any(|inode| {
        let holders = watching
            .by_process
            .values()
            .filter(|units| units.iter().any(|u| u.1 == inode));
        holders.count() > 1
    });
    model.shape = if watching.by_process.len() == 1 || threads(snapshots).is_some() {
        Shape::SocketPerThread
    } else {
        Shape::SocketPerWorker
    };
    if shared {
        model.confidence = Confidence::Likely;
        model
            .evidence
            .push("some of the sockets are waited for by more than one process".into());
    }
    if watching.by_process.len() == 1 && watching.units_of_one() == 1 {
        // One thread watches several sockets of one address: a group that spreads nothing.
        model.shape = Shape::Single;
    }
}

/// The processes of a snapshot are read one after the other. If the mutex is handed on meanwhile, two seem to wait. That
/// happens in less than one of so many snapshots.
const TORN: usize = 8;

struct Mutex {
    confidence: Confidence,
    evidence: String,
    workers: Vec<u32>,
}

/// A mutex around accept. Of several siblings that hold the socket, only one at a time waits for it. The others wait
/// for something else that is not a request.
fn mutex(watching: &Watching, snapshots: &[ProcessSnapshot]) -> Option<Mutex> {
    if watching.alone <= watching.together * TORN {
        return None;
    }
    let mut locks = false;
    let (mut workers, mut watchers) = (BTreeSet::new(), BTreeSet::new());
    for sighting in snapshots {
        let Some(watcher) = sighting.processes.iter().find(|p| waits_now(p)) else {
            continue;
        };
        watchers.insert(watcher.pid);
        for other in &sighting.processes {
            let sibling = other.pid != watcher.pid && other.parent == watcher.parent;
            if !sibling || other.holds.is_empty() || other.threads.is_empty() {
                continue;
            }
            // A worker that waits for the mutex does nothing else. A worker whose pool sleeps while it works does not
            // count.
            let idle = |wait: &Wait| matches!(wait, Wait::Lock | Wait::Futex | Wait::Epoll(_));
            if other.threads.iter().all(|t| idle(&t.wait)) {
                workers.extend([other.pid, watcher.pid]);
                locks |= other.threads.iter().any(|t| t.wait == Wait::Lock);
            }
        }
    }
    let changed = watchers.len() > 1;
    (!workers.is_empty()).then(|| Mutex {
        confidence: if changed || locks {
            Confidence::Certain
        } else {
            Confidence::Likely
        },
        evidence: format!(
            "{} the socket and one at a time waits for it{}{}",
            count(workers.len(), "process holds", "processes hold"),
            if changed { ", taking turns" } else { "" },
            if locks {
                "; the others wait for a lock"
            } else {
                ""
            },
        ),
        workers: workers.into_iter().collect(),
    })
}

/// Processes beside those seen to wait that each hold a socket alone. A worker is not seen to wait while a request keeps
/// it busy. None where there is no such process.
fn busy_beside_one(snapshots: &[ProcessSnapshot], seen: &[u32]) -> Option<BTreeSet<u32>> {
    let fallbacks = fallback_holders(snapshots);
    let mut lone = lone_holders(snapshots);
    lone.retain(|inode, pid| !fallbacks.contains_key(inode) && !seen.contains(pid));
    let busy: BTreeSet<u32> = lone.into_values().collect();
    (!busy.is_empty()).then_some(busy)
}

/// One process, one unit that waits: what becomes of the connections then?
fn one_acceptor(snapshots: &[ProcessSnapshot], model: &mut AcceptModel) {
    model.shape = Shape::Single;
    let acceptor = model.workers[0];
    let processes = || snapshots.iter().flat_map(|s| &s.processes);
    let strangers: BTreeSet<u32> = processes()
        .filter(|p| p.pid != acceptor && p.holds.is_empty() && p.connections > 0)
        .map(|p| p.pid)
        .collect();
    let helpers: BTreeSet<u32> = processes()
        .filter(|p| p.parent == acceptor && p.holds.is_empty() && waits_elsewhere(p))
        .map(|p| p.pid)
        .collect();
    if !strangers.is_empty() {
        model.shape = Shape::PassesDescriptors;
        model.workers.extend(&strangers);
        model.evidence.push(count(
            strangers.len(),
            "process that does not hold the socket holds connections of it",
            "processes that do not hold the socket hold connections of it",
        ));
    } else if !helpers.is_empty() {
        model.shape = Shape::PassesDescriptors;
        model.confidence = Confidence::Likely;
        model.workers.extend(&helpers);
        model.evidence.push(format!(
            "it has {} without the socket",
            count(
                helpers.len(),
                "child that waits in an event loop of its own",
                "children that wait in event loops of their own"
            )
        ));
    } else {
        threads_of_acceptor(snapshots, acceptor, model);
    }
}

fn waits_elsewhere(process: &Process) -> bool {
    let waits = |t: &crate::listener::Thread| matches!(t.wait, Wait::Epoll(_));
    process.threads.iter().any(waits)
}

fn threads_of_acceptor(snapshots: &[ProcessSnapshot], acceptor: u32, model: &mut AcceptModel) {
    let seen = || {
        snapshots
            .iter()
            .flat_map(|s| &s.processes)
            .filter(|p| p.pid == acceptor)
    };
    let listening: BTreeSet<i32> = seen().flat_map(|p| &p.polls).map(|p| p.epoll).collect();
    let loops: BTreeSet<i32> = seen()
        .flat_map(|p| &p.threads)
        .filter_map(|t| match t.wait {
            Wait::Epoll(epoll) if !listening.contains(&epoll) => Some(epoll),
            _ => None,
        })
        .collect();
    let sleepers = seen()
        .map(|p| p.threads.iter().filter(|t| t.wait == Wait::Futex).count())
        .max()
        .unwrap_or(0);
    if loops.len() > 1 {
        model.shape = Shape::HandsToThreads;
        model.confidence = Confidence::Likely;
        model.evidence.push(format!(
            "{} other threads of it wait in event loops of their own, without the socket",
            loops.len()
        ));
    } else if sleepers > 0 {
        model.confidence = Confidence::Likely;
        model.evidence.push(format!(
            "{} in a futex: helpers, or a pool that is handed connections",
            count(sleepers, "thread of it sleeps", "threads of it sleep")
        ));
    }
}

#[cfg(test)]
mod tests;
