//! Addresses on which the server listens, but whose queue stays as it is: the reason for each, and what to do
//! instead.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use wakeone_kernel::proc::process::{children, sockets_of};
use wakeone_kernel::socket::diag::{self, Which};
use wakeone_model::listener::Protocol;

/// How often to look: the first address is reported within a second.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// An address is reported once it was there for this long: a server that opens a socket for each worker opens them
/// one by one.
const THERE_FOR: Duration = Duration::from_millis(500);
/// A server is a tree of at most this many processes; of a larger one, only a part is looked at.
const MOST_PROCESSES: usize = 1024;

/// Why a queue is left alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Why {
    /// There is a socket for each worker already.
    OneEach(usize),
    /// A single process has the only socket.
    Alone(u32),
    /// It may still be split.
    Waits,
    /// Several processes share the socket, and the library did not see how it was opened.
    Unknown,
}

/// The sockets of an address, and the processes that hold them.
#[derive(Debug, Default)]
struct Seen {
    inodes: HashSet<u64>,
    holders: HashSet<u32>,
}

/// Looks at the server's listeners, and reports each address once.
#[derive(Debug)]
pub struct Unsplit {
    looked: Instant,
    since: HashMap<SocketAddr, Instant>,
    told: HashSet<(SocketAddr, bool)>,
}

impl Unsplit {
    /// Makes one that has seen nothing yet.
    pub fn new() -> Self {
        Self {
            looked: Instant::now(),
            since: HashMap::new(),
            told: HashSet::new(),
        }
    }

    /// The addresses to report now. `known`: the library reported this socket and it may be split. `split`: it is
    /// split.
    pub fn look(
        &mut self,
        server: u32,
        known: impl Fn(u64) -> bool,
        split: impl Fn(SocketAddr) -> bool,
    ) -> Vec<(SocketAddr, Why)> {
        if self.looked.elapsed() < LOOK_EVERY {
            return Vec::new();
        }
        self.looked = Instant::now();
        let mut news = Vec::new();
        for (address, seen) in listening(server) {
            let since = *self.since.entry(address).or_insert_with(Instant::now);
            if split(address) {
                // Its queues close one by one when the server ends, which is no news.
                self.told.insert((address, true));
                continue;
            }
            if since.elapsed() < THERE_FOR {
                continue;
            }
            let why = seen.why(&known);
            if self.told.insert((address, why == Why::Waits)) {
                news.push((address, why));
            }
        }
        news
    }

    /// Whether the server was seen to listen at all.
    pub fn has_seen_any(&self) -> bool {
        !self.since.is_empty()
    }
}

impl Seen {
    fn why(&self, known: impl Fn(u64) -> bool) -> Why {
        if self.inodes.iter().copied().any(known) {
            return Why::Waits;
        }
        let mut holders = self.holders.iter();
        match (self.inodes.len(), holders.next(), holders.next()) {
            (1, Some(only), None) => Why::Alone(*only),
            (1, ..) => Why::Unknown,
            (sockets, ..) => Why::OneEach(sockets),
        }
    }
}

impl Why {
    /// The sentence for the log, and for `--split=check`.
    pub fn told(&self, address: SocketAddr) -> String {
        let attach = format!("`wakeone attach {address}` steers them");
        match self {
            Self::OneEach(sockets) => format!(
                "{address} is left alone: the server opens a socket for each worker itself ({sockets} now, with SO_REUSEPORT); {attach}"
            ),
            Self::Alone(pid) => format!(
                "{address} is left alone: process {pid} alone has its socket, and opened it with SO_REUSEPORT or without the library; where it is one worker of several `wakeone attach {address}` steers them, else `wakeone run -w N -l {address} -- …` starts several"
            ),
            Self::Waits => format!(
                "{address} is not split yet: only the process that opened it listens; each other process that begins to wait for connections there gets a queue of its own"
            ),
            Self::Unknown => format!(
                "{address} is left alone: its socket was opened with SO_REUSEPORT, or without the library; `wakeone doctor {address}` tells how the server takes connections"
            ),
        }
    }
}

/// The TCP addresses on which a server and its processes listen.
fn listening(server: u32) -> BTreeMap<SocketAddr, Seen> {
    let mut held: HashMap<u64, Vec<u32>> = HashMap::new();
    let mut tree = vec![server];
    tree.extend(children(std::process::id())); // those whose parent has ended
    let mut next = 0;
    while next < tree.len() && next < MOST_PROCESSES {
        let pid = tree[next];
        for (_, inode) in sockets_of(pid).unwrap_or_default() {
            held.entry(inode).or_default().push(pid);
        }
        tree.extend(children(pid));
        next += 1;
    }
    let mut found: BTreeMap<SocketAddr, Seen> = BTreeMap::new();
    for entry in diag::sockets(Protocol::Tcp, Which::Listening, 0).unwrap_or_default() {
        if let Some(holders) = held.get(&entry.socket.inode) {
            let seen = found.entry(entry.local).or_default();
            seen.inodes.insert(entry.socket.inode);
            seen.holders.extend(holders);
        }
    }
    found
}

/// How many sockets listen at an address.
pub fn sockets_at(address: SocketAddr) -> usize {
    let all = diag::sockets_at(Protocol::Tcp, Which::Listening, address).unwrap_or_default();
    all.iter().filter(|entry| entry.local == address).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(inodes: &[u64], holders: &[u32]) -> Seen {
        Seen {
            inodes: inodes.iter().copied().collect(),
            holders: holders.iter().copied().collect(),
        }
    }

    #[test]
    fn each_reason_names_what_to_do() {
        let address = "127.0.0.1:80".parse().expect("address");
        let table = [
            (
                seen(&[1, 2], &[7, 8]),
                Why::OneEach(2),
                "wakeone attach 127.0.0.1:80",
            ),
            (
                seen(&[1], &[7]),
                Why::Alone(7),
                "wakeone run -w N -l 127.0.0.1:80",
            ),
            (
                seen(&[1], &[7, 8]),
                Why::Unknown,
                "wakeone doctor 127.0.0.1:80",
            ),
            (seen(&[9], &[7]), Why::Waits, "gets a queue of its own"),
        ];
        for (seen, why, next) in table {
            assert_eq!(seen.why(|inode| inode == 9), why);
            assert!(why.told(address).contains(next), "{why:?}");
        }
    }
}
