//! The thread that steers: it looks at queue and loads, has entries changed, and follows workers that come and go.

use std::collections::btree_map::Entry::Vacant;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use wakeone_bpf::table::{Table, flag};
use wakeone_control::policy::Policy;
use wakeone_kernel::proc::process;
use wakeone_kernel::schedule;
use wakeone_kernel::socket::arming::{Condition, Guardian, MOST, Waiter, waits_in};
use wakeone_kernel::socket::entries::{Entry, READABLE, WAKES};
use wakeone_model::arming::{Arming, ArmingConfig, Change, Turn};

use crate::control::Control;
use crate::listener::Listener;
use crate::loads::{Corrections, Count, Counted};
use crate::members::{Shared, Unsteerable, entries, members};
use crate::shares::Shares;
use crate::slots::Slots;

/// How often to look at queue and loads while no connections come and go. A connection ends the quiet at once, unless a
/// worker accepts it before the steerer runs: epoll then finds the queue empty, and goes on waiting (`ep_send_events`).
const QUIET_EVERY: Duration = Duration::from_millis(100);
/// A group counts as quiet after so long without a change.
const QUIET_AFTER: Duration = Duration::from_secs(1);
/// Looks take at most this part of a CPU, and while the group is quiet.
const LOOK_SHARE: u32 = 250;
/// But so much CPU time may be saved for later, that of 2.5 s. Connections that clients open together, and keep, are over before that
/// is spent: a look that changes entries takes some 100 µs, and few looks would leave them where they came first.
const SAVED_AT_MOST: Duration = Duration::from_millis(10);
const QUIET_SHARE: u32 = 1500;
/// How long the guardian waits for the steerer, and how often that says that it lives. Both together are the time for
/// which a worker may stay disarmed after the steerer's end.
const PROMISE: Duration = Duration::from_millis(45);
const BEAT: Duration = Duration::from_millis(30);
/// How often to look for workers that came, and for entries that the server changed.
const FOLLOW_EVERY: Duration = Duration::from_millis(500);
const CHECK_EVERY: Duration = Duration::from_secs(2);
const FOLLOW_SHARE: u32 = 1000;
/// After so long the log says that a worker cannot be looked into.
const HIDDEN_IS_TOLD: Duration = Duration::from_secs(2);
/// The same while the group is quiet. The first connection, and the end of a worker, end that at once.
const QUIET_FOLLOW_EVERY: Duration = Duration::from_secs(2);
const QUIET_CHECK_EVERY: Duration = Duration::from_secs(20);
const QUIET_FOLLOW_SHARE: u32 = 4000;
/// How soon to do so after a worker did not take what waited.
const DOUBTED_AFTER: Duration = Duration::from_millis(100);

/// A worker that waits for one of the listeners, and what is known of it.
#[derive(Debug)]
struct Worker {
    /// The listener's number.
    listener: usize,
    waiter: Waiter,
    /// `None`: it was replaced, and drains.
    slot: Option<usize>,
    /// Tells when it ends.
    handle: OwnedFd,
}

impl Worker {
    /// Its connections.
    fn load(&self, counts: &BTreeMap<Counted, Count>) -> u64 {
        let count = counts.get(&Counted::of(&self.waiter));
        count.map_or(0, Count::connections)
    }
}

/// The figures of a slot that the table shows.
#[derive(Debug, Clone, Copy, Default)]
struct Shown {
    pid: u32,
    active: u64,
    flags: u32,
}

/// The flags of a slot that the steerer sets.
const OURS: u32 = flag::UP | flag::ARMED | flag::STUCK;

/// When the next of each task is due.
#[derive(Debug)]
struct Due {
    look: Instant,
    follow: Instant,
    check: Instant,
    /// No check comes before this, whatever is doubted.
    doubt: Instant,
}

