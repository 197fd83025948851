//! The request to the mover, and its answer: words of 64 bits on a socket between two processes of the same binary. The
//! descriptors that it needs come with the request.

/// Most descriptors that come with one request (`SCM_MAX_FD` in include/net/scm.h).
pub(super) const MOST_DESCRIPTORS: usize = 253;
/// Most entries that are taken out at a time.
pub(super) const MOST_ENTRIES: usize = 1024;
/// Most threads that are looked at once more before the listener is closed.
pub(super) const MOST_THREADS: usize = 64;

/// Words before the entries.
pub(super) const HEAD: usize = 7;
/// Words of an entry: where its set is among the descriptors, its number, events, data.
pub(super) const ENTRY: usize = 4;
/// Words of a thread: its process, its id, the hash of its line.
pub(super) const THREAD: usize = 3;
/// Most words of a request.
pub(super) const MOST_WORDS: usize = HEAD + ENTRY * MOST_ENTRIES + THREAD * MOST_THREADS;

/// The head of a request. Its entries and its threads follow.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head {
    /// Only put the entries back: a mover before this one ended in the middle.
    pub only_back: bool,
    pub backlog: i32,
    pub key: u32,
    pub fate: u64,
    pub threads: usize,
    pub entries: usize,
    /// The descriptor after the listener is the array of sockets, and then comes the table, which has its agent's heartbeat at
    /// this byte.
    pub heartbeat_at: Option<u32>,
}

impl Head {
    pub fn words(self) -> [u64; HEAD] {
        [
            self.only_back.into(),
            u64::from(self.backlog.cast_unsigned()),
            self.key.into(),
            self.fate,
            self.threads as u64,
            self.entries as u64,
            self.heartbeat_at.map_or(0, |at| u64::from(at) + 1),
        ]
    }

    /// The reverse. `None`: it does not fit the request's length. Allocates nothing.
    pub fn of(words: &[u64]) -> Option<Self> {
        let [only_back, backlog, key, fate, threads, entries, place] =
            *words.first_chunk::<HEAD>()?;
        let head = Self {
            only_back: only_back != 0,
            backlog: (backlog as u32).cast_signed(),
            key: key as u32,
            fate,
            threads: usize::try_from(threads).ok()?,
            entries: usize::try_from(entries).ok()?,
            heartbeat_at: match place {
                0 => None,
                place => Some(u32::try_from(place - 1).ok()?),
            },
        };
        let fits = head.threads <= MOST_THREADS && head.entries <= MOST_ENTRIES;
        (fits && words.len() == HEAD + ENTRY * head.entries + THREAD * head.threads).then_some(head)
    }
}

/// A hash of a line (FNV-1a), by which the mover knows it again.
pub(super) fn hash(line: &[u8]) -> u64 {
    line.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// The line of a thread on a CPU, or one that waits for a CPU.
pub(super) const RUNNING: &[u8] = b"running\n";

/// Fates that a test has us meet between shutdown and listen, by `WAKEONE_TEST_DIE`.
pub(super) mod fate {
    /// The agent is killed, and the mover with it: `moving`.
    pub const BOTH_DIE: u64 = 1;
    /// The agent stops, and the mover is killed: `stopped`.
    pub const STOPS: u64 = 2;
    /// The listener does not listen again: `refused`.
    pub const REFUSED: u64 = 3;
    /// The agent alone is killed: `agent`.
    pub const AGENT_DIES: u64 = 4;
    /// The mover alone is killed: `mover`.
    pub const MOVER_DIES: u64 = 5;
    /// The listener stays closed for a while, so that a worker surely sees it if it can: `slow`.
    pub const IS_SLOW: u64 = 6;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn requests_are_read_back(backlog in any::<i32>(), key in any::<u32>(), threads in 0..=MOST_THREADS, entries in 0..=MOST_ENTRIES, heartbeat_at: Option<u32>) {
            let head = Head { only_back: false, backlog, key, fate: 0, threads, entries, heartbeat_at };
            let mut words = head.words().to_vec();
            words.resize(HEAD + ENTRY * entries + THREAD * threads, 0);
            let again = Head::of(&words).expect("a request");
            prop_assert_eq!((again.backlog, again.key, again.heartbeat_at), (backlog, key, heartbeat_at));
            words.push(0);
            prop_assert!(Head::of(&words).is_none());
        }

        #[test]
        fn no_words_break_the_mover(words in proptest::collection::vec(any::<u64>(), 0..40)) {
            let _ = Head::of(&words);
        }
    }
}
