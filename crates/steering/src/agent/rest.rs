//! The sleep of an agent: for a time, until somebody wakes it, or until a connection comes to a listener.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, epoll, eventfd, poll};
use rustix::time::Timespec;

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

    /// Sleeps for at most that long. Returns whether a connection came to one of these listeners meanwhile.
    pub fn sleep(&self, time: Duration, arrivals: Option<&ListenerSet>) -> bool {
        let time = Timespec::try_from(time).ok();
        let woken = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut polled = vec![woken(self.0.as_fd())];
        polled.extend(arrivals.map(|all| woken(all.0.as_fd())));
        if poll(&mut polled, time.as_ref()).is_err() {
            // A signal came. A sleep may be short.
            return false;
        }
        let came = polled.get(1).is_some_and(|all| !all.revents().is_empty());
        if !polled[0].revents().is_empty() {
            let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
        }
        came
    }
}

/// Reports a connection to one of several listeners.
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
        dispatcher.each_listener(|listener| all.add(listener))?;
        Ok(all)
    }

    fn add(&self, listener: BorrowedFd<'_>) -> io::Result<()> {
        let data = epoll::EventData::new_u64(0);
        Ok(epoll::add(&self.0, listener, data, LOOKS_ON)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::sync::Arc;
    use std::time::Instant;

    const LONG: Duration = Duration::from_secs(20);

    fn set() -> ListenerSet {
        ListenerSet(epoll::create(epoll::CreateFlags::CLOEXEC).expect("epoll"))
    }

    #[test]
    fn a_sleep_ends_when_somebody_wakes_it() {
        let waker = Arc::new(Waker::new().expect("waker"));
        let other = Arc::clone(&waker);
        let begun = Instant::now();
        let thread = std::thread::spawn(move || other.wake());
        assert!(!waker.sleep(LONG, None));
        thread.join().expect("thread");
        assert!(begun.elapsed() < LONG);
        // A wake ends one sleep only.
        assert!(!waker.sleep(Duration::from_millis(1), None));
        let begun = Instant::now();
        waker.sleep(Duration::from_millis(5), None);
        assert!(begun.elapsed() >= Duration::from_millis(5));
    }

    #[test]
    fn a_connection_ends_it_and_a_listener_is_not_kept() {
        let (waker, all) = (Waker::new().expect("waker"), set());
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = listener.local_addr().expect("address");
        // Like a listener of another process: by a descriptor that is closed again.
        let borrowed = listener.try_clone().expect("descriptor");
        all.add(borrowed.as_fd()).expect("added");
        drop(borrowed);
        assert!(!waker.sleep(Duration::from_millis(1), Some(&all)));
        let _client = TcpStream::connect(address).expect("connects");
        let begun = Instant::now();
        assert!(waker.sleep(LONG, Some(&all)));
        assert!(begun.elapsed() < LONG);
        drop(listener);
        let refused = TcpStream::connect(address).expect_err("nobody listens");
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        assert!(!waker.sleep(Duration::from_millis(1), Some(&all)));
    }

    #[test]
    fn several_may_be_borrowed_by_one_number() {
        let all = set();
        let listeners: Vec<TcpListener> = (0..3)
            .map(|_| TcpListener::bind("127.0.0.1:0").expect("bind"))
            .collect();
        for listener in &listeners {
            let borrowed = listener.try_clone().expect("descriptor");
            all.add(borrowed.as_fd()).expect("added");
        }
        let waker = Waker::new().expect("waker");
        for listener in &listeners {
            let address = listener.local_addr().expect("address");
            let client = TcpStream::connect(address).expect("connects");
            assert!(waker.sleep(LONG, Some(&all)));
            drop((listener.accept().expect("accepts"), client));
            assert!(!waker.sleep(Duration::from_millis(1), Some(&all)));
        }
    }
}
