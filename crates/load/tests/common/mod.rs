//! A server of the tests' own: std::net, a thread a connection, and a closure that handles each request.
#![allow(dead_code)] // not every test file uses all of it

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use wakeone_load::{Arrivals, Mix, Outcome, Plan, Shard, Sources, Spacing, Stop};

/// One request: its path, its number (from 0, over all connections), its connection.
pub struct Request<'a> {
    pub path: String,
    pub number: u64,
    pub stream: &'a mut TcpStream,
}

/// The requests and connections that the server saw.
#[derive(Default)]
pub struct Seen {
    pub requests: AtomicU64,
    pub connections: AtomicU64,
    pub peers: Mutex<Vec<SocketAddr>>,
    pub paths: Mutex<Vec<String>>,
}

pub struct Server {
    pub address: SocketAddr,
    pub seen: Arc<Seen>,
    closing: Arc<AtomicBool>,
    acceptor: Option<thread::JoinHandle<()>>,
}

impl Server {
    /// `handle` answers a request; it returns whether the connection goes on.
    pub fn start(handle: impl Fn(Request<'_>) -> bool + Send + Sync + 'static) -> Self {
        Self::start_on("127.0.0.1:0", handle)
    }

    pub fn start_on(
        address: &str,
        handle: impl Fn(Request<'_>) -> bool + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind(address).unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Seen::default());
        let closing = Arc::new(AtomicBool::new(false));
        let handle = Arc::new(handle);
        let (shared, stop) = (Arc::clone(&seen), Arc::clone(&closing));
        let acceptor = thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if stop.load(SeqCst) {
                    return;
                }
                let (seen, handle) = (Arc::clone(&shared), Arc::clone(&handle));
                seen.connections.fetch_add(1, SeqCst);
                thread::spawn(move || converse(stream, &seen, &*handle));
            }
        });
        Self {
            address,
            seen,
            closing,
            acceptor: Some(acceptor),
        }
    }

    pub fn requests(&self) -> u64 {
        self.seen.requests.load(SeqCst)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.closing.store(true, SeqCst);
        let _ = TcpStream::connect(self.address);
        let _ = self.acceptor.take().unwrap().join();
    }
}

fn converse(mut stream: TcpStream, seen: &Seen, handle: &dyn Fn(Request<'_>) -> bool) {
    let mut pending = Vec::new();
    seen.peers.lock().unwrap().push(stream.peer_addr().unwrap());
    loop {
        let end = loop {
            if let Some(at) = pending.windows(4).position(|w| w == b"\r\n\r\n") {
                break at + 4;
            }
            let mut piece = [0; 4096];
            match stream.read(&mut piece) {
                Ok(0) | Err(_) => return,
                Ok(n) => pending.extend_from_slice(&piece[..n]),
            }
        };
        let head = String::from_utf8(pending.drain(..end).collect()).unwrap();
        let path = head.split(' ').nth(1).unwrap().to_owned();
        seen.paths.lock().unwrap().push(path.clone());
        let number = seen.requests.fetch_add(1, SeqCst);
        if !handle(Request {
            path,
            number,
            stream: &mut stream,
        }) {
            return;
        }
    }
}

/// A 200 with a length, `Connection: close` and `X-Worker: worker`; then the connection ends.
pub fn answer(request: Request<'_>, worker: &str) -> bool {
    let text = format!(
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Worker: {worker}\r\nConnection: close\r\n\r\nok"
    );
    let _ = request.stream.write_all(text.as_bytes());
    false
}

/// A closed loop of 10 clients and 1,000 requests; each test changes the part it is about.
pub fn plan(target: SocketAddr) -> Plan {
    Plan {
        target: target.into(),
        host: "localhost".into(),
        arrivals: Arrivals::Closed { concurrency: 10 },
        stop: Stop {
            requests: Some(1000),
            duration: None,
        },
        mix: Mix::one("/"),
        sources: Sources::Loopback { count: 100 },
        timeout: Duration::from_secs(10),
        seed: 1,
        threads: 1,
        keep_alive: false,
        shard: Shard::default(),
    }
}

pub fn open(rate_per_s: f64, spacing: Spacing) -> Arrivals {
    Arrivals::Open {
        rate_per_s,
        spacing,
    }
}

/// Runs the plan and checks the invariants of every outcome.
pub fn run(plan: &Plan) -> Outcome {
    let mut last = wakeone_load::Progress::default();
    let outcome = wakeone_load::run(plan, &AtomicBool::new(false), &mut |p| last = *p).unwrap();
    check(&outcome);
    assert_eq!(
        (last.planned, last.completed, last.in_flight),
        (outcome.planned, outcome.completed, 0)
    );
    assert_eq!(last.errors, outcome.error_count());
    outcome
}

/// Nothing is lost and nothing is counted twice.
pub fn check(outcome: &Outcome) {
    let ended = outcome.completed + outcome.error_count() + outcome.cancelled;
    assert_eq!(ended, outcome.planned, "{:?}", outcome.errors);
    assert_eq!(outcome.latency.len(), outcome.completed);
    assert_eq!(outcome.service.len(), outcome.completed);
    assert_eq!(
        outcome.by_path.iter().map(|p| p.completed).sum::<u64>(),
        outcome.completed
    );
    assert_eq!(outcome.lateness.len(), outcome.started);
    assert_eq!(outcome.failed.len(), outcome.error_count());
    assert_eq!(
        outcome.by_path.iter().map(|p| p.failed.len()).sum::<u64>(),
        outcome.error_count()
    );
    let ok: u64 = outcome
        .by_status
        .iter()
        .filter(|(s, _)| (200..300).contains(*s))
        .map(|(_, n)| n)
        .sum();
    assert_eq!(ok, outcome.completed);
}
