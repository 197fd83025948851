//! Clients that the load generator is not: programs of the servers' own, and clients that open lost connections again.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use super::sample::of_told;
use crate::error::Error;
use crate::experiment::Sample;
use crate::stats;

/// Runs a client that prints its result as one line of JSON. One that takes longer than `limit` is ended.
///
/// # Errors
/// When it fails, or prints something else.
pub fn told(command: &mut Command, limit: Duration) -> Result<Sample, Error> {
    let failed = |why: String| Error::Server(format!("the client failed: {why}"));
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| failed(e.to_string()))?;
    let (ended, end) = std::sync::mpsc::channel::<()>();
    let handle = Pid::from_child(&child);
    let handle = pidfd_open(handle, PidfdFlags::empty()).map_err(|e| failed(e.to_string()))?;
    let output = std::thread::scope(|scope| {
        scope.spawn(move || {
            // Its end closes the channel.
            if end.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                let _ = pidfd_send_signal(handle, Signal::KILL);
            }
        });
        let output = child.wait_with_output();
        drop(ended);
        output
    });
    let output = output.map_err(|e| failed(e.to_string()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let found: Option<serde_json::Value> = serde_json::from_str(text.trim()).ok();
    found.as_ref().and_then(of_told).ok_or_else(|| {
        let errors = String::from_utf8_lossy(&output.stderr);
        failed(
            errors
                .lines()
                .last()
                .unwrap_or("it printed no result")
                .to_owned(),
        )
    })
}

/// The connections of [`reopen`], by the workers that hold them.
#[derive(Debug, Default)]
pub struct Held {
    held: BTreeMap<String, u64>,
    /// Answers.
    pub answered: u64,
    /// Requests without one.
    pub lost: u64,
}

impl Held {
    /// The metrics.
    pub fn sample(&self, workers: usize) -> Sample {
        let mut counts: Vec<u64> = self.held.values().copied().filter(|n| *n > 0).collect();
        counts.resize(counts.len().max(workers), 0);
        let mut sample = Sample::default();
        sample.put("busiest", "ratio", stats::max_over_mean(&counts));
        sample.put("lost", "count", self.lost as f64);
        sample.put("planned", "count", (self.answered + self.lost) as f64);
        sample
    }
}

/// How long a client waits for an answer, and how often it looks whether all is over.
const PATIENCE: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(300);

/// Keeps this many connections until `over`, opened so far apart. A client that loses its connection opens it again at
/// once, and asks which worker holds it.
pub fn reopen(address: SocketAddr, count: usize, apart: Duration, over: &AtomicBool) -> Held {
    let held = Mutex::new(Held::default());
    std::thread::scope(|scope| {
        for nth in 0..count {
            let held = &held;
            scope.spawn(move || {
                std::thread::sleep(apart * nth as u32);
                while !over.load(Ordering::Relaxed) {
                    keep(address, held, over);
                }
            });
        }
    });
    held.into_inner().unwrap_or_default()
}

/// Opens one connection, and keeps it until its end, or until `over`.
fn keep(address: SocketAddr, held: &Mutex<Held>, over: &AtomicBool) {
    let count = |change: &dyn Fn(&mut Held)| {
        if let Ok(mut held) = held.lock() {
            change(&mut held);
        }
    };
    let Ok((mut stream, worker)) = ask(address) else {
        count(&|held| held.lost += 1);
        std::thread::sleep(Duration::from_millis(1));
        return;
    };
    count(&|held| {
        held.answered += 1;
        *held.held.entry(worker.clone()).or_default() += 1;
    });
    let _ = stream.set_read_timeout(Some(LOOK));
    let waits = |e: &std::io::Error| e.kind() == std::io::ErrorKind::WouldBlock;
    while !over.load(Ordering::Relaxed) {
        match stream.read(&mut [0; 64]) {
            Err(e) if waits(&e) => {}
            _ => {
                count(&|held| *held.held.entry(worker.clone()).or_default() -= 1);
                return;
            }
        }
    }
}

/// Connects, asks, and returns the connection with the worker that answered.
fn ask(address: SocketAddr) -> std::io::Result<(TcpStream, String)> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"GET /work?us=0 HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
    let mut answer = Vec::new();
    let mut part = [0; 1024];
    // The body is `ok` and a line's end.
    while !answer.ends_with(b"ok\n") {
        match stream.read(&mut part)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            read => answer.extend_from_slice(&part[..read]),
        }
    }
    let text = String::from_utf8_lossy(&answer).to_ascii_lowercase();
    let line = text.lines().find_map(|line| line.strip_prefix("x-worker:"));
    let worker = line
        .ok_or(std::io::ErrorKind::InvalidData)?
        .trim()
        .to_owned();
    Ok((stream, worker))
}
