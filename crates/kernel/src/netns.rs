//! Network namespaces: one for a test, whose ports are its own, and those of others to look into.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;
use std::process::Command;

use nix::libc;
use nix::sched::{CloneFlags, setns, unshare};
use rustix::net::{AddressFamily, SocketType};
use wakeone_model::listener::Protocol;

use crate::socket;
use crate::socket::diag::{self, Which};

/// include/uapi/asm-generic/socket.h, since Linux 5.14.
const SO_NETNS_COOKIE: i32 = 71;

/// Moves this thread, and the threads it starts from now on, into a new network namespace whose loopback is up.
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

/// Moves this thread, and the threads it starts from now on, into an existing network namespace: its file, as
/// `/proc/PID/ns/net` or `/run/netns/NAME`.
///
/// # Errors
/// The error of opening it, or `EPERM` without CAP_SYS_ADMIN.
pub fn enter(file: &Path) -> io::Result<()> {
    Ok(setns(File::open(file)?, CloneFlags::CLONE_NEWNET)?)
}

/// Whether a process is in the network namespace of this thread; true where that cannot be told.
pub fn is_ours(pid: u32) -> bool {
    let own = std::fs::read_link("/proc/thread-self/ns/net");
    match (own, crate::proc::reader::link(pid, "ns/net")) {
        (Ok(own), Ok(other)) => own.as_os_str().as_encoded_bytes() == other,
        _ => true,
    }
}

/// A TUN device of this thread's network namespace. Packets that are sent to it can be read, and those that are written to
/// it arrive. It is gone when the file is closed.
///
/// # Errors
/// `EPERM` without CAP_NET_ADMIN; there is no /dev/net/tun.
pub fn tun(name: &str) -> io::Result<File> {
    let device = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    // SAFETY: an all-zero `ifreq` is valid: a name that ends at once, and a union of integers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let room = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name[..room].iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes one `ifreq`, which outlives the call.
    let done = unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if done == 0 {
        Ok(device)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Whether a TCP listener, or a bound UDP socket, is of the network namespace of this thread. A process may have made it in
/// another one, where it is privileged.
///
/// # Errors
/// It cannot be told.
pub fn has(socket: impl AsFd) -> io::Result<bool> {
    let socket = socket.as_fd();
    match cookie(socket) {
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => is_listed(socket),
        theirs => Ok(theirs? == own_cookie()?),
    }
}

/// The number that the kernel gives the network namespace of this thread, unique on the machine.
///
/// # Errors
/// `ENOPROTOOPT` before Linux 5.14.
pub fn own_cookie() -> io::Result<u64> {
    let own = rustix::net::socket(AddressFamily::UNIX, SocketType::DGRAM, None)?;
    cookie(own.as_fd())
}

fn cookie(socket: BorrowedFd<'_>) -> io::Result<u64> {
    socket::get(socket, libc::SOL_SOCKET, SO_NETNS_COOKIE)
}

/// The same where a socket does not tell its namespace: sock_diag shows those of ours, and the cookies of sockets are
/// unique on the machine (since Linux 5.4).
fn is_listed(socket: BorrowedFd<'_>) -> io::Result<bool> {
    let Some(address) = socket::address(socket) else {
        return Ok(false);
    };
    let protocol = if socket::is_udp(socket) {
        Protocol::Udp
    } else {
        Protocol::Tcp
    };
    let wanted = socket::cookie(socket)?;
    let here = diag::sockets_at(protocol, Which::Listening, address)?;
    Ok(here.iter().any(|entry| entry.socket.cookie == wanted))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, UdpSocket};

    #[test]
    fn sockets_of_another_namespace_are_told_from_ours() {
        let (tcp, udp) = (
            TcpListener::bind("127.0.0.1:0").expect("bind"),
            UdpSocket::bind("127.0.0.1:0").expect("bind"),
        );
        assert!(has(&tcp).expect("told") && has(&udp).expect("told"));
        assert!(is_listed(tcp.as_fd()).expect("told"));
        assert!(is_listed(udp.as_fd()).expect("told"));
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: only root can make a network namespace");
        }
        isolate().expect("a network namespace");
        assert!(!has(&tcp).expect("told") && !has(&udp).expect("told"));
        assert!(!is_listed(tcp.as_fd()).expect("told"));
        assert!(!is_listed(udp.as_fd()).expect("told"));
    }
}
