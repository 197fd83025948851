//! Watches one listener: quick looks at its queues and workers, and a full one at the beginning and at the end.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::io;
use std::time::{Duration, Instant};

use wakeone_bpf::probe::Probe;
use wakeone_kernel::capability;
use wakeone_kernel::proc::counters;
use wakeone_kernel::proc::doing::{self, Place, WorkerState};
use wakeone_kernel::proc::exits::Exits;
use wakeone_kernel::proc::process;
use wakeone_kernel::proc::sight::Sights;
use wakeone_kernel::proc::waits::{self, Held, Processes};
use wakeone_kernel::schedule;
use wakeone_kernel::socket::diag::{self, Accepted, Which};
use wakeone_kernel::socket::unix_diag;
use wakeone_model::accept::{self, AcceptModel, Confidence, Shape};
use wakeone_model::address::Address;
use wakeone_model::layout::count;
use wakeone_model::listener::{
    Listener, Process, ProcessSnapshot, Protocol, Socket, Ungrouped, Wait,
};
use wakeone_model::snapshot::{
    SHORT_WAIT_US, Sampled, Snapshot, TraceLook, View, Watch, WorkerLook, WorkerTrace,
};
use wakeone_model::waits::Waits;

use crate::contents::{self, Contents};
use crate::moment::Moment;
use crate::queued::Queued;
use crate::unread::Unread;
use crate::{Error, Found, grouping};

/// How often to look at queues and workers: this takes some 30 µs for the queues and 3 µs a thread.
pub const LOOK_EVERY: Duration = Duration::from_millis(10);
/// A sample that needs no reads is taken after this part of the time to the next one: others have just read the processes.
const EARLY: f64 = 0.75;
/// How often to sample the processes, from which the accept model is identified.
const SIGHT_EVERY: Duration = Duration::from_millis(500);
/// Samples at the start, this far apart: mutexes change hands, and a worker that is busy is not seen waiting.
const FIRST_SIGHTINGS: u32 = 10;
const FIRST_APART: Duration = Duration::from_millis(20);
/// Samples remembered.
const MOST_SIGHTINGS: usize = 60;
/// To find the open connections, the kernel walks a table of all connections of the machine, those that have just
/// ended included. That may take one part in this many of the time.
const CONNECTIONS_SHARE: u32 = 200;
/// The same for finding the connections that wait, which is done only while there are some.
const WAITING_SHARE: u32 = 50;
/// How often to look for requests that were not read, in the same part of the time: that is done always.
const UNREAD_EVERY: Duration = Duration::from_millis(40);
/// The number of recent samples from which it is decided which worker serves which socket.
const LATELY: usize = 4;
/// How long a queue must wait behind a busy worker to count as blocked: any queue does for a shorter time.
const BLOCKED_AFTER: Duration = Duration::from_millis(20);

/// A listener being watched.
pub struct Watcher {
    listener: Listener,
    /// The processes that hold the sockets, and their children. All of /proc is read again only when one of them
    /// ends.
    pids: Vec<u32>,
    snapshots: VecDeque<ProcessSnapshot>,
    model: AcceptModel,
    serves: BTreeMap<u64, Vec<u32>>,
    /// Where each process has the listener.
    places: BTreeMap<u32, Place>,
    /// Processes that were seen to wait for the listener.
    acceptors: HashSet<u32>,
    /// Threads that have sockets of their own are the workers, and not their processes.
    by_thread: bool,
    /// The process of each such thread.
    threads: BTreeMap<u32, u32>,
    /// Processes that accept have threads that wait for work.
    pools: bool,
    /// Sockets, by cookie, of which somebody was seen waiting for them lately.
    awaited: HashSet<u64>,
    keeps: BTreeMap<u64, u32>,
    probe: Option<Probe>,
    /// The datagrams that come; `None`: they are not looked at.
    contents: Option<Contents>,
    view: View,
    first: Snapshot,
    sampled: Sampled,
    /// Since when each queue waits behind busy workers, by cookie.
    blocked_since: BTreeMap<u64, Instant>,
    sighted: Instant,
    /// Inodes of the open connections, and when to look for them again.
    connections: HashSet<u64>,
    connections_due: Instant,
    /// How long the waiting connections have waited, and when to look for that again.
    waiting: Waits,
    waiting_due: Instant,
    /// The same of UNIX sockets.
    queued: Queued,
    /// The requests that workers have accepted and not read, and when to look for them again.
    unread: Unread,
    unread_due: Instant,
    reuseport: Option<bool>,
    /// Why its sockets are no group.
    ungrouped: Option<Ungrouped>,
    /// Reports the ends of those processes.
    exits: Exits,
    /// One of them ended since the last sample.
    stale: bool,
    /// Samples taken so far.
    sights: u64,
    /// Only the workers of each socket are of interest, not the open connections.
    follows: bool,
    /// This process held none of the sockets at first. Those of later are borrowed.
    borrows: bool,
    /// The processes that were there at the last search for holders.
    searched: HashSet<u32>,
    /// The sockets that some thread was seen to wait for by poll or select.
    polled: HashSet<u64>,
}

