//! Queries and settings of listening sockets, for the agent.

pub mod arming;
pub mod batch;
pub mod capture;
pub mod clone_socket;
pub mod diag;
pub mod entries;
pub mod inherited;
pub mod moving;
mod netlink;
pub mod private;
pub mod queue_look;
pub mod receive_queue;
pub mod reopening;
pub mod unix_diag;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::libc;
use rustix::net::RecvFlags;

/// An accept queue, from the listener's `TCP_INFO` (net/ipv4/tcp.c, `tcp_get_info` for `TCP_LISTEN`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AcceptQueue {
    /// Connections that wait.
    pub length: u32,
    /// The backlog. The kernel admits one more.
    pub limit: u32,
}

/// The inode of a descriptor, which identifies a socket as long as it lives.
///
/// # Errors
/// fstat(2) fails.
pub fn inode_of(fd: impl AsFd) -> io::Result<u64> {
    Ok(rustix::fs::fstat(fd)?.st_ino)
}

pub(crate) fn get<T: Default>(fd: BorrowedFd<'_>, level: i32, name: i32) -> io::Result<T> {
    let mut value = T::default();
    let mut size = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` is `size` bytes of plain integers that the kernel may fill, wholly or in part.
    let done = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            level,
            name,
            (&raw mut value).cast(),
            &mut size,
        )
    };
    if done == 0 {
        Ok(value)
    } else {
        Err(io::Error::last_os_error())
    }
}

fn set<T>(fd: BorrowedFd<'_>, level: i32, name: i32, value: &T) -> io::Result<()> {
    let size = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` is `size` readable bytes; the kernel copies them.
    let done = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            name,
            std::ptr::from_ref(value).cast(),
            size,
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Gives a UDP socket several receive queues: how many, and flags. Only the kernel of the papers has this
/// (`kernel/0003-udp-several-receive-queues.patch`).
///
/// # Errors
/// `ENOPROTOOPT` on any other kernel; `EBUSY` for a socket that has a port.
pub fn set_udp_queues(socket: impl AsFd, queues: i32) -> io::Result<()> {
    const UDP_QUEUES: i32 = 120;
    set(socket.as_fd(), libc::SOL_UDP, UDP_QUEUES, &queues)
}

/// The head of `struct tcp_info`: a listener answers no more than this holds.
#[derive(Default)]
#[repr(C)]
struct TcpInfoHead {
    bytes: [u8; 8],
    rto_to_rcv_mss: [u32; 4],
    unacked: u32,
    sacked: u32,
}

/// Length and limit of a listener's accept queue; 0 and 0 for a socket that does not listen.
///
/// # Errors
/// The error of getsockopt.
pub fn accept_queue(listener: impl AsFd) -> io::Result<AcceptQueue> {
    const LISTEN: u8 = 10;
    let info: TcpInfoHead = get(listener.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO)?;
    if info.bytes[0] != LISTEN {
        return Ok(AcceptQueue::default());
    }
    Ok(AcceptQueue {
        length: info.unacked,
        limit: info.sacked,
    })
}

/// Whether a TCP socket listens.
pub fn listens(socket: impl AsFd) -> bool {
    rustix::net::sockopt::socket_acceptconn(socket).unwrap_or(false)
}

/// Whether accept on a listener waits for a connection: O_NONBLOCK is not set. All processes that have the listener share
/// this flag.
pub fn is_blocking(listener: impl AsFd) -> bool {
    rustix::fs::fcntl_getfl(listener)
        .is_ok_and(|flags| !flags.contains(rustix::fs::OFlags::NONBLOCK))
}

/// Whether the kernel holds a listener's connections back until their first data comes (TCP_DEFER_ACCEPT).
pub fn defers(listener: impl AsFd) -> bool {
    let seconds: io::Result<i32> = get(listener.as_fd(), libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT);
    seconds.is_ok_and(|seconds| seconds > 0)
}

/// A socket's cookie, unique on this machine since boot.
///
/// # Errors
/// The error of getsockopt.
pub fn cookie(socket: impl AsFd) -> io::Result<u64> {
    get(socket.as_fd(), libc::SOL_SOCKET, libc::SO_COOKIE)
}

/// Attaches a loaded program to the whole reuseport group of this member.
///
/// # Errors
/// `EINVAL` where the socket has no group yet, `EOPNOTSUPP` for MPTCP.
pub fn attach_reuseport(member: impl AsFd, program: BorrowedFd<'_>) -> io::Result<()> {
    set(
        member.as_fd(),
        libc::SOL_SOCKET,
        libc::SO_ATTACH_REUSEPORT_EBPF,
        &program.as_raw_fd(),
    )
}

/// Detaches whatever program the group of this member has.
///
/// # Errors
/// `ENOENT` where there is none.
pub fn detach_reuseport(member: impl AsFd) -> io::Result<()> {
    const SO_DETACH_REUSEPORT_BPF: i32 = 68;
    set(
        member.as_fd(),
        libc::SOL_SOCKET,
        SO_DETACH_REUSEPORT_BPF,
        &0_i32,
    )
}

/// The ways to choose a socket that a classic program has; it needs no privilege.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClassicChoice {
    /// A random member.
    Random,
    /// The CPU that got the packet.
    Cpu,
}

