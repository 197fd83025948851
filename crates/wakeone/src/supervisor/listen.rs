//! Addresses as users write them, and the listeners bound to them: one a slot, in one `SO_REUSEPORT` group.

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::str::FromStr;

/// An address to listen on, as written: `:8080`, `127.0.0.1:8080`, `[::1]:8080` or `localhost:8080`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    host: Host,
    port: u16,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Host {
    /// Every address of the machine, IPv6 and IPv4.
    Any,
    Ip(IpAddr),
    Name(String),
}

/// Why a text is no address.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "`{text}` is no address to listen on: {reason}; write `:8080`, `127.0.0.1:8080`, `[::1]:8080` or `localhost:8080`"
)]
pub struct BadAddress {
    text: String,
    reason: &'static str,
}

impl FromStr for Address {
    type Err = BadAddress;

    fn from_str(text: &str) -> Result<Self, BadAddress> {
        let bad = |reason| BadAddress {
            text: text.to_owned(),
            reason,
        };
        let (host, port) = text
            .rsplit_once(':')
            .ok_or(bad("it has no `:` before the port"))?;
        if port.is_empty() || !port.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(bad("the port is not a number"));
        }
        let port = port.parse().map_err(|_| bad("the port is above 65535"))?;
        let host = if host.is_empty() {
            Host::Any
        } else if let Some(inner) = host.strip_prefix('[') {
            let inner = inner.strip_suffix(']').ok_or(bad("the `[` has no `]`"))?;
            Host::Ip(
                inner
                    .parse::<Ipv6Addr>()
                    .map_err(|_| bad("what is between the brackets is no IPv6 address"))?
                    .into(),
            )
        } else if host.contains(':') {
            return Err(bad("an IPv6 address goes between brackets"));
        } else if let Ok(ip) = host.parse::<Ipv4Addr>() {
            Host::Ip(ip.into())
        } else if host
            .bytes()
            .all(|byte| byte.is_ascii_digit() || byte == b'.')
        {
            return Err(bad("the host is no IPv4 address"));
        } else if host
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_'))
        {
            Host::Name(host.to_owned())
        } else {
            return Err(bad("the host is neither an address nor a name"));
        };
        Ok(Self { host, port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Any => write!(f, ":{}", self.port),
            Host::Ip(ip) => SocketAddr::new(*ip, self.port).fmt(f),
            Host::Name(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

/// Where listeners are bound: an address, and whether an IPv6 wildcard takes IPv4 too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Endpoint {
    /// The address and port.
    pub address: SocketAddr,
    /// `[::]` that takes IPv4 connections too.
    pub dual_stack: bool,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)?;
        if self.dual_stack {
            f.write_str(" (IPv6 and IPv4)")
        } else {
            Ok(())
        }
    }
}

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
        /// What the resolver said.
        source: std::io::Error,
    },
    /// Somebody else listens there.
    #[error("cannot listen on {0}: the address is in use; see by whom with `ss -ltnp 'sport = :{port}'`, or choose another with -l", port = .0.address.port())]
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
    /// Anything else.
    #[error("cannot listen on {endpoint}: {what} failed: {source}")]
    Call {
        /// Where.
        endpoint: Endpoint,
        /// The system call.
        what: &'static str,
        /// What it said.
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

impl Address {
    /// The port as written; 0 lets the kernel choose.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// A name for a group that listens here: the port, and before it the host if it is not every address.
    pub fn group_name(&self) -> String {
        let host = match &self.host {
            Host::Any => String::new(),
            Host::Ip(ip) => format!("{ip}-"),
            Host::Name(name) => format!("{name}-"),
        };
        format!("{host}{}", self.port).replace(['.', ':'], "_")
    }

    /// Where this address is: a name's first address, IPv4 before IPv6 as most servers bind.
    ///
    /// # Errors
    /// The name cannot be resolved.
    pub fn resolve(&self) -> Result<Endpoint, ListenError> {
        let at = |ip| Endpoint {
            address: SocketAddr::new(ip, self.port),
            dual_stack: false,
        };
        match &self.host {
            Host::Any if ipv6_works() => Ok(Endpoint {
                dual_stack: true,
                ..at(Ipv6Addr::UNSPECIFIED.into())
            }),
            Host::Any => Ok(at(Ipv4Addr::UNSPECIFIED.into())),
            Host::Ip(ip) => Ok(at(*ip)),
            Host::Name(host) => {
                let unresolved = |source| ListenError::Unresolved {
                    host: host.clone(),
                    source,
                };
                let found = (host.as_str(), self.port)
                    .to_socket_addrs()
                    .map_err(unresolved)?;
                let first = found.min_by_key(SocketAddr::is_ipv6);
                first
                    .map(|address| at(address.ip()))
                    .ok_or_else(|| unresolved(std::io::ErrorKind::NotFound.into()))
            }
        }
    }
}

/// Whether this machine (or this network namespace) has IPv6 at all: booted with it off, socket() says so;
/// switched off by sysctl, only bind() does.
fn ipv6_works() -> bool {
    let bind = || {
        let socket = rustix::net::socket_with(
            AddressFamily::INET6,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        rustix::net::bind(&socket, &SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)))
    };
    bind().is_ok()
}

