//! Steers a server that runs already and does not know of it: its reuseport group gets our program, its open
//! connections are counted in, and its sockets are followed as they come and go.
//!
//! Wakeone keeps nothing of the server: it borrows a listener for a moment when something must be done to it. Detaching
//! takes off what was attached, and the group is as before.

use std::collections::{BTreeMap, HashSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use wakeone_kernel::recount::{self, Callbacks, Uncounted};
use wakeone_kernel::{capability, cgroup, diag, process};
use wakeone_model::accept::Shape;
use wakeone_model::advice;
use wakeone_model::listener::{Protocol, Socket};
use wakeone_observe::{Found, Watcher};

use crate::agent::{Agent, AgentConfig};
use crate::dispatcher::{self, Dispatcher, Plan};
use crate::metrics::Source;
use crate::paths::Paths;
use crate::policy::{Affinity, Policy};
use crate::privileges::{self, FOR_LOADING};
use crate::slot_sockets::RemoteFd;
use crate::steer::SteerEvent;
use crate::steered::{Origin, SteeredGroup};
use crate::supervisor::listen::Endpoint;
use crate::supervisor::state::StateError;

/// Why a listener is not steered from outside, as one sentence with the way out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The listener does not allow it.
    #[error("cannot steer {address}: {why}")]
    Unfit {
        /// The listener.
        address: SocketAddr,
        /// The reason, and what to do.
        why: String,
    },
    /// It belongs to a user who was not named.
    #[error(
        "{address} is not steered: its socket belongs to user {user}, and without being told only root's servers are steered and your own; if it is to be: attach --owner {user}, or owners = [\"{user}\"] for the target in agent.toml"
    )]
    Owner {
        /// The listener.
        address: SocketAddr,
        /// Name or number of the user who made one of its sockets.
        user: String,
    },
    /// The target means too many listeners.
    #[error(
        "{address} is not steered, nor are {others} others: a target means {MOST_GROUPS} listeners at most; name ADDRESS:PORT"
    )]
    Many {
        /// The first one that is left out.
        address: SocketAddr,
        /// How many more there are.
        others: usize,
    },
    /// Looking at it failed.
    #[error(transparent)]
    Observe(#[from] wakeone_observe::Error),
    /// The kernel refused.
    #[error(transparent)]
    Dispatcher(#[from] dispatcher::Error),
    /// The group's folder is not available, or somebody steers the group already.
    #[error(transparent)]
    State(#[from] StateError),
}

/// A target may mean this many listeners at most. Each has a thread here, and anybody can listen.
pub const MOST_GROUPS: usize = 32;

/// Returns the id of a user given by name or number.
///
/// # Errors
/// There is none of that name.
pub fn user(text: &str) -> Result<u32, String> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    match nix::unistd::User::from_name(text) {
        Ok(Some(user)) => Ok(user.uid.as_raw()),
        _ => Err(format!("there is no user `{text}`")),
    }
}

/// Checks that all sockets of a listener belong to users that are trusted: root, ourselves, and those that were named.
///
/// # Errors
/// [`Error::Owner`], with the first user that is not trusted.
pub fn admit(found: &Found, owners: &[u32]) -> Result<(), (u32, Error)> {
    let own = rustix::process::geteuid().as_raw();
    let trusted = |uid: u32| uid == 0 || uid == own || owners.contains(&uid);
    let mut sockets = found.listener.sockets.iter();
    match sockets.find(|socket| !trusted(socket.uid)) {
        None => Ok(()),
        Some(socket) => {
            let known = nix::unistd::User::from_uid(socket.uid.into())
                .ok()
                .flatten();
            let error = Error::Owner {
                address: found.listener.address,
                user: known.map_or_else(|| socket.uid.to_string(), |user| user.name),
            };
            Err((socket.uid, error))
        }
    }
}

/// The steering that a user wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SteeringConfig {
    /// How a worker is chosen; `None`: least-connections, for UDP shortest-queue.
    pub policy: Option<Policy>,
    /// For UDP: how datagrams of one flow are kept together.
    pub affinity: Affinity,
    /// Move the queues of stuck workers. Datagrams in UDP sockets cannot be moved, and stay.
    pub rescue: bool,
    /// How long connections may wait without one being accepted.
    pub stuck_after: Duration,
    /// Weights of slots whose weight is not 1.
    pub weights: Vec<(usize, u32)>,
}

