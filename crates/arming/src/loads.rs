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
use wakeone_kernel::socket::arming::{Waiter, members_of};
use wakeone_kernel::socket::diag;
use wakeone_model::listener::Protocol;

use crate::members::Shared;

/// Corrections take at most this part of the time, and come no more often than that.
const CORRECTION_SHARE: u32 = 1000;
const CORRECT_EVERY: Duration = Duration::from_millis(500);

/// The count of one worker.
#[derive(Debug)]
pub(crate) struct Count {
    /// Its descriptors; `None`: those in its set are counted, as its process has several.
    descriptors: Option<DescriptorCount>,
    /// The set.
    of: (u32, i32),
    /// Descriptors, or members of its set, at the last look.
    total: u64,
    /// How many of those are not connections.
    others: u64,
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
        };
        count.look()?;
        count.others = count.total;
        Ok(count)
    }

    /// Connections of the listener.
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
        Ok(std::mem::replace(&mut self.total, total) != total)
    }

    /// Corrects the count by the sockets that are open connections. A worker that opens or closes something meanwhile is
    /// wrong by that until the next correction.
    fn correct(&mut self, open: &HashSet<u64>) -> io::Result<()> {
        let (pid, epoll) = self.of;
        self.look()?;
        let all: Vec<u64> = match self.descriptors {
            Some(_) => {
                let sockets = process::sockets_of(pid)?.into_iter();
                sockets.map(|(_, inode)| inode).collect()
            }
            None => members_of(pid, epoll)?,
        };
        let held = all.iter().filter(|inode| open.contains(inode)).count();
        self.others = self.total.saturating_sub(held as u64);
        Ok(())
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

    /// Corrects the counts of these workers.
    ///
    /// # Errors
    /// The kernel does not show the connections.
    pub fn correct<'a>(
        &mut self,
        shared: &Shared,
        workers: impl Iterator<Item = &'a mut Count>,
    ) -> io::Result<()> {
        let begun = Instant::now();
        let open = diag::accepted_at(Protocol::Tcp, shared.address)?;
        for count in workers {
            // A worker that is gone has no count.
            let _ = count.correct(&open);
        }
        self.due = Instant::now() + (begun.elapsed() * CORRECTION_SHARE).max(CORRECT_EVERY);
        Ok(())
    }
}
