//! Many datagrams by one system call: `recvmmsg` and `sendmmsg`, and UDP_GRO, by which the kernel joins datagrams of
//! one sender.
//!
//! (nix's `recvmmsg` does not restore the lengths that the kernel overwrites: from the second call on there would be
//! no control messages, and so no sizes to take joined datagrams apart by.)

use std::io;
use std::mem::zeroed;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd};

use nix::libc;

/// Room for one control message that holds a number, aligned as the kernel wants it.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; 64]);

/// A message of one receive: a datagram, or several that the kernel joined.
#[derive(Debug, Clone, Copy)]
struct Message {
    length: usize,
    /// The size of each joined datagram but the last; 0: not joined.
    segment: usize,
    from: SocketAddr,
    truncated: bool,
}

/// A datagram of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// Its payload.
    pub bytes: &'a [u8],
    /// Its sender.
    pub from: SocketAddr,
    /// It was longer than the batch has room for; the rest is lost.
    pub truncated: bool,
}

/// Buffers for receiving, used again and again.
pub struct Batch {
    buffers: Vec<u8>,
    size: usize,
    names: Vec<libc::sockaddr_storage>,
    controls: Vec<Control>,
    messages: Vec<Message>,
}

impl std::fmt::Debug for Batch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Batch")
            .field("count", &self.names.len())
            .field("size", &self.size)
            .field("messages", &self.messages)
            .finish()
    }
}

impl Batch {
    /// Room for `count` receives (at least 1, at most 1024: more the kernel does not do) of `size` bytes each. With
    /// UDP_GRO one receive may hold 65,535 bytes of many datagrams.
    pub fn new(count: usize, size: usize) -> Self {
        let count = count.clamp(1, 1024);
        // SAFETY: a sockaddr_storage is plain bytes, of which all may be 0.
        let name: libc::sockaddr_storage = unsafe { zeroed() };
        Self {
            buffers: vec![0; count * size],
            size,
            names: vec![name; count],
            controls: vec![Control([0; 64]); count],
            messages: Vec::with_capacity(count),
        }
    }

    /// Waits for datagrams (not on a non-blocking socket) and takes as many as are there and fit. Returns how many
    /// came.
    ///
    /// # Errors
    /// The error of recvmmsg: `WouldBlock`, `Interrupted`.
    pub fn receive(&mut self, socket: impl AsFd) -> io::Result<usize> {
        self.messages.clear();
        let mut parts: Vec<libc::iovec> = self
            .buffers
            .chunks_mut(self.size.max(1))
            .map(|buffer| libc::iovec {
                iov_base: buffer.as_mut_ptr().cast(),
                iov_len: buffer.len(),
            })
            .collect();
        let mut headers: Vec<libc::mmsghdr> = parts
            .iter_mut()
            .zip(&mut self.names)
            .zip(&mut self.controls)
            .map(|((part, name), control)| {
                // SAFETY: a mmsghdr is pointers and integers: all 0 is valid, and says that there is nothing.
                let mut header: libc::mmsghdr = unsafe { zeroed() };
                header.msg_hdr.msg_iov = part;
                header.msg_hdr.msg_iovlen = 1;
                header.msg_hdr.msg_name = std::ptr::from_mut(name).cast();
                header.msg_hdr.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
                header.msg_hdr.msg_control = control.0.as_mut_ptr().cast();
                header.msg_hdr.msg_controllen = control.0.len() as _;
                header
            })
            .collect();
        // SAFETY: each header points to an iovec, a name and a control buffer of its own. All of them are alive and
        // have the lengths they are given with; the kernel writes no further.
        let received = unsafe {
            libc::recvmmsg(
                socket.as_fd().as_raw_fd(),
                headers.as_mut_ptr(),
                headers.len() as _,
                libc::MSG_WAITFORONE as _,
                std::ptr::null_mut(),
            )
        };
        let received = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
        for (header, name) in headers.iter().zip(&self.names).take(received) {
            self.messages.push(Message {
                length: (header.msg_len as usize).min(self.size),
                segment: segment(&header.msg_hdr),
                from: address(name)?,
                truncated: header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0,
            });
        }
        Ok(self.datagrams().count())
    }

