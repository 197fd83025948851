//! Listeners on a private port, which a program finds for their public address.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// A public address, and the private port of the listeners that take its connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The address that clients connect to.
    pub public: SocketAddr,
    /// It is IPv6, and takes IPv4 too.
    pub dual_stack: bool,
    /// The port of the loopback address that the listeners are bound to.
    pub private_port: u16,
}

/// The loopback address that listeners for a public one are bound to.
pub fn private_ip(public: SocketAddr, dual_stack: bool) -> IpAddr {
    match public {
        SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        // A socket bound to any other address of IPv6 than this kind and :: takes no IPv4 (net/ipv6/af_inet6.c,
        // __inet6_bind).
        SocketAddr::V6(_) if dual_stack => Ipv4Addr::LOCALHOST.to_ipv6_mapped().into(),
        SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    }
}
