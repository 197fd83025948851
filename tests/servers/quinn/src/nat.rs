//! A relay between clients and server, which stands for a NAT. Each client has an outside port there, and gets another one
//! when the NAT forgets it. The client does not know.

use std::collections::HashMap;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use crate::any_port;

/// No datagram of these clients or servers is longer.
const LONGEST: usize = 2048;

/// Starts a relay to a server, which ends with the process. After `until_forgotten` it gives all clients new outside
/// ports, once. Returns the address that clients send to.
pub fn before(server: SocketAddr, until_forgotten: Duration) -> std::io::Result<SocketAddr> {
    let inside = UdpSocket::bind(any_port(server))?;
    inside.set_nonblocking(true)?;
    let at = inside.local_addr()?;
    std::thread::spawn(move || relay(&inside, server, Instant::now() + until_forgotten));
    Ok(at)
}

fn relay(inside: &UdpSocket, server: SocketAddr, forgotten_at: Instant) {
    let mut outside: HashMap<SocketAddr, UdpSocket> = HashMap::new();
    let (mut bytes, mut forgotten) = ([0; LONGEST], false);
    loop {
        if !forgotten && Instant::now() >= forgotten_at {
            outside
                .values_mut()
                .for_each(|own| *own = outside_port(server));
            forgotten = true;
        }
        let mut idle = true;
        while let Ok((length, client)) = inside.recv_from(&mut bytes) {
            let own = outside
                .entry(client)
                .or_insert_with(|| outside_port(server));
            let _ = own.send(&bytes[..length]);
            idle = false;
        }
        for (client, own) in &outside {
            while let Ok(length) = own.recv(&mut bytes) {
                let _ = inside.send_to(&bytes[..length], client);
                idle = false;
            }
        }
        if idle {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

fn outside_port(server: SocketAddr) -> UdpSocket {
    let own = UdpSocket::bind(any_port(server)).expect("a port");
    own.connect(server).expect("connect");
    own.set_nonblocking(true).expect("nonblocking");
    own
}
