//! The program that reads: some threads, one source or a socket each. It does not know how the datagrams are placed, and
//! calls the C library, as any server does.

use nix::sys::socket::{self, MsgFlags, SockFlag, SockType, setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use rustix::fd::{AsRawFd, OwnedFd};
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;
use wakeone_serve::system::shared_counter::SharedCounters;

use crate::error::Error;

use crate::{cpus, papers};

/// Bytes of a datagram.
pub const BYTES: usize = 10;
/// The interval at which a thread that gets nothing checks whether it must end.
const LOOK_UP: Duration = Duration::from_millis(50);
/// The interval at which a thread that may not read checks whether it may.
const GATE_EVERY: Duration = Duration::from_micros(200);
const SIGNS: usize = 3;

/// The time of a clock that all processes share, in ns.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The source of the data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum From {
    /// A named pipe.
    Fifo(PathBuf),
    /// This number of UDP sockets on an address; several have SO_REUSEPORT.
    Udp(SocketAddr, usize),
}

/// The plan of a reading program: its source, its threads and its buffers.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The source of the data.
    pub from: From,
    /// How many threads read.
    pub threads: usize,
    /// Thread N stays on CPU N, modulo their number.
    pub pin: bool,
    /// Read what waits when the board says so, and then nothing until it says so again; otherwise what comes, as it comes.
    pub portions: bool,
    /// The bytes that each socket may hold, where that is more than usual.
    pub buffer_bytes: Option<usize>,
    /// The socket option UDP_QUEUES of the kernel of the papers, if it is set.
    pub queues: Option<i32>,
    /// The file of the [`Board`].
    pub board: PathBuf,
}

/// The memory that reader and sender share: three counters a thread, and three signs.
#[derive(Debug)]
pub struct Board {
    counters: SharedCounters,
    threads: usize,
}

impl Board {
    /// Opens the board in a file.
    ///
    /// # Errors
    /// When the file cannot be opened or mapped.
    pub fn open(path: &Path, threads: usize) -> Result<Self, Error> {
        let counters =
            SharedCounters::open(path, 3 * threads + SIGNS).map_err(|source| Error::File {
                action: "opening",
                path: path.into(),
                source,
            })?;
        Ok(Self { counters, threads })
    }

    fn sign(&self, which: usize) -> &std::sync::atomic::AtomicU64 {
        self.counters.at(3 * self.threads + which)
    }

    /// A thread's counters: 0 the units it has read, 1 the last portion that it is done with, 2 the time of that, in ns.
    fn of(&self, thread: usize, which: usize) -> &std::sync::atomic::AtomicU64 {
        self.counters.at(3 * thread + which)
    }

    /// The reader is ready.
    pub fn is_ready(&self) -> bool {
        self.sign(0).load(Acquire) != 0
    }

    /// The threads may read.
    pub fn go(&self) {
        self.open_portion(1);
    }

    /// Lets the threads read this portion, counted from 1.
    pub fn open_portion(&self, portion: u64) {
        self.sign(1).store(portion, Release);
    }

    /// The time at which the last thread was done with a portion, by [`now_ns`]; None before.
    pub fn portion_read_ns(&self, portion: u64) -> Option<u64> {
        let at = |thread| {
            let is_done = self.of(thread, 1).load(Acquire) == portion;
            is_done.then(|| self.of(thread, 2).load(Relaxed))
        };
        (0..self.threads)
            .map(at)
            .try_fold(0, |last, at| Some(last.max(at?)))
    }

    /// Sleeps until a portion other than `before` may be read.
    fn next_portion(&self, before: u64) -> u64 {
        loop {
            let portion = self.sign(1).load(Acquire);
            if portion != before {
                return portion;
            }
            std::thread::sleep(GATE_EVERY);
        }
    }

    fn is_over(&self) -> bool {
        self.sign(2).load(Acquire) != 0
    }

    /// Tells the threads to end.
    pub fn stop(&self) {
        self.sign(2).store(1, Release);
        self.open_portion(u64::MAX);
    }

    /// The units that each thread has read.
    pub fn read(&self) -> Vec<u64> {
        let count = |thread| self.of(thread, 0).load(Relaxed);
        (0..self.threads).map(count).collect()
    }

    /// The units that all threads together have read.
    pub fn all(&self) -> u64 {
        self.read().iter().sum()
    }
}

