//! The epoll sets by which processes wait for a listener.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::epoll;
use rustix::io::Errno;

use wakeone_model::listener::Wait;

use crate::proc::line::as_text;
use crate::proc::process::Descriptors;
use crate::proc::reader;
use crate::proc::stat::Stat;
use crate::proc::waits;
use crate::socket::entries::{EXCLUSIVE, Entry, each_member, of_set};

/// A worker: an entry of the listener in an epoll set, and what is around it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiter {
    /// The entry, as it is now.
    pub entry: Entry,
    /// The number by which the process has the listener now.
    pub held: i32,
    /// How many sets of this process have the listener.
    pub sets: usize,
}

impl Waiter {
    /// Whether it waits with EPOLLEXCLUSIVE.
    pub fn is_exclusive(&self) -> bool {
        self.entry.events & EXCLUSIVE != 0
    }

    /// Whether it is the same set, of the same process, whatever the entry is now.
    pub fn is(&self, other: &Self) -> bool {
        let key = |one: &Entry| (one.pid, one.started, one.epoll, one.number);
        key(&self.entry) == key(&other.entry)
    }
}

/// Returns the entries of a listener in the epoll sets of a process. One set may have several, and one set may have
/// several numbers.
///
/// # Errors
/// The process may not be looked at, is gone, or lets those hang who look.
pub fn waiters_of(pid: u32, inode: u64) -> io::Result<Vec<Waiter>> {
    let all = Descriptors::of(pid)?;
    let Some((held, _)) = all.sockets.iter().find(|(_, one)| *one == inode) else {
        return Ok(Vec::new());
    };
    let started = Stat::of(pid)?.started;
    let (mut found, mut sets) = (Vec::new(), 0);
    for epoll in all.epolls {
        let before = found.len();
        let read = of_set((pid, started), epoll, inode, |entry| {
            found.push(Waiter {
                entry,
                held: *held,
                sets: 0,
            });
        });
        // It was closed meanwhile.
        read.or_else(|error| match error.kind() {
            io::ErrorKind::NotFound => Ok(()),
            _ => Err(error),
        })?;
        sets += usize::from(found.len() > before);
    }
    found.iter_mut().for_each(|one| one.sets = sets);
    Ok(found)
}

/// Returns the inodes of the members of an epoll set. The set's lock is held meanwhile: of 1,000 members for 0.2 ms.
///
/// # Errors
/// As [`waiters_of`].
pub fn members_of(pid: u32, epoll: i32) -> io::Result<Vec<u64>> {
    let mut members = Vec::new();
    each_member(pid, epoll, |inode, _, _, _| members.push(inode))?;
    Ok(members)
}

/// Whether a thread of a process waits in this epoll set now.
///
/// # Errors
/// As [`waiters_of`].
pub fn waits_in(pid: u32, epoll: i32) -> io::Result<bool> {
    let none = HashSet::new();
    let calls = reader::file_of_each(pid, "task", "syscall")?;
    Ok(calls.into_iter().any(|(_, line)| {
        let wait = line.map(|line| waits::wait_of(pid, &as_text(line), &[], &none));
        matches!(wait, Ok(Wait::Epoll(set)) if set == epoll)
    }))
}

/// Whether two descriptors are those of one epoll set. A set that was made before a fork is one for all workers, and some
/// servers have two numbers for it.
///
/// A set knows its members by their open file and number. So the second one is refused if it is added to a set of ours by
/// the number of the first and is the same. That needs no kcmp(2), which containers forbid.
///
/// # Errors
/// Out of descriptors, or one of them is no epoll set.
pub fn is_same_set(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> io::Result<bool> {
    let ours = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let mut number = rustix::io::fcntl_dupfd_cloexec(one, 0)?;
    let data = epoll::EventData::new_u64(0);
    // No event wakes anybody.
    epoll::add(&ours, number.as_fd(), data, epoll::EventFlags::empty())?;
    debug_assert!(number.as_raw_fd() != other.as_raw_fd());
    rustix::io::dup3(other, &mut number, rustix::io::DupFlags::CLOEXEC)?;
    match epoll::add(&ours, number.as_fd(), data, epoll::EventFlags::empty()) {
        Ok(()) => Ok(false),
        Err(Errno::EXIST) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// Tells whether anything waits at a listener, which it does not keep open.
#[derive(Debug)]
pub struct QueueWatch(OwnedFd);

impl QueueWatch {
    /// Watches a listener. No worker is woken less for it.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn of(listener: impl AsFd) -> io::Result<Self> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        // A listener is readable by this event too. A worker waits for EPOLLIN, so observers do not take us for one.
        let data = epoll::EventData::new_u64(0);
        epoll::add(&set, listener, data, epoll::EventFlags::RDNORM)?;
        Ok(Self(set))
    }

    /// Whether a connection waits now: in less than a microsecond if none came since it was asked last.
    pub fn is_filled(&self) -> bool {
        let mut events = Vec::with_capacity(1);
        let now = rustix::time::Timespec::default();
        let room = rustix::buffer::spare_capacity(&mut events);
        epoll::wait(&self.0, room, Some(&now)).is_ok_and(|ready| ready > 0)
    }
}

impl AsFd for QueueWatch {
    /// A descriptor that is readable while a connection waits.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
