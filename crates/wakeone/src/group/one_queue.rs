//! A group of ours whose workers share one queue. It is steered by changing from outside which of them are woken.

use std::os::fd::OwnedFd;

use wakeone_arming::{Shared, SharedGroup, Slots};
use wakeone_control::policy::Policy;
use wakeone_control::privileges::FOR_THE_END;
use wakeone_control::state::StateError;
use wakeone_control::steer::{Steer, SteerEvent};
use wakeone_kernel::capability;
use wakeone_kernel::socket::{self, accept_queue};
use wakeone_supervisor::Supervisor;

/// The steering of its workers.
#[derive(Debug)]
pub(super) struct OneQueue {
    group: SharedGroup,
    listener: OwnedFd,
    /// The process in each slot.
    pids: Vec<Option<u32>>,
    events: Vec<SteerEvent>,
}

impl OneQueue {
    /// Steers the workers of the one listener that a supervisor has; `None`: there is none that all share.
    ///
    /// # Errors
    /// See [`SharedGroup::start`].
    pub fn start(
        supervisor: &Supervisor,
        policy: Policy,
        weights: &[(usize, u32)],
    ) -> Result<Option<Self>, StateError> {
        let Some((endpoint, listener)) = supervisor.shared().next() else {
            return Ok(None);
        };
        let dir = supervisor.dir();
        let known = || {
            Ok((
                socket::inode_of(listener)?,
                socket::cookie(listener)?,
                listener.try_clone()?,
            ))
        };
        let (inode, cookie, listener) =
            known().map_err(|source| dir.failed("watch the listener of", source))?;
        let shared = Shared {
            address: endpoint.address.into(),
            interface: 0,
            inode,
            cookie,
        };
        let pids = vec![None; supervisor.listeners().len()];
        let slots = Slots::Given(pids.clone());
        let group = SharedGroup::start(dir, shared, slots, &[], &[], policy, weights)?;
        Ok(Some(Self {
            group,
            listener,
            pids,
            events: Vec::new(),
        }))
    }

    /// Ends the steering: every worker is woken as the kernel does it.
    pub fn end(self) {
        self.group.end();
    }

    fn serve(&mut self, slot: usize, pid: Option<u32>) {
        self.pids[slot] = pid;
        self.group.set_slots(Slots::Given(self.pids.clone()));
    }
}

impl Steer for OneQueue {
    fn worker_up(&mut self, slot: usize, pid: u32) {
        self.serve(slot, Some(pid));
    }

    fn worker_down(&mut self, slot: usize) {
        self.serve(slot, None);
    }

    /// A worker that starts is not held back: it is ready when it is seen to wait for the listener, as only one does that
    /// is armed.
    fn drain(&mut self, slot: usize, on: bool) {
        self.group.drain(slot, on && self.pids[slot].is_some());
    }

    fn close(&mut self) {
        let closed = capability::with(&FOR_THE_END, || socket::drop_syns(&self.listener));
        if let Err(error) = closed {
            self.events.push(SteerEvent::Note(format!(
                "new connections still come while the group closes: {error}"
            )));
        }
    }

    fn can_replace(&self) -> bool {
        true
    }

    /// Both workers have the same listener. From now on the new one is woken, and the old one no more.
    fn replace(&mut self, slot: usize, pid: u32, _listeners: &[OwnedFd]) -> Result<(), String> {
        self.serve(slot, Some(pid));
        Ok(())
    }

    fn queued(&self, _slot: usize) -> u32 {
        0
    }

    fn queued_for_all(&self) -> u32 {
        accept_queue(&self.listener).map_or(0, |queue| queue.length)
    }

    fn active(&self, slot: usize) -> u64 {
        self.group.active(slot)
    }

    /// The supervisor looks itself.
    fn accepting(&self, _slot: usize) -> Option<bool> {
        None
    }

    fn events(&mut self) -> Vec<SteerEvent> {
        std::mem::take(&mut self.events)
    }
}
