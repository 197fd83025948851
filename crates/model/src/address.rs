//! Where a server listens: an IP address and port, or the name of a UNIX socket.

use std::ffi::OsStr;
use std::fmt;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Where a server listens. As text `127.0.0.1:80`, `unix:/run/app.sock` or `unix:@name`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Address {
    /// An IP address and port.
    Inet(SocketAddr),
    /// A UNIX socket.
    Unix(UnixName),
}

impl Address {
    /// The IP address and port; `None` for a UNIX socket.
    pub fn inet(self) -> Option<SocketAddr> {
        match self {
            Self::Inet(address) => Some(address),
            Self::Unix(_) => None,
        }
    }

    /// The name of a UNIX socket.
    pub fn unix(self) -> Option<UnixName> {
        match self {
            Self::Inet(_) => None,
            Self::Unix(name) => Some(name),
        }
    }

    /// The port; `None` for a UNIX socket.
    pub fn port(self) -> Option<u16> {
        self.inet().map(|address| address.port())
    }

    /// The same address, where an IPv4-mapped one is the IPv4 one: an IPv6 socket bound to `::ffff:127.0.0.1`, as Java's,
    /// serves 127.0.0.1.
    pub fn canonical(self) -> Self {
        match self {
            Self::Inet(at) => Self::Inet(SocketAddr::new(at.ip().to_canonical(), at.port())),
            Self::Unix(_) => self,
        }
    }

    /// Whether connections to an address reach a listener here: one on all addresses serves it too.
    pub fn serves(&self, address: &Self) -> bool {
        match (self.canonical(), address.canonical()) {
            (Self::Inet(listener), Self::Inet(address)) => {
                let all =
                    listener.ip().is_unspecified() && (listener.is_ipv6() || address.is_ipv4());
                listener == address || (all && listener.port() == address.port())
            }
            (Self::Unix(bound), Self::Unix(name)) => name.may_mean(&bound),
            _ => false,
        }
    }

    /// Whether connections to `localhost` and this port reach a listener here.
    pub fn serves_localhost(&self, port: u16) -> bool {
        let local = |at: SocketAddr| {
            at.port() == port && (at.ip().is_unspecified() || at.ip().is_loopback())
        };
        self.canonical().inet().is_some_and(local)
    }

    /// The shortest text by which a command means it: `:80`, `unix:/run/app.sock`.
    pub fn target(self) -> String {
        match self {
            Self::Inet(address) => format!(":{}", address.port()),
            Self::Unix(_) => self.to_string(),
        }
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        Self::Inet(address)
    }
}

impl From<UnixName> for Address {
    fn from(name: UnixName) -> Self {
        Self::Unix(name)
    }
}

impl TryFrom<Address> for UnixName {
    type Error = String;

    fn try_from(address: Address) -> Result<Self, String> {
        let none = || format!("{address} is not the name of a UNIX socket");
        address.unix().ok_or_else(none)
    }
}

impl From<Address> for String {
    fn from(address: Address) -> Self {
        address.to_string()
    }
}

impl TryFrom<String> for Address {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(name) = text.strip_prefix(SCHEME) {
            return name.parse().map(Self::Unix);
        }
        let inet = text.parse().map(Self::Inet);
        inet.map_err(|_| {
            format!("{text:?} is no address: write ADDRESS:PORT, unix:/PATH or unix:@NAME")
        })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inet(address) => address.fmt(f),
            Self::Unix(name) => write!(f, "{SCHEME}{name}"),
        }
    }
}

/// The prefix of a UNIX socket's name.
pub const SCHEME: &str = "unix:";

/// The name that a UNIX socket is bound to: a path, or a name in the abstract namespace (unix(7)), up to 108 bytes.
///
/// As text an abstract name has `@` before it. A byte that is no printable UTF-8 is `\xNN` there, and a backslash `\\`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "Address", try_from = "Address")]
pub struct UnixName {
    abstracted: bool,
    length: u8,
    bytes: [u8; MOST],
}

