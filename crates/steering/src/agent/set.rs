//! Several agents as one: a group that listens by TCP and by UDP has a program, a table and an agent for each.

use std::os::fd::OwnedFd;

use super::Agent;
use wakeone_control::steer::{Steer, SteerEvent};

/// The agents of one group.
#[derive(Debug, Default)]
pub struct AgentSet(pub Vec<Agent>);

impl Steer for AgentSet {
    fn worker_up(&mut self, slot: usize, pid: u32) {
        self.0.iter_mut().for_each(|one| one.worker_up(slot, pid));
    }

    fn worker_down(&mut self, slot: usize) {
        self.0.iter_mut().for_each(|one| one.worker_down(slot));
    }

    fn drain(&mut self, slot: usize, on: bool) {
        self.0.iter_mut().for_each(|one| one.drain(slot, on));
    }

    fn close(&mut self) {
        self.0.iter_mut().for_each(Steer::close);
    }

    fn refuse(&mut self) {
        self.0.iter_mut().for_each(Steer::refuse);
    }

    /// Whether all agents can. One of UDP cannot: datagrams in a socket's queue are read by the process that has the
    /// socket.
    fn can_replace(&self) -> bool {
        !self.0.is_empty() && self.0.iter().all(Steer::can_replace)
    }

    fn replace(&mut self, slot: usize, pid: u32, listeners: &[OwnedFd]) -> Result<(), String> {
        self.0
            .iter_mut()
            .try_for_each(|one| one.replace(slot, pid, listeners))
    }

    /// Adds connections and bytes, as callers only ask whether anything waits.
    fn queued(&self, slot: usize) -> u32 {
        self.0
            .iter()
            .fold(0, |sum, one| sum.saturating_add(one.queued(slot)))
    }

    fn active(&self, slot: usize) -> u64 {
        self.0.iter().map(|one| one.active(slot)).sum()
    }

    /// A worker that waits for one protocol is ready; a server may serve the other by another thread.
    fn accepting(&self, slot: usize) -> Option<bool> {
        self.0
            .iter()
            .filter_map(|one| one.accepting(slot))
            .reduce(|one, other| one || other)
    }

    fn events(&mut self) -> Vec<SteerEvent> {
        self.0.iter_mut().flat_map(Steer::events).collect()
    }
}
