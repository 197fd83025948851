//! Reads what processes have open and what their threads wait in, at one moment.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::io;
use std::rc::Rc;

use wakeone_model::listener::{Polled, Process, Thread, Wait};

use crate::proc::process::{self, Descriptors};
use crate::proc::reader;
use crate::proc::waits::{self, Identity};

/// A process at one moment, for all who ask about some of its sockets: reading it takes as long for one listener as for all.
#[derive(Debug)]
pub struct Sight {
    pid: u32,
    identity: Identity,
    open: Descriptors,
    polls: Vec<Polled>,
    is_stopped: bool,
    /// A line of /proc/PID/task/TID/syscall for each thread.
    calls: Vec<(u32, io::Result<String>)>,
}

impl Sight {
    /// Reads a process; `None` where it is gone.
    pub fn of(pid: u32) -> Option<Self> {
        let identity = waits::identity(pid)?;
        let open = Descriptors::of(pid).unwrap_or_default();
        let polled = |epoll: &i32| waits::polled(pid, *epoll).unwrap_or_default();
        let polls = open.epolls.iter().flat_map(polled).collect();
        let calls = reader::file_of_each(pid, "task", "syscall").unwrap_or_default();
        let as_text =
            |(tid, line): (u32, io::Result<Vec<u8>>)| (tid, line.map(super::line::as_text));
        Some(Self {
            pid,
            identity,
            open,
            polls,
            is_stopped: matches!(process::state(pid), Some('T' | 't')),
            calls: calls.into_iter().map(as_text).collect(),
        })
    }

    /// Returns it as far as a listener with sockets of these `inodes` and open `connections` is concerned.
    pub fn about(&self, inodes: &HashSet<u64>, connections: &HashSet<u64>) -> Process {
        let sockets = &self.open.sockets;
        let listening = sockets.iter().filter(|(_, inode)| inodes.contains(inode));
        let descriptors: Vec<(i32, u64)> = listening.copied().collect();
        let mut holds: Vec<u64> = descriptors.iter().map(|(_, inode)| *inode).collect();
        holds.sort_unstable();
        holds.dedup();
        let carried: HashSet<u64> = sockets
            .iter()
            .map(|(_, inode)| *inode)
            .filter(|inode| connections.contains(inode))
            .collect();
        let polls = self.polls.iter().filter(|one| holds.contains(&one.inode));
        Process {
            pid: self.pid,
            parent: self.identity.parent,
            name: self.identity.name.clone(),
            polls: polls.cloned().collect(),
            rings: self.open.has_ring,
            connections: u32::try_from(carried.len()).unwrap_or(u32::MAX),
            threads: self.threads(inodes),
            holds,
            descriptors,
        }
    }

    fn threads(&self, inodes: &HashSet<u64>) -> Vec<Thread> {
        let wait = |line: &io::Result<String>| match line {
            _ if self.is_stopped => Wait::Stopped,
            Ok(line) => waits::wait_of(self.pid, line, &self.open.sockets, inodes),
            Err(error) if waits::is_hidden(error.kind()) => Wait::Unseen,
            Err(_) => Wait::Running,
        };
        let calls = self.calls.iter();
        calls
            .map(|(tid, line)| Thread {
                tid: *tid,
                wait: wait(line),
            })
            .collect()
    }
}

/// Reads one process of a listener: see [`Sight::about`]; `None` where it is gone.
pub fn look(pid: u32, inodes: &HashSet<u64>, connections: &HashSet<u64>) -> Option<Process> {
    Sight::of(pid).map(|sight| sight.about(inodes, connections))
}

/// Processes of one moment. Each is read when somebody first asks for it.
#[derive(Debug, Default)]
pub struct Sights {
    seen: RefCell<HashMap<u32, Option<Rc<Sight>>>>,
    children: RefCell<HashMap<u32, Rc<[u32]>>>,
}

impl Sights {
    /// A process; `None` where it is gone.
    pub fn of(&self, pid: u32) -> Option<Rc<Sight>> {
        let mut seen = self.seen.borrow_mut();
        let sight = seen.entry(pid);
        sight.or_insert_with(|| Sight::of(pid).map(Rc::new)).clone()
    }

    /// The processes that a process started and that are still there.
    pub fn children(&self, pid: u32) -> Rc<[u32]> {
        let mut known = self.children.borrow_mut();
        let children = known.entry(pid);
        Rc::clone(children.or_insert_with(|| process::children(pid).into()))
    }

