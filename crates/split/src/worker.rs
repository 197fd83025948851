//! The server's processes: which lives, and which waits on a socket.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::time::Duration;

use wakeone_kernel::proc::process;
use wakeone_kernel::proc::sight;
use wakeone_kernel::proc::waits::{self, Processes};
use wakeone_model::listener::{Process, Wait};
use wakeone_shim::protocol::How;

use super::reason::Reason;
use wakeone_steering::slot_sockets::RemoteFd;

/// A process that receives from a queue.
#[derive(Debug)]
pub struct Worker {
    /// Its process id.
    pub pid: u32,
    pidfd: OwnedFd,
}

impl Worker {
    /// Makes one of a process that runs.
    pub fn of(pid: u32) -> Option<Self> {
        let raw = i32::try_from(pid)
            .ok()
            .and_then(rustix::process::Pid::from_raw)?;
        let pidfd = rustix::process::pidfd_open(raw, rustix::process::PidfdFlags::empty()).ok()?;
        Some(Self { pid, pidfd })
    }

    /// Whether it has not ended.
    pub fn lives(&self) -> bool {
        process::has_ended(&self.pidfd).is_ok_and(|ended| !ended)
    }
}

/// Checks that no epoll set of a process has this socket; `polled` is the reason if one has.
///
/// # Errors
/// That reason, or that the process cannot be seen.
pub fn unpolled(pid: u32, inode: u64, polled: Reason) -> Result<(), Reason> {
    match waits::polls(pid, inode) {
        Ok(false) => Ok(()),
        Ok(true) => Err(polled),
        Err(error) => Err(Reason::Hidden(error.to_string())),
    }
}

/// How often to look for processes that wait on a shared socket and never asked.
pub const LOOK_ROUND: Duration = Duration::from_secs(1);

/// Finds processes, `known` ones left out, that wait on this socket and never asked: they use io_uring, or make system
/// calls of their own.
pub fn unasked(inode: u64, known: impl Fn(u32) -> bool) -> Vec<RemoteFd> {
    let (inodes, ours) = (HashSet::from([inode]), std::process::id());
    let mut seen = HashSet::new();
    let mut held = Processes::read().held;
    held.retain(|held| {
        held.inode == inode && held.pid != ours && !known(held.pid) && seen.insert(held.pid)
    });
    let look = |pid| sight::look(pid, &inodes, &HashSet::new());
    held.retain(|held| look(held.pid).is_some_and(|process| waits_on(&process, inode)));
    held.iter().map(RemoteFd::from).collect()
}

/// Whether a process, as it was just seen, waits for datagrams on this socket.
fn waits_on(process: &Process, inode: u64) -> bool {
    process.polls.iter().any(|polled| polled.inode == inode)
        || process.threads.iter().any(|thread| match &thread.wait {
            Wait::Receive(at) => *at == inode,
            Wait::Poll(set) => set.contains(&inode),
            Wait::IoUring => true,
            _ => false,
        })
}

/// How a process came to wait, in words.
pub fn in_words(how: How) -> &'static str {
    match how {
        How::Epoll => "epoll",
        How::Poll => "poll",
        How::Receive => "a receive call",
    }
}

/// Formats ` (name)` of a process; nothing if it has ended.
pub fn name_in_brackets(pid: u32) -> String {
    waits::identity(pid).map_or_else(String::new, |identity| format!(" ({})", identity.name))
}
