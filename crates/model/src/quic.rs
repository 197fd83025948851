//! Whether the datagrams that come to a socket are QUIC's, by their first bytes (RFC 8999, RFC 9000 §17). Only long headers
//! tell: each connection begins with some, and their version is in clear. The bytes are a stranger's, and may be anything.

use serde::{Deserialize, Serialize};

/// The most bytes of a datagram's contents that are looked at: a long header up to the length of the sender's ID, with a
/// receiver's ID of the longest kind before it.
pub const HEAD_BYTES: usize = 6 + LONGEST_ID + 1;
/// An ID of version 1 or 2 has no more bytes (RFC 9000 §17.2). Other versions agree so far.
const LONGEST_ID: usize = 20;
/// A client fills its first datagrams up to this length (RFC 9000 §14.1).
const FILLED: usize = 1200;
/// Fewer packets than this may be an accident. One client sends as many when it begins a connection.
const ENOUGH: u64 = 3;
/// The bit of the first byte that is set in a long header. The next one is set as a rule, and at random where both sides agree on
/// that (RFC 9287).
const LONG: u8 = 0x80;
/// The same bit, and what it is in a short header.
pub const SHORT: (u8, u8) = (LONG, 0);

/// Counts of the datagrams to a socket whose first bit is that of a long header. The others tell nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Datagrams {
    /// Those with a long header of QUIC, from a client.
    pub long: u64,
    /// All others of them.
    pub others: u64,
}

impl Datagrams {
    /// Counts one of this length with these first bytes.
    pub fn count(&mut self, head: &[u8], length: usize) {
        match has_long_header(head, length) {
            true => self.long += 1,
            false => self.others += 1,
        }
    }

    /// Whether they are QUIC's. A scanner's few among those of another protocol do not count.
    pub fn are_quic(&self) -> bool {
        self.long >= ENOUGH && self.long / 2 >= self.others
    }
}

/// Whether a datagram of this length, which begins with these bytes, has a long header of QUIC as a client sends it.
pub fn has_long_header(head: &[u8], length: usize) -> bool {
    let parsed = || {
        let first = *head.first()?;
        let version = u32::from_be_bytes(*head.get(1..5)?.first_chunk()?);
        let to = usize::from(*head.get(5)?);
        let from = usize::from(*head.get(6 + to)?);
        Some((first, version, to, from))
    };
    parsed().is_some_and(|(first, version, to, from)| {
        let is_filled = length >= FILLED || !must_fill(first, version);
        // At least the shortest sealed payload follows the IDs.
        let is_whole = length >= 7 + to + from + LONGEST_ID;
        first & LONG != 0
            && to.max(from) <= LONGEST_ID
            && is_whole
            && is_filled
            && is_known(version)
    })
}

/// Version 1 or 2, a draft of version 1, or one that asks for a negotiation (RFC 9000 §15).
fn is_known(version: u32) -> bool {
    matches!(version, V1 | V2 | 0xff00_0001..=0xff00_00ff) || asks(version)
}

const V1: u32 = 1;
const V2: u32 = 0x6b33_43cf;

fn asks(version: u32) -> bool {
    version & 0x0f0f_0f0f == 0x0a0a_0a0a
}

/// Whether the datagram must be filled: an Initial packet, or the first one of a version that is to be negotiated.
fn must_fill(first: u8, version: u32) -> bool {
    let kind = first >> 4 & 3;
    asks(version) || kind == u8::from(version == V2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn head(first: u8, version: u32, to: u8, from: u8) -> Vec<u8> {
        let ids = |length: u8| vec![0x5a; length.into()];
        [
            &[first][..],
            &version.to_be_bytes(),
            &[to],
            &ids(to),
            &[from],
            &ids(from),
        ]
        .concat()
    }

    #[test]
    fn packets_of_clients() {
        let initial = head(0xC3, V1, 8, 0);
        assert!(has_long_header(&initial, 1200));
        assert!(!has_long_header(&initial, 1199), "not filled");
        assert!(has_long_header(&head(0x83, V1, 8, 0), 1200), "greased");
        assert!(has_long_header(&head(0xD0, V2, 8, 8), 1252));
        assert!(!has_long_header(&head(0xD0, V2, 8, 8), 1199));
        // A Handshake packet, alone.
        assert!(has_long_header(&head(0xE0, V1, 20, 20), 67));
        assert!(!has_long_header(&head(0xE0, V1, 20, 20), 66));
        assert!(has_long_header(&head(0xC0, 0xff00_001d, 8, 5), 1200));
        assert!(has_long_header(&head(0xF0, 0x1a2a_3a4a, 8, 8), 1200));
        assert!(!has_long_header(&head(0xF0, 0x1a2a_3a4a, 8, 8), 1199));
    }

    #[test]
    fn what_is_none_of_them() {
        for (first, version, to, from) in [
            (0x43, V1, 8, 8),  // a short header
            (0xC3, 0, 8, 8),   // a server's negotiation
            (0xC3, 3, 8, 8),   // nobody's version
            (0xC3, V1, 21, 8), // IDs that are too long
            (0xC3, V1, 8, 21),
        ] {
            let head = head(first, version, to, from);
            assert!(!has_long_header(&head, 1200), "{head:x?}");
        }
    }

    #[test]
    fn a_few_among_others_are_a_scanner() {
        let of = |long, others| Datagrams { long, others }.are_quic();
        assert!(of(3, 0) && of(3, 1) && of(400, 200));
        assert!(!of(2, 0) && !of(3, 2) && !of(400, 201) && !of(0, 0));
    }

    /// A query of DNS with any ID, flags and number of questions.
    fn query() -> impl Strategy<Value = Vec<u8>> {
        let name = proptest::collection::vec(any::<u8>(), 0..60);
        (any::<u16>(), any::<u16>(), 1..4_u16, name).prop_map(|(id, flags, questions, name)| {
            [
                &id.to_be_bytes()[..],
                &flags.to_be_bytes(),
                &questions.to_be_bytes(),
                &[0; 6],
                &name,
            ]
            .concat()
        })
    }

    proptest! {
        #[test]
        fn no_query_of_dns_is_one(bytes in query()) {
            prop_assert!(!has_long_header(&bytes, bytes.len()));
        }

        /// Nothing is read beyond the bytes that are there, and no more is needed than is asked for.
        #[test]
        fn foreign_bytes_are_survived(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..80),
            version in prop_oneof![Just(V1), Just(V2), any::<u32>()],
            (to, from) in (0..24_u8, 0..24_u8),
            length: u16,
        ) {
            let mut whole = head(0xE0, version, to, from);
            whole.append(&mut bytes);
            for length in [usize::from(length), whole.len()] {
                let cut = &whole[..whole.len().min(HEAD_BYTES)];
                prop_assert_eq!(has_long_header(cut, length), has_long_header(&whole, length));
                for end in 0..cut.len() {
                    let _ = has_long_header(&cut[..end], length);
                }
            }
        }

        #[test]
        fn random_bytes_are_none(bytes in proptest::collection::vec(any::<u8>(), 0..80), length: u16) {
            prop_assert!(!has_long_header(&bytes, length.into()));
        }
    }
}