pub(crate) struct Steerer {
    /// Where they listen, for the log.
    addresses: String,
    listeners: Vec<Listener>,
    guardian: Guardian,
    table: Arc<Table>,
    control: Arc<Control>,
    /// By place.
    workers: BTreeMap<usize, Worker>,
    /// They are of all listeners together: a worker with many connections by one gets few by the others.
    counts: BTreeMap<Counted, Count>,
    slots: Slots,
    /// The table shows these, by slot.
    shown: Vec<Shown>,
    /// Processes that hold the listener: workers, and those whose children may be.
    holders: BTreeSet<u32>,
    /// Those that are left alone.
    avoided: BTreeSet<u32>,
    corrections: Corrections,
    /// `None`: bursts go to whom they go.
    shares: Option<Shares>,
    /// No count has changed since the last correction.
    is_corrected: bool,
    /// No connection had come or gone for a while at the last look.
    was_quiet: bool,
    /// Wakes the thread at the end of a worker, or to stop it.
    wakes: OwnedFd,
    due: Due,
    /// The mean CPU time of the last looks. To wake up for them is a part of it.
    cost: Duration,
    /// The CPU time that looks may take still, above their share.
    saved: Duration,
    /// The CPU time of the thread at the end of the last look.
    spent: Duration,
    /// The part since then that was for something else, which has a share of its own: a pause that went by it would be
    /// long for many looks.
    spent_aside: Duration,
    /// When a connection last came or went.
    changed: Instant,
    looked: Instant,
    /// Since when a worker cannot be looked into, and whether the log says so.
    hidden: Option<Instant>,
    told: bool,
    /// Releases by the guardian that are known.
    releases: u64,
}

/// The number of the owner's call, among those of workers.
const CALL: u64 = u64::MAX;
/// That of the listeners' bells.
const BELL: u64 = u64::MAX - 1;
/// That of a refused worker.
const REFUSED: u64 = u64::MAX - 2;

impl Steerer {
    pub fn new(
        shared: &[Shared],
        slots: Slots,
        found: &[Waiter],
        holders: &[u32],
        records: &File,
        table: Arc<Table>,
        control: Arc<Control>,
    ) -> io::Result<Self> {
        let wakes = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let call = epoll::EventData::new_u64(CALL);
        epoll::add(&wakes, &control.waker, call, epoll::EventFlags::IN)?;
        let shares = match shared {
            [only] => Shares::of(only),
            // Nobody knows by which of them a worker got a connection.
            _ => None,
        };
        if let Some(shares) = &shares {
            let refused = epoll::EventData::new_u64(REFUSED);
            epoll::add(&wakes, shares, refused, epoll::EventFlags::IN)?;
        }
        let now = Instant::now();
        let listeners = shared.iter().map(Listener::of);
        let addresses: Vec<String> = shared.iter().map(|one| one.address.to_string()).collect();
        let mut steerer = Self {
            addresses: addresses.join(", "),
            listeners: listeners.collect::<io::Result<_>>()?,
            guardian: Guardian::start(records)?,
            table,
            control,
            workers: BTreeMap::new(),
            counts: BTreeMap::new(),
            slots,
            shown: Vec::new(),
            holders: holders.iter().copied().collect(),
            avoided: BTreeSet::new(),
            corrections: Corrections::new(),
            shares,
            is_corrected: false,
            was_quiet: false,
            wakes,
            due: Due {
                look: now,
                follow: now + FOLLOW_EVERY,
                check: now + CHECK_EVERY,
                doubt: now,
            },
            cost: Duration::ZERO,
            saved: SAVED_AT_MOST,
            spent: Duration::ZERO,
            spent_aside: Duration::ZERO,
            changed: now,
            looked: now,
            hidden: None,
            told: false,
            releases: 0,
        };
        let first: Vec<_> = found.iter().map(|waiter| (0, *waiter)).collect();
        steerer.join(&first)?;
        Ok(steerer)
    }

    /// Steers until it is stopped, or the listener is gone.
    pub fn run(mut self) {
        // Where it is allowed: a worker that has a CPU for itself would keep the steerer waiting.
        let _ = schedule::real_time();
        while !self.control.stops.load(Relaxed) && !self.control.is_gone.load(Relaxed) {
            let now = Instant::now();
            self.guardian.promise(after(PROMISE));
            if let Err(error) = self.guardian.revive() {
                tracing::debug!("{}: no guardian: {error}", self.addresses);
            }
            if self.due.look <= now {
                self.look(now);
            }
            if self.due.follow <= now {
                self.aside(|one| one.follow(now));
            }
            self.sleep();
            if self.due.look > Instant::now() {
                // Or the rarer looks are, the more beats they would have to pay for.
                self.spent = schedule::thread_time();
                self.spent_aside = Duration::ZERO;
            }
        }
        // The guardian makes all entries as they were when it is dropped.
    }

