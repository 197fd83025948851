//! The sender: it sends a given number of datagrams, from one flow or many, as fast as they are read or faster.

use nix::sys::socket::{setsockopt, sockopt};
use std::fs::File;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::path::Path;
use std::time::{Duration, Instant};
use wakeone_kernel::proc::netstat::Counters;

use super::Mode;
use super::reader::{BYTES, Board, now_ns};
use crate::error::Error;
use crate::experiment::Context;

/// The most datagrams on their way with flow control. A small datagram takes 768 bytes of kernel memory, so 150 fit
/// the usual receive buffer of one socket. A quarter of that buffer may still be charged for datagrams already read.
pub const WINDOW: u64 = 150;
/// The number of datagrams after which the sender looks how many were read.
const LOOK_EVERY: u64 = 16;
/// Datagrams of a batch: as many as every kernel makes of one buffer (`UDP_MAX_SEGMENTS`).
const BATCH: usize = 64;
/// The same as [`WINDOW`] for batches, into larger buffers: several for each of eight readers.
const BATCHES_WINDOW: u64 = 2048;
/// How long the sender sleeps where it waits for the readers: a part of the time in which what may be on its way is read.
pub const BREATH: Duration = Duration::from_micros(50);
/// Datagrams of a portion, where all wait before the first is read. They are few enough to stay in a processor's
/// cache, as the data in a socket usually does. They are enough that threads read for much longer than it takes to
/// wake them.
pub const PORTION: u64 = 20_000;
/// When nothing is read for this long, nothing more will be.
const QUIET: Duration = Duration::from_millis(200);
/// The longest that a measurement may take.
const LONGEST: Duration = Duration::from_secs(60);

/// The counts and times of a sender's run.
#[derive(Debug, Clone, PartialEq)]
pub struct Sent {
    /// How long the reading took, in seconds.
    pub seconds: f64,
    /// Datagrams sent.
    pub sent: u64,
    /// Datagrams that the kernel dropped in this network namespace meanwhile, for a full receive buffer.
    pub dropped: u64,
    /// CPU time of the sender. On loopback it includes the kernel's work for each datagram, until it is in a socket
    /// and its reader woken.
    pub cpu_ns: u64,
}

/// The payload of a batch.
const BYTES_OF_BATCH: [u8; BATCH * BYTES] = [b'.'; BATCH * BYTES];

/// The sockets to send from, in turn.
pub(super) struct Flows {
    sockets: Vec<UdpSocket>,
    to: SocketAddr,
    next: usize,
    by_call: usize,
}

impl Flows {
    /// Opens sockets that send so many datagrams in a call.
    ///
    /// # Errors
    /// When a socket cannot be had.
    pub(super) fn open(to: SocketAddr, flows: usize, by_call: usize) -> Result<Self, Error> {
        let open = |_| {
            let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
            socket.connect(to)?;
            if by_call > 1 {
                setsockopt(&socket, sockopt::UdpGsoSegment, &(BYTES as i32))?;
            }
            Ok(socket)
        };
        let sockets: std::io::Result<Vec<_>> = (0..flows).map(open).collect();
        Ok(Self {
            sockets: sockets.map_err(|e| Error::Server(format!("sending to {to} failed: {e}")))?,
            to,
            next: 0,
            by_call,
        })
    }

    /// Sends as many datagrams as one call can, at most `most`. Returns how many it sent.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(super) fn send(&mut self, most: u64) -> Result<u64, Error> {
        let now = most.min(self.by_call as u64);
        let flow = &self.sockets[self.next];
        self.next = (self.next + 1) % self.sockets.len();
        flow.send(&BYTES_OF_BATCH[..now as usize * BYTES])
            .map_err(|e| Error::Server(format!("sending to {} failed: {e}", self.to)))?;
        Ok(now)
    }
}

/// Sends `count` datagrams to an address from `flows` sockets, and waits until they are read.
///
/// # Errors
/// When a socket cannot be had, on Ctrl-C, or when it takes too long.
pub fn datagrams(
    to: SocketAddr,
    flows: usize,
    count: u64,
    mode: Mode,
    board: &Board,
    context: &mut Context<'_>,
) -> Result<Sent, Error> {
    let by_call = match mode {
        Mode::Constant | Mode::Flood => 1,
        Mode::Batches | Mode::Waiting => BATCH,
    };
    let mut flows = Flows::open(to, flows, by_call)?;
    let dropped = || Counters::read(None).get("Udp", "RcvbufErrors");
    let (before, used) = (dropped(), cpu_time());
    let seconds = if mode == Mode::Waiting {
        by_portions(&mut flows, count, board, context)?
    } else {
        as_it_is_read(&mut flows, count, mode, board, context)?
    };
    Ok(Sent {
        seconds,
        sent: count,
        dropped: dropped() - before,
        cpu_ns: cpu_time().saturating_sub(used).as_nanos() as u64,
    })
}

