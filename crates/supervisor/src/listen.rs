//! The listeners of an address: one for each slot, in one `SO_REUSEPORT` group.

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
pub use wakeone_control::state::Endpoint;
use wakeone_kernel::socket;

/// The shortest backlog that is chosen, where the kernel allows it: room for a burst. It was the kernel's own limit
/// until Linux 5.4.
const LEAST_BACKLOG: i32 = 128;

/// Why there are no listeners.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The name has no address.
    #[error(
        "cannot find the address of `{host}`: {source}; write the address itself, as in 127.0.0.1:8080"
    )]
    Unresolved {
        /// The name.
        host: String,
        /// The resolver's error.
        source: std::io::Error,
    },
    /// Another process listens there.
    #[error("cannot listen on {0}: the address is in use; see by whom with `ss -{kind}np 'sport = :{port}'`, or choose another with -l", kind = if .0.udp { "lu" } else { "lt" }, port = .0.address.port())]
    InUse(Endpoint),
    /// The port is reserved.
    #[error(
        "cannot listen on {0}: ports below net.ipv4.ip_unprivileged_port_start need CAP_NET_BIND_SERVICE; start as root or choose a port from 1024 on"
    )]
    Privileged(Endpoint),
    /// The machine has no such address.
    #[error(
        "cannot listen on {0}: this machine has no such address; `ip address` lists those it has"
    )]
    NotOurs(Endpoint),
    /// Any other error.
    #[error("cannot listen on {endpoint}: {what} failed: {source}")]
    Call {
        /// Where.
        endpoint: Endpoint,
        /// The system call.
        what: &'static str,
        /// Its error.
        source: std::io::Error,
    },
}

impl ListenError {
    fn of(endpoint: Endpoint, what: &'static str, errno: Errno) -> Self {
        match errno {
            Errno::ADDRINUSE => Self::InUse(endpoint),
            Errno::ACCESS => Self::Privileged(endpoint),
            Errno::ADDRNOTAVAIL => Self::NotOurs(endpoint),
            other => Self::Call {
                endpoint,
                what,
                source: other.into(),
            },
        }
    }
}

/// The listeners of one address: the address, with the port that the kernel chose for port 0, and one listener for
/// each slot.
pub type Bound = (Endpoint, Vec<OwnedFd>);

/// Binds `slots` sockets to one address. Those of TCP do not listen yet: see [`start`].
///
/// # Errors
/// Another process has the address (also with SO_REUSEPORT, which would let us in), or it cannot be bound.
pub fn bind_group(endpoint: Endpoint, slots: usize) -> Result<Bound, ListenError> {
    if endpoint.udp {
        return bind_datagrams(endpoint, bind_first(endpoint)?, slots);
    }
    let (endpoint, first) = bind_by_number(endpoint)?;
    reuse_port(endpoint, &first, true)?;
    let mut listeners = Vec::with_capacity(slots);
    listeners.push(first);
    for _ in 1..slots {
        listeners.push(bind_member(endpoint)?);
    }
    Ok((endpoint, listeners))
}

/// Binds the one listener of an address anew, for all slots. It does not listen yet: see [`start`].
///
/// # Errors
/// As for a group.
pub fn bind_shared(endpoint: Endpoint, nonblocking: bool) -> Result<OwnedFd, ListenError> {
    let (_, listener) = bind_by_number(endpoint)?;
    set_nonblocking(endpoint, &listener, nonblocking)?;
    Ok(listener)
}

/// Makes a bound listener one that all slots have, beside which nobody may listen.
///
/// # Errors
/// A system call fails.
pub fn keep_alone(
    endpoint: Endpoint,
    listener: &OwnedFd,
    nonblocking: bool,
) -> Result<(), ListenError> {
    reuse_port(endpoint, listener, false)?;
    set_nonblocking(endpoint, listener, nonblocking)
}

/// Another descriptor of a listener.
///
/// # Errors
/// The process has too many.
pub fn copy(endpoint: Endpoint, listener: &OwnedFd) -> Result<OwnedFd, ListenError> {
    rustix::io::fcntl_dupfd_cloexec(listener, 0)
        .map_err(|errno| ListenError::of(endpoint, "dup", errno))
}

