//! The program that reads: some threads, one source or a socket each. It knows nothing of who places the datagrams, and
//! makes its calls by the C library, as any server does.

use nix::sys::socket::{self, MsgFlags, SockFlag, SockType, setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use rustix::fd::{AsRawFd, OwnedFd};
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;
use wakeone_kernel::shared_counter::SharedCounters;

use crate::{Error, cpus};

/// Bytes of a datagram.
pub const BYTES: usize = 10;
/// So often a thread that gets nothing looks whether it is to end.
const LOOK_UP: Duration = Duration::from_millis(50);

/// Where from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum From {
    /// A named pipe.
    Fifo(PathBuf),
    /// So many UDP sockets on an address; several have SO_REUSEPORT.
    Udp(SocketAddr, usize),
}

/// What to read, and how.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Where from.
    pub from: From,
    /// How many threads read.
    pub threads: usize,
    /// Thread N stays on CPU N, modulo their number.
    pub pin: bool,
    /// What each socket may hold, where that is to be more than usual.
    pub buffer_bytes: Option<usize>,
    /// The file of the [`Board`].
    pub board: PathBuf,
}

/// What reader and sender tell each other: a counter a thread, and three signs.
#[derive(Debug)]
pub struct Board {
    counters: SharedCounters,
    threads: usize,
}

impl Board {
    /// Opens the one in a file.
    ///
    /// # Errors
    /// When the file cannot be opened or mapped.
    pub fn open(path: &Path, threads: usize) -> Result<Self, Error> {
        let counters = SharedCounters::open(path, threads + 3).map_err(|source| Error::File {
            action: "opening",
            path: path.into(),
            source,
        })?;
        Ok(Self { counters, threads })
    }

    fn sign(&self, which: usize) -> &std::sync::atomic::AtomicU64 {
        self.counters.at(self.threads + which)
    }

    /// The reader is ready.
    pub fn is_ready(&self) -> bool {
        self.sign(0).load(Acquire) != 0
    }

    /// The threads may read.
    pub fn go(&self) {
        self.sign(1).store(1, Release);
    }

    /// The threads are to end.
    pub fn stop(&self) {
        self.go();
        self.sign(2).store(1, Release);
    }

    /// What each thread has read.
    pub fn read(&self) -> Vec<u64> {
        let count = |thread| self.counters.at(thread).load(Relaxed);
        (0..self.threads).map(count).collect()
    }

    /// What all have read.
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
            scope.spawn(move || read(board, thread, source, is_pipe, cpu));
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

/// One thread. A pipe has no timeout: its end is that of its writers.
fn read(board: &Board, thread: usize, source: &OwnedFd, is_pipe: bool, cpu: Option<usize>) {
    if let Some(cpu) = cpu {
        let _ = cpus::pin(cpu);
    }
    while board.sign(1).load(Acquire) == 0 {
        std::thread::sleep(Duration::from_micros(200));
    }
    let count = board.counters.at(thread);
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
                // Nobody else writes it.
                count.store(count.load(Relaxed) + 1, Relaxed);
            }
            Err(nix::Error::EAGAIN) if board.sign(2).load(Acquire) != 0 => return,
            Err(nix::Error::EAGAIN | nix::Error::EINTR) => {}
            Err(_) => return,
        }
    }
}
