//! One refresh of one listener: the watch of it, and how it is steered.

use serde::{Deserialize, Serialize};
use wakeone_model::address::Address;
use wakeone_model::listener::Protocol;
use wakeone_model::snapshot::Watch;

/// A slot of a steered group.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotLook {
    /// Its number.
    pub slot: u32,
    /// Its worker.
    pub pid: Option<u32>,
    /// `up`, `stuck`, `draining` or `down`.
    pub state: String,
    /// Connections open, of datagrams in which connections are known: those of QUIC.
    #[serde(default)]
    pub open: Option<u64>,
    /// Times so far that the policy chose it.
    pub selected: u64,
    /// Times so far that its queue was moved to others.
    pub rescues: u64,
    /// Connections so far that were moved by that.
    pub rescued: u64,
}

/// The steering of a listener by us.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Steering {
    /// Name of the group.
    pub group: String,
    /// Its policy; `None` where the number in its table is of no policy known.
    pub policy: Option<String>,
    /// Whether an agent is running for it: without one nothing is rescued.
    pub agent: bool,
    /// Connections so far that the kernel placed because the policy could not.
    pub fallbacks: u64,
    /// A sentence about UDP flows that are too much for one worker.
    #[serde(default)]
    pub heavy: Option<String>,
    /// Its slots, by number.
    pub slots: Vec<SlotLook>,
}

impl Steering {
    /// The slots of a worker.
    pub fn slots_of(&self, pid: u32) -> impl Iterator<Item = &SlotLook> {
        self.slots.iter().filter(move |slot| slot.pid == Some(pid))
    }
}

/// One refresh of one listener; a line of a recording.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frame {
    /// The period since the refresh before.
    pub watch: Watch,
    /// How it is steered, where it is.
    #[serde(default)]
    pub steering: Option<Steering>,
}

/// The identity of a listener across refreshes.
pub type Place = (Protocol, Address, u32);

impl Frame {
    /// The listener that it is of.
    pub fn place(&self) -> Place {
        let listener = &self.watch.last.listener;
        (listener.protocol, listener.address, listener.interface)
    }

    /// When it was taken, ns of the monotonic clock of the machine watched.
    pub fn at_ns(&self) -> u64 {
        self.watch.last.at_ns
    }
}
