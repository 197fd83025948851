//! A mixed load while workers are killed: short and kept connections, quick and slow answers. Each answer must be the
//! one to its own question. A connection may end without one only if a worker that was killed had accepted it.

use super::{eventually, halt, patience, runs, signal};
use rustix::process::Signal;
use std::collections::HashSet;
use std::io::{BufRead, BufReader, Error, ErrorKind, Read, Result, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use wakeone_kernel::proc::process::sockets_of;
use wakeone_kernel::socket::diag::{Which, sockets};
use wakeone_model::listener::Protocol;

/// The protocol of the requests.
#[derive(Debug, Clone)]
pub enum Speech {
    /// `GET /echo?word=…`, and `/slow?word=…&ms=…`: the answer is the word, and any number of `x` after it.
    Http,
    /// The same of a script, by its path.
    FastCgi(String),
}

/// How a client asks.
#[derive(Debug, Clone, Copy)]
struct Habit {
    /// Questions on one connection.
    kept_for: usize,
    /// Whether the worker takes some time for each answer.
    slow: bool,
}

const HABITS: [Habit; 6] = [
    Habit::of(1, false),
    Habit::of(1, false),
    Habit::of(1, false),
    Habit::of(20, false),
    Habit::of(5, true),
    Habit::of(1, true),
];

impl Habit {
    const fn of(kept_for: usize, slow: bool) -> Self {
        Self { kept_for, slow }
    }
}

/// A question that got no whole answer.
#[derive(Debug, Clone)]
struct Unanswered {
    /// The client's port; 0 where it was not even connected.
    port: u16,
    begun: Instant,
    failed: Instant,
    /// It was reset before any answer came over it.
    reset: bool,
    why: String,
}

/// Connections that a worker had accepted when it was killed.
struct Kill {
    ports: HashSet<u16>,
    at: Instant,
}

/// The result of a load.
#[derive(Debug)]
pub struct Outcome {
    /// Right answers.
    pub answers: u64,
    /// Workers killed.
    pub kills: usize,
    /// Questions that killed workers had accepted.
    pub lost: usize,
    /// Connections that were reset while they were made: the handshake's last packet arrived while the queue ended or
    /// was moved. The kernel resets a connection that it has just made for a listener that stopped listening meanwhile
    /// (`inet_csk_reqsk_queue_add`). Where the CPUs are busy, the client may believe itself connected by then.
    pub cut: usize,
    /// All other failures.
    pub wrong: Vec<String>,
}

/// The load.
pub struct Mixed {
    port: u16,
    stop: Arc<AtomicBool>,
    answers: Arc<AtomicU64>,
    threads: Vec<std::thread::JoinHandle<Vec<Unanswered>>>,
    kills: Vec<Kill>,
    /// A php-fpm worker is not killed while it may hold the spin lock in the shared memory: its master and all others
    /// would spin for ever, with Wakeone and without.
    spares_locks: bool,
}

impl Mixed {
    /// Begins it.
    pub fn start(address: SocketAddr, speech: &Speech) -> Self {
        let (stop, answers) = (Arc::default(), Arc::default());
        let client = |(number, habit): (usize, &Habit)| {
            let client = Client {
                name: format!("client{number}"),
                address,
                speech: speech.clone(),
                habit: *habit,
                asked: 0,
            };
            let (stop, answers) = (Arc::clone(&stop), Arc::clone(&answers));
            std::thread::spawn(move || client.ask_until(&stop, &answers))
        };
        let threads = HABITS.iter().enumerate().map(client).collect();
        Self {
            port: address.port(),
            stop,
            answers,
            threads,
            kills: Vec::new(),
            spares_locks: matches!(speech, Speech::FastCgi(_)),
        }
    }

    /// Right answers so far.
    pub fn answers(&self) -> u64 {
        self.answers.load(Ordering::Relaxed)
    }

    /// Kills a worker by kill -9. It is stopped for a moment before, to find out which connections it has accepted.
    pub fn kill(&mut self, worker: u32) {
        loop {
            halt(worker);
            if !self.spares_locks || is_in_a_call(worker) {
                break;
            }
            signal(worker, Signal::CONT);
            std::thread::sleep(Duration::from_millis(1));
        }
        let held: HashSet<u64> = sockets_of(worker)
            .expect("its sockets")
            .into_iter()
            .map(|(_, inode)| inode)
            .collect();
        let open = sockets(Protocol::Tcp, Which::Open, self.port).expect("sock_diag");
        let accepted = open.iter().filter(|e| held.contains(&e.socket.inode));
        let ports = accepted.map(|entry| entry.peer.port()).collect();
        let at = Instant::now();
        signal(worker, Signal::KILL);
        eventually("it is dead", || !runs(worker));
        self.kills.push(Kill { ports, at });
    }

    /// Ends it.
    pub fn stop(self) -> Outcome {
        self.stop.store(true, Ordering::Relaxed);
        let mut unanswered = Vec::new();
        for thread in self.threads {
            unanswered.extend(thread.join().expect("client"));
        }
        let kills = &self.kills;
        let had_accepted = |one: &Unanswered| {
            kills.iter().any(|kill| {
                kill.ports.contains(&one.port) && one.begun <= kill.at && kill.at <= one.failed
            })
        };
        let was_cut = |one: &Unanswered| one.reset;
        let (lost, others): (Vec<_>, Vec<_>) = unanswered.into_iter().partition(had_accepted);
        let (cut, wrong): (Vec<_>, Vec<_>) = others.into_iter().partition(was_cut);
        Outcome {
            answers: self.answers.load(Ordering::Relaxed),
            kills: self.kills.len(),
            lost: lost.len(),
            cut: cut.len(),
            wrong: wrong.into_iter().map(|one| one.why).collect(),
        }
    }
}

/// Whether it was stopped in a system call, and not while it computed.
fn is_in_a_call(pid: u32) -> bool {
    let call = std::fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap_or_default();
    call.starts_with(|first: char| first.is_ascii_digit())
}

struct Client {
    name: String,
    address: SocketAddr,
    speech: Speech,
    habit: Habit,
    asked: u64,
}

impl Client {
    fn ask_until(mut self, stop: &AtomicBool, answers: &AtomicU64) -> Vec<Unanswered> {
        let mut unanswered = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let begun = Instant::now();
            let stream = TcpStream::connect_timeout(&self.address, patience()).and_then(|stream| {
                stream.set_read_timeout(Some(patience()))?;
                Ok(stream)
            });
            let port = |stream: &TcpStream| stream.local_addr().map_or(0, |own| own.port());
            let port = stream.as_ref().map_or(0, port);
            let before = self.asked;
            let said = stream.and_then(|mut stream| self.converse(&mut stream, stop, answers));
            if let Err(error) = said {
                unanswered.push(Unanswered {
                    port,
                    begun,
                    failed: Instant::now(),
                    reset: error.kind() == ErrorKind::ConnectionReset && self.asked <= before + 1,
                    why: format!(
                        "{} {} on port {port} after {:?}: {error}",
                        self.name,
                        self.asked,
                        begun.elapsed()
                    ),
                });
                // This avoids thousands of attempts while no socket listens.
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        unanswered
    }

    /// All questions of a connection.
    fn converse(
        &mut self,
        stream: &mut TcpStream,
        stop: &AtomicBool,
        answers: &AtomicU64,
    ) -> Result<()> {
        for round in 1..=self.habit.kept_for {
            let last = round == self.habit.kept_for || stop.load(Ordering::Relaxed);
            self.asked += 1;
            let word = format!("{}-{}", self.name, self.asked);
            // 50 to 149 ms.
            let ms = self.habit.slow.then_some(50 + self.asked * 37 % 100);
            let (answer, kept) = match &self.speech {
                Speech::Http => http(stream, &word, ms, last)?,
                Speech::FastCgi(script) => {
                    let query = format!("word={word}&ms={}", ms.unwrap_or(0));
                    (fastcgi(stream, script, &query, !last)?, !last)
                }
            };
            if answer.trim_end_matches('x') != word {
                return Err(Error::other(format!("{answer:?} to {word}")));
            }
            answers.fetch_add(1, Ordering::Relaxed);
            if last || !kept {
                break;
            }
            std::thread::sleep(Duration::from_millis(3));
        }
        Ok(())
    }
}

/// The answer, and whether the connection stays open.
fn http(stream: &mut TcpStream, word: &str, ms: Option<u64>, last: bool) -> Result<(String, bool)> {
    let path = match ms {
        Some(ms) => format!("/slow?word={word}&ms={ms}"),
        None => format!("/echo?word={word}"),
    };
    let close = if last { "Connection: close\r\n" } else { "" };
    let question = format!("GET {path} HTTP/1.1\r\nHost: test\r\n{close}\r\n");
    stream.write_all(question.as_bytes())?;
    // No request is sent before the last answer is there, so nothing follows this one.
    let mut stream = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head)? == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
    }
    let head = head.to_ascii_lowercase();
    let field = |name: &str| {
        let mut fields = head.lines().filter_map(|line| line.split_once(": "));
        fields.find(|(key, _)| *key == name).map(|(_, value)| value)
    };
    let length = field("content-length").and_then(|value| value.parse().ok());
    let Some(length) = length.filter(|_| head.starts_with("http/1.1 200")) else {
        return Err(Error::other(format!("{head:?} to {word}")));
    };
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    let kept = !last && field("connection") != Some("close");
    Ok((String::from_utf8_lossy(&body).into_owned(), kept))
}