/// Whether a thread is in accept in the middle of an event loop: its process has the listener in an epoll set too, or one of
/// the server's was seen to wait for it by poll or select.
fn accepts_in_loop(process: &Process, polled: &HashSet<u64>) -> bool {
    process.threads.iter().any(|thread| match thread.wait {
        Wait::Accept(inode) => {
            polled.contains(&inode) || process.polls.iter().any(|set| set.inode == inode)
        }
        _ => false,
    })
}

/// The sockets that threads wait for by poll or select.
fn polled_by(processes: &[Process]) -> impl Iterator<Item = u64> {
    let threads = processes.iter().flat_map(|one| &one.threads);
    let polled = threads.filter_map(|thread| match &thread.wait {
        Wait::Poll(inodes) => Some(inodes),
        _ => None,
    });
    polled.flatten().copied()
}

/// Those of these times that are long enough to count.
fn long(times_us: impl IntoIterator<Item = u64>) -> Waits {
    let times_us = times_us.into_iter();
    Waits::of(times_us.filter(|us| *us >= SHORT_WAIT_US))
}

fn kernel(what: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    move |source| Error::Kernel { what, source }
}

impl Watcher {
    /// Begins to watch. `tracing`: use the kernel's tracepoints where they may be used.
    ///
    /// # Errors
    /// The kernel does not show its sockets.
    pub fn start(found: &Found, tracing: bool) -> Result<Self, Error> {
        let mut watchers = start_all(std::slice::from_ref(found), tracing)?;
        Ok(watchers.remove(0))
    }

    /// Makes one that has taken no sample yet.
    fn new(found: &Found, tracing: bool) -> Self {
        let mut view = View::default();
        if found.hidden > 0 {
            view.missing.push(format!(
                "the descriptors of {} of other users may not be seen (it needs CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH): workers among them are missing",
                count(found.hidden as u64, "process", "processes")
            ));
        }
        let probe = attach(&found.listener, tracing, &mut view);
        Self {
            pids: found.pids.clone(),
            snapshots: VecDeque::new(),
            model: accept::identify(found.listener.protocol, &[]),
            serves: BTreeMap::new(),
            places: BTreeMap::new(),
            acceptors: HashSet::new(),
            by_thread: false,
            threads: BTreeMap::new(),
            pools: false,
            awaited: HashSet::new(),
            keeps: BTreeMap::new(),
            probe,
            contents: None,
            view,
            first: Snapshot {
                at_ns: schedule::monotonic_ns(),
                listener: found.listener.clone(),
                workers: BTreeMap::new(),
                trace: None,
                host: counters::host(None),
                waiting: None,
            },
            waiting: Waits::default(),
            waiting_due: Instant::now(),
            queued: Queued::default(),
            unread: Unread::default(),
            unread_due: Instant::now(),
            sampled: Sampled::default(),
            blocked_since: BTreeMap::new(),
            sighted: Instant::now(),
            connections: HashSet::new(),
            connections_due: Instant::now(),
            reuseport: reuseport(found),
            ungrouped: grouping::ungrouped(found),
            exits: Exits::default(),
            stale: false,
            sights: 0,
            follows: false,
            borrows: !found.pids.contains(&std::process::id()),
            searched: HashSet::new(),
            polled: HashSet::new(),
            listener: found.listener.clone(),
        }
    }

    /// Forgets what was counted so far: the time watched begins now.
    ///
    /// # Errors
    /// The kernel does not show its sockets.
    pub fn restart(&mut self) -> Result<(), Error> {
        self.first = self.snapshot()?;
        self.sampled = Sampled::default();
        Ok(())
    }

    /// The accept model as far as it was observed.
    pub fn model(&self) -> &AcceptModel {
        &self.model
    }

