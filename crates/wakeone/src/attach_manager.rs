//! Keeps other servers steered. Attaches to each target that is there, follows it, and attaches again when it comes
//! back. This is the process that `wakeone attach` leaves behind, and that `wakeone agent` runs as.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use wakeone_kernel::capability;
use wakeone_kernel::diag::{self, Which};
use wakeone_model::listener::Protocol;
use wakeone_observe::{Found, Target, find};

use crate::attach::{self, Attached, Presence, SteeringConfig};
use crate::metrics::Monitor;
use crate::paths::Paths;
use crate::privileges::FOR_LOADING;
use crate::repair::repair_all;
use crate::steer::SteerEvent;

/// A target, and how it is to be steered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// The servers to steer.
    pub target: Target,
    /// How to steer them.
    pub wish: SteeringConfig,
    /// Users whose servers it may mean, beside root and ourselves.
    pub owners: Vec<u32>,
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

/// Where a group is: TCP and UDP have separate ports.
type Place = (bool, SocketAddr);

fn place(protocol: Protocol, address: SocketAddr) -> Place {
    (protocol == Protocol::Udp, address)
}

fn place_of(attached: &Attached) -> Place {
    place(attached.protocol(), attached.address())
}

fn told((udp, address): Place) -> String {
    format!("{}{address}", if udp { "udp://" } else { "" })
}

/// Returns those of the found listeners that a target means. It means UDP if it names UDP, or if nothing else was
/// found. The datagrams beside a web server's listener are QUIC's, and QUIC knows better where each belongs.
pub fn meant(found: Vec<Found>, target: &Target) -> Vec<Found> {
    let udp = |f: &Found| f.listener.protocol == Protocol::Udp;
    let named = target.parts().0.is_some();
    let only = found.iter().all(udp);
    let fits = |f: &Found| named || only || !udp(f);
    found.into_iter().filter(fits).collect()
}

/// Splits a target's listeners into those to steer and the reasons against others. The reasons are that users were not
/// named, or that there are too many. Strangers' listeners are left out unexamined and do not count; each of these
/// users is reported once.
pub fn admitted(found: Vec<Found>, owners: &[u32]) -> (Vec<Found>, Vec<attach::Error>) {
    let (mut all, mut refused) = (Vec::new(), BTreeMap::new());
    for one in found {
        match attach::admit(&one, owners) {
            Ok(()) => all.push(one),
            Err((user, error)) => drop(refused.entry(user).or_insert(error)),
        }
    }
    let mut refused: Vec<_> = refused.into_values().collect();
    let others = all.split_off(all.len().min(attach::MOST_GROUPS));
    if let Some(first) = others.first() {
        refused.push(attach::Error::Many {
            address: first.listener.address,
            others: others.len() - 1,
        });
    }
    (all, refused)
}

/// How long after a change of the machine's listening sockets all processes are searched again, by a walk over /proc.
/// Each further search without another change comes three times as late, up to the longest interval.
const SEARCH_AGAIN: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(60));
/// The longest interval while something is refused: the obstacle may not show in the sockets.
const REFUSED_AGAIN: Duration = Duration::from_secs(8);
/// How often to check whether the sockets changed; the second value if they did not change for long.
const SOCKETS_EVERY: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(1));

/// When to search for servers: soon after sockets came or went, and ever more seldom while none do.
#[derive(Debug)]
struct Search {
    /// A hash of the machine's listening sockets at the last look.
    sockets: u64,
    looked: Option<Instant>,
    searched: Option<Instant>,
    wait: Duration,
}

impl Search {
    fn new() -> Self {
        Self {
            sockets: 0,
            looked: None,
            searched: None,
            wait: SEARCH_AGAIN.0,
        }
    }

    /// Whether to search now; `sockets` returns the hash of what listens.
    fn is_due(&mut self, now: Instant, refused: bool, sockets: impl FnOnce() -> u64) -> bool {
        let passed = |since: Option<Instant>, time: Duration| {
            since.is_none_or(|since| now.duration_since(since) >= time)
        };
        if !passed(
            self.looked,
            self.wait.clamp(SOCKETS_EVERY.0, SOCKETS_EVERY.1),
        ) {
            return false;
        }
        self.looked = Some(now);
        let changed = std::mem::replace(&mut self.sockets, sockets()) != self.sockets;
        if changed {
            self.wait = SEARCH_AGAIN.0;
        } else if !passed(self.searched, self.wait) {
            return false;
        } else {
            let longest = if refused {
                REFUSED_AGAIN
            } else {
                SEARCH_AGAIN.1
            };
            self.wait = (self.wait * 3).min(longest);
        }
        self.searched = Some(now);
        true
    }
}

