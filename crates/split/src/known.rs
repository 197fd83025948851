//! The sockets that a group has ever had, by their inodes: a descendant may still hold one.

use std::collections::HashSet;

use wakeone_kernel::proc::waits::Processes;
use wakeone_kernel::socket::diag::{self, Which};
use wakeone_model::listener::Protocol;

/// So many inodes are kept without a look at which are in use.
const FEW: usize = 4096;

/// The inodes of a group's sockets. A worker can make the broker note another one with each question, so those that
/// nobody holds are forgotten when there are many. A queue that was not accepted is noted too: its process was sent
/// the descriptor, and may keep it.
#[derive(Debug)]
pub struct KnownSockets {
    shared: u64,
    queues: HashSet<u64>,
    prune_at: usize,
}

impl KnownSockets {
    /// Only the shared socket.
    pub fn of(shared: u64) -> Self {
        Self {
            shared,
            queues: HashSet::new(),
            prune_at: FEW,
        }
    }

    /// Whether this is one of them.
    pub fn contains(&self, inode: u64) -> bool {
        inode == self.shared || self.queues.contains(&inode)
    }

    /// Whether there was any queue yet.
    pub fn has_queues(&self) -> bool {
        !self.queues.is_empty()
    }

    /// Notes a queue. `in_use` tells which sockets there are; it is asked when there are many queues.
    pub fn insert(&mut self, queue: u64, in_use: impl FnOnce() -> HashSet<u64>) {
        if self.queues.len() >= self.prune_at {
            let in_use = in_use();
            self.queues.retain(|inode| in_use.contains(inode));
            // If most are in use, the next look is far away.
            self.prune_at = FEW.max(2 * self.queues.len());
        }
        self.queues.insert(queue);
    }
}

/// The sockets that processes hold, ours included, and those that can be found by their port. The latter may be on the
/// way to a process, or be held by one that we cannot see.
pub fn in_use(port: u16) -> HashSet<u64> {
    let mut all: HashSet<u64> = Processes::read().held.iter().map(|one| one.inode).collect();
    let bound = diag::sockets(Protocol::Udp, Which::Listening, port).unwrap_or_default();
    all.extend(bound.iter().map(|entry| entry.socket.inode));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_queues_in_use_are_kept_when_there_are_many() {
        let mut known = KnownSockets::of(1);
        let kept = HashSet::from([2, 3]);
        for inode in 2..100_000 {
            known.insert(inode, || kept.clone());
            assert!(known.queues.len() <= FEW);
        }
        for inode in [1, 2, 3, 99_999] {
            assert!(known.contains(inode), "{inode}");
        }
    }

    #[test]
    fn a_look_at_those_in_use_is_rare() {
        let mut known = KnownSockets::of(1);
        let mut looks = 0;
        for inode in 2..100_000 {
            known.insert(inode, || {
                looks += 1;
                (2..inode).collect()
            });
        }
        assert!(looks < 10, "{looks}");
        assert!(known.contains(2));
    }

    #[test]
    fn a_socket_that_we_hold_is_in_use() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("bind");
        let inode = wakeone_kernel::socket::inode_of(&socket).expect("inode");
        assert!(in_use(0).contains(&inode));
    }
}
