//! Signals read from a descriptor, in the order in which they arrived, so that the loop can poll for them.

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

/// The signals that a supervisor acts on.
#[derive(Debug)]
pub struct Signals {
    fd: SignalFd,
}

impl Signals {
    /// Takes the signals from this thread and from those that it starts later: make it before any other thread.
    ///
    /// # Errors
    /// sigprocmask(2) or signalfd(2) fails.
    pub fn take() -> io::Result<Self> {
        let set: SigSet = [
            Signal::SIGTERM,
            Signal::SIGINT,
            Signal::SIGHUP,
            Signal::SIGCHLD,
            Signal::SIGTTIN,
            Signal::SIGTTOU,
        ]
        .into_iter()
        .collect();
        set.thread_block()?;
        Ok(Self {
            fd: SignalFd::with_flags(&set, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?,
        })
    }

    /// The next signal, if one has arrived.
    ///
    /// # Errors
    /// read(2) fails.
    pub fn next(&self) -> io::Result<Option<Signal>> {
        let info = self.fd.read_signal()?;
        Ok(info.and_then(|info| Signal::try_from(info.ssi_signo as i32).ok()))
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
