//! The looks of `wakeone doctor`, in a thread that can be started and ended between two slices.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use wakeone_observe::watcher::{LOOK_EVERY, Watcher};
use wakeone_observe::{Found, find};

use crate::error::Error;

/// A doctor that may watch.
pub struct Doctor {
    found: Found,
    watching: Option<Watching>,
    spent: Spent,
}

/// CPU time and time of watching.
#[derive(Debug, Clone, Copy, Default)]
struct Spent {
    cpu: Duration,
    watched: Duration,
}

struct Watching {
    over: Arc<AtomicBool>,
    thread: JoinHandle<Result<Spent, Error>>,
}

impl Watching {
    fn end(self) -> Result<Spent, Error> {
        self.over.store(true, Relaxed);
        self.thread
            .join()
            .unwrap_or_else(|_| Err(failed("its thread panicked")))
    }
}

fn failed(why: impl std::fmt::Display) -> Error {
    Error::Server(format!("watching the server failed: {why}"))
}

impl Doctor {
    /// Finds the server; watches nothing yet.
    ///
    /// # Errors
    /// When it cannot be seen.
    pub fn of(address: SocketAddr) -> Result<Self, Error> {
        let target = address.to_string().parse().map_err(failed)?;
        let found = find(&target).map_err(failed)?;
        Ok(Self {
            found: found
                .into_iter()
                .next()
                .ok_or_else(|| failed("there is no listener"))?,
            watching: None,
            spent: Spent::default(),
        })
    }

    /// Watches with the kernel's tracepoints (`Some(true)`), without (`Some(false)`), or no more. Returns when it has looked
    /// around, which takes a fifth of a second, and watches.
    ///
    /// # Errors
    /// When it cannot watch, or not in this way.
    pub fn set(&mut self, tracing: Option<bool>) -> Result<(), Error> {
        if let Some(watching) = self.watching.take() {
            let spent = watching.end()?;
            self.spent.cpu += spent.cpu;
            self.spent.watched += spent.watched;
        }
        let Some(tracing) = tracing else {
            return Ok(());
        };
        let (found, over) = (self.found.clone(), Arc::new(AtomicBool::new(false)));
        let (ready, is_ready) = channel();
        let until = Arc::clone(&over);
        let thread = std::thread::spawn(move || {
            let mut watcher = Watcher::start(&found, tracing).map_err(failed)?;
            let _ = ready.send(());
            let spent = watch(&mut watcher, &until)?;
            let view = watcher.watch().map_err(failed)?.view;
            if view.tracing == tracing {
                return Ok(spent);
            }
            Err(Error::Missing(format!(
                "the server could not be watched as it was to be: {}",
                view.missing.join("; ")
            )))
        });
        // An error here means that the thread has ended; its result has the reason.
        let began = is_ready.recv().is_ok();
        self.watching = Some(Watching { over, thread });
        if began { Ok(()) } else { self.set(None) }
    }

    /// The share of a CPU that its looks took so far, in %. The tracepoints' time is charged to the processes that hit them.
    pub fn cpu_percent(&self) -> f64 {
        self.spent.cpu.as_secs_f64() / self.spent.watched.as_secs_f64().max(1e-9) * 100.0
    }
}

impl Drop for Doctor {
    fn drop(&mut self) {
        let _ = self.set(None);
    }
}

/// Looks as often as doctor does.
fn watch(watcher: &mut Watcher, over: &AtomicBool) -> Result<Spent, Error> {
    let (began, cpu) = (Instant::now(), cpu_time());
    let mut next = began;
    while !over.load(Relaxed) {
        watcher.look().map_err(failed)?;
        next = (next + LOOK_EVERY).max(Instant::now());
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    Ok(Spent {
        cpu: cpu_time().saturating_sub(cpu),
        watched: began.elapsed(),
    })
}

/// The CPU time of this thread.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
