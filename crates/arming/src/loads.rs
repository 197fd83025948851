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

use wakeone_kernel::proc::process::{self, DescriptorCount};
use wakeone_kernel::schedule;
use wakeone_kernel::socket::arming::{Waiter, members_of};
use wakeone_kernel::socket::diag::{self, Accepted};
use wakeone_model::address::Address;
use wakeone_model::listener::Protocol;

/// Corrections take at most this part of the time, and come no more often than that.
const CORRECTION_SHARE: u32 = 1000;
const CORRECT_EVERY: Duration = Duration::from_millis(500);

/// So many corrections in a row a count may be left as it is.
const LEFT_AT_MOST: u32 = 4;

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
    /// So many corrections in a row it was left as it is. The first one never leaves it.
    left: u32,
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
            left: LEFT_AT_MOST,
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
        let before = std::mem::replace(&mut self.total, total);
        // A worker closes those first that have ended.
        let closed = before.saturating_sub(total).min(self.ended);
        self.ended -= closed;
        self.others -= closed;
        Ok(before != total)
    }

    /// Corrects the count by the sockets that are open connections. One that changes meanwhile is left as it is, unless it
    /// always does. Returns whether it changed since the last look.
    fn correct(&mut self, open: &Accepted) -> io::Result<bool> {
        let (pid, epoll) = self.of;
        let mut changed = self.look()?;
        let all: Vec<u64> = match self.descriptors {
            Some(_) => {
                let sockets = process::sockets_of(pid)?.into_iter();
                sockets.map(|(_, inode)| inode).collect()
            }
            None => members_of(pid, epoll)?,
        };
        changed |= self.look()?;
        self.left += 1;
        if changed && self.left < LEFT_AT_MOST {
            return Ok(true);
        }
        self.left = 0;
        let held = |which: &HashSet<u64>| all.iter().filter(|inode| which.contains(inode)).count();
        self.others = self.total.saturating_sub(held(&open.lasting) as u64);
        self.ended = (held(&open.ended) as u64).min(self.others);
        Ok(changed)
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
        listeners: impl Iterator<Item = Address>,
        workers: impl Iterator<Item = &'a mut Count>,
    ) -> io::Result<bool> {
        // Not by the clock: where others have the CPUs, corrections would come too seldom.
        let begun = schedule::thread_time();
        let mut open = Accepted::default();
        for listener in listeners {
            let there = diag::accepted_at(Protocol::Tcp, listener)?;
            open.lasting.extend(there.lasting);
            open.ended.extend(there.ended);
        }
        let (mut others, mut settled) = (0, true);
        for count in workers {
            // A worker that is gone has no count.
            let Ok(changed) = count.correct(&open) else {
                continue;
            };
            settled &= !changed;
            others += count.total * DESCRIPTOR_NS + WORKER_NS;
        }
        let took = schedule::thread_time().saturating_sub(begun) + Duration::from_nanos(others);
        self.due = Instant::now() + (took * CORRECTION_SHARE).max(CORRECT_EVERY);
        Ok(settled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use wakeone_kernel::socket::entries::Entry;

    /// Nobody would correct it again if it counted as right.
    #[test]
    fn a_connection_that_comes_while_counts_are_corrected_leaves_them_doubtful() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let at = listener.local_addr().expect("an address");
        let entry = Entry {
            pid: std::process::id(),
            started: 0,
            epoll: -1,
            number: -1,
            inode: 0,
            events: 0,
            data: 0,
        };
        let waiter = Waiter {
            entry,
            held: -1,
            sets: 1,
        };
        let mut count = Count::of(&waiter).expect("descriptors");
        let correct = |count: &mut Count| {
            let open = diag::accepted_at(Protocol::Tcp, Address::Inet(at)).expect("connections");
            count.correct(&open).expect("counts")
        };
        correct(&mut count);
        let open = diag::accepted_at(Protocol::Tcp, Address::Inet(at)).expect("connections");
        let _client = TcpStream::connect(at).expect("connects");
        let _accepted = listener.accept().expect("accepts");
        assert!(count.correct(&open).expect("counts"));
        correct(&mut count);
        assert_eq!(count.connections(), 1);
    }
}
