//! Keeps other servers steered. Attaches to each target that is there, follows it, and attaches again when it comes
//! back. This is the process that `wakeone attach` leaves behind, and that `wakeone agent` runs as.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;
use wakeone_kernel::capability;
use wakeone_kernel::proc::{networks, process};
use wakeone_model::address::Address;
use wakeone_model::listener::Protocol;
use wakeone_model::network::Network;
use wakeone_observe::watcher::start_all;
use wakeone_observe::{Found, Look, Moment, Target, find_in};

use super::attached::{BETWEEN_SOCKETS, Presence};
use super::candidate::{AttachCandidate, examine_watched};
use super::config::AttachConfig;
use super::elsewhere::{Elsewhere, inhabitants, within};
use super::error::Error;
use super::search::{Search, count, sockets};
use super::selection::{Owners, admitted, meant};
use super::server::Server;
use super::servers::{Servers, wish};
use crate::metrics::Monitor;
use crate::steered::{Origin, SteeredGroup};
use wakeone_control::paths::Paths;
use wakeone_control::privileges::{self, FOR_LOADING};
use wakeone_control::repair::repair_all;
use wakeone_control::state::StateError;
use wakeone_control::steer::SteerEvent;
use wakeone_steering::agent::Rounds;

/// A target, and how it is to be steered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// The servers to steer.
    pub target: Target,
    /// How to steer them.
    pub config: AttachConfig,
    /// Users whose servers it may mean, beside root and ourselves.
    pub owners: Owners,
    /// The marks of those servers, beside their address.
    pub servers: Servers,
}

/// Something worth a log line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A group is steered from now on, with this number of open connections counted in.
    Attached(String, u64),
    /// Its server closed all of its sockets.
    Gone(String),
    /// It is not steered, for this reason; reported once.
    Refused(String),
    /// An event from its agent.
    Steered(String, SteerEvent),
}

/// Notices in this time are answered by one look: anybody may listen at the same port of another network namespace.
const NOTICES_APART: Duration = Duration::from_micros(500);

/// How often to follow groups that follow themselves. Each time their notes are written to the state file.
const AT_EASE: Duration = Duration::from_millis(250);

/// Where a group is: TCP and UDP have separate ports.
type Place = (Protocol, Address);

/// Those listeners that another process than this one has. Our own serve metrics.
pub(crate) fn below_us(found: Vec<Found>) -> Vec<Found> {
    let own = std::process::id();
    let others = |one: &Found| one.pids.iter().any(|pid| *pid != own && holds(*pid, one));
    found.into_iter().filter(others).collect()
}

fn holds(pid: u32, found: &Found) -> bool {
    let held = process::sockets_of(pid).unwrap_or_default();
    held.iter().any(|(_, inode)| found.listener.has(*inode))
}

/// Waits for a time, or for one of the notices or of `also`. Returns whether there was a notice.
pub(super) fn wait<'a>(
    time: Duration,
    notices: impl Iterator<Item = BorrowedFd<'a>>,
    also: impl IntoIterator<Item = BorrowedFd<'a>>,
) -> bool {
    let polled = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
    let mut all: Vec<_> = notices.map(polled).collect();
    let own = all.len();
    let apart = match own {
        0 => Duration::ZERO,
        // Sockets that begin to listen together are seen by one look.
        _ => NOTICES_APART.min(time),
    };
    std::thread::sleep(apart);
    let left = Timespec::try_from(time.saturating_sub(apart)).ok();
    all.extend(also.into_iter().map(polled));
    // After a signal it waits for less.
    let _ = poll(&mut all, left.as_ref());
    all[..own].iter().any(|one| !one.revents().is_empty())
}

/// Returns the place of a listener. One of Multipath TCP is refused whatever is there.
fn place_of(found: &Found) -> Place {
    (found.listener.protocol, found.listener.address)
}

fn told((protocol, address): Place) -> String {
    let scheme = match protocol {
        Protocol::Udp => "udp://",
        Protocol::Tcp | Protocol::Mptcp | Protocol::Unix => "",
    };
    format!("{scheme}{address}")
}

/// For so long after a server of our own began to listen its workers may still have to start.
const STARTING: Duration = Duration::from_millis(800);

