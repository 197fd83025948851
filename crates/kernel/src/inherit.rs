//! Descriptors and signal dispositions that a program inherits across exec, set from safe code.

#![allow(unsafe_code)]

use nix::libc;
use nix::sys::signal::SigSet;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Marks every descriptor from `first` on close-on-exec, so that a program started next gets none of them.
///
/// Nothing is closed now: the owner of a descriptor goes on using it until the exec.
///
/// # Errors
/// The error of close_range(2), or, before Linux 5.11 (no `CLOSE_RANGE_CLOEXEC`), reading /proc/self/fd.
pub fn cloexec_from(first: u32) -> io::Result<()> {
    // SAFETY: with CLOSE_RANGE_CLOEXEC the call closes nothing, it only sets a flag; no memory is passed.
    let done =
        unsafe { libc::close_range(first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC as libc::c_int) };
    if done == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ENOSYS | libc::EINVAL) => cloexec_each_from(first),
        _ => Err(error),
    }
}

/// The same one by one, for kernels that cannot do it at once.
fn cloexec_each_from(first: u32) -> io::Result<()> {
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.parse::<u32>().ok());
        let Some(number) = number.filter(|number| *number >= first) else {
            continue;
        };
        // SAFETY: the call passes no memory and closes nothing. A number that is closed by now is refused.
        let done = unsafe { libc::fcntl(number as libc::c_int, libc::F_SETFD, libc::FD_CLOEXEC) };
        if done != 0 {
            let error = io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::EBADF) {
                return Err(error);
            }
        }
    }
    Ok(())
}

/// Gives every signal its default disposition and unblocks all, as a program expects to find them.
///
/// A shell's `nohup` or `&` leaves signals ignored, and a supervisor that reads a signalfd keeps them blocked;
/// both survive exec and make a worker deaf to the signal that is to stop it.
///
/// # Errors
/// The error of sigprocmask(2); there is none in practice.
pub fn default_signals() -> io::Result<()> {
    for signal in 1..=libc::SIGRTMAX() {
        // SAFETY: SIG_DFL installs no handler, so no code of ours runs in signal context. Signals that cannot be
        // changed (SIGKILL, SIGSTOP, the two of libc's threads) are refused, which is as well.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    SigSet::empty().thread_set_mask()?;
    Ok(())
}

/// Makes a command start with these signals ignored: exec gives those that we handle their default again.
pub fn start_ignoring(command: &mut Command, signals: Vec<i32>) {
    let ignore = move || {
        for signal in &signals {
            // SAFETY: SIG_IGN installs no handler, so no code of ours runs in signal context.
            if unsafe { libc::signal(*signal, libc::SIG_IGN) } == libc::SIG_ERR {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: signal(2) may be called between fork and exec, and nothing is allocated there.
    unsafe { command.pre_exec(ignore) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    fn is_cloexec(file: &impl AsRawFd) -> bool {
        // SAFETY: no memory is passed.
        let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFD) };
        flags & libc::FD_CLOEXEC != 0
    }

    #[test]
    fn one_by_one_it_marks_the_same() {
        let file = File::open("/dev/null").expect("file");
        // SAFETY: a new descriptor that nobody else has.
        let plain = unsafe { OwnedFd::from_raw_fd(libc::dup(file.as_raw_fd())) };
        assert!(!is_cloexec(&plain));
        let number = plain.as_raw_fd() as u32;
        cloexec_each_from(number + 1).expect("marks");
        assert!(!is_cloexec(&plain), "below the first");
        cloexec_each_from(number).expect("marks");
        assert!(is_cloexec(&plain));
    }
}
