//! Network namespaces: one for a test, whose ports are its own, and those of others to look into.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use nix::libc;
use nix::sched::{CloneFlags, setns, unshare};
use rustix::net::{AddressFamily, SocketType};
use wakeone_model::listener::Protocol;

use crate::capability::{self, Capability};
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

/// The inode of the network namespace of this thread.
///
/// # Errors
/// /proc is not mounted.
pub fn own() -> io::Result<u64> {
    inode_in(Path::new("/proc/thread-self/ns/net"))
}

/// The inode of the network namespace of a process. The kernel waits for nothing of the process here
/// (`proc_ns_readlink` in fs/proc/namespaces.c).
///
/// # Errors
/// It has ended, or may not be looked into.
pub fn of(pid: u32) -> io::Result<u64> {
    inode_in(Path::new(&format!("/proc/{pid}/ns/net")))
}

/// Reads `net:[INODE]`.
fn inode_in(link: &Path) -> io::Result<u64> {
    let text = std::fs::read_link(link)?;
    let inode = text
        .to_str()
        .and_then(|text| text.strip_prefix("net:[")?.strip_suffix(']'));
    inode
        .and_then(|inode| inode.parse().ok())
        .ok_or_else(|| io::Error::other(format!("{} is no network namespace", link.display())))
}

/// Whether a process is in the network namespace of this thread; true where that cannot be told.
pub fn is_ours(pid: u32) -> bool {
    match (own(), of(pid)) {
        (Ok(own), Ok(other)) => own == other,
        _ => true,
    }
}

/// Runs something in the network namespace of this inode, which one of these processes is in. It needs CAP_SYS_ADMIN, and
/// nothing keeps the namespace alive afterwards but what was made in it.
///
/// # Errors
/// `NotFound` if none of them is in it any more; that of setns(2).
///
/// # Panics
/// If this thread cannot return: it would go on in the wrong place.
pub fn within<T>(namespace: u64, pids: &[u32], run: impl FnOnce() -> T) -> io::Result<T> {
    let gone = || io::Error::new(io::ErrorKind::NotFound, "its network namespace has ended");
    let open = |pid: &u32| {
        let file = File::open(format!("/proc/{pid}/ns/net")).ok()?;
        // Another process may have the number now.
        let is_it = file.metadata().is_ok_and(|about| about.ino() == namespace);
        is_it.then_some(file)
    };
    let there = pids.iter().find_map(open).ok_or_else(gone)?;
    let _back = travel(&there)?;
    drop(there);
    Ok(run())
}

/// A network namespace that lives as long as this.
#[derive(Debug)]
pub struct Kept(File);

impl Kept {
    /// That of this thread.
    ///
    /// # Errors
    /// /proc is not mounted.
    pub fn own() -> io::Result<Self> {
        File::open("/proc/thread-self/ns/net").map(Self)
    }

    /// Runs something there. It needs CAP_SYS_ADMIN.
    ///
    /// # Errors
    /// That of setns(2).
    ///
    /// # Panics
    /// If this thread cannot return.
    pub fn visit<T>(&self, run: impl FnOnce() -> T) -> io::Result<T> {
        let _back = travel(&self.0)?;
        Ok(run())
    }
}

/// Runs something in the network namespace that this thread left for [`within`] or [`Kept::visit`], or where it is if it left none.
/// What is made there is not seen in the other one.
///
/// # Errors
/// That of setns(2).
///
/// # Panics
/// If this thread cannot return.
pub fn at_home<T>(run: impl FnOnce() -> T) -> io::Result<T> {
    let home = LEFT.with_borrow(|left| left.first().map(File::try_clone).transpose())?;
    let _back = home.map(|home| travel(&home)).transpose()?;
    Ok(run())
}

thread_local! {
    /// The namespaces that this thread is to return to, its own first.
    static LEFT: RefCell<Vec<File>> = const { RefCell::new(Vec::new()) };
}

/// Moves this thread. It returns when the result is dropped.
fn travel(there: &File) -> io::Result<Return> {
    let here = File::open("/proc/thread-self/ns/net")?;
    go_to(there)?;
    LEFT.with_borrow_mut(|left| left.push(here));
    Ok(Return)
}

/// Moves this thread. The capability may be one that it has in reserve.
fn go_to(namespace: &File) -> io::Result<()> {
    let enter = || setns(namespace, CloneFlags::CLONE_NEWNET);
    Ok(capability::with(&[Capability::CAP_SYS_ADMIN], enter)?)
}

/// Returns to the network namespace that was left last when dropped.
struct Return;

impl Drop for Return {
    fn drop(&mut self) {
        let Some(here) = LEFT.with_borrow_mut(Vec::pop) else {
            return;
        };
        if let Err(error) = go_to(&here) {
            panic!("cannot return to the own network namespace: {error}");
        }
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
    // Of a kind that has a sign on some architectures.
    for (to, from) in request.ifr_name[..room].iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
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
    fn something_is_done_within_another_namespace_and_then_at_home() {
        let own_pid = std::process::id();
        let home = own().expect("own");
        assert_eq!(of(own_pid).expect("of"), home);
        assert!(is_ours(own_pid) && of(u32::MAX).is_err());
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: only root can enter a network namespace");
        }
        let mut other = Command::new("unshare");
        other.args(["--net", "sh", "-c", "echo; exec sleep 60"]);
        let mut other = other
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("unshare");
        let mut line = [0];
        let mut told = other.stdout.take().expect("stdout");
        io::Read::read_exact(&mut told, &mut line).expect("it is there");
        let there = of(other.id()).expect("of");
        assert_ne!(there, home);
        let both = || {
            (
                own().expect("own"),
                at_home(own).expect("at home").expect("own"),
            )
        };
        let seen = within(there, &[own_pid, other.id()], both);
        assert_eq!(seen.expect("entered"), (there, home));
        assert_eq!(both(), (home, home));
        assert_eq!(own().expect("own"), home);
        let kept = within(there, &[other.id()], Kept::own).expect("entered");
        let wrong = within(there, &[own_pid], || ()).expect_err("not in it");
        assert_eq!(wrong.kind(), io::ErrorKind::NotFound);
        other.kill().expect("kill");
        other.wait().expect("wait");
        within(there, &[other.id()], || ()).expect_err("gone");
        let seen = kept.expect("kept").visit(|| own().expect("own"));
        assert_eq!(seen.expect("entered"), there);
        assert_eq!(own().expect("own"), home);
    }

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
