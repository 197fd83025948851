//! A target on the command line: a port, an address, a process, a name.

use std::net::{IpAddr, SocketAddr};
use std::os::unix::ffi::OsStrExt;
use std::str::FromStr;

use wakeone_model::address::{Address, SCHEME, UnixName};
use wakeone_model::listener::Protocol;

/// The listeners to observe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// Every listener.
    All,
    /// Every address of a port: `:8080`.
    Port(u16),
    /// One address: `127.0.0.1:8080`, `[::]:80`, `unix:/run/app.sock`, `unix:@name`.
    Address(Address),
    /// The listeners that connections to this port of `localhost` reach: `localhost:8080`.
    Localhost(u16),
    /// The listeners of a process, or of a child of it, by its id: `pid:4711`.
    Pid(u32),
    /// A port, or if nothing listens there, a process: `8080`, `4711`.
    Number(u32),
    /// The listeners of processes with this name, or of this systemd unit.
    Name(String),
    /// One of the other targets, but only its listeners of this protocol: `udp://:53`, `tcp://:53`.
    By(Protocol, Box<Target>),
}

impl Target {
    /// The one that means a listener.
    pub fn at(protocol: Protocol, address: Address) -> Self {
        match address {
            Address::Unix(_) => Self::Address(address),
            Address::Inet(_) => Self::By(protocol, Box::new(Self::Address(address))),
        }
    }

    /// The protocol that it is limited to, and the target without that.
    pub fn parts(&self) -> (Option<Protocol>, &Target) {
        match self {
            Target::By(protocol, target) => (Some(*protocol), target.parts().1),
            Target::Address(Address::Unix(_)) => (Some(Protocol::Unix), self),
            other => (None, other),
        }
    }

    /// Whether the target includes listeners of this protocol. A user who writes TCP means MPTCP too.
    pub fn is_of(&self, protocol: Protocol) -> bool {
        let kind = |protocol| match protocol {
            Protocol::Mptcp => Protocol::Tcp,
            other => other,
        };
        self.parts()
            .0
            .is_none_or(|wanted| kind(wanted) == kind(protocol))
    }

    /// Whether it means this listener's address, as far as addresses tell.
    pub fn is_at(&self, protocol: Protocol, address: Address) -> bool {
        match self.parts() {
            (_, Target::All | Target::Pid(_) | Target::Number(_) | Target::Name(_)) => true,
            (of, place) => of.unwrap_or(Protocol::Tcp) == protocol && place.may_be_at(address),
        }
    }

    /// Whether connections to it may reach a listener at this address, whatever its protocol.
    pub fn may_be_at(&self, address: Address) -> bool {
        match self.parts().1 {
            Target::Port(port) => address.port() == Some(*port),
            Target::Localhost(port) => address.serves_localhost(*port),
            Target::Address(at) => address.serves(at),
            _ => true,
        }
    }

    /// It as an argument of a command.
    pub fn to_argument(&self) -> String {
        match self {
            Target::Pid(pid) => format!("pid:{pid}"),
            Target::By(protocol, target) => format!("{protocol}://{}", target.to_argument()),
            other => other.to_string(),
        }
    }

    /// The meanings of a number, the first choice first: a port, and a process. Any other target means itself.
    pub fn readings(&self) -> Vec<Target> {
        match self {
            Target::Number(number) => {
                let port = u16::try_from(*number).ok().filter(|port| *port > 0);
                let port = port.map(Target::Port);
                port.into_iter().chain([Target::Pid(*number)]).collect()
            }
            Target::By(protocol, target) => {
                let by = |reading| Target::By(*protocol, Box::new(reading));
                target.readings().into_iter().map(by).collect()
            }
            other => vec![other.clone()],
        }
    }
}

const SCHEMES: [(&str, Protocol); 2] = [("udp://", Protocol::Udp), ("tcp://", Protocol::Tcp)];

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(name) = text.strip_prefix(SCHEME) {
            let name = absolute(name.parse()?)?;
            return Ok(Target::Address(name.into()));
        }
        for (scheme, protocol) in SCHEMES {
            if let Some(rest) = text.strip_prefix(scheme) {
                let target: Target = rest.parse()?;
                return match target {
                    one if one.parts().0.is_some() => {
                        Err(format!("{text:?} is no target: it names two protocols"))
                    }
                    one => Ok(Target::By(protocol, Box::new(one))),
                };
            }
        }
        let port = |port: &str| {
            let number = port.parse().ok().filter(|port| *port > 0);
            number.ok_or_else(|| {
                format!("{text:?} is no port: write :PORT with a number from 1 to 65535")
            })
        };
        if let Some(number) = text.strip_prefix(':') {
            return port(number).map(Target::Port);
        }
        if let Some(number) = text.strip_prefix("localhost:") {
            return port(number).map(Target::Localhost);
        }
        if let Some(Ok(pid)) = text.strip_prefix("pid:").map(str::parse) {
            return Ok(Target::Pid(pid));
        }
        if let Ok(number) = text.parse() {
            return Ok(Target::Number(number));
        }
        if let Ok(address) = text.parse::<SocketAddr>() {
            return Ok(Target::Address(address.into()));
        }
        let named =
            !text.is_empty() && text.parse::<IpAddr>().is_err() && !text.contains(['/', ':']);
        if named {
            Ok(Target::Name(text.into()))
        } else {
            Err(format!(
                "{text:?} is no target: write :PORT, localhost:PORT, ADDRESS:PORT ([::1]:PORT for IPv6), unix:/PATH, unix:@NAME, a process id, or the name of a process or unit"
            ))
        }
    }
}

