//! The common part of the models with threads.

use std::os::unix::thread::JoinHandleExt;
use std::thread::JoinHandle;

use nix::sys::pthread::pthread_kill;
use nix::sys::signal::Signal;

/// The stack of a thread: its buffers and the work of a request fit in many times over, and
/// thousands of threads fit into memory.
pub const STACK_BYTES: usize = 256 * 1024;

/// Ends the call in which a thread waits, so that it sees a stop. The thread must not have been
/// joined.
pub fn interrupt(thread: &JoinHandle<()>) {
    let _ = pthread_kill(thread.as_pthread_t(), Signal::SIGALRM);
}