impl SteeringConfig {
    /// The policy for sockets of this protocol.
    pub fn policy_of(&self, protocol: Protocol) -> Policy {
        self.policy.unwrap_or(match protocol {
            Protocol::Udp => Policy::FOR_DATAGRAMS,
            _ => Policy::default(),
        })
    }
}

/// A socket of the group, and its worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// The socket's cookie.
    pub cookie: u64,
    /// The process to borrow it from.
    pub remote: RemoteFd,
    /// The worker that waits for it, if one was seen.
    pub worker: Option<u32>,
}

/// A listener that can be steered.
pub struct AttachCandidate {
    /// The name that its group will have.
    pub name: String,
    /// Its sockets.
    pub members: Vec<Member>,
    /// Connections open now.
    pub open: usize,
    watcher: Watcher,
}

impl AttachCandidate {
    /// The address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.watcher.listener().address
    }

    /// Its protocol.
    pub fn protocol(&self) -> Protocol {
        self.watcher.listener().protocol
    }
}

/// The group's name for an address: letters, digits and dashes only.
pub fn name_of(protocol: Protocol, address: SocketAddr) -> String {
    let text = address.to_string();
    let plain = text.trim_start_matches('[').replace("]:", "-");
    let protocol = match protocol {
        Protocol::Udp => "udp-",
        _ => "",
    };
    format!("at-{protocol}{}", plain.replace(['.', ':', '%'], "-"))
}

/// Checks whether a listener can be steered, and finds its workers.
///
/// # Errors
/// [`Error::Unfit`] with the reason and the way out.
pub fn examine(found: &Found) -> Result<AttachCandidate, Error> {
    let address = found.listener.address;
    let unfit = |why: String| Error::Unfit { address, why };
    match found.listener.protocol {
        Protocol::Tcp | Protocol::Udp => {}
        Protocol::Mptcp => {
            return Err(unfit(
                "it listens by Multipath TCP, for which the kernel lets no program choose; listen by plain TCP (Go: GODEBUG=multipathtcp=0)".into(),
            ));
        }
    }
    let mut watcher = Watcher::start(found, false)?;
    watcher.look()?;
    let model = watcher.model();
    let name = worker_name(found);
    if found.listener.sockets.len() == 1 && model.shape != Shape::Unknown {
        return Err(unfit(format!(
            "it is one socket ({}: {}), and there is nothing to choose between; start the server by `wakeone run --split`, or give each worker its own: {}",
            model.name(),
            model.describe(),
            advice::own_sockets(&name, &address.to_string())
        )));
    }
    let members = members(&watcher);
    if members.len() < found.listener.sockets.len() {
        return Err(unfit(format!(
            "of its {} sockets {} are held by processes that may not be seen; it takes CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH, or root",
            found.listener.sockets.len(),
            found.listener.sockets.len() - members.len()
        )));
    }
    if members.is_empty() {
        return Err(unfit("nobody was seen to hold its socket".into()));
    }
    let open = if found.listener.protocol == Protocol::Udp {
        0
    } else {
        open_at(address)
    };
    Ok(AttachCandidate {
        name: name_of(found.listener.protocol, address),
        members,
        open,
        watcher,
    })
}

/// Connections open at a listener's address.
fn open_at(address: SocketAddr) -> usize {
    diag::sockets(Protocol::Tcp, diag::Which::Open, address.port()).map_or(0, |open| {
        open.iter().filter(|e| belongs(e, address)).count()
    })
}