/// A target that is not steered.
#[derive(Debug)]
struct Refused {
    since: Instant,
    /// The reason that was reported; `None`: none was yet, as its server may still be starting.
    why: Option<String>,
}

/// The groups that are kept steered.
pub struct AttachManager {
    paths: Paths,
    /// The command by which we started the servers; empty if others did.
    command: Vec<String>,
    wanted: Vec<Wanted>,
    groups: BTreeMap<Place, (AttachConfig, Server)>,
    /// Groups whose server ended: `status` shows them, and `detach` finds us by them.
    awaited: BTreeMap<Place, SteeredGroup>,
    /// The targets that were not steered at the last attempt.
    refused: BTreeMap<String, Refused>,
    /// Places whose program does not load: no other attempt before the configuration changes.
    given_up: BTreeSet<Place>,
    /// Serves their metrics, with those of the kernel's tracepoints if asked for.
    monitor: Option<(Arc<Monitor>, bool)>,
    search: Search,
    /// Where the servers are, if not in the network namespace of this thread.
    elsewhere: Option<Arc<Elsewhere>>,
    /// Look at all groups, those of other managers too.
    rounds: Rounds,
}

impl AttachManager {
    /// Returns a manager without groups.
    pub fn new(paths: Paths) -> Self {
        Self {
            paths,
            command: Vec::new(),
            wanted: Vec::new(),
            groups: BTreeMap::new(),
            awaited: BTreeMap::new(),
            refused: BTreeMap::new(),
            given_up: BTreeSet::new(),
            monitor: None,
            search: Search::new(),
            elsewhere: None,
            rounds: Rounds::new(),
        }
    }

    /// Notes that the servers are in another network namespace than ours. This thread is in it now, and stays there.
    #[must_use]
    pub fn in_network(mut self, namespace: u64) -> Self {
        self.see_network(namespace, Vec::new());
        self
    }

    /// Notes that the servers are in another network namespace, and which processes are in it.
    pub(super) fn see_network(&mut self, namespace: u64, pids: Vec<u32>) {
        self.elsewhere = Some(Arc::new(Elsewhere { namespace, pids }));
    }

    /// Whether its network namespace is still the one of these processes. The kernel gives the number of one that ended to the next.
    pub(super) fn is_of(&self, pids: &[u32]) -> bool {
        let known = inhabitants(self.elsewhere.as_deref());
        known.iter().any(|pid| pids.contains(pid))
    }

    /// Returns one for another network namespace. It has no groups yet, and steers those of these targets that may be anywhere,
    /// from its next [`AttachManager::attach`] on.
    pub(super) fn for_network(&self, namespace: u64, pids: Vec<u32>) -> Self {
        let mut other = Self::new(self.paths.clone());
        other.rounds = self.rounds.clone();
        other.see_network(namespace, pids);
        if let Some((monitor, _)) = &self.monitor {
            other.serve(monitor.clone(), false);
        }
        other.wanted = self.wanted_everywhere().cloned().collect();
        other
    }

    /// Starts the threads that all managers share, so that none of them is in the network namespace of a container.
    ///
    /// # Errors
    /// Out of descriptors or threads.
    pub(super) fn start_threads(&self) -> io::Result<()> {
        if self.rounds.is_started() {
            return Ok(());
        }
        privileges::keep_for_attaching();
        self.rounds.start()
    }

    /// Its targets that may be in any network namespace.
    pub(super) fn wanted_everywhere(&self) -> impl Iterator<Item = &Wanted> {
        self.wanted.iter().filter(|one| one.servers.everywhere)
    }

    /// Does something in its network namespace.
    ///
    /// # Errors
    /// The namespace has ended, or cannot be entered.
    pub(super) fn within<T>(&mut self, act: impl FnOnce(&mut Self) -> T) -> io::Result<T> {
        let elsewhere = self.elsewhere.clone();
        within(elsewhere.as_deref(), || act(self))
    }

    /// Whether it has no server, and nobody is left in the network namespace who could start one: only this process keeps it.
    pub fn is_abandoned(&self) -> bool {
        let elsewhere = self.elsewhere.as_ref();
        self.groups.is_empty()
            && elsewhere.is_some_and(|one| !networks::is_inhabited(one.namespace))
    }

