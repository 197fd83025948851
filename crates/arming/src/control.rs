//! The state that the steering thread and its owner share.

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;

/// The words that each of them writes for the other.
#[derive(Debug)]
pub(crate) struct Control {
    pub stops: AtomicBool,
    /// The listener is gone.
    pub is_gone: AtomicBool,
    /// Workers came or went since it was last asked.
    pub changed: AtomicBool,
    /// Ends a sleep.
    pub waker: OwnedFd,
}
