//! The state that the steering thread and its owner share.

use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use crate::slots::Slots;

/// The words that each of them writes for the other.
#[derive(Debug)]
pub(crate) struct Control {
    pub stops: AtomicBool,
    /// The listener is gone.
    pub is_gone: AtomicBool,
    /// Workers came or went since it was last asked.
    pub changed: AtomicBool,
    /// Other processes have the slots from now on.
    pub slots: Mutex<Option<Slots>>,
    /// Ends a sleep.
    pub waker: OwnedFd,
}