/// Sends a request to a FastCGI server. Returns the body of its answer.
pub fn fastcgi(stream: &mut TcpStream, script: &str, query: &str, keep: bool) -> Result<String> {
    let record = |kind: u8, content: &[u8]| {
        let length = (content.len() as u16).to_be_bytes();
        [&[1, kind, 0, 1, length[0], length[1], 0, 0], content].concat()
    };
    let mut parameters = Vec::new();
    for (name, value) in [
        ("REQUEST_METHOD", "GET"),
        ("SCRIPT_NAME", script),
        ("SCRIPT_FILENAME", script),
        ("QUERY_STRING", query),
    ] {
        parameters.extend([name.len() as u8, value.len() as u8]);
        parameters.extend(name.bytes().chain(value.bytes()));
    }
    let question = [
        record(1, &[0, 1, u8::from(keep), 0, 0, 0, 0, 0]),
        record(4, &parameters),
        record(4, &[]),
        record(5, &[]),
    ]
    .concat();
    stream.write_all(&question)?;
    let mut said = Vec::new();
    loop {
        let mut head = [0; 8];
        stream.read_exact(&mut head)?;
        let length = usize::from(u16::from_be_bytes([head[4], head[5]]));
        let mut content = vec![0; length + usize::from(head[6])];
        stream.read_exact(&mut content)?;
        match head[1] {
            3 => break,
            6 => said.extend(&content[..length]),
            _ => {}
        }
    }
    let said = String::from_utf8_lossy(&said).into_owned();
    let body = said.split_once("\r\n\r\n").map(|(_, body)| body.to_owned());
    body.ok_or_else(|| Error::other(format!("no body: {said:?}")))
}