    /// A sentence for each thing that cannot be observed: why, and which metrics are unknown because of it.
    pub fn missing(&self) -> &[String] {
        &self.view.missing
    }

    /// The listener with its sockets, at the last look.
    pub fn listener(&self) -> &Listener {
        &self.listener
    }

    /// Whether its sockets have SO_REUSEPORT, as far as that is known.
    pub fn has_reuseport(&self) -> Option<bool> {
        self.reuseport
    }

    /// Why its sockets are no reuseport group, where they are none.
    pub fn ungrouped(&self) -> Option<Ungrouped> {
        self.ungrouped
    }

    /// The living processes that serve a socket, by its cookie.
    pub fn serving(&self, cookie: u64) -> impl Iterator<Item = u32> + '_ {
        let pids = self.serves.get(&cookie).map_or(&[][..], Vec::as_slice);
        pids.iter().copied().filter(|pid| self.lives(*pid))
    }

    /// Whether those processes were seen waiting for the socket; else they are only the ones that hold it.
    pub fn is_awaited(&self, cookie: u64) -> bool {
        self.awaited.contains(&cookie)
    }

    /// The processes that hold its sockets, and their children, at the last look.
    pub fn pids(&self) -> &[u32] {
        &self.pids
    }

    /// The descriptors of its sockets at the last sample: process, number and inode.
    pub fn held(&self) -> impl Iterator<Item = Held> {
        let held = |process: &Process| {
            let pid = process.pid;
            let descriptors = process.descriptors.clone().into_iter();
            descriptors.map(move |(fd, inode)| Held { pid, fd, inode })
        };
        self.last().iter().flat_map(held)
    }

    /// The processes of the last sample.
    fn last(&self) -> &[Process] {
        self.snapshots.back().map_or(&[], |last| &last.processes)
    }

    /// Whether a process was there at the last sample, or is now.
    fn lives(&self, pid: u32) -> bool {
        self.last().iter().any(|one| one.pid == pid) || waits::identity(pid).is_some()
    }

    /// Samples everything that the accept model is identified from: its processes as they are now, or were at a moment.
    fn sample_processes(&mut self, moment: Option<&Moment>) -> Result<(), Error> {
        let now = Sights::default();
        let sights = moment.map_or(&now, |moment| &moment.sights);
        let inodes: HashSet<u64> = self.listener.sockets.iter().map(|s| s.inode).collect();
        if !self.follows && self.connections_due <= Instant::now() {
            let began = Instant::now();
            self.connections = self.connections()?;
            self.connections_due = Instant::now() + began.elapsed() * CONNECTIONS_SHARE;
        }
        if !self.pids.iter().all(|pid| sights.of(*pid).is_some()) {
            self.search(&inodes);
        }
        let mut pids: BTreeSet<u32> = self.pids.iter().copied().collect();
        for pid in &self.pids {
            pids.extend(sights.children(*pid).iter());
        }
        let sights = pids.into_iter().filter_map(|pid| sights.of(pid));
        let processes: Vec<Process> = sights
            .map(|sight| sight.about(&inodes, &self.connections))
            .collect();
        // The children of the holders are looked at again next time, even if they have another parent by then.
        self.pids = processes.iter().map(|p| p.pid).collect();
        if self.snapshots.len() == MOST_SIGHTINGS {
            self.snapshots.pop_front();
        }
        self.sampled.sights += 1;
        self.polled.extend(polled_by(&processes));
        let in_loop = |one: &&Process| accepts_in_loop(one, &self.polled);
        for process in processes.iter().filter(in_loop) {
            *self.sampled.accepts_in_loop.entry(process.pid).or_default() += 1;
        }
        let places = processes.iter();
        self.places = places
            .filter_map(|one| Some((one.pid, Place::of(one)?)))
            .collect();
        let waiting = processes.iter().filter(|one| accept::waits_now(one));
        self.acceptors.extend(waiting.map(|one| one.pid));
        self.snapshots.push_back(ProcessSnapshot { processes });
        self.sighted = Instant::now();
        self.sights += 1;
        self.stale = false;
        self.exits.watch(&self.pids);
        self.conclude()
    }

    /// Inodes of the listener's open connections.
    fn connections(&self) -> Result<HashSet<u64>, Error> {
        if self.listener.protocol == Protocol::Udp {
            return Ok(HashSet::new());
        }
        diag::accepted_at(self.listener.protocol, self.listener.address)
            .map(Accepted::all)
            .map_err(kernel("asking the kernel for the open connections"))
    }

    /// Concludes the model, and the workers of each socket, from all snapshots.
    fn conclude(&mut self) -> Result<(), Error> {
        let snapshots = self.snapshots.make_contiguous();
        self.model = accept::identify(self.listener.protocol, snapshots);
        if let Some(why) = self.ungrouped {
            self.model.shape = Shape::NoGroup;
            self.model.evidence.push(why.to_string());
        }
        // The recent waiters; for a worker that is busy for long, its earlier snapshots.
        let lately = snapshots.len().saturating_sub(LATELY);
        let threads = accept::threads(snapshots).filter(|_| self.by_thread);
        let waiters_in = |snapshots: &[ProcessSnapshot]| match threads {
            Some(_) => accept::threads(snapshots).unwrap_or_default().waiters,
            None => accept::waiters(snapshots),
        };
        let (recent, waiters) = (waiters_in(&snapshots[lately..]), waiters_in(snapshots));
        let last = snapshots.last().map_or(&[][..], |s| &s.processes);
        let alone = |socket: &Socket| -> Vec<u32> {
            let holders = || last.iter().filter(|p| p.holds.contains(&socket.inode));
            // A parent of other holders does not accept, and a process that waits for another socket does not hang.
            let may_hang = |one: &&Process| {
                holders().all(|other| other.parent != one.pid)
                    && !waiters.values().any(|pids| pids.contains(&one.pid))
            };
            let (all, hangs) = (holders().map(|p| p.pid), holders().filter(may_hang));
            let all: Vec<u32> = all.collect();
            let hangs: Vec<u32> = hangs.map(|p| p.pid).collect();
            match (all.len(), hangs.len()) {
                _ if threads.is_some() => Vec::new(),
                (1, _) => all,
                (_, 1) if self.by_thread && socket.queued > 0 => hangs,
                _ => Vec::new(),
            }
        };
        // A socket with waiting connections should have a worker, so it is not one that is only held.
        let holders = accept::fallback_holders(snapshots);
        let empty = self.listener.sockets.iter().filter(|s| s.queued == 0);
        self.keeps = empty
            .filter_map(|socket| Some((socket.cookie, *holders.get(&socket.inode)?)))
            .collect();
        let awaited = self.listener.sockets.iter();
        self.awaited = awaited
            .filter(|socket| waiters.contains_key(&socket.inode))
            .map(|socket| socket.cookie)
            .collect();
        self.serves = self
            .listener
            .sockets
            .iter()
            .map(|socket| {
                let pids = recent
                    .get(&socket.inode)
                    .or_else(|| waiters.get(&socket.inode));
                let kept = self.keeps.contains_key(&socket.cookie);
                let holders = || {
                    if kept { Vec::new() } else { alone(socket) }
                };
                let pids = pids.map_or_else(holders, |p| p.iter().copied().collect());
                (socket.cookie, pids)
            })
            .collect();
        let forsaken = |s: &Socket| s.queued > 0 && !waiters.contains_key(&s.inode);
        if self.model.shape == Shape::Single && self.listener.sockets.iter().any(forsaken) {
            self.model.shape = Shape::SocketPerWorker;
            self.model.confidence = Confidence::Likely;
            let evidence =
                "connections wait at another of its sockets, for which nobody was seen to wait";
            self.model.evidence.push(evidence.into());
        }
        // A thread that sleeps in a futex beside one that accepts.
        self.pools |= last.iter().any(|one| {
            self.acceptors.contains(&one.pid) && one.threads.iter().any(|t| t.wait == Wait::Futex)
        });
        self.threads = threads.map_or_else(BTreeMap::new, |threads| threads.processes);
        if !self.threads.is_empty() {
            self.model.workers = self.threads.keys().copied().collect();
        }
        // A worker that has been stuck since before we came is not seen waiting, but its socket identifies it.
        let hung: BTreeSet<u32> = self.serves.values().flatten().copied().collect();
        for pid in hung {
            if !self.model.workers.contains(&pid) {
                self.model.workers.push(pid);
            }
        }
        if self.model.workers.is_empty() {
            let holders = last.iter().filter(|p| !p.holds.is_empty());
            self.model.workers = holders.map(|p| p.pid).collect();
        }
        let mut workers = std::mem::take(&mut self.model.workers);
        workers.retain(|pid| self.lives(*pid));
        self.model.workers = workers;
        if let Some(probe) = &mut self.probe {
            probe
                .follow(self.model.workers.iter().copied())
                .map_err(kernel("following the workers"))?;
        }
        Ok(())
    }

    /// Searches for the holders of its sockets. A process that was there at the last search and held none has none, as a
    /// rule. So the others are read first, and all only where these do not hold each socket.
    fn search(&mut self, inodes: &HashSet<u64>) {
        let there: HashSet<u32> = process::pids().into_iter().collect();
        let may_hold = |pid: &u32| !self.searched.contains(pid) || self.pids.contains(pid);
        let mut found = Processes::of(there.iter().copied().filter(may_hold));
        if !found.hold(inodes) {
            found = Processes::of(there.iter().copied());
        }
        self.searched = there;
        if self.borrows {
            found.held.retain(|held| held.pid != std::process::id());
        }
        self.pids = found.around(inodes);
    }

    /// The listener's sockets now, or those of a moment.
    fn sockets(&self, moment: Option<&Moment>) -> io::Result<Vec<Socket>> {
        let address = match self.listener.address {
            Address::Inet(address) => address,
            // Another server may have bound the same name.
            Address::Unix(_) => {
                let is_ours = |socket: &Socket| self.listener.has(socket.inode);
                let all = unix_diag::listening()?.into_iter();
                return Ok(all.map(|one| one.socket).filter(is_ours).collect());
            }
        };
        let protocol = match self.listener.protocol {
            Protocol::Udp => Protocol::Udp,
            // An MPTCP listener's queue shows in TCP's dump.
            _ => Protocol::Tcp,
        };
        let entries = match moment {
            Some(moment) => moment.listening.listeners_at(protocol, address),
            None => diag::sockets_at(protocol, Which::Listening, address),
        };
        let entries = entries?.into_iter();
        Ok(entries
            .filter(|e| e.local == address && e.interface == self.listener.interface)
            .map(|e| Socket {
                protocol: self.listener.protocol,
                ..e.socket
            })
            .collect())
    }

    /// Updates the sockets; notes those that were closed.
    fn refresh(&mut self, moment: Option<&Moment>) -> Result<(), Error> {
        let mut sockets = self
            .sockets(moment)
            .map_err(kernel("asking the kernel for the listening sockets"))?;
        sockets.sort_by_key(|s| s.cookie);
        for old in &self.listener.sockets {
            if !sockets.iter().any(|s| s.cookie == old.cookie) {
                self.sampled.gone.insert(old.cookie, old.queued);
            }
        }
        let changed = sockets.len() != self.listener.sockets.len()
            || sockets
                .iter()
                .zip(&self.listener.sockets)
                .any(|(a, b)| a.cookie != b.cookie);
        self.listener.sockets = sockets;
        if changed {
            let inodes = self.listener.sockets.iter().map(|s| s.inode).collect();
            self.search(&inodes);
            self.sample_processes(moment)?;
        }
        Ok(())
    }

    /// Takes one quick look. Call it every [`LOOK_EVERY`].
    ///
    /// # Errors
    /// The kernel does not show its sockets.
    pub fn look(&mut self) -> Result<(), Error> {
        self.refresh(None)?;
        if self.sighted.elapsed() >= SIGHT_EVERY {
            self.sample_processes(None)?;
        }
        let sampled = &mut self.sampled;
        sampled.looks += 1;
        for socket in &self.listener.sockets {
            let highest = sampled.queue_highest.entry(socket.cookie).or_default();
            *highest = (*highest).max(socket.queued);
            if socket.queued > 0 {
                *sampled.queue_filled.entry(socket.cookie).or_default() += 1;
            }
        }
        let mut waiting = BTreeSet::new();
        for pid in self.model.workers.clone() {
            match self.doing(pid) {
                WorkerState::Waiting => {
                    waiting.insert(pid);
                    *self.sampled.waiting.entry(pid).or_default() += 1;
                }
                WorkerState::Stopped => *self.sampled.stopped.entry(pid).or_default() += 1,
                _ => {}
            }
        }
        self.beside_queues(&waiting);
        if let Some(contents) = &mut self.contents {
            contents.look(&mut self.sampled.datagrams);
        }
        self.look_for_queued()?;
        self.look_for_unread()
    }

    /// Looks which connections wait at UNIX sockets.
    fn look_for_queued(&mut self) -> Result<(), Error> {
        let sockets = &self.listener.sockets;
        let is_empty = || sockets.iter().all(|socket| socket.queued == 0);
        if self.listener.protocol != Protocol::Unix || self.queued.is_empty() && is_empty() {
            return Ok(());
        }
        let waiting = unix_diag::waiting_at(sockets)
            .map_err(kernel("asking the kernel for the connections that wait"))?;
        let over = self.queued.note(waiting, Instant::now());
        self.sampled.queued.add(&long(over));
        Ok(())
    }

    /// Looks which requests wait in workers.
    fn look_for_unread(&mut self) -> Result<(), Error> {
        let (Protocol::Tcp, Address::Inet(address)) =
            (self.listener.protocol, self.listener.address)
        else {
            return Ok(());
        };
        let began = Instant::now();
        if self.follows || began < self.unread_due {
            return Ok(());
        }
        let unread = diag::unread_at(address)
            .map_err(kernel("asking the kernel for requests that were not read"))?;
        self.sampled.unread.add(&long(self.unread.note(unread)));
        let now = Instant::now();
        self.unread_due = now + ((now - began) * CONNECTIONS_SHARE).max(UNREAD_EVERY);
        Ok(())
    }

    /// The state of a worker. A thread in epoll or poll may wait for something else than the listener: of a worker that was
    /// seen to wait for the listener, and of all while connections wait, only that counts as waiting. The others wait for a
    /// mutex around accept, or to be handed connections.
    fn doing(&self, worker: u32) -> WorkerState {
        let process = self.threads.get(&worker);
        let place = self.places.get(process.unwrap_or(&worker));
        let filled = || self.listener.sockets.iter().any(|s| s.queued > 0);
        let is_sure = self.listener.protocol == Protocol::Udp
            || self.model.shape != Shape::Mutex
                && self.acceptors.contains(process.unwrap_or(&worker));
        match (place, process) {
            (Some(place), Some(_)) => place.doing_of_thread(worker),
            (Some(place), None) if is_sure || filled() => place.doing(worker),
            _ => doing::doing(worker),
        }
    }

    /// Follows the sockets, and the workers of each: at once if a socket was opened or closed or a process ended,
    /// else once in `every`. Returns whether it took a new sample. Without one it costs some 30 µs, much less than
    /// [`Watcher::look`], which also asks for the state of each worker. `moment`: all is as it was then.
    ///
    /// # Errors
    /// The kernel does not show its sockets.
    pub fn follow(&mut self, every: Duration, moment: Option<&Moment>) -> Result<bool, Error> {
        self.follows = true;
        let before = self.sights;
        self.refresh(moment)?;
        let ended = self.lost_a_process();
        let since = self.sighted.elapsed();
        let is_read = |moment: &Moment| self.pids.iter().all(|pid| moment.sights.has(*pid));
        let is_due =
            ended || since >= every || since >= every.mul_f64(EARLY) && moment.is_some_and(is_read);
        if self.sights == before && is_due {
            self.sample_processes(moment)?;
        }
        Ok(self.sights != before)
    }

    /// Searches all processes for the holders of its sockets. A process may have opened one while the last search ran.
    pub fn search_holders(&mut self) {
        let inodes = self.listener.sockets.iter().map(|s| s.inode).collect();
        self.searched.clear();
        self.search(&inodes);
        self.stale = true;
    }

    /// Whether one of its processes ended since the last sample. It costs one system call.
    pub fn lost_a_process(&mut self) -> bool {
        self.stale |= self.exits.take();
        self.stale
    }

    /// Counts queues behind workers that are all busy, and workers that wait beside them.
    fn beside_queues(&mut self, waiting: &BTreeSet<u32>) {
        let mut idle: BTreeSet<u32> = BTreeSet::new();
        for socket in &self.listener.sockets {
            let serves = self
                .serves
                .get(&socket.cookie)
                .map_or(&[][..], Vec::as_slice);
            let others: Vec<u32> = waiting
                .iter()
                .copied()
                .filter(|pid| !serves.contains(pid))
                .collect();
            // Of threads with a socket each, one that is busy since before was not seen to wait for its own.
            let is_served = !serves.is_empty() || self.model.shape == Shape::SocketPerThread;
            let blocked = socket.queued > 0
                && is_served
                && !serves.iter().any(|pid| waiting.contains(pid))
                && !others.is_empty();
            if !blocked {
                self.blocked_since.remove(&socket.cookie);
                continue;
            }
            let since = self
                .blocked_since
                .entry(socket.cookie)
                .or_insert_with(Instant::now);
            if since.elapsed() >= BLOCKED_AFTER {
                *self.sampled.blocked_queue.entry(socket.cookie).or_default() += 1;
                idle.extend(others);
            }
        }
        for pid in idle {
            *self.sampled.idle_beside_queue.entry(pid).or_default() += 1;
        }
    }

    /// Takes a snapshot of everything.
    ///
    /// # Errors
    /// The kernel does not show its sockets.
    pub fn snapshot(&mut self) -> Result<Snapshot, Error> {
        self.refresh(None)?;
        let active = |pid: u32| {
            let process = self.last().iter().find(|p| p.pid == pid);
            process.map_or(0, |p| p.connections)
        };
        let worker = |pid: &u32| {
            let process = self.threads.get(pid);
            let look = match process {
                Some(_) => counters::thread(*pid)?,
                None => counters::worker(*pid)?,
            };
            let waiting = self.doing(*pid) == WorkerState::Waiting;
            let active = active(*process.unwrap_or(pid));
            Some((
                *pid,
                WorkerLook {
                    waiting,
                    active,
                    ..look
                },
            ))
        };
        Ok(Snapshot {
            at_ns: schedule::monotonic_ns(),
            workers: self.model.workers.iter().filter_map(worker).collect(),
            trace: self.trace()?,
            host: counters::host(None),
            waiting: self.waiting()?,
            listener: self.listener.clone(),
        })
    }

    /// How long the connections that wait now have waited.
    fn waiting(&mut self) -> Result<Option<Waits>, Error> {
        if self.listener.protocol == Protocol::Unix {
            return Ok(self.queued.are_known().then(|| long(self.queued.ages())));
        }
        let (Protocol::Tcp, Address::Inet(address)) =
            (self.listener.protocol, self.listener.address)
        else {
            return Ok(None);
        };
        if self
            .listener
            .sockets
            .iter()
            .all(|socket| socket.queued == 0)
        {
            self.waiting = Waits::default();
        } else if self.waiting_due <= Instant::now() {
            let began = Instant::now();
            let waits = diag::waits_at(address)
                .map_err(kernel("asking the kernel for the connections that wait"))?;
            self.waiting = long(waits);
            self.waiting_due = Instant::now() + began.elapsed() * WAITING_SHARE;
        }
        Ok(Some(self.waiting.clone()))
    }

    fn trace(&self) -> Result<Option<TraceLook>, Error> {
        let Some(probe) = &self.probe else {
            return Ok(None);
        };
        let counts = probe.read().map_err(kernel("reading the probes"))?;
        let worker = |(pid, seen): (&u32, &wakeone_bpf::probe::Worker)| {
            let trace = WorkerTrace {
                accepted: seen.accepted,
                accepted_empty: seen.accepted_empty,
                woken: seen.woken,
                waits: seen.waits.clone().trimmed(),
                overlapping: seen.overlapping,
                held: seen.held.clone().trimmed(),
            };
            (*pid, trace)
        };
        Ok(Some(TraceLook {
            connections: counts.connections,
            wakeups: counts.wakeups,
            workers: counts.workers.iter().map(worker).collect(),
            gaps: probe.gaps(),
        }))
    }

    /// The observations since the start, or since the last [`Watcher::restart`].
    ///
    /// # Errors
    /// The kernel does not show its sockets.
    pub fn watch(&mut self) -> Result<Watch, Error> {
        self.connections_due = Instant::now();
        self.waiting_due = Instant::now();
        self.sample_processes(None)?;
        let last = self.snapshot()?;
        let mut sampled = self.sampled.clone();
        sampled.unread.add(&long(self.unread.ages()));
        let mut watch = self.sum(self.first.clone(), last, sampled);
        // Of others nobody asks.
        if watch.is_quic() == Some(true) && watch.last.listener.sockets.len() > 1 {
            let missing = &mut watch.view.missing;
            watch.has_program = contents::has_program(&watch.last.listener, missing);
        }
        Ok(watch)
    }

    /// The observations since the start or the last lap, like [`Watcher::watch`]. The next lap begins where this one
    /// ends, so that no connection falls between two.
    ///
    /// # Errors
    /// The kernel does not show its sockets.
    pub fn lap(&mut self) -> Result<Watch, Error> {
        self.sample_processes(None)?;
        let last = self.snapshot()?;
        let first = std::mem::replace(&mut self.first, last.clone());
        let sampled = std::mem::take(&mut self.sampled);
        Ok(self.sum(first, last, sampled))
    }

    fn sum(&self, first: Snapshot, last: Snapshot, sampled: Sampled) -> Watch {
        Watch {
            model: self.model.clone(),
            first,
            last,
            sampled,
            serves: self.serves.clone(),
            threads: self.threads.clone(),
            pools: self.pools,
            ungrouped: self.ungrouped,
            keeps: self.keeps.clone(),
            reuseport: self.reuseport,
            steered: None,
            has_program: None,
            affinity: None,
            heavy_flows: 0,
            orphans: Vec::new(),
            view: self.view.clone(),
        }
    }
}

