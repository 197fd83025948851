//! How many connections each worker has open.
//!
//! The number of a process's descriptors tells when one comes or goes, and costs a microsecond. Which of them are
//! connections of the listener is found now and then, and corrects the rest.
//!
//! A process may have several epoll sets, with a thread for each. Then the members of each set are counted, which costs
//! more and is done more seldom.

use std::collections::HashSet;
use std::io;
use std::time::{Duration, Instant};

use wakeone_kernel::proc::process::DescriptorCount;
use wakeone_kernel::schedule;
use wakeone_kernel::socket::arming::{Waiter, members_of};
use wakeone_kernel::socket::diag::{self, Accepted};
use wakeone_model::address::Address;
use wakeone_model::listener::Protocol;

/// Corrections take at most this part of the time, and come no more often than that.
const CORRECTION_SHARE: u32 = 2000;
const CORRECT_EVERY: Duration = Duration::from_secs(1);

/// About what it takes another process to read what a descriptor is, and to be asked for those of a worker.
const DESCRIPTOR_NS: u64 = 2_000;
const WORKER_NS: u64 = 40_000;

/// The process whose descriptors are counted. Of one that waits for a listener in several epoll sets, the set whose
/// members are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Counted(u32, Option<i32>);

impl Counted {
    pub fn of(waiter: &Waiter) -> Self {
        let entry = waiter.entry;
        Self(entry.pid, (waiter.sets != 1).then_some(entry.epoll))
    }
}

/// The count of one worker.
#[derive(Debug)]
pub(crate) struct Count {
    /// Its descriptors; `None`: those in its set are counted, as its process has several.
    descriptors: Option<DescriptorCount>,
    /// The set.
    of: (u32, i32),
    /// Descriptors, or members of its set, at the last look.
    total: u64,
    /// How many of those are not connections that last.
    others: u64,
    /// How many of the others are connections that their clients have closed. Some servers close their side seconds later.
    ended: u64,
}

/// A worker's descriptors, by which its count is corrected.
#[derive(Debug)]
struct Listed {
    total: u64,
    /// The sockets among them, by inode.
    sockets: Vec<u64>,
    /// The number is not that of the last look.
    changed: bool,
}

impl Count {
    /// That of a worker.
    ///
    /// # Errors
    /// It is gone.
    pub fn of(waiter: &Waiter) -> io::Result<Self> {
        let entry = waiter.entry;
        let descriptors = match waiter.sets {
            1 => Some(DescriptorCount::of(entry.pid)?),
            _ => None,
        };
        let mut count = Self {
            descriptors,
            of: (entry.pid, entry.epoll),
            total: 0,
            others: 0,
            ended: 0,
        };
        count.look()?;
        count.others = count.total;
        Ok(count)
    }

    /// Connections of the listeners.
    pub fn connections(&self) -> u64 {
        self.total.saturating_sub(self.others)
    }

    /// Counts anew. Returns whether the number changed.
    ///
    /// # Errors
    /// The worker is gone.
    pub fn look(&mut self) -> io::Result<bool> {
        let (pid, epoll) = self.of;
        let total = match &self.descriptors {
            Some(descriptors) => descriptors.look()?,
            None => members_of(pid, epoll)?.len() as u64,
        };
        Ok(self.take(total))
    }

    /// Takes a number. Returns whether it is another than the last one.
    fn take(&mut self, total: u64) -> bool {
        let before = std::mem::replace(&mut self.total, total);
        // A worker closes those first that have ended.
        let closed = before.saturating_sub(total).min(self.ended);
        self.ended -= closed;
        self.others -= closed;
        before != total
    }

    fn list(&mut self) -> io::Result<Listed> {
        let (pid, epoll) = self.of;
        let (total, sockets) = match &self.descriptors {
            Some(descriptors) => descriptors.list()?,
            None => {
                let members = members_of(pid, epoll)?;
                (members.len() as u64, members)
            }
        };
        let changed = self.take(total);
        Ok(Listed {
            total,
            sockets,
            changed,
        })
    }

