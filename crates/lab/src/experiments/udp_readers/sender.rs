//! Who sends: as many datagrams as are to be read, from one flow or many, as fast as they are read or faster.

use nix::sys::socket::{setsockopt, sockopt};
use std::fs::File;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::path::Path;
use std::time::{Duration, Instant};
use wakeone_kernel::netstat::Counters;

use super::Mode;
use super::reader::{BYTES, Board};
use crate::Error;
use crate::experiment::Context;

/// So many may be on their way with flow control: 150 small datagrams, at 768 bytes of kernel memory each, fit the usual
/// receive buffer of one socket, of which a quarter may still be charged for what was read.
const WINDOW: u64 = 150;
/// So often the sender looks what was read.
const LOOK_EVERY: u64 = 16;
/// Datagrams of a batch: as many as every kernel makes of one buffer (`UDP_MAX_SEGMENTS`).
const BATCH: usize = 64;
/// The same as [`WINDOW`] for batches, into larger buffers: several for each of eight readers.
const BATCHES_WINDOW: u64 = 2048;
/// How long who sends in batches waits where too many are on their way: a part of the time in which they are read.
const BREATH: Duration = Duration::from_micros(50);
/// When nothing more is read for so long, nothing more will be.
const QUIET: Duration = Duration::from_millis(200);
/// The longest that a measurement may take.
const LONGEST: Duration = Duration::from_secs(60);

/// What was sent and read.
#[derive(Debug, Clone, PartialEq)]
pub struct Sent {
    /// How long the reading took, in seconds.
    pub seconds: f64,
    /// Datagrams sent.
    pub sent: u64,
    /// Datagrams that the kernel dropped in this network namespace meanwhile, for a full receive buffer.
    pub dropped: u64,
    /// CPU time of the sender. On loopback that is also what the kernel does for each datagram until it is in a socket and
    /// its reader woken.
    pub cpu_ns: u64,
}

/// What a batch carries.
const BYTES_OF_BATCH: [u8; BATCH * BYTES] = [b'.'; BATCH * BYTES];

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
    let failed = |e: std::io::Error| Error::Server(format!("sending to {to} failed: {e}"));
    let open = |_| {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        socket.connect(to)?;
        if matches!(mode, Mode::Batches | Mode::Waiting) {
            setsockopt(&socket, sockopt::UdpGsoSegment, &(BYTES as i32))?;
        }
        Ok(socket)
    };
    let flows: Vec<UdpSocket> = (0..flows)
        .map(open)
        .collect::<std::io::Result<_>>()
        .map_err(failed)?;
    let dropped = || Counters::read(None).get("Udp", "RcvbufErrors");
    let before = dropped();
    if mode != Mode::Waiting {
        board.go();
    }
    let mut start = Instant::now();
    let by_call = match mode {
        Mode::Constant | Mode::Flood => 1,
        Mode::Batches | Mode::Waiting => BATCH,
    };
    let used = cpu_time();
    let mut sent = 0;
    for flow in flows.iter().cycle() {
        let left = count - sent;
        if left == 0 {
            break;
        }
        if sent % LOOK_EVERY == 0 {
            keep_back(mode, sent, board, start, context)?;
            (context.progress)(sent as f64 / count as f64);
        }
        let now = left.min(by_call as u64) as usize;
        flow.send(&BYTES_OF_BATCH[..now * BYTES]).map_err(failed)?;
        sent += now as u64;
    }
    let cpu_ns = cpu_time().saturating_sub(used).as_nanos() as u64;
    if mode == Mode::Waiting {
        start = Instant::now();
        board.go();
    }
    let end = until_read(board, count, start, context)?;
    Ok(Sent {
        seconds: (end - start).as_secs_f64(),
        sent: count,
        dropped: dropped() - before,
        cpu_ns,
    })
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
        if mode == Mode::Batches {
            std::thread::sleep(BREATH);
        } else {
            std::thread::yield_now();
        }
    }
    Ok(())
}

/// What this thread has used of the CPUs.
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
        std::thread::sleep(Duration::from_micros(50));
    }
}

fn give_up(start: Instant, context: &Context<'_>) -> Result<(), Error> {
    context.check()?;
    if start.elapsed() > LONGEST {
        return Err(Error::Server(
            "the readers do not read: a minute has passed".into(),
        ));
    }
    Ok(())
}
