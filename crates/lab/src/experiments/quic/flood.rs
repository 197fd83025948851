//! First packets of connections that nobody goes on with.

use std::net::{SocketAddr, UdpSocket};

use rand::{Rng, SeedableRng, rngs::StdRng};

/// How many of them.
pub const PACKETS: usize = 1_000_000;
/// Smaller than a client's first packet may be: servers drop it unread (RFC 9000 §14.1), and read a million of them soon.
const LENGTH: usize = 64;
/// A long header, the fixed bit, an Initial packet (RFC 9000 §17.2.2).
const INITIAL: u8 = 0xc0;
const VERSION_1: [u8; 4] = [0, 0, 0, 1];
const ID_LENGTH: u8 = 8;

/// Sends them from one socket, with an ID each. Returns how many the kernel took.
pub fn send(to: SocketAddr, seed: u64) -> std::io::Result<usize> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.connect(to)?;
    let mut draw = StdRng::seed_from_u64(seed);
    let mut packet = [0; LENGTH];
    packet[0] = INITIAL;
    packet[1..5].copy_from_slice(&VERSION_1);
    packet[5] = ID_LENGTH;
    let mut sent = 0;
    for _ in 0..PACKETS {
        draw.fill_bytes(&mut packet[6..14]);
        sent += usize::from(socket.send(&packet).is_ok());
    }
    Ok(sent)
}