/// A socket bound to port 0 loses its port when it is shut down, and is to listen again: so such a one only holds the
/// port that it got, until the socket is bound to it by number.
fn bind_by_number(mut endpoint: Endpoint) -> Result<(Endpoint, OwnedFd), ListenError> {
    let first = bind(endpoint, false)?;
    if endpoint.address.port() != 0 {
        return Ok((endpoint, first));
    }
    endpoint.address.set_port(port_of(endpoint, &first)?);
    let bound = bind(endpoint, false)?;
    Ok((endpoint, bound))
}

/// The sockets of a UDP group. `first` holds the address until they are bound. It cannot join the group: a UDP socket
/// joins one when it is bound or never, and this one was bound alone. Datagrams that it gets in that moment are lost,
/// like those before it was bound.
fn bind_datagrams(
    mut endpoint: Endpoint,
    first: OwnedFd,
    slots: usize,
) -> Result<Bound, ListenError> {
    endpoint.address.set_port(port_of(endpoint, &first)?);
    let sockets = (0..slots).map(|_| bind_member(endpoint));
    Ok((endpoint, sockets.collect::<Result<_, _>>()?))
}

/// Binds one more listener beside the living ones, for a slot whose listener died with its worker. It does not listen
/// yet.
///
/// # Errors
/// As for a group; `InUse` when the living ones belong to another user.
pub fn bind_beside(endpoint: Endpoint) -> Result<OwnedFd, ListenError> {
    bind_member(endpoint)
}

/// Whether others may listen at the address of a socket that begins to listen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Company {
    /// Nobody may. Bind lets in several sockets that do not listen, and the first one that listens has the address.
    Refuse,
    /// The members of its group may.
    Join,
}

/// Makes a bound socket listen. A UDP socket is left alone. A socket that listens already only loses its filter, if
/// its group was closing when the supervisor was killed.
///
/// With [`Company::Refuse`] the kernel neither asks the group's program nor lets others join until [`share`].
///
/// # Errors
/// The address is in use, or listen(2) fails.
pub fn start(
    endpoint: Endpoint,
    socket: &OwnedFd,
    backlog: i32,
    company: Company,
) -> Result<(), ListenError> {
    if endpoint.udp {
        return Ok(());
    }
    if socket::listens(socket) {
        let _ = socket::admit_syns(socket); // fails only if there is no such filter
        return Ok(());
    }
    if company == Company::Refuse {
        reuse_port(endpoint, socket, false)?;
    }
    listen(endpoint, socket, backlog)
}

/// Lets the other members of its group listen beside the first.
///
/// # Errors
/// setsockopt(2) fails.
pub fn share(endpoint: Endpoint, socket: &OwnedFd) -> Result<(), ListenError> {
    reuse_port(endpoint, socket, true)
}

fn reuse_port(endpoint: Endpoint, socket: &OwnedFd, on: bool) -> Result<(), ListenError> {
    sockopt::set_socket_reuseport(socket, on)
        .map_err(|errno| ListenError::of(endpoint, "SO_REUSEPORT", errno))
}

/// (Re)starts listening. On a living listener it only sets the backlog, on a UDP socket nothing.
///
/// # Errors
/// listen(2) fails.
pub fn listen(endpoint: Endpoint, socket: &OwnedFd, backlog: i32) -> Result<(), ListenError> {
    if endpoint.udp {
        return Ok(());
    }
    rustix::net::listen(socket, backlog).map_err(|errno| ListenError::of(endpoint, "listen", errno))
}

/// Makes a listener fit for a new worker. It is set to blocking or not, since the last worker may have changed that
/// shared flag; `None`: others use it, and it stays. It listens again if the last worker shut it down.
///
/// # Errors
/// A system call fails.
pub fn refresh(
    endpoint: Endpoint,
    socket: &OwnedFd,
    backlog: i32,
    nonblocking: Option<bool>,
) -> Result<(), ListenError> {
    if let Some(nonblocking) = nonblocking {
        set_nonblocking(endpoint, socket, nonblocking)?;
    }
    if endpoint.udp || socket::listens(socket) {
        return Ok(());
    }
    let _ = socket::forget_shutdown(socket); // a socket that cannot has nothing to forget
    listen(endpoint, socket, backlog)
}

