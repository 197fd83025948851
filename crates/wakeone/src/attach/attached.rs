//! A server that is steered from outside, and followed as its sockets come and go.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use wakeone_bpf::Pinned;
use wakeone_bpf::chooser::Choosers;
use wakeone_bpf::notices::Notices;
use wakeone_bpf::recount::{CountIn, Recounted};
use wakeone_kernel::proc::doing::{self, WorkerState};
use wakeone_kernel::proc::{process, waits};
use wakeone_kernel::socket::diag::{self, Which};
use wakeone_kernel::{capability, cgroup};
use wakeone_model::address::Address;
use wakeone_model::listener::Protocol;
use wakeone_observe::{Moment, Watcher};

use super::candidate::{AttachCandidate, Member, cookies, members, needed, refuse_foreign};
use super::config::AttachConfig;
use super::error::Error;
use super::pace::{Pace, QUIET_WORKERS};
use super::recount::{Attempts, count_in, slots_of_workers};
use crate::metrics::Source;
use crate::steered::{Origin, SocketPlace, SteeredGroup};
use wakeone_control::paths::Paths;
use wakeone_control::policy::{Affinity, Policy};
use wakeone_control::privileges::{self, FOR_LOADING};
use wakeone_control::state::StateError;
use wakeone_control::steer::SteerEvent;
use wakeone_steering::agent::{Agent, AgentConfig, Rounds};
use wakeone_steering::dispatcher::{Dispatcher, Plan};

/// A steered server of others.
pub struct Attached {
    address: SocketAddr,
    group: SteeredGroup,
    watcher: Watcher,
    weights: Vec<(usize, u32)>,
    /// How a worker is chosen: as asked for, or by a policy without counts if connections cannot be counted.
    pub policy: Policy,
    /// Connections counted in at the start, and open ones that could not be counted.
    pub recounted: Recounted,
    /// Sockets came that may have had connections before: those are to be counted in.
    late: Option<Attempts>,
    /// The program that does so; `None` if nothing is counted.
    count_in: Option<CountIn>,
    /// Shows whether our program is still the group's, and when it was last asked.
    choosers: Choosers,
    asked: Instant,
    /// When all processes were last searched for the holder of a socket.
    searched: Instant,
    pace: Pace,
    /// Tells at once that sockets changed; `None` if the programs of an earlier build steer.
    notices: Option<Notices>,
    opening: Option<Opening>,
    /// Since when it has none of the sockets that its program was attached to.
    emptied: Option<Instant>,
    /// The users of its sockets.
    owners: HashSet<u32>,
    /// The changes that the programs had seen at the last look, and the sockets that were there.
    changes: u32,
    seen: HashSet<u64>,
    /// The last look saw new sockets.
    saw_new: bool,
    /// Until when the programs do not look for sockets.
    deaf_until: Option<Instant>,
    /// A socket could not be given a slot. The next look tries again.
    unsettled: bool,
    /// Sockets whose worker was seen to be gone, and since when, until another was seen.
    left: BTreeMap<u64, Instant>,
    /// Those of them that got none in time.
    bereft: HashSet<u64>,
}

/// How often to look which processes serve a group that gets connections.
const WORKERS_EVERY: Duration = Duration::from_millis(500);
/// How often to search all processes for the holder of a socket that none is known of.
const SEARCH_EVERY: Duration = Duration::from_millis(250);
/// How long the programs look for no sockets after a false alarm. A new one of the server is seen at the next look then.
const DEAF: Duration = Duration::from_secs(1);
/// How long a server takes from one socket to the next, and to open all.
pub(super) const BETWEEN_SOCKETS: Duration = Duration::from_millis(20);
const OPENING: Duration = Duration::from_millis(100);
/// A server that has just opened sockets starts its workers, and needs the CPUs for that. To count what the sockets had
/// before means a walk over all connections of the machine, some milliseconds, so it waits until then.
const CALM: Duration = Duration::from_millis(500);
/// A server that has closed its last socket opens others in less if it goes on. Its programs stay loaded meanwhile.
const LINGER: Duration = Duration::from_secs(1);
/// How often to look whether the server has set another program, and while no connection comes.
const CHOOSER_EVERY: Duration = Duration::from_secs(1);
const QUIET_CHOOSER: Duration = Duration::from_secs(8);
/// After the end of a worker: for how long to look for its successor each time.
const SUCCESSOR_WITHIN: Duration = Duration::from_secs(1);
/// A server that replaces its workers has the next ones accept in less: they may be busy at one look.
const HANDOVER: Duration = Duration::from_millis(100);
/// Why a group is to be followed.
#[derive(Debug, Clone, Copy)]
pub struct Due {
    /// No connection came for a while.
    quiet: bool,
    /// The sockets that the programs had seen to change.
    changes: u32,
}