    /// Where groups have their state and pins.
    pub(super) fn paths(&self) -> &Paths {
        &self.paths
    }

    /// Whether it steers a server, or waits for one to come back.
    pub(super) fn has_groups(&self) -> bool {
        !self.groups.is_empty() || !self.awaited.is_empty()
    }

    /// Lets go of all servers: their network namespace has ended with them.
    pub(super) fn abandon(mut self) -> Vec<Event> {
        let mut events = Vec::new();
        for (_, (_, attached)) in std::mem::take(&mut self.groups) {
            events.push(Event::Gone(attached.name().to_owned()));
            self.let_go(attached);
        }
        self.forget_awaited();
        events
    }

    fn forget_awaited(&mut self) {
        for group in std::mem::take(&mut self.awaited).into_values() {
            group.forget_state();
        }
    }

    /// Notes that we started the servers, by this command: they end with us.
    #[must_use]
    pub fn of_command(mut self, command: &[String]) -> Self {
        self.command = command.to_vec();
        self
    }

    /// Serves metrics of its groups from now on.
    pub fn serve(&mut self, monitor: impl Into<Arc<Monitor>>, tracing: bool) {
        self.monitor = Some((monitor.into(), tracing));
        for (_, attached) in self.groups.values() {
            self.show(attached);
        }
    }

    fn show(&self, attached: &Server) {
        if let Some((monitor, tracing)) = &self.monitor {
            monitor.add(attached.source(&self.paths, *tracing));
        }
    }

    /// Detaches from one group, after the monitor let go of it.
    fn let_go(&self, attached: Server) {
        self.hide(&attached);
        attached.end();
    }

    fn hide(&self, attached: &Server) {
        if let Some((monitor, _)) = &self.monitor {
            monitor.remove(attached.name());
        }
    }

    /// Detaches from a server that runs on.
    fn detach(&self, attached: Server) {
        let name = attached.name().to_owned();
        self.let_go(attached);
        if !self.command.is_empty() {
            return;
        }
        tracing::info!(
            event = "detached",
            "{name} is not steered any more; its server runs on as it was"
        );
    }

    /// Attaches to a server, and keeps it steered.
    ///
    /// # Errors
    /// See [`Error`]; nothing is left attached or pinned then.
    pub fn keep(
        &mut self,
        candidate: AttachCandidate,
        config: AttachConfig,
        owners: Owners,
    ) -> Result<&Server, Error> {
        let wanted = Wanted {
            target: Target::at(candidate.protocol(), candidate.address()),
            config: config.clone(),
            owners,
            servers: Servers::default(),
        };
        let at = self.start(candidate, config)?;
        self.wanted.push(wanted);
        Ok(&self.groups[&at].1)
    }

    /// Attaches to a server. Returns its place.
    fn start(&mut self, candidate: AttachCandidate, config: AttachConfig) -> Result<Place, Error> {
        let at = (candidate.protocol(), candidate.address());
        // The group's folder is ours already then.
        let was_awaited = self.awaited.remove(&at).is_some();
        let (name, network) = (candidate.name.clone(), candidate.network.clone());
        let attached = Server::start(candidate, &config, &self.paths, &self.command, &self.rounds)
            .inspect_err(|_| {
                if was_awaited {
                    self.wait_at(at, &name, network);
                }
            })?;
        self.show(&attached);
        self.groups.insert(at, (config, attached));
        Ok(at)
    }

    /// Shows that a server is waited for.
    fn wait_at(&mut self, at: Place, name: &str, network: Option<Network>) {
        let (protocol, address) = at;
        let origin = Origin::of_server(protocol, address, network, &self.command);
        let taken = SteeredGroup::take(&self.paths.runtime, name, origin);
        self.note_waiting(at, taken.and_then(|group| group.store().map(|()| group)));
    }

    fn note_waiting(&mut self, at: Place, shown: Result<SteeredGroup, StateError>) {
        match shown {
            Ok(group) => drop(self.awaited.insert(at, group)),
            Err(error) => {
                tracing::warn!("status does not show that {} is waited for: {error}", at.1)
            }
        }
    }