    /// The datagrams of the last receive; those that the kernel joined are apart again.
    pub fn datagrams(&self) -> impl Iterator<Item = Datagram<'_>> {
        let buffers = self.buffers.chunks(self.size.max(1));
        self.messages
            .iter()
            .zip(buffers)
            .flat_map(|(message, buffer)| {
                let bytes = &buffer[..message.length];
                let step = match message.segment {
                    0 => bytes.len().max(1),
                    segment => segment,
                };
                // An empty datagram is one, too.
                let empty = bytes.is_empty().then_some(bytes);
                let (from, truncated) = (message.from, message.truncated);
                bytes.chunks(step).chain(empty).map(move |bytes| Datagram {
                    bytes,
                    from,
                    truncated,
                })
            })
    }
}

const UDP_GRO: i32 = 104;

/// The size of the datagrams that were joined into this message; 0 where none were.
fn segment(header: &libc::msghdr) -> usize {
    // SAFETY: `header` describes control bytes that the kernel has just written, of the length it says; the macros
    // stay within them.
    let mut control = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !control.is_null() {
        // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR give null or a whole header within the buffer.
        let (level, kind) = unsafe { ((*control).cmsg_level, (*control).cmsg_type) };
        if (level, kind) == (libc::SOL_UDP, UDP_GRO) {
            let mut size = 0_i32;
            // SAFETY: the kernel puts an int here (net/ipv4/udp.c, `udp_cmsg_recv`); it need not be aligned.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    libc::CMSG_DATA(control),
                    std::ptr::from_mut(&mut size).cast(),
                    size_of::<i32>(),
                );
            }
            return usize::try_from(size).unwrap_or(0);
        }
        // SAFETY: as above.
        control = unsafe { libc::CMSG_NXTHDR(header, control) };
    }
    0
}

