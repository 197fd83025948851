//! A lock whose waiters never sleep.

use std::sync::{Mutex, MutexGuard, TryLockError};

/// How often a lock is tried before the CPU is given to others.
const TRIES: u32 = 64;

/// A spinlock, as the one that guards a wait queue in the kernel.
///
/// A lock that lets its waiters sleep would be a wait queue itself: it would wake them in its own order, and its wake-ups
/// would be counted as the queue's. Its sections are short and call nothing that blocks. Under SCHED_FIFO a waiter could
/// keep the owner off the CPU; threads of ordinary priority cannot.
#[derive(Debug, Default)]
pub struct Spin<T>(Mutex<T>);

impl<T> Spin<T> {
    /// A lock around `value`.
    pub fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    /// Takes the lock. A panic of an earlier owner is not passed on: no section leaves the data half changed.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        loop {
            for _ in 0..TRIES {
                match self.0.try_lock() {
                    Ok(guard) => return guard,
                    Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
                    Err(TryLockError::WouldBlock) => std::hint::spin_loop(),
                }
            }
            std::thread::yield_now();
        }
    }
}