    fn sleep(&mut self) {
        let mut until = self.due.look.min(self.due.follow);
        if self.listeners.iter().any(|one| one.arming.any_disarmed()) {
            until = until.min(Instant::now() + BEAT);
        }
        let left = until.saturating_duration_since(Instant::now());
        let left = rustix::time::Timespec::try_from(left).ok();
        let mut events = Vec::with_capacity(16);
        let _ = epoll::wait(
            &self.wakes,
            rustix::buffer::spare_capacity(&mut events),
            left.as_ref(),
        );
        for event in events {
            match event.data.u64() {
                CALL => self.heed_call(),
                REFUSED => self.heed_refusal(),
                BELL => {
                    self.ring(|_| false);
                    self.changed = Instant::now();
                    self.due.look = self.changed;
                    self.due.follow = self.due.follow.min(self.changed + FOLLOW_EVERY);
                    self.due.check = self.due.check.min(self.changed + CHECK_EVERY);
                }
                place => {
                    self.leave(place as usize);
                    self.due.follow = Instant::now();
                }
            }
        }
    }

    /// A worker has its share of a burst. A look comes at once, though not one after the other.
    fn heed_refusal(&mut self) {
        if self.shares.as_ref().is_some_and(Shares::take_notice) {
            let soon = self.looked + ArmingConfig::default().hurried;
            self.due.look = self.due.look.min(soon);
        }
    }

    /// The owner wants the thread's end, has other slots for the workers, or has one drain.
    fn heed_call(&mut self) {
        let mut called = [0; 8];
        let _ = rustix::io::read(&self.control.waker, &mut called);
        let slots = self.control.slots.lock();
        let slots = slots.unwrap_or_else(PoisonError::into_inner).take();
        if let Some(slots) = slots {
            self.slots = slots;
            for (place, worker) in &mut self.workers {
                worker.slot = self.slots.of(*place, worker.waiter.entry.pid);
            }
        }
        let now = Instant::now();
        self.due.look = now;
        self.due.follow = now;
    }

    /// Has a connection at some of the listeners end the sleep.
    fn ring(&mut self, at: impl Fn(&Arming) -> bool) {
        for listener in &mut self.listeners {
            let on = at(&listener.arming);
            listener.ring(&self.wakes, epoll::EventData::new_u64(BELL), on);
        }
    }

    fn look(&mut self, now: Instant) {
        let mut changed = false;
        for listener in &mut self.listeners {
            listener.look(&self.holders);
            changed |= listener.queued;
        }
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
        let spent = schedule::thread_time();
        let took = spent.saturating_sub(std::mem::replace(&mut self.spent, spent));
        let took = took.saturating_sub(std::mem::take(&mut self.spent_aside));
        self.cost = (self.cost * 15 + took) / 16;
        self.saved = (self.saved + now.duration_since(self.looked) / LOOK_SHARE)
            .min(SAVED_AT_MOST)
            .saturating_sub(took);
        let quiet = self.is_quiet(now);
        let was_quiet = std::mem::replace(&mut self.was_quiet, quiet);
        // Clients may have closed connections since the last correction, and no worker its own side.
        self.is_corrected &= was_quiet || !quiet;
        // Where one worker is armed alone, a connection causes a look. One that waits still would ring without end.
        self.ring(|arming| quiet || arming.is_one_alone() && !arming.is_hurried());
        let armings = || self.listeners.iter().map(|one| &one.arming);
        let pause = armings().map(Arming::pause).min().unwrap_or(QUIET_EVERY);
        let pause = match quiet {
            _ if armings().any(Arming::is_hurried) => pause,
            true => QUIET_EVERY.max(self.cost * QUIET_SHARE),
            false if self.saved > self.cost => pause,
            false => pause.max(self.cost * LOOK_SHARE),
        };
        match &self.shares {
            Some(shares) if self.turn() == Turn::LeastConnections => shares.renew(pause),
            // By turns a worker may have many and still be the next.
            Some(shares) => shares.suspend(),
            None => {}
        }
        self.looked = Instant::now();
        self.due.look = self.looked + pause;
    }

    /// Does something that is no part of a look.
    fn aside(&mut self, act: impl FnOnce(&mut Self)) {
        let before = schedule::thread_time();
        act(self);
        self.spent_aside += schedule::thread_time().saturating_sub(before);
    }

    /// Returns how workers take turns by the policy that the table has now.
    fn turn(&self) -> Turn {
        match Policy::of_number(self.table.policy().load(Relaxed)) {
            Some(Policy::RoundRobin) => Turn::RoundRobin,
            _ => Turn::LeastConnections,
        }
    }

