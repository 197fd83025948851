//! A UDP socket's receive queue, read from outside.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use nix::libc;

/// The receive queue of a UDP socket, from its `SO_MEMINFO` (net/core/sock.c, `sk_get_meminfo`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReceiveQueue {
    /// Memory that the waiting datagrams take, in bytes (more than their payload). The kernel subtracts datagrams that
    /// were read in portions of up to a quarter of the limit, and the rest when the queue is empty.
    pub waiting_bytes: u32,
    /// The socket's receive buffer (`SO_RCVBUF`), in bytes.
    pub limit_bytes: u32,
    /// Datagrams dropped for want of room, since the socket was made.
    pub dropped: u32,
}

impl std::ops::Add for ReceiveQueue {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            waiting_bytes: self.waiting_bytes.saturating_add(other.waiting_bytes),
            limit_bytes: self.limit_bytes.saturating_add(other.limit_bytes),
            dropped: self.dropped.saturating_add(other.dropped),
        }
    }
}

/// The receive queue of a socket.
///
/// # Errors
/// The error of getsockopt.
pub fn receive_queue(socket: impl AsFd) -> io::Result<ReceiveQueue> {
    const SO_MEMINFO: i32 = 55;
    // include/uapi/linux/sock_diag.h
    const RMEM_ALLOC: usize = 0;
    const RCVBUF: usize = 1;
    const DROPS: usize = 8;
    let mut memory = [0_u32; 9];
    let mut size = size_of_val(&memory) as libc::socklen_t;
    // SAFETY: `memory` is `size` bytes of plain integers that the kernel may fill, wholly or in part.
    let done = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_MEMINFO,
            memory.as_mut_ptr().cast(),
            &mut size,
        )
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(ReceiveQueue {
        waiting_bytes: memory[RMEM_ALLOC],
        limit_bytes: memory[RCVBUF],
        dropped: memory[DROPS],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    #[test]
    fn what_waits_grows_and_what_does_not_fit_is_counted() {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("bind");
        rustix::net::sockopt::set_socket_recv_buffer_size(&socket, 4096).expect("SO_RCVBUF");
        let to = socket.local_addr().expect("address");
        let empty = receive_queue(&socket).expect("queue");
        assert_eq!((empty.waiting_bytes, empty.dropped), (0, 0));
        assert!(empty.limit_bytes >= 4096);
        let client = UdpSocket::bind("127.0.0.1:0").expect("bind");
        client.send_to(b"one", to).expect("send");
        let one = receive_queue(&socket).expect("queue");
        assert!(one.waiting_bytes >= 3 && one.dropped == 0, "{one:?}");
        for _ in 0..100 {
            client.send_to(&[0; 500], to).expect("send");
        }
        let full = receive_queue(&socket).expect("queue");
        assert!(full.waiting_bytes > one.waiting_bytes, "{full:?}");
        assert!((1..=100).contains(&full.dropped), "{full:?}");
        socket.set_nonblocking(true).expect("nonblocking");
        let mut read = 0;
        while socket.recv(&mut [0; 600]).is_ok() {
            read += 1;
        }
        assert_eq!(read + full.dropped, 101, "each was read or counted");
        assert_eq!(receive_queue(&socket).expect("queue").waiting_bytes, 0);
    }
}
