//! Clients with sessions: `tests/servers/sessions.py` knows only those that greeted the very process that answers.

use std::collections::BTreeSet;
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

/// How long each nap of a worker is: long enough to be found stuck, in ms.
const NAP_MS: u32 = 40;

/// Clients that each have a session.
pub struct Sessions(Vec<UdpSocket>);

/// The answer to one datagram.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub worker: u32,
    pub stranger: bool,
    pub text: String,
}

/// A client of this server.
pub fn client(server: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("bind");
    socket.connect(server).expect("connect");
    let patience = super::patience();
    socket.set_read_timeout(Some(patience)).expect("timeout");
    socket
}

/// Waits for an answer; `None` if the server does not listen yet.
pub fn answer(socket: &UdpSocket) -> Option<Answer> {
    let mut buffer = [0; 200];
    let length = socket.recv(&mut buffer).ok()?;
    let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
    let mut words = text.split(' ');
    Some(Answer {
        worker: words.next()?.parse().ok()?,
        stranger: words.next()? == "stranger",
        text: words.next()?.to_owned(),
    })
}

impl Sessions {
    /// Greets, from so many clients.
    pub fn start(server: SocketAddr, count: usize) -> Self {
        let greeted = |_| {
            let client = client(server);
            super::eventually("it is greeted", || {
                let sent = client.send(b"hello there").is_ok();
                sent && answer(&client).is_some_and(|one| !one.stranger)
            });
            client
        };
        Self((0..count).map(greeted).collect())
    }

    /// The workers that have the sessions.
    pub fn workers(&self) -> BTreeSet<u32> {
        let worker = |client: &UdpSocket| {
            client.send(b"who").expect("send");
            answer(client).expect("an answer").worker
        };
        self.0.iter().map(worker).collect()
    }

    /// Every client in turn has its worker take a nap, while all speak. Returns how often one met a worker that did not
    /// know it.
    pub fn strangers(&self) -> usize {
        let mut strangers = 0;
        for (number, sleepy) in self.0.iter().enumerate() {
            let nap = format!("nap {NAP_MS} {number}");
            sleepy.send(nap.as_bytes()).expect("send");
            for _ in 0..NAP_MS / 5 {
                self.0.iter().for_each(|client| {
                    client.send(b"speak").expect("send");
                });
                std::thread::sleep(Duration::from_millis(5));
            }
            for client in &self.0 {
                client.send(b"done").expect("send");
                loop {
                    let answer = answer(client).expect("an answer");
                    strangers += usize::from(answer.stranger);
                    if answer.text == "done" {
                        break;
                    }
                }
            }
        }
        strangers
    }
}
