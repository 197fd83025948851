//! Signals as something to read, in the order in which they came, beside everything else that is waited for.

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
    /// What sigprocmask(2) and signalfd(2) say.
    pub fn take() -> io::Result<Self> {
        let set: SigSet = [
            Signal::SIGTERM,
            Signal::SIGINT,
            Signal::SIGHUP,
            Signal::SIGCHLD,
        ]
        .into_iter()
        .collect();
        set.thread_block()?;
        Ok(Self {
            fd: SignalFd::with_flags(&set, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?,
        })
    }

    /// The next signal, if one came.
    ///
    /// # Errors
    /// What read(2) says.
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
