//! A group: a supervisor, and whatever steers its connections as well as this machine and our privileges allow.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use wakeone_kernel::capability::{self, Capability};
use wakeone_kernel::cgroup;
use wakeone_kernel::socket::{self, ClassicChoice};

use crate::agent::{Agent, Duties, duplicate};
use crate::dispatcher::{self, Dispatcher, Plan};
use crate::metrics::{self, Monitor, Source};
use crate::paths::Paths;
use crate::policy::Policy;
use crate::steer::{Steer, Unsteered};
use crate::supervisor::state::MOST_SLOTS;
use crate::supervisor::trampoline::kept_capabilities;
use crate::supervisor::{self, Options, Supervisor, group_name};

/// How connections are to be steered. What was not asked for may be had in a lesser way; what was asked for may not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wish {
    /// How a worker is chosen; `None`: least-connections, or the best that can be had.
    pub policy: Option<Policy>,
    /// Move the queues of stuck workers; `None`: where it can be done.
    pub rescue: Option<bool>,
    /// How long a worker may leave connections waiting while another is idle.
    pub stuck_after: Duration,
    /// Weights of slots that have another than 1.
    pub weights: Vec<(usize, u32)>,
    /// Where to serve metrics.
    pub metrics: Option<SocketAddr>,
    /// Whether those of the kernel's tracepoints are among them.
    pub metrics_tracing: bool,
}