/// Attaches a classic BPF program that picks one of `members` sockets, by their order in the group.
///
/// # Errors
/// The error of setsockopt.
pub fn attach_classic(member: impl AsFd, choice: ClassicChoice, members: u32) -> io::Result<()> {
    // include/uapi/linux/filter.h: SKF_AD_OFF + SKF_AD_RANDOM / SKF_AD_CPU
    let ancillary = match choice {
        ClassicChoice::Random => 56,
        ClassicChoice::Cpu => 36,
    };
    let ancillary = u32::from_ne_bytes((-0x1000_i32 + ancillary).to_ne_bytes());
    let op = |code: u32, k: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    };
    let mut filter = [
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, ancillary),
        op(libc::BPF_ALU | libc::BPF_MOD | libc::BPF_K, members.max(1)),
        op(libc::BPF_RET | libc::BPF_A, 0),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    set(
        member.as_fd(),
        libc::SOL_SOCKET,
        libc::SO_ATTACH_REUSEPORT_CBPF,
        &program,
    )
}

/// Has a listener drop every new SYN without an answer, so that the client tries again; everything else passes. Its
/// connections inherit the filter, and see no SYN.
///
/// # Errors
/// The error of setsockopt: `EPERM` for a socket whose filter is locked, and without CAP_NET_ADMIN on kernels that ask
/// for it (seen on 6.18).
pub fn drop_syns(listener: impl AsFd) -> io::Result<()> {
    const FLAGS: u32 = 13; // of the TCP header, which is where the packet starts for a TCP socket's filter
    const SYN: u32 = 0x02;
    const ACK: u32 = 0x10;
    let op = |code: u32, k: u32, jf: u8| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf,
        k,
    };
    let mut filter = [
        op(libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, FLAGS, 0),
        op(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, SYN | ACK, 0),
        op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, SYN, 1),
        op(libc::BPF_RET | libc::BPF_K, 0, 0),
        op(libc::BPF_RET | libc::BPF_K, u32::MAX, 0),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    set(
        listener.as_fd(),
        libc::SOL_SOCKET,
        libc::SO_ATTACH_FILTER,
        &program,
    )
}

/// Takes the filter of [`drop_syns`] away.
///
/// # Errors
/// `ENOENT` where there is none.
pub fn admit_syns(listener: impl AsFd) -> io::Result<()> {
    set(
        listener.as_fd(),
        libc::SOL_SOCKET,
        libc::SO_DETACH_FILTER,
        &0_i32,
    )
}

/// Whether a socket speaks MPTCP, or did before it fell back to TCP.
pub fn is_mptcp(socket: impl AsFd) -> bool {
    get::<i32>(socket.as_fd(), libc::SOL_SOCKET, libc::SO_PROTOCOL)
        .is_ok_and(|protocol| protocol == libc::IPPROTO_MPTCP)
}

/// Where a TCP socket is bound.
///
/// # Errors
/// It has no address of the Internet's.
pub fn address_of(socket: impl AsFd) -> io::Result<SocketAddr> {
    let address = rustix::net::getsockname(socket)?;
    SocketAddr::try_from(address).map_err(|_| io::ErrorKind::AddrNotAvailable.into())
}

/// Undoes what shutdown(2) left on a socket that does not listen. A second one is kept (`inet_shutdown`, TCP_CLOSE), and all
/// connections of the listener would inherit it, so that each ends at once.
///
/// # Errors
/// The error of connect(2) to no address, which has the kernel forget it (`tcp_disconnect`).
pub fn forget_shutdown(socket: impl AsFd) -> io::Result<()> {
    Ok(rustix::net::connect_unspec(socket)?)
}

