//! Workers that come and go, and entries that their server has changed.

use std::collections::BTreeSet;
use std::collections::btree_map::Entry::Vacant;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use wakeone_kernel::proc::process;
use wakeone_kernel::socket::arming::{Condition, MOST, Waiter};
use wakeone_kernel::socket::entries::{Entry, READABLE, WAKES};

use super::{CHECK_EVERY, FOLLOW_EVERY, Steerer, Worker};
use crate::listener::Listener;
use crate::loads::{Count, Counted};
use crate::members::{Unsteerable, entries, members};
use crate::slots::Slots;

/// To look for workers takes at most this part of the time.
const FOLLOW_SHARE: u32 = 1000;
/// The same while the group is quiet. The first connection, and the end of a worker, end that at once.
const QUIET_FOLLOW_EVERY: Duration = Duration::from_secs(2);
const QUIET_CHECK_EVERY: Duration = Duration::from_secs(20);
const QUIET_FOLLOW_SHARE: u32 = 4000;
/// A process that has held the listener for so long and waits for nothing is a master. It is asked with the checks from then on.
const MASTER_AFTER: Duration = Duration::from_secs(5);
/// After so long the log says that a worker cannot be looked into.
const HIDDEN_IS_TOLD: Duration = Duration::from_secs(2);

impl Steerer {
    /// Follows the workers: those that ended, that came, and whose entries the server has changed.
    pub(super) fn follow(&mut self, now: Instant) {
        let begun = Instant::now();
        let lengths: Vec<_> = self.listeners.iter().map(Listener::length).collect();
        let is_gone = lengths.iter().any(|one| matches!(one, Ok(None)));
        if is_gone && self.slots == Slots::Found && !self.is_held() {
            self.control.is_gone.store(true, Relaxed);
            return;
        }
        let known = lengths.into_iter().flatten().flatten();
        let sum =
            known.reduce(|sum, one| (sum.0.saturating_add(one.0), sum.1.saturating_add(one.1)));
        if let Some((queued, limit)) = sum {
            self.publish_queue(queued, limit);
        }
        let check = self.due.check <= now;
        self.find_holders(check);
        if check {
            self.check_all();
        }
        let found = self.find_new(check);
        if let Err(error) = self.join(&found) {
            tracing::debug!("{}: {error}", self.addresses);
        }
        let (took, done) = (begun.elapsed(), Instant::now());
        let (every, check_every, share) = match self.is_quiet(now) {
            true => (QUIET_FOLLOW_EVERY, QUIET_CHECK_EVERY, QUIET_FOLLOW_SHARE),
            false => (FOLLOW_EVERY, CHECK_EVERY, FOLLOW_SHARE),
        };
        self.due.follow = done + every.max(took * share);
        if check {
            self.due.check = done + check_every.max(took * share);
            self.due.doubt = done + took * share;
        }
    }

    /// Finds the entries of processes that do not wait for a listener yet, with `masters_too` of all.
    fn find_new(&mut self, masters_too: bool) -> Vec<(usize, Waiter)> {
        let workers = self.worker_pids();
        let idle = self.holders.difference(&workers).copied();
        let before = std::mem::take(&mut self.idle);
        let since = |pid| before.get(&pid).copied().unwrap_or_else(Instant::now);
        self.idle = idle.map(|pid| (pid, since(pid))).collect();
        let is_master = |pid: &u32| {
            let since = self.idle.get(pid);
            since.is_some_and(|since| since.elapsed() >= MASTER_AFTER)
        };
        let mut found = Vec::new();
        let mut hidden = None;
        for (number, listener) in self.listeners.iter().enumerate() {
            let known: BTreeSet<u32> = self.pids_of(number).collect();
            let new = self.holders.difference(&known).copied();
            let new = new.filter(|pid| masters_too || !is_master(pid));
            let new: Vec<u32> = new.filter(|pid| !self.avoided.contains(pid)).collect();
            match members(&listener.shared, &new) {
                Ok(some) => found.extend(some.into_iter().map(|waiter| (number, waiter))),
                Err(why) => hidden = Some(why),
            }
        }
        match hidden {
            None => self.hidden = None,
            Some(why) => self.left_alone(&why),
        }
        found
    }