/// The result of following a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// It is there.
    Here,
    /// All its sockets are closed, or others have them.
    Gone,
}

impl Attached {
    /// Steers a listener from now on. `address`: the candidate's. `command`: see [`Origin::of_server`]. `rounds`
    /// look at it.
    ///
    /// # Errors
    /// See [`Error`]; nothing is left attached or pinned then.
    pub fn start(
        candidate: AttachCandidate,
        address: SocketAddr,
        config: &AttachConfig,
        paths: &Paths,
        command: &[String],
        rounds: &Rounds,
    ) -> Result<Self, Error> {
        if candidate.protocol() == Protocol::Udp && config.rescue {
            return Err(Error::Unfit {
                address: Address::from(address).into(),
                why: "what waits in a UDP socket cannot be moved; without --rescue a worker that is stuck gets no datagrams while others are well".into(),
                advice: String::new(),
            });
        }
        let network = candidate.network.clone();
        let origin = Origin::of_server(candidate.protocol(), address.into(), network, command);
        let mut group = SteeredGroup::take(&paths.runtime, &candidate.name, origin)?;
        // Without pins an earlier agent was killed before it attached anything.
        let kept = group.was_attached()? && paths.group_pins(&candidate.name).exists();
        if !kept {
            // Before anything is attached, so that `detach` and the next `attach` know of it if we are killed.
            group.store().inspect_err(|_| group.forget_state())?;
        }
        let loaded = capability::with(&FOR_LOADING, || {
            load(&candidate, address, config, paths, kept)
        });
        let Loaded {
            dispatcher,
            recounted,
            count_in,
            choosers,
        } = loaded.inspect_err(|_| {
            if !kept {
                group.forget_state();
            }
        })?;
        // Before the agent's thread starts: it has what we have now.
        privileges::keep_for_attaching();
        let policy = dispatcher.policy();
        let notices = capability::with(&FOR_LOADING, || notices(&dispatcher, address));
        let tasks = AgentConfig {
            rescue: config.rescue,
            stuck_after: config.stuck_after,
        };
        let sockets = candidate
            .members
            .iter()
            .map(|m| (m.cookie, m.remote, m.worker()));
        group.steer(dispatcher, tasks, paths, rounds, sockets);
        for member in &candidate.members {
            group.accompany(member.cookie, member.workers.clone());
        }
        if let Err(error) = group.store() {
            group.end();
            return Err(error.into());
        }
        let sockets = candidate.watcher.listener().sockets.iter();
        let owners = sockets.map(|socket| socket.uid).collect();
        Ok(Self {
            address,
            group,
            watcher: candidate.watcher,
            weights: config.weights.clone(),
            policy,
            recounted,
            late: None,
            count_in,
            choosers,
            asked: Instant::now(),
            searched: Instant::now(),
            pace: Pace::new(),
            notices,
            changes: 0,
            seen: HashSet::new(),
            saw_new: false,
            opening: None,
            emptied: None,
            owners,
            deaf_until: None,
            unsettled: false,
            left: BTreeMap::new(),
            bereft: HashSet::new(),
        })
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        self.group.name()
    }

