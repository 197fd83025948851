//! Orphaned UDP queues: of a process that ended, or closed its own, or of a thread where several processes receive.
//! Their datagrams cannot be moved. So the broker hands the queue to another process of the server, which reads it
//! empty. An empty datagram tells that process, and the library in it takes the datagram away.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::net::RecvFlags;
use wakeone_kernel::socket::clone_socket;

/// By then, datagrams that the kernel was about to put into a queue when it left the group have arrived.
const SETTLED: Duration = Duration::from_millis(200);
/// How often to wake while datagrams wait, and how many wakes at a time at most. One wake has a process read the
/// whole queue, unless it polls: then it reads one datagram for each.
const WAKE_EVERY: Duration = Duration::from_millis(2);
const WAKES: u32 = 8;
/// How long a process that was handed a queue is not handed it again.
const HAS_IT: Duration = Duration::from_millis(100);
/// A wake that nobody asked about by then was lost: the next empty datagram is a client's. A wake may wait in the queue of
/// a worker that is stuck, and no server is to see it.
const FORGOTTEN: Duration = Duration::from_secs(60);
/// If nobody asked about the last wake by then, it was lost or its reader is busy, and another is sent.
const AGAIN: Duration = Duration::from_millis(100);

/// Whether a datagram waits in a socket. Its charged memory does not tell, as it may still include datagrams that
/// were read. Polling does not tell either: a socket that was shut down polls as readable, but returns nothing,
/// without an address.
pub fn is_readable(socket: impl AsFd) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let mut byte = [0_u8; 1];
    matches!(
        rustix::net::recvfrom(socket, &mut byte[..], flags),
        Ok((_, _, Some(_)))
    )
}

/// A queue that others read until it is empty.
#[derive(Debug)]
struct Left {
    queue: OwnedFd,
    since: Instant,
    given: Vec<(u32, Instant)>,
}

impl Left {
    fn waits(&self) -> bool {
        is_readable(&self.queue)
    }

    fn is_over(&self) -> bool {
        self.since.elapsed() >= SETTLED && !is_readable(&self.queue)
    }

    /// Duplicates the queue for a process, unless it has one.
    fn give(&mut self, pid: u32) -> Option<OwnedFd> {
        self.given.retain(|(_, when)| when.elapsed() < HAS_IT);
        if self.given.iter().any(|(to, _)| *to == pid) || !self.waits() {
            return None;
        }
        let queue = self.queue.try_clone().ok()?;
        self.given.push((pid, Instant::now()));
        Some(queue)
    }
}

/// The answer to the library's question about an empty datagram.
#[derive(Debug)]
pub enum WakeReply {
    /// It is a client's.
    Foreign,
    /// It was a wake, but there is nothing left to read.
    Nothing,
    /// It was a wake: the process is to read this queue.
    Read(OwnedFd),
}

/// The orphaned queues of one address.
#[derive(Debug)]
pub struct OrphanedQueues {
    address: SocketAddr,
    left: Vec<Left>,
    /// Empty datagrams that were sent and that nobody asked about.
    wakes: u32,
    at_once: u32,
    /// The time of the last wake.
    woken: Option<Instant>,
}

impl OrphanedQueues {
    /// An empty set. `address`: where wakes are sent to.
    pub fn at(address: SocketAddr) -> Self {
        Self {
            address,
            left: Vec::new(),
            wakes: 0,
            at_once: 1,
            woken: None,
        }
    }

    /// Takes a queue out of its reuseport group, and has it read.
    pub fn add(&mut self, queue: OwnedFd) {
        if let Err(error) = clone_socket::leave_reuseport_group(&queue) {
            tracing::debug!("{}/udp: {error}", self.address);
        }
        self.left.push(Left {
            queue,
            since: Instant::now(),
            given: Vec::new(),
        });
    }

    /// Sends wakes if datagrams wait, and forgets empty queues. `also`: datagrams wait elsewhere. Returns whether to
    /// call it again soon.
    pub fn drain_step(&mut self, also: bool) -> bool {
        self.left.retain(|left| !left.is_over());
        if !also && !self.left.iter().any(Left::waits) {
            self.at_once = 1;
            return false;
        }
        if self.woken.is_none_or(|when| when.elapsed() >= WAKE_EVERY) {
            let unanswered = self.woken.is_some_and(|when| when.elapsed() >= AGAIN);
            let most = if unanswered {
                self.wakes + 1
            } else {
                self.at_once
            };
            while self.wakes < most {
                self.woken = Some(Instant::now());
                if let Err(error) = wake(self.address) {
                    tracing::debug!("{}/udp: nobody can be woken: {error}", self.address);
                    return false;
                }
                self.wakes += 1;
            }
            self.at_once = (2 * self.at_once).min(WAKES);
        }
        true
    }

    /// A process got an empty datagram. `also`: another socket with unread datagrams.
    pub fn ask(&mut self, pid: u32, also: Option<OwnedFd>) -> WakeReply {
        if self.woken.is_none_or(|when| when.elapsed() >= FORGOTTEN) {
            self.wakes = 0;
        }
        if self.wakes == 0 {
            return WakeReply::Foreign;
        }
        self.wakes -= 1;
        let queue = self.left.iter_mut().find_map(|left| left.give(pid));
        queue.or(also).map_or(WakeReply::Nothing, WakeReply::Read)
    }
}

/// Sends an empty datagram to an address of this host. Each comes from another port, so that it may reach another
/// worker.
fn wake(address: SocketAddr) -> io::Result<()> {
    let (any, here): (IpAddr, IpAddr) = match address {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::LOCALHOST.into()),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::LOCALHOST.into()),
    };
    let mut to = address;
    if to.ip().is_unspecified() {
        to.set_ip(here);
    }
    let socket = UdpSocket::bind((any, 0))?;
    socket.set_nonblocking(true)?;
    socket.send_to(&[], to).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_left_is_handed_to_one_who_was_woken() {
        let one = UdpSocket::bind("127.0.0.1:0").expect("bind");
        let to = one.local_addr().expect("address");
        let waker = UdpSocket::bind("127.0.0.1:0").expect("bind");
        let mut queues = OrphanedQueues::at(waker.local_addr().expect("address"));
        assert!(matches!(queues.ask(1, None), WakeReply::Foreign));
        let client = UdpSocket::bind("127.0.0.1:0").expect("bind");
        client.send_to(b"one", to).expect("send");
        queues.add(one.into());
        assert!(queues.drain_step(false));
        assert_eq!(waker.recv(&mut [0; 8]).expect("an empty datagram"), 0);
        // No process asks: more wakes are sent.
        while queues.wakes < WAKES {
            assert!(queues.drain_step(false));
            std::thread::sleep(WAKE_EVERY);
        }
        let WakeReply::Read(queue) = queues.ask(1, None) else {
            panic!("it waits");
        };
        assert!(
            matches!(queues.ask(1, None), WakeReply::Nothing),
            "it has it"
        );
        let WakeReply::Read(_) = queues.ask(2, None) else {
            panic!("it waits still");
        };
        let read = UdpSocket::from(queue).recv(&mut [0; 8]).expect("read");
        assert_eq!(read, 3);
        assert!(matches!(queues.ask(3, None), WakeReply::Nothing));
        client.send_to(b"two", to).expect("send");
        std::thread::sleep(SETTLED);
        assert!(!queues.drain_step(false), "it takes no datagram any more");
        assert!(queues.left.is_empty());
    }
}
