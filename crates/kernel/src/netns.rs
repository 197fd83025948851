//! A network namespace for a test: its ports are its own, and nothing leaves it.

use std::io;
use std::process::Command;

use nix::sched::{CloneFlags, unshare};

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