    /// The processes of the workers that wait for a listener.
    fn pids_of(&self, listener: usize) -> impl Iterator<Item = u32> + '_ {
        let workers = self.workers.values();
        let workers = workers.filter(move |one| one.listener == listener);
        workers.map(|one| one.waiter.entry.pid)
    }

    /// New workers that cannot be looked into are no reason to stop. One that has not begun its command yet cannot be.
    fn left_alone(&mut self, why: &Unsteerable) {
        let since = *self.hidden.get_or_insert_with(Instant::now);
        let told = std::mem::replace(&mut self.told, since.elapsed() >= HIDDEN_IS_TOLD);
        if self.told && !told {
            tracing::warn!(
                event = "degraded",
                "workers of {} are woken as the kernel does it: {why}",
                self.addresses
            );
        }
    }

    fn is_held(&self) -> bool {
        let holds = |pid: &u32| {
            let held = process::sockets_of(*pid).unwrap_or_default();
            let ours = |inode| self.listeners.iter().any(|one| one.shared.inode == inode);
            held.iter().any(|(_, inode)| ours(*inode))
        };
        self.holders.iter().any(holds)
    }

    /// Finds the processes that hold the listener: those that did, and their children. Of a worker its handle tells the end.
    /// It hardly has children that accept, and is asked for them only with `workers_too`.
    fn find_holders(&mut self, workers_too: bool) {
        let workers = self.worker_pids();
        let lives =
            |pid: &u32| process::state(*pid).is_some_and(|state| !matches!(state, 'Z' | 'X'));
        self.avoided.retain(|pid| process::state(*pid).is_some());
        self.holders
            .retain(|pid| workers.contains(pid) || lives(pid));
        self.holders.extend(self.slots.given().map(|(_, pid)| pid));
        let children: Vec<u32> = self
            .holders
            .iter()
            .filter(|pid| workers_too || !workers.contains(pid))
            .flat_map(|pid| process::children(*pid))
            .collect();
        self.holders.extend(children);
    }

    /// The processes of the workers.
    fn worker_pids(&self) -> BTreeSet<u32> {
        let workers = self.workers.values();
        workers.map(|one| one.waiter.entry.pid).collect()
    }

    /// Reads all entries again. A change by the server is the new original.
    fn check_all(&mut self) {
        let mut anew = Vec::new();
        for number in 0..self.listeners.len() {
            let pids: Vec<u32> = self.pids_of(number).collect();
            let Ok(now) = entries(&self.listeners[number].shared, &pids) else {
                continue;
            };
            let workers = self
                .workers
                .iter()
                .filter(|(_, one)| one.listener == number);
            let known: Vec<_> = workers.map(|(place, one)| (*place, one.waiter)).collect();
            for (place, known) in known {
                match now.iter().find(|one| one.is(&known)) {
                    None => self.leave(place),
                    Some(one) if self.is_as_we_left_it(place, &one.entry) => {}
                    Some(one) => {
                        // The server has changed it, or made it anew.
                        self.leave(place);
                        anew.push((number, *one));
                    }
                }
            }
        }
        // One without EPOLLIN does not wait for connections now.
        anew.retain(|(_, one)| one.entry.events & READABLE != 0);
        let _ = self.join(&anew);
    }

    fn is_as_we_left_it(&self, place: usize, now: &Entry) -> bool {
        let records = self.guardian.records();
        let Some((made, _)) = records.entry(place) else {
            return false;
        };
        let events = match records.condition(place) {
            Condition::Disarmed => made.events & !WAKES,
            _ => made.events,
        };
        now.events == events && now.data == made.data
    }

    /// Takes in workers, as many as it can.
    pub(super) fn join(&mut self, found: &[(usize, Waiter)]) -> io::Result<()> {
        let mut done = Ok(());
        let mut joined = Vec::new();
        for (listener, waiter) in found {
            match self.enlist(*listener, waiter) {
                Ok(place) => joined.push(place),
                Err(error) => done = Err(error),
            }
        }
        if joined.is_empty() {
            return done;
        }
        self.correct();
        for place in joined {
            let worker = &self.workers[&place];
            let (exclusive, open) = (worker.waiter.is_exclusive(), worker.load(&self.counts));
            let arming = &mut self.listeners[worker.listener].arming;
            arming.join(place, exclusive, open);
        }
        self.publish();
        done
    }

    /// Has the guardian take charge of a worker's entry. Returns the worker's place.
    fn enlist(&mut self, listener: usize, waiter: &Waiter) -> io::Result<usize> {
        let records = self.guardian.records();
        let is_free = |place: &usize| {
            !self.workers.contains_key(place) && records.condition(*place) == Condition::Free
        };
        let Some(place) = (0..MOST).find(is_free) else {
            return Err(io::Error::other("there is no room for another worker"));
        };
        if let Vacant(count) = self.counts.entry(Counted::of(waiter)) {
            count.insert(Count::of(waiter)?);
        }
        let worker = Worker {
            listener,
            waiter: *waiter,
            slot: self.slots.of(place, waiter.entry.pid),
            handle: process::handle_of(waiter.entry.pid)?,
        };
        let data = epoll::EventData::new_u64(place as u64);
        epoll::add(&self.wakes, &worker.handle, data, epoll::EventFlags::IN)?;
        self.guardian.enlist(place, &waiter.entry, waiter.held)?;
        if let Some(shares) = &mut self.shares {
            shares.enlist(place, waiter);
        }
        self.workers.insert(place, worker);
        Ok(place)
    }

    /// A worker ended, or does not wait any more. Its entry stays as it is.
    pub(super) fn leave(&mut self, place: usize) {
        self.forget(place);
        let _ = self.guardian.dismiss(place);
    }

    /// Steers a worker no longer.
    pub(super) fn forget(&mut self, place: usize) {
        let Some(worker) = self.workers.remove(&place) else {
            return;
        };
        let _ = epoll::delete(&self.wakes, worker.handle.as_fd());
        self.listeners[worker.listener].arming.leave(place);
        let left = Counted::of(&worker.waiter);
        if !self
            .workers
            .values()
            .any(|one| Counted::of(&one.waiter) == left)
        {
            self.counts.remove(&left);
        }
        if let Some(shares) = &mut self.shares {
            shares.dismiss(place);
        }
        if self.slots == Slots::Found {
            // The next one there does not drain.
            self.table.slot(place).flags().store(0, Relaxed);
        }
        self.publish();
    }
}