/// Whether a connection came in by this listener's address.
fn belongs(entry: &diag::Entry, address: SocketAddr) -> bool {
    entry.local.port() == address.port()
        && (address.ip().is_unspecified() || entry.local.ip() == address.ip())
}

fn worker_name(found: &Found) -> String {
    let name = found
        .pids
        .iter()
        .find_map(|pid| wakeone_kernel::procfs::identity(*pid));
    name.map_or_else(String::new, |identity| identity.name)
}

/// Refuses a group that another program steers: a QUIC or other server's own program must not be replaced.
fn refuse_foreign(candidate: &AttachCandidate) -> Result<(), Error> {
    let (address, members) = (candidate.address(), &candidate.members);
    let udp = candidate.protocol() == Protocol::Udp;
    let cookies = members.iter().map(|m| m.cookie);
    match recount::has_program(address.port(), udp, cookies) {
        Ok(false) => Ok(()),
        Ok(true) => Err(Error::Unfit {
            address,
            why: "another program chooses for its group already (a QUIC server's own, say), and is not replaced; where it is a leftover of ours, `wakeone detach --all` takes it away".into(),
        }),
        Err(error) => Err(Error::Unfit {
            address,
            why: format!(
                "whether another program chooses for it cannot be told: {error}{}",
                needed()
            ),
        }),
    }
}

fn needed() -> String {
    match capability::missing().as_slice() {
        // We have every capability, so it is the kernel that lacks something.
        [] => {
            let kernel = rustix::system::uname();
            let release = kernel.release().to_string_lossy();
            format!("; attach needs Linux 5.17 or later, and this is {release}")
        }
        missing => format!(
            "; it needs {}: start as root or with these capabilities",
            missing.join(" and ")
        ),
    }
}

/// Every socket of the group.
fn cookies(watcher: &Watcher) -> HashSet<u64> {
    let sockets = watcher.listener().sockets.iter();
    sockets.map(|socket| socket.cookie).collect()
}

/// Returns every socket of the group with a process to borrow it from, and its worker.
fn members(watcher: &Watcher) -> Vec<Member> {
    let held: Vec<RemoteFd> = watcher
        .pids()
        .iter()
        .flat_map(|pid| {
            let sockets = process::sockets_of(*pid).unwrap_or_default();
            let remote = |(fd, inode)| RemoteFd {
                pid: *pid,
                fd,
                inode,
            };
            sockets.into_iter().map(remote)
        })
        .collect();
    let member = |socket: &Socket| {
        let worker = watcher.serving(socket.cookie).next();
        let mut holders = held.iter().filter(|remote| remote.inode == socket.inode);
        let first = holders.clone().next();
        // Prefers the worker itself, so that it need not change when the master ends.
        let own = holders.find(|remote| Some(remote.pid) == worker);
        Some(Member {
            cookie: socket.cookie,
            remote: *own.or(first)?,
            worker,
        })
    };
    let sockets = &watcher.listener().sockets;
    sockets.iter().filter_map(member).collect()
}

/// A steered server of others.
pub struct Attached {
    address: SocketAddr,
    group: SteeredGroup,
    watcher: Watcher,
    weights: Vec<(usize, u32)>,
    /// How a worker is chosen: as asked for, or by a policy without counts if connections cannot be counted.
    pub policy: Policy,
    /// Connections counted in at the start, and open ones that could not be counted.
    pub recounted: recount::Recounted,
    /// The uncounted ones that still wait in an accept queue.
    uncounted: Option<Uncounted>,
    pace: Pace,
    /// A socket could not be given a slot. The next look tries again.
    unsettled: bool,
}

/// How often to look which processes serve a group that gets connections.
const SIGHT_EVERY: Duration = Duration::from_millis(500);
/// A group counts as quiet after so long without a connection.
const QUIET_AFTER: Duration = Duration::from_secs(1);
/// How often to look at the sockets of a quiet group, and at its workers. The end of a process is noticed at once.
const QUIET_FOLLOW: Duration = Duration::from_millis(250);
const QUIET_SIGHT: Duration = Duration::from_secs(10);