/// sizeof sun_path, include/uapi/linux/un.h.
const MOST: usize = 108;

impl UnixName {
    /// That of a path, as it was given to bind(2); `None` if it is empty, too long or has a NUL.
    pub fn of_path(path: &[u8]) -> Option<Self> {
        Self::new(false, path).filter(|_| !path.contains(&0))
    }

    /// An abstract name, without its leading NUL.
    pub fn of_abstract(name: &[u8]) -> Option<Self> {
        Self::new(true, name)
    }

    fn new(abstracted: bool, name: &[u8]) -> Option<Self> {
        let mut bytes = [0; MOST];
        // An abstract name has a NUL before it, and a path of full length needs none behind it.
        let most = MOST - usize::from(abstracted);
        if name.is_empty() || name.len() > most {
            return None;
        }
        bytes[..name.len()].copy_from_slice(name);
        Some(Self {
            abstracted,
            length: name.len() as u8,
            bytes,
        })
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }

    /// Its path; `None` for an abstract name. A relative one is so to whatever folder its server was in.
    pub fn path(&self) -> Option<&Path> {
        (!self.abstracted).then(|| Path::new(OsStr::from_bytes(self.bytes())))
    }

    /// The name without the NUL before it, if it is an abstract one.
    pub fn abstracted(&self) -> Option<&[u8]> {
        self.abstracted.then(|| self.bytes())
    }

    /// Whether this name, of a user, may mean the one of a socket: the same one, or a path that ends with the other's
    /// relative path.
    pub fn may_mean(&self, bound: &Self) -> bool {
        let ends = |path: &Path, bound: &Path| bound.is_relative() && path.ends_with(bound);
        let paths = self.path().zip(bound.path());
        self == bound || paths.is_some_and(|(path, bound)| ends(path, bound))
    }
}

impl FromStr for UnixName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (abstracted, name) = match text.strip_prefix('@') {
            Some(name) => (true, name),
            None => (false, text),
        };
        let bytes = unescaped(name);
        let name = match abstracted {
            true => Self::of_abstract(&bytes),
            false => Self::of_path(&bytes),
        };
        name.ok_or_else(|| {
            format!(
                "{text:?} is no name of a UNIX socket: it is a path, or @ and a name, of 1 to {} bytes",
                MOST - 1
            )
        })
    }
}

impl fmt::Display for UnixName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let escaped = |f: &mut fmt::Formatter<'_>, bytes: &[u8]| {
            bytes.iter().try_for_each(|byte| write!(f, "\\x{byte:02x}"))
        };
        let mut rest = self.bytes();
        match (self.abstracted, rest) {
            (true, _) => f.write_str("@")?,
            // A path that would be read as an abstract name.
            (false, [b'@', behind @ ..]) => {
                escaped(f, b"@")?;
                rest = behind;
            }
            _ => {}
        }
        for chunk in rest.utf8_chunks() {
            for char in chunk.valid().chars() {
                match char {
                    '\\' => f.write_str("\\\\")?,
                    control if control.is_control() => {
                        escaped(f, control.encode_utf8(&mut [0; 4]).as_bytes())?;
                    }
                    char => write!(f, "{char}")?,
                }
            }
            escaped(f, chunk.invalid())?;
        }
        Ok(())
    }
}

impl fmt::Debug for UnixName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{self}")
    }
}

