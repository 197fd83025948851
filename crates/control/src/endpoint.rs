//! Where a group listens.

use std::fmt;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use wakeone_model::listener::Protocol;

/// Where listeners are bound: an address, and whether an IPv6 wildcard takes IPv4 too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Endpoint {
    /// The address and port.
    pub address: SocketAddr,
    /// `[::]` that takes IPv4 connections too.
    pub dual_stack: bool,
    /// UDP sockets, which are bound and do not listen; else TCP.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub udp: bool,
}

impl Endpoint {
    /// Returns the protocol of its sockets.
    pub fn protocol(&self) -> Protocol {
        if self.udp {
            Protocol::Udp
        } else {
            Protocol::Tcp
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.udp {
            f.write_str("udp://")?;
        }
        self.address.fmt(f)?;
        if self.dual_stack {
            f.write_str(" (IPv6 and IPv4)")
        } else {
            Ok(())
        }
    }
}
