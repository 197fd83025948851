//! Which workers are woken for a shared listener, changed from outside.
//!
//! A worker that waits in epoll is woken because its epoll set has an entry of the listener. Another process may borrow
//! the set and change that entry: without EPOLLIN the worker is not woken (it is *disarmed*), and with EPOLLIN it is
//! again (*armed*; `ep_modify` polls at once, so nothing is missed). Some workers wait exclusively (EPOLLEXCLUSIVE). The
//! kernel wakes the first of those in the listener's wait list, and an entry that is added anew goes to its end.
//!
//! The guardian makes the changes, a process of its own: see [`guardian`]. It holds nothing of the server between two
//! changes. If the steerer ends, stops or hangs, the guardian makes every entry as the server made it. If both are killed,
//! whoever comes next reads their [`Records`] and calls [`repair`].

mod guardian;
mod request;
mod sets;

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use wakeone_model::arming::Change;

use self::request::{CHANGES, DISMISS, ENLIST, LEND};
pub use self::request::{Condition, MOST, Records};
pub use self::sets::{QueueWatch, Waiter, is_same_set, members_of, waiters_of, waits_in};
use super::entries::Entry;
use crate::proc::process;
use crate::proc::reader;
use crate::proc::reader::helper::{Helper, Outcome, has_ended};
use crate::proc::stat::Stat;

/// Changes entries for a steerer, and undoes that when the steerer is gone.
#[derive(Debug)]
pub struct Guardian {
    records: Records,
    helper: Option<Helper>,
    /// Places whose set and listener the helper may not borrow, and this process may: Yama lets an ancestor in, and the
    /// helper is none.
    lent: BTreeSet<usize>,
}

impl Guardian {
    /// Starts a guardian with empty records in a file.
    ///
    /// # Errors
    /// The file cannot be mapped, or no process can be started.
    pub fn start(file: &File) -> io::Result<Self> {
        let mut guardian = Self {
            records: Records::create(file)?,
            helper: None,
            lent: BTreeSet::new(),
        };
        guardian.helper()?;
        Ok(guardian)
    }

    /// Starts another guardian where the last one ended or hung, with all entries that are known.
    fn helper(&mut self) -> io::Result<&mut Helper> {
        if self.helper.as_ref().is_none_or(|one| has_ended(one.pid)) {
            let records = &self.records;
            let mut helper =
                Helper::start(|socket, real_time| guardian::serve(records, socket, real_time))?;
            for at in 0..MOST {
                if let Some((entry, _)) = self.records.entry(at)
                    && let Ok(process) = handle_of(&entry)
                {
                    tell(&mut helper, &[ENLIST, at as u32], &[process.as_fd()])?;
                }
                if self.lent.contains(&at) && self.records.condition(at).is_changed() {
                    let _ = lend(&self.records, &mut helper, at);
                }
            }
            self.helper = Some(helper);
        }
        self.helper.as_mut().ok_or(io::ErrorKind::NotFound.into())
    }

    /// Starts another guardian if the last one was killed. Call it as often as a promise is renewed.
    ///
    /// # Errors
    /// No process can be started.
    pub fn revive(&mut self) -> io::Result<()> {
        self.helper().map(drop)
    }

    /// Takes charge of an entry, at a place below [`MOST`]. `held`: the number by which its process has the listener now.
    ///
    /// # Errors
    /// Its process is gone, or the guardian cannot be started.
    pub fn enlist(&mut self, at: usize, entry: &Entry, held: i32) -> io::Result<()> {
        let process = handle_of(entry)?;
        self.records.note(at, entry, held);
        self.lent.remove(&at);
        self.ask(&[ENLIST, at as u32], &[process.as_fd()]).map(drop)
    }

    /// Forgets the entry of a place: as it is now, it stays.
    ///
    /// # Errors
    /// The guardian cannot be started.
    pub fn dismiss(&mut self, at: usize) -> io::Result<()> {
        self.ask(&[DISMISS, at as u32], &[]).map(drop)
    }

    /// Makes changes, in this order. Returns how each ended: `NotFound` where the server has taken the entry out.
    ///
    /// # Errors
    /// The guardian cannot be started, or hangs in one of the sets.
    pub fn change(&mut self, changes: &[(usize, Change)]) -> io::Result<Vec<io::Result<()>>> {
        for (at, _) in changes {
            if self.lent.contains(at) {
                // If that fails, so does the change.
                let _ = self.lend(*at);
            }
        }
        let mut all = self.ask_for(changes)?;
        for (change, done) in changes.iter().zip(&mut all) {
            let refused = matches!(done, Err(error) if error.raw_os_error() == Some(libc::EPERM));
            if refused && !self.lent.contains(&change.0) && self.lend(change.0).is_ok() {
                self.lent.insert(change.0);
                let again = self.ask_for(std::slice::from_ref(change))?.pop();
                *done = again.unwrap_or(Ok(()));
            }
        }
        Ok(all)
    }