    /// Returns why the group has to be followed now, if it has.
    pub fn due(&mut self) -> Option<Due> {
        let now = Instant::now();
        let placed = self.group.agent().map_or(0, Agent::placed);
        let quiet = self.pace.is_quiet(placed, now);
        let ended = self.watcher.lost_a_process();
        self.group.look_for_orphans(ended);
        let noticed = self.note_sockets(now);
        let changes = self.group.changes();
        self.hear_again(now);
        // Something is to be done in a moment, even if no connection comes.
        let awaits = self.emptied.is_some()
            || self.unsettled
            || self.late.is_some()
            || !self.left.is_empty();
        let notices = self.notices.is_some() && self.protocol() == Protocol::Tcp;
        let by_time = self.pace.is_due(quiet, notices, now);
        let is_due = noticed || ended || awaits || by_time;
        (is_due && !self.is_opening()).then_some(Due { quiet, changes })
    }

    /// The same for a group that is not due, where others are: as they are followed anyway, this one costs less now.
    pub fn due_with_others(&mut self) -> Option<Due> {
        let quiet = self.pace.was_quiet();
        let may = !self.is_opening() && self.pace.is_due_with_others(Instant::now());
        let changes = self.group.changes();
        may.then_some(Due { quiet, changes })
    }

    /// Follows the group: sockets that came or went, workers that ended or took over. `moment`: one after
    /// [`Attached::due`].
    ///
    /// # Errors
    /// When the kernel does not show its sockets, or the state cannot be written.
    pub fn follow(&mut self, due: Due, moment: &Moment) -> Result<Presence, Error> {
        let Due { quiet, changes } = due;
        let now = Instant::now();
        let choosers_every = match quiet {
            true => QUIET_CHOOSER,
            false => CHOOSER_EVERY,
        };
        if now.duration_since(self.asked) >= choosers_every {
            self.asked = now;
            self.see_chooser(Some(&moment.listening));
        }
        let lately = self.left.values().max();
        let workers_every = match lately {
            Some(at) if now.duration_since(*at) < SUCCESSOR_WITHIN => Duration::ZERO,
            _ if self.unsettled => Duration::ZERO,
            _ if quiet => QUIET_WORKERS,
            _ => WORKERS_EVERY,
        };
        let mut seen_anew = self.watcher.follow(workers_every, Some(moment))?;
        let mut there = cookies(&self.watcher);
        if self.group.cookies().any(|cookie| !there.contains(&cookie)) {
            // A socket whose queue is being moved does not listen for a moment. So a socket is gone only if it is
            // missing between two looks of the agent.
            let watcher = &mut self.watcher;
            seen_anew |= self
                .group
                .between_looks(|| watcher.follow(workers_every, None))?;
            there = cookies(&self.watcher);
        }
        self.note_false_alarm(changes, &there, now);
        let mut gone: Vec<u64> = self.group.cookies().collect();
        gone.retain(|cookie| !there.contains(cookie) && !self.group.is_left_closed(*cookie));
        let mut changed = !gone.is_empty();
        for cookie in gone {
            self.group.leave(cookie);
            self.left.remove(&cookie);
            self.bereft.remove(&cookie);
        }
        if self.group.cookies().next().is_none() {
            let since = *self.emptied.get_or_insert(now);
            let is_gone = there.is_empty() && now.duration_since(since) >= LINGER;
            // The next server there may be somebody else's, and the agent was not told to steer that.
            if is_gone || !self.has_its_owners() {
                return Ok(Presence::Gone);
            }
        }
        // Finding the holders of sockets means reading all their descriptors.
        if seen_anew || self.unsettled {
            self.unsettled = false;
            let members = members(&self.watcher);
            let unheld = members.len() < self.watcher.listener().sockets.len();
            self.group.hold_back();
            for member in members {
                changed |= self.settle(&member);
            }
            self.group.let_in();
            if unheld {
                self.unsettled = true;
                if self.searched.elapsed() >= SEARCH_EVERY {
                    self.watcher.search_holders();
                    self.searched = Instant::now();
                }
            }
        }
        self.attach_anew();
        self.group.see_changes(changes);
        if changed {
            self.group.keep();
        }
        self.group.catch_up();
        self.count_in_late();
        Ok(Presence::Here)
    }

    /// Whether all its sockets are of the users that it had.
    fn has_its_owners(&self) -> bool {
        let mut sockets = self.watcher.listener().sockets.iter();
        sockets.all(|socket| self.owners.contains(&socket.uid))
    }

