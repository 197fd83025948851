//! The front: it gives connections to workers.

use std::collections::VecDeque;

use wakeone_bpf::policy_group::Variant;

use crate::agent::Agent;
use crate::setup::{Dispatch, Setup};
use crate::steering::Steering;
use crate::workers::{Asleep, Waiting};

/// The part of the simulator that gives connections to workers.
// There is one, and it is used for each event: an indirection would cost more than its size.
#[allow(clippy::large_enum_variant)]
pub(crate) enum Front {
    Shared {
        queue: VecDeque<Waiting>,
        asleep: Asleep,
    },
    Steered {
        steering: Steering,
        agent: Option<Agent>,
    },
}

impl Front {
    pub(crate) fn new(setup: &Setup, seed: u64) -> Self {
        match setup.way {
            Dispatch::Shared(wake) => Self::Shared {
                queue: VecDeque::new(),
                asleep: Asleep::new(wake, setup.workers),
            },
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
            Self::Shared { asleep, .. } => {
                let worker = asleep.wake()?;
                asleep.sleep(worker);
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
}
