//! A steered server of others, whichever way it is steered.

use wakeone_bpf::notices::Notices;
use wakeone_model::address::Address;
use wakeone_model::listener::Protocol;
use wakeone_observe::Moment;

use super::attached::{Attached, Due, Presence};
use super::candidate::AttachCandidate;
use super::config::AttachConfig;
use super::elsewhere::{Elsewhere, within};
use super::error::Error;
use super::one_queue::OneQueue;
use crate::metrics::Source;
use crate::steered::SteeredGroup;
use wakeone_control::paths::Paths;
use wakeone_control::policy::Policy;
use wakeone_control::state::StateError;
use wakeone_control::steer::SteerEvent;
use wakeone_steering::agent::Rounds;

/// A steered server.
pub enum Server {
    /// It has a queue for each worker, and a program chooses the queue.
    QueueEach(Box<Attached>),
    /// Its workers share one queue, and those are woken that have least to do.
    OneQueue(Box<OneQueue>),
}

impl Server {
    /// Steers a listener from now on, the way that fits it. `command`: the one that we started its server by, else empty.
    /// `rounds` look at it, if it has a queue for each worker.
    ///
    /// # Errors
    /// See [`Error`]; nothing is changed then.
    pub fn start(
        candidate: AttachCandidate,
        config: &AttachConfig,
        paths: &Paths,
        command: &[String],
        rounds: &Rounds,
    ) -> Result<Self, Error> {
        match (candidate.sharing.clone(), candidate.address()) {
            (Some(sharing), _) => OneQueue::start(&candidate, &sharing, config, paths, command)
                .map(|one| Self::OneQueue(Box::new(one))),
            (None, Address::Inet(address)) => {
                Attached::start(candidate, address, config, paths, command, rounds)
                    .map(|attached| Self::QueueEach(Box::new(attached)))
            }
            (None, address @ Address::Unix(_)) => Err(Error::Unfit {
                address: address.into(),
                why: "a queue for each worker takes SO_REUSEPORT, which UNIX sockets do not have"
                    .into(),
                advice: String::new(),
            }),
        }
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        match self {
            Self::QueueEach(attached) => attached.name(),
            Self::OneQueue(one) => one.name(),
        }
    }

    /// Its protocol.
    pub fn protocol(&self) -> Protocol {
        match self {
            Self::QueueEach(attached) => attached.protocol(),
            Self::OneQueue(one) => one.protocol(),
        }
    }

    /// How a worker is chosen.
    pub fn policy(&self) -> Policy {
        match self {
            Self::QueueEach(attached) => attached.policy,
            Self::OneQueue(one) => one.policy(),
        }
    }

    /// Connections that were open at the start and are counted.
    pub fn counted(&self) -> u64 {
        match self {
            Self::QueueEach(attached) => attached.recounted.counted,
            Self::OneQueue(one) => one.open,
        }
    }

    /// See [`Attached::due`]. One whose thread follows its workers is never due.
    pub(super) fn due(&mut self) -> Option<Due> {
        match self {
            Self::QueueEach(attached) => attached.due(),
            Self::OneQueue(_) => None,
        }
    }

    /// See [`Attached::due_with_others`].
    pub(super) fn due_with_others(&mut self) -> Option<Due> {
        match self {
            Self::QueueEach(attached) => attached.due_with_others(),
            Self::OneQueue(_) => None,
        }
    }

    /// Follows its sockets and workers, if that is due. `elsewhere`: the network namespace that they are in, if that is not ours.
    ///
    /// # Errors
    /// See [`Attached::follow`].
    pub(super) fn follow(
        &mut self,
        due: Option<Due>,
        elsewhere: Option<&Elsewhere>,
        moment: &Moment,
    ) -> Result<Presence, Error> {
        match self {
            Self::QueueEach(attached) => match due {
                // One that cannot be entered has ended.
                Some(due) => {
                    within(elsewhere, || attached.follow(due, moment)).unwrap_or(Ok(Presence::Gone))
                }
                None => Ok(Presence::Here),
            },
            // Its thread, which was started there, looks.
            Self::OneQueue(one) => Ok(one.follow()),
        }
    }

    /// See [`Attached::notices`].
    pub fn notices(&self) -> Option<&Notices> {
        match self {
            Self::QueueEach(attached) => attached.notices(),
            Self::OneQueue(_) => None,
        }
    }

    /// See [`Attached::is_opening`].
    pub fn is_opening(&self) -> bool {
        match self {
            Self::QueueEach(attached) => attached.is_opening(),
            Self::OneQueue(_) => false,
        }
    }

    /// Whether a thread of its own follows its workers.
    pub fn follows_itself(&self) -> bool {
        matches!(self, Self::OneQueue(_))
    }

    /// Whether it needs no frequent [`Server::follow`] now.
    pub fn is_quiet(&self) -> bool {
        match self {
            Self::QueueEach(attached) => attached.is_quiet(),
            // It has a thread of its own.
            Self::OneQueue(_) => true,
        }
    }

    /// Chooses by another policy from now on, if it fits.
    pub fn set_policy(&self, policy: Policy) {
        match self {
            Self::QueueEach(attached) => attached.set_policy(policy),
            Self::OneQueue(one) => one.set_policy(policy),
        }
    }

    /// Sets the weights of slots; those not named get 1.
    pub fn set_weights(&mut self, weights: Vec<(usize, u32)>) {
        match self {
            Self::QueueEach(attached) => attached.set_weights(weights),
            Self::OneQueue(one) => one.set_weights(&weights),
        }
    }

    /// Returns the source of its metrics.
    pub fn source(&self, paths: &Paths, traced: bool) -> Source {
        match self {
            Self::QueueEach(attached) => attached.source(paths, traced),
            Self::OneQueue(one) => one.source(traced),
        }
    }

    /// Returns the events since the last call.
    pub fn events(&mut self) -> Vec<SteerEvent> {
        match self {
            Self::QueueEach(attached) => attached.events(),
            Self::OneQueue(_) => Vec::new(),
        }
    }

    /// Leaves the server as it was.
    pub fn end(self) {
        match self {
            Self::QueueEach(attached) => attached.end(),
            Self::OneQueue(one) => one.end(),
        }
    }

    /// The same for a server that has ended. Returns the group, which shows that the next one is waited for.
    ///
    /// # Errors
    /// That cannot be written.
    pub fn rest(self) -> Result<SteeredGroup, StateError> {
        match self {
            Self::QueueEach(attached) => attached.rest(),
            Self::OneQueue(one) => one.rest(),
        }
    }
}
