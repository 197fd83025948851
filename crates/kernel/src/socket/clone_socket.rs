//! Makes a second UDP socket beside another. It is bound to the same address, with the same options and the same user,
//! so that the kernel puts both into one reuseport group.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::libc;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::capability::{self, Capability};
use crate::netns;
use crate::socket::{address, is_udp};

/// Options that a new socket of the same address must have before it is bound, and those by which it receives.
const OPTIONS: [(i32, i32, &str); 39] = [
    (libc::SOL_IPV6, libc::IPV6_V6ONLY, "IPV6_V6ONLY"),
    (libc::SOL_SOCKET, libc::SO_REUSEADDR, "SO_REUSEADDR"),
    (libc::SOL_SOCKET, libc::SO_REUSEPORT, "SO_REUSEPORT"),
    (libc::SOL_IP, libc::IP_FREEBIND, "IP_FREEBIND"),
    (libc::SOL_IP, libc::IP_TRANSPARENT, "IP_TRANSPARENT"),
    (libc::SOL_SOCKET, libc::SO_BINDTODEVICE, "SO_BINDTODEVICE"),
    (libc::SOL_SOCKET, libc::SO_MARK, "SO_MARK"),
    (libc::SOL_SOCKET, libc::SO_PRIORITY, "SO_PRIORITY"),
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE, "SO_KEEPALIVE"),
    (libc::SOL_SOCKET, libc::SO_LINGER, "SO_LINGER"),
    (libc::SOL_SOCKET, libc::SO_OOBINLINE, "SO_OOBINLINE"),
    (libc::SOL_SOCKET, libc::SO_RCVLOWAT, "SO_RCVLOWAT"),
    (libc::SOL_SOCKET, libc::SO_RCVTIMEO, "SO_RCVTIMEO"),
    (libc::SOL_SOCKET, libc::SO_SNDTIMEO, "SO_SNDTIMEO"),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMP, "SO_TIMESTAMP"),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, "SO_TIMESTAMPNS"),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMPING, "SO_TIMESTAMPING"),
    (libc::SOL_SOCKET, libc::SO_BUSY_POLL, "SO_BUSY_POLL"),
    (libc::SOL_SOCKET, libc::SO_INCOMING_CPU, "SO_INCOMING_CPU"),
    (libc::SOL_SOCKET, libc::SO_ZEROCOPY, "SO_ZEROCOPY"),
    (libc::SOL_SOCKET, libc::SO_DONTROUTE, "SO_DONTROUTE"),
    (libc::SOL_IP, libc::IP_TOS, "IP_TOS"),
    (libc::SOL_IP, libc::IP_TTL, "IP_TTL"),
    (libc::SOL_IP, libc::IP_MTU_DISCOVER, "IP_MTU_DISCOVER"),
    (libc::SOL_IP, libc::IP_RECVERR, "IP_RECVERR"),
    (libc::SOL_IP, libc::IP_PKTINFO, "IP_PKTINFO"),
    (libc::SOL_IP, libc::IP_MINTTL, "IP_MINTTL"),
    (libc::SOL_IPV6, libc::IPV6_TCLASS, "IPV6_TCLASS"),
    (libc::SOL_IPV6, libc::IPV6_UNICAST_HOPS, "IPV6_UNICAST_HOPS"),
    (libc::SOL_IPV6, libc::IPV6_MTU_DISCOVER, "IPV6_MTU_DISCOVER"),
    (libc::SOL_IPV6, libc::IPV6_RECVERR, "IPV6_RECVERR"),
    (libc::SOL_IPV6, libc::IPV6_RECVPKTINFO, "IPV6_RECVPKTINFO"),
    (libc::SOL_SOCKET, libc::SO_RXQ_OVFL, "SO_RXQ_OVFL"),
    (libc::SOL_IP, libc::IP_RECVTOS, "IP_RECVTOS"),
    (libc::SOL_IP, libc::IP_RECVTTL, "IP_RECVTTL"),
    (libc::SOL_IP, libc::IP_RECVORIGDSTADDR, "IP_RECVORIGDSTADDR"),
    (libc::SOL_IPV6, libc::IPV6_RECVHOPLIMIT, "IPV6_RECVHOPLIMIT"),
    (libc::SOL_IPV6, libc::IPV6_RECVTCLASS, "IPV6_RECVTCLASS"),
    (libc::SOL_UDP, libc::UDP_GRO, "UDP_GRO"),
];

