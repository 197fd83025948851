//! Sockets as `sock_diag` shows them (net/ipv4/inet_diag.c): all of a network namespace, without touching any.
//!
//! One dump of the listeners costs some 30 µs, against milliseconds for /proc/net/tcp; nothing is duplicated and no
//! privilege is needed. MPTCP listeners show only when asked for by a request attribute.

use std::io;
use std::net::SocketAddr;

use netlink_packet_core::Nla as _;
use netlink_packet_core::{
    NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_packet_sock_diag::inet::nlas::Nla;
use netlink_packet_sock_diag::inet::{
    ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags,
};
use netlink_sys::{Socket as Netlink, SocketAddr as NetlinkAddress, protocols::NETLINK_SOCK_DIAG};
use nix::libc;
use wakeone_model::listener::{Protocol, Socket};

/// The sockets to dump.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// Sockets that listen (TCP, MPTCP), or are bound and not connected (UDP).
    Listening,
    /// Connections that may still concern a server: every state but LISTEN, SYN_RECV, TIME_WAIT and CLOSE.
    Open,
    /// Connections that may wait in an accept queue, with TFO before their handshake has ended. Those without an inode
    /// do wait.
    Waiting,
}

/// A socket of the dump: address, peer and the rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its own address.
    pub local: SocketAddr,
    /// The other end's; port 0 where there is none.
    pub peer: SocketAddr,
    /// Bound interface, 0 for none.
    pub interface: u32,
    /// TCP state (include/net/tcp_states.h): 1 established, 10 listening …
    pub state: u8,
    /// The socket itself.
    pub socket: Socket,
    /// Time since it last sent data, or since it was made where it sent none, in ms. Known of [`Which::Waiting`] only:
    /// a connection that was not accepted yet has sent nothing.
    pub silent_ms: Option<u32>,
    /// The cgroup2 that it was made in: the inode of that folder. Kernels before 5.9 do not tell.
    pub cgroup: Option<u64>,
}

impl Entry {
    /// Whether it is a connection that neither side has closed.
    pub fn is_established(&self) -> bool {
        self.state == STATE_ESTABLISHED
    }
}

const FAMILIES: [u8; 2] = [libc::AF_INET as u8, libc::AF_INET6 as u8];

/// Returns all sockets of a protocol in this thread's network namespace; `port` (0 for all) is their local port.
///
/// # Errors
/// The error of the netlink socket.
pub fn sockets(protocol: Protocol, which: Which, port: u16) -> io::Result<Vec<Entry>> {
    dump(&FAMILIES, protocol, which, port)
}

/// Returns the sockets of a listener on this address, or of its connections. It asks for one address family, which is
/// half the walk through the kernel's tables. (IPv4 traffic of an IPv6 socket belongs to the socket's family.)
///
/// # Errors
/// As [`sockets`].
pub fn sockets_at(
    protocol: Protocol,
    which: Which,
    listener: SocketAddr,
) -> io::Result<Vec<Entry>> {
    let family = FAMILIES[usize::from(listener.is_ipv6())];
    dump(&[family], protocol, which, listener.port())
}

/// Returns how long the waiting connections of a listener's address have waited for accept(), in µs, as exact as the
/// kernel's tick. Which of several listeners there they wait for is not known.
///
/// # Errors
/// As [`sockets`].
pub fn waits_at(listener: SocketAddr) -> io::Result<Vec<u64>> {
    let any = listener.ip().is_unspecified();
    let waiting = sockets_at(Protocol::Tcp, Which::Waiting, listener)?;
    Ok(waiting
        .iter()
        // A connection that nobody accepted has no file. A request whose handshake is under way does not wait yet.
        .filter(|one| one.socket.inode == 0 && one.state != STATE_SYN_RECV)
        .filter(|one| any || one.local.ip() == listener.ip())
        .filter_map(|one| Some(u64::from(one.silent_ms?) * 1000))
        .collect())
}

/// Asks for the accept queue of one listener, again and again: some 3 µs each time, against 30 for a dump of all.
pub struct QueueLook {
    netlink: Netlink,
    request: Vec<u8>,
    protocol: Protocol,
}

impl std::fmt::Debug for QueueLook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QueueLook").finish_non_exhaustive()
    }
}

