//! How a server that others started is to be steered.

use std::time::Duration;

use wakeone_model::listener::Protocol;

use wakeone_control::policy::{Affinity, Policy};

/// The steering that a user wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachConfig {
    /// How a worker is chosen; `None`: least-connections, for UDP other than QUIC shortest-queue.
    pub policy: Option<Policy>,
    /// For UDP: how datagrams of one flow are kept together.
    pub affinity: Affinity,
    /// Move the queues of stuck workers. Datagrams in UDP sockets cannot be moved, and stay.
    pub rescue: bool,
    /// How long connections may wait without one being accepted.
    pub stuck_after: Duration,
    /// Weights of slots whose weight is not 1.
    pub weights: Vec<(usize, u32)>,
}

impl AttachConfig {
    /// The policy for sockets of this protocol.
    pub fn policy_of(&self, protocol: Protocol) -> Policy {
        self.policy.unwrap_or(match protocol {
            Protocol::Udp => Policy::for_datagrams(self.affinity),
            _ => Policy::default(),
        })
    }
}