    /// Whether no connection has come or gone for a while.
    fn is_quiet(&self, now: Instant) -> bool {
        now.duration_since(self.changed) >= QUIET_AFTER
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
            changes.extend(arming.look(loads, listener.queued, |place| {
                all.get(&place).is_some_and(|worker| {
                    let entry = worker.waiter.entry;
                    waits_in(entry.pid, entry.epoll).unwrap_or(false)
                })
            }));
        }
        self.tell_shares();
        if changes.is_empty() {
            return;
        }
        self.guardian.promise(after(PROMISE));
        match self.guardian.change(&changes) {
            Ok(done) => {
                for ((place, _), done) in changes.iter().zip(done) {
                    self.heed(*place, done);
                }
            }
            Err(_) => self.change_each(&changes),
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

    fn correct(&mut self) {
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

    fn publish_queue(&self, queued: u32, limit: u32) {
        // The queues are for all; the first slot shows their sum.
        let slot = self.table.slot(0);
        slot.queued().store(queued, Relaxed);
        slot.queue_limit().store(limit, Relaxed);
    }

    fn publish(&mut self) {
        self.show();
        for (slot, shown) in self.shown.iter().enumerate() {
            let slot = self.table.slot(slot);
            slot.active().store(shown.active as i64, Relaxed);
            let before = slot.flags().load(Relaxed);
            if before & OURS != shown.flags {
                slot.flags().fetch_and(!(OURS & !shown.flags), Relaxed);
                slot.flags().fetch_or(shown.flags, Relaxed);
            }
            if slot.pid().swap(shown.pid, Relaxed) != shown.pid {
                self.control.changed.store(true, Relaxed);
            }
        }
        let slots = self.shown.len();
        for gone in slots..self.table.slots().load(Relaxed) as usize {
            let slot = self.table.slot(gone);
            slot.active().store(0, Relaxed);
            slot.flags().store(0, Relaxed);
            slot.pid().store(0, Relaxed);
        }
        self.table.slots().store(slots as u32, Relaxed);
        self.table
            .heartbeat_ns()
            .store(schedule::coarse_ns(), Relaxed);
    }

    /// Sums up the workers of each slot.
    fn show(&mut self) {
        let found = self.workers.values().filter_map(|one| one.slot).max();
        let found = found.map_or(0, |most| most + 1);
        let slots = self.slots.count().unwrap_or(found.max(self.shown.len()));
        self.shown.fill(Shown::default());
        self.shown.resize(slots, Shown::default());
        let mut summed = BTreeSet::new();
        for (place, worker) in &self.workers {
            let Some(slot) = worker.slot else { continue };
            let shown = &mut self.shown[slot];
            shown.pid = worker.waiter.entry.pid;
            // It may wait for several listeners.
            if summed.insert(Counted::of(&worker.waiter)) {
                shown.active += worker.load(&self.counts);
            }
            shown.flags |= flag::UP;
            let arming = &self.listeners[worker.listener].arming;
            if arming.is_armed(*place) {
                shown.flags |= flag::ARMED;
            }
            if arming.is_busy(*place) {
                shown.flags |= flag::STUCK;
            }
        }
        for (slot, pid) in self.slots.given() {
            let shown = &mut self.shown[slot];
            shown.pid = pid;
            // One that does not wait in epoll is woken as always.
            if shown.flags == 0 {
                shown.flags = flag::UP | flag::ARMED;
            }
        }
    }

    /// Follows the workers: those that ended, that came, and whose entries the server has changed.
    fn follow(&mut self, now: Instant) {
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
        let found = self.find_new();
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

    /// Finds the entries of processes that do not wait for a listener yet.
    fn find_new(&mut self) -> Vec<(usize, Waiter)> {
        let mut found = Vec::new();
        let mut hidden = None;
        for (number, listener) in self.listeners.iter().enumerate() {
            let known: BTreeSet<u32> = self.pids_of(number).collect();
            // A master waits for nothing, and is asked again now and then only.
            let new = self.holders.difference(&known).copied();
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
    fn join(&mut self, found: &[(usize, Waiter)]) -> io::Result<()> {
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
    fn leave(&mut self, place: usize) {
        self.forget(place);
        let _ = self.guardian.dismiss(place);
    }

    /// Steers a worker no longer.
    fn forget(&mut self, place: usize) {
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

/// `CLOCK_MONOTONIC` after a time, in ns.
fn after(time: Duration) -> u64 {
    schedule::monotonic_ns() + time.as_nanos() as u64
}
