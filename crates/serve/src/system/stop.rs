//! Requests to stop: SIGTERM and SIGINT as a flag that blocking calls notice.
//!
//! A server that blocks in `accept` must return from it when it is asked to stop. Checking a flag
//! just before the call is not enough: the signal may come between the check and the call. So the
//! handler is installed without `SA_RESTART` (the call returns `EINTR`). From the first signal on,
//! a timer repeats SIGALRM until the process is gone. A thread that missed the first interruption
//! gets the next one, at most [`REPEAT_MS`] later. This needs no thread and no extra file
//! descriptor.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

/// How often a blocked call is interrupted again once a stop has been requested, milliseconds.
pub const REPEAT_MS: u32 = 20;

static REQUESTED: AtomicBool = AtomicBool::new(false);
static INTERRUPTS: AtomicU32 = AtomicU32::new(0);

/// From now on SIGTERM and SIGINT set the flag that [`requested`] reads, and interrupt blocking
/// calls. A second SIGINT ends the process at once, with status 130.
///
/// # Errors
/// The error of `sigaction`.
pub fn install() -> io::Result<()> {
    let action = SigAction::new(
        SigHandler::Handler(on_signal),
        SaFlags::empty(),
        SigSet::empty(),
    );
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGALRM] {
        // SAFETY: the handler only calls async-signal-safe functions (atomics, setitimer, _exit)
        // and stays valid for the life of the process.
        unsafe { sigaction(signal, &action) }?;
    }
    Ok(())
}

/// Whether a stop has been requested since [`install`].
pub fn requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}

/// Requests a stop from within, as SIGTERM does from outside.
pub fn request() {
    REQUESTED.store(true, Ordering::Relaxed);
    repeat();
}

/// Keeps these signals from the calling thread: for helper threads that must not be interrupted,
/// so that the one that can stop the server gets them.
///
/// # Errors
/// The error of `pthread_sigmask`.
pub fn block_in_this_thread() -> io::Result<()> {
    let mut set = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGALRM] {
        set.add(signal);
    }
    Ok(set.thread_block()?)
}

/// From now on the end of a child process interrupts blocking calls.
///
/// # Errors
/// The error of `sigaction`.
pub fn interrupt_when_children_end() -> io::Result<()> {
    let action = SigAction::new(
        SigHandler::Handler(on_child),
        SaFlags::SA_NOCLDSTOP,
        SigSet::empty(),
    );
    // SAFETY: the handler does nothing and stays valid for the life of the process.
    unsafe { sigaction(Signal::SIGCHLD, &action) }?;
    Ok(())
}

extern "C" fn on_child(_: libc::c_int) {}

extern "C" fn on_signal(signal: libc::c_int) {
    if signal == libc::SIGINT && INTERRUPTS.fetch_add(1, Ordering::Relaxed) > 0 {
        // SAFETY: _exit is async-signal-safe and does not return.
        unsafe { libc::_exit(130) }
    }
    if signal != libc::SIGALRM {
        request();
    }
}

/// Starts the timer that repeats SIGALRM.
fn repeat() {
    let period = libc::timeval {
        tv_sec: 0,
        tv_usec: libc::suseconds_t::from(REPEAT_MS) * 1000,
    };
    let timer = libc::itimerval {
        it_interval: period,
        it_value: period,
    };
    // SAFETY: `timer` is a valid itimerval and the old value is not asked for. On Linux setitimer
    // is a plain system call, so it may be called in a signal handler.
    unsafe { libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut()) };
}
