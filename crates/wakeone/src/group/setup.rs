//! Setting up the best steering that this machine and our privileges allow, for each protocol of a group.
//!
//! The listeners are created in a cgroup, so that their connections are counted.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use wakeone_kernel::capability;
use wakeone_kernel::cgroup;
use wakeone_kernel::socket::{self, ClassicChoice};
use wakeone_model::listener::Protocol;

use super::config::{Error, Protocols, SteeringConfig, datagram_name};
use super::one_queue::OneQueue;
use wakeone_control::paths::Paths;
use wakeone_control::policy::Policy;
use wakeone_control::privileges::FOR_THE_END;
use wakeone_steering::dispatcher::{self, Dispatcher, Plan};
use wakeone_steering::slot_sockets::duplicate;
use wakeone_supervisor::{self, Options, Queue, Supervisor};

/// The policies for choosing workers, by protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Policies {
    pub tcp: Policy,
    pub udp: Policy,
}

/// The parts from which steering is set up.
pub(super) struct SteeringSetup<'a> {
    pub name: String,
    pub paths: &'a Paths,
    pub supervisor: &'a mut Supervisor,
    pub cgroup: Option<CountingCgroup>,
    /// The workers may share one queue where no program can choose between several.
    pub may_share: bool,
    /// The backlog asked for.
    pub backlog: Option<i32>,
}

