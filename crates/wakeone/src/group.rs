//! A group: a supervisor, with the best steering that this machine and our privileges allow.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use wakeone_kernel::capability::{self, Capability};
use wakeone_kernel::cgroup;
use wakeone_kernel::socket::{self, ClassicChoice};
use wakeone_model::listener::Protocol;

use crate::agent::set::AgentSet;
use crate::agent::{Agent, AgentConfig};
use crate::dispatcher::{self, Dispatcher, Plan};
use crate::metrics::{self, Monitor, Source};
use crate::paths::Paths;
use crate::policy::{Affinity, Policy};
use crate::privileges::{self, FOR_THE_END};
use crate::repair::repair_all;
use crate::slot_sockets::duplicate;
use crate::steer::{Steer, Unsteered};
use crate::supervisor::listen::Endpoint;
use crate::supervisor::state::MOST_SLOTS;
use crate::supervisor::trampoline::kept_capabilities;
use crate::supervisor::{self, Options, Restart, Supervisor, group_name, state};

/// How connections are to be steered. Settings that were left open may fall back to less; settings that were made may
/// not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SteeringConfig {
    /// How a worker is chosen; `None`: least-connections or the best that works here, and shortest-queue for datagrams.
    /// In a group that also listens by TCP, a policy that goes by connections is for TCP, and datagrams use their own.
    pub policy: Option<Policy>,
    /// How datagrams of one flow are kept together; `None`: flow, as far as that works here.
    pub affinity: Option<Affinity>,
    /// Move the queues of stuck workers; `None`: if that works here.
    pub rescue: Option<bool>,
    /// How long a worker may leave connections waiting while another is idle.
    pub stuck_after: Duration,
    /// Weights of slots whose weight is not 1.
    pub weights: Vec<(usize, u32)>,
    /// The address to serve metrics on.
    pub metrics: Option<SocketAddr>,
    /// Whether they include those of the kernel's tracepoints.
    pub metrics_tracing: bool,
}

impl Default for SteeringConfig {
    fn default() -> Self {
        Self {
            policy: None,
            affinity: None,
            rescue: None,
            stuck_after: Duration::from_millis(5),
            weights: Vec::new(),
            metrics: None,
            metrics_tracing: false,
        }
    }
}

/// Why a group could not be started, or had to stop.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The supervisor's reason.
    #[error(transparent)]
    Supervisor(#[from] supervisor::Error),
    /// The steering that was asked for is not possible.
    #[error(transparent)]
    Steering(#[from] dispatcher::Error),
    /// We refuse the steering that was asked for, for a reason of our own.
    #[error("{0}")]
    Refused(String),
    /// The settings are wrong, or do not go together.
    #[error("{0}")]
    Usage(String),
}

impl Error {
    /// Whether the arguments were wrong (exit code 2), not the world (1).
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Supervisor(error) => error.is_usage(),
            Self::Usage(_) => true,
            Self::Steering(_) | Self::Refused(_) => false,
        }
    }
}

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

/// The policies for choosing workers, by protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Policies {
    tcp: Policy,
    udp: Policy,
}

