//! The thread that steers: it looks at queue and loads, has entries changed, and follows workers that come and go.

mod follow;
mod look;
mod show;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use wakeone_bpf::table::{Table, flag};
use wakeone_control::policy::Policy;
use wakeone_kernel::schedule;
use wakeone_kernel::socket::arming::{Guardian, Waiter};
use wakeone_model::arming::{Arming, ArmingConfig, Turn};
use wakeone_model::looks::{Budget, PROMPT};

use crate::control::Control;
use crate::listener::Listener;
use crate::loads::{Corrections, Count, Counted};
use crate::members::Shared;
use crate::shares::Shares;
use crate::slots::Slots;

/// A group counts as quiet after so long without a change.
const QUIET_AFTER: Duration = Duration::from_secs(1);
/// How long the guardian waits for the steerer, and how often that says that it lives. Both together are the time for
/// which a worker may stay disarmed after the steerer's end.
const PROMISE: Duration = Duration::from_millis(45);
const BEAT: Duration = Duration::from_millis(30);
/// How often to look for workers that came, and for entries that the server changed.
const FOLLOW_EVERY: Duration = Duration::from_millis(500);
const CHECK_EVERY: Duration = Duration::from_secs(2);

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
    /// That is one at the counts, too.
    counts: bool,
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
    /// Since when those are known that wait for nothing.
    idle: BTreeMap<u32, Instant>,
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
    budget: Budget,
    /// The CPU time of the thread at the end of the last look.
    spent: Duration,
    /// The part since then that was for something else, which has a share of its own: a pause that went by it would be
    /// long for many looks.
    spent_aside: Duration,
    /// When a connection last came or went.
    changed: Instant,
    looked: Instant,
    /// When it last looked at the counts.
    counted: Instant,
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
            idle: BTreeMap::new(),
            corrections: Corrections::new(),
            shares,
            is_corrected: false,
            was_quiet: false,
            wakes,
            due: Due {
                look: now,
                counts: true,
                follow: now + FOLLOW_EVERY,
                check: now + CHECK_EVERY,
                doubt: now,
            },
            budget: Budget::of(std::thread::available_parallelism().map_or(1, usize::from)),
            spent: Duration::ZERO,
            spent_aside: Duration::ZERO,
            changed: now,
            looked: now,
            counted: now,
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
                    // The first one after a quiet time may be that of a burst.
                    let soon = if self.was_quiet {
                        Duration::ZERO
                    } else {
                        PROMPT
                    };
                    self.due.look = self.due.look.min(self.changed + soon);
                    self.due.counts |= self.was_quiet || self.budget.pace().prompt;
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
            self.due.counts = true;
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
        self.due.counts = true;
        self.due.follow = now;
    }

    /// Has a connection at some of the listeners end the sleep.
    fn ring(&mut self, at: impl Fn(&Arming) -> bool) {
        for listener in &mut self.listeners {
            let on = at(&listener.arming);
            listener.ring(&self.wakes, epoll::EventData::new_u64(BELL), on);
        }
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
}

/// `CLOCK_MONOTONIC` after a time, in ns.
fn after(time: Duration) -> u64 {
    schedule::monotonic_ns() + time.as_nanos() as u64
}