/// The listeners of one address: where they are (the port chosen when 0 was asked for), and one for each slot.
pub type Bound = (Endpoint, Vec<OwnedFd>);

/// Binds `slots` listeners to one address and starts listening when all are bound.
///
/// # Errors
/// The address is in use by anybody (also by a group that would let us in), or cannot be had.
pub fn bind_group(
    mut endpoint: Endpoint,
    slots: usize,
    backlog: i32,
) -> Result<Bound, ListenError> {
    let first = bind_first(endpoint)?;
    let mut listeners = Vec::with_capacity(slots);
    if endpoint.address.port() == 0 {
        // A socket bound to port 0 loses its port when its queue is rescued (shutdown + listen): so this one
        // only holds the port that it got, until the listeners are bound to it by number.
        endpoint.address.set_port(port_of(endpoint, &first)?);
        listeners.push(bind_member(endpoint)?);
        drop(first);
    } else {
        listeners.push(first);
    }
    for _ in 1..slots {
        listeners.push(bind_member(endpoint)?);
    }
    for listener in &listeners {
        listen(endpoint, listener, backlog)?;
    }
    Ok((endpoint, listeners))
}

/// Binds one more listener next to those that live: a slot whose listener died with its worker.
///
/// # Errors
/// As for a group; `InUse` when the living ones belong to another user.
pub fn bind_beside(endpoint: Endpoint, backlog: i32) -> Result<OwnedFd, ListenError> {
    let socket = bind_member(endpoint)?;
    listen(endpoint, &socket, backlog)?;
    Ok(socket)
}

/// (Re)starts listening. On a living listener it only sets the backlog.
///
/// # Errors
/// What listen(2) says.
pub fn listen(endpoint: Endpoint, socket: &OwnedFd, backlog: i32) -> Result<(), ListenError> {
    rustix::net::listen(socket, backlog).map_err(|errno| ListenError::of(endpoint, "listen", errno))
}

/// Makes a listener fit for a new worker: blocking (the last one may have changed that, it is shared), and
/// listening, should the last worker have shut it down.
///
/// # Errors
/// What the calls say.
pub fn refresh(endpoint: Endpoint, socket: &OwnedFd, backlog: i32) -> Result<(), ListenError> {
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
    let call = |what| move |errno| ListenError::of(endpoint, what, errno);
    let flags = fcntl_getfl(socket).map_err(call("fcntl"))?;
    if flags.contains(OFlags::NONBLOCK) {
        fcntl_setfl(socket, flags - OFlags::NONBLOCK).map_err(call("fcntl"))?;
    }
    if sockopt::socket_acceptconn(socket).map_err(call("getsockopt"))? {
        Ok(())
    } else {
        listen(endpoint, socket, backlog)
    }
}

/// The longest accept queue that the kernel allows (`net.core.somaxconn`).
pub fn somaxconn() -> i32 {
    let text = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap_or_default();
    text.trim().parse().unwrap_or(4096)
}

/// The first listener joins no group: it is bound without `SO_REUSEPORT`, which fails if anybody is there,
/// and gets it afterwards, for its siblings. So there is no moment between a probe and the real bind.
fn bind_first(endpoint: Endpoint) -> Result<OwnedFd, ListenError> {
    let socket = bind(endpoint, false)?;
    sockopt::set_socket_reuseport(&socket, true)
        .map_err(|errno| ListenError::of(endpoint, "SO_REUSEPORT", errno))?;
    Ok(socket)
}

fn bind_member(endpoint: Endpoint) -> Result<OwnedFd, ListenError> {
    bind(endpoint, true)
}