/// How often a group is looked at: seldom while it gets no connections.
#[derive(Debug)]
struct Pace {
    /// Connections placed in it so far.
    placed: u64,
    changed: Instant,
    followed: Instant,
}

impl Pace {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            placed: 0,
            changed: now,
            followed: now,
        }
    }

    /// Whether no connection came for a while; `placed` is the number so far.
    fn is_quiet(&mut self, placed: u64, now: Instant) -> bool {
        if std::mem::replace(&mut self.placed, placed) != placed {
            self.changed = now;
        }
        now.duration_since(self.changed) >= QUIET_AFTER
    }

    /// Whether it is time to look at the sockets; notes the look as taken.
    fn is_due(&mut self, quiet: bool, now: Instant) -> bool {
        let due = !quiet || now.duration_since(self.followed) >= QUIET_FOLLOW;
        if due {
            self.followed = now;
        }
        due
    }
}

/// The result of following a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// It is there.
    Here,
    /// All its sockets are closed.
    Gone,
}

/// The number of attempts to count in open connections. One accepted during an attempt is found by the next.
const RECOUNTS: usize = 8;

impl Attached {
    /// Steers a listener from now on.
    ///
    /// # Errors
    /// See [`Error`]; nothing is left attached or pinned then.
    pub fn start(
        candidate: AttachCandidate,
        wish: &SteeringConfig,
        paths: &Paths,
    ) -> Result<Self, Error> {
        let address = candidate.address();
        if candidate.protocol() == Protocol::Udp && wish.rescue {
            return Err(Error::Unfit {
                address,
                why: "what waits in a UDP socket cannot be moved; without --rescue a worker that is stuck gets no datagrams while others are well".into(),
            });
        }
        let origin = Origin {
            listen: Endpoint {
                address,
                dual_stack: false,
                udp: candidate.protocol() == Protocol::Udp,
            },
            backlog: 0,
            command: Vec::new(),
            attached: true,
        };
        let mut group = SteeredGroup::take(&paths.runtime, &candidate.name, origin)?;
        let kept = group.was_attached()?;
        let (dispatcher, recounted) =
            capability::with(&FOR_LOADING, || load(&candidate, wish, paths, kept))?;
        // Before the agent's thread starts: it has what we have now.
        privileges::keep_for_attaching();
        let policy = dispatcher.policy();
        let uncounted = capability::with(&FOR_LOADING, || uncounted(&dispatcher));
        let config = AgentConfig {
            rescue: wish.rescue,
            stuck_after: wish.stuck_after,
        };
        let sockets = candidate
            .members
            .iter()
            .map(|m| (m.cookie, m.remote, m.worker));
        group.steer(dispatcher, config, paths, sockets);
        group.store()?;
        Ok(Self {
            address,
            group,
            watcher: candidate.watcher,
            weights: wish.weights.clone(),
            policy,
            recounted,
            uncounted,
            pace: Pace::new(),
            unsettled: false,
        })
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        self.group.name()
    }