impl Group {
    /// Binds the listeners (or takes over living workers), has them steered, and only then makes them listen. The
    /// kernel refuses connections before that, and counts each one after it. Call it before any thread is made.
    ///
    /// # Errors
    /// See [`Error`]. Nothing is left behind then.
    pub fn new(options: &Options, wish: &SteeringConfig) -> Result<Self, Error> {
        check(options, wish)?;
        let http = wish
            .metrics
            .map(metrics::bind)
            .transpose()
            .map_err(Error::Refused)?;
        let paths = Paths::of(&options.runtime_dir);
        repair_all(&paths);
        let name = group_name(options)?;
        let kinds = Kinds::of(options);
        // Only connections are counted, so only they need a cgroup.
        let counting_cgroup = kinds
            .tcp
            .then(|| counting_cgroup_of(&paths, &name))
            .flatten();
        let (supervisor, cgroup) = in_counting_cgroup(options, counting_cgroup)?;
        let ground = SteeringSetup {
            name: name.clone(),
            paths: &paths,
            supervisor: &supervisor,
            cgroup,
        };
        let (dispatchers, policies) = ground.steer_all(kinds, wish)?;
        let dispatchers = ground.listen(dispatchers)?;
        // For a group with both protocols it shows the TCP part; `status` shows the other part as well.
        let mut source = Source::open(&paths, &name);
        if wish.metrics_tracing {
            source = source.traced(supervisor.endpoints().iter().map(|at| at.address));
        }
        // The names were checked when the supervisor was made.
        privileges::keep_for_supervising(kept_capabilities(&options.keep_caps).unwrap_or_default());
        let mut cgroup = ground.cgroup.map(|cgroup| cgroup.path);
        let mut agents = Vec::new();
        for dispatcher in dispatchers {
            let config = AgentConfig {
                rescue: wish.rescue != Some(false),
                stuck_after: wish.stuck_after,
            };
            let connections = dispatcher.protocol() == Protocol::Tcp;
            let agent = Agent::start(dispatcher, config, paths.clone(), cgroup.take());
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
        if endpoint.udp {
            self.policies.udp
        } else {
            self.policies.tcp
        }
    }

    /// Starts the workers and serves until told to end; then removes everything.
    ///
    /// # Errors
    /// The workers cannot be started, or the supervisor cannot go on.
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

/// The protocols that a group listens by.
#[derive(Debug, Clone, Copy)]
struct Kinds {
    tcp: bool,
    udp: bool,
}

impl Kinds {
    fn of(options: &Options) -> Self {
        let mut addresses = options.listen.iter();
        Self {
            tcp: addresses.clone().any(|address| !address.is_udp()),
            udp: addresses.any(supervisor::address::Address::is_udp),
        }
    }
}

/// Returns the cgroup that listeners are born in: one below our own, or that of an earlier supervisor, which ran in
/// another.
fn counting_cgroup_of(paths: &Paths, name: &str) -> Option<PathBuf> {
    let home = cgroup::own().ok();
    let own = home.map(|home| home.join(paths.cgroup_name(name)));
    let there = own.as_ref().is_some_and(|own| own.exists());
    let earlier = || paths.cgroups_of(name).into_iter().next();
    if there { own } else { earlier().or(own) }
}

/// Returns the name of the group of UDP sockets. If there are listeners too, those have the plain name.
fn datagram_name(name: &str, kinds: Kinds) -> String {
    if kinds.tcp {
        format!("{name}{DATAGRAM_SUFFIX}")
    } else {
        name.to_owned()
    }
}

/// The end of the name of a group's UDP part, if the group has another part.
pub const DATAGRAM_SUFFIX: &str = "-udp";

fn check(options: &Options, wish: &SteeringConfig) -> Result<(), Error> {
    check_datagrams(options, wish)?;
    check_lookup(options, wish)?;
    if let Some((slot, _)) = wish
        .weights
        .iter()
        .find(|(slot, _)| *slot >= options.workers)
    {
        return Err(Error::Usage(format!(
            "--weight {slot}=… names no slot: {} workers have the slots 0 to {}",
            options.workers,
            options.workers.saturating_sub(1)
        )));
    }
    check_weights(&wish.weights).map_err(|why| Error::Usage(format!("--weight {why}")))?;
    if wish.stuck_after < Duration::from_millis(1) {
        return Err(Error::Usage(
            "--stuck-after takes 1ms or more: below that a worker that was just woken looks stuck"
                .into(),
        ));
    }
    Ok(())
}

/// Checks that each pair can be a slot and its weight; else says what is wrong, with the weight first.
///
/// # Errors
/// One sentence without its beginning.
pub fn check_weights(weights: &[(usize, u32)]) -> Result<(), String> {
    match weights
        .iter()
        .find(|(slot, weight)| *slot >= MOST_SLOTS || !(1..=65535).contains(weight))
    {
        None => Ok(()),
        Some((slot, weight)) if *slot >= MOST_SLOTS => Err(format!(
            "{slot}={weight} cannot be: slots are 0 to {}",
            MOST_SLOTS - 1
        )),
        Some((slot, weight)) => Err(format!("{slot}={weight} cannot be: a weight is 1 to 65535")),
    }
}

/// Refuses options that do not go with datagrams, or only with them.
fn check_datagrams(options: &Options, wish: &SteeringConfig) -> Result<(), Error> {
    let kinds = Kinds::of(options);
    let usage = |why: String| Err(Error::Usage(why));
    if wish.affinity.is_some() && !kinds.udp {
        return usage("--affinity is for datagrams, and no -l is a udp:// address".into());
    }
    if kinds.udp && !kinds.tcp {
        if let Some(Err(why)) = wish.policy.map(Policy::fits_datagrams) {
            return usage(format!("--policy {why}"));
        }
        if wish.rescue == Some(true) {
            return usage(
                "--rescue cannot be for UDP alone: what waits in a UDP socket cannot be moved; a stuck worker gets nothing more without it".into(),
            );
        }
    }
    if kinds.udp && kinds.tcp && !state::is_name(&datagram_name(&group_name(options)?, kinds)) {
        return usage(
            "the group's name is too long for one with TCP and UDP; give a --name".into(),
        );
    }
    Ok(())
}

/// Refuses options that do not go with listeners on private ports.
fn check_lookup(options: &Options, wish: &SteeringConfig) -> Result<(), Error> {
    let usage = |why: &str| Err(Error::Usage(why.into()));
    if !options.lookup {
        return Ok(());
    }
    if !Kinds::of(options).tcp {
        return usage(
            "--lookup is for connections, and every -l is a udp:// address; leave it away",
        );
    }
    if wish.metrics_tracing {
        return usage(
            "--lookup and --metrics-tracing cannot be together: the tracepoints' probes look at one port; leave one away",
        );
    }
    let missing = capability::missing();
    if !missing.is_empty() && !capability::has(Capability::CAP_SYS_ADMIN) {
        return Err(Error::Refused(format!(
            "--lookup needs {}: start as root or with these capabilities, or leave --lookup away",
            missing.join(" and ")
        )));
    }
    Ok(())
}

/// A cgroup that the listeners were born in, and whether we must remove it on failure.
#[derive(Debug)]
struct CountingCgroup {
    path: PathBuf,
    made: bool,
}

fn in_counting_cgroup(
    options: &Options,
    path: Option<PathBuf>,
) -> Result<(Supervisor, Option<CountingCgroup>), Error> {
    let Some(path) = path else {
        return Ok((Supervisor::new(options)?, None));
    };
    match cgroup::create_sockets_in(&path, || Supervisor::new(options)) {
        Ok((made, Ok(supervisor))) => Ok((supervisor, Some(CountingCgroup { path, made }))),
        Ok((made, Err(error))) => {
            if made {
                let _ = cgroup::remove(&path);
            }
            Err(error.into())
        }
        Err(error) => {
            tracing::debug!("no cgroup for the listeners: {error}");
            Ok((Supervisor::new(options)?, None))
        }
    }
}

/// The parts from which steering is set up.
struct SteeringSetup<'a> {
    name: String,
    paths: &'a Paths,
    supervisor: &'a Supervisor,
    cgroup: Option<CountingCgroup>,
}

impl SteeringSetup<'_> {
    /// Sets up the best steering for each protocol.
    fn steer_all(
        &self,
        kinds: Kinds,
        wish: &SteeringConfig,
    ) -> Result<(Vec<Dispatcher>, Policies), Error> {
        let mut dispatchers = Vec::new();
        let mut policies = Policies {
            tcp: Policy::default(),
            udp: Policy::FOR_DATAGRAMS,
        };
        if kinds.tcp {
            let (dispatcher, policy) = self.steer(wish)?;
            policies.tcp = policy;
            dispatchers.extend(dispatcher);
        }
        if kinds.udp {
            let datagrams = Datagrams {
                ground: self,
                name: datagram_name(&self.name, kinds),
            };
            match datagrams.steer(wish) {
                Ok((dispatcher, policy)) => {
                    policies.udp = policy;
                    dispatchers.extend(dispatcher);
                }
                Err(error) => {
                    self.end(dispatchers);
                    return Err(error);
                }
            }
        }
        Ok((dispatchers, policies))
    }

