//! Listeners handed over by the protocol of systemd's `sd_listen_fds(3)`: descriptors 3, 4, …,
//! their number in `LISTEN_FDS`, and in `LISTEN_PID` the process that they are meant for.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::FdFlags;

/// The first descriptor of the protocol.
pub const FIRST_FD: i32 = 3;

/// More than this many is taken for a mistake.
pub const COUNT_MAX: i32 = 4096;

static TAKEN: AtomicBool = AtomicBool::new(false);

/// How many descriptors `LISTEN_FDS` announces to this process: 0 when the variables are not set
/// or meant for another process.
///
/// # Errors
/// When a variable is set to something that is not a number, or to an impossible one.
pub fn count() -> io::Result<i32> {
    let read = |name: &str| std::env::var(name).ok();
    count_from(
        read("LISTEN_PID"),
        read("LISTEN_FDS"),
        std::process::id().into(),
    )
}

fn count_from(pid: Option<String>, fds: Option<String>, own: i64) -> io::Result<i32> {
    let (Some(pid), Some(fds)) = (pid, fds) else {
        return Ok(0);
    };
    if number("LISTEN_PID", &pid)? != own {
        return Ok(0);
    }
    match number("LISTEN_FDS", &fds)? {
        count @ 0..=4096 => Ok(count as i32),
        other => Err(invalid(format!(
            "LISTEN_FDS={other} is not between 0 and {COUNT_MAX}"
        ))),
    }
}

fn number(name: &str, value: &str) -> io::Result<i64> {
    value
        .parse()
        .map_err(|_| invalid(format!("{name}={value} is not a number")))
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

/// Takes the descriptors handed over to this process and marks them close-on-exec. They can be
/// taken once: later calls give none.
///
/// # Errors
/// As [`count`], and when one of the descriptors is not open.
pub fn take() -> io::Result<Vec<OwnedFd>> {
    let count = count()?;
    if count == 0 || TAKEN.swap(true, Ordering::SeqCst) {
        return Ok(Vec::new());
    }
    let mut taken = Vec::new();
    for number in FIRST_FD..FIRST_FD + count {
        if std::fs::symlink_metadata(format!("/proc/self/fd/{number}")).is_err() {
            return Err(invalid(format!(
                "LISTEN_FDS={count} announces descriptor {number}, which is not open"
            )));
        }
        // SAFETY: the descriptor is open. By the protocol it was put there for this process to
        // take. Nothing in this process opened it, and TAKEN lets it be taken only once.
        let fd = unsafe { OwnedFd::from_raw_fd(number) };
        rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC)?;
        taken.push(fd);
    }
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(value: &str) -> Option<String> {
        Some(value.to_owned())
    }

    #[test]
    fn announced_only_to_the_process_named() {
        let own = 4711;
        assert_eq!(count_from(None, None, own).ok(), Some(0));
        assert_eq!(count_from(None, text("1"), own).ok(), Some(0));
        assert_eq!(count_from(text("4711"), None, own).ok(), Some(0));
        assert_eq!(count_from(text("1"), text("1"), own).ok(), Some(0));
        assert_eq!(count_from(text("4711"), text("2"), own).ok(), Some(2));
    }

    #[test]
    fn nonsense_is_refused() {
        assert!(count_from(text("x"), text("1"), 1).is_err());
        assert!(count_from(text("1"), text("many"), 1).is_err());
        assert!(count_from(text("1"), text("-1"), 1).is_err());
        assert!(count_from(text("1"), text("5000"), 1).is_err());
    }
}