    /// Follows the group: sockets that came or went, workers that ended or took over.
    ///
    /// # Errors
    /// When the kernel does not show its sockets, or the state cannot be written.
    pub fn follow(&mut self) -> Result<Presence, Error> {
        let now = Instant::now();
        let placed = self.group.agent().map_or(0, Agent::placed);
        let quiet = self.pace.is_quiet(placed, now);
        if !self.watcher.lost_a_process() && !self.pace.is_due(quiet, now) {
            return Ok(Presence::Here);
        }
        let sight_every = if quiet { QUIET_SIGHT } else { SIGHT_EVERY };
        let mut seen_anew = self.watcher.follow(sight_every)?;
        let mut there = cookies(&self.watcher);
        if self.group.cookies().any(|cookie| !there.contains(&cookie)) {
            // A socket whose queue is being moved does not listen for a moment. So a socket is gone only if it is
            // missing between two looks of the agent.
            let watcher = &mut self.watcher;
            seen_anew |= self.group.between_looks(|| watcher.follow(sight_every))?;
            there = cookies(&self.watcher);
        }
        let gone = |cookie: &u64| !there.contains(cookie);
        let gone: Vec<u64> = self.group.cookies().filter(gone).collect();
        let mut changed = !gone.is_empty();
        for cookie in gone {
            self.group.leave(cookie);
        }
        // Finding the holders of sockets means reading all their descriptors.
        if seen_anew || self.unsettled {
            self.unsettled = false;
            for member in members(&self.watcher) {
                changed |= self.settle(&member);
            }
        }
        if changed {
            self.group.keep();
        }
        self.group.catch_up();
        self.tidy_uncounted();
        Ok(if there.is_empty() {
            Presence::Gone
        } else {
            Presence::Here
        })
    }

    /// Forgets the connections that were not counted and wait no more.
    fn tidy_uncounted(&mut self) {
        let Some(uncounted) = &mut self.uncounted else {
            return;
        };
        match uncounted.tidy(self.address) {
            Ok(false) => {}
            Ok(true) => self.uncounted = None,
            Err(error) => tracing::debug!("looking for uncounted connections failed: {error}"),
        }
    }

    /// Gives a socket its slot, or notes who serves it now. Returns whether anything changed.
    fn settle(&mut self, member: &Member) -> bool {
        let before = self.group.place_of(member.cookie);
        // If no worker was seen waiting for a while, the previous one is as likely as any.
        let worker = member.worker.or(before.and_then(|before| before.worker));
        if before.is_some_and(|before| (before.remote, before.worker) == (member.remote, worker)) {
            return false;
        }
        if before.is_some_and(|before| before.worker == worker) {
            self.group.lend(member.cookie, member.remote);
            return true;
        }
        if let Err(error) = self.group.assign(member.cookie, member.remote, worker) {
            tracing::debug!("a new socket is not steered yet: {error}");
            self.unsettled = true;
            return false;
        }
        if before.is_none() {
            self.weigh();
        }
        true
    }

