//! Why another process may not be looked into: the rules of ptrace(2), as far as they show from outside.

use std::fmt;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

use caps::{CapSet, Capability};
use rustix::io::Errno;
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use crate::capability;
use crate::proc::{line, process, reader};

/// The rule that keeps this process from another one's descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The kernel has no pidfd_getfd(2).
    Old,
    /// A seccomp list forbids that call.
    Filter,
    /// The process is another user's.
    User,
    /// It is not *dumpable*: it has changed its user.
    Undumpable,
    /// It has capabilities that this one lacks.
    Capabilities,
    /// Yama's ptrace_scope.
    Scope(u8),
    /// Another rule: of a security module, say.
    Other,
}

impl fmt::Display for Refusal {
    /// The cause, and each way out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const CONTAINER: &str = "in a container: --cap-add SYS_PTRACE, or attach from the host";
        match self {
            Self::Old => f.write_str("pidfd_getfd came with Linux 5.6"),
            Self::Filter => f.write_str(
                "a seccomp list forbids pidfd_getfd, as Docker's does: start the container with --cap-add SYS_PTRACE, or attach from the host",
            ),
            Self::User => write!(f, "it is another user's: attach as that user, or with CAP_SYS_PTRACE ({CONTAINER})"),
            Self::Undumpable => write!(
                f,
                "it has changed its user since it was started, and only CAP_SYS_PTRACE lets look into such a process: attach as root ({CONTAINER})"
            ),
            Self::Capabilities => write!(f, "it has capabilities that we lack: attach as root ({CONTAINER})"),
            Self::Scope(1) => f.write_str(
                "kernel.yama.ptrace_scope is 1, which lets in only who started it: start the server by `wakeone run -- CMD`, or attach with CAP_SYS_PTRACE",
            ),
            Self::Scope(2) => f.write_str("kernel.yama.ptrace_scope is 2, which asks for CAP_SYS_PTRACE: attach as root"),
            Self::Scope(_) => f.write_str("kernel.yama.ptrace_scope is 3, which lets nobody in until the next boot"),
            Self::Other => write!(f, "it takes CAP_SYS_PTRACE, or a process that lets itself be traced ({CONTAINER})"),
        }
    }
}

impl Refusal {
    /// Returns why this process has just been refused another one's descriptors.
    pub fn of(pid: u32) -> Self {
        let general = anybody().err();
        general.or_else(|| of_process(pid)).unwrap_or(Self::Other)
    }
}

/// Whether this process may look into those of its user at all, or into those that it has started.
///
/// # Errors
/// What forbids it.
pub fn anybody() -> Result<(), Refusal> {
    match borrowed_from_itself() {
        Err(Errno::NOSYS) if !is_filtered() => return Err(Refusal::Old),
        Err(Errno::NOSYS | Errno::PERM | Errno::ACCESS) => return Err(Refusal::Filter),
        _ => {}
    }
    match yama() {
        Some(scope @ 2) if !capability::has(Capability::CAP_SYS_PTRACE) => {
            Err(Refusal::Scope(scope))
        }
        Some(scope @ 3..) => Err(Refusal::Scope(scope)),
        _ => Ok(()),
    }
}

/// Every rule lets a process into itself, so only the call can be refused.
fn borrowed_from_itself() -> Result<(), Errno> {
    let own = process::handle_of(std::process::id()).map_err(|error| {
        let errno = error.raw_os_error().unwrap_or_default();
        Errno::from_raw_os_error(errno)
    })?;
    pidfd_getfd(&own, own.as_raw_fd(), PidfdGetfdFlags::empty()).map(drop)
}

fn is_filtered() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mode = status
        .lines()
        .find_map(|line| line.strip_prefix("Seccomp:"));
    mode.is_some_and(|mode| mode.trim() == "2")
}

fn yama() -> Option<u8> {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok()?;
    scope.trim().parse().ok()
}

fn of_process(pid: u32) -> Option<Refusal> {
    let status = reader::file(pid, "status").ok()?;
    let own = rustix::process::getuid().as_raw();
    let [real, effective, saved, _] = line::users(&status)?;
    if [real, effective, saved] != [own; 3] {
        return Some(Refusal::User);
    }
    // The files of an undumpable process are root's (`task_dump_owner` in fs/proc/base.c).
    if owner(pid).is_ok_and(|owner| owner != effective) {
        return Some(Refusal::Undumpable);
    }
    let all = line::permitted(&status)?;
    let ours = caps::read(None, CapSet::Permitted).ok()?;
    let ours = ours.iter().fold(0, |all, one| all | one.bitmask());
    if all & !ours != 0 {
        return Some(Refusal::Capabilities);
    }
    yama().filter(|scope| *scope > 0).map(Refusal::Scope)
}

fn owner(pid: u32) -> io::Result<u32> {
    std::fs::metadata(format!("/proc/{pid}")).map(|about| about.uid())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_may_look_into_itself() {
        assert_eq!(borrowed_from_itself(), Ok(()));
        assert_ne!(anybody(), Err(Refusal::Filter));
    }

    #[test]
    fn each_cause_has_a_way_out_of_its_own() {
        let all = [
            Refusal::Filter,
            Refusal::User,
            Refusal::Undumpable,
            Refusal::Capabilities,
            Refusal::Scope(1),
            Refusal::Scope(2),
            Refusal::Other,
        ];
        let told = all.map(|one| one.to_string());
        for (at, one) in told.iter().enumerate() {
            assert!(
                one.contains("SYS_PTRACE") || one.contains("as root"),
                "{one}"
            );
            assert!(!told[..at].contains(one), "{one}");
        }
    }
}
