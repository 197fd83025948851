//! Looks: at the queues and at the counts, and what is changed because of them.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use wakeone_bpf::table::flag;
use wakeone_kernel::schedule;
use wakeone_kernel::socket::arming::waits_in;
use wakeone_model::arming::{Change, Turn};
use wakeone_model::looks::{Next, Wanted};

use super::{PROMISE, Steerer, Worker, after};
use crate::shares::Shares;

/// How often to look at queue and loads while no connections come and go. A connection ends the quiet at once, unless a
/// worker accepts it before the steerer runs: epoll then finds the queue empty, and goes on waiting (`ep_send_events`).
const QUIET_EVERY: Duration = Duration::from_millis(100);
/// Looks take at most one part in so many of a CPU while the group is quiet.
const QUIET_SHARE: u32 = 2500;
/// How soon to look for workers after a worker did not take what waited.
const DOUBTED_AFTER: Duration = Duration::from_millis(100);

impl Steerer {
    /// Looks at the queues, and at the counts if that is due.
    pub(super) fn look(&mut self, now: Instant) {
        for listener in &mut self.listeners {
            listener.look(&self.holders);
            if listener.queued {
                self.changed = now;
            }
        }
        let counts = self.due.counts;
        match counts {
            true => self.look_at_counts(now),
            false => self.glance(),
        }
        let spent = schedule::thread_time();
        let took = spent.saturating_sub(std::mem::replace(&mut self.spent, spent));
        let took = took.saturating_sub(std::mem::take(&mut self.spent_aside));
        let after = now.duration_since(std::mem::replace(&mut self.looked, now));
        self.budget.spend(took, after, counts);
        self.plan(now);
    }

    fn look_at_counts(&mut self, now: Instant) {
        self.counted = now;
        let mut changed = false;
        if let Some(shares) = &mut self.shares {
            self.workers.keys().for_each(|place| shares.begin(*place));
        }
        for count in self.counts.values_mut() {
            changed |= count.look().unwrap_or(false);
        }
        if changed {
            self.changed = now;
        }
        self.is_corrected &= !changed;
        if !self.is_corrected && self.corrections.is_due(now) {
            self.aside(|one| one.correct());
        }
        self.decide();
        self.publish();
    }

    /// Lets the least be done for those that wait while all that are armed are busy.
    fn glance(&mut self) {
        let all = &self.workers;
        let glances = self.listeners.iter_mut().map(|listener| {
            let arming = &mut listener.arming;
            arming.glance(listener.queued, |place| waits(all, place))
        });
        let changes = glances.flatten().collect::<Vec<_>>();
        self.make(&changes);
    }

    /// Finds when the next look is due.
    fn plan(&mut self, now: Instant) {
        let quiet = self.is_quiet(now);
        let was_quiet = std::mem::replace(&mut self.was_quiet, quiet);
        // Clients may have closed connections since the last correction, and no worker its own side.
        self.is_corrected &= was_quiet || !quiet;
        for listener in &mut self.listeners {
            listener.arming.set_pace(self.budget.pace());
        }
        self.ring(|arming| quiet || arming.wants_bell());
        let wanted = self.listeners.iter().map(|one| one.arming.wants());
        let next = match wanted.reduce(Wanted::and) {
            Some(wanted) if wanted.hurried || !quiet => {
                self.budget.next(&wanted, now.duration_since(self.counted))
            }
            _ => Next {
                after: self.budget.pause_of(QUIET_EVERY, QUIET_SHARE),
                counts: true,
            },
        };
        match &self.shares {
            Some(shares) if self.turn() == Turn::LeastConnections => shares.renew(next.after),
            // By turns a worker may have many and still be the next.
            Some(shares) => shares.suspend(),
            None => {}
        }
        self.due.look = Instant::now() + next.after;
        self.due.counts = next.counts;
    }

