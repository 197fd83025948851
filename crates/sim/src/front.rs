//! The front: it gives connections to workers.

use std::collections::VecDeque;

use wakeone_bpf::policy_group::Variant;
use wakeone_bpf::table::flag;
use wakeone_model::arming::Change;

use crate::agent::Agent;
use crate::asleep::{Asleep, Wake};
use crate::setup::{Dispatch, Setup};
use crate::steerer::Steerer;
use crate::steering::Steering;
use crate::workers::Waiting;

/// The part of the simulator that gives connections to workers.
// There is one, and it is used for each event: an indirection would cost more than its size.
#[allow(clippy::large_enum_variant)]
pub(crate) enum Front {
    Shared {
        queue: VecDeque<Waiting>,
        asleep: Asleep,
        steerer: Option<Steerer>,
    },
    Steered {
        steering: Steering,
        agent: Option<Agent>,
    },
}

impl Front {
    pub(crate) fn new(setup: &Setup, seed: u64) -> Self {
        let shared = |wake, steerer| Self::Shared {
            queue: VecDeque::new(),
            asleep: Asleep::new(wake, setup.workers, seed),
            steerer,
        };
        match setup.way {
            Dispatch::Shared(wake) => shared(wake, None),
            Dispatch::Armed { exclusive, config } => {
                let wake = match exclusive {
                    true => Wake::FirstRegistered,
                    false => Wake::All,
                };
                let steerer =
                    Steerer::new(config, exclusive, setup.workers, &setup.weights, setup.cpus);
                shared(wake, Some(steerer))
            }
            Dispatch::Steered {
                policy,
                variant,
                stuck_after_s,
            } => {
                let variant = match variant {
                    Variant::Kernel if setup.workers > Variant::Kernel.slots() => Variant::Wide,
                    variant => variant,
                };
                let agent = |after| Agent::new(after, setup.workers, setup.kind, setup.backlog);
                Self::Steered {
                    steering: Steering::new(variant, policy, setup.workers, &setup.weights, seed),
                    agent: stuck_after_s.map(agent),
                }
            }
        }
    }

    /// The worker that a new connection goes to while all of them wait; none where none is up.
    pub(crate) fn open(&mut self) -> Option<usize> {
        match self {
            Self::Shared {
                asleep, steerer, ..
            } => {
                let worker = asleep.wake()?;
                asleep.sleep(worker);
                if let Some(steerer) = steerer {
                    steerer.enter(worker);
                }
                Some(worker)
            }
            Self::Steered { steering, .. } => {
                let hash = steering.hash();
                let slot = steering.pick(hash)?;
                steering.enter(slot, 0.0);
                Some(slot)
            }
        }
    }

    /// Whether a worker looks for connections.
    pub(crate) fn is_armed(&self, worker: usize) -> bool {
        match self {
            Self::Shared { asleep, .. } => asleep.is_armed(worker),
            Self::Steered { .. } => true,
        }
    }

    /// A worker has one more connection.
    #[inline]
    pub(crate) fn enter(&mut self, worker: usize, now: f64) {
        match self {
            Self::Steered { steering, .. } => steering.enter(worker, now),
            Self::Shared {
                steerer: Some(steerer),
                ..
            } => steerer.enter(worker),
            Self::Shared { .. } => {}
        }
    }

    /// A connection of a worker is closed.
    #[inline]
    pub(crate) fn leave(&mut self, worker: usize, now: f64) {
        match self {
            Self::Steered { steering, .. } => steering.leave(worker, now),
            Self::Shared {
                steerer: Some(steerer),
                ..
            } => steerer.leave(worker),
            Self::Shared { .. } => {}
        }
    }

    /// A worker is gone.
    pub(crate) fn end(&mut self, worker: usize) {
        match self {
            Self::Steered { steering, .. } => steering.mark(worker, flag::UP, false),
            Self::Shared {
                asleep, steerer, ..
            } => {
                asleep.remove(worker);
                if let Some(steerer) = steerer {
                    steerer.end(worker);
                }
            }
        }
    }

    /// It is back.
    pub(crate) fn join(&mut self, worker: usize) {
        match self {
            Self::Steered { steering, .. } => steering.mark(worker, flag::UP, true),
            Self::Shared {
                asleep, steerer, ..
            } => {
                if let Some(steerer) = steerer {
                    steerer.join(worker);
                    asleep.change(worker, Change::Arm);
                }
            }
        }
    }

    /// A connection comes to the queue. Returns when the steerer looks because of it.
    #[inline]
    pub(crate) fn ring(&mut self, now: f64) -> Option<f64> {
        match self {
            Self::Shared {
                steerer: Some(steerer),
                ..
            } => steerer.ring(now),
            _ => None,
        }
    }

    /// The steerer of one queue looks if that is due, and has entries changed. `works`: whether a worker does anything now.
    /// Returns the changes, and when the next look is due, in s; `None`: none is due now, or there is no steerer.
    pub(crate) fn steer(
        &mut self,
        now: f64,
        works: impl Fn(usize) -> bool,
    ) -> Option<(Vec<(usize, Change)>, f64)> {
        let Self::Shared {
            queue,
            asleep,
            steerer: Some(steerer),
        } = self
        else {
            return None;
        };
        if !steerer.is_due(now) {
            return None;
        }
        let waits = |worker| asleep.has(worker) && works(worker);
        let changes = steerer.look(now, !queue.is_empty(), waits);
        for (worker, change) in &changes {
            asleep.change(*worker, *change);
        }
        Some((changes, steerer.due_s()))
    }
}