    /// Attaches the program to the sockets of a server that had closed all others: they are another group, without it.
    fn attach_anew(&mut self) {
        if self.emptied.is_none() || self.group.cookies().next().is_none() {
            return;
        }
        let Some(agent) = self.group.agent() else {
            return;
        };
        let attach = || -> Result<(), Box<dyn std::error::Error>> {
            let seen = self.choosers.look(None)?;
            let has_program = |cookie| {
                let mut of = seen.iter().filter(|one| one.cookie == cookie);
                of.any(|one| one.program.is_some())
            };
            // It may have set one of its own.
            if !self.group.cookies().any(has_program) {
                agent.with_dispatcher(|dispatcher| dispatcher.attach_all())?;
            }
            Ok(())
        };
        match capability::with(&FOR_LOADING, attach) {
            Ok(()) => self.emptied = None,
            Err(error) => {
                tracing::debug!("{}: new sockets are not steered yet: {error}", self.address);
                self.unsettled = true;
            }
        }
        self.see_chooser(None);
    }

    /// Returns the notices of changed sockets, if the programs write any. They stay until the next
    /// [`Attached::follow`].
    pub fn notices(&self) -> Option<&Notices> {
        self.notices.as_ref()
    }

    /// Whether its server is opening sockets. Until it has all, no look is taken.
    pub fn is_opening(&self) -> bool {
        self.opening.is_some()
    }

    /// Takes the notices. Returns whether there were some, and no more come.
    fn note_sockets(&mut self, now: Instant) -> bool {
        if self.notices.as_ref().is_some_and(Notices::take) {
            let first = self.opening.as_ref().map_or(now, |opening| opening.first);
            self.opening = Some(Opening { first, last: now });
        }
        self.opening
            .take_if(|opening| opening.is_over(now))
            .is_some()
    }

    /// Closes the programs' ears for a while if a socket was noticed that is none of the group's: at the same port of another
    /// address or network, where anybody may open one after the other. The kernel's hash chooses until we have looked.
    fn note_false_alarm(&mut self, changes: u32, there: &HashSet<u64>, now: Instant) {
        let is_new = there.iter().any(|cookie| !self.seen.contains(cookie));
        self.seen.clone_from(there);
        // The last look may have seen a socket that was counted only after the look had read the number.
        let is_known = is_new | std::mem::replace(&mut self.saw_new, is_new);
        if std::mem::replace(&mut self.changes, changes) != changes && !is_known {
            self.deaf_until = Some(now + DEAF);
            self.group.notice(0);
        }
    }

    fn hear_again(&mut self, now: Instant) {
        if self.deaf_until.take_if(|until| now >= *until).is_some() {
            self.group.notice(self.address.port());
        }
    }

    /// Looks whether our program is still the group's.
    fn see_chooser(&self, listening: Option<&diag::Listening>) {
        let seen = capability::with(&FOR_LOADING, || self.choosers.look(listening));
        let Some(agent) = self.group.agent() else {
            return;
        };
        match seen {
            Ok(seen) => agent.see_choosers(&seen),
            Err(error) => tracing::debug!("which program chooses cannot be seen: {error}"),
        }
    }

    /// Counts in what sockets that came later had before they got their slots.
    fn count_in_late(&mut self) {
        let (Some(late), Some(agent)) = (&mut self.late, self.group.agent()) else {
            return;
        };
        if !late.is_due() {
            return;
        }
        let members = members(&self.watcher);
        let counted = agent.see_dispatcher(|d| d.counting().then(|| slots_of_workers(d, &members)));
        let Some((slots, program)) = counted.zip(self.count_in.as_ref()) else {
            self.late = None;
            return;
        };
        let attempt = || late.attempt(program, self.address, &members, &slots);
        if let Some(done) = capability::with(&FOR_LOADING, attempt) {
            self.late = None;
            tracing::debug!("{}: what new sockets had before: {done:?}", self.address);
        }
    }