    /// Lends set and listener of a place, if the helper does not have them.
    fn lend(&mut self, at: usize) -> io::Result<()> {
        let has_them = self.lent.contains(&at) && self.records.condition(at).is_changed();
        self.helper()?;
        match &mut self.helper {
            Some(helper) if !has_them => lend(&self.records, helper, at),
            _ => Ok(()),
        }
    }

    fn ask_for(&mut self, changes: &[(usize, Change)]) -> io::Result<Vec<io::Result<()>>> {
        let pairs = changes.iter().take(MOST);
        let words: Vec<u32> = std::iter::once(CHANGES)
            .chain(pairs.flat_map(|(at, change)| [*at as u32, *change as u32]))
            .collect();
        let answer = self.ask(&words, &[])?;
        let errno = |word: &[u8; 4]| match i32::from_ne_bytes(*word) {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        };
        Ok(answer.as_chunks().0.iter().map(errno).collect())
    }

    fn ask(&mut self, words: &[u32], descriptors: &[BorrowedFd<'_>]) -> io::Result<Vec<u8>> {
        let told = tell(self.helper()?, words, descriptors);
        if told
            .as_ref()
            .is_err_and(|error| error.kind() == io::ErrorKind::TimedOut)
            && let Some(helper) = self.helper.take()
        {
            let _ = kill(helper.pid, Signal::SIGKILL);
            reader::wait_for_end(helper.pid);
        }
        told
    }

    /// Promises to call this again before `CLOCK_MONOTONIC` is there. If that is not kept while an entry is changed, the
    /// guardian makes all as they were.
    pub fn promise(&self, until_ns: u64) {
        self.records.due_ns().store(until_ns, Ordering::SeqCst);
    }

    /// How often a promise was not kept. All entries are as they were after that.
    pub fn releases(&self) -> u64 {
        self.records.releases().load(Ordering::SeqCst)
    }

    /// The entries that it is in charge of.
    pub fn records(&self) -> &Records {
        &self.records
    }

    /// The guardian's process.
    pub fn pid(&self) -> Option<Pid> {
        self.helper.as_ref().map(|helper| helper.pid)
    }
}

impl Drop for Guardian {
    /// Has every entry made as it was, and waits for that.
    fn drop(&mut self) {
        if !self.helper.as_ref().is_none_or(Helper::is_ours) {
            return;
        }
        // One that was killed just now left that to us.
        if self.records.is_changed() {
            let _ = self.change(&self.records.changed());
        }
        if let Some(helper) = self.helper.take() {
            let pid = helper.pid;
            drop(helper);
            reader::wait_for_end(pid);
        }
    }
}

fn tell(helper: &mut Helper, words: &[u32], descriptors: &[BorrowedFd<'_>]) -> io::Result<Vec<u8>> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let mut answer = Vec::new();
    match helper.ask_with(&bytes, descriptors, |some| answer.extend_from_slice(some)) {
        Outcome::Answered(Ok(_)) => Ok(answer),
        Outcome::Answered(Err(errno)) => Err(io::Error::from_raw_os_error(errno)),
        Outcome::Hangs(_) | Outcome::Lost(_) => Err(io::ErrorKind::TimedOut.into()),
    }
}

/// Borrows set and listener of a place, and hands them to the helper.
fn lend(records: &Records, helper: &mut Helper, at: usize) -> io::Result<()> {
    let (entry, held) = records.entry(at).ok_or(io::ErrorKind::NotFound)?;
    let process = handle_of(&entry)?;
    let set = process::descriptor_by(&process, entry.pid, entry.epoll)?;
    let listener = process::descriptor_by(&process, entry.pid, held)?;
    tell(helper, &[LEND, at as u32], &[set.as_fd(), listener.as_fd()]).map(drop)
}

/// A pidfd of an entry's process.
fn handle_of(entry: &Entry) -> io::Result<std::os::fd::OwnedFd> {
    let handle = process::handle_of(entry.pid)?;
    // Its number may be another's by now. While it is here, nobody else has the number.
    if Stat::of(entry.pid)?.started == entry.started {
        Ok(handle)
    } else {
        Err(io::Error::from_raw_os_error(libc::ESRCH))
    }
}

/// Makes every entry as its server made it, of records that a steerer and its guardian left when both were killed.
///
/// # Errors
/// An entry cannot be changed: its worker may get no connections.
pub fn repair(file: &File) -> io::Result<()> {
    let records = match Records::open(file) {
        Err(error) if error.kind() == io::ErrorKind::InvalidData => return Ok(()),
        other => other?,
    };
    let left = records.changed();
    if left.is_empty() {
        return Ok(());
    }
    let mut guardian = Guardian {
        records,
        helper: None,
        lent: BTreeSet::new(),
    };
    // A guardian that starts knows all records.
    let mut failed = Ok(());
    for done in guardian.change(&left)? {
        let gone = |error: &io::Error| {
            matches!(
                error.raw_os_error(),
                Some(libc::ENOENT | libc::ESRCH | libc::EBADF | libc::ESTALE)
            )
        };
        match done {
            Err(error) if !gone(&error) => failed = Err(error),
            _ => {}
        }
    }
    failed
}

#[cfg(test)]
mod tests;
