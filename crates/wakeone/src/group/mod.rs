//! A group: a supervisor, with the best steering that this machine and our privileges allow.

mod config;
mod setup;

use wakeone_kernel::capability;
use wakeone_model::listener::Protocol;

pub use self::config::{Error, SteeringConfig, check_weights};
use self::config::{Protocols, check};
use self::setup::{Policies, SteeringSetup, counting_cgroup_of, in_counting_cgroup};
use crate::metrics::{self, Monitor, Source};
use wakeone_control::paths::Paths;
use wakeone_control::policy::Policy;
use wakeone_control::privileges::{self, FOR_THE_END};
use wakeone_control::repair::repair_all;
use wakeone_control::state::Endpoint;
use wakeone_control::steer::{Steer, Unsteered};
use wakeone_steering::agent::set::AgentSet;
use wakeone_steering::agent::{Agent, AgentConfig};
use wakeone_supervisor::trampoline::kept_capabilities;
use wakeone_supervisor::{self, Options, Restart, Supervisor, group_name};

/// A group that is ready to run.
#[derive(Debug)]
pub struct Group {
    supervisor: Supervisor,
    /// An agent for each of our programs. Empty: the kernel's hash chooses, or a classic program that needs no
    /// privilege.
    steering: AgentSet,
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
        let http = config
            .metrics
            .map(metrics::bind)
            .transpose()
            .map_err(Error::Refused)?;
        let paths = Paths::of(&options.runtime_dir);
        repair_all(&paths);
        let name = group_name(options)?;
        let protocols = Protocols::of(options);
        // Only connections are counted, so only they need a cgroup.
        let counting_cgroup = protocols
            .tcp
            .then(|| counting_cgroup_of(&paths, &name))
            .flatten();
        let (supervisor, cgroup) = in_counting_cgroup(options, counting_cgroup)?;
        let setup = SteeringSetup {
            name: name.clone(),
            paths: &paths,
            supervisor: &supervisor,
            cgroup,
        };
        let (dispatchers, policies) = setup.steer_all(protocols, config)?;
        let dispatchers = setup.listen(dispatchers)?;
        // For a group with both protocols it shows the TCP part; `status` shows the other part as well.
        let mut source = Source::open(&paths, &name);
        if config.metrics_tracing {
            source = source.traced(supervisor.endpoints().iter().map(|at| at.address.into()));
        }
        // The names were checked when the supervisor was made.
        privileges::keep_for_supervising(kept_capabilities(&options.keep_caps).unwrap_or_default());
        let mut cgroup = setup.cgroup.map(|cgroup| cgroup.path);
        let mut agents = Vec::new();
        for dispatcher in dispatchers {
            let tasks = AgentConfig {
                rescue: config.rescue != Some(false),
                stuck_after: config.stuck_after,
            };
            let connections = dispatcher.protocol() == Protocol::Tcp;
            let agent = Agent::start(dispatcher, tasks, paths.clone(), cgroup.take());
            // Datagrams in UDP sockets cannot be moved, so there is no rescue.
            if connections {
                source = source.with_rescuer(agent.rescuer());
            }
            agents.push(agent);
        }
        let steering = AgentSet(agents);
        if options.restart == Some(Restart::StartFirst) && !steering.can_replace() {
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
            steering,
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
            mut steering,
            monitor,
            ..
        } = self;
        if steering.0.is_empty() {
            return Ok(supervisor.run(&mut Unsteered)?);
        }
        let done = supervisor.run(&mut steering as &mut dyn Steer);
        drop(monitor);
        // The workers are still steered then. With listeners on private ports nobody would reach them otherwise.
        if done
            .as_ref()
            .is_err_and(wakeone_supervisor::Error::leaves_workers)
        {
            return Ok(done?);
        }
        let unread: u64 = steering.0.iter().map(Agent::unread_bytes).sum();
        if unread > 0 {
            tracing::warn!(
                event = "lost",
                unread,
                "datagrams that nobody had read are lost with the group: {unread} bytes of the kernel's memory"
            );
        }
        capability::with(&FOR_THE_END, || {
            steering.0.into_iter().for_each(Agent::end);
        });
        Ok(done?)
    }
}