    /// Makes the listeners listen once everything is in place. Each connection is steered and counted from the first
    /// on.
    fn listen(&self, dispatchers: Vec<Dispatcher>) -> Result<Vec<Dispatcher>, Error> {
        let raise = |slot| {
            for dispatcher in &dispatchers {
                if let Err(error) = dispatcher.raise(slot) {
                    tracing::warn!(
                        event = "degraded",
                        slot,
                        "slot {slot} gets connections only from the kernel's choice: {error}"
                    );
                }
            }
        };
        match self.supervisor.listen(raise) {
            Ok(()) => Ok(dispatchers),
            Err(error) => {
                self.end(dispatchers);
                Err(supervisor::Error::from(error).into())
            }
        }
    }

    /// Removes everything again.
    fn end(&self, dispatchers: Vec<Dispatcher>) {
        let cgroup = self.cgroup.as_ref().map(|cgroup| cgroup.path.as_path());
        for dispatcher in dispatchers {
            dispatcher.end(self.paths, cgroup);
        }
        self.abandon();
    }

    /// Sets up the best steering of connections that fits the wish; `None`: the kernel's own, or a classic program's.
    fn steer(&self, wish: &SteeringConfig) -> Result<(Option<Dispatcher>, Policy), Error> {
        let result = match self.load(wish) {
            Ok(dispatcher) => {
                let policy = dispatcher.policy();
                Ok((Some(dispatcher), policy))
            }
            Err(error) => self.fallback(wish, error.into()),
        };
        if result.is_err() {
            self.abandon();
        }
        result
    }

