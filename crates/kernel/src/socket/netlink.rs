//! Questions to `sock_diag`, and its answers.

use std::io;

use netlink_packet_core::{NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_sys::{Socket as Netlink, SocketAddr as NetlinkAddress, protocols::NETLINK_SOCK_DIAG};
use nix::libc;

/// Returns a socket to ask by.
pub(super) fn connected() -> io::Result<Netlink> {
    let mut netlink = Netlink::new(NETLINK_SOCK_DIAG)?;
    netlink.bind_auto()?;
    netlink.connect(&NetlinkAddress::new(0, 0))?;
    Ok(netlink)
}

/// The bytes of a request.
pub(super) fn encoded(flags: u16, request: SockDiagMessage) -> Vec<u8> {
    let mut header = NetlinkHeader::default();
    header.flags = flags;
    header.sequence_number = 1;
    let mut message = NetlinkMessage::new(header, request.into());
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

/// Hands over each answer to a dump.
pub(super) fn receive(netlink: &Netlink, found: &mut dyn FnMut(SockDiagMessage)) -> io::Result<()> {
    let invalid = |e: netlink_packet_core::DecodeError| io::Error::other(format!("sock_diag: {e}"));
    loop {
        let mut buffer = Vec::with_capacity(64 * 1024);
        netlink.recv(&mut buffer, 0)?;
        let mut rest = &buffer[..];
        while !rest.is_empty() {
            let message = NetlinkMessage::<SockDiagMessage>::deserialize(rest).map_err(invalid)?;
            match message.payload {
                NetlinkPayload::Done(_) => return Ok(()),
                // The protocol (or the family) is not built into this kernel: it has no sockets of it.
                NetlinkPayload::Error(error) => {
                    return match error.to_io().raw_os_error() {
                        Some(libc::ENOENT | libc::EINVAL) => Ok(()),
                        _ => Err(error.to_io()),
                    };
                }
                NetlinkPayload::InnerMessage(message) => found(message),
                _ => {}
            }
            // Messages are aligned to 4; a last one need not be padded.
            let length = (message.header.length as usize).next_multiple_of(4).max(16);
            rest = rest.get(length..).unwrap_or_default();
        }
    }
}
