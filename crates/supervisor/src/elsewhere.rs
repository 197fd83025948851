//! Finds where a worker listens that does not accept on the listeners that it was given.

use std::collections::HashSet;
use std::net::SocketAddr;
use wakeone_kernel::proc::process::{sockets_of, tree};
use wakeone_kernel::proc::waits;
use wakeone_kernel::socket::diag::{self, Which};
use wakeone_model::listener::Protocol;

/// The listeners among the descriptors of a worker and the processes below it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Whereabouts {
    /// One of these processes has a listener that the worker was given.
    pub holds: bool,
    /// A TCP address of its own that it listens on.
    pub elsewhere: Option<SocketAddr>,
}

/// Looks at a worker that was given the listeners with these inodes. It also has the sockets that reserve public addresses,
/// which listen but get no connections.
pub fn look(pid: u32, given: &[u64], reserved: &[u64]) -> Whereabouts {
    let held = held_by_tree(pid);
    let holds = given.iter().any(|inode| held.contains(inode));
    let listening = diag::sockets(Protocol::Tcp, Which::Listening, 0).unwrap_or_default();
    let is_own =
        |inode| held.contains(inode) && !given.contains(inode) && !reserved.contains(inode);
    let own = listening.iter().find(|entry| is_own(&entry.socket.inode));
    Whereabouts {
        holds,
        elsewhere: own.map(|entry| entry.local),
    }
}

/// Formats an address as people write it: the unspecified address is `*`.
pub fn shown(address: SocketAddr) -> String {
    if address.ip().is_unspecified() {
        format!("*:{}", address.port())
    } else {
        address.to_string()
    }
}

/// Whether a worker has one of these listeners in an epoll instance.
pub fn polls(pid: u32, given: &[u64]) -> bool {
    let polls = |pid| {
        let mut given = given.iter();
        given.any(|inode| waits::polls(pid, *inode).unwrap_or(false))
    };
    tree(pid).any(polls)
}

fn held_by_tree(pid: u32) -> HashSet<u64> {
    let sockets = tree(pid).flat_map(|one| sockets_of(one).unwrap_or_default());
    sockets.map(|(_, inode)| inode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use wakeone_kernel::socket::inode_of;

    #[test]
    fn a_listener_that_was_not_given_is_found() {
        let given = TcpListener::bind("127.0.0.1:0").expect("bind");
        let inode = inode_of(&given).expect("inode");
        let seen = look(std::process::id(), &[inode], &[]);
        assert!(seen.holds);
        // Other tests of this program listen as well.
        let other = TcpListener::bind("127.0.0.1:0").expect("bind");
        let seen = look(std::process::id(), &[inode], &[]);
        assert!(seen.elsewhere.is_some());
        drop((given, other));
        assert!(!look(std::process::id(), &[inode], &[]).holds);
    }

    #[test]
    fn every_address_is_a_star() {
        for (address, text) in [
            ("0.0.0.0:3000", "*:3000"),
            ("[::]:3000", "*:3000"),
            ("127.0.0.1:3000", "127.0.0.1:3000"),
        ] {
            assert_eq!(shown(address.parse().expect("address")), text);
        }
    }
}
