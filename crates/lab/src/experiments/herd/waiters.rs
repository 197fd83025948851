//! Threads that wait on one listening socket, and a client that taps it.

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::{Shutdown, shutdown};
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::Error;

/// Name of the threads, by which the trace knows them.
pub const NAME: &str = "herd";
/// How long all threads may take to begin to wait.
const READY: Duration = Duration::from_secs(20);

/// How threads wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waiting {
    /// In an epoll each, without EPOLLEXCLUSIVE.
    WakeAll,
    /// In an epoll each, with EPOLLEXCLUSIVE.
    Exclusive,
    /// In accept().
    Accept,
}

/// All ways of waiting.
pub const ALL: [Waiting; 3] = [Waiting::WakeAll, Waiting::Exclusive, Waiting::Accept];

impl Waiting {
    /// First part of the variants' names.
    pub fn name(self) -> &'static str {
        match self {
            Waiting::WakeAll => "wake-all",
            Waiting::Exclusive => "exclusive",
            Waiting::Accept => "accept",
        }
    }
}

/// A herd of waiting threads. Dropping it ends and joins them.
pub struct Herd {
    listener: Arc<TcpListener>,
    address: SocketAddr,
    over: Arc<AtomicBool>,
    accepted: Arc<AtomicUsize>,
    threads: Vec<JoinHandle<()>>,
}

impl Herd {
    /// Lets `count` threads wait, and returns once all of them do.
    ///
    /// # Errors
    /// When the system has no socket, thread or descriptor left for it.
    pub fn gather(waiting: Waiting, count: usize) -> Result<Self, Error> {
        let failed = |e: std::io::Error| {
            Error::Missing(format!(
                "letting {count} threads wait on one socket failed: {e}"
            ))
        };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
        listener
            .set_nonblocking(waiting != Waiting::Accept)
            .map_err(failed)?;
        let mut herd = Self {
            address: listener.local_addr().map_err(failed)?,
            listener: Arc::new(listener),
            over: Arc::default(),
            accepted: Arc::default(),
            threads: Vec::with_capacity(count),
        };
        for _ in 0..count {
            let (listener, over, accepted) = (
                herd.listener.clone(),
                herd.over.clone(),
                herd.accepted.clone(),
            );
            let epoll = match waiting {
                Waiting::Accept => None,
                other => Some(register(&listener, other).map_err(|e| failed(e.into()))?),
            };
            let builder = std::thread::Builder::new()
                .name(NAME.into())
                .stack_size(64 * 1024);
            let thread = builder
                .spawn(move || wait(&listener, epoll.as_ref(), &over, &accepted))
                .map_err(failed)?;
            herd.threads.push(thread);
        }
        herd.settle(READY)?;
        Ok(herd)
    }

    /// Waits until all threads sleep, by asking each of them twice in a row.
    fn settle(&self, within: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + within;
        let mut quiet = 0;
        while quiet < 2 {
            if Instant::now() > deadline {
                return Err(Error::Missing(format!(
                    "{} waiting threads did not come to rest within {} s",
                    self.threads.len(),
                    within.as_secs()
                )));
            }
            std::thread::sleep(Duration::from_millis(5));
            quiet = if asleep() >= self.threads.len() {
                quiet + 1
            } else {
                0
            };
        }
        Ok(())
    }

    /// Connects once and waits until the connection was accepted and closed, and everything is quiet for `rest`.
    ///
    /// # Errors
    /// When nobody accepts.
    pub fn tap(&self, rest: Duration) -> Result<(), Error> {
        let before = self.accepted.load(Ordering::Acquire);
        let failed = |why: String| {
            Error::Missing(format!(
                "tapping {} waiting threads failed: {why}",
                self.threads.len()
            ))
        };
        let stream = TcpStream::connect_timeout(&self.address, Duration::from_secs(5))
            .map_err(|e| failed(e.to_string()))?;
        let deadline = Instant::now() + Duration::from_secs(5);
        while self.accepted.load(Ordering::Acquire) == before {
            if Instant::now() > deadline {
                return Err(failed("nobody accepted the connection".into()));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(stream);
        std::thread::sleep(rest);
        Ok(())
    }

    /// Voluntary context switches of all waiting threads together, so far.
    pub fn voluntary_switches(&self) -> u64 {
        threads(|status| number(status, "voluntary_ctxt_switches:"))
            .into_iter()
            .sum()
    }
}

impl Drop for Herd {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        // Wakes every waiter: accept() returns EINVAL, every epoll shows EPOLLHUP.
        let _ = shutdown(self.listener.as_raw_fd(), Shutdown::Both);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn register(listener: &TcpListener, waiting: Waiting) -> nix::Result<Epoll> {
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    let mut flags = EpollFlags::EPOLLIN;
    if waiting == Waiting::Exclusive {
        flags |= EpollFlags::EPOLLEXCLUSIVE;
    }
    epoll.add(listener, EpollEvent::new(flags, 0))?;
    Ok(epoll)
}

/// The life of a waiting thread.
fn wait(listener: &TcpListener, epoll: Option<&Epoll>, over: &AtomicBool, accepted: &AtomicUsize) {
    while !over.load(Ordering::Acquire) {
        if let Some(epoll) = epoll {
            let mut events = [EpollEvent::empty()];
            let _ = epoll.wait(&mut events, EpollTimeout::NONE);
        }
        if let Ok((stream, _)) = listener.accept() {
            drop(stream);
            accepted.fetch_add(1, Ordering::Release);
        }
    }
}

/// The /proc status of every thread of ours that is called [`NAME`], through `f`.
fn threads<T>(f: impl Fn(&str) -> T) -> Vec<T> {
    let Ok(tasks) = fs::read_dir("/proc/self/task") else {
        return Vec::new();
    };
    let statuses = tasks
        .flatten()
        .filter_map(|t| fs::read_to_string(t.path().join("status")).ok());
    statuses
        .filter(|s| {
            s.lines()
                .next()
                .is_some_and(|l| l.split_whitespace().nth(1) == Some(NAME))
        })
        .map(|s| f(&s))
        .collect()
}

fn asleep() -> usize {
    threads(|status| status.lines().any(|l| l.starts_with("State:\tS")))
        .into_iter()
        .filter(|s| *s)
        .count()
}

fn number(status: &str, field: &str) -> u64 {
    let line = status.lines().find(|l| l.starts_with(field));
    line.and_then(|l| l.split_whitespace().nth(1))
        .and_then(|w| w.parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_of_waiting_accepts_taps_and_ends() {
        for waiting in ALL {
            let herd = Herd::gather(waiting, 8).unwrap();
            let before = herd.voluntary_switches();
            for _ in 0..5 {
                herd.tap(Duration::from_millis(5)).unwrap();
            }
            assert_eq!(herd.accepted.load(Ordering::Acquire), 5, "{waiting:?}");
            let switches = herd.voluntary_switches() - before;
            match waiting {
                Waiting::WakeAll => assert!(
                    switches >= 30,
                    "all eight sleep again after each tap: {switches}"
                ),
                _ => assert!((5..=15).contains(&switches), "one of them does: {switches}"),
            }
            drop(herd);
            assert_eq!(threads(|_| ()).len(), 0);
        }
    }
}