fn attach(listener: &Listener, tracing: bool, view: &mut View) -> Option<Probe> {
    if listener.protocol == Protocol::Udp {
        return None;
    }
    let Some(port) = listener.address.port() else {
        view.missing.push(
            "the probes know TCP only: of a UNIX socket, connections taken, wake-ups and waits below 10 ms are not known".into(),
        );
        return None;
    };
    if !tracing {
        view.missing.push(
            "tracing was not asked for: connections taken, wake-ups and waits in the queue are not known".into(),
        );
        return None;
    }
    match Probe::attach(port) {
        Ok(probe) => {
            view.tracing = true;
            view.missing.extend_from_slice(probe.missing());
            Some(probe)
        }
        Err(error) => {
            let missing = capability::missing_of(capability::TRACING);
            let why = if missing.is_empty() {
                error.to_string()
            } else {
                format!("it needs {}", missing.join(", "))
            };
            view.missing.push(format!(
                "the kernel's tracepoints may not be used ({why}): connections taken, wake-ups and waits in the queue are not known"
            ));
            None
        }
    }
}

/// Whether SO_REUSEPORT is set. Asks a duplicate of the descriptor, which is closed at once.
fn reuseport(found: &Found) -> Option<bool> {
    let inodes: HashSet<u64> = found.listener.sockets.iter().map(|s| s.inode).collect();
    found.pids.iter().find_map(|pid| {
        let sockets = process::sockets_of(*pid).ok()?;
        let (fd, _) = sockets.into_iter().find(|s| inodes.contains(&s.1))?;
        let socket = process::descriptor_of(*pid, fd).ok()?;
        rustix::net::sockopt::socket_reuseport(&socket).ok()
    })
}