    /// Has the entries changed as the counts of this look want it.
    fn decide(&mut self) {
        let releases = self.guardian.releases();
        let released = std::mem::replace(&mut self.releases, releases) != releases;
        let turn = self.turn();
        let (all, counts) = (&self.workers, &self.counts);
        let mut changes = Vec::new();
        for (number, listener) in self.listeners.iter_mut().enumerate() {
            let arming = &mut listener.arming;
            if released {
                arming.released();
            }
            arming.set_turn(turn);
            let workers = || all.iter().filter(|(_, one)| one.listener == number);
            for (place, worker) in workers() {
                let slot = worker.slot.map(|slot| self.table.slot(slot));
                let (weight, drains) = slot.map_or((1, true), |slot| {
                    (slot.weight().load(Relaxed), slot.has(flag::DRAINING))
                });
                arming.set(*place, weight, drains);
            }
            let refused = self.shares.as_mut().map(Shares::refused);
            arming.refused(refused.unwrap_or_default());
            let loads = workers().map(|(place, worker)| (*place, worker.load(counts)));
            let waits = |place| waits(all, place);
            changes.extend(arming.look(loads, listener.queued, waits));
        }
        self.tell_shares();
        self.make(&changes);
    }

    /// Has entries changed.
    fn make(&mut self, changes: &[(usize, Change)]) {
        if changes.is_empty() {
            return;
        }
        self.guardian.promise(after(PROMISE));
        match self.guardian.change(changes) {
            Ok(done) => {
                for ((place, _), done) in changes.iter().zip(done) {
                    self.heed(*place, done);
                }
            }
            Err(_) => self.change_each(changes),
        }
        // All are asked: a doubt is taken once.
        let doubts = self
            .listeners
            .iter_mut()
            .map(|one| one.arming.take_doubts());
        if doubts.fold(false, |any, one| any | one) {
            let soon = (Instant::now() + DOUBTED_AFTER).max(self.due.doubt);
            self.due.check = self.due.check.min(soon);
            self.due.follow = self.due.follow.min(soon);
        }
    }

    /// Tells what this look has found to those who divide bursts.
    fn tell_shares(&self) {
        let Some(shares) = &self.shares else { return };
        for (place, worker) in &self.workers {
            let slot = worker.slot.map(|slot| self.table.slot(slot));
            let slot = slot.filter(|slot| !slot.has(flag::DRAINING));
            let weight = slot.map_or(0, |slot| slot.weight().load(Relaxed).max(1));
            let busy = self.listeners[worker.listener].arming.is_busy(*place);
            shares.tell(*place, worker.load(&self.counts), weight, busy);
        }
    }

    /// Makes changes one by one, after the guardian hung: a worker lets those hang who change its set.
    fn change_each(&mut self, changes: &[(usize, Change)]) {
        for change in changes {
            let done = self.guardian.change(std::slice::from_ref(change));
            if let (Err(_), Some(worker)) = (&done, self.workers.get(&change.0)) {
                let pid = worker.waiter.entry.pid;
                tracing::warn!(
                    event = "degraded",
                    "{}: process {pid} lets those hang who change its epoll set, and is left alone",
                    self.addresses
                );
                self.avoided.insert(pid);
            }
            let done = done.map(|mut done| done.pop().unwrap_or(Ok(())));
            self.heed(change.0, done.unwrap_or_else(Err));
        }
    }

    /// Notes how a change ended. The server may have taken the entry out.
    fn heed(&mut self, place: usize, done: io::Result<()>) {
        let Err(error) = done else { return };
        tracing::debug!("{}: a worker's entry: {error}", self.addresses);
        match self.guardian.records().condition(place).is_changed() {
            // Its process does not allow it any more, say. The guardian and whoever comes next go on trying.
            true => self.forget(place),
            false => self.leave(place),
        }
        self.due.follow = Instant::now();
    }

    pub(super) fn correct(&mut self) {
        let addresses = self.listeners.iter().map(|one| one.shared.address);
        let counts = self.counts.values_mut();
        let corrected = self.corrections.correct(addresses, counts);
        self.is_corrected = corrected.unwrap_or_else(|error| {
            tracing::debug!(
                "{}: its connections cannot be counted: {error}",
                self.addresses
            );
            true
        });
    }
}

/// Whether a worker waits in epoll now.
fn waits(workers: &BTreeMap<usize, Worker>, place: usize) -> bool {
    workers.get(&place).is_some_and(|worker| {
        let entry = worker.waiter.entry;
        waits_in(entry.pid, entry.epoll).unwrap_or(false)
    })
}
