//! A server that is steered from outside, and followed as its sockets come and go.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use wakeone_kernel::bpf::recount::{Recounted, Uncounted};
use wakeone_kernel::{capability, cgroup};
use wakeone_model::listener::Protocol;
use wakeone_observe::Watcher;

use super::candidate::{AttachCandidate, Member, cookies, members, refuse_foreign};
use super::config::AttachConfig;
use super::error::Error;
use super::pace::{Pace, QUIET_WORKERS};
use super::recount::{count_in, slots_of_workers, uncounted};
use crate::agent::{Agent, AgentConfig};
use crate::dispatcher::{Dispatcher, Plan};
use crate::metrics::Source;
use crate::paths::Paths;
use crate::policy::Policy;
use crate::privileges::{self, FOR_LOADING};
use crate::steer::SteerEvent;
use crate::steered::{Origin, SteeredGroup};
use crate::supervisor::listen::Endpoint;

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
    /// The uncounted ones that still wait in an accept queue.
    uncounted: Option<Uncounted>,
    pace: Pace,
    /// A socket could not be given a slot. The next look tries again.
    unsettled: bool,
}

/// How often to look which processes serve a group that gets connections.
const WORKERS_EVERY: Duration = Duration::from_millis(500);
/// The result of following a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// It is there.
    Here,
    /// All its sockets are closed.
    Gone,
}

impl Attached {
    /// Steers a listener from now on.
    ///
    /// # Errors
    /// See [`Error`]; nothing is left attached or pinned then.
    pub fn start(
        candidate: AttachCandidate,
        config: &AttachConfig,
        paths: &Paths,
    ) -> Result<Self, Error> {
        let address = candidate.address();
        if candidate.protocol() == Protocol::Udp && config.rescue {
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
        // Without pins an earlier agent was killed before it attached anything.
        let kept = group.was_attached()? && paths.group_pins(&candidate.name).exists();
        if !kept {
            // Before anything is attached, so that `detach` and the next `attach` know of it if we are killed.
            group.store().inspect_err(|_| group.forget_state())?;
        }
        let loaded = capability::with(&FOR_LOADING, || load(&candidate, config, paths, kept));
        let (dispatcher, recounted) = loaded.inspect_err(|_| {
            if !kept {
                group.forget_state();
            }
        })?;
        // Before the agent's thread starts: it has what we have now.
        privileges::keep_for_attaching();
        let policy = dispatcher.policy();
        let uncounted = capability::with(&FOR_LOADING, || uncounted(&dispatcher));
        let tasks = AgentConfig {
            rescue: config.rescue,
            stuck_after: config.stuck_after,
        };
        let sockets = candidate
            .members
            .iter()
            .map(|m| (m.cookie, m.remote, m.worker));
        group.steer(dispatcher, tasks, paths, sockets);
        if let Err(error) = group.store() {
            group.end();
            return Err(error.into());
        }
        Ok(Self {
            address,
            group,
            watcher: candidate.watcher,
            weights: config.weights.clone(),
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
        let workers_every = if quiet { QUIET_WORKERS } else { WORKERS_EVERY };
        let mut seen_anew = self.watcher.follow(workers_every)?;
        let mut there = cookies(&self.watcher);
        if self.group.cookies().any(|cookie| !there.contains(&cookie)) {
            // A socket whose queue is being moved does not listen for a moment. So a socket is gone only if it is
            // missing between two looks of the agent.
            let watcher = &mut self.watcher;
            seen_anew |= self.group.between_looks(|| watcher.follow(workers_every))?;
            there = cookies(&self.watcher);
        }
        let mut gone: Vec<u64> = self.group.cookies().collect();
        gone.retain(|cookie| !there.contains(cookie) && !self.group.is_left_closed(*cookie));
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
        Ok(
            if there.is_empty() && self.group.cookies().next().is_none() {
                Presence::Gone
            } else {
                Presence::Here
            },
        )
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
    config: &AttachConfig,
    paths: &Paths,
    kept: bool,
) -> Result<(Dispatcher, Recounted), Error> {
    if !kept {
        refuse_foreign(candidate)?;
    }
    // Listeners were made in any cgroup, and only the root cgroup sees all of their connections.
    let root = cgroup::mount_point().ok();
    let plan = Plan {
        by_name: config.policy.is_some(),
        weights: &config.weights,
        cgroup: root.as_deref(),
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
    let dispatcher = Dispatcher::start_beside(&plan, remote.collect())?;
    let recounted = if dispatcher.counting() {
        let pins = paths.group_pins(&candidate.name);
        let slots = slots_of_workers(&dispatcher, &candidate.members);
        count_in(&pins, candidate.address(), &slots)
    } else {
        Recounted::default()
    };
    Ok((dispatcher, recounted))
}