    /// Whether a target means this place.
    fn is_wanted(&self, (protocol, address): Place) -> bool {
        let mut wanted = self.wanted.iter();
        wanted.any(|wanted| wanted.target.is_at(protocol, address))
    }

    /// Steers these targets from now on, and no others. A change of policy or weights takes effect without detaching.
    pub fn want(&mut self, wanted: Vec<Wanted>) {
        self.wanted = wanted;
        self.refused.clear();
        self.given_up.clear();
        self.search = Search::new();
        for (at, group) in std::mem::take(&mut self.awaited) {
            match self.is_wanted(at) {
                true => drop(self.awaited.insert(at, group)),
                false => group.forget_state(),
            }
        }
        let there = self.there(&mut Vec::new());
        // Nothing was reported yet: the next attempt does.
        self.refused.clear();
        let groups = std::mem::take(&mut self.groups);
        for (address, (config, mut attached)) in groups {
            let new = there.iter().find(|(found, _)| place_of(found) == address);
            match new {
                Some((_, new))
                    if new.rescue == config.rescue
                        && new.stuck_after == config.stuck_after
                        && new.affinity == config.affinity =>
                {
                    attached.set_policy(new.policy_of(attached.protocol()));
                    attached.set_weights(new.weights.clone());
                    self.groups.insert(address, (new.clone(), attached));
                }
                _ => self.detach(attached),
            }
        }
    }

    /// Returns the wanted listeners that are there now, each with its steering.
    fn there(&mut self, events: &mut Vec<Event>) -> Vec<(Found, AttachConfig)> {
        let mut there: Vec<(Found, AttachConfig)> = Vec::new();
        if self.wanted.is_empty() {
            return there;
        }
        // One look at the machine for all targets.
        let look = match Look::take(inhabitants(self.elsewhere.as_deref())) {
            Ok(look) => look,
            Err(error) => {
                self.refuse("the kernel".to_owned(), error.to_string(), events);
                return there;
            }
        };
        for wanted in self.wanted.clone() {
            match find_in(&look, &wanted.target) {
                Ok(found) => {
                    self.refused.remove(&wanted.target.to_string());
                    let mut meant = meant(found, &wanted.target);
                    meant.retain(|one| wanted.servers.fit(one));
                    let (meant, refused) = match !self.command.is_empty() {
                        true => (below_us(meant), Vec::new()),
                        false => admitted(meant, &wanted.owners),
                    };
                    for error in refused {
                        self.refuse_once(&wanted.target, &error, events);
                    }
                    for found in meant {
                        if there.iter().any(|(f, _)| place_of(f) == place_of(&found)) {
                            continue;
                        }
                        let Some(config) = self.config_for(&found, &wanted, events) else {
                            continue;
                        };
                        there.push((found, config));
                    }
                }
                // Ours has not opened any yet.
                Err(_) if !self.command.is_empty() => {}
                // It may be in any other.
                Err(wakeone_observe::Error::NotFound(_)) if wanted.servers.everywhere => {}
                Err(error) => self.refuse(wanted.target.to_string(), error.to_string(), events),
            }
        }
        there
    }

    /// How a listener is to be steered; `None` if that is for its server to ask for, and it does not.
    fn config_for(
        &mut self,
        found: &Found,
        wanted: &Wanted,
        events: &mut Vec<Event>,
    ) -> Option<AttachConfig> {
        let mut config = wanted.config.clone();
        if wanted.servers.wishing {
            match wish(found)? {
                Ok(policy) => config.policy = policy.or(config.policy),
                Err(why) => {
                    self.refuse(told(place_of(found)), why, events);
                    return None;
                }
            }
        }
        Some(config)
    }

    fn refuse(&mut self, what: String, why: String, events: &mut Vec<Event>) {
        let why = match &self.elsewhere {
            Some(elsewhere) => format!("network namespace {}: {why}", elsewhere.namespace),
            None => why,
        };
        let refused = self.refused.entry(what).or_insert_with(|| Refused {
            since: Instant::now(),
            why: None,
        });
        if !self.command.is_empty() && refused.since.elapsed() < STARTING {
            return;
        }
        if refused.why.as_ref() != Some(&why) {
            events.push(Event::Refused(why.clone()));
            refused.why = Some(why);
        }
    }

