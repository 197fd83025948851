//! Listening sockets and the processes that hold them, as they are seen from outside.

use serde::{Deserialize, Serialize};

use crate::address::Address;

/// A transport that connections or datagrams come by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// Multipath TCP: the kernel lets no program choose for it.
    Mptcp,
    /// UDP.
    Udp,
    /// UNIX sockets with connections (SOCK_STREAM, SOCK_SEQPACKET).
    Unix,
}

impl std::fmt::Display for Protocol {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Protocol::Tcp => "tcp",
            Protocol::Mptcp => "mptcp",
            Protocol::Udp => "udp",
            Protocol::Unix => "unix",
        })
    }
}

/// One socket, as the kernel's `sock_diag` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Socket {
    /// Inode: the number that /proc/PID/fd shows for it; 0 for one without a process (a connection not yet accepted).
    pub inode: u64,
    /// Cookie: unique on the machine since boot.
    pub cookie: u64,
    /// Transport.
    pub protocol: Protocol,
    /// Effective user of its maker.
    pub uid: u32,
    /// A listener's accept queue now, in connections; a UDP socket's waiting bytes.
    pub queued: u32,
    /// A listener's backlog; the kernel admits one more.
    pub queue_limit: u32,
    /// Drops of this socket since it was made: overflows of a listener, datagrams without room.
    pub drops: u32,
    /// Receive buffer, in bytes.
    pub receive_buffer_bytes: u32,
}

/// All sockets on one address: one, or a reuseport group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listener {
    /// Where it listens.
    pub address: Address,
    /// Bound network interface, 0 for any.
    pub interface: u32,
    /// Transport.
    pub protocol: Protocol,
    /// Its sockets, by cookie.
    pub sockets: Vec<Socket>,
}

impl Listener {
    /// Its transport and address, for a person: `tcp 127.0.0.1:80`, `unix:/run/app.sock`.
    pub fn title(&self) -> String {
        match self.address {
            Address::Inet(address) => format!("{} {address}", self.protocol),
            Address::Unix(_) => self.address.to_string(),
        }
    }

    /// Whether a socket of this inode is one of them.
    pub fn has(&self, inode: u64) -> bool {
        self.sockets.iter().any(|s| s.inode == inode)
    }
}

/// Why sockets of UDP that have one address are no reuseport group: the kernel does not spread datagrams over them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ungrouped {
    /// None has SO_REUSEPORT; SO_REUSEADDR allowed them to bind.
    AddressOnly,
    /// Some have it.
    Mixed,
    /// All have it, and some got it after bind().
    AfterBind,
    /// They are of different users.
    Users,
    /// Each socket gets each datagram.
    Multicast,
}

impl std::fmt::Display for Ungrouped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::AddressOnly => {
                "its sockets have the address in common by SO_REUSEADDR, and without SO_REUSEPORT they are no group"
            }
            Self::Mixed => "only some of its sockets have SO_REUSEPORT, and the others are in no group",
            Self::AfterBind => {
                "a socket of it got SO_REUSEPORT after bind(), which is too late to join a group"
            }
            Self::Users => "its sockets are of different users, and a group is of one user",
            Self::Multicast => "it is an address of multicast, where each socket gets each datagram",
        })
    }
}

/// The call that a thread is in, as far as it concerns listeners.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wait {
    /// accept() on the socket of this inode.
    Accept(u64),
    /// A receive call on the socket of this inode.
    Receive(u64),
    /// epoll_wait on this descriptor.
    Epoll(i32),
    /// poll or select on a set with these sockets (inodes) in it.
    Poll(Vec<u64>),
    /// poll or select on a set that could not be read.
    PollUnseen,
    /// io_uring_enter.
    IoUring,
    /// A futex: a mutex, a condition, a queue.
    Futex,
    /// A lock that other processes see: flock, fcntl, a System V semaphore.
    Lock,
    /// On a CPU, or waiting for one.
    Running,
    /// Stopped by a signal, a debugger or the freezer.
    Stopped,
    /// In another system call, of this number.
    Other(u64),
    /// It may not be seen.
    Unseen,
}

