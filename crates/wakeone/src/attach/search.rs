//! When to search for servers that are wanted and not there.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

use wakeone_kernel::proc::stat;
use wakeone_kernel::socket::diag::{self, Which};
use wakeone_kernel::socket::unix_diag;
use wakeone_model::listener::Protocol;

/// How long after a change of the machine's listening sockets all processes are searched again, by a walk over /proc.
/// Each further search without another change comes three times as late, up to the longest interval.
const SEARCH_AGAIN: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(60));
/// The longest interval while something is refused: the obstacle may not show in the sockets.
const REFUSED_AGAIN: Duration = Duration::from_secs(8);
/// How often to check whether the sockets changed; the second value if they did not change for long.
const SOCKETS_EVERY: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(1));

/// Sockets are only counted once none has come or gone for so long. To list those that listen, the kernel walks its whole tables,
/// some milliseconds for all protocols, in each network namespace.
const CALM: Duration = Duration::from_secs(2);
/// They are listed so often all the same: one may have come in the place of another. The second value where it is known which
/// processes are there, and none of them came or went.
const LIST_EVERY: (Duration, Duration) = (Duration::from_secs(8), Duration::from_secs(60));

/// When to search for servers: soon after sockets came or went, and ever more seldom while none do.
#[derive(Debug)]
pub(super) struct Search {
    /// A hash of the machine's listening sockets at the last look.
    sockets: u64,
    /// How many sockets there were at the last look; `None`: nobody knows.
    count: Option<Vec<u64>>,
    /// The processes that were in the network namespace, if that is known.
    inhabitants: Vec<u32>,
    listed: Option<Instant>,
    /// Whether they are to be listed at this look.
    lists: bool,
    looked: Option<Instant>,
    searched: Option<Instant>,
    wait: Duration,
}

impl Search {
    pub fn new() -> Self {
        Self {
            sockets: 0,
            count: None,
            inhabitants: Vec::new(),
            listed: None,
            lists: true,
            looked: None,
            searched: None,
            wait: SEARCH_AGAIN.0,
        }
    }

    /// Whether it is time to see what listens, and that may differ from the last time: `count` counts the sockets, and `inhabitants`
    /// are the processes in the network namespace, if that is known. `steered`: some server there is steered already.
    pub fn may_be_due(
        &mut self,
        now: Instant,
        inhabitants: &[u32],
        steered: bool,
        count: impl FnOnce() -> Option<Vec<u64>>,
    ) -> bool {
        let every = self.wait.clamp(SOCKETS_EVERY.0, SOCKETS_EVERY.1);
        if !has_passed(now, self.looked, every) {
            return false;
        }
        self.looked = Some(now);
        let count = count();
        let stay = inhabitants == self.inhabitants;
        let is_same = stay && count.is_some() && count == self.count;
        let every = match inhabitants {
            _ if self.wait <= CALM => Duration::ZERO,
            [] if is_same => LIST_EVERY.0,
            [_, ..] if is_same => LIST_EVERY.1,
            // Its server's connections come and go.
            [_, ..] if stay && steered => LIST_EVERY.0,
            _ => Duration::ZERO,
        };
        self.count = count;
        self.inhabitants = inhabitants.to_vec();
        self.lists = has_passed(now, self.listed, every);
        self.lists || has_passed(now, self.searched, self.wait)
    }

    /// Whether to search now, after [`Search::may_be_due`] said so; `sockets` returns the hash of the sockets that listen.
    pub fn is_due(&mut self, now: Instant, refused: bool, sockets: impl FnOnce() -> u64) -> bool {
        if self.lists {
            self.listed = Some(now);
        }
        if self.lists && std::mem::replace(&mut self.sockets, sockets()) != self.sockets {
            self.wait = SEARCH_AGAIN.0;
        } else if !has_passed(now, self.searched, self.wait) {
            return false;
        } else {
            let longest = if refused {
                REFUSED_AGAIN
            } else {
                SEARCH_AGAIN.1
            };
            self.wait = (self.wait * 3).min(longest);
        }
        self.searched = Some(now);
        true
    }
}

fn has_passed(now: Instant, since: Option<Instant>, time: Duration) -> bool {
    since.is_none_or(|since| now.duration_since(since) >= time)
}