/// include/uapi/asm-generic/socket.h: which buffer sizes a program has set itself.
const SO_BUF_LOCK: i32 = 72;
/// The largest option value that is copied.
const MOST_BYTES: usize = 64;

/// Why a socket cannot have a sibling.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// One of its options cannot be set on another socket.
    #[error("its option {0} cannot be copied: {1}")]
    Option(&'static str, io::Error),
    /// It has a socket filter that only its maker can read.
    #[error("it has a socket filter that cannot be read")]
    Filter,
    /// It was made in another network namespace, where its maker may be privileged.
    #[error("it is of another network namespace")]
    Elsewhere,
    /// Anything else.
    #[error("{0}: {1}")]
    Step(&'static str, io::Error),
}

fn get(fd: BorrowedFd<'_>, level: i32, name: i32) -> io::Result<Vec<u8>> {
    let mut value = vec![0_u8; MOST_BYTES];
    let mut size = MOST_BYTES as libc::socklen_t;
    // SAFETY: `value` has `size` bytes, and the kernel writes no more than that.
    let done = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            level,
            name,
            value.as_mut_ptr().cast(),
            &mut size,
        )
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    value.truncate(size as usize);
    Ok(value)
}

fn set(fd: BorrowedFd<'_>, level: i32, name: i32, value: &[u8]) -> io::Result<()> {
    // SAFETY: `value` is that many readable bytes, which the kernel copies.
    let done = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            name,
            value.as_ptr().cast(),
            value.len() as libc::socklen_t,
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn number(fd: BorrowedFd<'_>, level: i32, name: i32) -> io::Result<i32> {
    let value = get(fd, level, name)?;
    let bytes = value.get(..4).and_then(|bytes| bytes.try_into().ok());
    bytes
        .map(i32::from_ne_bytes)
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// The kernel allows privileged options of a socket to a process with one of these (`sockopt_ns_capable`,
/// net/core/sock.c).
const FOR_OPTIONS: [Capability; 2] = [Capability::CAP_NET_ADMIN, Capability::CAP_NET_RAW];

/// Makes a socket like this one and binds it to the same address. `asker` is the process that it is for: options are
/// copied only as far as that process could set them itself.
fn clone_socket(like: BorrowedFd<'_>, asker: u32) -> Result<OwnedFd, Error> {
    // The address and options of a socket from elsewhere mean nothing in this namespace, and nobody here allowed them.
    if !netns::has(like)
        .map_err(|source| Error::Step("asking for its network namespace", source))?
    {
        return Err(Error::Elsewhere);
    }
    let step = |what| move |source: rustix::io::Errno| Error::Step(what, source.into());
    let of = |name| number(like, libc::SOL_SOCKET, name);
    let domain =
        of(libc::SO_DOMAIN).map_err(|source| Error::Step("asking for its family", source))?;
    let kind = of(libc::SO_TYPE).map_err(|source| Error::Step("asking for its type", source))?;
    let family = AddressFamily::from_raw(domain as u16);
    let socket = rustix::net::socket_with(
        family,
        SocketType::from_raw(kind as u32),
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(step("making a socket"))?;
    capability::without(
        &crate::proc::process::lacking_of(asker, &FOR_OPTIONS),
        || {
            copy_options(like, socket.as_fd())?;
            copy_buffers(like, socket.as_fd())
        },
    )?;
    copy_filter(like, socket.as_fd())?;
    copy_owner(like, socket.as_fd())?;
    let address = rustix::net::getsockname(like).map_err(step("asking for its address"))?;
    rustix::net::bind(&socket, &address).map_err(step("binding to its address"))?;
    Ok(socket)
}

/// Sets every option that differs from a new socket's. An option that cannot be set is an error: the two would differ.
fn copy_options(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<(), Error> {
    // On UDP the kernel notes the last CPU here; nobody chose it. Setting it would make the kernel prefer sockets.
    let noted = |name| name == libc::SO_INCOMING_CPU && is_udp(from);
    for (level, name, what) in OPTIONS {
        if level == libc::SOL_SOCKET && noted(name) {
            continue;
        }
        let Ok(wanted) = get(from, level, name) else {
            continue; // not one that such a socket has
        };
        if get(to, level, name).is_ok_and(|has| has == wanted) {
            continue;
        }
        set(to, level, name, &wanted).map_err(|source| Error::Option(what, source))?;
    }
    Ok(())
}

/// Copies the sizes that the program chose; the kernel adapts the others. It returns twice the size that was set.
fn copy_buffers(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<(), Error> {
    const SNDBUF_LOCK: i32 = 1;
    const RCVBUF_LOCK: i32 = 2;
    let of = |fd, name| number(fd, libc::SOL_SOCKET, name);
    // A kernel before 5.14 has no SO_BUF_LOCK: a size that differs counts as chosen.
    let locked = of(from, SO_BUF_LOCK).unwrap_or(SNDBUF_LOCK | RCVBUF_LOCK);
    for (lock, name, forced, what) in [
        (
            SNDBUF_LOCK,
            libc::SO_SNDBUF,
            libc::SO_SNDBUFFORCE,
            "SO_SNDBUF",
        ),
        (
            RCVBUF_LOCK,
            libc::SO_RCVBUF,
            libc::SO_RCVBUFFORCE,
            "SO_RCVBUF",
        ),
    ] {
        let size = |fd| of(fd, name).map_err(|source| Error::Option(what, source));
        if locked & lock == 0 || size(from)? == size(to)? {
            continue;
        }
        let half = (size(from)? / 2).to_ne_bytes();
        set(to, libc::SOL_SOCKET, forced, &half)
            .or_else(|_| set(to, libc::SOL_SOCKET, name, &half))
            .map_err(|source| Error::Option(what, source))?;
    }
    Ok(())
}

/// Copies a classic filter, which can be read back and set again; an eBPF program cannot be read back.
fn copy_filter(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<(), Error> {
    match filter_of(from)? {
        filter if filter.is_empty() => Ok(()),
        mut filter => attach_filter(to, &mut filter),
    }
}

/// The instructions of a socket's classic filter; none where it has none.
fn filter_of(from: BorrowedFd<'_>) -> Result<Vec<libc::sock_filter>, Error> {
    // include/uapi/asm-generic/socket.h: SO_GET_FILTER is SO_ATTACH_FILTER, read.
    let mut count: libc::socklen_t = 0;
    // SAFETY: with a length of 0 the kernel writes the number of instructions into it and touches no buffer.
    let asked = unsafe {
        libc::getsockopt(
            from.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            std::ptr::null_mut(),
            &mut count,
        )
    };
    if asked != 0 {
        return Err(Error::Filter);
    }
    if count == 0 {
        return Ok(Vec::new());
    }
    let blank = libc::sock_filter {
        code: 0,
        jt: 0,
        jf: 0,
        k: 0,
    };
    let mut filter = vec![blank; count as usize];
    // SAFETY: `filter` has room for the `count` instructions that the kernel said there are, and it writes no more.
    let asked = unsafe {
        libc::getsockopt(
            from.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            filter.as_mut_ptr().cast(),
            &mut count,
        )
    };
    if asked != 0 || count as usize != filter.len() {
        return Err(Error::Filter);
    }
    Ok(filter)
}

/// All members of a reuseport group are of one user: a socket's is its inode's (`sockfs_setattr`).
fn copy_owner(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<(), Error> {
    let owner = |fd| {
        rustix::fs::fstat(fd)
            .map(|about| about.st_uid)
            .map_err(|source| Error::Step("asking for its user", source.into()))
    };
    let wanted = owner(from)?;
    if owner(to)? == wanted {
        return Ok(());
    }
    rustix::fs::fchown(to, Some(rustix::fs::Uid::from_raw(wanted)), None)
        .map_err(|source| Error::Step("giving it its user", source.into()))
}

/// Makes a queue beside a UDP socket, for another thread that receives from it, or for the process `asker`. `known`:
/// the socket has been in a group of ours before.
///
/// Broadcast and multicast datagrams go to every socket of an address. So the queue takes none of them; otherwise each
/// would be received once a thread.
///
/// # Errors
/// It is connected, bound to a device, or has a filter; and see [`Error`].
pub fn reader(socket: impl AsFd, known: bool, asker: u32) -> Result<OwnedFd, Error> {
    let socket = socket.as_fd();
    let refused = |what| Error::Step(what, io::ErrorKind::Unsupported.into());
    let datagrams = is_udp(socket) && address(socket).is_some_and(|at| at.port() != 0);
    if !datagrams || rustix::net::getpeername(socket).is_ok() {
        return Err(refused(
            "it is no UDP socket that takes datagrams from anybody",
        ));
    }
    // A socket bound to a device could not be woken by way of this host, and its queues could not be taken out again.
    let device = get(socket, libc::SOL_SOCKET, libc::SO_BINDTODEVICE);
    if device.is_ok_and(|name| name.first().is_some_and(|first| *first != 0)) {
        return Err(refused("it is bound to a network device"));
    }
    if !known {
        rustix::net::sockopt::set_socket_reuseport(socket, true)
            .map_err(|source| Error::Step("setting SO_REUSEPORT", source.into()))?;
    }
    let same = |(one, other): (&libc::sock_filter, &libc::sock_filter)| {
        (one.code, one.jt, one.jf, one.k) == (other.code, other.jt, other.jf, other.k)
    };
    let has = filter_of(socket)?;
    let mut ours = only_to_this_host();
    // The queue of a process, beside which its threads get theirs, has this filter already.
    let own = has.len() == ours.len() && has.iter().zip(&ours).all(same);
    if !has.is_empty() && !own {
        return Err(refused("it has a socket filter"));
    }
    let queue = clone_socket(socket, asker)?;
    attach_filter(queue.as_fd(), &mut ours)?;
    Ok(queue)
}

/// Takes a UDP socket out of its reuseport group and out of the kernel's choice; its waiting datagrams stay. It is
/// bound to a network device that does not exist (`sock_bindtoindex`), so that the kernel hashes it anew, outside any
/// group. Needs no privilege since Linux 5.7.
///
/// # Errors
/// It is bound to a device already, and we have not CAP_NET_RAW.
pub fn leave_reuseport_group(socket: impl AsFd) -> Result<(), Error> {
    const SO_BINDTOIFINDEX: i32 = 62;
    let nowhere = i32::MAX.to_ne_bytes();
    set(socket.as_fd(), libc::SOL_SOCKET, SO_BINDTOIFINDEX, &nowhere)
        .map_err(|source| Error::Step("binding it to no device", source))
}

/// A classic filter that takes only packets addressed to this host.
fn only_to_this_host() -> [libc::sock_filter; 4] {
    // include/uapi/linux/filter.h: SKF_AD_OFF + SKF_AD_PKTTYPE; include/uapi/linux/if_packet.h: PACKET_HOST is 0.
    let packet_type = u32::from_ne_bytes((-0x1000_i32 + 4).to_ne_bytes());
    let op = |code: u32, k: u32, jf: u8| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf,
        k,
    };
    [
        op(libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, packet_type, 0),
        op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1),
        op(libc::BPF_RET | libc::BPF_K, u32::MAX, 0),
        op(libc::BPF_RET | libc::BPF_K, 0, 0),
    ]
}

fn attach_filter(to: BorrowedFd<'_>, filter: &mut [libc::sock_filter]) -> Result<(), Error> {
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: `program` points to `len` instructions that live until the call is over; the kernel copies them.
    let done = unsafe {
        libc::setsockopt(
            to.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            std::ptr::from_ref(&program).cast(),
            size_of_val(&program) as libc::socklen_t,
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(Error::Filter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    fn shared(address: &str) -> UdpSocket {
        let socket = UdpSocket::bind(address).expect("bind");
        rustix::net::sockopt::set_socket_reuseport(&socket, true).expect("reuseport");
        socket
    }

    fn clone(one: &UdpSocket) -> OwnedFd {
        clone_socket(one.as_fd(), std::process::id()).expect("sibling")
    }

    #[test]
    fn a_sibling_is_like_its_model() {
        for at in ["127.0.0.1:0", "[::1]:0", "[::]:0"] {
            let one = shared(at);
            for (level, name, value) in [
                (libc::SOL_SOCKET, libc::SO_RCVBUF, 20_000_i32),
                (libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1),
                (libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1),
                (libc::SOL_IP, libc::IP_TOS, 16),
                (libc::SOL_IP, libc::IP_PKTINFO, 1),
                (libc::SOL_UDP, libc::UDP_GRO, 1),
            ] {
                set(one.as_fd(), level, name, &value.to_ne_bytes()).expect("option");
            }
            let two = clone(&one);
            assert_eq!(address(&one), address(&two));
            for (level, name, what) in OPTIONS.into_iter().chain([
                (libc::SOL_SOCKET, libc::SO_RCVBUF, "SO_RCVBUF"),
                (libc::SOL_SOCKET, libc::SO_SNDBUF, "SO_SNDBUF"),
            ]) {
                let of = |fd: BorrowedFd<'_>| get(fd, level, name).ok();
                assert_eq!(of(one.as_fd()), of(two.as_fd()), "{what} at {at}");
            }
        }
    }

    #[test]
    fn options_that_the_asker_may_not_set_are_not_copied() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: only root may mark sockets");
        }
        let mut asker = std::process::Command::new("setpriv")
            .args([
                "--inh-caps",
                "-all",
                "--bounding-set",
                "-all",
                "sleep",
                "60",
            ])
            .spawn()
            .expect("setpriv");
        let pid = asker.id();
        let name = || crate::proc::waits::identity(pid).map(|identity| identity.name);
        let since = std::time::Instant::now();
        while name().as_deref() != Some("sleep") && since.elapsed().as_secs() < 10 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        for (level, option, what) in [
            (libc::SOL_SOCKET, libc::SO_MARK, "SO_MARK"),
            (libc::SOL_IP, libc::IP_TRANSPARENT, "IP_TRANSPARENT"),
        ] {
            let one = shared("127.0.0.1:0");
            set(one.as_fd(), level, option, &1_i32.to_ne_bytes()).expect("root may");
            clone(&one);
            let refused = clone_socket(one.as_fd(), pid).expect_err(what).to_string();
            assert!(refused.contains(what), "{refused}");
            assert!(
                capability::has(Capability::CAP_NET_ADMIN),
                "in effect again"
            );
        }
        let plain = shared("127.0.0.1:0");
        clone_socket(plain.as_fd(), pid).expect("without such options for any process");
        asker.kill().expect("kill");
        asker.wait().expect("wait");
    }

    #[test]
    fn a_filter_is_copied() {
        let one = shared("127.0.0.1:0");
        // Takes everything.
        let mut all = [libc::sock_filter {
            code: 6,
            jt: 0,
            jf: 0,
            k: u32::MAX,
        }];
        let program = libc::sock_fprog {
            len: 1,
            filter: all.as_mut_ptr(),
        };
        // SAFETY: one instruction, which the kernel copies.
        let done = unsafe {
            libc::setsockopt(
                one.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ATTACH_FILTER,
                std::ptr::from_ref(&program).cast(),
                size_of_val(&program) as u32,
            )
        };
        assert_eq!(done, 0);
        let two = clone(&one);
        crate::socket::admit_syns(&two).expect("there was a filter to take away");
        assert!(crate::socket::admit_syns(&two).is_err());
    }

    #[test]
    fn a_queue_that_is_not_to_be_chosen_keeps_what_it_has() {
        for at in ["127.0.0.1:0", "0.0.0.0:0", "[::]:0"] {
            let one = std::net::UdpSocket::bind(at).expect("bind");
            let queue = reader(&one, false, std::process::id()).expect("a queue");
            let port = one.local_addr().expect("address").port();
            let loopback = if at.starts_with('[') {
                "::1"
            } else {
                "127.0.0.1"
            };
            let send = || {
                for _ in 0..40 {
                    let client = std::net::UdpSocket::bind((loopback, 0)).expect("bind");
                    client
                        .send_to(at.as_bytes(), (loopback, port))
                        .expect("send");
                }
            };
            let read = |socket: &std::net::UdpSocket| {
                socket.set_nonblocking(true).expect("flags");
                // A test beside this one may still send to one that had the same port.
                let mut bytes = [0; 32];
                let received = std::iter::from_fn(|| {
                    let length = socket.recv(&mut bytes).ok()?;
                    Some(bytes[..length] == *at.as_bytes())
                });
                received.filter(|own| *own).count()
            };
            let queue = std::net::UdpSocket::from(queue);
            send();
            let had = read(&one);
            assert!(had < 40, "nothing for the queue at {at}");
            leave_reuseport_group(&queue).expect("taken out");
            send();
            assert_eq!(read(&one), 40, "{at}");
            assert_eq!(read(&queue), 40 - had, "{at}");
            // One that comes after is chosen again, beside a queue too.
            let other = std::net::UdpSocket::from(
                reader(&queue, true, std::process::id()).expect("a queue"),
            );
            send();
            let (first, second) = (read(&one), read(&other));
            assert_eq!(first + second, 40, "{at}");
            assert!(second > 0, "nothing for the second queue at {at}");
        }
    }
}
