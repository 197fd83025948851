//! The workers, and how connections are given to them.

use wakeone_bpf::policy_group::{MOST_SLOTS, Variant};

use wakeone_model::arming::ArmingConfig;

use crate::asleep::Wake;
use crate::error::Error;
use crate::faults::Faults;
use crate::servers::Kind;

/// How connections are given to workers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Dispatch {
    /// One queue for all workers.
    Shared(Wake),
    /// One queue for all workers, of which a steerer arms some.
    Armed {
        /// They wait with EPOLLEXCLUSIVE, else all that are armed are woken.
        exclusive: bool,
        /// The steerer's rules.
        config: ArmingConfig,
    },
    /// A queue for each worker, and a policy that chooses one.
    Steered {
        /// The policy's number in `enum wakeone_policy` (`bpf/policy.h`).
        policy: u32,
        /// How it is compiled. [`Variant::Kernel`] becomes [`Variant::Wide`] where there are more workers than it takes.
        variant: Variant,
        /// The queue of a worker is moved when it has not accepted for this long, in s. `None`: never.
        stuck_after_s: Option<f64>,
    },
}

impl Dispatch {
    /// A policy as the kernel runs it; see [`Dispatch::Steered`].
    pub const fn steered(policy: u32, stuck_after_s: Option<f64>) -> Self {
        Self::Steered {
            policy,
            variant: Variant::Kernel,
            stuck_after_s,
        }
    }
}

/// The workers that serve a load.
#[derive(Debug, Clone, PartialEq)]
pub struct Setup {
    /// Workers, 1 to 1,024.
    pub workers: usize,
    /// How each works.
    pub kind: Kind,
    /// The CPUs that requests need for all of their time. `None`: they need none and wait for something else.
    pub cpus: Option<usize>,
    /// How connections are given to workers.
    pub way: Dispatch,
    /// The backlog of each accept queue: it holds one more, as in the kernel. `None`: no limit.
    pub backlog: Option<u32>,
    /// How the policy weighs each worker; empty: all alike.
    pub weights: Vec<u32>,
    /// How much work each worker does in a second, in s; empty: a second's.
    pub speeds: Vec<f64>,
    /// A round trip between clients and workers, in s. A connection is established, and counts, one after its SYN.
    pub rtt_s: f64,
    /// The faults of workers.
    pub faults: Faults,
}

impl Setup {
    /// Workers of one thread whose requests need no CPU, queues without limits, a network without delay, and no faults.
    pub fn new(workers: usize, way: Dispatch) -> Self {
        Self {
            workers,
            kind: Kind::Threads(1),
            cpus: None,
            way,
            backlog: None,
            weights: Vec::new(),
            speeds: Vec::new(),
            rtt_s: 0.0,
            faults: Faults::default(),
        }
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let most = match self.way {
            Dispatch::Steered {
                variant: Variant::Chance,
                ..
            } => Variant::Chance.slots(),
            _ => MOST_SLOTS,
        };
        if !(1..=most).contains(&self.workers) {
            return Err(Error(format!(
                "{} workers cannot be simulated: give 1 to {most}",
                self.workers
            )));
        }
        if let Dispatch::Armed { config, .. } = self.way
            && config.look_every.min(config.hurried).is_zero()
        {
            return Err(Error("it takes some time until the next look".into()));
        }
        if self.kind == Kind::Threads(0) || self.cpus == Some(0) {
            return Err(Error(
                "a worker needs at least one thread, and a machine one CPU".into(),
            ));
        }
        self.check_each()?;
        self.faults.check(self.workers)
    }

    fn check_each(&self) -> Result<(), Error> {
        for (what, given) in [
            ("weights", self.weights.len()),
            ("speeds", self.speeds.len()),
        ] {
            if given != 0 && given != self.workers {
                return Err(Error(format!(
                    "{given} {what} for {} workers: give each worker one",
                    self.workers
                )));
            }
        }
        let weighs = |weight: &u32| (1..=65_535).contains(weight);
        let works = |speed: &f64| speed.is_finite() && *speed > 0.0;
        let sound = self.weights.iter().all(weighs) && self.speeds.iter().all(works);
        if sound && self.rtt_s.is_finite() && self.rtt_s >= 0.0 {
            return Ok(());
        }
        Err(Error(
            "a weight is 1 to 65535, a speed is above 0, and a round trip takes no negative time"
                .into(),
        ))
    }

    /// How many servers' work all workers do.
    pub fn capacity(&self) -> f64 {
        let speeds: f64 = if self.speeds.is_empty() {
            self.workers as f64
        } else {
            self.speeds.iter().sum()
        };
        let servers = match self.kind {
            Kind::Threads(threads) => speeds * threads as f64,
            Kind::EventLoop => speeds,
        };
        let cpus = self.cpus.map_or(f64::INFINITY, |cpus| cpus as f64);
        servers.min(cpus * speeds / self.workers as f64)
    }
}