/// Sends while it is read; the time from the first sent to the last read, in seconds.
fn as_it_is_read(
    flows: &mut Flows,
    count: u64,
    mode: Mode,
    board: &Board,
    context: &mut Context<'_>,
) -> Result<f64, Error> {
    board.go();
    let start = Instant::now();
    let mut sent = 0;
    while sent < count {
        if sent % LOOK_EVERY == 0 {
            keep_back(mode, sent, board, start, context)?;
            (context.progress)(sent as f64 / count as f64);
        }
        sent += flows.send(count - sent)?;
    }
    let end = until_read(board, count, start, context)?;
    Ok((end - start).as_secs_f64())
}

/// Fills the sockets with one portion after the other, and lets each be read. Returns the time of the reading alone, in
/// seconds.
fn by_portions(
    flows: &mut Flows,
    count: u64,
    board: &Board,
    context: &mut Context<'_>,
) -> Result<f64, Error> {
    let start = Instant::now();
    let (mut sent, mut portion, mut read_ns) = (0, 0, 0);
    while sent < count {
        let end = count.min(sent + PORTION);
        while sent < end {
            sent += flows.send(end - sent)?;
        }
        (context.progress)(sent as f64 / count as f64);
        // A busy machine leaves datagrams to ksoftirqd, and some come after the readers found nothing more.
        let mut last = (board.all(), Instant::now());
        loop {
            portion += 1;
            read_ns += read_portion(portion, board, start, context)?;
            let all = board.all();
            if all != last.0 {
                last = (all, Instant::now());
            }
            if all >= sent || last.1.elapsed() > QUIET {
                break;
            }
            std::thread::sleep(BREATH);
        }
    }
    Ok(read_ns as f64 * 1e-9)
}

/// Lets the readers read until they find nothing more. Returns the time that this takes, in ns.
///
/// # Errors
/// On Ctrl-C, or when it takes too long.
pub fn read_portion(
    portion: u64,
    board: &Board,
    start: Instant,
    context: &Context<'_>,
) -> Result<u64, Error> {
    let opened_ns = now_ns();
    board.open_portion(portion);
    loop {
        if let Some(done_ns) = board.portion_read_ns(portion) {
            return Ok(done_ns.saturating_sub(opened_ns));
        }
        give_up(start, context)?;
        std::thread::sleep(BREATH);
    }
}

/// Waits while too many are on their way for this mode.
fn keep_back(
    mode: Mode,
    sent: u64,
    board: &Board,
    start: Instant,
    context: &mut Context<'_>,
) -> Result<(), Error> {
    let (window, step) = match mode {
        Mode::Constant => (WINDOW, LOOK_EVERY),
        Mode::Batches => (BATCHES_WINDOW, BATCH as u64),
        Mode::Flood | Mode::Waiting => return Ok(()),
    };
    while sent - board.all().min(sent) > window - step {
        give_up(start, context)?;
        std::thread::sleep(BREATH);
    }
    Ok(())
}

/// The CPU time of this thread.
fn cpu_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Writes `count` units of the same size into a named pipe. The pipe itself controls the flow. With it open, the readers
/// are still there.
///
/// # Errors
/// When it cannot be opened or written, or on Ctrl-C.
pub fn fifo(
    path: &Path,
    count: u64,
    board: &Board,
    context: &mut Context<'_>,
) -> Result<(Sent, File), Error> {
    let failed = |source| Error::File {
        action: "writing",
        path: path.into(),
        source,
    };
    let mut pipe = File::options().write(true).open(path).map_err(failed)?;
    board.go();
    let (start, used) = (Instant::now(), cpu_time());
    for sent in 0..count {
        pipe.write_all(&[b'.'; BYTES]).map_err(failed)?;
        if sent % 1024 == 0 {
            context.check()?;
            (context.progress)(sent as f64 / count as f64);
        }
    }
    let end = until_read(board, count, start, context)?;
    let sent = Sent {
        seconds: (end - start).as_secs_f64(),
        sent: count,
        dropped: 0,
        cpu_ns: cpu_time().saturating_sub(used).as_nanos() as u64,
    };
    Ok((sent, pipe))
}

/// When the last one was read: all of them, or those that came through.
fn until_read(
    board: &Board,
    count: u64,
    start: Instant,
    context: &mut Context<'_>,
) -> Result<Instant, Error> {
    let (mut seen, mut last) = (0, Instant::now());
    loop {
        let now = board.all();
        if now != seen {
            (seen, last) = (now, Instant::now());
        }
        if seen >= count || last.elapsed() > QUIET {
            return Ok(last);
        }
        give_up(start, context)?;
        std::thread::sleep(BREATH);
    }
}

/// An error on Ctrl-C, or when it has taken too long since `start`.
///
/// # Errors
/// In these two cases.
pub fn give_up(start: Instant, context: &Context<'_>) -> Result<(), Error> {
    context.check()?;
    if start.elapsed() > LONGEST {
        return Err(Error::Server(
            "the readers do not read: a minute has passed".into(),
        ));
    }
    Ok(())
}
