//! Starts the reading program, for `udp-readers` and `udp-locks`.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use wakeone_kernel::socket::diag;
use wakeone_model::listener::Protocol;

use super::reader::Board;
use super::sender::Sent;
use crate::error::Error;
use crate::experiment::Sample;
use crate::process::{Usage, own_program};
use crate::scratch::Scratch;
use crate::server::Server;

const PATIENCE: Duration = Duration::from_secs(10);
const SEATED: Duration = Duration::from_millis(50);

/// The parameters of the reading program.
#[derive(Debug, Clone, Copy, Default)]
pub struct Setup<'a> {
    /// How many UDP sockets it reads on a free port; 0: a named pipe.
    pub sockets: usize,
    /// How many threads read.
    pub threads: usize,
    /// Thread N stays on CPU N, modulo their number.
    pub pinned: bool,
    /// The bytes that each socket may hold, where that is more than usual.
    pub buffer_bytes: Option<usize>,
    /// Reads a portion of waiting datagrams at a signal, instead of datagrams as they come.
    pub portions: bool,
    /// The socket option UDP_QUEUES of the kernel of the papers, if it is set.
    pub queues: Option<i32>,
    /// Arguments of `wakeone` that run the program, where it does not run by itself.
    pub wrapped: &'a [&'a str],
}

/// The program, running. Dropping it ends it.
#[derive(Debug)]
pub struct Readers {
    // Fields are dropped in this order: the program ends before its files go.
    server: Option<Server>,
    pid: u32,
    board: Board,
    address: SocketAddr,
    pipe: PathBuf,
    _scratch: Scratch,
}

impl Readers {
    /// Starts it. It reads once its [`Board`] says so.
    ///
    /// # Errors
    /// When it cannot be started, or its pipe or board not be made.
    pub fn start(setup: &Setup<'_>) -> Result<Self, Error> {
        let scratch = Scratch::new("readers")?;
        let (path, pipe) = (scratch.path().join("board"), scratch.path().join("pipe"));
        let board = Board::open(&path, setup.threads)?;
        let address = free_address()?;
        let mut command = Command::new(own_program()?);
        if !setup.wrapped.is_empty() {
            command.args(setup.wrapped).arg(own_program()?);
        }
        command.args(["reader", "--board"]).arg(&path);
        command.args(["--threads", &setup.threads.to_string()]);
        if setup.pinned {
            command.arg("--pin");
        }
        if setup.portions {
            command.arg("--portions");
        }
        if setup.sockets == 0 {
            nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU)
                .map_err(|e| Error::Server(format!("making a named pipe failed: {e}")))?;
            command.arg("--fifo").arg(&pipe);
        } else {
            command.args(["--udp", &address.to_string()]);
            command.args(["--sockets", &setup.sockets.to_string()]);
        }
        if let Some(queues) = setup.queues {
            command.args(["--queues", &queues.to_string()]);
        }
        if let Some(bytes) = setup.buffer_bytes {
            command.args(["--buffer", &bytes.to_string()]);
        }
        let server = Server::start("the readers", &mut command, "")?;
        Ok(Self {
            pid: server.pid(),
            server: Some(server),
            board,
            address,
            pipe,
            _scratch: scratch,
        })
    }

    /// Waits until it has its sockets.
    ///
    /// # Errors
    /// When that takes too long.
    pub fn until_ready(&self) -> Result<(), Error> {
        let since = Instant::now();
        while !self.board.is_ready() {
            if since.elapsed() > PATIENCE {
                return Err(Error::Server("the readers do not become ready".into()));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Lets the threads begin, and waits until the shim has given each its socket.
    ///
    /// # Errors
    /// When that takes too long.
    pub fn until_split(&self, sockets: usize) -> Result<(), Error> {
        self.board.go();
        let since = Instant::now();
        let there = || {
            let found = diag::sockets_at(Protocol::Udp, diag::Which::Listening, self.address);
            found.is_ok_and(|found| found.len() >= sockets)
        };
        while !there() {
            if since.elapsed() > PATIENCE {
                return Err(Error::Server("the readers are not split".into()));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        // A socket is bound a moment before the program can choose it.
        std::thread::sleep(SEATED);
        Ok(())
    }

    /// The board on which reader and sender count.
    pub fn board(&self) -> &Board {
        &self.board
    }

    /// The sockets' address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The named pipe.
    pub fn pipe(&self) -> &Path {
        &self.pipe
    }

    /// The process that was started.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The CPU time and switches of the readers so far.
    pub fn usage(&self) -> Usage {
        Usage::of_leaves(self.pid)
    }

    /// Ends the program, and returns how many units each thread has read.
    pub fn end(mut self) -> Vec<u64> {
        self.board.stop();
        self.server = None;
        self.board.read()
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.board.stop();
    }
}

/// The metrics of a measurement that both experiments report.
pub fn sample(read: &[u64], sent: &Sent, used: &Usage) -> Sample {
    let all: u64 = read.iter().sum();
    let each = |total: f64| total / all.max(1) as f64;
    let mut sample = Sample::default();
    sample.put("time_s", "s", sent.seconds);
    sample.put("rate_per_s", "1/s", all as f64 / sent.seconds.max(1e-9));
    sample.put("sent", "count", sent.sent as f64);
    sample.put("read", "count", all as f64);
    sample.put("lost", "count", sent.sent.saturating_sub(all) as f64);
    sample.put("dropped", "count", sent.dropped as f64);
    sample.put("reader_cpu_us", "us", each(used.cpu_ns as f64 / 1000.0));
    sample.put("sender_cpu_us", "us", each(sent.cpu_ns as f64 / 1000.0));
    sample.put(
        "switches",
        "1",
        each((used.voluntary_switches + used.involuntary_switches) as f64),
    );
    sample
}

/// A UDP port that is free now.
fn free_address() -> Result<SocketAddr, Error> {
    std::net::UdpSocket::bind("127.0.0.1:0")
        .and_then(|socket| socket.local_addr())
        .map_err(|e| Error::Server(format!("finding a free UDP port failed: {e}")))
}
