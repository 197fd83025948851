//! Sockets as `sock_diag` shows them (net/ipv4/inet_diag.c): all of a network namespace, without touching any.
//!
//! One dump of the listeners costs some 30 µs, against milliseconds for /proc/net/tcp; nothing is duplicated and no
//! privilege is needed. MPTCP listeners show only when asked for by a request attribute.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet, hash_map};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_core::{DefaultNla, Emitable as _, Nla as _, NlaBuffer, NlasIterator};
use netlink_packet_core::{NLA_TYPE_MASK, NLM_F_DUMP, NLM_F_REQUEST};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_packet_sock_diag::inet::nlas::Nla;
use netlink_packet_sock_diag::inet::{
    ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags,
};
use nix::libc;
use wakeone_model::address::Address;
use wakeone_model::listener::{Protocol, Socket};

use super::netlink::{connected, encoded, receive};
use super::unix_diag;
use netlink_sys::Socket as Netlink;

/// The sockets to dump.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// Sockets that listen (TCP, MPTCP), or are bound and not connected (UDP).
    Listening,
    /// Connections that may still concern a server: every state but LISTEN, SYN_RECV, TIME_WAIT and CLOSE.
    Open,
    /// Connections that may wait in an accept queue, with TFO before their handshake has ended. Those without an inode
    /// do wait, and the others may have data that nobody has read.
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
    /// Time since data came last, in ms. Known of [`Which::Waiting`] only.
    pub came_ms: Option<u32>,
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

/// The listening sockets of this thread's network namespace at one moment, for many who ask for some of them: a walk through the
/// kernel's table takes about as long for one as for all. The kernel is asked when they first are needed.
#[derive(Debug)]
pub struct Listening {
    port: u16,
    known: RefCell<HashMap<(Protocol, u8), Vec<Entry>>>,
}

impl Listening {
    /// Those at a port; 0: at any.
    pub fn at(port: u16) -> Self {
        Self {
            port,
            known: RefCell::default(),
        }
    }

    /// How many there are at a port, which is one of those that it has.
    ///
    /// # Errors
    /// As [`sockets`].
    pub fn count(&self, protocol: Protocol, port: u16) -> io::Result<usize> {
        let at_port = |family| self.of_family(protocol, family, port);
        let counts = FAMILIES.map(|family| at_port(family).map(|found| found.len()));
        let [four, six] = counts;
        Ok(four? + six?)
    }

    /// As [`sockets_at`] gives listeners.
    ///
    /// # Errors
    /// As [`sockets`].
    pub fn listeners_at(&self, protocol: Protocol, listener: SocketAddr) -> io::Result<Vec<Entry>> {
        let family = FAMILIES[usize::from(listener.is_ipv6())];
        self.of_family(protocol, family, listener.port())
    }

    fn of_family(&self, protocol: Protocol, family: u8, port: u16) -> io::Result<Vec<Entry>> {
        let mut known = self.known.borrow_mut();
        let all = match known.entry((protocol, family)) {
            hash_map::Entry::Occupied(all) => all.into_mut(),
            hash_map::Entry::Vacant(none) => {
                none.insert(dump(&[family], protocol, Which::Listening, self.port)?)
            }
        };
        let here = all.iter().filter(|one| one.local.port() == port);
        Ok(here.cloned().collect())
    }
}

/// The connections that came in by a listener's address and were accepted, by their inodes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Accepted {
    /// Those whose clients may still send a request.
    pub lasting: HashSet<u64>,
    /// Those that a side has closed. Of UNIX sockets that is not known, and all count as lasting.
    pub ended: HashSet<u64>,
}

impl Accepted {
    /// Adds those of another listener, or those that were found later. A connection that has ended in either counts as ended.
    pub fn extend(&mut self, more: Self) {
        self.lasting.extend(more.lasting);
        self.ended.extend(more.ended);
        self.lasting.retain(|one| !self.ended.contains(one));
    }

    /// All of them.
    pub fn all(mut self) -> HashSet<u64> {
        self.lasting.extend(self.ended);
        self.lasting
    }
}