/// Counts the sockets of the network namespace that a process is in, or this thread: some microseconds. A socket counts from
/// bind() or listen() on.
pub(super) fn count(pid: Option<u32>) -> Option<Vec<u64>> {
    let who = pid.map_or("thread-self".to_owned(), |pid| pid.to_string());
    let of = |file: &str| stat::text(format!("/proc/{who}/net/{file}")).ok();
    let six = of("sockstat6").unwrap_or_default();
    Some(counted(&(of("sockstat")? + &six)))
}

/// The numbers of what is in use: `sockets: used 9`, `TCP: inuse 5 orphan 0 …`. Others in the line are of the whole machine.
fn counted(text: &str) -> Vec<u64> {
    let number = |line: &str| line.split_whitespace().nth(2)?.parse().ok();
    text.lines().filter_map(number).collect()
}

/// Returns a hash of the listening sockets of these protocols, which changes when one comes or goes.
pub(super) fn sockets(protocols: &[Protocol]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for protocol in protocols {
        if *protocol == Protocol::Unix {
            for one in unix_diag::listening().unwrap_or_default() {
                (one.name, one.socket.cookie).hash(&mut hasher);
            }
            continue;
        }
        for entry in diag::sockets(*protocol, Which::Listening, 0).unwrap_or_default() {
            (entry.local, entry.socket.cookie).hash(&mut hasher);
        }
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_searched_seldom_while_no_socket_comes_or_goes() {
        let mut search = Search::new();
        let start = Instant::now();
        let mut due = |ms: u64, sockets: u64| {
            let at = start + Duration::from_millis(ms);
            search.may_be_due(at, &[], false, || None) && search.is_due(at, false, || sockets)
        };
        assert!(due(0, 7), "the first time");
        assert!(!due(100, 7));
        // Searches in a minute of four looks a second: after 0.25 s, 0.75 s, 2.25 s and so on.
        let searches = (1..240).filter(|n| due(n * 250, 7)).count();
        assert_eq!(searches, 5);
        assert!(due(61_000, 8), "a socket came");
        // A refused server may be ready soon, with the same socket as at its start.
        assert!(due(61_250, 8));
        assert!(!due(61_500, 8));
    }

    #[test]
    fn sockets_are_listed_seldom_while_their_number_stays() {
        let mut search = Search::new();
        let start = Instant::now();
        let mut listed = 0;
        let mut due = |ms: u64, inhabitants: &[u32], count: u64, sockets: u64| {
            let hash = || {
                listed += 1;
                sockets
            };
            let at = start + Duration::from_millis(ms);
            let due = search.may_be_due(at, inhabitants, true, || Some(vec![count]))
                && search.is_due(at, false, hash);
            (due, listed)
        };
        assert_eq!(due(0, &[], 5, 7), (true, 1));
        let last = (1..200).map(|n| due(n * 250, &[], 5, 7)).last();
        let before = last.expect("looks").1;
        assert!((5..20).contains(&before), "{before} in 50 s");
        assert_eq!(due(60_000, &[], 6, 8), (true, before + 1));
        // One that came in another's place is seen all the same.
        assert!((1..=200).any(|n| due(60_000 + n * 250, &[], 6, 9).0));
        // More seldom where it is known that no process came or went.
        let last = (1..200).map(|n| due(120_000 + n * 250, &[3], 6, 9)).last();
        let before = last.expect("looks").1;
        assert_eq!(due(175_000, &[3], 6, 9).1, before);
        assert_eq!(due(176_000, &[3, 4], 6, 10), (true, before + 1));
        // There, connections of the server are no reason.
        let last = (1..100)
            .map(|n| due(180_000 + n * 250, &[3, 4], n, 10))
            .last();
        let of_load = last.expect("looks").1 - before - 1;
        assert!((2..8).contains(&of_load), "{of_load} in 25 s");
    }

    #[test]
    fn sockets_are_counted() {
        let text = "sockets: used 9\nTCP: inuse 5 orphan 0 tw 2 alloc 7 mem 1\nUDP: inuse 1 mem 0\nrubbish\nFRAG: inuse x memory 0\n";
        assert_eq!(counted(text), [9, 5, 1]);
        assert!(count(Some(std::process::id())).expect("sockets").len() > 3);
        assert!(count(None).expect("sockets").len() > 3);
    }
}