    fn load(&self, wish: &SteeringConfig) -> Result<Dispatcher, dispatcher::Error> {
        let listeners = self.copies(&self.name, false)?;
        let places = self.supervisor.places();
        let plan = Plan {
            by_name: wish.policy.is_some(),
            weights: &wish.weights,
            cgroup: self.cgroup.as_ref().map(|cgroup| cgroup.path.as_path()),
            backlog: self.supervisor.backlog(),
            adopt: self.supervisor.adopted() > 0,
            lookup: &places,
            ..Plan::new(&self.name, self.paths, wish.policy.unwrap_or_default())
        };
        Dispatcher::start(&plan, listeners)
    }

    /// Returns copies of the sockets of one protocol, by slot, then by address.
    fn copies(&self, name: &str, udp: bool) -> Result<Vec<Vec<OwnedFd>>, dispatcher::Error> {
        duplicate(self.sockets(udp)).map_err(|source| dispatcher::Error::Kernel {
            name: name.to_owned(),
            source: wakeone_kernel::bpf::Error {
                step: "duplicating the listeners".into(),
                source,
            },
        })
    }

    /// Returns the sockets of one protocol, by slot, then by address.
    fn sockets(&self, udp: bool) -> impl Iterator<Item = Vec<&OwnedFd>> {
        let endpoints = self.supervisor.endpoints();
        self.supervisor.listeners().map(move |listeners| {
            let all = endpoints.iter().zip(listeners);
            all.filter(|(endpoint, _)| endpoint.udp == udp)
                .map(|(_, listener)| listener)
                .collect()
        })
    }