fn set_nonblocking(endpoint: Endpoint, socket: &OwnedFd, on: bool) -> Result<(), ListenError> {
    rustix::io::ioctl_fionbio(socket, on)
        .map_err(|errno| ListenError::of(endpoint, "FIONBIO", errno))
}

/// The backlog of each of so many queues: the one asked for, as far as the kernel allows it.
///
/// Else all queues together are about as long as one may be. With a queue of that length each, a connection waits so many
/// times longer under overload: its client gives up, and the worker's time for it is wasted (`wakeone-lab run overload`).
pub fn backlog(asked: Option<i32>, queues: usize) -> i32 {
    let most = somaxconn();
    asked.map_or_else(|| shared_out(most, queues), |asked| asked.min(most))
}

/// Logs that a backlog is longer than the kernel allows.
pub fn warn_of_long(asked: Option<i32>) {
    let most = somaxconn();
    if let Some(asked) = asked.filter(|asked| *asked > most) {
        tracing::warn!(
            asked,
            most,
            "a backlog of {asked} is cut to {most}: raise it with `sysctl -w net.core.somaxconn={asked}`"
        );
    }
}

fn shared_out(most: i32, workers: usize) -> i32 {
    let each = most / i32::try_from(workers.max(1)).unwrap_or(i32::MAX);
    each.max(most.min(LEAST_BACKLOG))
}

/// The longest accept queue that the kernel allows (`net.core.somaxconn`).
fn somaxconn() -> i32 {
    let text = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap_or_default();
    text.trim().parse().unwrap_or(4096)
}

/// Binds the first listener. It is bound without `SO_REUSEPORT`, which fails if another process listens there, and
/// gets the option afterwards, for the other members. So there is no moment between a probe and the real bind.
/// [`Company::Refuse`] is for a group that is bound there and does not listen yet.
fn bind_first(endpoint: Endpoint) -> Result<OwnedFd, ListenError> {
    let socket = bind(endpoint, false)?;
    reuse_port(endpoint, &socket, true)?;
    Ok(socket)
}

/// Binds a socket that is to be the only one at its address. It does not listen yet.
///
/// # Errors
/// As for a group.
pub fn bind_alone(endpoint: Endpoint) -> Result<OwnedFd, ListenError> {
    bind(endpoint, false)
}

/// Holds an address that nobody has, by a socket that never listens: listeners of `owner` may share it.
///
/// # Errors
/// As for a group, or the socket cannot be given to `owner`.
pub fn hold(endpoint: Endpoint, owner: Option<u32>) -> Result<(Endpoint, OwnedFd), ListenError> {
    let (endpoint, socket) = bind_by_number(endpoint)?;
    reuse_port(endpoint, &socket, true)?;
    give(endpoint, &socket, owner)?;
    Ok((endpoint, socket))
}

/// The same beside listeners of `owner`.
///
/// # Errors
/// The same.
pub fn hold_beside(endpoint: Endpoint, owner: Option<u32>) -> Result<OwnedFd, ListenError> {
    let socket = open(endpoint, true)?;
    give(endpoint, &socket, owner)?;
    bind_open(endpoint, socket)
}

/// Sockets share an address if they have the same owner (net/ipv4/inet_connection_sock.c, inet_bind_conflict).
fn give(endpoint: Endpoint, socket: &OwnedFd, owner: Option<u32>) -> Result<(), ListenError> {
    let Some(owner) = owner else {
        return Ok(());
    };
    rustix::fs::fchown(socket, Some(rustix::fs::Uid::from_raw(owner)), None)
        .map_err(|errno| ListenError::of(endpoint, "fchown", errno))
}

fn bind_member(endpoint: Endpoint) -> Result<OwnedFd, ListenError> {
    bind(endpoint, true)
}

fn bind(endpoint: Endpoint, reuse_port: bool) -> Result<OwnedFd, ListenError> {
    bind_open(endpoint, open(endpoint, reuse_port)?)
}

