//! Network namespaces: one for a test, whose ports are its own, and those of others to look into.

use std::fs::File;
use std::io;
use std::path::Path;
use std::process::Command;

use nix::sched::{CloneFlags, setns, unshare};

/// Moves this thread, and what it starts from now on, into a new network namespace whose loopback is up.
///
/// # Errors
/// `EPERM` without CAP_SYS_ADMIN; or `ip` is missing.
pub fn isolate() -> io::Result<()> {
    unshare(CloneFlags::CLONE_NEWNET)?;
    let status = Command::new("ip")
        .args(["link", "set", "lo", "up"])
        .status()?;
    if status.success() {
        Ok(())
    } else {
        Err(io::Error::other("`ip link set lo up` failed"))
    }
}

/// Moves this thread, and what it starts from now on, into a network namespace that exists: its file, as
/// `/proc/PID/ns/net` or `/run/netns/NAME`.
///
/// # Errors
/// What opening it says, or `EPERM` without CAP_SYS_ADMIN.
pub fn enter(file: &Path) -> io::Result<()> {
    Ok(setns(File::open(file)?, CloneFlags::CLONE_NEWNET)?)
}

/// Whether a process is in the network namespace of this thread; true where that cannot be told.
pub fn is_ours(pid: u32) -> bool {
    let of = |place: &str| std::fs::read_link(format!("/proc/{place}/ns/net"));
    match (of("thread-self"), of(&pid.to_string())) {
        (Ok(own), Ok(other)) => own == other,
        _ => true,
    }
}