fn bind(endpoint: Endpoint, reuse_port: bool) -> Result<OwnedFd, ListenError> {
    let family = if endpoint.address.is_ipv6() {
        AddressFamily::INET6
    } else {
        AddressFamily::INET
    };
    let call = |what| move |errno| ListenError::of(endpoint, what, errno);
    let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .map_err(call("socket"))?;
    sockopt::set_socket_reuseaddr(&socket, true).map_err(call("SO_REUSEADDR"))?;
    if reuse_port {
        sockopt::set_socket_reuseport(&socket, true).map_err(call("SO_REUSEPORT"))?;
    }
    if endpoint.address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, !endpoint.dual_stack).map_err(call("IPV6_V6ONLY"))?;
    }
    rustix::net::bind(&socket, &endpoint.address).map_err(call("bind"))?;
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
/// The call fails, or it is no IP socket (`EAFNOSUPPORT`).
pub fn address_of(socket: impl AsFd) -> Result<SocketAddr, Errno> {
    SocketAddr::try_from(rustix::net::getsockname(socket)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    #[test]
    fn addresses_parse() {
        let table = [
            (":8080", ":8080", "8080"),
            (":0", ":0", "0"),
            ("127.0.0.1:8080", "127.0.0.1:8080", "127_0_0_1-8080"),
            ("0.0.0.0:80", "0.0.0.0:80", "0_0_0_0-80"),
            ("[::1]:8080", "[::1]:8080", "__1-8080"),
            ("[::]:65535", "[::]:65535", "__-65535"),
            ("localhost:8080", "localhost:8080", "localhost-8080"),
            (
                "my-host.example:1",
                "my-host.example:1",
                "my-host_example-1",
            ),
        ];
        for (text, shown, name) in table {
            let address: Address = text
                .parse()
                .unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(
                (address.to_string().as_str(), address.group_name().as_str()),
                (shown, name)
            );
        }
    }

    #[test]
    fn bad_addresses_are_named_with_a_reason() {
        let table = [
            ("8080", "no `:`"),
            ("", "no `:`"),
            ("127.0.0.1:", "not a number"),
            ("127.0.0.1:http", "not a number"),
            (":-1", "not a number"),
            (":+1", "not a number"),
            (":65536", "above 65535"),
            ("[::1:80", "no `]`"),
            ("[127.0.0.1]:80", "no IPv6 address"),
            ("::1:80", "between brackets"),
            ("1.2.3:80", "no IPv4 address"),
            ("1.2.3.256:80", "no IPv4 address"),
            ("a b:80", "neither an address nor a name"),
            ("http://x:80", "between brackets"),
        ];
        for (text, reason) in table {
            let error = text.parse::<Address>().expect_err(text).to_string();
            assert!(
                error.contains(reason) && error.contains(&format!("`{text}`")),
                "{text}: {error}"
            );
        }
    }

    fn loopback(port: u16) -> Endpoint {
        Endpoint {
            address: (Ipv4Addr::LOCALHOST, port).into(),
            dual_stack: false,
        }
    }

    #[test]
    fn port_zero_becomes_one_port_for_all() {
        let (endpoint, listeners) = bind_group(loopback(0), 4, 16).expect("bind");
        assert_ne!(endpoint.address.port(), 0);
        for listener in &listeners {
            assert_eq!(address_of(listener), Ok(endpoint.address));
            assert_eq!(sockopt::socket_acceptconn(listener), Ok(true));
        }
        TcpStream::connect(endpoint.address).expect("connect");
    }

    #[test]
    fn a_group_that_would_let_us_in_is_still_in_use() {
        let (endpoint, _listeners) = bind_group(loopback(0), 2, 16).expect("bind");
        assert!(
            matches!(bind_group(endpoint, 2, 16), Err(ListenError::InUse(at)) if at == endpoint)
        );
        bind_beside(endpoint, 16).expect("but a slot of the group may come back");
    }

    #[test]
    fn dual_stack_takes_both_families() {
        let address: Address = ":0".parse().expect("address");
        let wanted = address.resolve().expect("resolve");
        let (endpoint, _listeners) = bind_group(wanted, 2, 16).expect("bind");
        TcpStream::connect((Ipv4Addr::LOCALHOST, endpoint.address.port())).expect("IPv4");
        if wanted.dual_stack {
            TcpStream::connect((Ipv6Addr::LOCALHOST, endpoint.address.port())).expect("IPv6");
        }
    }

    #[test]
    fn a_worn_listener_is_fit_again() {
        let (endpoint, listeners) = bind_group(loopback(0), 1, 16).expect("bind");
        let listener = &listeners[0];
        rustix::io::ioctl_fionbio(listener, true).expect("nonblocking");
        rustix::net::shutdown(listener, rustix::net::Shutdown::Both).expect("shutdown");
        assert_eq!(sockopt::socket_acceptconn(listener), Ok(false));
        refresh(endpoint, listener, 16).expect("refresh");
        assert_eq!(sockopt::socket_acceptconn(listener), Ok(true));
        assert!(
            !rustix::fs::fcntl_getfl(listener)
                .expect("flags")
                .contains(rustix::fs::OFlags::NONBLOCK)
        );
        assert_eq!(address_of(listener), Ok(endpoint.address));
    }
}