    /// Gives a socket its slot, or notes who serves it now. Returns whether anything changed.
    fn settle(&mut self, member: &Member) -> bool {
        let before = self.group.place_of(member.cookie);
        let worker = self.worker_of(member, before);
        let changed = self.place(member, before, worker);
        let beside = match self.bereft.contains(&member.cookie) {
            true => &member.holders,
            false => &member.workers,
        };
        self.group.accompany(member.cookie, beside.clone());
        changed
    }

    /// Returns who serves a socket now. If nobody was seen waiting for a while, the previous worker is as likely as any,
    /// unless it is gone: a process that only holds the socket does not serve it then.
    fn worker_of(&mut self, member: &Member, before: Option<SocketPlace>) -> Option<u32> {
        let previous = before.and_then(|before| before.worker);
        let seen = member.worker().filter(|_| member.awaited);
        match previous {
            Some(pid) if member.workers.contains(&pid) => previous,
            Some(pid) => seen.or_else(|| previous.filter(|_| !self.is_deserted(member, pid))),
            None if self.bereft.contains(&member.cookie) => seen,
            None => member.worker(),
        }
    }

    /// Whether a socket's worker is gone, and no other came in time.
    fn is_deserted(&mut self, member: &Member, worker: u32) -> bool {
        let inode = member.remote.inode;
        if !has_left(worker, inode) {
            return false;
        }
        let since = *self.left.entry(member.cookie).or_insert_with(Instant::now);
        let waits = |pid: &u32| doing::doing_below(*pid, &[inode]) == WorkerState::Waiting;
        since.elapsed() >= HANDOVER && !member.holders.iter().any(waits)
    }

    /// Gives a socket its slot, with this worker.
    fn place(&mut self, member: &Member, before: Option<SocketPlace>, worker: Option<u32>) -> bool {
        if before.is_some_and(|before| (before.remote, before.worker) == (member.remote, worker)) {
            return false;
        }
        if let Some(before) = before.filter(|before| worker.is_none() || before.worker == worker) {
            self.group.lend(member.cookie, member.remote);
            if before.worker != worker {
                self.group.bereave(member.cookie, member.holders.clone());
                self.bereft.insert(member.cookie);
            }
            return true;
        }
        self.left.remove(&member.cookie);
        self.bereft.remove(&member.cookie);
        if let Err(error) = self.group.assign(member.cookie, member.remote, worker) {
            tracing::debug!("a new socket is not steered yet: {error}");
            self.unsettled = true;
            return false;
        }
        if before.is_none() {
            self.late = Some(Attempts::after(CALM));
            self.weigh();
        }
        true
    }

    /// Whether no connection came to it for a while.
    pub fn is_quiet(&self) -> bool {
        self.pace.was_quiet()
    }

    /// The address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its protocol.
    pub fn protocol(&self) -> Protocol {
        self.watcher.listener().protocol
    }

    /// Chooses by another policy from now on, if it fits the sockets.
    pub fn set_policy(&self, policy: Policy) {
        let affinity = self
            .group
            .agent()
            .and_then(|agent| agent.with_table(Affinity::of));
        if let Some(affinity) = affinity
            && let Err(why) = policy.fits_datagrams(affinity)
        {
            tracing::warn!("{} stays as it is: {why}", self.name());
            return;
        }
        if let Some(agent) = self.group.agent() {
            agent.with_dispatcher(|dispatcher| dispatcher.set_policy(policy));
        }
    }

    /// Sets the weights of slots; those not named get 1.
    pub fn set_weights(&mut self, weights: Vec<(usize, u32)>) {
        self.weights = weights;
        self.weigh();
    }

    fn weigh(&self) {
        if let Some(agent) = self.group.agent() {
            agent.with_dispatcher(|dispatcher| dispatcher.weigh(&self.weights));
        }
    }

    /// Returns the source of its metrics.
    pub fn source(&self, paths: &Paths, tracing: bool) -> Source {
        capability::with(&FOR_LOADING, || self.group.source(paths, tracing))
    }

    /// Returns the events since the last call, with moves summed up for the log.
    pub fn events(&mut self) -> Vec<SteerEvent> {
        self.group.events()
    }

