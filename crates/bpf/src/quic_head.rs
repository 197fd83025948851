//! `bpf/quic.h` compiled for this machine: the functions that read packets of QUIC in the kernel. Only tests use them here.

/// `struct wakeone_quic_id`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Id([u64; 3]);

/// `struct wakeone_quic_packet`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Packet {
    id: Id,
    is_long: u32,
    begins: u32,
    is_whole: u32,
}

unsafe extern "C" {
    fn wakeone_native_quic(bytes: *const u8, length: u32, packet: *mut Packet);
    fn wakeone_native_quic_cut(id: *mut Id, length: u32);
    fn wakeone_native_quic_token(id: *const Id) -> u32;
    fn wakeone_native_quic_lengths(lengths: u32, length: u32) -> u32;
}

fn read(bytes: &[u8]) -> Packet {
    let mut packet = Packet::default();
    // SAFETY: the function reads no more than the bytes that there are, and writes one packet.
    unsafe { wakeone_native_quic(bytes.as_ptr(), bytes.len() as u32, &mut packet) };
    packet
}

/// The ID of these bytes: as many as there are, then zeros, and their number in the last one.
fn id_of(bytes: &[u8]) -> Id {
    let mut all = [0; 24];
    all[..bytes.len()].copy_from_slice(bytes);
    all[23] = bytes.len() as u8;
    Id(std::array::from_fn(|word| {
        u64::from_le_bytes(all[8 * word..8 * word + 8].try_into().expect("8 bytes"))
    }))
}

/// Cuts the first 20 bytes of a short header's rest to an ID.
fn cut(bytes: [u8; 20], length: u32) -> Id {
    let Id(mut words) = id_of(&bytes);
    words[2] &= u64::MAX >> 8;
    let mut id = Id(words);
    // SAFETY: the function changes one ID.
    unsafe { wakeone_native_quic_cut(&mut id, length) };
    id
}

mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The same, as RFC 8999 and RFC 9000 tell it.
    fn expected(bytes: &[u8]) -> Option<(bool, bool, Option<Id>)> {
        let first = *bytes.first()?;
        if first & 0x80 == 0 {
            return (bytes.len() >= 21).then_some((false, false, None));
        }
        let version = u32::from_be_bytes(bytes.get(1..5)?.try_into().ok()?);
        let length = usize::from(*bytes.get(5)?);
        bytes.get(25)?;
        let handshake = match version {
            1 => Some(2),
            0x6b33_43cf => Some(3),
            _ => None,
        };
        let begins = handshake != Some(first >> 4 & 3);
        let id = (length <= 20).then(|| id_of(&bytes[6..6 + length]));
        Some((true, begins, id))
    }

    fn any_packet() -> impl Strategy<Value = Vec<u8>> {
        let version = prop_oneof![Just(1_u32), Just(0x6b33_43cf), any::<u32>()];
        let rest = proptest::collection::vec(any::<u8>(), 0..60);
        (any::<u8>(), version, any::<u8>(), rest).prop_map(|(first, version, length, rest)| {
            let length = if length < 200 { length % 22 } else { length };
            [&[first][..], &version.to_be_bytes(), &[length], &rest].concat()
        })
    }

    fn is_as_expected(bytes: &[u8]) {
        let packet = read(bytes);
        let Some((is_long, begins, id)) = expected(bytes) else {
            return assert_eq!(packet.is_whole, 0);
        };
        assert_eq!(packet.is_long != 0, is_long);
        assert_eq!(packet.begins != 0, begins);
        assert_eq!(packet.is_whole != 0, !is_long || id.is_some());
        if let Some(id) = id {
            assert_eq!(packet.id, id);
        }
    }

    #[test]
    fn packets_survive_foreign_bytes() {
        let long = [&[0xc3, 0, 0, 0, 1, 8][..], &[0x5a; 40]].concat();
        crate::foreign::survives("quic", &[long, vec![0x43; 40]], is_as_expected);
    }

    proptest! {
        #[test]
        fn packets_are_read_as_the_documents_tell(bytes in any_packet()) {
            is_as_expected(&bytes);
        }

        #[test]
        fn an_id_has_its_bytes_its_length_and_nothing_else(bytes: [u8; 20], length in 0..=20_u32) {
            let id = cut(bytes, length);
            prop_assert_eq!(id, id_of(&bytes[..length as usize]));
            // SAFETY: the function reads one ID.
            let token = unsafe { wakeone_native_quic_token(&id) };
            let expected = match length {
                0..3 => 0,
                _ => u32::from(u16::from_be_bytes([bytes[1], bytes[2]])),
            };
            prop_assert_eq!(token, expected);
        }

        /// The last four lengths are known, each once.
        #[test]
        fn lengths_are_those_that_came_last(come in proptest::collection::vec(1..=20_u8, 0..30)) {
            let (mut packed, mut known) = (0, Vec::<u8>::new());
            for length in come {
                // SAFETY: numbers in, a number out.
                packed = unsafe { wakeone_native_quic_lengths(packed, length.into()) };
                if !known.contains(&length) {
                    known.insert(0, length);
                    known.truncate(4);
                }
                let mut bytes = [0; 4];
                bytes[..known.len()].copy_from_slice(&known);
                prop_assert_eq!(packed, u32::from_le_bytes(bytes));
            }
        }
    }
}
