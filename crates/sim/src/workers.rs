//! Workers, and the connections that wait for them.

use std::collections::VecDeque;

/// A connection that waits, with the request it will bring.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Waiting {
    /// When its first SYN came, in s.
    pub arrived: f64,
    /// How much work it is, in s.
    pub work: f64,
    /// The hash of its addresses and ports.
    pub hash: u32,
    /// SYNs that were dropped.
    pub dropped: u32,
}

/// A worker, with the queue that is its own.
#[derive(Debug, Default)]
pub(crate) struct Worker {
    /// Requests it is busy with.
    pub busy: usize,
    /// Connections it has accepted so far.
    pub accepted: u64,
    /// Connections that wait for this worker alone.
    pub queue: VecDeque<Waiting>,
    /// The number of pauses and stops that overlap now; it works where there are none.
    pub halts: u32,
    /// It crashed, and is not started again yet.
    pub down: bool,
    /// How often it has been started anew.
    pub lives: u32,
}

impl Worker {
    /// Whether it does nothing now.
    #[inline]
    pub(crate) fn is_halted(&self) -> bool {
        self.halts > 0 || self.down
    }
}