/// The bytes of a text with escapes. A backslash before anything else stands for itself.
fn unescaped(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, behind)) = rest.split_first() {
        let hex = |digits: &[u8]| {
            let digits = std::str::from_utf8(digits).ok()?;
            let all_hex = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
            all_hex.then(|| u8::from_str_radix(digits, 16).ok())?
        };
        let (byte, taken) = match (first, behind) {
            (b'\\', [b'\\', ..]) => (b'\\', 2),
            (b'\\', [b'x', one, two, ..]) => match hex(&[*one, *two]) {
                Some(byte) => (byte, 4),
                None => (b'\\', 1),
            },
            _ => (*first, 1),
        };
        bytes.push(byte);
        rest = &rest[taken..];
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn addresses_are_read_and_written() {
        for text in [
            "127.0.0.1:80",
            "[::1]:443",
            "unix:/run/app.sock",
            "unix:@name",
            "unix:@a b",
        ] {
            let address: Address = text.parse().expect(text);
            assert_eq!(address.to_string(), text);
            let json = serde_json::to_string(&address).expect("JSON");
            assert_eq!(json, format!("{text:?}"));
            assert_eq!(
                serde_json::from_str::<Address>(&json).expect("read"),
                address
            );
        }
        let port: Address = "[::]:80".parse().expect("address");
        assert_eq!((port.port(), port.target()), (Some(80), ":80".into()));
        let unix: Address = "unix:@x".parse().expect("address");
        assert_eq!((unix.port(), unix.target()), (None, "unix:@x".into()));
        for bad in ["", "80", "host:80", "unix:", "unix:@", "/run/app.sock"] {
            assert!(bad.parse::<Address>().is_err(), "{bad}");
        }
        let long = format!("unix:/{}", "a".repeat(108));
        assert!(long.parse::<Address>().is_err());
    }

    #[test]
    fn a_listener_serves_its_address_however_it_is_written() {
        let at = |text: &str| text.parse::<Address>().expect(text);
        for (listener, reached, by) in [
            ("127.0.0.1:80", true, "127.0.0.1:80"),
            ("[::ffff:127.0.0.1]:80", true, "127.0.0.1:80"),
            ("127.0.0.1:80", true, "[::ffff:127.0.0.1]:80"),
            ("0.0.0.0:80", true, "[::ffff:10.0.0.1]:80"),
            ("[::]:80", true, "127.0.0.1:80"),
            ("0.0.0.0:80", false, "[::1]:80"),
            ("[::ffff:127.0.0.1]:80", false, "127.0.0.2:80"),
            ("[::ffff:127.0.0.1]:80", false, "127.0.0.1:81"),
        ] {
            assert_eq!(at(listener).serves(&at(by)), reached, "{listener} {by}");
        }
        for local in [
            "127.0.0.1:80",
            "[::ffff:127.0.0.1]:80",
            "[::1]:80",
            "[::]:80",
        ] {
            assert!(at(local).serves_localhost(80), "{local}");
        }
    }

    #[test]
    fn no_name_acts_on_a_terminal() {
        let name = UnixName::of_abstract(b"a\x1b[2J\xff\0\\").expect("a name");
        assert_eq!(name.to_string(), "@a\\x1b[2J\\xff\\x00\\\\");
        assert_eq!(name.to_string().parse(), Ok(name));
        let plain: UnixName = "/run/a\\b".parse().expect("a name");
        assert_eq!(plain.path(), Some(Path::new("/run/a\\b")));
    }

    #[test]
    fn a_users_path_may_mean_a_relative_one() {
        let name = |text: &str| text.parse::<UnixName>().expect("a name");
        assert!(name("/srv/app.sock").may_mean(&name("app.sock")));
        assert!(name("/srv/app.sock").may_mean(&name("/srv/app.sock")));
        assert!(!name("/srv/app.sock").may_mean(&name("/run/app.sock")));
        assert!(!name("/srv/my-app.sock").may_mean(&name("app.sock")));
        assert!(!name("@app.sock").may_mean(&name("app.sock")));
    }

    proptest! {
        #[test]
        fn every_name_is_read_as_it_was_written(bytes in proptest::collection::vec(any::<u8>(), 0..120), path: bool) {
            let name = if path { UnixName::of_path(&bytes) } else { UnixName::of_abstract(&bytes) };
            if let Some(name) = name {
                prop_assert_eq!(name.to_string().parse(), Ok(name));
                prop_assert!(!name.to_string().contains(char::is_control));
            }
        }
    }
}