/// Begins to watch several listeners side by side, which takes no longer than one.
///
/// # Errors
/// The kernel does not show its sockets.
pub fn start_all(found: &[Found], tracing: bool) -> Result<Vec<Watcher>, Error> {
    let new = |found| Watcher::new(found, tracing);
    begin(found.iter().map(new).collect())
}

fn begin(mut watchers: Vec<Watcher>) -> Result<Vec<Watcher>, Error> {
    for sighting in 0..FIRST_SIGHTINGS {
        if sighting > 0 {
            std::thread::sleep(FIRST_APART);
        }
        let moment = Moment::at(0);
        for watcher in &mut watchers {
            watcher.connections_due = Instant::now();
            watcher.sample_processes(Some(&moment))?;
        }
    }
    for watcher in &mut watchers {
        watcher.restart()?;
    }
    Ok(watchers)
}

/// Watches several listeners side by side for a while; stops early once `cancelled` says so. Where threads have sockets of
/// their own, they are the workers. The first bytes of datagrams are looked at.
///
/// # Errors
/// The kernel does not show its sockets.
pub fn watch_all(
    found: &[Found],
    tracing: bool,
    duration: Duration,
    cancelled: &mut dyn FnMut() -> bool,
) -> Result<Vec<Watch>, Error> {
    let new = |found: &Found| {
        let mut watcher = Watcher::new(found, tracing);
        watcher.by_thread = true;
        let contents = Contents::of(&found.listener, tracing, &mut watcher.view);
        watcher.contents = Some(contents);
        watcher
    };
    let mut watchers = begin(found.iter().map(new).collect())?;
    let end = Instant::now() + duration;
    let mut next = Instant::now();
    while Instant::now() < end && !cancelled() {
        for watcher in &mut watchers {
            watcher.look()?;
        }
        next += LOOK_EVERY;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        // If we cannot keep up, the missed looks are skipped.
        next = next.max(Instant::now());
    }
    watchers.iter_mut().map(Watcher::watch).collect()
}