/// Reads until the board says that it is enough.
///
/// # Errors
/// When a source cannot be opened.
pub fn run(plan: &Plan) -> Result<(), Error> {
    let board = Board::open(&plan.board, plan.threads)?;
    let sources = open(plan)?;
    let cpus = cpus::mine()?;
    let is_pipe = matches!(plan.from, From::Fifo(_));
    std::thread::scope(|scope| {
        for thread in 0..plan.threads {
            let (board, source) = (&board, &sources[thread % sources.len()]);
            let cpu = plan.pin.then(|| cpus[thread % cpus.len()]);
            scope.spawn(move || {
                if let Some(cpu) = cpu {
                    let _ = cpus::pin(cpu);
                }
                if plan.portions {
                    read_portions(board, thread, source);
                } else {
                    read(board, thread, source, is_pipe);
                }
            });
        }
        board.sign(0).store(1, Release);
    });
    Ok(())
}

fn open(plan: &Plan) -> Result<Vec<OwnedFd>, Error> {
    let failed = |what: &str| {
        let what = format!("{what} for the readers failed");
        move |e: nix::Error| Error::Server(format!("{what}: {e}"))
    };
    match &plan.from {
        From::Fifo(path) => {
            let file = File::open(path).map_err(|source| Error::File {
                action: "opening",
                path: path.clone(),
                source,
            })?;
            Ok(vec![file.into()])
        }
        From::Udp(address, sockets) => (0..*sockets)
            .map(|_| {
                let family = match address {
                    SocketAddr::V4(_) => socket::AddressFamily::Inet,
                    SocketAddr::V6(_) => socket::AddressFamily::Inet6,
                };
                let flags = SockFlag::SOCK_CLOEXEC;
                let one = socket::socket(family, SockType::Datagram, flags, None)
                    .map_err(failed("a socket"))?;
                if *sockets > 1 {
                    setsockopt(&one, sockopt::ReusePort, &true).map_err(failed("SO_REUSEPORT"))?;
                }
                if let Some(bytes) = plan.buffer_bytes {
                    setsockopt(&one, sockopt::RcvBufForce, &bytes)
                        .map_err(failed("a larger receive buffer"))?;
                }
                if let Some(queues) = plan.queues {
                    papers::set_udp_queues(&one, queues)?;
                }
                let patience = TimeVal::milliseconds(LOOK_UP.as_millis() as i64);
                setsockopt(&one, sockopt::ReceiveTimeout, &patience)
                    .map_err(failed("a timeout"))?;
                socket::bind(one.as_raw_fd(), &socket::SockaddrStorage::from(*address))
                    .map_err(failed("binding a socket"))?;
                Ok(one)
            })
            .collect(),
    }
}

/// One thread that reads a portion after the other, each from the moment it may until there is nothing more.
fn read_portions(board: &Board, thread: usize, source: &OwnedFd) {
    let count = board.of(thread, 0);
    let mut datagram = [0; BYTES];
    let mut portion = 0;
    loop {
        portion = board.next_portion(portion);
        if board.is_over() {
            return;
        }
        loop {
            match socket::recv(source.as_raw_fd(), &mut datagram, MsgFlags::MSG_DONTWAIT) {
                Ok(_) => count.store(count.load(Relaxed) + 1, Relaxed),
                Err(nix::Error::EINTR) => {}
                Err(nix::Error::EAGAIN) => break,
                Err(_) => return,
            }
        }
        board.of(thread, 2).store(now_ns(), Relaxed);
        board.of(thread, 1).store(portion, Release);
    }
}

/// One thread that reads what comes. A pipe has no timeout: its end is that of its writers.
fn read(board: &Board, thread: usize, source: &OwnedFd, is_pipe: bool) {
    board.next_portion(0);
    let count = board.of(thread, 0);
    let mut datagram = [0; BYTES];
    loop {
        let read = if is_pipe {
            nix::unistd::read(source, &mut datagram)
        } else {
            socket::recv(source.as_raw_fd(), &mut datagram, MsgFlags::empty())
        };
        match read {
            Ok(0) => return,
            Ok(_) => {
                // No other thread writes it.
                count.store(count.load(Relaxed) + 1, Relaxed);
            }
            Err(nix::Error::EAGAIN) if board.is_over() => return,
            Err(nix::Error::EAGAIN | nix::Error::EINTR) => {}
            Err(_) => return,
        }
    }
}
