//! The processes that hold a listener: their epoll sets that have it, and whether any of them waits for it otherwise.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io;
use std::time::{Duration, Instant};

use wakeone_model::listener::Wait;

use super::request::MOST_THREADS;
use crate::proc::process::{self, Descriptors, children};
use crate::proc::reader;
use crate::proc::stat::Stat;
use crate::proc::waits;
use crate::socket::entries::{Entry, READABLE, of_set};

/// How long the search of all processes is not repeated, at least; and how many times as long as it took.
const SEARCH_PAUSE: Duration = Duration::from_secs(10);
const SEARCH_TIMES: u32 = 1000;
/// No worker has more processes, unless somebody makes it so.
const MOST_PROCESSES: usize = 512;

/// The holders of a listener at one moment.
#[derive(Debug, Clone, Default)]
pub struct Look {
    /// The listener's entries in their epoll sets.
    pub entries: Vec<Entry>,
    /// Process, id and line of /proc of each thread that might come to accept soon.
    pub(super) threads: Vec<(u32, u32, Vec<u8>)>,
}

/// Why a listener must not be closed now.
#[derive(Debug)]
pub enum Unsafe {
    /// This process waits for connections there.
    Waits(u32),
    /// It cannot be seen whether this process waits there.
    Unseen(u32, io::Error),
}

impl fmt::Display for Unsafe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Waits(pid) => write!(f, "process {pid} waits for connections there"),
            Self::Unseen(pid, error) => write!(
                f,
                "what process {pid} waits for cannot be seen ({error}), and it must not see the listener close"
            ),
        }
    }
}

/// Finds the processes that hold listeners. Nearly always these are a worker and its children, which are looked at each
/// time. All others are searched now and then.
#[derive(Debug, Default)]
pub struct Holders {
    /// When to search again.
    due: Option<Instant>,
    /// By listener: processes that have it in an epoll set.
    found: HashMap<u64, Vec<u32>>,
}

impl Holders {
    /// Searches all processes for those that have these listeners in epoll sets, if that is due.
    pub fn search(&mut self, inodes: impl FnOnce() -> Vec<u64>) {
        if self.due.is_none_or(|due| due <= Instant::now()) {
            self.search_now(&inodes());
        }
    }

    /// Looks at all holders of a listener. `workers` accept from it.
    ///
    /// # Errors
    /// It must not be closed now.
    pub fn look(&self, inode: u64, workers: impl IntoIterator<Item = u32>) -> Result<Look, Unsafe> {
        let mut pids = self.found.get(&inode).cloned().unwrap_or_default();
        for worker in workers {
            with_children(worker, &mut pids);
        }
        pids.sort_unstable();
        pids.dedup();
        let own = std::process::id();
        let mut look = Look::default();
        for pid in pids.into_iter().filter(|pid| *pid != own) {
            look.at(pid, inode)?;
        }
        look.choose_threads();
        Ok(look)
    }

    fn search_now(&mut self, inodes: &[u64]) {
        let begun = Instant::now();
        self.found.clear();
        for pid in process::pids() {
            let held: HashSet<u64> = process::sockets_of(pid)
                .unwrap_or_default()
                .into_iter()
                .map(|(_, inode)| inode)
                .filter(|inode| inodes.contains(inode))
                .collect();
            for inode in held {
                // One that hides it is asked again, and then counts as unseen.
                if waits::polls(pid, inode).unwrap_or(true) {
                    self.found.entry(inode).or_default().push(pid);
                }
            }
        }
        let pause = (begun.elapsed() * SEARCH_TIMES).max(SEARCH_PAUSE);
        self.due = Some(Instant::now() + pause);
    }
}

fn with_children(pid: u32, all: &mut Vec<u32>) {
    if all.len() < MOST_PROCESSES && pid != 0 {
        all.push(pid);
        for child in children(pid) {
            with_children(child, all);
        }
    }
}

impl Look {
    fn at(&mut self, pid: u32, inode: u64) -> Result<(), Unsafe> {
        let unseen = |error| Unsafe::Unseen(pid, error);
        let held = match Descriptors::of(pid) {
            Err(error) if waits::is_hidden(error.kind()) => return Err(unseen(error)),
            Err(_) => return Ok(()),
            Ok(held) => held,
        };
        if !held.sockets.iter().any(|(_, held)| *held == inode) {
            return Ok(());
        }
        let Ok(Stat { started, state, .. }) = Stat::of(pid) else {
            return Ok(());
        };
        let mut waited_for = HashSet::new();
        for epoll in held.epolls {
            let entries = &mut self.entries;
            let read = of_set((pid, started), epoll, inode, |entry| {
                if entry.events & READABLE != 0 {
                    waited_for.insert(epoll);
                }
                entries.push(entry);
            });
            match read {
                Err(error) if waits::is_hidden(error.kind()) => return Err(unseen(error)),
                _ => {}
            }
        }
        let stopped = matches!(state, 'T' | 't');
        self.threads_of(pid, inode, &held.sockets, &waited_for, stopped)
    }

    fn threads_of(
        &mut self,
        pid: u32,
        inode: u64,
        sockets: &[(i32, u64)],
        waited_for: &HashSet<i32>,
        stopped: bool,
    ) -> Result<(), Unsafe> {
        let listeners = HashSet::from([inode]);
        let calls = match reader::file_of_each(pid, "task", "syscall") {
            Err(error) if waits::is_hidden(error.kind()) => return Err(Unsafe::Unseen(pid, error)),
            other => other.unwrap_or_default(),
        };
        for (tid, line) in calls {
            let line = match line {
                Err(error) if waits::is_hidden(error.kind()) => {
                    return Err(Unsafe::Unseen(pid, error));
                }
                Err(_) => continue,
                Ok(line) => line,
            };
            // It keeps the system call that it was in, and makes it anew: another line tells that it was continued.
            if stopped {
                self.threads.push((pid, tid, line));
                continue;
            }
            match waits::wait_of(
                pid,
                &crate::proc::line::as_text(line.clone()),
                sockets,
                &listeners,
            ) {
                Wait::Accept(at) | Wait::Receive(at) if at == inode => {
                    return Err(Unsafe::Waits(pid));
                }
                Wait::Epoll(set) if waited_for.contains(&set) => return Err(Unsafe::Waits(pid)),
                Wait::Poll(set) if !set.is_empty() => return Err(Unsafe::Waits(pid)),
                Wait::PollUnseen | Wait::IoUring => return Err(Unsafe::Waits(pid)),
                // It cannot learn of the listener once that is out of all sets.
                Wait::Epoll(_) => {}
                _ => self.threads.push((pid, tid, line)),
            }
        }
        Ok(())
    }

    /// Keeps those threads that may come to accept first: the ones that run.
    fn choose_threads(&mut self) {
        self.threads
            .sort_by_key(|(_, _, line)| line != super::request::RUNNING);
        self.threads.truncate(MOST_THREADS);
    }
}