/// A socket that is not bound yet.
fn open(endpoint: Endpoint, reuse_port: bool) -> Result<OwnedFd, ListenError> {
    let family = if endpoint.address.is_ipv6() {
        AddressFamily::INET6
    } else {
        AddressFamily::INET
    };
    let call = |what| move |errno| ListenError::of(endpoint, what, errno);
    let kind = if endpoint.udp {
        SocketType::DGRAM
    } else {
        SocketType::STREAM
    };
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)
        .map_err(call("socket"))?;
    if !endpoint.udp {
        // Ignores connections in TIME_WAIT. Without it, the member that the program is attached to could not listen
        // while others are bound (net/ipv4/inet_connection_sock.c, inet_bind_conflict). For UDP it would let other
        // processes bind the same address, and take its datagrams.
        sockopt::set_socket_reuseaddr(&socket, true).map_err(call("SO_REUSEADDR"))?;
    }
    if reuse_port {
        sockopt::set_socket_reuseport(&socket, true).map_err(call("SO_REUSEPORT"))?;
    }
    if endpoint.address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, !endpoint.dual_stack).map_err(call("IPV6_V6ONLY"))?;
    }
    Ok(socket)
}

fn bind_open(endpoint: Endpoint, socket: OwnedFd) -> Result<OwnedFd, ListenError> {
    rustix::net::bind(&socket, &endpoint.address)
        .map_err(|errno| ListenError::of(endpoint, "bind", errno))?;
    Ok(socket)
}

fn port_of(endpoint: Endpoint, socket: impl AsFd) -> Result<u16, ListenError> {
    address_of(socket)
        .map(|address| address.port())
        .map_err(|errno| ListenError::of(endpoint, "getsockname", errno))
}

/// The address that a socket is bound to.
///
/// # Errors
/// The call fails, or it is not an IP socket (`EAFNOSUPPORT`).
pub fn address_of(socket: impl AsFd) -> Result<SocketAddr, Errno> {
    SocketAddr::try_from(rustix::net::getsockname(socket)?)
}

