//! One worker process: our child, or one that an earlier supervisor started.

use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitOptions, kill_process_group, pidfd_open,
    pidfd_send_signal, waitid, waitpid,
};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Child;
pub use wakeone_control::state::Identity;
use wakeone_kernel::proc::process::children;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// It exited with this status.
    Status(i32),
    /// This signal killed it.
    Signal(i32),
    /// It is gone; only a parent is told how.
    Gone,
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            // A shell and many servers end like that when a signal asks them to.
            Self::Status(status) => match nix::sys::signal::Signal::try_from(status - 128) {
                Ok(signal) => write!(f, "ended by {signal} (status {status})"),
                Err(_) => write!(f, "exited with status {status}"),
            },
            Self::Signal(number) => match nix::sys::signal::Signal::try_from(number) {
                Ok(signal) => write!(f, "was killed by signal {number} ({signal})"),
                Err(_) => write!(f, "was killed by signal {number}"),
            },
            Self::Gone => f.write_str("is gone"),
        }
    }
}

/// A process that is watched by its pidfd, so that a signal never reaches another process with the same pid.
#[derive(Debug)]
pub struct Process {
    identity: Identity,
    pidfd: OwnedFd,
    child: Option<Child>,
}

impl Process {
    /// Watches a child of ours.
    ///
    /// # Errors
    /// No pidfd can be opened (the limit of descriptors).
    pub fn child(mut child: Child) -> io::Result<Self> {
        let open = |pid| Ok((open_pidfd(pid)?, Identity::of(pid)?));
        // Until it is waited for, the pid of a child is not given to another process.
        match open(child.id()) {
            Ok((pidfd, identity)) => Ok(Self {
                identity,
                pidfd,
                child: Some(child),
            }),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(error)
            }
        }
    }

    /// Watches a process that somebody else started; `None` if it no longer runs.
    ///
    /// # Errors
    /// The pidfd or /proc cannot be opened, although the process exists.
    pub fn adopt(identity: Identity) -> io::Result<Option<Self>> {
        let pidfd = match open_pidfd(identity.pid) {
            Ok(pidfd) => pidfd,
            Err(error) if error.raw_os_error() == Some(nix::libc::ESRCH) => return Ok(None),
            Err(error) => return Err(error),
        };
        // The order matters: while we hold the pidfd, /proc shows either this process or none with its pid.
        let now = Identity::of(identity.pid);
        let process = Self {
            identity,
            pidfd,
            child: None,
        };
        if process.ended_now()? || now.is_err() || now.is_ok_and(|now| now != identity) {
            Ok(None)
        } else {
            Ok(Some(process))
        }
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.identity.pid
    }

    /// Pid and start time.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// Readable when the process has ended.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Sends a signal; ignored if the process has ended.
    fn signal(&self, signal: Signal) {
        if let Err(error) = pidfd_send_signal(&self.pidfd, signal)
            && error != rustix::io::Errno::SRCH
        {
            tracing::warn!(
                pid = self.pid(),
                "cannot send signal {} to worker process {}: {error}",
                signal.as_raw(),
                self.pid()
            );
        }
    }

    /// Asks the process to end. A stopped process is continued, or it would never receive the signal.
    pub fn terminate(&self, signal: nix::sys::signal::Signal) {
        // Both have all signals that have names.
        if let Some(signal) = Signal::from_named_raw(signal as i32) {
            self.signal(signal);
        }
        self.signal(Signal::CONT);
    }

    /// Kills the process and the rest of its process group.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
        self.sweep();
    }

    /// How the process ended, if it has. Its pid is not given back yet, so that its process group keeps the number.
    ///
    /// # Errors
    /// poll(2) fails.
    pub fn ended(&self) -> io::Result<Option<Ending>> {
        if !self.ended_now()? {
            return Ok(None);
        }
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        let status = match &self.child {
            Some(_) => waitid(WaitId::PidFd(self.pidfd.as_fd()), look)
                .ok()
                .flatten(),
            None => None,
        };
        let ending = status.and_then(|status| {
            let exited = status.exit_status().map(Ending::Status);
            exited.or(status.terminating_signal().map(Ending::Signal))
        });
        Ok(Some(ending.unwrap_or(Ending::Gone)))
    }

    /// The child, which leads a process group, to be waited for.
    pub(super) fn into_child(mut self) -> Option<Child> {
        self.child.take()
    }

    /// Whether it has ended. It may still have to be waited for.
    pub fn has_ended(&self) -> bool {
        self.ended_now().unwrap_or(false)
    }

    fn ended_now(&self) -> io::Result<bool> {
        wakeone_kernel::proc::process::has_ended(&self.pidfd)
    }

    /// Kills the process group of a child, which leads it. Until the child is waited for, no other group can have
    /// that number. An adopted process is not our child, which gives no such guarantee, so its group is left alone.
    fn sweep(&self) {
        if self.child.is_some()
            && let Some(group) = raw_pid(self.identity.pid)
        {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // If it has ended, its pid is given back now.
        if let Some(child) = &mut self.child {
            let _ = child.try_wait();
        }
    }
}

fn raw_pid(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw)
}

fn open_pidfd(pid: u32) -> io::Result<OwnedFd> {
    let pid = raw_pid(pid).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

/// Waits for children that are not `ours`: as process 1 of a container we inherit every orphan.
pub fn reap_orphans(ours: impl Fn(u32) -> bool) {
    if std::process::id() != 1 {
        return;
    }
    for pid in children(1).into_iter().filter(|pid| !ours(*pid)) {
        if let Some(pid) = raw_pid(pid) {
            let _ = waitpid(Some(pid), WaitOptions::NOHANG);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags};
    use std::process::Command;

    #[test]
    fn a_status_that_stands_for_a_signal_names_it() {
        for (status, said) in [
            (143, "ended by SIGTERM (status 143)"),
            (130, "ended by SIGINT (status 130)"),
            (3, "exited with status 3"),
            (128, "exited with status 128"),
            (255, "exited with status 255"),
        ] {
            assert_eq!(Ending::Status(status).to_string(), said);
        }
    }

    fn sleeper() -> Child {
        use std::os::unix::process::CommandExt;
        Command::new("sleep")
            .arg("60")
            .process_group(0)
            .spawn()
            .expect("sleep")
    }

    #[test]
    fn a_child_tells_how_it_ended() {
        let process = Process::child(sleeper()).expect("watch");
        assert_eq!(process.ended().expect("poll"), None);
        process.terminate(nix::sys::signal::Signal::SIGTERM);
        rustix::event::poll(&mut [PollFd::new(&process.pidfd(), PollFlags::IN)], None)
            .expect("poll");
        assert_eq!(process.ended().expect("poll"), Some(Ending::Signal(15)));
    }

    #[test]
    fn adoption_wants_the_same_process() {
        let mut child = sleeper();
        let identity = Identity::of(child.id()).expect("identity");
        let impostor = Identity {
            started: identity.started + 1,
            ..identity
        };
        assert!(Process::adopt(impostor).expect("adopt").is_none());
        assert!(identity.lives() && !impostor.lives());
        let adopted = Process::adopt(identity).expect("adopt").expect("runs");
        adopted.kill();
        child.wait().expect("wait");
        assert_eq!(adopted.ended().expect("poll"), Some(Ending::Gone));
        assert!(Process::adopt(identity).expect("adopt").is_none());
    }

    #[test]
    fn no_pid_is_no_process() {
        for pid in [0, u32::MAX] {
            assert!(Process::adopt(Identity { pid, started: 1 }).is_err());
        }
    }
}
