//! A group of ours whose workers share one queue for each address. It is steered by changing from outside which of them are woken.

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
    listeners: Vec<OwnedFd>,
    /// The process in each slot.
    pids: Vec<Option<u32>>,
    events: Vec<SteerEvent>,
}

impl OneQueue {
    /// Steers the workers by the listeners that all of them have; `None`: there is none.
    ///
    /// # Errors
    /// See [`SharedGroup::start`].
    pub fn start(
        supervisor: &Supervisor,
        policy: Policy,
        weights: &[(usize, u32)],
    ) -> Result<Option<Self>, StateError> {
        let dir = supervisor.dir();
        let known = supervisor.shared().map(|(endpoint, listener)| {
            let shared = Shared {
                address: endpoint.address.into(),
                interface: 0,
                inode: socket::inode_of(listener)?,
                cookie: socket::cookie(listener)?,
            };
            Ok((shared, listener.try_clone()?))
        });
        let known: std::io::Result<(Vec<Shared>, Vec<OwnedFd>)> = known.collect();
        let (shared, listeners) =
            known.map_err(|source| dir.failed("watch the listeners of", source))?;
        if shared.is_empty() {
            return Ok(None);
        }
        let pids = vec![None; supervisor.listeners().len()];
        let slots = Slots::Given(pids.clone());
        let group = SharedGroup::start(dir, &shared, slots, &[], &[], policy, weights)?;
        Ok(Some(Self {
            group,
            listeners,
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
        let mut all = self.listeners.iter();
        let closed = capability::with(&FOR_THE_END, || all.try_for_each(socket::drop_syns));
        if let Err(error) = closed {
            self.events.push(SteerEvent::Note(format!(
                "new connections still come while the group closes: {error}"
            )));
        }
    }

    fn can_replace(&self) -> bool {
        true
    }

    /// Both workers have the same listeners. From now on the new one is woken, and the old one no more.
    fn replace(&mut self, slot: usize, pid: u32, _listeners: &[OwnedFd]) -> Result<(), String> {
        self.serve(slot, Some(pid));
        Ok(())
    }

    fn add(&mut self, slot: usize, _listeners: &[OwnedFd]) -> Result<(), String> {
        self.pids.resize(slot + 1, None);
        Ok(())
    }

    /// Its worker is woken no more.
    fn remove(&mut self, slot: usize) {
        self.pids.truncate(slot);
        self.group.set_slots(Slots::Given(self.pids.clone()));
    }

    fn queued(&self, _slot: usize) -> u32 {
        0
    }

    fn queued_for_all(&self) -> u32 {
        let queues = self.listeners.iter().flat_map(accept_queue);
        queues.map(|queue| queue.length).sum()
    }

    fn active(&self, slot: usize) -> u64 {
        self.group.active(slot)
    }

    /// It was armed, and did not take what waited.
    fn is_behind(&self, slot: usize) -> bool {
        self.group.is_behind(slot)
    }

    /// The supervisor looks itself.
    fn accepting(&self, _slot: usize) -> Option<bool> {
        None
    }

    fn events(&mut self) -> Vec<SteerEvent> {
        std::mem::take(&mut self.events)
    }
}
