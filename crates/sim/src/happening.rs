//! Events that are rarer than requests.

use std::cmp::Ordering;

use crate::faults::Stop;
use crate::workers::Waiting;

/// An event other than a request's arrival and end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Happening {
    /// The agent looks.
    AgentLooks,
    /// The steerer of one queue looks.
    SteererLooks,
    /// A worker is stopped.
    Stop(Stop),
    /// A request that is not of the load ends.
    Leaves { worker: usize },
    /// A worker pauses.
    Pause { worker: usize },
    /// It goes on, if it has not been started anew since.
    GoOn { worker: usize, life: u32 },
    /// A worker crashes.
    Crash { worker: usize },
    /// It is started again.
    Restart { worker: usize },
    /// A SYN is sent again.
    Syn(Waiting),
    /// The last packet of a handshake comes: the connection is one of this worker, or of the shared queue.
    Established { worker: usize, one: Waiting },
    /// A client of a closed loop asks again.
    Asks,
}

/// A rare event and its moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rare {
    pub at: f64,
    pub happening: Happening,
}

impl Eq for Rare {}

impl Ord for Rare {
    /// The first to come is the greatest: `BinaryHeap` gives that first.
    fn cmp(&self, other: &Self) -> Ordering {
        other.at.total_cmp(&self.at)
    }
}

impl PartialOrd for Rare {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