    /// The same for listeners that anybody can open and close. Reports each of their users once until the next
    /// configuration, wherever they listen.
    fn refuse_once(&mut self, target: &Target, error: &Error, events: &mut Vec<Event>) {
        let what = match error {
            Error::Owner { user, .. } => format!("{target} of user {user}"),
            _ => format!("more of {target}"),
        };
        if !self.refused.contains_key(&what) {
            self.refuse(what, error.to_string(), events);
        }
    }

    /// Whether a target is a single address that is steered.
    fn has(&self, target: &Target) -> bool {
        match target.parts().1 {
            Target::Address(_) => {
                let mut places = self.groups.keys();
                places.any(|(protocol, address)| target.is_at(*protocol, *address))
            }
            _ => false,
        }
    }

    /// Whether a target names this address.
    fn names(&self, (protocol, address): Place) -> bool {
        let mut targets = self.wanted.iter().map(|wanted| &wanted.target);
        targets.any(|one| {
            let names = matches!(one.parts().1, Target::Address(_));
            names && one.is_at(protocol, address)
        })
    }

    /// Those whose listeners the targets may mean.
    fn protocols(&self) -> Vec<Protocol> {
        let may_be = |protocol: &Protocol| {
            self.wanted
                .iter()
                .any(|one| match (one.target.parts(), protocol) {
                    ((of, _), Protocol::Udp) => of == Some(Protocol::Udp),
                    (
                        (of, Target::All | Target::Pid(_) | Target::Number(_) | Target::Name(_)),
                        Protocol::Unix,
                    ) => of.is_none(),
                    ((of, _), Protocol::Unix) => of == Some(Protocol::Unix),
                    _ => true,
                })
        };
        let all = [Protocol::Tcp, Protocol::Udp, Protocol::Unix];
        all.into_iter().filter(may_be).collect()
    }

    /// Whether a server may be missing, and it is time to look what listens.
    pub(super) fn may_attach(&mut self) -> bool {
        let (groups, wanted) = (&self.groups, &self.wanted);
        let is_complete =
            groups.len() >= wanted.len() && wanted.iter().all(|w| self.has(&w.target));
        if is_complete {
            return false;
        }
        let elsewhere = self.elsewhere.clone();
        let inhabitants = inhabitants(elsewhere.as_deref());
        // Its sockets can be counted without entering it.
        let count = || count(inhabitants.first().copied());
        let steered = !self.groups.is_empty();
        let now = Instant::now();
        self.search.may_be_due(now, inhabitants, steered, count)
    }

    /// Attaches to wanted servers that are not yet steered. Call it a few times a second: it searches processes only
    /// after sockets came or went, and once in a while.
    pub fn attach(&mut self) -> Vec<Event> {
        match self.may_attach() {
            true => self.attach_here(),
            false => Vec::new(),
        }
    }

    /// The same after [`AttachManager::may_attach`] said so, in its network namespace.
    pub(super) fn attach_here(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        let protocols = self.protocols();
        let refused = self.refused.values().any(|one| one.why.is_some());
        if !self
            .search
            .is_due(Instant::now(), refused, || sockets(&protocols))
        {
            return events;
        }
        if inhabitants(self.elsewhere.as_deref()).is_empty() {
            // The search does not find a listener that an earlier agent left closed, in whatever network namespace.
            capability::with(&FOR_LOADING, || repair_all(&self.paths));
        }
        let mut there = self.there(&mut events);
        there.retain(|(found, _)| {
            let address = place_of(found);
            !self.groups.contains_key(&address) && !self.given_up.contains(&address)
        });
        if there.is_empty() {
            return events;
        }
        let (found, configs): (Vec<Found>, Vec<AttachConfig>) = there.into_iter().unzip();
        let watchers = match start_all(&found, false) {
            Ok(watchers) => watchers,
            Err(error) => {
                self.refuse("the kernel".to_owned(), error.to_string(), &mut events);
                return events;
            }
        };
        for ((found, config), watcher) in found.into_iter().zip(configs).zip(watchers) {
            let address = place_of(&found);
            let found = match &self.elsewhere {
                Some(elsewhere) => found.in_network(elsewhere.namespace),
                None => found,
            };
            let candidate = examine_watched(&found, watcher);
            let started = candidate.and_then(|candidate| self.start(candidate, config));
            match started {
                Ok(at) => {
                    self.refused.remove(&told(address));
                    let attached = &self.groups[&at].1;
                    events.push(Event::Attached(
                        attached.name().to_owned(),
                        attached.counted(),
                    ));
                }
                // Servers have UNIX sockets for their own control. Nobody asked for those.
                Err(Error::OneWorker { .. }) if !self.names(address) => {}
                Err(error) => {
                    if matches!(&error, Error::Load { .. }) {
                        self.given_up.insert(address);
                    }
                    self.refuse(told(address), error.to_string(), &mut events);
                }
            }
        }
        events
    }

