//! Connections that are kept, and which worker has each by its own account.

use std::any::Any;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::time::Duration;

use super::slowness;

/// A request that the servers of these tests answer, with a header X-Worker.
pub const ASK: &str = "/whoami?word=hi";

/// A connection that is kept, and who answers there.
pub struct Kept {
    _stream: Box<dyn Any + Send>,
    pub worker: String,
}

impl Kept {
    /// Asks on a new connection, and keeps it.
    pub fn on<S: Read + Write + Send + 'static>(mut stream: S) -> Self {
        stream
            .write_all(format!("GET {ASK} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes())
            .expect("asks");
        let mut head = Vec::new();
        let mut some = [0; 512];
        while !head.windows(4).any(|end| end == b"\r\n\r\n") {
            let read = stream.read(&mut some).expect("answers");
            assert!(read > 0, "closed");
            head.extend_from_slice(&some[..read]);
        }
        let head = String::from_utf8_lossy(&head).to_lowercase();
        let worker = head
            .lines()
            .find_map(|line| line.strip_prefix("x-worker: "));
        Self {
            worker: worker.expect("X-Worker").trim().to_owned(),
            _stream: Box::new(stream),
        }
    }
}

/// Opens so many connections, so far apart. Returns them and how many each worker has, the most first.
pub fn keep(count: usize, apart: Duration, open: impl Fn() -> Kept) -> (Vec<Kept>, Vec<usize>) {
    let mut kept = Vec::new();
    for _ in 0..count {
        kept.push(open());
        std::thread::sleep(apart * slowness());
    }
    let mut of: BTreeMap<&str, usize> = BTreeMap::new();
    for one in &kept {
        *of.entry(&one.worker).or_default() += 1;
    }
    let mut counts: Vec<usize> = of.values().copied().collect();
    counts.sort_unstable_by(|one, other| other.cmp(one));
    (kept, counts)
}
