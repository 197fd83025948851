//! Addresses to listen on, as users write them.

use super::listen::{Endpoint, ListenError};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::str::FromStr;
use wakeone_model::address::SCHEME;

/// An address to listen on, as written: `:8080` or `8080`, `127.0.0.1:8080`, `[::1]:8080` or `localhost:8080`. `udp://` may
/// stand before it, or `tcp://`, which is the default.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    udp: bool,
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

/// Why a text is not an address.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "`{text}` is no address to listen on: {reason}; write `:8080`, `127.0.0.1:8080`, `[::1]:8080` or `localhost:8080`, and before it `udp://` for UDP"
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
        let (udp, place) = match text.strip_prefix("udp://") {
            Some(place) => (true, place),
            None => (false, text.strip_prefix("tcp://").unwrap_or(text)),
        };
        if place.starts_with(SCHEME) {
            return Err(bad(
                "a UNIX socket is one that the server opens itself, without -l",
            ));
        }
        let is_port = !place.is_empty() && place.bytes().all(|byte| byte.is_ascii_digit());
        let (host, port) = match is_port {
            true => ("", place),
            false => place
                .rsplit_once(':')
                .ok_or(bad("it has no `:` before the port"))?,
        };
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
        Ok(Self { udp, host, port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.udp {
            f.write_str("udp://")?;
        }
        match &self.host {
            Host::Any => write!(f, ":{}", self.port),
            Host::Ip(ip) => SocketAddr::new(*ip, self.port).fmt(f),
            Host::Name(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

impl Address {
    /// The port as written; 0 lets the kernel choose.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Whether this is a UDP address.
    pub fn is_udp(&self) -> bool {
        self.udp
    }

    /// A name for a group that listens here: the port, and before it the host if it is not every address.
    pub fn group_name(&self) -> String {
        let host = match &self.host {
            Host::Any => String::new(),
            Host::Ip(ip) => format!("{ip}-"),
            Host::Name(name) => format!("{name}-"),
        };
        let protocol = if self.udp { "udp-" } else { "" };
        format!("{protocol}{host}{}", self.port).replace(['.', ':'], "_")
    }

    /// Resolves the address. Of a name's addresses it takes the first, IPv4 before IPv6, as most servers bind.
    ///
    /// # Errors
    /// The name cannot be resolved.
    pub fn resolve(&self) -> Result<Endpoint, ListenError> {
        let at = |ip| Endpoint {
            address: SocketAddr::new(ip, self.port),
            dual_stack: false,
            udp: self.udp,
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

/// Whether this machine (or this network namespace) has IPv6 at all. If it was booted with IPv6 off, socket() fails;
/// if a sysctl switched it off, only bind() does.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_parse() {
        let table = [
            (":8080", ":8080", "8080"),
            ("8080", ":8080", "8080"),
            ("udp://53", "udp://:53", "udp-53"),
            (":0", ":0", "0"),
            ("127.0.0.1:8080", "127.0.0.1:8080", "127_0_0_1-8080"),
            ("0.0.0.0:80", "0.0.0.0:80", "0_0_0_0-80"),
            ("[::1]:8080", "[::1]:8080", "__1-8080"),
            ("[::]:65535", "[::]:65535", "__-65535"),
            ("localhost:8080", "localhost:8080", "localhost-8080"),
            ("tcp://:80", ":80", "80"),
            ("udp://:53", "udp://:53", "udp-53"),
            ("udp://[::1]:53", "udp://[::1]:53", "udp-__1-53"),
            (
                "udp://localhost:53",
                "udp://localhost:53",
                "udp-localhost-53",
            ),
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
            ("unix:/run/app.sock", "opens itself"),
            ("99999", "above 65535"),
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
            ("udp://", "no `:`"),
            ("udp://udp://:53", "between brackets"),
        ];
        for (text, reason) in table {
            let error = text.parse::<Address>().expect_err(text).to_string();
            assert!(
                error.contains(reason) && error.contains(&format!("`{text}`")),
                "{text}: {error}"
            );
        }
    }
}