impl Default for Wish {
    fn default() -> Self {
        Self {
            policy: None,
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
    /// What was asked for cannot be had.
    #[error(transparent)]
    Steering(#[from] dispatcher::Error),
    /// What was asked for cannot be had, for a reason of our own.
    #[error("{0}")]
    Refused(String),
    /// The wish cannot be.
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
    steering: Steering,
    policy: Policy,
    monitor: Monitor,
}

#[derive(Debug)]
enum Steering {
    /// By our program, with an agent beside it.
    Full(Box<Agent>),
    /// By the kernel's hash, or by a classic program that needs no privilege.
    Plain,
}

impl Group {
    /// Binds the listeners (or takes over living workers), and has them steered. Call it before any thread is made.
    ///
    /// # Errors
    /// See [`Error`]. Nothing is left behind then.
    pub fn new(options: &Options, wish: &Wish) -> Result<Self, Error> {
        check(options, wish)?;
        let http = wish
            .metrics
            .map(metrics::bind)
            .transpose()
            .map_err(Error::Refused)?;
        let paths = Paths::of(&options.runtime_dir);
        let name = group_name(options)?;
        let nursery = paths.cgroups_of(&name).into_iter().next().or_else(|| {
            cgroup::own()
                .ok()
                .map(|home| home.join(paths.cgroup_name(&name)))
        });
        let (supervisor, cgroup) = in_nursery(options, nursery)?;
        let ground = Ground {
            name: &name,
            paths: &paths,
            supervisor: &supervisor,
            cgroup,
        };
        let (steering, policy) = ground.steer(wish)?;
        let mut source = Source::open(&paths, &name);
        if wish.metrics_tracing {
            source = source.traced(supervisor.endpoints().iter().map(|at| at.address));
        }
        drop_capabilities(options);
        let steering = match steering {
            Some(dispatcher) => {
                let duties = Duties {
                    rescue: wish.rescue != Some(false),
                    stuck_after: wish.stuck_after,
                };
                let cgroup = ground.cgroup.map(|cgroup| cgroup.path);
                let agent = Agent::start(dispatcher, duties, paths, cgroup);
                source = source.with_rescuer(agent.rescuer());
                Steering::Full(Box::new(agent))
            }
            None => Steering::Plain,
        };
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
            policy,
        })
    }

    /// The supervisor.
    pub fn supervisor(&self) -> &Supervisor {
        &self.supervisor
    }

    /// How workers are chosen.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Starts the workers and serves until told to end; then takes everything away.
    ///
    /// # Errors
    /// The workers cannot be started, or the supervisor cannot go on.
    pub fn run(self) -> Result<(), Error> {
        let done = match self.steering {
            Steering::Full(mut agent) => {
                let done = self.supervisor.run(&mut *agent as &mut dyn Steer);
                drop(self.monitor);
                capability::with(&FOR_THE_END, || agent.end());
                done
            }
            Steering::Plain => self.supervisor.run(&mut Unsteered),
        };
        Ok(done?)
    }
}

fn check(options: &Options, wish: &Wish) -> Result<(), Error> {
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

/// Whether each can be a slot and its weight; else what is wrong, with the weight first.
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

/// A cgroup that the listeners were born in, and whether it is ours to remove on failure.
#[derive(Debug)]
struct Nursery {
    path: PathBuf,
    made: bool,
}

fn in_nursery(
    options: &Options,
    path: Option<PathBuf>,
) -> Result<(Supervisor, Option<Nursery>), Error> {
    let Some(path) = path else {
        return Ok((Supervisor::new(options)?, None));
    };
    match cgroup::born_in(&path, || Supervisor::new(options)) {
        Ok((made, Ok(supervisor))) => Ok((supervisor, Some(Nursery { path, made }))),
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

/// What steering is built upon.
struct Ground<'a> {
    name: &'a str,
    paths: &'a Paths,
    supervisor: &'a Supervisor,
    cgroup: Option<Nursery>,
}

impl Ground<'_> {
    /// The best steering that fits the wish; `None`: the kernel's own, or a classic program's.
    fn steer(&self, wish: &Wish) -> Result<(Option<Dispatcher>, Policy), Error> {
        let result = self
            .dispatch(wish)
            .or_else(|error| self.do_without(wish, error));
        if result.is_err() {
            self.abandon();
        }
        result
    }

    fn dispatch(&self, wish: &Wish) -> Result<(Option<Dispatcher>, Policy), Error> {
        // Without counts the lengths of the accept queues are the next best sign of load.
        let counted = wish.policy.unwrap_or_default();
        let cgroup = self.cgroup.as_ref().map(|cgroup| cgroup.path.as_path());
        match (self.load(wish, counted, cgroup), wish.policy) {
            (Ok(dispatcher), _) if cgroup.is_some() => Ok((Some(dispatcher), counted)),
            (Err(error), _) if cgroup.is_none() || !capability::has(Capability::CAP_BPF) => {
                Err(error.into())
            }
            // Without a place to pin to there is nothing, counted or not.
            (Err(error @ dispatcher::Error::NoBpffs { .. }), _) => Err(error.into()),
            (_, Some(policy)) if policy.needs_counts() => Err(Error::Refused(format!(
                "cannot steer `{}` by {policy}: it counts connections, which needs a cgroup2 that we may attach to (CAP_NET_ADMIN); --policy shortest-queue needs neither",
                self.name
            ))),
            (_, policy) => {
                let policy = policy.unwrap_or(Policy::ShortestQueue);
                let dispatcher = self.load(wish, policy, None)?;
                tracing::warn!(
                    event = "degraded",
                    "connections are not counted (that needs CAP_NET_ADMIN and a cgroup2): {policy} instead of {}",
                    Policy::default()
                );
                Ok((Some(dispatcher), policy))
            }
        }
    }

    fn load(
        &self,
        wish: &Wish,
        policy: Policy,
        cgroup: Option<&Path>,
    ) -> Result<Dispatcher, dispatcher::Error> {
        let listeners =
            duplicate(self.supervisor.listeners()).map_err(|source| dispatcher::Error::Kernel {
                name: self.name.to_owned(),
                source: wakeone_kernel::bpf::Error {
                    step: "duplicating the listeners".into(),
                    source,
                },
            })?;
        let plan = Plan {
            name: self.name,
            paths: self.paths,
            policy,
            weights: &wish.weights,
            cgroup,
            backlog: self.supervisor.backlog(),
            adopt: self.supervisor.adopted() > 0,
            read_queues: true,
        };
        Dispatcher::start(&plan, listeners)
    }

    /// What can be had without our program; `error` says why there is none.
    fn do_without(&self, wish: &Wish, error: Error) -> Result<(Option<Dispatcher>, Policy), Error> {
        if wish.rescue == Some(true) {
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
        self.attach_classic(policy)?;
        self.abandon();
        tracing::warn!(
            event = "degraded",
            "{error}. Going on with {policy}, and without rescue: the queue of a stuck worker waits for it"
        );
        Ok((None, policy))
    }

    fn attach_classic(&self, policy: Policy) -> Result<(), Error> {
        let choice = match policy {
            Policy::Random => ClassicChoice::Random,
            Policy::Cpu => ClassicChoice::Cpu,
            _ => return Ok(()),
        };
        let members = self.supervisor.listeners().len() as u32;
        for first in self.supervisor.listeners().next().unwrap_or_default() {
            socket::attach_classic(first, choice, members).map_err(|error| {
                Error::Refused(format!(
                    "cannot have `{}` steered by {policy}: {error}",
                    self.name
                ))
            })?;
        }
        Ok(())
    }

    fn abandon(&self) {
        if let Some(Nursery { path, made: true }) = &self.cgroup {
            let _ = cgroup::remove(path);
        }
    }
}

/// What taking a group away needs besides: removing a cgroup below a folder without write permission, and a mount;
/// and, before that, filters that keep new connections from its listeners.
pub(crate) const FOR_THE_END: [Capability; 3] = [
    Capability::CAP_DAC_OVERRIDE,
    Capability::CAP_SYS_ADMIN,
    Capability::CAP_NET_ADMIN,
];

/// Keeps what starting, watching and ending workers takes, and gives up the rest: from here on nothing is loaded.
fn drop_capabilities(options: &Options) {
    let mut keep = vec![
        Capability::CAP_SETUID,
        Capability::CAP_SETGID,
        Capability::CAP_SETPCAP,
        Capability::CAP_KILL,
        Capability::CAP_SYS_NICE,
        Capability::CAP_SYS_PTRACE,
        Capability::CAP_DAC_READ_SEARCH,
    ];
    // Names were checked when the supervisor was made.
    keep.extend(kept_capabilities(&options.keep_caps).unwrap_or_default());
    if let Err(error) = capability::keep_only(&keep, &FOR_THE_END) {
        tracing::debug!("keeping all capabilities: {error}");
    }
}
