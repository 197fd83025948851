//! What a user points at: a port, an address, a process, a name.

use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

/// What to look at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// Every listener.
    All,
    /// Every address of a port: `:8080`.
    Port(u16),
    /// One address: `127.0.0.1:8080`, `[::]:80`.
    Address(SocketAddr),
    /// What a process, or a child of it, listens on: its id.
    Pid(u32),
    /// What processes of this name, or of this systemd unit, listen on.
    Name(String),
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
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
        for bad in [
            "", ":", ":0", ":99999", "1.2.3.4", "::1", "host:80", "/run/x",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
