//! Whether a worker reads its UDP socket. The kernel does not count reads, so they are inferred from the datagrams
//! that wait.

/// The least that a waiting datagram takes in memory, in bytes: its `sk_buff` and `skb_shared_info` alone are more.
const LEAST_BYTES: u64 = 512;

/// The last sample of a slot's sockets, and how often a read was inferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reads {
    waiting_bytes: u64,
    placed: u64,
    seen: u64,
}

impl Reads {
    /// Notes a look: `waiting_bytes` now, and how many datagrams were `placed` in the queue so far, in all. Returns
    /// the number of looks that proved a read. In such a look fewer bytes wait than before plus the least that came
    /// meanwhile.
    ///
    /// A read may go unseen, since datagrams take more than the least, and the kernel settles reads in portions. Every
    /// read that is counted did happen.
    pub fn note(&mut self, waiting_bytes: u64, placed: u64) -> u64 {
        let came = placed.saturating_sub(self.placed) * LEAST_BYTES;
        if waiting_bytes < self.waiting_bytes.saturating_add(came) {
            self.seen += 1;
        }
        self.waiting_bytes = waiting_bytes;
        self.placed = self.placed.max(placed);
        self.seen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_shows_in_what_waits() {
        for (name, looks) in [
            ("nothing comes", &[(0, 0, 0), (0, 0, 0)][..]),
            (
                "comes and waits",
                &[(768, 1, 0), (1536, 2, 0), (1536, 2, 0)],
            ),
            ("comes, is read", &[(768, 1, 0), (0, 1, 1), (0, 1, 1)]),
            ("is read between two looks", &[(0, 1, 1), (0, 5, 2)]),
            ("one of two read", &[(1536, 2, 0), (768, 2, 1)]),
            ("one came, one was read", &[(768, 1, 0), (768, 2, 1)]),
            ("a full buffer takes no more", &[(4608, 6, 0), (4608, 6, 0)]),
            ("large ones come", &[(4096, 1, 0), (8192, 2, 0)]),
            (
                "a count that lags",
                &[(768, 1, 0), (768, 0, 0), (768, 1, 0)],
            ),
        ] {
            let mut reads = Reads::default();
            for (at, (waiting, placed, seen)) in looks.iter().enumerate() {
                assert_eq!(reads.note(*waiting, *placed), *seen, "{name}, look {at}");
            }
        }
    }
}
