//! Threads that wait for a connection on one listening socket or in one of our wait queues, and a client that taps it.

use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::{Shutdown, shutdown};
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use wakeone_waitqueue::{Acceptor, Policy, Waiter};

use crate::error::Error;
use crate::papers::{self, Switch};

/// Name of the threads, by which the trace knows them.
pub const NAME: &str = "herd";
/// How long all threads may take to begin to wait, and to wait again after a tap.
const READY: Duration = Duration::from_secs(20);

/// Threads of `queue-always-wake` that wait select()-like; all its other threads accept.
pub const SELECTING: usize = 4;
/// Connections that our queue holds; they come one at a time.
const BACKLOG: usize = 16;

/// How threads wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waiting {
    /// In an epoll each, without EPOLLEXCLUSIVE.
    WakeAll,
    /// In an epoll each, with EPOLLEXCLUSIVE.
    Exclusive,
    /// In accept().
    Accept,
    /// In our own wait queue.
    Queue(Policy),
    /// In accept(), on the kernel of the papers under this policy.
    Patched(Policy),
}

/// All ways of waiting: the kernel's, the paper's policies in our own queue, and the same in a kernel that has them.
pub const ALL: [Waiting; 11] = [
    Waiting::WakeAll,
    Waiting::Exclusive,
    Waiting::Accept,
    Waiting::Queue(Policy::WakeAll),
    Waiting::Queue(Policy::TaskExclusive),
    Waiting::Queue(Policy::WakeOne),
    Waiting::Queue(Policy::AlwaysWake),
    Waiting::Patched(Policy::WakeAll),
    Waiting::Patched(Policy::TaskExclusive),
    Waiting::Patched(Policy::WakeOne),
    Waiting::Patched(Policy::AlwaysWake),
];

/// Those that this kernel has.
pub fn here() -> impl Iterator<Item = Waiting> {
    let patched = papers::is_here();
    let all = ALL.into_iter();
    all.filter(move |waiting| patched || !matches!(waiting, Waiting::Patched(_)))
}

impl Waiting {
    /// First part of the variants' names.
    pub fn name(self) -> &'static str {
        match self {
            Waiting::WakeAll => "wake-all",
            Waiting::Exclusive => "exclusive",
            Waiting::Accept => "accept",
            Waiting::Queue(Policy::WakeAll) => "queue-wake-all",
            Waiting::Queue(Policy::TaskExclusive) => "queue-task-exclusive",
            Waiting::Queue(Policy::WakeOne) => "queue-wake-one",
            Waiting::Queue(Policy::AlwaysWake) => "queue-always-wake",
            Waiting::Patched(Policy::WakeAll) => "patched-wake-all",
            Waiting::Patched(Policy::TaskExclusive) => "patched-task-exclusive",
            Waiting::Patched(Policy::WakeOne) => "patched-wake-one",
            Waiting::Patched(Policy::AlwaysWake) => "patched-always-wake",
        }
    }

    /// Whether one connection wakes the whole herd.
    pub fn wakes_all(self) -> bool {
        matches!(
            self,
            Waiting::WakeAll | Waiting::Queue(Policy::WakeAll) | Waiting::Patched(Policy::WakeAll)
        )
    }

    /// How many of the threads wait select()-like, to hear of every connection and take none.
    pub fn selecting(self) -> usize {
        match self {
            Waiting::Queue(Policy::AlwaysWake) | Waiting::Patched(Policy::AlwaysWake) => SELECTING,
            _ => 0,
        }
    }

    /// Whether its threads block in accept().
    fn blocks(self) -> bool {
        matches!(self, Waiting::Accept | Waiting::Patched(_))
    }

    /// Sets the kernel as it asks for.
    fn switch(self) -> Result<Option<papers::Set>, Error> {
        match self {
            Waiting::Patched(policy) => Switch::AcceptWake(policy).set().map(Some),
            _ => Ok(None),
        }
    }

    fn place(self) -> std::io::Result<Place> {
        if let Waiting::Queue(policy) = self {
            return Ok(Place::Queue(Arc::new(Acceptor::new(policy, BACKLOG))));
        }
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(!self.blocks())?;
        let address = listener.local_addr()?;
        Ok(Place::Socket(Arc::new(listener), address))
    }

    /// The life of thread `n` of `count`.
    fn life(self, place: &Place, n: usize, count: usize, herd: &Herd) -> nix::Result<Life> {
        let accepted = herd.accepted.clone();
        // The last to come: they wait at the front of the queue because they asked for it.
        let selects = n + self.selecting() >= count;
        let (listener, over) = match place {
            Place::Queue(queue) => {
                let queue = queue.clone();
                return Ok(if selects {
                    Box::new(move || select(&queue))
                } else {
                    Box::new(move || accept(&queue, &accepted))
                });
            }
            Place::Socket(listener, _) => (listener.clone(), herd.over.clone()),
        };
        if selects {
            return Ok(Box::new(move || poll(&listener, &over, &accepted)));
        }
        let epoll = if self.blocks() {
            None
        } else {
            Some(register(&listener, self)?)
        };
        Ok(Box::new(move || {
            wait(&listener, epoll.as_ref(), &over, &accepted);
        }))
    }
}

/// The body of a thread.
type Life = Box<dyn FnOnce() + Send>;

