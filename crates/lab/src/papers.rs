//! The kernel of the papers (`kernel/README.md`): which of its switches are on.
//!
//! Experiments have variants for it, which are measured where it runs and are left out on every other kernel.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::{fs, io};

use wakeone_waitqueue::Policy;

use crate::error::Error;

/// How this kernel's release ends.
pub use wakeone_result::environment::PAPERS as RELEASE;

/// A switch of this kernel, and how it is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Switch {
    /// `net.ipv4.tcp_accept_wake`: a connection wakes threads by this policy.
    AcceptWake(Policy),
    /// `fs.epoll.rotate`: exclusive waiters take turns.
    EpollRotate,
    /// `net.ipv4.tcp_reopen_unchecked`: a listener that comes back to its reuseport group is not checked.
    Reopen,
    /// `net.ipv4.tcp_migrate_req`, which every kernel has since 5.14: connections of a listener that closes are moved.
    Migrate,
}

impl Switch {
    fn file(self) -> &'static Path {
        Path::new(match self {
            Switch::AcceptWake(_) => "/proc/sys/net/ipv4/tcp_accept_wake",
            Switch::EpollRotate => "/proc/sys/fs/epoll/rotate",
            Switch::Reopen => "/proc/sys/net/ipv4/tcp_reopen_unchecked",
            Switch::Migrate => "/proc/sys/net/ipv4/tcp_migrate_req",
        })
    }

    /// As `enum wake_choice` of the patched `include/linux/wait.h`.
    fn value(self) -> &'static str {
        match self {
            Switch::AcceptWake(Policy::TaskExclusive) => "0",
            Switch::AcceptWake(Policy::WakeAll)
            | Switch::EpollRotate
            | Switch::Reopen
            | Switch::Migrate => "1",
            Switch::AcceptWake(Policy::WakeOne) => "2",
            Switch::AcceptWake(Policy::AlwaysWake) => "3",
        }
    }

    /// Sets it, until the result is dropped.
    ///
    /// # Errors
    /// On another kernel, or without privileges.
    pub fn set(self) -> Result<Set, Error> {
        let path = self.file().to_owned();
        let before = fs::read_to_string(&path);
        let set = before.and_then(|before| fs::write(&path, self.value()).map(|()| before));
        match set {
            Ok(before) => Ok(Set { path, before }),
            Err(source) if source.kind() == io::ErrorKind::NotFound => {
                Err(Error::Missing(format!(
                    "this kernel has no {}; `wakeone-lab kernel run` boots one that has it",
                    path.display()
                )))
            }
            Err(source) => Err(Error::File {
                action: "writing",
                path,
                source,
            }),
        }
    }
}

/// A switch that is on. Dropping it puts back what was there.
#[derive(Debug)]
pub struct Set {
    path: PathBuf,
    before: String,
}

impl Drop for Set {
    fn drop(&mut self) {
        let _ = fs::write(&self.path, &self.before);
    }
}

/// Whether this is that kernel.
pub fn is_here() -> bool {
    Switch::EpollRotate.file().exists()
}

/// A flag of the socket option UDP_QUEUES of the patched `include/uapi/linux/udp.h`: datagrams go to the queues in turn, not by flow.
pub const UDP_QUEUES_IN_TURN: i32 = 0x1_0000;

/// Gives a UDP socket without a port several receive queues: how many, and flags.
///
/// # Errors
/// On another kernel.
pub fn set_udp_queues(socket: &OwnedFd, queues: i32) -> Result<(), Error> {
    wakeone_kernel::socket::set_udp_queues(socket, queues).map_err(|e| {
        Error::Server(format!(
            "the socket option UDP_QUEUES cannot be set: {e}; `wakeone-lab kernel run` boots a kernel that has it"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_kernel_is_told_in_a_sentence() {
        if is_here() {
            return;
        }
        let error = Switch::AcceptWake(Policy::WakeAll).set().unwrap_err();
        assert!(
            error.to_string().contains("wakeone-lab kernel run"),
            "{error}"
        );
    }
}