impl QueueLook {
    /// Returns one for a listener of TCP.
    ///
    /// # Errors
    /// The error of the netlink socket.
    pub fn at(listener: SocketAddr, interface: u32, cookie: u64) -> io::Result<Self> {
        let mut id = match listener {
            SocketAddr::V4(_) => SocketId::new_v4(),
            SocketAddr::V6(_) => SocketId::new_v6(),
        };
        id.source_address = listener.ip();
        id.source_port = listener.port();
        id.interface_id = interface;
        id.cookie = cookie.to_ne_bytes();
        let family = FAMILIES[usize::from(listener.is_ipv6())];
        let protocol = Protocol::Tcp;
        let flags = NLM_F_REQUEST;
        let states = states(protocol, Which::Listening);
        Ok(Self {
            netlink: connected()?,
            request: message(flags, family, protocol, ExtensionFlags::empty(), states, id),
            protocol,
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
                let socket = entry(self.protocol, &response).socket;
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

/// include/net/tcp_states.h
const STATE_ESTABLISHED: u8 = 1;
const STATE_SYN_RECV: u8 = 3;

fn connected() -> io::Result<Netlink> {
    let mut netlink = Netlink::new(NETLINK_SOCK_DIAG)?;
    netlink.bind_auto()?;
    netlink.connect(&NetlinkAddress::new(0, 0))?;
    Ok(netlink)
}

fn dump(families: &[u8], protocol: Protocol, which: Which, port: u16) -> io::Result<Vec<Entry>> {
    let netlink = connected()?;
    let mut found = Vec::new();
    for family in families {
        netlink.send(&request(*family, protocol, which, port), 0)?;
        receive(&netlink, &mut |response| {
            let entry = entry(protocol, &response);
            // The kernel filters by port for TCP and by the whole id for UDP: not all versions alike.
            let wanted = port == 0 || entry.local.port() == port;
            if wanted && (which != Which::Listening || entry.peer.port() == 0) {
                found.push(entry);
            }
        })?;
    }
    Ok(found)
}

fn states(protocol: Protocol, which: Which) -> StateFlags {
    match (which, protocol) {
        (Which::Listening, Protocol::Tcp | Protocol::Mptcp) => StateFlags::LISTEN,
        // An unconnected UDP socket is in TCP_CLOSE.
        (Which::Listening, Protocol::Udp) => StateFlags::CLOSE,
        (Which::Waiting, _) => {
            StateFlags::ESTABLISHED | StateFlags::CLOSE_WAIT | StateFlags::SYN_RECV
        }
        (Which::Open, _) => {
            StateFlags::all()
                - StateFlags::LISTEN
                - StateFlags::SYN_RECV
                - StateFlags::TIME_WAIT
                - StateFlags::CLOSE
        }
    }
}

/// include/uapi/linux/inet_diag.h
const INET_DIAG_REQ_PROTOCOL: u16 = 3;
const INET_DIAG_CGROUP_ID: u16 = 21;

fn request(family: u8, protocol: Protocol, which: Which, port: u16) -> Vec<u8> {
    let mut socket_id = if family == FAMILIES[0] {
        SocketId::new_v4()
    } else {
        SocketId::new_v6()
    };
    socket_id.source_port = port;
    let extensions = match which {
        Which::Waiting => ExtensionFlags::SKMEMINFO | ExtensionFlags::INFO,
        _ => ExtensionFlags::SKMEMINFO,
    };
    let (flags, states) = (NLM_F_REQUEST | NLM_F_DUMP, states(protocol, which));
    message(flags, family, protocol, extensions, states, socket_id)
}

fn message(
    flags: u16,
    family: u8,
    protocol: Protocol,
    extensions: ExtensionFlags,
    states: StateFlags,
    socket_id: SocketId,
) -> Vec<u8> {
    let number = match protocol {
        Protocol::Tcp => libc::IPPROTO_TCP,
        Protocol::Mptcp => libc::IPPROTO_MPTCP,
        Protocol::Udp => libc::IPPROTO_UDP,
    };
    let mut header = NetlinkHeader::default();
    header.flags = flags;
    header.sequence_number = 1;
    let mut message = NetlinkMessage::new(
        header,
        SockDiagMessage::InetRequest(InetRequest {
            family,
            protocol: u8::try_from(number).unwrap_or(u8::MAX),
            extensions,
            states,
            socket_id,
        })
        .into(),
    );
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    if protocol == Protocol::Mptcp {
        // 262 does not fit the header's byte: an attribute says it, which the library has no word for.
        bytes.extend(8_u16.to_ne_bytes());
        bytes.extend(INET_DIAG_REQ_PROTOCOL.to_ne_bytes());
        bytes.extend((number as u32).to_ne_bytes());
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        bytes[..4].copy_from_slice(&length.to_ne_bytes());
    }
    bytes
}

fn receive(netlink: &Netlink, found: &mut dyn FnMut(InetResponse)) -> io::Result<()> {
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
                NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(response)) => {
                    found(*response);
                }
                _ => {}
            }
            // Messages are aligned to 4; a last one need not be padded.
            let length = (message.header.length as usize).next_multiple_of(4).max(16);
            rest = rest.get(length..).unwrap_or_default();
        }
    }
}

/// That field of struct tcp_info (include/uapi/linux/tcp.h), whose first 104 bytes are the same since Linux 2.6.
fn last_data_sent(info: &[u8]) -> Option<u32> {
    const AT: usize = 44;
    let bytes = info.get(AT..AT + 4)?;
    Some(u32::from_ne_bytes(bytes.try_into().ok()?))
}