/// Returns the connections that came in by a listener's address, and were accepted.
///
/// # Errors
/// As [`sockets`].
pub fn accepted_at(protocol: Protocol, listener: Address) -> io::Result<Accepted> {
    let mut found = Accepted::default();
    let listener = match listener {
        Address::Inet(listener) => listener,
        Address::Unix(name) => {
            found.lasting = unix_diag::accepted_at(name)?;
            return Ok(found);
        }
    };
    let any = listener.ip().is_unspecified();
    for one in sockets_at(protocol, Which::Open, listener)? {
        if one.socket.inode == 0 || !any && one.local.ip() != listener.ip() {
            continue;
        }
        let which = match one.is_established() {
            true => &mut found.lasting,
            false => &mut found.ended,
        };
        which.insert(one.socket.inode);
    }
    Ok(found)
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

/// Returns the accepted connections of a listener's address whose data nobody has read, by inode. With each, how long the
/// newest of it has been there, in µs, as exact as the kernel's tick.
///
/// # Errors
/// As [`sockets`].
pub fn unread_at(listener: SocketAddr) -> io::Result<Vec<(u64, u64)>> {
    let any = listener.ip().is_unspecified();
    let open = sockets_at(Protocol::Tcp, Which::Waiting, listener)?;
    Ok(open
        .iter()
        .filter(|one| one.socket.inode != 0 && one.is_established() && one.socket.queued > 0)
        .filter(|one| any || one.local.ip() == listener.ip())
        .filter_map(|one| Some((one.socket.inode, u64::from(one.came_ms?) * 1000)))
        .collect())
}

/// The request for one listener.
pub(super) fn exact(listener: SocketAddr, interface: u32, cookie: u64) -> Vec<u8> {
    let mut id = match listener {
        SocketAddr::V4(_) => SocketId::new_v4(),
        SocketAddr::V6(_) => SocketId::new_v6(),
    };
    id.source_address = listener.ip();
    id.source_port = listener.port();
    id.interface_id = interface;
    id.cookie = cookie.to_ne_bytes();
    let family = FAMILIES[usize::from(listener.is_ipv6())];
    let states = states(Protocol::Tcp, Which::Listening);
    let extensions = ExtensionFlags::empty();
    message(NLM_F_REQUEST, family, Protocol::Tcp, extensions, states, id)
}

/// include/net/tcp_states.h
const STATE_ESTABLISHED: u8 = 1;
const STATE_SYN_RECV: u8 = 3;

fn dump(families: &[u8], protocol: Protocol, which: Which, port: u16) -> io::Result<Vec<Entry>> {
    let netlink = connected()?;
    let mut found = Vec::new();
    for family in families {
        let request = request(*family, protocol, which, port);
        ask(&netlink, &request, &mut |response| {
            let entry = entry(protocol, response);
            // The kernel filters by port for TCP and by the whole id for UDP: not all versions alike.
            let wanted = port == 0 || entry.local.port() == port;
            if wanted && (which != Which::Listening || entry.peer.port() == 0) {
                found.push(entry);
            }
        })?;
    }
    Ok(found)
}

/// Sends a request, and hands over each socket of the answer.
fn ask(netlink: &Netlink, request: &[u8], found: &mut dyn FnMut(&InetResponse)) -> io::Result<()> {
    netlink.send(request, 0)?;
    receive(netlink, &mut |message| {
        if let SockDiagMessage::InetResponse(response) = message {
            found(&response);
        }
    })
}

/// Hands over each TCP connection of this thread's network namespace with this local port (0: any), and the value that
/// a map of the type `SK_STORAGE` has for it.
///
/// The kernel holds a reference of the socket while it reads the value (`bpf_sk_storage_diag_put`,
/// net/core/bpf_sk_storage.c). An iterator over such a map holds none, and since Linux 7.0 it reads through a null pointer
/// where a socket is freed meanwhile.
///
/// # Errors
/// Without CAP_BPF, and those of [`sockets`].
pub fn connections_with(
    storage: BorrowedFd<'_>,
    port: u16,
    found: &mut dyn FnMut(Entry, Option<&[u8]>),
) -> io::Result<()> {
    let netlink = connected()?;
    for family in FAMILIES {
        // With TFO a connection is there before its handshake has ended.
        let states = states(Protocol::Tcp, Which::Open) | StateFlags::SYN_RECV;
        let none = ExtensionFlags::empty();
        let mut request = all_at(family, Protocol::Tcp, none, states, port);
        let map = storage.as_raw_fd().to_ne_bytes();
        let nested = attribute(SK_DIAG_BPF_STORAGE_REQ_MAP_FD, &map);
        append(&mut request, INET_DIAG_REQ_SK_BPF_STORAGES, &nested);
        ask(&netlink, &request, &mut |response| {
            let stored = other(response, INET_DIAG_SK_BPF_STORAGES);
            let value = stored.and_then(|stored| value_of_one_map(&stored));
            found(entry(Protocol::Tcp, response), value.as_deref());
        })?;
    }
    Ok(())
}

/// The value in an answer that tells those of one map.
fn value_of_one_map(nested: &[u8]) -> Option<Vec<u8>> {
    let map = NlaBuffer::new_checked(nested).ok()?;
    let mut told = NlasIterator::new(map.value()).flatten();
    let value = told.find(|one| one.kind() == SK_DIAG_BPF_STORAGE_MAP_VALUE)?;
    Some(value.value().to_vec())
}

fn states(protocol: Protocol, which: Which) -> StateFlags {
    match (which, protocol) {
        (Which::Listening, Protocol::Tcp | Protocol::Mptcp | Protocol::Unix) => StateFlags::LISTEN,
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
const INET_DIAG_REQ_SK_BPF_STORAGES: u16 = 2;
const INET_DIAG_REQ_PROTOCOL: u16 = 3;
const INET_DIAG_SK_BPF_STORAGES: u16 = 20;
const INET_DIAG_CGROUP_ID: u16 = 21;

/// include/uapi/linux/sock_diag.h
const SK_DIAG_BPF_STORAGE_REQ_MAP_FD: u16 = 1;
const SK_DIAG_BPF_STORAGE_MAP_VALUE: u16 = 3;

fn request(family: u8, protocol: Protocol, which: Which, port: u16) -> Vec<u8> {
    let extensions = match which {
        Which::Waiting => ExtensionFlags::SKMEMINFO | ExtensionFlags::INFO,
        _ => ExtensionFlags::SKMEMINFO,
    };
    all_at(family, protocol, extensions, states(protocol, which), port)
}

/// The request for all sockets with this local port.
fn all_at(
    family: u8,
    protocol: Protocol,
    extensions: ExtensionFlags,
    states: StateFlags,
    port: u16,
) -> Vec<u8> {
    let mut id = match family == FAMILIES[0] {
        true => SocketId::new_v4(),
        false => SocketId::new_v6(),
    };
    id.source_port = port;
    let flags = NLM_F_REQUEST | NLM_F_DUMP;
    message(flags, family, protocol, extensions, states, id)
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
        // Those are asked for by another request.
        Protocol::Unix => 0,
    };
    let request = InetRequest {
        family,
        protocol: u8::try_from(number).unwrap_or(u8::MAX),
        extensions,
        states,
        socket_id,
    };
    let mut bytes = encoded(flags, SockDiagMessage::InetRequest(request));
    if protocol == Protocol::Mptcp {
        // 262 does not fit the header's byte: an attribute says it.
        append(&mut bytes, INET_DIAG_REQ_PROTOCOL, &number.to_ne_bytes());
    }
    bytes
}

/// Appends an attribute to a request: the library has no word for those.
fn append(request: &mut Vec<u8>, kind: u16, value: &[u8]) {
    request.extend(attribute(kind, value));
    let length = u32::try_from(request.len()).unwrap_or(u32::MAX);
    request[..4].copy_from_slice(&length.to_ne_bytes());
}

/// An attribute whose value needs no padding.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let attribute = DefaultNla::new(kind, value.to_vec());
    let mut bytes = vec![0; attribute.buffer_len()];
    attribute.emit(&mut bytes);
    bytes
}

/// A field of struct tcp_info (include/uapi/linux/tcp.h), whose first 104 bytes are the same since Linux 2.6.
fn field(info: &[u8], at: usize) -> Option<u32> {
    let bytes = info.get(at..at + 4)?;
    Some(u32::from_ne_bytes(bytes.try_into().ok()?))
}

/// The value of an attribute for which the library has no word.
fn other(response: &InetResponse, kind: u16) -> Option<Vec<u8>> {
    response.nlas.iter().find_map(|nla| match nla {
        Nla::Other(other) if other.kind() & NLA_TYPE_MASK == kind => {
            let mut bytes = vec![0; other.value_len()];
            other.emit_value(&mut bytes);
            Some(bytes)
        }
        _ => None,
    })
}

/// The places of tcpi_last_data_sent and tcpi_last_data_recv.
const LAST_DATA_SENT: usize = 44;
const LAST_DATA_RECEIVED: usize = 52;

/// A socket of an answer.
pub(super) fn entry(protocol: Protocol, response: &InetResponse) -> Entry {
    let (header, id) = (&response.header, &response.header.socket_id);
    let memory = response.nlas.iter().find_map(|nla| match nla {
        Nla::MemInfo(memory) => Some(memory),
        _ => None,
    });
    let info = |at| {
        response.nlas.iter().find_map(|nla| match nla {
            Nla::TcpInfo(info) => field(info, at),
            _ => None,
        })
    };
    let cgroup = other(response, INET_DIAG_CGROUP_ID);
    let cgroup = cgroup.and_then(|bytes| Some(u64::from_ne_bytes(bytes.try_into().ok()?)));
    Entry {
        silent_ms: info(LAST_DATA_SENT),
        came_ms: info(LAST_DATA_RECEIVED),
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
    use crate::socket::queue_look::QueueLook;
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
            let (inode, cookie) = (seen.socket.inode, seen.socket.cookie);
            let look = QueueLook::at(local.into(), 0, inode, cookie).expect("netlink");
            let limit = seen.socket.queue_limit;
            assert_eq!(look.look().expect("an answer"), Some((3, limit)));
            let another = QueueLook::at(local.into(), 0, inode, cookie + 1).expect("netlink");
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
    fn how_long_data_is_unread_is_known_until_it_is_read() {
        use std::io::{Read as _, Write as _};
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let local = listener.local_addr().expect("address");
        let mut client = TcpStream::connect(local).expect("connects");
        client.write_all(b"GET").expect("sends");
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert_eq!(unread_at(local).expect("dump"), [], "it was not accepted");
        let (mut accepted, _) = listener.accept().expect("accepts");
        let unread = unread_at(local).expect("dump");
        let inode = rustix::fs::fstat(&accepted).expect("stat").st_ino;
        assert!(
            matches!(unread[..], [(of, us)] if of == inode && (40_000..10_000_000).contains(&us)),
            "{unread:?}"
        );
        accepted.read_exact(&mut [0; 3]).expect("reads");
        assert_eq!(unread_at(local).expect("dump"), []);
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
