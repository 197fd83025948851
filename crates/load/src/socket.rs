//! The sockets of the load: non-blocking, from the planned source address, errors named.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;

use nix::sys::socket::{setsockopt, sockopt::IpBindAddressNoPort};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use wakeone_model::address::{Address, UnixName};

use crate::{ErrorKind, Sources};

/// The first of the loopback sources; the others count up from it.
const FIRST_SOURCE: u32 = 0x7F01_0001;

/// The address of source number `source`, if the plan spreads sources.
pub(crate) fn source_address(sources: Sources, source: u32) -> Option<Ipv4Addr> {
    match sources {
        Sources::System => None,
        Sources::Loopback { .. } => Some(Ipv4Addr::from_bits(FIRST_SOURCE + source)),
    }
}

const FLAGS: SocketFlags = SocketFlags::NONBLOCK.union(SocketFlags::CLOEXEC);

/// Starts a connection. On loopback the handshake is over when this returns, but only a send can tell. To a UNIX socket
/// there is none.
pub(crate) fn connect(target: Address, from: Option<Ipv4Addr>) -> Result<OwnedFd, Errno> {
    match target {
        Address::Inet(target) => connect_inet(target, from),
        Address::Unix(name) => connect_unix(name),
    }
}

fn connect_unix(name: UnixName) -> Result<OwnedFd, Errno> {
    let target = match (name.path(), name.abstracted()) {
        (Some(path), _) => SocketAddrUnix::new(path)?,
        (None, name) => SocketAddrUnix::new_abstract_name(name.unwrap_or_default())?,
    };
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None)?;
    rustix::net::connect(&socket, &target).map(|()| socket)
}

fn connect_inet(target: SocketAddr, from: Option<Ipv4Addr>) -> Result<OwnedFd, Errno> {
    let family = match target.ip() {
        IpAddr::V4(_) => AddressFamily::INET,
        IpAddr::V6(_) => AddressFamily::INET6,
    };
    let socket = rustix::net::socket_with(family, SocketType::STREAM, FLAGS, None)?;
    if let Some(from) = from {
        // Leaves the port to connect(), which needs it unique only together with the target. Without this, each source
        // address would have but one use of each port, and bind() would search for it.
        setsockopt(&socket, IpBindAddressNoPort, &true)
            .map_err(|e| Errno::from_raw_os_error(e as i32))?;
        rustix::net::bind(&socket, &SocketAddrV4::new(from, 0))?;
    }
    match rustix::net::connect(&socket, &target) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(errno) => Err(errno),
    }
}

/// The kind of an error. `connecting`: no byte has been sent yet.
pub(crate) fn error_kind(errno: Errno, connecting: bool) -> ErrorKind {
    match errno {
        Errno::CONNREFUSED => ErrorKind::ConnectRefused,
        // The file of a UNIX socket is away while its server restarts.
        Errno::NOENT if connecting => ErrorKind::ConnectRefused,
        // The kernel does not say when there is room again.
        Errno::AGAIN if connecting => ErrorKind::QueueFull,
        Errno::TIMEDOUT if connecting => ErrorKind::ConnectTimeout,
        Errno::TIMEDOUT => ErrorKind::Timeout,
        Errno::CONNRESET | Errno::PIPE | Errno::CONNABORTED => ErrorKind::Reset,
        Errno::ADDRNOTAVAIL | Errno::ADDRINUSE => ErrorKind::AddressUnavailable,
        Errno::MFILE | Errno::NFILE => ErrorKind::TooManyFiles,
        Errno::HOSTUNREACH | Errno::NETUNREACH => ErrorKind::Unreachable,
        other => ErrorKind::Other(other.raw_os_error()),
    }
}
