//! A UDP socket's receive queue, asked from outside, and who waits for it.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use nix::libc;

use crate::process::{self, Doing};

/// What waits in a UDP socket, from its `SO_MEMINFO` (net/core/sock.c, `sk_get_meminfo`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReceiveQueue {
    /// Memory of the datagrams that wait, in bytes: what they take, not what they carry. The kernel takes what was read
    /// off this sum in portions of up to a quarter of the limit, and all of it when the queue is empty.
    pub waiting_bytes: u32,
    /// The socket's receive buffer (`SO_RCVBUF`), in bytes.
    pub limit_bytes: u32,
    /// Datagrams that it had no room for, since it was made.
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
/// What getsockopt says.
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

/// System calls that a server waits for a datagram in, by their first argument: the socket.
#[cfg(target_arch = "x86_64")]
const RECEIVES: [u64; 4] = [
    0,   // read
    45,  // recvfrom
    47,  // recvmsg
    299, // recvmmsg
];
#[cfg(target_arch = "aarch64")]
const RECEIVES: [u64; 4] = [63, 207, 212, 243];

/// Like [`process::doing_below`], for UDP sockets: a thread that is in a receiving call on one of them waits too.
pub fn doing_below(pid: u32, inodes: &[u64]) -> Doing {
    match process::doing_below(pid, inodes) {
        Doing::Busy if receives(pid, inodes) => Doing::Waiting,
        other => other,
    }
}

/// Whether a thread of this process, or of one below it, is in a receiving call on one of these sockets.
fn receives(pid: u32, inodes: &[u64]) -> bool {
    let held = process::sockets_of(pid).unwrap_or_default();
    let ours: Vec<i32> = held
        .into_iter()
        .filter(|(_, inode)| inodes.contains(inode))
        .map(|(fd, _)| fd)
        .collect();
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
    let own = !ours.is_empty()
        && tasks.into_iter().flatten().flatten().any(|task| {
            let line = std::fs::read_to_string(task.path().join("syscall")).unwrap_or_default();
            receiving_on(&line).is_some_and(|fd| ours.contains(&fd))
        });
    own || process::children(pid)
        .into_iter()
        .any(|child| receives(child, inodes))
}

/// The descriptor that a line of /proc/PID/syscall says a receiving call is on.
fn receiving_on(line: &str) -> Option<i32> {
    let mut words = line.split_whitespace();
    let number: u64 = words.next()?.parse().ok()?;
    let first = words.next()?.strip_prefix("0x")?;
    RECEIVES
        .contains(&number)
        .then(|| i32::from_str_radix(first, 16).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;
    use std::time::{Duration, Instant};

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

    #[test]
    fn a_thread_in_recv_waits_for_its_own_socket_only() {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("bind");
        let other = UdpSocket::bind("127.0.0.1:0").expect("bind");
        let to = socket.local_addr().expect("address");
        let inode = |socket: &UdpSocket| rustix::fs::fstat(socket).expect("stat").st_ino;
        let (own, others) = (inode(&socket), inode(&other));
        let thread = std::thread::spawn(move || socket.recv(&mut [0; 8]));
        let since = Instant::now();
        while !receives(std::process::id(), &[own]) {
            assert!(since.elapsed() < Duration::from_secs(10), "never in recv");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!receives(std::process::id(), &[others]));
        other.send_to(b"x", to).expect("send");
        thread.join().expect("thread").expect("recv");
    }

    #[test]
    fn lines_of_proc_syscall() {
        let receive = RECEIVES[1];
        assert_eq!(receiving_on(&format!("{receive} 0x1f 0x7f\n")), Some(31));
        for line in ["running\n", "-1 0x7ffc\n", "", "999 0x3\n"] {
            assert_eq!(receiving_on(line), None, "{line:?}");
        }
    }
}
