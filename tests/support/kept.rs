//! Connections that are kept, who answers there, and the entries by which workers wait for more.

use super::{eventually, patience, slowness};
use std::any::Any;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// All servers that keep connections answer that, and say who they are.
pub const ASK: &str = "/whoami?word=hi";

/// A connection that is kept, and who answers there.
pub struct Kept {
    _stream: Box<dyn Any + Send>,
    pub worker: String,
}

impl Kept {
    pub fn open(at: SocketAddr) -> Self {
        let stream = TcpStream::connect(at).expect("connects");
        stream.set_read_timeout(Some(patience())).expect("a limit");
        Self::on(stream)
    }

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
pub fn keep(at: SocketAddr, count: usize, apart: Duration) -> (Vec<Kept>, Vec<usize>) {
    keep_by(count, apart, || Kept::open(at))
}

/// The same, opened in some way.
pub fn keep_by(count: usize, apart: Duration, open: impl Fn() -> Kept) -> (Vec<Kept>, Vec<usize>) {
    let mut kept = Vec::new();
    for _ in 0..count {
        kept.push(open());
        std::thread::sleep(apart * slowness());
    }
    let counts = counted(&kept);
    (kept, counts)
}

/// Opens so many connections that they show whether workers are steered. In an emulated machine looks are dear, and their share
/// of the CPU allows only one or two a second.
pub fn keep_enough(open: impl Fn() -> Kept) -> (Vec<Kept>, Vec<usize>) {
    let (count, ms) = if slowness() > 1 { (24, 100) } else { (64, 8) };
    keep_by(count, Duration::from_millis(ms), open)
}

/// All have some, and nobody has more than 1.5 times the mean; 2.5 times in an emulated machine. As they are, workers that wait
/// exclusively end up with all or nothing.
pub fn assert_even(counts: &[usize], workers: usize) {
    let halves = if slowness() > 1 { 5 } else { 3 };
    let most = counts.iter().sum::<usize>() * halves / 2 / workers;
    assert!(counts.len() == workers && counts[0] <= most, "{counts:?}");
}

/// How many of these each worker has, the most first.
pub fn counted(kept: &[Kept]) -> Vec<usize> {
    let mut of: BTreeMap<&str, usize> = BTreeMap::new();
    for one in kept {
        *of.entry(&one.worker).or_default() += 1;
    }
    let mut counts: Vec<usize> = of.values().copied().collect();
    counts.sort_unstable_by(|one, other| other.cmp(one));
    counts
}

/// The entries of a process's epoll sets, as the kernel shows them.
pub fn entries_of(pid: u32) -> Vec<String> {
    let files = std::fs::read_dir(format!("/proc/{pid}/fdinfo")).into_iter();
    let files = files.flatten().flatten();
    let texts = files.filter_map(|file| std::fs::read_to_string(file.path()).ok());
    let lines = texts.flat_map(|text| {
        let lines = text.lines().filter(|line| line.starts_with("tfd:"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    });
    let mut lines: Vec<String> = lines.collect();
    lines.sort();
    lines
}

/// Whether a worker is not woken now, as the kernel shows it: its entry of the listener has no EPOLLIN.
pub fn is_disarmed(entries: &[String]) -> bool {
    let of = |line: &String| {
        let events = line.split_whitespace().nth(3).unwrap_or_default();
        let events = u32::from_str_radix(events, 16).unwrap_or(1);
        events & 0x41 == 0
    };
    entries.iter().any(of)
}

/// The arguments by which the reference server has so many event loops, whose kept connections last. By default each waits
/// exclusively: as it is, one of them gets all connections that are kept.
pub const fn event_loops<'a>(at: &'a str, workers: &'a str) -> [&'a str; 9] {
    [
        "serve",
        "--model",
        "epoll-prefork",
        "-w",
        workers,
        "-l",
        at,
        "--header-timeout",
        "300",
    ]
}

/// Has one worker keep many more connections than the others, and opens more until a worker is disarmed. Returns them all.
/// `disarmed`: how many are.
pub fn until_disarmed(at: SocketAddr, disarmed: impl Fn() -> usize) -> Vec<Kept> {
    // An emulated machine looks only once or twice a second, and disarms nobody at the first looks after some have ended.
    // Meanwhile the others get some.
    const MANY_MORE: usize = 24;
    let mut kept: Vec<Kept> = Vec::new();
    let worker = loop {
        let one = Kept::open(at);
        let worker = one.worker.clone();
        kept.push(one);
        if kept.iter().filter(|one| one.worker == worker).count() >= MANY_MORE {
            break worker;
        }
    };
    kept.retain(|one| one.worker == worker);
    // Where more than two a worker come between two looks, that is a burst, for which all are armed. The slower a machine is,
    // the fewer looks it has: connections come ever further apart.
    let mut apart = Duration::from_millis(20) * slowness();
    eventually("a worker is disarmed", || {
        kept.push(Kept::open(at));
        std::thread::sleep(apart);
        apart = (apart * 5 / 4).min(Duration::from_secs(5));
        disarmed() > 0
    });
    kept
}
