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
use std::time::Duration;

/// The longest that a message waits for room in the service manager's socket. A start or a stop that it misses fails, so
/// these wait; a busy one has room again within milliseconds.
const PATIENCE: Duration = Duration::from_secs(1);

/// Notifies the service manager, if there is one. Where its socket is full, the message waits a second for room, and is
/// dropped then.
pub fn notify(states: &[NotifyState<'_>]) {
    tell(states, Some(PATIENCE));
}

/// The same, and drops the message at once where the socket is full.
pub(crate) fn notify_if_room(states: &[NotifyState<'_>]) {
    tell(states, None);
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

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