    /// Whether no connection came to any group for a while.
    pub fn is_quiet(&self) -> bool {
        self.groups.values().all(|(_, group)| group.is_quiet())
    }

    /// Returns how long the groups can be left alone: this time, or less or more where they allow it.
    pub fn pause(&self, time: Duration) -> Duration {
        let mut groups = self.groups.values().map(|(_, group)| group);
        if groups.clone().any(Server::is_opening) {
            time.min(BETWEEN_SOCKETS)
        } else if !self.groups.is_empty() && groups.all(Server::follows_itself) {
            time.max(AT_EASE)
        } else {
            time
        }
    }

    /// Waits for a time, or until the programs notice that the sockets of a group changed, or one of `also` is readable.
    /// Returns whether the programs noticed something.
    pub fn wait<'a>(
        &'a self,
        time: Duration,
        also: impl IntoIterator<Item = BorrowedFd<'a>>,
    ) -> bool {
        wait(time, self.notices(), also)
    }

    /// The descriptors that are readable once the programs of its groups saw sockets change.
    pub(super) fn notices(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let groups = self.groups.values().map(|(_, group)| group);
        groups.filter_map(Server::notices).map(AsFd::as_fd)
    }

    /// Follows each group. Call it when a [`AttachManager::wait`] noticed something, and after each [`AttachManager::pause`].
    pub fn follow(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        let groups = std::mem::take(&mut self.groups);
        let due = |(at, (config, mut attached)): (Place, (AttachConfig, Server))| {
            let due = attached.due();
            (at, config, attached, due)
        };
        let mut groups: Vec<_> = groups.into_iter().map(due).collect();
        if groups.iter().any(|(_, _, _, due)| due.is_some()) {
            for (_, _, attached, due) in groups.iter_mut().filter(|(.., due)| due.is_none()) {
                *due = attached.due_with_others();
            }
        }
        let mut followed = groups.iter().filter(|(_, _, _, due)| due.is_some());
        let moment = Moment::at(match (followed.next(), followed.next()) {
            (Some(((_, address), ..)), None) => address.inet().map_or(0, |at| at.port()),
            _ => 0,
        });
        for (address, config, mut attached, due) in groups {
            let name = attached.name().to_owned();
            let presence = attached.follow(due, self.elsewhere.as_deref(), &moment);
            let seen = attached.events().into_iter();
            events.extend(seen.map(|event| Event::Steered(name.clone(), event)));
            match presence {
                Ok(Presence::Gone) => {
                    self.search = Search::new();
                    self.hide(&attached);
                    self.note_waiting(address, attached.rest());
                    events.push(Event::Gone(name));
                }
                Ok(Presence::Here) => {
                    self.groups.insert(address, (config, attached));
                }
                Err(error) => {
                    self.refuse(told(address), error.to_string(), &mut events);
                    self.groups.insert(address, (config, attached));
                }
            }
        }
        events
    }

    /// Detaches from all.
    pub fn end(mut self) {
        self.detach_all();
    }

    /// The same, to go on without any.
    pub(super) fn detach_all(&mut self) {
        for (_, (_, attached)) in std::mem::take(&mut self.groups) {
            self.detach(attached);
        }
        self.forget_awaited();
        self.paths.tidy();
    }
}
