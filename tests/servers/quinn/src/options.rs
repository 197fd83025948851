//! The command line of `quinn_client`.

use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

pub struct Options {
    pub server: SocketAddr,
    pub connections: u32,
    pub bytes: usize,
    /// How long the download of each connection takes.
    pub length: Duration,
    pub moves: usize,
    pub rebind: bool,
    /// With a path the clients speak HTTP/3.
    pub path: Option<String>,
    pub apart: Duration,
}

impl Options {
    /// Reads the words after the program's name, and panics with those that have no meaning.
    pub fn read(mut words: impl Iterator<Item = String>) -> Self {
        let mut options = Self {
            server: parsed(&words.next().expect("ADDRESS")),
            connections: parsed(&words.next().expect("CONNECTIONS")),
            bytes: 10,
            length: Duration::ZERO,
            moves: 0,
            rebind: false,
            path: None,
            apart: Duration::ZERO,
        };
        for word in words {
            match word.split_once('=').unwrap_or((&word, "")) {
                ("bytes", value) => options.bytes = parsed(value),
                ("ms", value) => options.length = Duration::from_millis(parsed(value)),
                ("moves", value) => options.moves = parsed(value),
                ("rebind", "") => options.rebind = true,
                ("path", value) => options.path = Some(value.to_owned()),
                ("apart", value) => options.apart = Duration::from_millis(parsed(value)),
                _ => panic!("what does {word} mean?"),
            }
        }
        options
    }

    /// The middle of the time in which all connections are open.
    pub fn middle(&self) -> Duration {
        (self.length + self.apart * self.connections.saturating_sub(1)) / 2
    }
}

fn parsed<T: FromStr>(word: &str) -> T {
    word.parse()
        .unwrap_or_else(|_| panic!("{word:?} has no meaning here"))
}