#[cfg(test)]
mod tests {
    use super::super::address::Address;
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr, TcpStream};

    #[test]
    fn all_queues_together_are_as_long_as_one_may_be() {
        assert_eq!(shared_out(4096, 1), 4096);
        assert_eq!(shared_out(4096, 3), 1365);
        assert_eq!(shared_out(4096, 256), 128);
        assert_eq!(shared_out(64, 4), 64);
        assert_eq!(backlog(None, 1), somaxconn());
        assert_eq!(backlog(Some(5), 4), 5);
    }

    fn loopback(port: u16) -> Endpoint {
        Endpoint {
            address: (Ipv4Addr::LOCALHOST, port).into(),
            dual_stack: false,
            udp: false,
        }
    }

    /// A group whose sockets listen, one after the other.
    fn listening(endpoint: Endpoint, slots: usize) -> Result<Bound, ListenError> {
        let (endpoint, listeners) = bind_group(endpoint, slots)?;
        start_all(endpoint, &listeners)?;
        Ok((endpoint, listeners))
    }

    fn start_all(endpoint: Endpoint, listeners: &[OwnedFd]) -> Result<(), ListenError> {
        for (slot, listener) in listeners.iter().enumerate() {
            if slot == 0 {
                start(endpoint, listener, 16, Company::Refuse)?;
                share(endpoint, listener)?;
            } else {
                start(endpoint, listener, 16, Company::Join)?;
            }
        }
        Ok(())
    }

    #[test]
    fn port_zero_becomes_one_port_for_all() {
        let (endpoint, listeners) = bind_group(loopback(0), 4).expect("bind");
        assert_ne!(endpoint.address.port(), 0);
        let refused = TcpStream::connect(endpoint.address).expect_err("nobody listens");
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
        start_all(endpoint, &listeners).expect("listen");
        for listener in &listeners {
            assert_eq!(address_of(listener), Ok(endpoint.address));
            assert!(socket::listens(listener));
        }
        TcpStream::connect(endpoint.address).expect("connect");
    }

    #[test]
    fn a_group_that_would_let_us_in_is_still_in_use() {
        let (endpoint, _listeners) = listening(loopback(0), 2).expect("bind");
        assert!(matches!(bind_group(endpoint, 2), Err(ListenError::InUse(at)) if at == endpoint));
        let beside = bind_beside(endpoint).expect("but a slot of the group may come back");
        start(endpoint, &beside, 16, Company::Join).expect("listen");
    }

    #[test]
    fn of_two_groups_that_are_bound_the_first_to_listen_has_the_address() {
        for classic in [false, true] {
            let (endpoint, first) = bind_group(loopback(0), 3).expect("bind");
            // bind() alone does not fail: SO_REUSEADDR lets both in until one listens.
            let (_, second) = bind_group(endpoint, 3).expect("bind beside");
            if classic {
                for group in [&first, &second] {
                    socket::attach_classic(&group[0], socket::ClassicChoice::Random, 3)
                        .expect("attach");
                }
            }
            start_all(endpoint, &first).expect("listen");
            assert!(
                matches!(start_all(endpoint, &second), Err(ListenError::InUse(at)) if at == endpoint)
            );
            drop(second);
            TcpStream::connect(endpoint.address).expect("connect");
        }
    }

    #[test]
    fn all_join_the_group_of_the_first_and_its_program() {
        let (endpoint, listeners) = bind_group(loopback(0), 4).expect("bind");
        // The CPU's number modulo 1: always the first member.
        socket::attach_classic(&listeners[0], socket::ClassicChoice::Cpu, 1).expect("attach");
        start_all(endpoint, &listeners).expect("listen");
        let clients: Vec<_> = (0..16)
            .map(|_| TcpStream::connect(endpoint.address).expect("connect"))
            .collect();
        let queues: Vec<u32> = listeners
            .iter()
            .map(|one| socket::accept_queue(one).expect("queue").length)
            .collect();
        assert_eq!(queues, [16, 0, 0, 0], "one program for all");
        drop(clients);
        // Any member represents the group.
        socket::detach_reuseport(&listeners[3]).expect("the one program");
        assert!(socket::detach_reuseport(&listeners[0]).is_err());
    }

    #[test]
    fn udp_sockets_are_a_group_that_lets_nobody_else_in() {
        let wanted = Endpoint {
            udp: true,
            ..loopback(0)
        };
        for slots in [1, 3] {
            let (endpoint, sockets) = bind_group(wanted, slots).expect("bind");
            assert_eq!(sockets.len(), slots);
            for socket in &sockets {
                assert_eq!(address_of(socket), Ok(endpoint.address));
                refresh(endpoint, socket, 16, Some(false)).expect("refresh");
            }
            assert!(matches!(
                bind_group(endpoint, 2),
                Err(ListenError::InUse(_))
            ));
            // They are in one group: a program can be attached to any of them.
            socket::attach_classic(&sockets[0], socket::ClassicChoice::Random, slots as u32)
                .expect("attach");
            bind_beside(endpoint).expect("but a slot of the group may come back");
        }
    }

    #[test]
    fn dual_stack_takes_both_families() {
        let address: Address = ":0".parse().expect("address");
        let wanted = address.resolve().expect("resolve");
        let (endpoint, _listeners) = listening(wanted, 2).expect("bind");
        TcpStream::connect((Ipv4Addr::LOCALHOST, endpoint.address.port())).expect("IPv4");
        if wanted.dual_stack {
            TcpStream::connect((Ipv6Addr::LOCALHOST, endpoint.address.port())).expect("IPv6");
        }
    }

    #[test]
    fn a_worn_listener_is_fit_again() {
        let (endpoint, listeners) = listening(loopback(0), 1).expect("bind");
        let listener = &listeners[0];
        rustix::io::ioctl_fionbio(listener, true).expect("nonblocking");
        rustix::net::shutdown(listener, rustix::net::Shutdown::Both).expect("shutdown");
        assert_eq!(sockopt::socket_acceptconn(listener), Ok(false));
        let is_blocking = || socket::is_blocking(listener);
        for nonblocking in [false, true, true, false] {
            refresh(endpoint, listener, 16, Some(nonblocking)).expect("refresh");
            assert_eq!(is_blocking(), !nonblocking);
        }
        assert_eq!(sockopt::socket_acceptconn(listener), Ok(true));
        assert_eq!(address_of(listener), Ok(endpoint.address));
    }
}
