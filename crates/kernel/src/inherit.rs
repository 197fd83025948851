//! What a program inherits across exec, set from safe code: descriptors and signal dispositions.

#![allow(unsafe_code)]

use nix::libc;
use nix::sys::signal::SigSet;
use std::io;

/// Marks every descriptor from `first` on close-on-exec, so that a program started next gets none of them.
///
/// Nothing is closed now: whoever owns one of them goes on using it until the exec.
///
/// # Errors
/// What close_range(2) says: `ENOSYS` before Linux 5.9, `EINVAL` before 5.11 (no `CLOSE_RANGE_CLOEXEC`).
pub fn cloexec_from(first: u32) -> io::Result<()> {
    // SAFETY: with CLOSE_RANGE_CLOEXEC the call closes nothing, it only sets a flag; no memory is passed.
    let done =
        unsafe { libc::close_range(first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC as libc::c_int) };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Gives every signal its default disposition and unblocks all, as a program expects to find them.
///
/// A shell's `nohup` or `&` leaves signals ignored, and a supervisor that reads a signalfd keeps them blocked;
/// both survive exec and make a worker deaf to the signal that is to stop it.
///
/// # Errors
/// What sigprocmask(2) says, which is nothing in practice.
pub fn default_signals() -> io::Result<()> {
    for signal in 1..=libc::SIGRTMAX() {
        // SAFETY: SIG_DFL installs no handler, so no code of ours runs in signal context. Signals that cannot be
        // changed (SIGKILL, SIGSTOP, the two of libc's threads) are refused, which is as well.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    SigSet::empty().thread_set_mask()?;
    Ok(())
}
