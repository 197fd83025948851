//! Sees the first bytes of the datagrams that come to a port, by packet sockets with a classic filter. The datagrams go where they
//! would go; the kernel copies their first bytes for us, and no more of them than a socket's buffer takes.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::libc;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};

/// As much of a packet is copied: the longest IPv4 header (the one of IPv6 is shorter), that of UDP, and what the caller looks at.
const COPIED: usize = 60 + UDP_HEADER + CONTENT;
/// As many bytes of a datagram's contents are copied at least.
pub const CONTENT: usize = 28;
const UDP_HEADER: usize = 8;
/// An IP header has no fewer bytes.
const SHORTEST_HEADER: usize = 20;
const UDP: u8 = 17;

/// The beginning of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// Where it goes.
    pub to: IpAddr,
    /// Its first bytes.
    pub head: &'a [u8],
    /// The number of its bytes, as its header tells it.
    pub length: usize,
}

/// The datagrams that come to an address from its making on.
#[derive(Debug)]
pub struct Capture {
    /// One for each version of IP.
    sockets: Vec<(AddressFamily, OwnedFd)>,
    address: SocketAddr,
}

impl Capture {
    /// Begins. `interface`: only what comes by this one; 0: by any. `skip`: of datagrams whose first byte has these bits under
    /// this mask nothing is copied, nor of empty ones.
    ///
    /// # Errors
    /// `EPERM` without CAP_NET_RAW.
    pub fn start(address: SocketAddr, interface: u32, skip: (u8, u8)) -> io::Result<Self> {
        let families: &[AddressFamily] = match address {
            SocketAddr::V4(_) => &[AddressFamily::INET],
            // It takes those of IPv4 too, unless another socket does.
            SocketAddr::V6(_) => &[AddressFamily::INET6, AddressFamily::INET],
        };
        let open = |family: &AddressFamily| {
            let socket = open(*family, interface, &filter(*family, address.port(), skip))?;
            Ok((*family, socket))
        };
        let sockets: io::Result<_> = families.iter().map(open).collect();
        Ok(Self {
            sockets: sockets?,
            address,
        })
    }

