//! A group: a supervisor, with the best steering that this machine and our privileges allow.

mod config;
mod one_queue;
mod queue;
mod setup;

use wakeone_kernel::capability;
use wakeone_model::listener::Protocol;

pub use self::config::{Error, SteeringConfig, check_weights};
use self::config::{Protocols, check};
use self::one_queue::OneQueue;
use self::setup::{Policies, SteeringSetup, counting_cgroup_of, in_counting_cgroup};
use crate::metrics::{self, Monitor, Source};
use wakeone_control::paths::Paths;
use wakeone_control::policy::Policy;
use wakeone_control::privileges::{self, FOR_THE_END};
use wakeone_control::repair::repair_all;
use wakeone_control::state::Endpoint;
use wakeone_control::steer::{Steer, Together};
use wakeone_steering::agent::{Agent, AgentConfig, Rounds};
use wakeone_supervisor::trampoline::kept_capabilities;
use wakeone_supervisor::{self, Options, Queue, Restart, Supervisor, group_name};

/// A group that is ready to run.
#[derive(Debug)]
pub struct Group {
    supervisor: Supervisor,
    /// An agent for each of our programs. Empty: workers share one queue, the kernel's hash chooses, or a classic program
    /// that needs no privilege.
    agents: Vec<Agent>,
    one_queue: Option<OneQueue>,
    policies: Policies,
    monitor: Monitor,
}

impl Group {
    /// Binds the listeners (or takes over living workers), has them steered, and only then makes them listen. The
    /// kernel refuses connections before that, and counts each one after it. Call it before any thread is made.
    ///
    /// # Errors
    /// See [`Error`]. Nothing is left behind then.
    pub fn new(options: &Options, config: &SteeringConfig) -> Result<Self, Error> {
        check(options, config)?;
        queue::check_queue(options, config)?;
        let http = config
            .metrics
            .map(metrics::bind)
            .transpose()
            .map_err(Error::Refused)?;
        let paths = Paths::of(&options.runtime_dir);
        repair_all(&paths);
        let name = group_name(options)?;
        let protocols = Protocols::of(options);
        // Connections are counted there, and those of QUIC found by what its sockets send.
        let counting_cgroup = (protocols.tcp || options.quic)
            .then(|| counting_cgroup_of(&paths, &name))
            .flatten();
        let (mut supervisor, cgroup) = in_counting_cgroup(options, counting_cgroup)?;
        let is_new = supervisor.adopted() == 0;
        let mut setup = SteeringSetup {
            name: name.clone(),
            paths: &paths,
            supervisor: &mut supervisor,
            cgroup,
            may_share: is_new && queue::may_share(options, config),
            backlog: options.backlog,
        };
        if is_new && queue::is_one(options, config) {
            setup.share()?;
        } else if setup.supervisor.queue() == Queue::One {
            setup.leave_cgroup();
        }
        let (dispatchers, policies) = setup.steer_all(protocols, config)?;
        let dispatchers = setup.listen(dispatchers)?;
        // For a group with both protocols it shows the TCP part; `status` shows the other part as well.
        let mut source = Source::open(&paths, &name);
        if config.metrics_tracing {
            let endpoints = setup.supervisor.endpoints();
            source = source.traced(endpoints.iter().map(|at| at.address.into()));
        }
        // The names were checked when the supervisor was made.
        privileges::keep_for_supervising(kept_capabilities(&options.keep_caps).unwrap_or_default());
        let (dispatchers, one_queue) = setup.steer_one_queue(dispatchers, config)?;
        if one_queue.is_some() {
            source = source.with_new_table();
        }
        let mut cgroup = setup.cgroup.map(|cgroup| cgroup.path);
        let is_sticky = config.policy.is_some_and(Policy::is_sticky);
        let (mut agents, rounds) = (Vec::new(), Rounds::new());
        for dispatcher in dispatchers {
            let tasks = AgentConfig {
                rescue: config.rescue.unwrap_or(!is_sticky),
                stuck_after: config.stuck_after,
            };
            let connections = dispatcher.protocol() == Protocol::Tcp;
            let agent = Agent::start(dispatcher, tasks, paths.clone(), cgroup.take(), &rounds);
            // Datagrams in UDP sockets cannot be moved, so there is no rescue.
            if connections {
                source = source.with_rescuer(agent.rescuer());
            }
            agents.push(agent);
        }
        if options.limits.connections.is_some()
            && !agents.iter().any(|agent| agent.established(0).is_some())
        {
            return Err(Error::Refused(format!(
                "--max-requests cannot be for `{name}`: nobody counts its connections here (see `wakeone doctor --self`); give --max-age or --max-memory, or the server's own limit"
            )));
        }
        let is_steered = one_queue.is_some() || !agents.is_empty();
        let can_replace = is_steered && agents.iter().all(Steer::can_replace);
        if options.restart == Some(Restart::StartFirst) && !can_replace {
            return Err(Error::Refused(format!(
                "cannot restart `{name}` by start-first: nothing keeps connections from the old workers here; leave --restart away"
            )));
        }
        let monitor = Monitor::start(http).map_err(|error| {
            Error::Refused(format!(
                "cannot start the thread that serves figures: {error}"
            ))
        })?;
        monitor.add(source);
        Ok(Self {
            monitor,
            supervisor,
            agents,
            one_queue,
            policies,
        })
    }

    /// The supervisor.
    pub fn supervisor(&self) -> &Supervisor {
        &self.supervisor
    }

    /// Returns how workers are chosen at this endpoint.
    pub fn policy(&self, endpoint: &Endpoint) -> Policy {
        match endpoint.protocol() {
            Protocol::Udp => self.policies.udp,
            Protocol::Tcp | Protocol::Mptcp | Protocol::Unix => self.policies.tcp,
        }
    }

    /// Starts the workers and serves until told to end; then removes everything.
    ///
    /// # Errors
    /// The workers cannot be started, or the supervisor cannot go on. In the second case they serve on, steered, and the
    /// next supervisor takes them over.
    pub fn run(self) -> Result<(), Error> {
        let Self {
            supervisor,
            mut agents,
            mut one_queue,
            monitor,
            ..
        } = self;
        let each = agents.iter_mut().map(|one| one as &mut dyn Steer);
        let shared = one_queue.iter_mut().map(|one| one as &mut dyn Steer);
        let done = supervisor.run(&mut Together(each.chain(shared).collect()));
        drop(monitor);
        // The workers are still steered then. With listeners on private ports nobody would reach them otherwise.
        if done
            .as_ref()
            .is_err_and(wakeone_supervisor::Error::leaves_workers)
        {
            return Ok(done?);
        }
        let unread: u64 = agents.iter().map(Agent::unread_bytes).sum();
        if unread > 0 {
            tracing::warn!(
                event = "lost",
                unread,
                "datagrams that nobody had read are lost with the group: {unread} bytes of the kernel's memory"
            );
        }
        if let Some(shared) = one_queue {
            shared.end();
        }
        capability::with(&FOR_THE_END, || agents.into_iter().for_each(Agent::end));
        Ok(done?)
    }
}