/// Returns a hash of the listening sockets, which changes when one comes or goes. `udp`: include those of UDP.
fn sockets(udp: bool) -> u64 {
    let mut hasher = DefaultHasher::new();
    let protocols = [(Protocol::Tcp, true), (Protocol::Udp, udp)];
    for (protocol, _) in protocols.into_iter().filter(|(_, asked)| *asked) {
        for entry in diag::sockets(protocol, Which::Listening, 0).unwrap_or_default() {
            (entry.local, entry.socket.cookie).hash(&mut hasher);
        }
    }
    hasher.finish()
}

/// The groups that are kept steered.
pub struct AttachManager {
    paths: Paths,
    wanted: Vec<Wanted>,
    groups: BTreeMap<Place, (SteeringConfig, Attached)>,
    /// Why a target was not steered at the last attempt.
    refused: BTreeMap<String, String>,
    /// Places whose program does not load: no other attempt before the configuration changes.
    given_up: BTreeSet<Place>,
    /// Serves their metrics, with those of the kernel's tracepoints if asked for.
    monitor: Option<(Monitor, bool)>,
    search: Search,
}

impl AttachManager {
    /// Returns a manager without groups.
    pub fn new(paths: Paths) -> Self {
        Self {
            paths,
            wanted: Vec::new(),
            groups: BTreeMap::new(),
            refused: BTreeMap::new(),
            given_up: BTreeSet::new(),
            monitor: None,
            search: Search::new(),
        }
    }

    /// Serves metrics of its groups from now on.
    pub fn serve(&mut self, monitor: Monitor, tracing: bool) {
        self.monitor = Some((monitor, tracing));
        for (_, attached) in self.groups.values() {
            self.show(attached);
        }
    }

    fn show(&self, attached: &Attached) {
        if let Some((monitor, tracing)) = &self.monitor {
            monitor.add(attached.source(&self.paths, *tracing));
        }
    }

    /// Detaches from one group, after the monitor let go of it.
    fn let_go(&self, attached: Attached) {
        if let Some((monitor, _)) = &self.monitor {
            monitor.remove(attached.name());
        }
        attached.end();
    }

    /// Detaches from a server that runs on.
    fn detach(&self, attached: Attached) {
        let name = attached.name().to_owned();
        self.let_go(attached);
        tracing::info!(
            event = "detached",
            "{name} is not steered any more; its server runs on as it was"
        );
    }

    /// Keeps one group steered that was just attached.
    pub fn keep(&mut self, wish: SteeringConfig, owners: Vec<u32>, attached: Attached) {
        let target = Target::By(
            attached.protocol(),
            Box::new(Target::Address(attached.address())),
        );
        self.wanted.push(Wanted {
            target,
            wish: wish.clone(),
            owners,
        });
        self.show(&attached);
        self.groups.insert(place_of(&attached), (wish, attached));
    }