    /// Hands over those that came since the last call, at most so many. Returns how many it was.
    ///
    /// # Errors
    /// The error of recv(2): `ENETDOWN` where the interface is gone.
    pub fn take(&self, most: usize, see: &mut dyn FnMut(Datagram<'_>)) -> io::Result<usize> {
        let mut bytes = [0_u8; COPIED];
        let mut taken = 0;
        for (family, socket) in &self.sockets {
            while taken < most {
                let length = match rustix::net::recv(socket, &mut bytes[..], RecvFlags::DONTWAIT) {
                    Ok((length, _)) => length,
                    Err(rustix::io::Errno::AGAIN) => break,
                    Err(rustix::io::Errno::INTR) => continue,
                    Err(error) => return Err(error.into()),
                };
                taken += 1;
                let datagram = parse(*family, &bytes[..length]);
                if let Some(datagram) = datagram.filter(|one| self.is_for_us(one.to)) {
                    see(datagram);
                }
            }
        }
        Ok(taken)
    }

    fn is_for_us(&self, to: IpAddr) -> bool {
        let own = self.address.ip().to_canonical();
        own.is_unspecified() || own == to
    }
}

/// Opens a packet socket that sees what comes by this version of IP. A socket for all protocols would also see what is sent,
/// and so everything on a loopback twice.
fn open(
    family: AddressFamily,
    interface: u32,
    filter: &[libc::sock_filter],
) -> io::Result<OwnedFd> {
    // Without a protocol nothing comes, until the filter is there.
    let socket = rustix::net::socket_with(
        AddressFamily::PACKET,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_ptr().cast_mut(),
    };
    super::set(
        socket.as_fd(),
        libc::SOL_SOCKET,
        libc::SO_ATTACH_FILTER,
        &program,
    )?;
    let protocol = match family {
        AddressFamily::INET6 => libc::ETH_P_IPV6,
        _ => libc::ETH_P_IP,
    };
    let at = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: (protocol as u16).to_be(),
        sll_ifindex: interface as i32,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    // SAFETY: `at` is an address of the length that is passed, and the kernel only reads it.
    let bound = unsafe {
        let size = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        libc::bind(socket.as_raw_fd(), (&raw const at).cast(), size)
    };
    match bound {
        0 => Ok(socket),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A classic program that copies the beginnings of datagrams to a port, of packets that begin with their IP header. Only first
/// fragments have a port. IPv6 with extension headers is left out.
fn filter(family: AddressFamily, port: u16, (mask, bits): (u8, u8)) -> Vec<libc::sock_filter> {
    use libc::{
        BPF_ABS, BPF_ALU, BPF_AND, BPF_B, BPF_H, BPF_IND, BPF_JEQ, BPF_JMP, BPF_JSET, BPF_K,
    };
    use libc::{BPF_LD, BPF_LDX, BPF_MSH, BPF_RET};
    const IPV6_HEADER: u32 = 40;
    let op = |code: u32, k: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    };
    let byte = |at| op(BPF_LD | BPF_B | BPF_ABS, at);
    let mut program = match family {
        AddressFamily::INET6 => vec![
            byte(6),
            op(BPF_JMP | BPF_JEQ, UDP.into()),
            op(BPF_LDX, IPV6_HEADER),
        ],
        _ => vec![
            byte(9),
            op(BPF_JMP | BPF_JEQ, UDP.into()),
            op(BPF_LD | BPF_H | BPF_ABS, 6),
            op(BPF_JMP | BPF_JSET, 0x1fff),
            op(BPF_LDX | BPF_B | BPF_MSH, 0),
        ],
    };
    program.extend([
        op(BPF_LD | BPF_H | BPF_IND, 2),
        op(BPF_JMP | BPF_JEQ, port.into()),
        op(BPF_LD | BPF_B | BPF_IND, UDP_HEADER as u32),
        op(BPF_ALU | BPF_AND | BPF_K, mask.into()),
        op(BPF_JMP | BPF_JEQ | BPF_K, bits.into()),
        op(BPF_RET | BPF_K, COPIED as u32),
        op(BPF_RET | BPF_K, 0),
    ]);
    // A failed comparison jumps to the last line.
    let (last, skips) = (program.len() - 1, program.len() - 3);
    for (at, line) in program.iter_mut().enumerate().take(last) {
        let past = (last - at - 1) as u8;
        match u32::from(line.code) {
            code if code == BPF_JMP | BPF_JSET || at == skips => line.jt = past,
            code if code == BPF_JMP | BPF_JEQ => line.jf = past,
            _ => {}
        }
    }
    program
}

/// The datagram in a packet that begins with its IP header, as far as it was copied.
fn parse(family: AddressFamily, packet: &[u8]) -> Option<Datagram<'_>> {
    let (to, header) = match family {
        AddressFamily::INET6 => {
            let to: [u8; 16] = *packet.get(24..40)?.first_chunk()?;
            (Ipv6Addr::from(to).to_canonical(), 40)
        }
        _ => {
            let to: [u8; 4] = *packet.get(16..20)?.first_chunk()?;
            (Ipv4Addr::from(to).into(), usize::from(packet[0] & 0xf) * 4)
        }
    };
    let udp = packet.get(header..).filter(|_| header >= SHORTEST_HEADER)?;
    let length = u16::from_be_bytes(*udp.get(4..6)?.first_chunk()?);
    Some(Datagram {
        to,
        head: udp.get(UDP_HEADER..)?,
        length: usize::from(length).saturating_sub(UDP_HEADER),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    /// The two upper bits of the first byte, and which of their values is skipped.
    const SKIP: (u8, u8) = (0xC0, 0x40);

    fn seen(capture: &Capture) -> Vec<(IpAddr, Vec<u8>, usize)> {
        let mut all = Vec::new();
        let mut see = |one: Datagram<'_>| all.push((one.to, one.head.to_vec(), one.length));
        capture.take(100, &mut see).expect("packets");
        all
    }

    #[test]
    fn datagrams_to_an_address_are_seen_once_and_cut() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: it needs CAP_NET_RAW");
        }
        crate::netns::isolate().expect("a network namespace");
        for (at, from, elsewhere) in [
            ("127.0.0.1:8080", "127.0.0.1:0", "127.0.0.2:8080"),
            ("[::1]:8080", "[::1]:0", "[::1]:8081"),
            ("[::]:8080", "127.0.0.1:0", "127.0.0.1:8081"),
        ] {
            let server = UdpSocket::bind(at).expect("bind");
            let capture = Capture::start(at.parse().expect("address"), 0, SKIP).expect("capture");
            let client = UdpSocket::bind(from).expect("bind");
            let to: SocketAddr = match at.strip_prefix("[::]") {
                Some(port) => format!("127.0.0.1{port}").parse().expect("address"),
                None => at.parse().expect("address"),
            };
            let long: Vec<u8> = (0..200).map(|n| n | 0x80).collect();
            for (bytes, to) in [
                (&long[..], to),
                (&[0x41; 30], to),
                (&[0xC0; 30], elsewhere.parse().expect("address")),
                (&[], to),
                (&[0x10, 2], to),
            ] {
                client.send_to(bytes, to).expect("send");
            }
            let seen = seen(&capture);
            assert_eq!(seen.len(), 2, "{at}: {seen:?}");
            let (of, head, length) = &seen[0];
            assert_eq!((*of, *length), (to.ip(), 200));
            assert!(head.len() >= CONTENT && head.len() < 80 && long.starts_with(head));
            assert_eq!(seen[1], (to.ip(), vec![0x10, 2], 2));
            drop(server);
        }
    }

    #[test]
    fn packets_survive_foreign_bytes() {
        let udp = [&[0x45][..], &[17; 60]].concat();
        crate::foreign::survives("ip", &[udp], |bytes| {
            for family in [AddressFamily::INET, AddressFamily::INET6] {
                if let Some(datagram) = parse(family, bytes) {
                    assert!(datagram.head.len() + UDP_HEADER + SHORTEST_HEADER <= bytes.len());
                }
            }
        });
    }
}
