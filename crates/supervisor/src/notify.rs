//! Messages to the service manager (`sd_notify(3)`).
//!
//! A socket that nobody reads takes ten datagrams (`net.unix.max_dgram_qlen`); another send waits. A service manager that
//! hangs must not hold up those who steer, so no message waits for long.

use sd_notify::NotifyState;
use std::ffi::OsStr;
use std::fmt::Write;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

/// The longest that a message waits for room in the service manager's socket. A start or a stop that it misses fails, so
/// these wait; a busy one has room again within milliseconds.
const PATIENCE: Duration = Duration::from_secs(1);

/// Notifies the service manager, if there is one. Where its socket is full, the message waits a second for room, and is
/// dropped then.
pub fn notify(states: &[NotifyState<'_>]) {
    tell(states, Some(PATIENCE));
}

/// The same, and drops the message at once where the socket is full.
fn notify_if_room(states: &[NotifyState<'_>]) {
    tell(states, None);
}

/// Tells the service manager, if there is one, that the service does its work.
pub fn ready() {
    notify(&[NotifyState::Ready]);
}

fn tell(states: &[NotifyState<'_>], patience: Option<Duration>) {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    let mut message = String::new();
    for state in states {
        let _ = writeln!(message, "{state}");
    }
    if let Err(error) = send(&name, message.as_bytes(), patience) {
        tracing::debug!("cannot notify the service manager: {error}");
    }
}

fn send(name: &OsStr, message: &[u8], patience: Option<Duration>) -> io::Result<()> {
    let socket = UnixDatagram::unbound()?;
    match patience {
        Some(patience) => socket.set_write_timeout(Some(patience))?,
        None => socket.set_nonblocking(true)?,
    }
    socket.send_to_addr(message, &address(name)?)?;
    Ok(())
}

/// A path, or behind `@` a name that is not in the file system.
fn address(name: &OsStr) -> io::Result<SocketAddr> {
    match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(name),
    }
}

/// Signs of life for the service manager's watchdog (`WatchdogSec=`), which restarts us if they stay away too long. They
/// say that the owner's loop goes round.
#[derive(Debug)]
pub struct Watchdog {
    /// None if the service manager does not watch us.
    every: Option<Duration>,
    last: Option<Instant>,
}

impl Watchdog {
    /// Returns a watchdog as the environment asks for it (`WATCHDOG_USEC`).
    pub fn from_env() -> Self {
        Self {
            // Half of it, as sd_watchdog_enabled(3) recommends.
            every: sd_notify::watchdog_enabled().map(|limit| limit / 2),
            last: None,
        }
    }

    /// Sends a sign of life if one is due. Call it once a round.
    pub fn feed(&mut self) {
        if self.due().is_some_and(|left| left.is_zero()) {
            self.last = Some(Instant::now());
            notify_if_room(&[NotifyState::Watchdog]);
        }
    }

    /// Returns how long until the next one is due; `None` if the service manager does not watch us.
    pub fn due(&self) -> Option<Duration> {
        let every = self.every?;
        let left = |last: Instant| every.saturating_sub(last.elapsed());
        Some(self.last.map_or(Duration::ZERO, left))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_names_are_reached() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let hidden = format!("@wakeone-notify-{}", std::process::id());
        for name in [path.as_os_str(), OsStr::new(&hidden)] {
            let receiver = UnixDatagram::bind_addr(&address(name).unwrap()).unwrap();
            send(name, b"READY=1\n", None).unwrap();
            let mut buffer = [0; 64];
            let length = receiver.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..length], b"READY=1\n");
        }
    }

    #[test]
    fn a_full_socket_keeps_nobody() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let _deaf = UnixDatagram::bind(&path).unwrap();
        let full = |patience| {
            let sent = (0..100_000).find_map(|_| send(path.as_os_str(), b"x", patience).err());
            sent.expect("it fills").kind()
        };
        assert_eq!(full(None), io::ErrorKind::WouldBlock);
        let (patience, start) = (Duration::from_millis(20), Instant::now());
        assert_eq!(full(Some(patience)), io::ErrorKind::WouldBlock);
        assert!(start.elapsed() >= patience);
    }
}
