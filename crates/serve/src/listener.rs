//! Listening sockets: our own, or handed over by a supervisor; and accepting from them, with every error that may
//! occur.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};
use rustix::time::Timespec;
use wakeone_kernel::socket::inherited;

use crate::Error;

/// How long to wait when the queue of a listener is being moved to another worker. That takes
/// about 80 µs; see [`Accepted::Later`].
const MOVING_WAIT: Duration = Duration::from_micros(100);
/// How long to wait when descriptors or memory have run out.
const EXHAUSTED_WAIT: Duration = Duration::from_millis(10);

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// On this address; port 0 lets the kernel choose.
    Address(SocketAddr),
    /// On the sockets handed over in `LISTEN_FDS` (see sd_listen_fds(3)).
    Inherited,
}

/// Reads an address to listen on: `127.0.0.1:8080`, `[::1]:8080`, `localhost:8080`, or `:8080`
/// for all addresses.
///
/// # Errors
/// A sentence for the user.
pub fn parse_address(text: &str) -> Result<SocketAddr, String> {
    let full = match text.strip_prefix(':') {
        Some(port) => format!("[::]:{port}"),
        None => text.to_owned(),
    };
    full.to_socket_addrs()
        .ok()
        .and_then(|mut found| found.next())
        .ok_or_else(|| {
            format!("{text:?} is no address to listen on; write HOST:PORT or :PORT, such as 127.0.0.1:8080")
        })
}

/// A listening TCP socket.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    address: SocketAddr,
}

impl Listener {
    /// Makes a socket that listens on `address`. Whether it may block is decided here, while no other process holds
    /// it: all its holders share the description that has the flag.
    ///
    /// # Errors
    /// [`Error::Listen`].
    pub fn bind(
        address: SocketAddr,
        backlog: i32,
        reuseport: bool,
        blocking: bool,
    ) -> Result<Self, Error> {
        let failed = |source: Errno| Error::Listen {
            address,
            source: source.into(),
        };
        let (family, v6) = match address {
            SocketAddr::V4(_) => (AddressFamily::INET, false),
            SocketAddr::V6(_) => (AddressFamily::INET6, true),
        };
        let mut flags = SocketFlags::CLOEXEC;
        flags.set(SocketFlags::NONBLOCK, !blocking);
        let fd = net::socket_with(family, SocketType::STREAM, flags, None).map_err(failed)?;
        sockopt::set_socket_reuseaddr(&fd, true).map_err(failed)?;
        sockopt::set_socket_reuseport(&fd, reuseport).map_err(failed)?;
        // Accepted sockets inherit it: an answer that is one piece is not held back.
        sockopt::set_tcp_nodelay(&fd, true).map_err(failed)?;
        if v6 && address.ip().is_unspecified() {
            sockopt::set_ipv6_v6only(&fd, false).map_err(failed)?;
        }
        net::bind(&fd, &address).map_err(failed)?;
        net::listen(&fd, backlog).map_err(failed)?;
        let address = local_address(&fd).map_err(failed)?;
        Ok(Self { fd, address })
    }

    /// The sockets handed over to this process.
    ///
    /// # Errors
    /// [`Error::Inherited`] when there is none, or one is not a listening TCP socket.
    pub fn inherited() -> Result<Vec<Self>, Error> {
        let fds = inherited::take().map_err(|error| Error::Inherited(error.to_string()))?;
        if fds.is_empty() {
            return Err(Error::Inherited(
                "LISTEN_FDS and LISTEN_PID hand no socket to this process; \
                 give an address with --listen, or start it under `wakeone run`"
                    .to_owned(),
            ));
        }
        fds.into_iter().enumerate().map(Self::adopt).collect()
    }