/// Has a socket that was shut down listen again at its old address.
///
/// # Errors
/// The error of listen, or it listens elsewhere now.
pub fn listen_again(socket: impl AsFd, address: SocketAddr, backlog: i32) -> io::Result<()> {
    // A port that was not asked for by number was given up (`tcp_set_state`, unless SOCK_BINDPORT_LOCK), though
    // getsockname still tells it. Every other socket is bound still, and refuses: EINVAL.
    let _ = rustix::net::bind(&socket, &address);
    let _ = forget_shutdown(&socket);
    rustix::net::listen(&socket, backlog)?;
    let now = address_of(&socket)?;
    if now.port() == address.port() {
        Ok(())
    } else {
        Err(io::Error::other(format!(
            "the listener of {address} is at port {} now, since its port was taken; restart its worker",
            now.port()
        )))
    }
}

/// Wakes the sleepers of a listener and changes nothing else. Kernels before mid-2026 do not wake the sleepers of a
/// queue that a migrated connection joins. `SHUT_WR` on a listener only calls `sk_state_change`.
pub fn wake_waiters(listener: impl AsFd) {
    let _ = rustix::net::shutdown(&listener, rustix::net::Shutdown::Write);
}

/// Whether it is a UDP socket.
pub fn is_udp(socket: impl AsFd) -> bool {
    let of = |name| get::<i32>(socket.as_fd(), libc::SOL_SOCKET, name).unwrap_or(-1);
    of(libc::SO_TYPE) == libc::SOCK_DGRAM && of(libc::SO_PROTOCOL) == libc::IPPROTO_UDP
}

/// Where a socket is bound; `None` where that is no IP address.
pub fn address(socket: impl AsFd) -> Option<SocketAddr> {
    SocketAddr::try_from(rustix::net::getsockname(socket).ok()?).ok()
}

/// Whether an IPv6 socket takes IPv4 connections too.
pub fn is_dual_stack(socket: impl AsFd) -> bool {
    let socket = socket.as_fd();
    get::<i32>(socket, libc::SOL_SOCKET, libc::SO_DOMAIN)
        .is_ok_and(|domain| domain == libc::AF_INET6)
        && get::<i32>(socket, libc::SOL_IPV6, libc::IPV6_V6ONLY).is_ok_and(|only| only == 0)
}

/// Whether anything is to be read, or the other end is gone: for a connection between two polls.
pub fn is_over(connection: impl AsFd) -> bool {
    let mut byte = [0_u8; 1];
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    matches!(
        rustix::net::recv(connection, &mut byte[..], flags),
        Ok((0, _))
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn the_queue_grows_with_each_connection_that_waits() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = listener.local_addr().expect("address");
        let before = accept_queue(&listener).expect("queue");
        assert_eq!(before.length, 0);
        assert!(before.limit > 0);
        let clients: Vec<_> = (0..3)
            .map(|_| TcpStream::connect(address).expect("connect"))
            .collect();
        assert_eq!(accept_queue(&listener).expect("queue").length, 3);
        drop(listener.accept().expect("accept"));
        assert_eq!(accept_queue(&listener).expect("queue").length, 2);
        // A connection is no listener and has no accept queue.
        assert_eq!(
            accept_queue(&clients[0]).expect("queue"),
            AcceptQueue::default()
        );
    }

    #[test]
    fn a_listener_that_was_shut_down_twice_has_whole_connections_again() {
        use std::io::{Read, Write};
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = listener.local_addr().expect("address");
        for times in [1, 2] {
            for _ in 0..times {
                let _ = rustix::net::shutdown(&listener, rustix::net::Shutdown::Both);
            }
            listen_again(&listener, address, 8).expect("listen");
            let mut client = TcpStream::connect(address).expect("connect");
            client.write_all(b"hi").expect("write");
            let mut word = [0; 2];
            let (mut served, _) = listener.accept().expect("accept");
            served.read_exact(&mut word).expect("read");
            assert_eq!(&word, b"hi", "{times}");
        }
    }

    #[test]
    fn cookies_tell_sockets_apart() {
        let a = TcpListener::bind("127.0.0.1:0").expect("bind");
        let b = TcpListener::bind("127.0.0.1:0").expect("bind");
        let again = a.try_clone().expect("dup");
        assert_eq!(cookie(&a).expect("cookie"), cookie(&again).expect("cookie"));
        assert_ne!(cookie(&a).expect("cookie"), cookie(&b).expect("cookie"));
    }
}