impl SteeringSetup<'_> {
    /// Removes the cgroup: nothing is counted there.
    pub fn leave_cgroup(&mut self) {
        self.abandon();
        self.cgroup = None;
    }

    /// Has all workers share one queue.
    pub fn share(&mut self) -> Result<(), Error> {
        self.leave_cgroup();
        let shared = self.supervisor.share(self.backlog);
        Ok(shared.map_err(wakeone_supervisor::Error::from)?)
    }

    /// Sets up the best steering for each protocol. Workers that share one queue are steered once they listen.
    pub fn steer_all(
        &mut self,
        protocols: Protocols,
        config: &SteeringConfig,
    ) -> Result<(Vec<Dispatcher>, Policies), Error> {
        let mut dispatchers = Vec::new();
        let mut policies = Policies {
            tcp: config.policy.unwrap_or_default(),
            udp: Policy::for_datagrams(config.affinity.unwrap_or_default()),
        };
        if protocols.tcp && self.supervisor.queue() == Queue::Each {
            let (dispatcher, policy) = self.steer(config)?;
            policies.tcp = policy;
            dispatchers.extend(dispatcher);
        }
        if protocols.udp {
            let datagrams = Datagrams {
                setup: self,
                name: datagram_name(&self.name, protocols),
            };
            match datagrams.steer(config) {
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
    pub fn listen(&self, dispatchers: Vec<Dispatcher>) -> Result<Vec<Dispatcher>, Error> {
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
                Err(wakeone_supervisor::Error::from(error).into())
            }
        }
    }

    /// Steers the workers that share one queue, if they do. It needs none of the capabilities for loading.
    pub fn steer_one_queue(
        &self,
        dispatchers: Vec<Dispatcher>,
        config: &SteeringConfig,
    ) -> Result<(Vec<Dispatcher>, Option<OneQueue>), Error> {
        let policy = config.policy.unwrap_or_default();
        match OneQueue::start(self.supervisor, policy, &config.weights) {
            Ok(shared) => Ok((dispatchers, shared)),
            Err(error) => {
                capability::with(&FOR_THE_END, || self.end(dispatchers));
                Err(wakeone_supervisor::Error::from(error).into())
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

    /// Sets up the best steering of connections that the configuration allows; `None`: the kernel's own, or a classic program's.
    fn steer(&mut self, config: &SteeringConfig) -> Result<(Option<Dispatcher>, Policy), Error> {
        let result = match self.load(config) {
            Ok(dispatcher) => {
                let policy = dispatcher.policy();
                Ok((Some(dispatcher), policy))
            }
            Err(error) if self.may_share => {
                tracing::warn!(
                    event = "degraded",
                    "{error}. The workers share one queue instead"
                );
                self.share()?;
                return Ok((None, config.policy.unwrap_or_default()));
            }
            Err(error) => self.fallback(config, error.into()),
        };
        if result.is_err() {
            self.abandon();
        }
        result
    }

    fn load(&self, config: &SteeringConfig) -> Result<Dispatcher, dispatcher::Error> {
        let listeners = self.copies(&self.name, Protocol::Tcp)?;
        let places = self.supervisor.places();
        let own = self.supervisor.opens_own();
        let joins = self.supervisor.ports();
        let plan = Plan {
            joins: if own { &joins } else { &[] },
            by_name: config.policy.is_some(),
            weights: &config.weights,
            cgroup: self.cgroup.as_ref().map(|cgroup| cgroup.path.as_path()),
            backlog: self.supervisor.backlog(),
            adopt: self.supervisor.adopted() > 0,
            lookup: &places,
            ..Plan::new(&self.name, self.paths, config.policy.unwrap_or_default())
        };
        Dispatcher::start(&plan, listeners)
    }

    /// Returns copies of the sockets of one protocol, by slot, then by address.
    fn copies(
        &self,
        name: &str,
        protocol: Protocol,
    ) -> Result<Vec<Vec<OwnedFd>>, dispatcher::Error> {
        duplicate(self.sockets(protocol)).map_err(|source| dispatcher::Error::Kernel {
            name: name.to_owned(),
            source: wakeone_bpf::Error {
                step: "duplicating the listeners".into(),
                source,
            },
        })
    }

    /// Returns the sockets of one protocol, by slot, then by address.
    fn sockets(&self, protocol: Protocol) -> impl Iterator<Item = Vec<&OwnedFd>> {
        let endpoints = self.supervisor.endpoints();
        self.supervisor.listeners().map(move |listeners| {
            let all = endpoints.iter().zip(listeners);
            all.filter(|(endpoint, _)| endpoint.protocol() == protocol)
                .map(|(_, listener)| listener)
                .collect()
        })
    }

    /// Returns the best choice without our program; `error` says why there is none.
    fn fallback(
        &self,
        config: &SteeringConfig,
        error: Error,
    ) -> Result<(Option<Dispatcher>, Policy), Error> {
        let own = self.supervisor.opens_own();
        if own || config.rescue == Some(true) || !self.supervisor.places().is_empty() {
            return Err(error);
        }
        let policy = match config.policy {
            None => Policy::Random,
            Some(policy @ (Policy::Hash | Policy::Random | Policy::Cpu)) => policy,
            Some(_) => return Err(error),
        };
        if !config.weights.is_empty() {
            return Err(error);
        }
        self.attach_classic(policy, Protocol::Tcp)?;
        self.abandon();
        tracing::warn!(
            event = "degraded",
            "{error}. Going on with {policy}, and without rescue: the queue of a stuck worker waits for it"
        );
        Ok((None, policy))
    }

    fn attach_classic(&self, policy: Policy, protocol: Protocol) -> Result<(), Error> {
        let choice = match policy {
            Policy::Random => ClassicChoice::Random,
            Policy::Cpu => ClassicChoice::Cpu,
            _ => return Ok(()),
        };
        let members = self.supervisor.listeners().len() as u32;
        let slots: Vec<Vec<&OwnedFd>> = self.sockets(protocol).collect();
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
        if let Some(cgroup) = &self.cgroup {
            cgroup.abandon();
        }
    }
}

/// The UDP sockets of a group.
struct Datagrams<'a> {
    setup: &'a SteeringSetup<'a>,
    name: String,
}

impl Datagrams<'_> {
    /// Sets up the best steering that the configuration allows; `None`: the kernel's own, or a classic program's.
    fn steer(&self, config: &SteeringConfig) -> Result<(Option<Dispatcher>, Policy), Error> {
        let affinity = config.affinity.unwrap_or_default();
        // A policy that goes by connections was meant for the group's listeners.
        let wanted = config
            .policy
            .filter(|policy| policy.fits_datagrams(affinity).is_ok());
        let policy = wanted.unwrap_or(Policy::for_datagrams(affinity));
        match self.load(config, policy) {
            Ok(dispatcher) => Ok((Some(dispatcher), policy)),
            Err(error) => self.fallback(config, wanted, error.into()),
        }
    }

    fn load(
        &self,
        config: &SteeringConfig,
        policy: Policy,
    ) -> Result<Dispatcher, dispatcher::Error> {
        let plan = Plan {
            by_name: true,
            weights: &config.weights,
            adopt: self.setup.supervisor.adopted() > 0,
            datagrams: Some(config.affinity.unwrap_or_default()),
            cgroup: self
                .setup
                .cgroup
                .as_ref()
                .map(|cgroup| cgroup.path.as_path()),
            ..Plan::new(&self.name, self.setup.paths, policy)
        };
        Dispatcher::start(&plan, self.setup.copies(&self.name, Protocol::Udp)?)
    }

    /// Returns the best choice without our program. The kernel's hash keeps flows together; a classic program cannot.
    fn fallback(
        &self,
        config: &SteeringConfig,
        wanted: Option<Policy>,
        error: Error,
    ) -> Result<(Option<Dispatcher>, Policy), Error> {
        let Some(policy) = Policy::without_program(wanted, config.affinity) else {
            return Err(error);
        };
        if !config.weights.is_empty() {
            return Err(error);
        }
        self.setup.attach_classic(policy, Protocol::Udp)?;
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

/// Returns the cgroup that listeners are born in: one below our own, or that of an earlier supervisor, which ran in
/// another.
pub(super) fn counting_cgroup_of(paths: &Paths, name: &str) -> Option<PathBuf> {
    let home = cgroup::own().ok();
    let own = home.map(|home| home.join(paths.cgroup_name(name)));
    let there = own.as_ref().is_some_and(|own| own.exists());
    let earlier = || paths.cgroups_of(name).into_iter().next();
    if there { own } else { earlier().or(own) }
}

/// A cgroup that the listeners were born in, and whether we must remove it on failure.
#[derive(Debug)]
pub(super) struct CountingCgroup {
    pub path: PathBuf,
    made: bool,
}

impl CountingCgroup {
    /// Removes it, unless an earlier supervisor made it.
    pub fn abandon(&self) {
        if self.made {
            let _ = cgroup::remove(&self.path);
        }
    }
}

/// Binds the listeners in this cgroup if that is possible.
pub(super) fn in_counting_cgroup(
    options: &Options,
    path: Option<PathBuf>,
) -> Result<(Supervisor, Option<CountingCgroup>), Error> {
    let Some(path) = path else {
        return Ok((Supervisor::new(options)?, None));
    };
    match cgroup::create_sockets_in(&path, || Supervisor::new(options)) {
        Ok((made, Ok(mut supervisor))) => {
            supervisor.run_in(&path);
            Ok((supervisor, Some(CountingCgroup { path, made })))
        }
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
