//! An example of a UDP server on Wakeone: it answers every DNS question for an address with 192.0.2.1.
//!
//! Alone it opens a socket for each thread, and has them steered as well as its privileges allow:
//! `cargo run --example dns_responder -- 127.0.0.1:5353 4`. Under Wakeone it reads the socket that it is given, and
//! needs no privilege: `wakeone run -w 4 -l udp://:5353 --affinity none -- dns_responder`.

use std::net::{Ipv4Addr, SocketAddr};

use wakeone::udp_group::{Batch, Error, GroupSocket, Options, UdpGroup};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const TTL_S: u32 = 60;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let group = match UdpGroup::inherited() {
        Err(Error::NotInherited) => {
            let mut arguments = std::env::args().skip(1);
            let address: SocketAddr = match arguments.next() {
                Some(text) => text.parse()?,
                None => "127.0.0.1:5353".parse()?,
            };
            let threads = arguments.next().map_or(Ok(4), |text| text.parse())?;
            UdpGroup::open(address, threads, &Options::default())?
        }
        given => given?,
    };
    eprintln!(
        "dns_responder: {}, {}",
        group.local_addr()?,
        group.steering()
    );
    let threads: Vec<_> = group
        .into_sockets()
        .into_iter()
        .map(|socket| std::thread::spawn(move || serve(&socket)))
        .collect();
    for thread in threads {
        thread.join().map_err(|_| "a thread panicked")??;
    }
    Ok(())
}

/// Reads and answers, as many at a time as there are.
fn serve(socket: &GroupSocket) -> std::io::Result<()> {
    let mut batch = Batch::new(64, 1500);
    loop {
        socket.receive(&mut batch)?;
        let answers: Vec<(Vec<u8>, SocketAddr)> = batch
            .datagrams()
            .filter_map(|query| Some((answer(query.bytes)?, query.from)))
            .collect();
        let answers: Vec<(&[u8], SocketAddr)> = answers
            .iter()
            .map(|(bytes, to)| (bytes.as_slice(), *to))
            .collect();
        // A client that is gone already is no reason to stop.
        if let Err(error) = socket.send(&answers) {
            eprintln!("dns_responder: an answer was not sent: {error}");
        }
    }
}

/// The answer to a query (RFC 1035, section 4); `None` for what is no query.
fn answer(query: &[u8]) -> Option<Vec<u8>> {
    const HEADER: usize = 12;
    const RESPONSE: u8 = 0x80;
    const AUTHORITATIVE: u8 = 0x04;
    const OPCODE_AND_RD: u8 = 0x79;
    let header = query.get(..HEADER)?;
    if header[2] & RESPONSE != 0 || header[4..6] != [0, 1] {
        return None;
    }
    let mut end = HEADER;
    while *query.get(end)? != 0 {
        let label = query[end];
        // A question's name is not compressed, and a label has at most 63 bytes.
        if label > 63 {
            return None;
        }
        end += 1 + usize::from(label);
    }
    end += 1;
    let (kind, class) = (query.get(end..end + 2)?, query.get(end + 2..end + 4)?);
    let question = &query[HEADER..end + 4];
    let found = kind == [0, 1] && class == [0, 1];
    let mut answer = Vec::with_capacity(query.len() + 16);
    answer.extend(&header[..2]);
    answer.extend([RESPONSE | AUTHORITATIVE | (header[2] & OPCODE_AND_RD), 0]);
    answer.extend([0, 1, 0, u8::from(found), 0, 0, 0, 0]);
    answer.extend(question);
    if found {
        // The name is the question's; type A, class IN.
        answer.extend([0xc0, HEADER as u8, 0, 1, 0, 1]);
        answer.extend(TTL_S.to_be_bytes());
        answer.extend([0, 4]);
        answer.extend(ADDRESS.octets());
    }
    Some(answer)
}
