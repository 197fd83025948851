//! A server whose workers share one queue. It is steered by changing from outside which of them are woken.

use wakeone_arming::{Shared, SharedGroup, Slots};
use wakeone_model::address::Address;
use wakeone_model::listener::Protocol;

use super::attached::Presence;
use super::candidate::{AttachCandidate, Sharing};
use super::config::AttachConfig;
use super::error::Error;
use crate::metrics::Source;
use crate::steered::{Origin, SteeredGroup};
use wakeone_control::paths::Paths;
use wakeone_control::policy::Policy;
use wakeone_control::privileges;
use wakeone_control::state::{GroupDir, Identity, SlotRecord, StateError};

/// A steered server.
#[derive(Debug)]
pub struct OneQueue {
    group: SharedGroup,
    shared: Shared,
    dir: GroupDir,
    origin: Origin,
    paths: Paths,
    /// Connections that were open at the start.
    pub open: u64,
}

impl OneQueue {
    /// Steers the workers from now on.
    ///
    /// # Errors
    /// See [`Error`]; every entry is as the server made it then.
    pub(super) fn start(
        candidate: &AttachCandidate,
        sharing: &Sharing,
        config: &AttachConfig,
        paths: &Paths,
        command: &[String],
    ) -> Result<Self, Error> {
        let address = candidate.address();
        let policy = config.policy_of(Protocol::Tcp);
        check_policy(address, policy)?;
        let dir = GroupDir::take(&paths.runtime, &candidate.name)?;
        // Before any entry is changed, so that `detach` and the next `attach` know of it if we are killed.
        let network = candidate.network.clone();
        let origin = Origin::of_server(candidate.protocol(), address, network, command);
        dir.store(&origin.state(dir.name(), vec![record(None, 0)])?)?;
        privileges::keep_for_attaching();
        let (workers, pids) = (&sharing.workers, candidate.watcher.pids());
        let (shared, weights) = (sharing.shared, &config.weights);
        let (listeners, slots) = (std::slice::from_ref(&shared), Slots::Found);
        let group = SharedGroup::start(&dir, listeners, slots, workers, pids, policy, weights);
        let group = group.inspect_err(|_| dir.forget())?;
        let one = Self {
            group,
            shared,
            dir,
            origin,
            paths: paths.clone(),
            open: candidate.open as u64,
        };
        one.store();
        Ok(one)
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        self.dir.name()
    }

    /// Where it listens.
    pub fn address(&self) -> Address {
        self.shared.address
    }

    /// Its protocol.
    pub fn protocol(&self) -> Protocol {
        match self.address() {
            Address::Inet(_) => Protocol::Tcp,
            Address::Unix(_) => Protocol::Unix,
        }
    }

    /// Notes workers that came or went.
    pub fn follow(&self) -> Presence {
        if self.group.take_changed() {
            self.store();
        }
        self.dir.catch_up();
        match self.group.is_gone() {
            true => Presence::Gone,
            false => Presence::Here,
        }
    }

    /// How a worker is chosen.
    pub fn policy(&self) -> Policy {
        self.group.policy()
    }

    /// Chooses by another policy from now on, if one queue can be steered by it.
    pub fn set_policy(&self, policy: Policy) {
        match policy.fits_one_queue() {
            Ok(()) => self.group.set_policy(policy),
            Err(why) => tracing::warn!("{} stays as it is: {why}", self.name()),
        }
    }

    /// Sets the weights of slots; those not named get 1.
    pub fn set_weights(&self, weights: &[(usize, u32)]) {
        self.group.set_weights(weights);
    }

    /// Returns the source of its metrics.
    pub fn source(&self, traced: bool) -> Source {
        let source = Source::open(&self.paths, self.name());
        match traced {
            true => source.traced(std::iter::once(self.address())),
            false => source,
        }
    }

    /// Ends the steering: every entry is as the server made it.
    pub fn end(self) {
        self.group.end();
        self.dir.forget();
    }

    /// The same for a server that has ended. Returns the group, which shows that the next one is waited for.
    ///
    /// # Errors
    /// That cannot be written.
    pub fn rest(self) -> Result<SteeredGroup, StateError> {
        self.group.end();
        SharedGroup::clear(&self.dir);
        let group = SteeredGroup::in_folder(self.dir, self.origin);
        group.store().inspect_err(|_| group.forget_state())?;
        Ok(group)
    }

    fn store(&self) {
        match self.origin.state(self.name(), self.slots()) {
            Ok(state) => self.dir.keep(&state),
            Err(error) => tracing::warn!("{}: {error}", self.name()),
        }
    }

    fn slots(&self) -> Vec<SlotRecord> {
        let inode = self.shared.inode;
        let slot = |worker| record(worker, inode);
        let workers = self.group.workers();
        // A group has one slot at least.
        let none = workers.is_empty().then_some(None);
        workers.into_iter().chain(none).map(slot).collect()
    }
}

fn record(worker: Option<u32>, inode: u64) -> SlotRecord {
    SlotRecord {
        worker: worker.and_then(|pid| Identity::of(pid).ok()),
        current: true,
        inodes: worker.map(|_| inode).into_iter().collect(),
        beside: None,
        orphaned: false,
    }
}

/// Refuses a policy that one queue cannot be steered by.
fn check_policy(address: Address, policy: Policy) -> Result<(), Error> {
    policy.fits_one_queue().map_err(|why| Error::Unfit {
        address: address.into(),
        why,
        advice: String::new(),
    })
}