/// Where the herd waits.
enum Place {
    Socket(Arc<TcpListener>, SocketAddr),
    Queue(Arc<Acceptor<()>>),
}

/// A herd of waiting threads. Dropping it ends and joins them.
pub struct Herd {
    place: Place,
    over: Arc<AtomicBool>,
    accepted: Arc<AtomicUsize>,
    threads: Vec<JoinHandle<()>>,
    _switched: Option<papers::Set>,
}

impl Herd {
    /// Lets `count` threads wait, and returns once all of them do.
    ///
    /// # Errors
    /// When the system has no socket, thread or descriptor left for it.
    pub fn gather(waiting: Waiting, count: usize) -> Result<Self, Error> {
        let failed = |e: std::io::Error| {
            Error::Missing(format!(
                "letting {count} threads wait for one connection failed: {e}"
            ))
        };
        let mut herd = Self {
            place: waiting.place().map_err(failed)?,
            over: Arc::default(),
            accepted: Arc::default(),
            threads: Vec::with_capacity(count),
            _switched: waiting.switch()?,
        };
        for n in 0..count {
            let life = waiting
                .life(&herd.place, n, count, &herd)
                .map_err(|e| failed(e.into()))?;
            let builder = std::thread::Builder::new()
                .name(NAME.into())
                .stack_size(64 * 1024);
            herd.threads.push(builder.spawn(life).map_err(failed)?);
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
            quiet = if self.all_wait() { quiet + 1 } else { 0 };
        }
        Ok(())
    }

    /// Whether every thread sleeps where it is to wait: not in an earlier sleep, as for a page of its stack.
    fn all_wait(&self) -> bool {
        let enqueued = match &self.place {
            Place::Socket(..) => true,
            Place::Queue(queue) => queue.waiting() == self.threads.len(),
        };
        enqueued && asleep() >= self.threads.len()
    }

    /// Connects. The caller keeps the returned stream until the connection is accepted.
    fn connect(&self) -> Result<Option<TcpStream>, String> {
        match &self.place {
            Place::Socket(_, address) => {
                TcpStream::connect_timeout(address, Duration::from_secs(5))
                    .map(Some)
                    .map_err(|e| e.to_string())
            }
            Place::Queue(queue) => queue.connect(()).map(|_| None).map_err(|e| e.to_string()),
        }
    }

    /// Connects once and waits until the connection was accepted and closed and all threads wait again, and then for `rest`.
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
        let stream = self.connect().map_err(failed)?;
        let deadline = Instant::now() + READY;
        while self.accepted.load(Ordering::Acquire) == before {
            if Instant::now() > deadline {
                return Err(failed("nobody accepted the connection".into()));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(stream);
        // On a busy machine a large herd needs longer. The next tap would not wake a thread that does not wait yet.
        while !self.all_wait() {
            if Instant::now() > deadline {
                return Err(failed("not all of them came to rest again".into()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
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
        match &self.place {
            // Wakes every waiter: accept() returns EINVAL, every epoll shows EPOLLHUP.
            Place::Socket(listener, _) => {
                let _ = shutdown(listener.as_raw_fd(), Shutdown::Both);
            }
            Place::Queue(queue) => {
                queue.close();
            }
        }
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

/// The body of a thread that accepts from our queue.
fn accept(queue: &Acceptor<()>, accepted: &AtomicUsize) {
    let waiter = &mut Waiter::new();
    while queue.accept(waiter).is_some() {
        accepted.fetch_add(1, Ordering::Release);
    }
}

/// The life of a thread that hears of every connection and takes none.
fn select(queue: &Acceptor<()>) {
    let waiter = &mut Waiter::new();
    let mut known = queue.arrivals();
    while !known.closed {
        known = queue.select(waiter, known.total);
    }
}

/// The life of a thread that hears in poll() of every connection and takes none.
fn poll(listener: &TcpListener, over: &AtomicBool, accepted: &AtomicUsize) {
    while !over.load(Ordering::Acquire) {
        let known = accepted.load(Ordering::Acquire);
        let mut fds = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        let _ = nix::poll::poll(&mut fds, PollTimeout::NONE);
        // Until somebody has taken the connection, poll() would return at once.
        while accepted.load(Ordering::Acquire) == known && !over.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
    }
}

/// The life of a thread that waits on a listening socket.
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

/// The /proc status of every thread of this process that is called [`NAME`], through `f`.
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
        for waiting in here() {
            let herd = Herd::gather(waiting, 8).unwrap();
            let taps = (1..=400).find(|_| {
                let before = herd.voluntary_switches();
                herd.tap(Duration::from_millis(5)).unwrap();
                let switches = (herd.voluntary_switches() - before) as usize;
                // A busy machine delays wake-ups and adds sleeps of other reasons, but not to every tap.
                if waiting.wakes_all() {
                    switches >= 8
                } else {
                    switches == 1 + waiting.selecting()
                }
            });
            assert!(
                taps.is_some(),
                "{waiting:?}: no tap wakes whom it is to wake"
            );
            assert_eq!(
                Some(herd.accepted.load(Ordering::Acquire)),
                taps,
                "{waiting:?}"
            );
            drop(herd);
            // A join returns before the kernel has taken the thread off its list.
            let since = std::time::Instant::now();
            while !threads(|_| ()).is_empty() {
                assert!(
                    since.elapsed() < Duration::from_secs(5),
                    "{waiting:?}: threads are left"
                );
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}
