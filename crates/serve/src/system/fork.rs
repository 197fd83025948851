//! `fork(2)` where it is sound: in a process with a single thread.

use std::io;
use std::os::unix::fs::MetadataExt;

use nix::unistd::{ForkResult, Pid};

/// On which side of the fork the caller goes on.
#[derive(Debug)]
pub enum Fork {
    /// In the process that called; the new process has this id.
    Parent(Pid),
    /// In the new process.
    Child,
}

/// Forks this process.
///
/// # Errors
/// With [`io::ErrorKind::Unsupported`] when more than one thread runs: the child would have only
/// the calling one, and every lock that another held would stay locked in it for ever.
/// Otherwise whatever `fork` says (`EAGAIN`: a limit on processes, `ENOMEM`).
pub fn fork() -> io::Result<Fork> {
    let threads = thread_count()?;
    if threads != 1 {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!("this process has {threads} threads and can fork only with one"),
        ));
    }
    // SAFETY: fork is unsafe because a child of a multi-threaded process may only call
    // async-signal-safe functions. This process has one thread: it was just counted, and no other
    // could start one. So no lock is held by a thread that the child does not have.
    match unsafe { nix::unistd::fork() }? {
        ForkResult::Parent { child } => Ok(Fork::Parent(child)),
        ForkResult::Child => Ok(Fork::Child),
    }
}

/// The number of threads of this process: a directory has two links and one more for each entry
/// that is a directory itself, and `task` has one for each thread.
fn thread_count() -> io::Result<u64> {
    Ok(std::fs::metadata("/proc/self/task")?
        .nlink()
        .saturating_sub(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_with_other_threads() {
        // The test harness runs this in a thread of its own, so there are two at least.
        let (stop, wait) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || wait.recv());
        let refused = fork().expect_err("more than one thread runs");
        assert_eq!(refused.kind(), io::ErrorKind::Unsupported);
        drop(stop);
        assert!(other.join().is_ok());
    }
}
