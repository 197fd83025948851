//! Keeps servers steered in every network namespace of the machine: those of containers, too.
//!
//! One thread does so for all of them. It enters a namespace for as long as it asks the kernel for sockets there, or attaches to
//! them. A namespace where nothing is steered is kept alive by nothing of ours. Where something is, the sockets keep it alive
//! as well.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use wakeone_kernel::proc::networks::Networks;

use super::leftovers;
use super::manager::{AttachManager, Event, Wanted, wait};
use crate::metrics::Monitor;

/// How often to look which network namespaces there are.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How long to attach to servers of containers before groups are followed again.
const LONGEST_TURN: Duration = Duration::from_secs(1);
/// So many of them are looked into: anybody who may make a user namespace can make one.
const MOST_NETWORKS: usize = 1024;

/// The groups of all network namespaces.
pub struct Everywhere {
    own: AttachManager,
    /// By the inode of their namespace.
    others: BTreeMap<u64, AttachManager>,
    /// These, as they came.
    order: Vec<u64>,
    networks: Option<Networks>,
    looked: Option<Instant>,
    /// Whether what earlier agents left has been removed.
    swept: bool,
    /// That there are too many was told.
    overflowed: bool,
}

impl Everywhere {
    /// Keeps the groups of `own`, which are in the network namespace of this thread, and from [`Everywhere::want`] on those of
    /// others.
    pub fn new(own: AttachManager) -> Self {
        Self {
            own,
            others: BTreeMap::new(),
            order: Vec::new(),
            networks: None,
            looked: None,
            swept: false,
            overflowed: false,
        }
    }

    /// Serves metrics of the groups from now on. `tracing`: also those of the kernel's tracepoints, in our own network namespace.
    pub fn serve(&mut self, monitor: impl Into<Arc<Monitor>>, tracing: bool) {
        self.own.serve(monitor, tracing);
    }

    /// Steers these targets from now on, and no others.
    pub fn want(&mut self, wanted: Vec<Wanted>) {
        self.own.want(wanted);
        let wanted: Vec<Wanted> = self.own.wanted_everywhere().cloned().collect();
        if !wanted.is_empty() && self.networks.is_none() {
            let networks = Networks::new().inspect_err(|error| {
                tracing::warn!("the network namespaces of containers cannot be seen: {error}");
            });
            self.networks = networks.ok();
        }
        for (network, mut other) in std::mem::take(&mut self.others) {
            let wanted = wanted.clone();
            if wanted.is_empty() {
                end(other);
            } else if other.within(|other| other.want(wanted)).is_ok() {
                self.others.insert(network, other);
            } else {
                other.abandon();
            }
        }
        self.looked = None;
    }

    /// Attaches to wanted servers that are not yet steered. Call it a few times a second.
    ///
    /// The last ones to come are served first: each takes a tenth of a second. Servers that were there before an agent started may be
    /// steered by the programs of an earlier one.
    pub fn attach(&mut self) -> Vec<Event> {
        let begun = Instant::now();
        let mut events = self.own.attach();
        loop {
            self.look(&mut events);
            if !self.attach_in_last(&mut events) || begun.elapsed() >= LONGEST_TURN {
                return events;
            }
        }
    }

    /// Attaches to servers in the last network namespace to come of those where there are some. Returns whether there were.
    fn attach_in_last(&mut self, events: &mut Vec<Event>) -> bool {
        for network in self.order.iter().rev() {
            let Some(other) = self.others.get_mut(network) else {
                continue;
            };
            if other.may_attach()
                && let Ok(more) = other.within(AttachManager::attach_here)
            {
                let attached = more.iter().any(|one| matches!(one, Event::Attached(..)));
                events.extend(more);
                if attached {
                    return true;
                }
            }
        }
        false
    }

    /// Notes which network namespaces came and went.
    fn look(&mut self, events: &mut Vec<Event>) {
        let is_due = self.looked.is_none_or(|at| at.elapsed() >= LOOK_EVERY);
        if !is_due || self.own.wanted_everywhere().next().is_none() {
            return;
        }
        self.looked = Some(Instant::now());
        if let Err(error) = self.own.start_threads() {
            return tracing::warn!("servers in containers are not steered: {error}");
        }
        let Some(Ok(mut there)) = self.networks.as_mut().map(Networks::look) else {
            return;
        };
        let (stayed, ended): (BTreeMap<_, _>, BTreeMap<_, _>) = std::mem::take(&mut self.others)
            .into_iter()
            .partition(|(network, other)| there.get(network).is_some_and(|pids| other.is_of(pids)));
        if !std::mem::replace(&mut self.swept, true) || !ended.is_empty() {
            leftovers::remove(self.own.paths(), &there);
        }
        events.extend(ended.into_values().flat_map(AttachManager::abandon));
        for (network, mut other) in stayed {
            if let Some(pids) = there.remove(&network) {
                other.see_network(network, pids);
                self.others.insert(network, other);
            }
        }
        self.order
            .retain(|network| self.others.contains_key(network));
        for (network, pids) in there {
            if self.others.len() >= MOST_NETWORKS {
                self.warn_of_many();
                return;
            }
            let other = self.own.for_network(network, pids);
            self.others.insert(network, other);
            self.order.push(network);
        }
    }

    fn warn_of_many(&mut self) {
        if !std::mem::replace(&mut self.overflowed, true) {
            tracing::warn!(
                "there are more than {MOST_NETWORKS} network namespaces: servers in others are left as they are"
            );
        }
    }

    fn all(&self) -> impl Iterator<Item = &AttachManager> {
        std::iter::once(&self.own).chain(self.others.values())
    }

    /// Whether no connection came to any group for a while.
    pub fn is_quiet(&self) -> bool {
        self.all().all(AttachManager::is_quiet)
    }

    /// Returns how long the groups can be left alone: this time, or less or more where they allow it.
    pub fn pause(&self, time: Duration) -> Duration {
        let pauses = self.all().filter(|one| one.has_groups());
        pauses.map(|one| one.pause(time)).min().unwrap_or(time)
    }

    /// Waits for a time, or until the programs notice that the sockets of a group changed. Returns whether they did.
    pub fn wait(&self, time: Duration) -> bool {
        let notices = self.all().flat_map(AttachManager::notices);
        wait(time, notices, std::iter::empty::<BorrowedFd<'_>>())
    }

    /// Whether its network namespace is not ours, and has ended but for us.
    pub fn is_abandoned(&self) -> bool {
        self.own.is_abandoned()
    }

    /// Follows each group. Call it when a [`Everywhere::wait`] noticed something, and after each [`Everywhere::pause`].
    pub fn follow(&mut self) -> Vec<Event> {
        let mut events = self.own.follow();
        for other in self.others.values_mut().filter(|one| one.has_groups()) {
            events.extend(other.follow());
        }
        events
    }

    /// Detaches from all.
    pub fn end(self) {
        for other in self.others.into_values() {
            end(other);
        }
        self.own.end();
    }
}

/// Detaches from all servers of a network namespace.
fn end(mut other: AttachManager) {
    if other.within(AttachManager::detach_all).is_err() {
        other.abandon();
    }
}