    /// Detaches our program and removes all else; the kernel's hash chooses again.
    pub fn end(self) {
        self.see_chooser(None);
        self.group.end();
    }

    /// The same for a server that has ended. Returns the group, which shows that the next one is waited for.
    ///
    /// # Errors
    /// That cannot be written.
    pub fn rest(self) -> Result<SteeredGroup, StateError> {
        self.see_chooser(None);
        self.group.rest()
    }
}

/// Asks the programs to tell of changed sockets. Without notices a socket is seen at the next look.
fn notices(dispatcher: &Dispatcher, address: SocketAddr) -> Option<Notices> {
    let port = u32::from(address.port());
    dispatcher.table().port().store(port, Relaxed);
    Notices::of(dispatcher.pinned().dir())
        .inspect_err(|error| tracing::debug!("new sockets are noticed late: {error}"))
        .ok()
}

/// A server opens its sockets one after the other: when the first and the last of them were noticed.
struct Opening {
    first: Instant,
    last: Instant,
}

impl Opening {
    /// Whether no more will come, as far as can be told.
    fn is_over(&self, now: Instant) -> bool {
        now.duration_since(self.last) >= BETWEEN_SOCKETS
            || now.duration_since(self.first) >= OPENING
    }
}

/// Whether a process is gone, or has closed a socket. One that may not be looked at counts as there.
fn has_left(pid: u32, inode: u64) -> bool {
    match process::sockets_of(pid) {
        Ok(held) => held.iter().all(|(_, held)| *held != inode),
        Err(_) => waits::identity(pid).is_none(),
    }
}

/// Returns a cgroup where the connections of all its listeners are seen: these were made in any cgroup.
fn counting_cgroup(address: SocketAddr) -> io::Result<PathBuf> {
    let listening = diag::sockets_at(Protocol::Tcp, Which::Listening, address)?;
    let here = listening.iter().filter(|one| one.local == address);
    cgroup::covering(&here.map(|one| one.cgroup).collect())
}

/// The programs of a server, and what was found when they were loaded.
struct Loaded {
    dispatcher: Dispatcher,
    recounted: Recounted,
    count_in: Option<CountIn>,
    choosers: Choosers,
}

/// Loads the program, or finds the one of an earlier agent. Attaches it, and counts in open connections.
fn load(
    candidate: &AttachCandidate,
    address: SocketAddr,
    config: &AttachConfig,
    paths: &Paths,
    kept: bool,
) -> Result<Loaded, Error> {
    let pins = paths.group_pins(&candidate.name);
    let choosers = refuse_foreign(candidate, address, |seen| {
        // Pins that cannot be read do not tell which program is ours.
        let chooses = |pinned: Pinned| pinned.chooses(seen) == Some(true);
        kept && Pinned::open(&pins).map_or(true, chooses)
    })?;
    let root = counting_cgroup(address);
    let unseen = root.as_ref().err().map(|why| format!("{why}"));
    let plan = Plan {
        by_name: config.policy.is_some(),
        weights: &config.weights,
        cgroup: root.as_deref().ok(),
        no_cgroup: unseen.as_deref(),
        adopt: kept,
        datagrams: (candidate.protocol() == Protocol::Udp).then_some(config.affinity),
        earlier_flows: true,
        ..Plan::new(
            &candidate.name,
            paths,
            config.policy_of(candidate.protocol()),
        )
    };
    let remote = candidate.members.iter().map(|m| (m.cookie, m.remote));
    let dispatcher =
        Dispatcher::start_beside(&plan, remote.collect()).map_err(|error| {
            match error.is_load() {
                true => Error::Load {
                    source: error,
                    needed: needed(),
                },
                false => error.into(),
            }
        })?;
    let (recounted, count_in) = match root {
        Ok(cgroup) if dispatcher.counting() => {
            let slots = slots_of_workers(&dispatcher, &candidate.members);
            count_in((&pins, &cgroup), address, &candidate.members, &slots)
        }
        _ => (Recounted::default(), None),
    };
    Ok(Loaded {
        dispatcher,
        recounted,
        count_in,
        choosers,
    })
}