    /// Returns the best choice without our program; `error` says why there is none.
    fn fallback(
        &self,
        wish: &SteeringConfig,
        error: Error,
    ) -> Result<(Option<Dispatcher>, Policy), Error> {
        if wish.rescue == Some(true) || !self.supervisor.places().is_empty() {
            return Err(error);
        }
        let policy = match wish.policy {
            None => Policy::Random,
            Some(policy @ (Policy::Hash | Policy::Random | Policy::Cpu)) => policy,
            Some(_) => return Err(error),
        };
        if !wish.weights.is_empty() {
            return Err(error);
        }
        self.attach_classic(policy, false)?;
        self.abandon();
        tracing::warn!(
            event = "degraded",
            "{error}. Going on with {policy}, and without rescue: the queue of a stuck worker waits for it"
        );
        Ok((None, policy))
    }

    fn attach_classic(&self, policy: Policy, udp: bool) -> Result<(), Error> {
        let choice = match policy {
            Policy::Random => ClassicChoice::Random,
            Policy::Cpu => ClassicChoice::Cpu,
            _ => return Ok(()),
        };
        let members = self.supervisor.listeners().len() as u32;
        let slots: Vec<Vec<&OwnedFd>> = self.sockets(udp).collect();
        for (address, first) in slots.first().into_iter().flatten().enumerate() {
            // If workers of an earlier supervisor listen, the others join their group.
            let mut sockets = slots.iter().filter_map(|slot| slot.get(address));
            let member = sockets.find(|one| socket::listens(one)).unwrap_or(first);
            socket::attach_classic(member, choice, members).map_err(|error| {
                Error::Refused(format!(
                    "cannot have `{}` steered by {policy}: {error}",
                    self.name
                ))
            })?;
        }
        Ok(())
    }

    fn abandon(&self) {
        if let Some(CountingCgroup { path, made: true }) = &self.cgroup {
            let _ = cgroup::remove(path);
        }
    }
}

/// The UDP sockets of a group.
struct Datagrams<'a> {
    ground: &'a SteeringSetup<'a>,
    name: String,
}

impl Datagrams<'_> {
    /// Sets up the best steering that fits the wish; `None`: the kernel's own, or a classic program's.
    fn steer(&self, wish: &SteeringConfig) -> Result<(Option<Dispatcher>, Policy), Error> {
        // A policy that goes by connections was meant for the group's listeners.
        let wanted = wish.policy.filter(|policy| policy.fits_datagrams().is_ok());
        let policy = wanted.unwrap_or(Policy::FOR_DATAGRAMS);
        match self.load(wish, policy) {
            Ok(dispatcher) => Ok((Some(dispatcher), policy)),
            Err(error) => self.fallback(wish, wanted, error.into()),
        }
    }

    fn load(&self, wish: &SteeringConfig, policy: Policy) -> Result<Dispatcher, dispatcher::Error> {
        let plan = Plan {
            by_name: true,
            weights: &wish.weights,
            adopt: self.ground.supervisor.adopted() > 0,
            datagrams: Some(wish.affinity.unwrap_or_default()),
            ..Plan::new(&self.name, self.ground.paths, policy)
        };
        Dispatcher::start(&plan, self.ground.copies(&self.name, true)?)
    }

    /// Returns the best choice without our program. The kernel's hash keeps flows together; a classic program cannot.
    fn fallback(
        &self,
        wish: &SteeringConfig,
        wanted: Option<Policy>,
        error: Error,
    ) -> Result<(Option<Dispatcher>, Policy), Error> {
        let Some(policy) = Policy::without_program(wanted, wish.affinity) else {
            return Err(error);
        };
        if !wish.weights.is_empty() {
            return Err(error);
        }
        self.ground.attach_classic(policy, true)?;
        let kept = match policy {
            Policy::Hash => "flows stay where the kernel's hash puts them",
            _ => "flows are not kept together",
        };
        tracing::warn!(
            event = "degraded",
            "{error}. Going on with {policy}: {kept}, and a stuck worker goes on getting its share"
        );
        Ok((None, policy))
    }
}