fn address(name: &libc::sockaddr_storage) -> io::Result<SocketAddr> {
    let place = std::ptr::from_ref(name);
    match i32::from(name.ss_family) {
        libc::AF_INET => {
            // SAFETY: a sockaddr_storage has room and alignment for every address, and the family says which it is.
            let v4 = unsafe { &*place.cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
            Ok(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let v6 = unsafe { &*place.cast::<libc::sockaddr_in6>() };
            let (ip, port) = (
                Ipv6Addr::from(v6.sin6_addr.s6_addr),
                u16::from_be(v6.sin6_port),
            );
            Ok(SocketAddrV6::new(ip, port, v6.sin6_flowinfo, v6.sin6_scope_id).into())
        }
        other => Err(io::Error::other(format!("a sender of family {other}"))),
    }
}

/// Writes an address where a system call will read it; its length.
fn write_address(to: SocketAddr, name: &mut libc::sockaddr_storage) -> libc::socklen_t {
    let place = std::ptr::from_mut(name);
    match to {
        SocketAddr::V4(v4) => {
            let value = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr {
                    s_addr: u32::from(*v4.ip()).to_be(),
                },
                sin_zero: [0; 8],
            };
            // SAFETY: a sockaddr_storage has room and alignment for every address.
            unsafe { place.cast::<libc::sockaddr_in>().write(value) };
            size_of::<libc::sockaddr_in>() as libc::socklen_t
        }
        SocketAddr::V6(v6) => {
            let value = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr {
                    s6_addr: v6.ip().octets(),
                },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: as above.
            unsafe { place.cast::<libc::sockaddr_in6>().write(value) };
            size_of::<libc::sockaddr_in6>() as libc::socklen_t
        }
    }
}

/// Sends datagrams, each to its address. Returns how many were sent before one was not, or did not fit.
///
/// # Errors
/// The error of sendmmsg of the first one.
pub fn send(socket: impl AsFd, datagrams: &[(&[u8], SocketAddr)]) -> io::Result<usize> {
    if datagrams.is_empty() {
        return Ok(0);
    }
    let datagrams = &datagrams[..datagrams.len().min(1024)];
    // SAFETY: a sockaddr_storage is plain bytes, of which all may be 0.
    let name: libc::sockaddr_storage = unsafe { zeroed() };
    let mut names = vec![name; datagrams.len()];
    let mut parts: Vec<libc::iovec> = datagrams
        .iter()
        .map(|(bytes, _)| libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        })
        .collect();
    let mut headers: Vec<libc::mmsghdr> = parts
        .iter_mut()
        .zip(&mut names)
        .zip(datagrams)
        .map(|((part, name), (_, to))| {
            // SAFETY: as for receiving.
            let mut header: libc::mmsghdr = unsafe { zeroed() };
            header.msg_hdr.msg_namelen = write_address(*to, name);
            header.msg_hdr.msg_name = std::ptr::from_mut(name).cast();
            header.msg_hdr.msg_iov = part;
            header.msg_hdr.msg_iovlen = 1;
            header
        })
        .collect();
    // SAFETY: each header points to an iovec and a name of its own, all of them alive; the kernel only reads what the
    // iovecs point to.
    let sent = unsafe {
        libc::sendmmsg(
            socket.as_fd().as_raw_fd(),
            headers.as_mut_ptr(),
            headers.len() as _,
            0,
        )
    };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Has the kernel join datagrams of one sender on their way to this socket (UDP_GRO). The reader has to take them
/// apart again, as [`Batch`] does.
///
/// # Errors
/// The kernel is older than 5.0.
pub fn join_datagrams(socket: impl AsFd) -> io::Result<()> {
    Ok(nix::sys::socket::setsockopt(
        &socket.as_fd(),
        nix::sys::socket::sockopt::UdpGroSegment,
        &true,
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    fn pair(address: &str) -> (UdpSocket, UdpSocket) {
        let bind = || UdpSocket::bind(address).expect("bind");
        (bind(), bind())
    }

    #[test]
    fn what_is_sent_in_a_batch_comes_in_a_batch() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let (here, there) = pair(address);
            let to = here.local_addr().expect("address");
            let sent: Vec<Vec<u8>> = (0..20_u8).map(|n| vec![n; n.into()]).collect();
            let batch: Vec<(&[u8], SocketAddr)> = sent.iter().map(|b| (&b[..], to)).collect();
            assert_eq!(send(&there, &batch).expect("send"), 20);
            let (mut receive, mut got) = (Batch::new(8, 64), Vec::new());
            while got.len() < 20 {
                let count = receive.receive(&here).expect("receive");
                assert!((1..=8).contains(&count));
                got.extend(receive.datagrams().map(|datagram| {
                    assert_eq!(datagram.from, there.local_addr().expect("address"));
                    assert!(!datagram.truncated);
                    datagram.bytes.to_vec()
                }));
            }
            assert_eq!(got, sent);
        }
    }

    #[test]
    fn joined_datagrams_are_taken_apart_each_time() {
        let (here, there) = pair("127.0.0.1:0");
        join_datagrams(&here).expect("UDP_GRO");
        there
            .connect(here.local_addr().expect("address"))
            .expect("connect");
        // The kernel splits a joined datagram on its way out, but leaves it joined for a local socket with UDP_GRO.
        let size = 100;
        nix::sys::socket::setsockopt(&there, nix::sys::socket::sockopt::UdpGsoSegment, &size)
            .expect("UDP_SEGMENT");
        let mut batch = Batch::new(4, 65_535);
        for _ in 0..3 {
            there.send(&[7; 350]).expect("send");
            let mut lengths = Vec::new();
            while lengths.iter().sum::<usize>() < 350 {
                batch.receive(&here).expect("receive");
                lengths.extend(batch.datagrams().map(|datagram| datagram.bytes.len()));
            }
            assert_eq!(lengths, [100, 100, 100, 50]);
        }
    }

    #[test]
    fn nothing_there_and_too_long() {
        let (here, there) = pair("127.0.0.1:0");
        here.set_nonblocking(true).expect("nonblocking");
        let mut batch = Batch::new(4, 10);
        let nothing = batch.receive(&here).expect_err("nothing");
        assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
        assert_eq!(batch.datagrams().count(), 0);
        there
            .send_to(&[1; 20], here.local_addr().expect("address"))
            .expect("send");
        assert_eq!(batch.receive(&here).expect("receive"), 1);
        let one = batch.datagrams().next().expect("one");
        assert!(one.truncated && one.bytes == [1; 10]);
        assert_eq!(send(&there, &[]).expect("nothing to send"), 0);
    }
}