    /// Steers these targets from now on, and no others. A change of policy or weights takes effect without detaching.
    pub fn want(&mut self, wanted: Vec<Wanted>) {
        self.wanted = wanted;
        self.refused.clear();
        self.given_up.clear();
        self.search = Search::new();
        let there = self.there(&mut Vec::new());
        // Nothing was reported yet: the next attempt does.
        self.refused.clear();
        let groups = std::mem::take(&mut self.groups);
        for (address, (wish, mut attached)) in groups {
            let new = there.iter().find(|(found, _)| {
                place(found.listener.protocol, found.listener.address) == address
            });
            match new {
                Some((_, new))
                    if new.rescue == wish.rescue
                        && new.stuck_after == wish.stuck_after
                        && new.affinity == wish.affinity =>
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
    fn there(&mut self, events: &mut Vec<Event>) -> Vec<(Found, SteeringConfig)> {
        let mut there: Vec<(Found, SteeringConfig)> = Vec::new();
        for wanted in self.wanted.clone() {
            match find(&wanted.target) {
                Ok(found) => {
                    self.refused.remove(&wanted.target.to_string());
                    let meant = meant(found, &wanted.target);
                    let (meant, refused) = admitted(meant, &wanted.owners);
                    for error in refused {
                        self.refuse_once(&wanted.target, &error, events);
                    }
                    for found in meant {
                        let at = |f: &Found| place(f.listener.protocol, f.listener.address);
                        if !there.iter().any(|(f, _)| at(f) == at(&found)) {
                            there.push((found, wanted.wish.clone()));
                        }
                    }
                }
                Err(error) => self.refuse(wanted.target.to_string(), error.to_string(), events),
            }
        }
        there
    }

    fn refuse(&mut self, what: String, why: String, events: &mut Vec<Event>) {
        if self.refused.get(&what) != Some(&why) {
            events.push(Event::Refused(why.clone()));
            self.refused.insert(what, why);
        }
    }

    /// The same for listeners that anybody can open and close. Reports each of their users once until the next
    /// configuration, wherever they listen.
    fn refuse_once(&mut self, target: &Target, error: &attach::Error, events: &mut Vec<Event>) {
        let what = match error {
            attach::Error::Owner { user, .. } => format!("{target} of user {user}"),
            _ => format!("more of {target}"),
        };
        if !self.refused.contains_key(&what) {
            self.refuse(what, error.to_string(), events);
        }
    }

    /// Whether a target is a single address that is steered.
    fn has(&self, target: &Target) -> bool {
        match target.parts() {
            (Some(protocol), Target::Address(address)) => {
                self.groups.contains_key(&place(protocol, *address))
            }
            (None, Target::Address(address)) => {
                self.groups.contains_key(&place(Protocol::Tcp, *address))
            }
            _ => false,
        }
    }

    /// Attaches to wanted servers that are not yet steered. Call it a few times a second: it searches processes only
    /// after sockets came or went, and once in a while.
    pub fn attach(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        if self.groups.len() >= self.wanted.len() && self.wanted.iter().all(|w| self.has(&w.target))
        {
            return events;
        }
        let is_udp = |wanted: &Wanted| wanted.target.parts().0 == Some(Protocol::Udp);
        let udp = self.wanted.iter().any(is_udp);
        let refused = !self.refused.is_empty();
        if !self.search.is_due(Instant::now(), refused, || sockets(udp)) {
            return events;
        }
        // The search does not find a listener that an earlier agent left closed.
        capability::with(&FOR_LOADING, || repair_all(&self.paths));
        for (found, wish) in self.there(&mut events) {
            let address = place(found.listener.protocol, found.listener.address);
            if self.groups.contains_key(&address) || self.given_up.contains(&address) {
                continue;
            }
            let attached = attach::examine(&found)
                .and_then(|candidate| Attached::start(candidate, &wish, &self.paths));
            match attached {
                Ok(attached) => {
                    self.refused.remove(&told(address));
                    events.push(Event::Attached(
                        attached.name().to_owned(),
                        attached.recounted.counted,
                    ));
                    self.show(&attached);
                    self.groups.insert(address, (wish, attached));
                }
                Err(error) => {
                    if matches!(&error, attach::Error::Dispatcher(error) if error.is_load()) {
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

    /// Follows each group. Call it some twenty times a second.
    pub fn follow(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        let groups = std::mem::take(&mut self.groups);
        for (address, (wish, mut attached)) in groups {
            let name = attached.name().to_owned();
            let presence = attached.follow();
            let seen = attached.events().into_iter();
            events.extend(seen.map(|event| Event::Steered(name.clone(), event)));
            match presence {
                Ok(Presence::Gone) => {
                    self.search = Search::new();
                    self.let_go(attached);
                    events.push(Event::Gone(name));
                }
                Ok(Presence::Here) => {
                    self.groups.insert(address, (wish, attached));
                }
                Err(error) => {
                    self.refuse(told(address), error.to_string(), &mut events);
                    self.groups.insert(address, (wish, attached));
                }
            }
        }
        events
    }

    /// Detaches from all.
    pub fn end(mut self) {
        for (_, (_, attached)) in std::mem::take(&mut self.groups) {
            self.detach(attached);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_searched_seldom_while_no_socket_comes_or_goes() {
        let mut search = Search::new();
        let start = Instant::now();
        let mut due = |ms: u64, sockets: u64| {
            search.is_due(start + Duration::from_millis(ms), false, || sockets)
        };
        assert!(due(0, 7), "the first time");
        assert!(!due(100, 7));
        // Searches in a minute of four looks a second: after 0.25 s, 0.75 s, 2.25 s and so on.
        let searches = (1..240).filter(|n| due(n * 250, 7)).count();
        assert_eq!(searches, 5);
        assert!(due(61_000, 8), "a socket came");
        // A refused server may be ready soon, with the same socket as at its start.
        assert!(due(61_250, 8));
        assert!(!due(61_500, 8));
    }
}
