//! The sleep of the agents' thread: for a time, until somebody wakes it, or until a connection comes to a listener.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, epoll, eventfd, poll};
use rustix::time::Timespec;

use wakeone_bpf::table::MAX_SLOTS;

use crate::dispatcher::Dispatcher;

/// Ends a sleep from another thread.
#[derive(Debug)]
pub(crate) struct Waker(OwnedFd);

impl Waker {
    /// # Errors
    /// Out of descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(
            0,
            EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK,
        )?))
    }

    /// Ends the current sleep, or else the next one.
    pub fn wake(&self) {
        // Fails if many wakes came before the sleeper ran; it wakes then anyway.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Sleeps for at most that long. Returns to which of these sets a connection came meanwhile.
    pub fn sleep<'a>(
        &self,
        time: Duration,
        arrivals: impl Iterator<Item = &'a ListenerSet>,
    ) -> Vec<usize> {
        let time = Timespec::try_from(time).ok();
        let woken = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut polled = vec![woken(self.0.as_fd())];
        polled.extend(arrivals.map(|all| woken(all.0.as_fd())));
        if poll(&mut polled, time.as_ref()).is_err() {
            // A signal came. A sleep may be short.
            return Vec::new();
        }
        if !polled[0].revents().is_empty() {
            let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
        }
        let sets = polled[1..].iter().enumerate();
        let came = sets.filter(|(_, set)| !set.revents().is_empty());
        came.map(|(number, _)| number).collect()
    }
}

/// Tells which of several listeners have a connection that waits, and reports the first one.
///
/// An epoll set does not keep its members open. A listener of another process is borrowed for a moment to be added, and
/// leaves the set when its server closes it.
#[derive(Debug)]
pub(crate) struct ListenerSet(OwnedFd);

/// A listener is readable by this event too. A worker waits for EPOLLIN, so observers do not take the agent for one.
const LOOKS_ON: epoll::EventFlags = epoll::EventFlags::RDNORM;

impl ListenerSet {
    /// Watches all listeners of a group.
    ///
    /// # Errors
    /// One of them is not available, or we are out of descriptors.
    pub fn of(dispatcher: &Dispatcher) -> io::Result<Self> {
        let all = Self(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        dispatcher.each_listener(|slot, listener| all.add(slot, listener))?;
        Ok(all)
    }

    fn add(&self, slot: usize, listener: BorrowedFd<'_>) -> io::Result<()> {
        let data = epoll::EventData::new_u64(slot as u64);
        Ok(epoll::add(&self.0, listener, data, LOOKS_ON)?)
    }

    /// The slots where a connection waits, or whose listener does not listen: one system call, however many there are. `None`
    /// if there are too many to tell.
    pub fn waiting(&self) -> Option<Waiting> {
        let mut events = Vec::with_capacity(MOST_TOLD);
        let now = Timespec::default();
        let room = rustix::buffer::spare_capacity(&mut events);
        epoll::wait(&self.0, room, Some(&now)).ok()?;
        if events.len() == MOST_TOLD {
            return None;
        }
        let mut waiting = Waiting::default();
        for event in events {
            let slot = event.data.u64() as usize;
            waiting.0[slot / 64] |= 1 << (slot % 64);
        }
        Some(waiting)
    }
}

/// So many listeners may have something at once. With more each queue is read.
const MOST_TOLD: usize = 64;

/// Slots where a connection waits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Waiting([u64; MAX_SLOTS / 64]);

impl Waiting {
    /// Whether one waits in this slot.
    pub fn has(&self, slot: usize) -> bool {
        self.0[slot / 64] >> (slot % 64) & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::sync::Arc;
    use std::time::Instant;

    const LONG: Duration = Duration::from_secs(20);

    fn sleep(waker: &Waker, time: Duration, on: Option<&ListenerSet>) -> Vec<usize> {
        waker.sleep(time, on.into_iter())
    }

    fn set() -> ListenerSet {
        ListenerSet(epoll::create(epoll::CreateFlags::CLOEXEC).expect("epoll"))
    }

    #[test]
    fn a_sleep_ends_when_somebody_wakes_it() {
        let waker = Arc::new(Waker::new().expect("waker"));
        let other = Arc::clone(&waker);
        let begun = Instant::now();
        let thread = std::thread::spawn(move || other.wake());
        assert!(sleep(&waker, LONG, None).is_empty());
        thread.join().expect("thread");
        assert!(begun.elapsed() < LONG);
        // A wake ends one sleep only.
        assert!(sleep(&waker, Duration::from_millis(1), None).is_empty());
        let begun = Instant::now();
        sleep(&waker, Duration::from_millis(5), None);
        assert!(begun.elapsed() >= Duration::from_millis(5));
    }

    #[test]
    fn a_connection_ends_it_and_a_listener_is_not_kept() {
        let (waker, all) = (Waker::new().expect("waker"), set());
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = listener.local_addr().expect("address");
        // Like a listener of another process: by a descriptor that is closed again.
        let borrowed = listener.try_clone().expect("descriptor");
        all.add(70, borrowed.as_fd()).expect("added");
        drop(borrowed);
        assert!(sleep(&waker, Duration::from_millis(1), Some(&all)).is_empty());
        let _client = TcpStream::connect(address).expect("connects");
        let begun = Instant::now();
        assert_eq!(sleep(&waker, LONG, Some(&all)), [0]);
        assert!(begun.elapsed() < LONG);
        drop(listener);
        let refused = TcpStream::connect(address).expect_err("nobody listens");
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        assert!(sleep(&waker, Duration::from_millis(1), Some(&all)).is_empty());
    }

    #[test]
    fn several_may_be_borrowed_by_one_number() {
        let all = set();
        let listeners: Vec<TcpListener> = (0..3)
            .map(|_| TcpListener::bind("127.0.0.1:0").expect("bind"))
            .collect();
        for (slot, listener) in listeners.iter().enumerate() {
            let borrowed = listener.try_clone().expect("descriptor");
            all.add(slot, borrowed.as_fd()).expect("added");
        }
        let waker = Waker::new().expect("waker");
        for (slot, listener) in listeners.iter().enumerate() {
            assert_eq!(all.waiting(), Some(Waiting::default()));
            let address = listener.local_addr().expect("address");
            let client = TcpStream::connect(address).expect("connects");
            assert_eq!(sleep(&waker, LONG, Some(&all)), [0]);
            // As long as it waits.
            for _ in 0..2 {
                let waiting = all.waiting().expect("told");
                assert!((0..3).all(|other| waiting.has(other) == (other == slot)));
            }
            drop((listener.accept().expect("accepts"), client));
            assert!(sleep(&waker, Duration::from_millis(1), Some(&all)).is_empty());
        }
    }
}
