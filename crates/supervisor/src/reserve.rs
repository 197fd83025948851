//! An address that clients connect to, while its listeners are on a private port (`--lookup`).
//!
//! A socket that nobody serves listens there. `ss` shows the address, and a second server finds it in use. If the lookup
//! program finds no listener for a SYN, the socket's filter drops it, and the client tries again. Workers hold the socket
//! too: like the listeners it outlives a supervisor that is killed.

use super::listen::{self, Endpoint, ListenError};
use super::process::Process;
use super::state;
use std::os::fd::OwnedFd;
use wakeone_kernel::proc::process;
use wakeone_kernel::socket;
use wakeone_kernel::socket::inode_of;
use wakeone_kernel::socket::private::{Place, private_ip};

/// A reserved address, and the private port of its listeners.
#[derive(Debug)]
pub struct Reserved {
    /// Public address and private port.
    pub place: Place,
    /// The socket that reserves it.
    pub socket: OwnedFd,
}

/// A socket that answers no SYN has nothing in its queue.
const BACKLOG: i32 = 1;

/// Binds the listeners of an address to a private port, and reserves the address.
///
/// # Errors
/// The address is in use, or there is no loopback address to bind to.
pub fn bind(
    endpoint: Endpoint,
    slots: usize,
) -> Result<(Endpoint, Reserved, Vec<OwnedFd>), ListenError> {
    let (endpoint, socket) = reserve(endpoint)?;
    let (private, listeners) = listen::bind_group(at_port(endpoint, 0), slots)?;
    let place = Place {
        public: endpoint.address,
        dual_stack: endpoint.dual_stack,
        private_port: private.address.port(),
    };
    Ok((endpoint, Reserved { place, socket }, listeners))
}

fn reserve(mut endpoint: Endpoint) -> Result<(Endpoint, OwnedFd), ListenError> {
    let socket = listen::bind_alone(endpoint)?;
    let failed = |what| {
        move |source| ListenError::Call {
            endpoint,
            what,
            source,
        }
    };
    socket::drop_syns(&socket).map_err(failed("SO_ATTACH_FILTER"))?;
    let address = socket::address_of(&socket).map_err(failed("getsockname"))?;
    endpoint.address.set_port(address.port());
    Ok((endpoint, socket))
}

/// The private address for a public one, at this port.
fn at_port(public: Endpoint, port: u16) -> Endpoint {
    Endpoint {
        address: (private_ip(public.address, public.dual_stack), port).into(),
        ..public
    }
}

impl Reserved {
    /// Takes the socket that an earlier supervisor reserved from a worker that holds it. If none does, reserves the
    /// address anew.
    ///
    /// # Errors
    /// No worker holds it, and another process has the address.
    pub fn take_over(
        endpoint: Endpoint,
        known: &state::Reserved,
        workers: &[&Process],
    ) -> Result<Self, ListenError> {
        let held = workers
            .iter()
            .find_map(|worker| process::socket_of(worker.pid(), known.inode));
        let socket = match held {
            Some(socket) => socket,
            None => reserve(endpoint)?.1,
        };
        let place = Place {
            public: endpoint.address,
            dual_stack: endpoint.dual_stack,
            private_port: known.private_port,
        };
        Ok(Self { place, socket })
    }

    /// Makes it listen, which fails if another process listens there. Call this before the first listener can be
    /// found.
    ///
    /// # Errors
    /// The address is in use.
    pub fn start(&self, endpoint: Endpoint) -> Result<(), ListenError> {
        if socket::listens(&self.socket) {
            return Ok(());
        }
        listen::listen(endpoint, &self.socket, BACKLOG)
    }

    /// Its entry in the state file.
    pub fn state(&self) -> state::Reserved {
        state::Reserved {
            private_port: self.place.private_port,
            inode: inode_of(&self.socket).unwrap_or(0),
        }
    }
}

/// The address where the listeners of an endpoint are bound.
pub fn bound_at(endpoint: Endpoint, reserved: Option<&state::Reserved>) -> Endpoint {
    reserved.map_or(endpoint, |known| at_port(endpoint, known.private_port))
}