    /// Corrects the count by the connections that were open before it was listed, or after it: one that came or went
    /// meanwhile is among one of the two. Returns whether the number changed since the last look.
    fn correct(&mut self, listed: &Listed, open: &Accepted) -> io::Result<bool> {
        let held = |which: &HashSet<u64>| {
            let sockets = listed.sockets.iter();
            sockets.filter(|inode| which.contains(inode)).count() as u64
        };
        self.others = listed.total.saturating_sub(held(&open.lasting));
        self.ended = held(&open.ended).min(self.others);
        Ok(self.look()? | listed.changed)
    }
}

/// When to find out which descriptors are connections.
#[derive(Debug)]
pub(crate) struct Corrections {
    due: Instant,
}

impl Corrections {
    pub fn new() -> Self {
        Self {
            due: Instant::now(),
        }
    }

    pub fn is_due(&self, now: Instant) -> bool {
        self.due <= now
    }

    /// Corrects the counts of these workers by the connections of all listeners. Returns whether all are right: no count
    /// changed meanwhile.
    ///
    /// # Errors
    /// The kernel does not show the connections.
    pub fn correct<'a>(
        &mut self,
        listeners: impl Iterator<Item = Address> + Clone,
        workers: impl Iterator<Item = &'a mut Count>,
    ) -> io::Result<bool> {
        // Not by the clock: where others have the CPUs, corrections would come too seldom.
        let begun = schedule::thread_time();
        let mut open = open_at(listeners.clone())?;
        // A worker that is gone has no count.
        let listed = workers.filter_map(|one| Some((one.list().ok()?, one)));
        let listed: Vec<_> = listed.collect();
        open.extend(open_at(listeners)?);
        let (mut others, mut settled) = (0, true);
        for (listed, count) in listed {
            settled &= !count.correct(&listed, &open).unwrap_or(false);
            others += listed.total * DESCRIPTOR_NS + WORKER_NS;
        }
        let took = schedule::thread_time().saturating_sub(begun) + Duration::from_nanos(others);
        self.due = Instant::now() + (took * CORRECTION_SHARE).max(CORRECT_EVERY);
        Ok(settled)
    }
}

/// The open connections of these listeners.
fn open_at(listeners: impl Iterator<Item = Address>) -> io::Result<Accepted> {
    let mut open = Accepted::default();
    for listener in listeners {
        open.extend(diag::accepted_at(Protocol::Tcp, listener)?);
    }
    Ok(open)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::epoll;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;
    use wakeone_kernel::socket::entries::Entry;

    #[test]
    fn a_count_is_right_whatever_comes_and_goes_while_it_is_corrected() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let at = listener.local_addr().expect("an address");
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).expect("a set");
        let waiter = Waiter {
            entry: Entry {
                pid: std::process::id(),
                started: 0,
                epoll: set.as_raw_fd(),
                number: -1,
                inode: 0,
                events: 0,
                data: 0,
            },
            held: -1,
            // Its members are counted: other tests of this process open files, too.
            sets: 2,
        };
        let connection = || {
            let client = TcpStream::connect(at).expect("connects");
            let (accepted, _) = listener.accept().expect("accepts");
            let data = epoll::EventData::new_u64(0);
            epoll::add(&set, &accepted, data, epoll::EventFlags::IN).expect("a member");
            (client, accepted)
        };
        let open = || open_at(std::iter::once(Address::Inet(at))).expect("connections");
        let mut all = vec![connection()];
        let mut count = Count::of(&waiter).expect("members");
        assert_eq!(count.connections(), 0, "not corrected yet");
        for goes in [false, true] {
            let mut step = || match goes {
                false => all.push(connection()),
                true => drop(all.pop()),
            };
            let mut before = open();
            step();
            let listed = count.list().expect("members");
            step();
            before.extend(open());
            assert!(count.correct(&listed, &before).expect("counts"), "doubtful");
            assert_eq!(count.connections(), all.len() as u64);
        }
        let listed = count.list().expect("members");
        assert!(!count.correct(&listed, &open()).expect("counts"), "settled");
    }
}
