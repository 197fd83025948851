//! Queues that are moved all the time: workers are stopped for some milliseconds, one after the other.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use wakeone_kernel::proc::process::sockets_of;
use wakeone_kernel::socket::diag;
use wakeone_model::listener::Protocol;

use crate::error::Error;
use crate::process;
use crate::status::Steered;

/// The options with which queues are moved often: a worker passes for stuck soon, and connections go to stopped ones as to
/// others.
pub const OPTIONS: &[&str] = &["--stuck-after", "1ms", "--policy", "random"];

/// How long a worker is stopped, and then left alone. One that goes on in the middle of a move must not notice it.
const STOPPED: Duration = Duration::from_millis(12);
const LEFT_ALONE: Duration = Duration::from_millis(8);
/// Reading the status takes a process.
const LOOK: Duration = Duration::from_millis(500);

/// The moves that are made in a round. Five rounds make two thousand.
pub fn wanted(quick: bool) -> u64 {
    if quick { 20 } else { 400 }
}

/// Stops the workers below `root` in turn, all of a listener together, until it is enough or the load is over.
///
/// # Errors
/// When the status cannot be read.
pub fn make(address: SocketAddr, root: u32, until: Until, over: &AtomicBool) -> Result<(), Error> {
    let (begun, mut looked) = (Instant::now(), Instant::now());
    for turn in 0.. {
        let workers = workers(address, root);
        if let Some(pids) = workers.get(turn % workers.len().max(1)) {
            let _stopped: Vec<Stopped> = pids.iter().copied().map(Stopped::of).collect();
            std::thread::sleep(STOPPED);
        }
        std::thread::sleep(LEFT_ALONE);
        let done = match until {
            Until::Elapsed(time) => begun.elapsed() >= time,
            Until::Moves(wanted) if looked.elapsed() >= LOOK => {
                looked = Instant::now();
                Steered::on(address).moves()?.0 >= wanted
            }
            Until::Moves(_) => false,
        };
        if done || over.load(Ordering::Relaxed) {
            break;
        }
    }
    Ok(())
}

/// When it is enough.
#[derive(Debug, Clone, Copy)]
pub enum Until {
    /// So many moves were made.
    Moves(u64),
    /// So much time is over.
    Elapsed(Duration),
}

/// The processes that serve; those that have the same listener together.
fn workers(address: SocketAddr, root: u32) -> Vec<Vec<u32>> {
    let listeners = diag::sockets_at(Protocol::Tcp, diag::Which::Listening, address);
    let listeners: Vec<u64> = listeners
        .unwrap_or_default()
        .iter()
        .map(|one| one.socket.inode)
        .collect();
    let mut all = BTreeMap::<u64, Vec<u32>>::new();
    for pid in process::leaves(root) {
        let held = sockets_of(pid).unwrap_or_default();
        let held = held.into_iter().map(|(_, inode)| inode);
        let held: Vec<u64> = held.filter(|inode| listeners.contains(inode)).collect();
        match held[..] {
            [] => {}
            [listener] => all.entry(listener).or_default().push(pid),
            // Each worker of nginx has all listeners, and serves one.
            _ => all.entry(pid.into()).or_default().push(pid),
        }
    }
    all.into_values().collect()
}

/// A process that is stopped while this lives.
struct Stopped(Pid);

impl Stopped {
    fn of(pid: u32) -> Self {
        let pid = Pid::from_raw(pid.cast_signed());
        let _ = kill(pid, Signal::SIGSTOP);
        Self(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = kill(self.0, Signal::SIGCONT);
    }
}