/// Returns a user's name of a UNIX socket with an absolute path.
fn absolute(name: UnixName) -> Result<UnixName, String> {
    let Some(path) = name.path() else {
        return Ok(name);
    };
    let path = std::path::absolute(path).map_err(|error| format!("{name}: {error}"))?;
    UnixName::of_path(path.as_os_str().as_bytes())
        .ok_or_else(|| format!("{} is too long for a UNIX socket", path.display()))
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Target::All => f.write_str("this machine"),
            Target::Port(port) => write!(f, ":{port}"),
            Target::Address(address) => write!(f, "{address}"),
            Target::Localhost(port) => write!(f, "localhost:{port}"),
            Target::Pid(pid) => write!(f, "process {pid}"),
            Target::Number(number) => write!(f, "{number}"),
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
        assert_eq!(parse("80"), Ok(Target::Number(80)));
        assert_eq!(parse("pid:80"), Ok(Target::Pid(80)));
        assert_eq!(parse("localhost:80"), Ok(Target::Localhost(80)));
        assert_eq!(parse("nginx"), Ok(Target::Name("nginx".into())));
        assert_eq!(
            parse("nginx.service"),
            Ok(Target::Name("nginx.service".into()))
        );
        let address = "[::1]:80".parse().expect("address");
        assert_eq!(parse("[::1]:80"), Ok(Target::Address(address)));
        for unix in ["unix:/run/app.sock", "unix:@app"] {
            let target = parse(unix).expect("a target");
            assert_eq!(target.to_string(), unix);
            assert!(target.is_of(Protocol::Unix) && !target.is_of(Protocol::Tcp));
            assert!(target.is_at(Protocol::Unix, unix.parse().expect("address")));
        }
        let here = std::env::current_dir().expect("here").join("app.sock");
        let relative = parse("unix:app.sock").expect("a target");
        assert_eq!(relative.to_string(), format!("unix:{}", here.display()));
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
            "tcp://unix:@app",
            "unix:",
            "http://:80",
            "",
            ":",
            ":0",
            ":99999",
            "localhost:",
            "localhost:0",
            "pid:x",
            "1.2.3.4",
            "::1",
            "host:80",
            "/run/x",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_number_is_a_port_or_else_a_process() {
        let readings = |text: &str| text.parse::<Target>().expect("a target").readings();
        assert_eq!(readings("80"), [Target::Port(80), Target::Pid(80)]);
        assert_eq!(readings("70000"), [Target::Pid(70000)]);
        assert_eq!(readings("pid:80"), [Target::Pid(80)]);
        for text in ["pid:80", "udp://pid:80", ":80", "tcp://nginx", "unix:@app"] {
            let target: Target = text.parse().expect("a target");
            assert_eq!(target.to_argument(), text);
        }
        let udp = |target| Target::By(Protocol::Udp, Box::new(target));
        assert_eq!(
            readings("udp://53"),
            [udp(Target::Port(53)), udp(Target::Pid(53))]
        );
    }

    #[test]
    fn a_listener_on_all_addresses_is_at_each() {
        let is_at = |target: &str, address: &str| {
            let target: Target = target.parse().expect("a target");
            target.is_at(Protocol::Tcp, address.parse().expect("address"))
        };
        for address in ["127.0.0.1:80", "[::1]:80", "0.0.0.0:80", "[::]:80"] {
            assert!(is_at("localhost:80", address), "{address}");
        }
        assert!(is_at("127.0.0.1:80", "0.0.0.0:80"));
        assert!(!is_at("0.0.0.0:80", "127.0.0.1:80"));
        assert!(!is_at("localhost:80", "192.0.2.1:80"));
        assert!(!is_at("localhost:80", "127.0.0.1:81"));
        assert!(!is_at("udp://localhost:80", "127.0.0.1:80"));
    }
}