    /// Whether no connection came to it for a while.
    pub fn is_quiet(&self) -> bool {
        self.pace.changed.elapsed() >= QUIET_AFTER
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
        if self.protocol() == Protocol::Udp
            && let Err(why) = policy.fits_datagrams()
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

    /// Detaches the program and removes all else; the kernel's hash chooses again.
    pub fn end(self) {
        self.group.end();
    }
}

/// Loads the program, or finds the one of an earlier agent. Attaches it, and counts in open connections.
fn load(
    candidate: &AttachCandidate,
    wish: &SteeringConfig,
    paths: &Paths,
    kept: bool,
) -> Result<(Dispatcher, recount::Recounted), Error> {
    if !kept {
        refuse_foreign(candidate)?;
    }
    // Listeners were made in any cgroup, and only the root cgroup sees all of their connections.
    let root = cgroup::mount_point().ok();
    let plan = Plan {
        by_name: wish.policy.is_some(),
        weights: &wish.weights,
        cgroup: root.as_deref(),
        adopt: kept,
        datagrams: (candidate.protocol() == Protocol::Udp).then_some(wish.affinity),
        ..Plan::new(&candidate.name, paths, wish.policy_of(candidate.protocol()))
    };
    let remote = candidate.members.iter().map(|m| (m.cookie, m.remote));
    let dispatcher = Dispatcher::start_beside(&plan, remote.collect())?;
    let recounted = if dispatcher.counting() {
        let pins = paths.group_pins(&candidate.name);
        let slots = slots_of_workers(&dispatcher, &candidate.members);
        count_in(&pins, candidate.address(), &slots)
    } else {
        recount::Recounted::default()
    };
    Ok((dispatcher, recounted))
}

/// Counts in connections opened before. One accepted while its holder was looked up is found by the next attempt.
fn count_in(
    pins: &std::path::Path,
    address: SocketAddr,
    slots: &BTreeMap<u32, Vec<usize>>,
) -> recount::Recounted {
    let mut sum = recount::Recounted::default();
    for attempt in 0..RECOUNTS {
        match recount::recount(pins, address.port(), held(slots), Callbacks::Probed) {
            Ok(done) => {
                sum.counted += done.counted;
                sum.unattributed = done.unattributed;
                sum.no_callbacks = done.no_callbacks;
                if done.unattributed == 0 || done.no_callbacks {
                    break;
                }
            }
            Err(error) => {
                tracing::warn!(
                    event = "degraded",
                    "connections open before are not counted: {error}"
                );
                break;
            }
        }
        std::thread::sleep(Duration::from_millis(5 << attempt));
    }
    if let Some(missing) = sum.missing() {
        tracing::warn!(event = "degraded", "{missing}");
    }
    sum
}

/// Returns the connections that we or an earlier agent marked as uncounted.
fn uncounted(dispatcher: &Dispatcher) -> Option<Uncounted> {
    if !dispatcher.counting() {
        return None;
    }
    Uncounted::of(dispatcher.pinned().dir()).unwrap_or_else(|error| {
        tracing::debug!("uncounted connections are not looked after: {error}");
        None
    })
}

/// The slots that each worker serves.
fn slots_of_workers(dispatcher: &Dispatcher, members: &[Member]) -> BTreeMap<u32, Vec<usize>> {
    let mut slots: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for member in members {
        if let Some(slot) = dispatcher.pinned().slot_of(member.cookie)
            && let Some(worker) = member.worker
        {
            slots.entry(worker).or_default().push(slot);
        }
    }
    slots
}

/// Returns the sockets that workers hold, each with a slot. Threads of one process cannot be told apart, so its sockets
/// are dealt evenly to its slots.
fn held(slots: &BTreeMap<u32, Vec<usize>>) -> Vec<(u64, usize)> {
    let mut held = Vec::new();
    for (pid, slots) in slots {
        let sockets = process::sockets_of(*pid).unwrap_or_default();
        let sockets: HashSet<u64> = sockets.into_iter().map(|(_, inode)| inode).collect();
        held.extend(sockets.into_iter().zip(slots.iter().copied().cycle()));
    }
    held
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervisor::state;

    #[test]
    fn names_can_be_those_of_groups() {
        for (address, name) in [
            ("127.0.0.1:80", "at-127-0-0-1-80"),
            ("[::]:443", "at----443"),
            ("[::1]:80", "at---1-80"),
        ] {
            let of = name_of(Protocol::Tcp, address.parse().expect("address"));
            assert_eq!(of, name);
            assert!(state::is_name(&of));
        }
        let udp = name_of(Protocol::Udp, "[::]:53".parse().expect("address"));
        assert_eq!(udp, "at-udp----53");
    }

    #[test]
    fn a_group_is_looked_at_seldom_while_nothing_comes_to_it() {
        let mut pace = Pace::new();
        let start = pace.changed;
        let at = |ms| start + Duration::from_millis(ms);
        // Until it counts as quiet, each look is due.
        assert!(!pace.is_quiet(0, at(50)) && pace.is_due(false, at(50)));
        assert!(!pace.is_quiet(0, at(100)) && pace.is_due(false, at(100)));
        assert!(pace.is_quiet(0, at(1_050)) && pace.is_due(true, at(1_050)));
        let due = (1..20).filter(|n| pace.is_due(true, at(1_050 + n * 50)));
        assert_eq!(due.count(), 3);
        // The first connection ends that.
        assert!(!pace.is_quiet(1, at(2_050)) && pace.is_due(false, at(2_050)));
        assert!(!pace.is_quiet(1, at(2_100)) && pace.is_due(false, at(2_100)));
    }
}