/// One thread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Thread {
    /// Its id.
    pub tid: u32,
    /// The call it is in.
    pub wait: Wait,
}

/// A socket in an epoll set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Polled {
    /// The epoll descriptor.
    pub epoll: i32,
    /// Inode of the socket.
    pub inode: u64,
    /// The events asked for, EPOLLET and EPOLLEXCLUSIVE among them.
    pub events: u32,
}

/// `EPOLLEXCLUSIVE` (include/uapi/linux/eventpoll.h).
pub const EXCLUSIVE: u32 = 1 << 28;
/// `EPOLLET`.
pub const EDGE: u32 = 1 << 31;

/// A process that holds one of a listener's sockets, or is a child of one that does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// Its parent's.
    pub parent: u32,
    /// Its name (/proc/PID/comm).
    pub name: String,
    /// Inodes of the listener's sockets that it holds, each once.
    pub holds: Vec<u64>,
    /// Its descriptors of those: number and inode.
    #[serde(default)]
    pub descriptors: Vec<(i32, u64)>,
    /// The listener's sockets in its epoll sets.
    pub polls: Vec<Polled>,
    /// It has an io_uring.
    pub rings: bool,
    /// Connections of the listener that it holds.
    pub connections: u32,
    /// Its threads.
    pub threads: Vec<Thread>,
}

impl Process {
    /// Returns the socket of each of its waits: of a thread in a call for it, or of an epoll set that has it.
    pub fn awaited(&self) -> impl Iterator<Item = u64> + '_ {
        let calls = self.threads.iter().flat_map(|thread| match &thread.wait {
            Wait::Accept(inode) | Wait::Receive(inode) => std::slice::from_ref(inode),
            Wait::Poll(inodes) => inodes.as_slice(),
            _ => &[],
        });
        calls.copied().chain(self.polls.iter().map(|one| one.inode))
    }
}

/// All processes of a listener at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ProcessSnapshot {
    /// The processes, by pid.
    pub processes: Vec<Process>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_has_its_own_sockets() {
        let socket = Socket {
            inode: 7,
            cookie: 1,
            protocol: Protocol::Tcp,
            uid: 0,
            queued: 0,
            queue_limit: 128,
            drops: 0,
            receive_buffer_bytes: 0,
        };
        let listener = Listener {
            address: "[::1]:80".parse().expect("an address"),
            interface: 0,
            protocol: Protocol::Tcp,
            sockets: vec![socket],
        };
        assert!(listener.has(7) && !listener.has(8));
        assert_eq!(listener.title(), "tcp [::1]:80");
    }

    #[test]
    fn protocols_are_named_as_targets_name_them() {
        let all = [
            Protocol::Tcp,
            Protocol::Mptcp,
            Protocol::Udp,
            Protocol::Unix,
        ];
        let names = all.map(|one| one.to_string());
        assert_eq!(names, ["tcp", "mptcp", "udp", "unix"]);
    }

    /// /proc/PID/fdinfo shows the events of an epoll set as a number.
    #[test]
    fn flags_are_those_of_the_kernel() {
        assert_eq!((EXCLUSIVE, EDGE), (0x1000_0000, 0x8000_0000));
    }

    #[test]
    fn a_process_waits_by_the_calls_of_its_threads_and_by_its_epoll_sets() {
        let thread = |tid, wait| Thread { tid, wait };
        let polled = |inode| Polled {
            epoll: 5,
            inode,
            events: 1,
        };
        let process = Process {
            pid: 10,
            parent: 1,
            name: "server".into(),
            holds: vec![1, 2, 3, 4, 5, 6],
            descriptors: Vec::new(),
            polls: vec![polled(5)],
            rings: false,
            connections: 0,
            threads: vec![
                thread(10, Wait::Accept(1)),
                thread(11, Wait::Receive(2)),
                thread(12, Wait::Poll(vec![3, 4])),
                thread(13, Wait::IoUring),
            ],
        };
        assert_eq!(process.awaited().collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
    }
}
