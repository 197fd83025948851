//! The accept queue of one listener.

use std::io;

use netlink_packet_core::{NetlinkMessage, NetlinkPayload};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_sys::Socket as Netlink;
use nix::libc;
use wakeone_model::address::Address;
use wakeone_model::listener::Protocol;

use super::netlink::connected;
use super::{diag, unix_diag};

/// Asks for the accept queue of one listener, again and again. For TCP some 3 µs each time, against 30 for a dump of all.
/// The kernel finds a UNIX socket by a walk over all of them.
pub struct QueueLook {
    netlink: Netlink,
    request: Vec<u8>,
}

impl std::fmt::Debug for QueueLook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QueueLook").finish_non_exhaustive()
    }
}

impl QueueLook {
    /// Returns one for a listener of TCP, or a UNIX socket. `inode` and `cookie` are its own.
    ///
    /// # Errors
    /// The error of the netlink socket.
    pub fn at(listener: Address, interface: u32, inode: u64, cookie: u64) -> io::Result<Self> {
        Ok(Self {
            netlink: connected()?,
            request: match listener {
                Address::Inet(listener) => diag::exact(listener, interface, cookie),
                Address::Unix(_) => unix_diag::exact(inode, cookie),
            },
        })
    }

    /// Returns how many connections wait, and how many may; `None` if the listener is gone.
    ///
    /// # Errors
    /// The error of the netlink socket.
    pub fn look(&self) -> io::Result<Option<(u32, u32)>> {
        self.netlink.send(&self.request, 0)?;
        let mut buffer = Vec::with_capacity(4096);
        self.netlink.recv(&mut buffer, 0)?;
        let answer = NetlinkMessage::<SockDiagMessage>::deserialize(&buffer)
            .map_err(|error| io::Error::other(format!("sock_diag: {error}")))?;
        match answer.payload {
            NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(response)) => {
                let socket = diag::entry(Protocol::Tcp, &response).socket;
                Ok(Some((socket.queued, socket.queue_limit)))
            }
            NetlinkPayload::InnerMessage(SockDiagMessage::UnixResponse(response)) => {
                let (_, socket) = unix_diag::entry(&response);
                Ok(Some((socket.queued, socket.queue_limit)))
            }
            NetlinkPayload::Error(error) => match error.to_io().raw_os_error() {
                Some(libc::ENOENT | libc::ESTALE) => Ok(None),
                _ => Err(error.to_io()),
            },
            _ => Ok(None),
        }
    }
}