    fn adopt((index, fd): (usize, OwnedFd)) -> Result<Self, Error> {
        let listens = sockopt::socket_acceptconn(&fd).unwrap_or(false)
            && sockopt::socket_type(&fd).is_ok_and(|kind| kind == SocketType::STREAM);
        match local_address(&fd) {
            Ok(address) if listens => Ok(Self { fd, address }),
            _ => Err(Error::Inherited(format!(
                "descriptor {} is handed over by LISTEN_FDS and is not a listening TCP socket",
                inherited::FIRST_FD as usize + index
            ))),
        }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Makes accepting from it never wait. Use it only for a listener from which no other process accepts with a
    /// blocking call: the flag belongs to the description, which a fork or a hand-over shares. A listener handed over
    /// is fine: by the protocol it was given to this process, and a supervisor that keeps it does not accept.
    ///
    /// # Errors
    /// [`Error::Inherited`].
    pub fn set_nonblocking(&self) -> Result<(), Error> {
        fcntl_getfl(&self.fd)
            .and_then(|flags| fcntl_setfl(&self.fd, flags | OFlags::NONBLOCK))
            .map_err(|error| Error::Inherited(format!("cannot make a listener wait-free: {error}")))
    }

    /// Whether accepting from it returns at once when no connection is there.
    pub fn is_nonblocking(&self) -> bool {
        fcntl_getfl(&self.fd).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK))
    }

    /// Accepts one connection, which blocks or not as asked.
    pub fn accept(&self, nonblocking: bool, faults: &Faults) -> Accepted {
        let mut flags = SocketFlags::CLOEXEC;
        flags.set(SocketFlags::NONBLOCK, nonblocking);
        match net::accept_with(&self.fd, flags) {
            Ok(connection) => Accepted::Connection(connection),
            Err(Errno::AGAIN | Errno::INTR) => Accepted::Nothing,
            // shutdown() and listen() move the queue of this socket to others: between the two
            // it does not listen.
            Err(Errno::INVAL) => Accepted::Later(MOVING_WAIT),
            Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                faults.count(error);
                Accepted::Later(EXHAUSTED_WAIT)
            }
            // The connection was gone before it was accepted, or its network: accept(2) says to
            // treat these like EAGAIN.
            Err(
                error @ (Errno::CONNABORTED
                | Errno::PROTO
                | Errno::NETDOWN
                | Errno::NOPROTOOPT
                | Errno::HOSTDOWN
                | Errno::NONET
                | Errno::HOSTUNREACH
                | Errno::NETUNREACH
                | Errno::PERM),
            ) => {
                faults.count(error);
                Accepted::Nothing
            }
            Err(error) => {
                faults.count(error);
                Accepted::Later(EXHAUSTED_WAIT)
            }
        }
    }

    /// Waits until one of `listeners` has a connection, or for as long as `longest`. Another process may still take the
    /// connection. Returns none when a signal arrives.
    pub fn wait_any<'a>(listeners: &'a [Self], longest: Option<&Timespec>) -> Vec<&'a Self> {
        let mut fds: Vec<_> = listeners
            .iter()
            .map(|listener| PollFd::new(listener, PollFlags::IN))
            .collect();
        match poll(&mut fds, longest) {
            Ok(_) => listeners
                .iter()
                .zip(&fds)
                .filter(|(_, fd)| !fd.revents().is_empty())
                .map(|(listener, _)| listener)
                .collect(),
            Err(_) => Vec::new(),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn local_address(fd: &OwnedFd) -> Result<SocketAddr, Errno> {
    SocketAddr::try_from(net::getsockname(fd)?).map_err(|_| Errno::AFNOSUPPORT)
}

/// The result of accepting.
#[derive(Debug)]
pub enum Accepted {
    /// A connection.
    Connection(OwnedFd),
    /// No connection is there now; go back to waiting.
    Nothing,
    /// The listener cannot accept at the moment; waiting for it would return at once. Leave it
    /// alone for so long, then try again.
    Later(Duration),
}

/// Errors of accept, counted by kind. Nothing is swallowed: the worker reports them when it ends.
#[derive(Clone, Debug, Default)]
pub struct Faults(Arc<Mutex<BTreeMap<i32, u64>>>);

impl Faults {
    /// Counts an error.
    pub fn count(&self, error: Errno) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry(error.raw_os_error()).or_default() += 1;
    }

    /// Writes the counts to stderr, if there are any.
    pub fn report(&self, worker: &str) {
        if self.0.lock().is_ok_and(|counts| !counts.is_empty()) {
            eprintln!("worker {worker}: accept failed: {self}");
        }
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (index, (error, count)) in counts.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            let error = std::io::Error::from_raw_os_error(*error);
            write!(f, "{comma}{count} times {error}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpStream};

    #[test]
    fn addresses() {
        assert_eq!(
            parse_address("127.0.0.1:80"),
            Ok(SocketAddr::from((Ipv4Addr::LOCALHOST, 80)))
        );
        assert_eq!(
            parse_address(":80").map(|address| address.to_string()),
            Ok("[::]:80".to_owned())
        );
        for wrong in ["", "80", "host", "127.0.0.1", "127.0.0.1:x", ":99999"] {
            assert!(parse_address(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn dual_stack_on_all_addresses() -> Result<(), Box<dyn std::error::Error>> {
        let listener = Listener::bind(parse_address(":0")?, 8, false, true)?;
        let port = listener.address().port();
        TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        TcpStream::connect((std::net::Ipv6Addr::LOCALHOST, port))?;
        let faults = Faults::default();
        for _ in 0..2 {
            let accepted = listener.accept(false, &faults);
            assert!(matches!(accepted, Accepted::Connection(_)), "{accepted:?}");
        }
        Ok(())
    }

    #[test]
    fn a_queue_being_moved_is_waited_for() -> Result<(), Box<dyn std::error::Error>> {
        let listener = Listener::bind(parse_address("127.0.0.1:0")?, 8, false, false)?;
        let faults = Faults::default();
        assert!(matches!(listener.accept(true, &faults), Accepted::Nothing));
        net::shutdown(&listener, net::Shutdown::Read)?;
        assert!(matches!(listener.accept(true, &faults), Accepted::Later(_)));
        net::bind(&listener, &listener.address())?;
        net::listen(&listener, 8)?;
        TcpStream::connect(listener.address())?;
        let accepted = listener.accept(true, &faults);
        assert!(matches!(accepted, Accepted::Connection(_)), "{accepted:?}");
        assert_eq!(faults.to_string(), "");
        Ok(())
    }
}