    /// Whether somebody asked for a process already.
    pub fn has(&self, pid: u32) -> bool {
        self.seen.borrow().contains_key(&pid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, UdpSocket};
    use std::os::fd::{AsFd, AsRawFd};
    use std::time::{Duration, Instant};

    #[test]
    fn a_process_is_read_once_for_all_who_ask() {
        let (one, other) = (
            TcpListener::bind("127.0.0.1:0").expect("bind"),
            TcpListener::bind("127.0.0.1:0").expect("bind"),
        );
        let (own, sights) = (std::process::id(), Sights::default());
        assert!(!sights.has(own));
        let holds = |listener: &TcpListener| {
            let about = HashSet::from([inode(listener)]);
            let sight = sights.of(own).expect("own process");
            sight.about(&about, &HashSet::new()).holds
        };
        assert_eq!(holds(&one), [inode(&one)]);
        drop(other.try_clone().expect("descriptor"));
        assert_eq!(holds(&other), [inode(&other)]);
        assert!(sights.has(own) && sights.of(u32::MAX).is_none());
        let later = TcpListener::bind("127.0.0.1:0").expect("bind");
        assert!(holds(&later).is_empty());
    }

    fn inode(socket: impl AsFd) -> u64 {
        rustix::fs::fstat(socket).expect("stat").st_ino
    }

    /// Looks at this process until one of its threads is seen in that.
    fn seen(wanted: &Wait, inodes: &HashSet<u64>) {
        let since = Instant::now();
        loop {
            let process = look(std::process::id(), inodes, &HashSet::new()).expect("own process");
            if process.threads.iter().any(|t| t.wait == *wanted) {
                return;
            }
            assert!(
                since.elapsed() < Duration::from_secs(10),
                "{wanted:?}: {process:?}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn threads_are_seen_in_what_they_wait_in() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = listener.local_addr().expect("address");
        let inodes = HashSet::from([inode(&listener)]);
        let own = inode(&listener);
        std::thread::scope(|scope| {
            scope.spawn(|| listener.accept().map(drop).expect("accept"));
            seen(&Wait::Accept(own), &inodes);
            std::net::TcpStream::connect(address).expect("connect");
        });
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let flags = rustix::event::PollFlags::IN;
                let mut fds = [rustix::event::PollFd::new(&listener, flags)];
                rustix::event::poll(&mut fds, None).expect("poll");
            });
            seen(&Wait::Poll(vec![own]), &inodes);
            std::net::TcpStream::connect(address).expect("connect");
        });
        listener.accept().expect("accept");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut set = nix::sys::select::FdSet::new();
                set.insert(listener.as_fd());
                nix::sys::select::select(None, &mut set, None, None, None).expect("select");
            });
            seen(&Wait::Poll(vec![own]), &inodes);
            std::net::TcpStream::connect(address).expect("connect");
        });
    }

    #[test]
    fn a_receive_call_on_another_socket_is_none_on_this_one() {
        let (one, other) = (
            UdpSocket::bind("127.0.0.1:0").expect("bind"),
            UdpSocket::bind("127.0.0.1:0").expect("bind"),
        );
        let address = one.local_addr().expect("address");
        std::thread::scope(|scope| {
            scope.spawn(|| one.recv(&mut [0; 8]).expect("receive"));
            seen(&Wait::Receive(inode(&one)), &HashSet::from([inode(&one)]));
            let process = look(
                std::process::id(),
                &HashSet::from([inode(&other)]),
                &HashSet::new(),
            )
            .expect("own process");
            assert!(
                process
                    .threads
                    .iter()
                    .all(|t| !matches!(t.wait, Wait::Receive(_)))
            );
            other.send_to(b"x", address).expect("send");
        });
    }

    #[test]
    fn epoll_sets_are_seen_with_their_events() {
        use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let epoll = Epoll::new(EpollCreateFlags::empty()).expect("epoll");
        let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLEXCLUSIVE;
        epoll
            .add(&listener, EpollEvent::new(flags, 0))
            .expect("add");
        let inodes = HashSet::from([inode(&listener)]);
        let process = look(std::process::id(), &inodes, &HashSet::new()).expect("own process");
        let number = epoll.0.as_raw_fd();
        let found = process
            .polls
            .iter()
            .find(|p| p.epoll == number)
            .expect("set");
        assert_eq!(found.inode, inode(&listener));
        assert_ne!(found.events & wakeone_model::listener::EXCLUSIVE, 0);
        assert_eq!(found.events & wakeone_model::listener::EDGE, 0);
    }
}