fn entry(protocol: Protocol, response: &InetResponse) -> Entry {
    let (header, id) = (&response.header, &response.header.socket_id);
    let memory = response.nlas.iter().find_map(|nla| match nla {
        Nla::MemInfo(memory) => Some(memory),
        _ => None,
    });
    let silent_ms = response.nlas.iter().find_map(|nla| match nla {
        Nla::TcpInfo(info) => last_data_sent(info),
        _ => None,
    });
    let cgroup = response.nlas.iter().find_map(|nla| match nla {
        Nla::Other(other) if other.kind() == INET_DIAG_CGROUP_ID => {
            let mut bytes = [0; 8];
            (other.value_len() == bytes.len()).then(|| other.emit_value(&mut bytes))?;
            Some(u64::from_ne_bytes(bytes))
        }
        _ => None,
    });
    Entry {
        silent_ms,
        cgroup,
        local: SocketAddr::new(id.source_address, id.source_port),
        peer: SocketAddr::new(id.destination_address, id.destination_port),
        interface: id.interface_id,
        state: header.state,
        socket: Socket {
            inode: header.inode.into(),
            cookie: u64::from_ne_bytes(id.cookie),
            protocol,
            uid: header.uid,
            queued: header.recv_queue,
            queue_limit: match protocol {
                Protocol::Udp => memory.map_or(0, |m| m.receive_queue_max),
                _ => header.send_queue,
            },
            drops: memory.map_or(0, |m| m.drops),
            receive_buffer_bytes: memory.map_or(0, |m| m.receive_queue_max),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream, UdpSocket};

    #[test]
    fn a_listener_is_seen_with_its_queue() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(address).expect("bind");
            let local = listener.local_addr().expect("address");
            let clients: Vec<_> = (0..3).map(|_| TcpStream::connect(local)).collect();
            let seen = sockets(Protocol::Tcp, Which::Listening, local.port()).expect("dump");
            let seen = seen
                .iter()
                .find(|e| e.local == local)
                .expect("the listener");
            assert_eq!(seen.socket.queued, 3);
            assert_eq!(
                seen.socket.cookie,
                crate::socket::cookie(&listener).expect("cookie")
            );
            assert_eq!(
                seen.socket.inode,
                rustix::fs::fstat(&listener).expect("stat").st_ino
            );
            let look = QueueLook::at(local, 0, seen.socket.cookie).expect("netlink");
            let limit = seen.socket.queue_limit;
            assert_eq!(look.look().expect("an answer"), Some((3, limit)));
            let another = QueueLook::at(local, 0, seen.socket.cookie + 1).expect("netlink");
            assert_eq!(another.look().expect("an answer"), None);
            let open = sockets_at(Protocol::Tcp, Which::Open, local).expect("dump");
            assert_eq!(open.iter().filter(|e| e.local == local).count(), 3);
            drop(clients);
        }
    }

    #[test]
    fn how_long_connections_wait_is_known_until_they_are_accepted() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let local = listener.local_addr().expect("address");
        let begun = std::time::Instant::now();
        let _first = TcpStream::connect(local).expect("connects");
        std::thread::sleep(std::time::Duration::from_millis(100));
        let mut second = TcpStream::connect(local).expect("connects");
        // Data that it receives does not make it younger.
        std::io::Write::write_all(&mut second, b"GET").expect("sends");
        std::thread::sleep(std::time::Duration::from_millis(30));
        let mut waits = waits_at(local).expect("dump");
        waits.sort_unstable();
        let at_most = begun.elapsed().as_micros() as u64 + 10_000;
        assert_eq!(waits.len(), 2, "{waits:?}");
        assert!(waits[0] >= 20_000, "{waits:?}");
        assert!((120_000..=at_most).contains(&waits[1]), "{waits:?}");
        let _accepted = listener.accept().expect("accepts");
        assert_eq!(waits_at(local).expect("dump").len(), 1);
    }

    #[test]
    fn a_udp_socket_is_seen_and_a_connected_one_is_not() {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("bind");
        let local = socket.local_addr().expect("address");
        let other = UdpSocket::bind("127.0.0.1:0").expect("bind");
        other.connect(local).expect("connect");
        let seen = sockets(Protocol::Udp, Which::Listening, 0).expect("dump");
        assert!(seen.iter().any(|e| e.local == local));
        let other = other.local_addr().expect("address");
        assert!(seen.iter().all(|e| e.local != other));
    }

    #[test]
    fn an_mptcp_listener_is_told_apart() {
        use rustix::net;
        let Ok(socket) = net::socket(
            net::AddressFamily::INET,
            net::SocketType::STREAM,
            std::num::NonZeroU32::new(262).map(net::Protocol::from_raw),
        ) else {
            return eprintln!("skipped: this kernel has no MPTCP");
        };
        let any: SocketAddr = "127.0.0.1:0".parse().expect("address");
        net::bind(&socket, &any).expect("bind");
        net::listen(&socket, 7).expect("listen");
        let inode = rustix::fs::fstat(&socket).expect("stat").st_ino;
        let seen = sockets(Protocol::Mptcp, Which::Listening, 0).expect("dump");
        assert!(seen.iter().any(|e| e.socket.inode == inode), "{seen:?}");
    }
}
