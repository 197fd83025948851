//! A target on the command line: a port, an address, a process, a name.

use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use wakeone_model::listener::Protocol;

/// The listeners to observe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// Every listener.
    All,
    /// Every address of a port: `:8080`.
    Port(u16),
    /// One address: `127.0.0.1:8080`, `[::]:80`.
    Address(SocketAddr),
    /// The listeners of a process, or of a child of it, by its id.
    Pid(u32),
    /// The listeners of processes with this name, or of this systemd unit.
    Name(String),
    /// One of the other targets, but only its listeners of this protocol: `udp://:53`, `tcp://:53`.
    By(Protocol, Box<Target>),
}

impl Target {
    /// The protocol that it is limited to, and the target without that.
    pub fn parts(&self) -> (Option<Protocol>, &Target) {
        match self {
            Target::By(protocol, target) => (Some(*protocol), target.parts().1),
            other => (None, other),
        }
    }

    /// Whether the target includes listeners of this protocol. A user who writes TCP means MPTCP too.
    pub fn is_of(&self, protocol: Protocol) -> bool {
        let udp = |protocol| protocol == Protocol::Udp;
        self.parts()
            .0
            .is_none_or(|wanted| udp(wanted) == udp(protocol))
    }
}

const SCHEMES: [(&str, Protocol); 2] = [("udp://", Protocol::Udp), ("tcp://", Protocol::Tcp)];

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        for (scheme, protocol) in SCHEMES {
            if let Some(rest) = text.strip_prefix(scheme) {
                let target: Target = rest.parse()?;
                return match target {
                    Target::By(..) => Err(format!("{text:?} is no target: it names two protocols")),
                    one => Ok(Target::By(protocol, Box::new(one))),
                };
            }
        }
        if let Some(port) = text.strip_prefix(':') {
            let number = port.parse().ok().filter(|port| *port > 0);
            return number.map(Target::Port).ok_or_else(|| {
                format!("{text:?} is no port: write :PORT with a number from 1 to 65535")
            });
        }
        if let Ok(pid) = text.parse() {
            return Ok(Target::Pid(pid));
        }
        if let Ok(address) = text.parse::<SocketAddr>() {
            return Ok(Target::Address(address));
        }
        let named =
            !text.is_empty() && text.parse::<IpAddr>().is_err() && !text.contains(['/', ':']);
        if named {
            Ok(Target::Name(text.into()))
        } else {
            Err(format!(
                "{text:?} is no target: write :PORT, ADDRESS:PORT ([::1]:PORT for IPv6), a process id, or the name of a process or unit"
            ))
        }
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Target::All => f.write_str("this machine"),
            Target::Port(port) => write!(f, ":{port}"),
            Target::Address(address) => write!(f, "{address}"),
            Target::Pid(pid) => write!(f, "process {pid}"),
            Target::Name(name) => f.write_str(name),
            Target::By(protocol, target) => write!(f, "{protocol}://{target}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_told_apart() {
        let parse = |text: &str| text.parse::<Target>();
        assert_eq!(parse(":80"), Ok(Target::Port(80)));
        assert_eq!(parse("80"), Ok(Target::Pid(80)));
        assert_eq!(parse("nginx"), Ok(Target::Name("nginx".into())));
        assert_eq!(
            parse("nginx.service"),
            Ok(Target::Name("nginx.service".into()))
        );
        let address = "[::1]:80".parse().expect("address");
        assert_eq!(parse("[::1]:80"), Ok(Target::Address(address)));
        let udp = Target::By(Protocol::Udp, Box::new(Target::Port(53)));
        assert_eq!(parse("udp://:53"), Ok(udp.clone()));
        assert_eq!(udp.to_string(), "udp://:53");
        assert!(udp.is_of(Protocol::Udp) && !udp.is_of(Protocol::Tcp));
        let tcp = parse("tcp://nginx").expect("target");
        assert!(tcp.is_of(Protocol::Mptcp) && !tcp.is_of(Protocol::Udp));
        assert!(Target::Port(53).is_of(Protocol::Udp) && Target::Port(53).is_of(Protocol::Tcp));
        for bad in [
            "udp://",
            "udp://:0",
            "udp://tcp://:1",
            "http://:80",
            "",
            ":",
            ":0",
            ":99999",
            "1.2.3.4",
            "::1",
            "host:80",
            "/run/x",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
