//! The dispatch program of one group, from user space: loading or finding it, its listeners, its marks, its removal.

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

use wakeone_kernel::bpf::{self, Feature, LoadPlan, Loaded, Missing, Pinned};
use wakeone_kernel::diag::{self, Which};
use wakeone_kernel::lookup::Place;
use wakeone_kernel::receive_queue::{ReceiveQueue, receive_queue};
use wakeone_kernel::socket::{self, AcceptQueue};
use wakeone_kernel::table::{self, AFFINITY, CLOSING, COUNTED, DATAGRAMS, REFUSING, Table, flag};
use wakeone_kernel::{capability, cgroup};
use wakeone_model::listener::Protocol;

use crate::paths::Paths;
use crate::policy::{Affinity, Policy};
use crate::slot_sockets::{RemoteFd, SlotSockets};

/// Why a group is not steered, as one sentence.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is nowhere to pin to.
    #[error("cannot steer `{name}`: {why}")]
    NoBpffs {
        /// The group.
        name: String,
        /// The missing place and the remedy.
        why: String,
    },
    /// Permission is missing.
    #[error(
        "cannot steer `{name}`: {step} was not allowed; it needs {missing}: start as root or with these capabilities, or choose --policy random, cpu or hash, which need none"
    )]
    NotAllowed {
        /// The group.
        name: String,
        /// What was tried.
        step: String,
        /// The capabilities that are missing.
        missing: String,
    },
    /// The policy does not fit the sockets.
    #[error("cannot steer `{name}` by {why}")]
    Unfit {
        /// The group.
        name: String,
        /// The policy, the reason, and what fits.
        why: String,
    },
    /// The policy that was asked for goes by counts that nobody can keep here.
    #[error(
        "cannot steer `{name}` by {policy}: it goes by open connections, which cannot be counted here: {why}; --policy shortest-queue needs no counts"
    )]
    Uncounted {
        /// The group.
        name: String,
        /// The policy that was asked for.
        policy: Policy,
        /// Why they cannot be counted.
        why: String,
    },
    /// Anything else that the kernel refused.
    #[error("cannot steer `{name}`: {0}", .source)]
    Kernel {
        /// The group.
        name: String,
        /// The step and the answer.
        source: bpf::Error,
    },
}

impl Error {
    /// Returns the error that there is no place to pin to. It also names all capabilities that the next steps need, so
    /// that a user learns of them at once.
    fn no_place(name: &str, why: String) -> Self {
        let missing = capability::missing();
        let why = match missing.as_slice() {
            [] => why,
            missing => format!(
                "{why}; it also needs {}: start as root or with these capabilities, or choose --policy random, cpu or hash, which need none",
                missing.join(" and ")
            ),
        };
        Self::NoBpffs {
            name: name.to_owned(),
            why,
        }
    }

    /// Whether the kernel refused to load a program. Another attempt would not change that.
    pub fn is_load(&self) -> bool {
        matches!(self, Self::Kernel { source, .. } if source.is_load())
    }

    fn of(name: &str) -> impl Fn(bpf::Error) -> Self + '_ {
        move |source| {
            let missing = capability::missing();
            if source.source.kind() == std::io::ErrorKind::PermissionDenied && !missing.is_empty() {
                return Self::NotAllowed {
                    name: name.to_owned(),
                    step: source.step,
                    missing: missing.join(" and "),
                };
            }
            Self::Kernel {
                name: name.to_owned(),
                source,
            }
        }
    }
}

/// The steering of one group, as asked for.
#[derive(Debug)]
pub struct Plan<'a> {
    /// The group's name.
    pub name: &'a str,
    /// Its paths.
    pub paths: &'a Paths,
    /// How a worker is chosen.
    pub policy: Policy,
    /// The policy was asked for by name: no other will do where connections cannot be counted.
    pub by_name: bool,
    /// Weights of slots whose weight is not 1.
    pub weights: &'a [(usize, u32)],
    /// The cgroup that the listeners were created in.
    pub cgroup: Option<&'a Path>,
    /// Length of each accept queue.
    pub backlog: i32,
    /// Workers of an earlier supervisor still serve: use its program and counts if they fit.
    pub adopt: bool,
    /// Have the program read the queues itself where it may; otherwise it uses the lengths that the agent publishes.
    pub read_queues: bool,
    /// The sockets are of UDP, with this affinity of flows; `None`: they listen by TCP. Nothing of UDP is counted, so
    /// `cgroup` is ignored then.
    pub datagrams: Option<Affinity>,
    /// For listeners on private ports: the place of each address where connections arrive. Otherwise empty.
    pub lookup: &'a [Place],
}

impl<'a> Plan<'a> {
    /// Returns a plan for connections by this policy, with a program that reads the queues where it may. All else is
    /// set by its fields.
    pub fn new(name: &'a str, paths: &'a Paths, policy: Policy) -> Self {
        Self {
            name,
            paths,
            policy,
            by_name: false,
            weights: &[],
            cgroup: None,
            backlog: 0,
            adopt: false,
            read_queues: true,
            datagrams: None,
            lookup: &[],
        }
    }

    fn check(&self) -> Result<(), Error> {
        let fits = match self.datagrams {
            Some(_) => self.policy.fits_datagrams(),
            None => Ok(()),
        };
        fits.map_err(|why| Error::Unfit {
            name: self.name.to_owned(),
            why,
        })
    }

    /// Returns the table's flags that tell the kind of sockets.
    fn kind(&self) -> u32 {
        match self.datagrams {
            None => 0,
            Some(Affinity::None) => DATAGRAMS,
            Some(Affinity::Flow) => DATAGRAMS | AFFINITY,
        }
    }
}

/// A steered group. Dropping it leaves everything as it is; [`Dispatcher::end`] removes the program.
#[derive(Debug)]
pub struct Dispatcher {
    name: String,
    pinned: Pinned,
    /// The listeners of each slot.
    seats: Vec<SlotSockets>,
    backlog: i32,
    kept: bool,
    missing: Vec<Missing>,
    policy: Policy,
    /// Listeners that left since the last sweep.
    left: usize,
    /// Whether the log says that a listener found no room.
    told_full: bool,
}

/// Number of listeners that leave between two sweeps of the map of listeners. A sweep lists all listening sockets.
const SWEEP_AFTER: usize = 64;

impl Dispatcher {
    /// Loads the program, or finds the one of an earlier supervisor, and attaches it to the group's listeners. Sockets
    /// that do not listen yet are counted from their first connection on. [`Dispatcher::raise`] has the program choose
    /// them once they listen. The first slot's must be the first to listen.
    ///
    /// # Errors
    /// See [`Error`]; nothing is left loaded or pinned then that was not before.
    pub fn start(plan: &Plan<'_>, listeners: Vec<Vec<OwnedFd>>) -> Result<Self, Error> {
        let addresses = listeners.first().map_or(0, Vec::len);
        let slots = listeners.len();
        plan.check()?;
        let found = open_or_load(plan, addresses, |pinned| {
            pinned.table().slots().load(Relaxed) as usize == slots
        })?;
        let mut dispatcher = Self::of(plan, found);
        dispatcher.seats = listeners.into_iter().map(SlotSockets::Held).collect();
        dispatcher.begin(plan)
    }

    /// The same for listeners that other processes hold, each with its cookie. They are borrowed only for a moment when
    /// something must be done to them, so that none outlives its server. Listeners that an earlier program knew keep
    /// their slots.
    ///
    /// # Errors
    /// See [`Error`]; nothing is left loaded or pinned then that was not before.
    pub fn start_beside(plan: &Plan<'_>, remote: Vec<(u64, RemoteFd)>) -> Result<Self, Error> {
        plan.check()?;
        let mut dispatcher = Self::of(plan, open_or_load(plan, 1, |_| true)?);
        let (known, new): (Vec<_>, Vec<_>) = remote
            .into_iter()
            .partition(|(cookie, _)| dispatcher.pinned.slot_of(*cookie).is_some());
        for (cookie, remote) in known.into_iter().chain(new) {
            dispatcher.place(cookie, remote);
        }
        dispatcher.begin(plan)
    }

    fn of(plan: &Plan<'_>, found: Found) -> Self {
        Self {
            name: plan.name.to_owned(),
            pinned: found.pinned,
            seats: Vec::new(),
            backlog: plan.backlog,
            kept: found.kept,
            missing: found.missing,
            policy: plan.policy,
            left: 0,
            told_full: false,
        }
    }

    fn begin(mut self, plan: &Plan<'_>) -> Result<Self, Error> {
        if self.kept {
            self.forget_gone();
        }
        let filled = self
            .settle_policy(plan)
            .and_then(|()| self.fill(plan).map_err(Error::of(plan.name)));
        match filled {
            Ok(()) => {
                self.tell_missing(plan);
                Ok(self)
            }
            Err(error) => {
                if !self.kept {
                    let _ = bpf::remove_pins(self.pinned.dir());
                    plan.paths.tidy();
                }
                Err(error)
            }
        }
    }

    /// Settles the policy: without counts, the lengths of the accept queues are the next best sign of load.
    fn settle_policy(&mut self, plan: &Plan<'_>) -> Result<(), Error> {
        if plan.datagrams.is_some() || self.counting() || !plan.policy.needs_counts() {
            return Ok(());
        }
        if plan.by_name {
            return Err(Error::Uncounted {
                name: self.name.clone(),
                policy: plan.policy,
                why: self.why_uncounted().to_owned(),
            });
        }
        self.policy = Policy::ShortestQueue;
        Ok(())
    }

    fn why_uncounted(&self) -> &str {
        let missing = |one: &&Missing| one.feature == Feature::Counting;
        match self.missing.iter().find(missing) {
            Some(missing) => &missing.why,
            None if self.kept => "the program of the earlier supervisor does not count them",
            None => "that takes a cgroup2 that the listeners are created in",
        }
    }

    /// Logs each feature that this group lacks, once.
    fn tell_missing(&self, plan: &Plan<'_>) {
        if plan.datagrams.is_none() && !self.counting() {
            let instead = if self.policy == plan.policy {
                String::new()
            } else {
                format!("; {} instead of {}", self.policy, plan.policy)
            };
            tracing::warn!(
                event = "degraded",
                "`{}`: connections are not counted: {}{instead}",
                self.name,
                self.why_uncounted()
            );
        }
        let unread = |one: &&Missing| one.feature == Feature::ReadQueues;
        if let Some(missing) = self.missing.iter().find(unread) {
            tracing::warn!(
                event = "degraded",
                "`{}`: the program cannot read queue lengths itself: {}; shortest-queue uses those that the agent reads",
                self.name,
                missing.why
            );
        }
    }

    /// Assigns a listener its previous slot, or the first free one. Returns `None` if there is no room.
    fn place(&mut self, cookie: u64, remote: RemoteFd) -> Option<usize> {
        let free = |seats: &[SlotSockets]| {
            let empty = seats
                .iter()
                .position(|seat| matches!(seat, SlotSockets::Empty));
            empty.unwrap_or(seats.len())
        };
        let slot = self
            .pinned
            .slot_of(cookie)
            .filter(|slot| {
                !matches!(
                    self.seats.get(*slot),
                    Some(SlotSockets::Held(_) | SlotSockets::Remote(_))
                )
            })
            .unwrap_or_else(|| free(&self.seats));
        if slot >= table::MAX_SLOTS {
            return None;
        }
        while self.seats.len() <= slot {
            self.seats.push(SlotSockets::Empty);
        }
        self.seats[slot] = SlotSockets::of(remote);
        Some(slot)
    }

    /// Fills the table and only then attaches the program: it never runs on a half-filled table.
    fn fill(&self, plan: &Plan<'_>) -> Result<(), bpf::Error> {
        let table = self.table();
        table.contract().store(table::CONTRACT, Relaxed);
        let counted = if self.pinned.counting() { COUNTED } else { 0 };
        table.flags().store(counted | plan.kind(), Relaxed);
        table.slots().store(self.seats.len() as u32, Relaxed);
        self.weigh(plan.weights);
        self.set_policy(self.policy);
        for slot in 0..self.seats.len() {
            self.seat(slot)?;
        }
        table.publish();
        for address in 0..self.pinned.addresses() {
            self.attach(address)?;
        }
        if plan.adopt {
            // The group may have been closing when its supervisor was killed.
            self.open();
        }
        Ok(())
    }

    /// Attaches the program to the group of an address. If some sockets listen already, the others join their group.
    /// Else the group is made here, of the first slot's socket, which must then be the first to listen.
    fn attach(&self, address: usize) -> Result<(), bpf::Error> {
        let listens = |slot: &usize| {
            let listens = self.with(*slot, address, |one| Ok(socket::listens(one)));
            listens.unwrap_or(false)
        };
        let attach = |member: BorrowedFd<'_>| self.pinned.attach(address, member);
        match (0..self.seats.len()).find(listens) {
            Some(slot) => self.with(slot, address, attach),
            None => self.with_any(address, attach),
        }
    }

    /// Makes a slot's listeners known, and has the program choose them if they listen. The slot is up from then on: a
    /// connection that comes before the first worker runs waits in the queue. Marks of an earlier agent are cleared.
    fn seat(&self, slot: usize) -> Result<(), bpf::Error> {
        let place = self.table().slot(slot);
        if matches!(self.seats[slot], SlotSockets::Empty) {
            place.flags().store(0, Relaxed);
            return Ok(());
        }
        for address in 0..self.pinned.addresses() {
            self.with(slot, address, |listener| {
                self.pinned.know_listener(slot, listener)
            })?;
        }
        if self.waits_to_listen(slot) {
            place.flags().store(0, Relaxed);
            return Ok(());
        }
        self.restore(slot)?;
        place.flags().store(flag::UP, Relaxed);
        Ok(())
    }

    /// Whether a slot's sockets are our own and do not listen yet.
    fn waits_to_listen(&self, slot: usize) -> bool {
        !self.datagrams() && !self.seats[slot].held().iter().all(socket::listens)
    }

    /// Has the program choose a slot whose sockets listen from now on.
    ///
    /// # Errors
    /// The kernel's answer; its connections are counted all the same.
    pub fn raise(&self, slot: usize) -> Result<(), bpf::Error> {
        self.restore(slot)?;
        self.table().slot(slot).mark(flag::UP, true);
        Ok(())
    }

    /// Takes in a listener that appeared in an attached group. Returns its slot.
    ///
    /// # Errors
    /// There is no slot left, or the kernel's answer.
    pub fn join(&mut self, cookie: u64, remote: RemoteFd) -> Result<usize, bpf::Error> {
        if self.left >= SWEEP_AFTER {
            self.forget_gone();
        }
        let mut joined = self.try_join(cookie, remote);
        if joined.is_err() && self.is_full() {
            self.forget_gone();
            joined = self.try_join(cookie, remote);
        }
        self.tell_full(&joined);
        joined
    }

    fn try_join(&mut self, cookie: u64, remote: RemoteFd) -> Result<usize, bpf::Error> {
        let was_known = self.pinned.slot_of(cookie).is_some();
        let slot = self.place(cookie, remote).ok_or_else(|| bpf::Error {
            step: format!("finding a slot beside the {} there are", table::MAX_SLOTS),
            source: std::io::ErrorKind::QuotaExceeded.into(),
        })?;
        // Set before the program may choose it.
        let place = self.table().slot(slot);
        if place.weight().load(Relaxed) == 0 {
            place.weight().store(1, Relaxed);
        }
        let slots = self.table().slots();
        slots.fetch_max(self.seats.len() as u32, Relaxed);
        let seated = self.seat(slot);
        if seated.is_err() {
            self.vacate(slot);
            if !was_known {
                self.pinned.forget_listener(cookie);
            }
        }
        self.table().publish();
        seated.map(|()| slot)
    }

    /// Has the program choose other listeners of our own for a slot, one for each address. They listen already.
    /// Connections that wait in the old ones stay there.
    ///
    /// # Errors
    /// The kernel's answer; the old ones then keep their place.
    pub fn replace(&mut self, slot: usize, listeners: Vec<OwnedFd>) -> Result<(), bpf::Error> {
        for listener in &listeners {
            self.pinned.know_listener(slot, listener)?;
        }
        let old = std::mem::replace(&mut self.seats[slot], SlotSockets::Held(listeners));
        let put = self.restore(slot);
        if put.is_err() {
            self.seats[slot] = old;
            let _ = self.restore(slot);
        }
        put
    }

    /// Whether the map of listeners is full.
    fn is_full(&self) -> bool {
        self.pinned.known_listeners().len() >= self.pinned.listener_limit()
    }

    /// Logs that a listener found no room: once, until one finds room again. A listener that closed meanwhile is not
    /// logged.
    fn tell_full<T>(&mut self, joined: &Result<T, bpf::Error>) {
        match joined {
            Ok(_) => self.told_full = false,
            Err(error) if !self.told_full => {
                let no_slot = error.source.kind() == std::io::ErrorKind::QuotaExceeded;
                if no_slot || self.is_full() {
                    self.told_full = true;
                    tracing::warn!(
                        event = "degraded",
                        "`{}`: a new listener gets connections only from the kernel's choice, for there is no room: {error}",
                        self.name
                    );
                }
            }
            Err(_) => {}
        }
    }

    /// Forgets the listeners that are gone. One that left and still lives stays known: connections that waited in it
    /// carry its tag, and a move counts them by that tag.
    fn forget_gone(&mut self) {
        let living = match living(self.datagrams()) {
            Ok(living) => living,
            Err(error) => {
                tracing::debug!(
                    "`{}`: listeners that are gone stay known: {error}",
                    self.name
                );
                return;
            }
        };
        self.left = 0;
        // A listener in a slot may not listen yet, or not for a moment.
        let seated: HashSet<u64> = (0..self.seats.len())
            .flat_map(|slot| (0..self.pinned.addresses()).map(move |address| (slot, address)))
            .filter_map(|(slot, address)| {
                let cookie = self.seats[slot].with(address, |one| socket::cookie(one));
                cookie.ok()?.ok()
            })
            .collect();
        for cookie in self.pinned.known_listeners() {
            if !living.contains(&cookie) && !seated.contains(&cookie) {
                self.pinned.forget_listener(cookie);
            }
        }
    }

    /// Frees the slot of a listener that another process closed.
    pub fn leave(&mut self, slot: usize) {
        let place = self.table().slot(slot);
        place.pid().store(0, Relaxed);
        place.queued().store(0, Relaxed);
        place.queue_limit().store(0, Relaxed);
        place.dropped().store(0, Relaxed);
        self.vacate(slot);
        self.table().publish();
        self.left += 1;
    }

    /// Empties a slot. The caller publishes the table.
    fn vacate(&mut self, slot: usize) {
        self.table().slot(slot).flags().store(0, Relaxed);
        self.seats[slot] = SlotSockets::Empty;
    }

    /// Changes the process that lends a slot's listener: another one may hold it when the first one ends.
    pub fn lend(&mut self, slot: usize, remote: RemoteFd) {
        self.seats[slot] = SlotSockets::of(remote);
    }

    fn with<R>(
        &self,
        slot: usize,
        address: usize,
        act: impl FnOnce(BorrowedFd<'_>) -> Result<R, bpf::Error>,
    ) -> Result<R, bpf::Error> {
        self.seats[slot]
            .with(address, act)
            .unwrap_or_else(|source| {
                Err(bpf::Error {
                    step: format!(
                        "using the listener of slot {slot}, which its process has closed or passed on,"
                    ),
                    source,
                })
            })
    }

    /// Runs `act` on each listener of the group, until it fails.
    pub(crate) fn each_listener(
        &self,
        act: impl Fn(BorrowedFd<'_>) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        let taken = |slot: &usize| !matches!(self.seats[*slot], SlotSockets::Empty);
        for slot in (0..self.seats.len()).filter(taken) {
            for address in 0..self.pinned.addresses() {
                self.seats[slot].with(address, &act)??;
            }
        }
        Ok(())
    }

    /// Runs `act` on one available member of an address's group: any member stands for all.
    fn with_any<R>(
        &self,
        address: usize,
        act: impl Fn(BorrowedFd<'_>) -> Result<R, bpf::Error>,
    ) -> Result<R, bpf::Error> {
        let mut last = Err(bpf::Error {
            step: "finding a listener of the group".into(),
            source: std::io::ErrorKind::NotFound.into(),
        });
        for slot in 0..self.seats.len() {
            last = self.with(slot, address, &act);
            if last.is_ok() {
                break;
            }
        }
        last
    }

    /// The pinned program and maps.
    pub fn pinned(&self) -> &Pinned {
        &self.pinned
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether program and counts come from an earlier supervisor.
    pub fn kept(&self) -> bool {
        self.kept
    }

    /// The shared table.
    pub fn table(&self) -> &Table {
        self.pinned.table()
    }

    /// Returns the number of its slots.
    pub fn slots(&self) -> usize {
        self.seats.len()
    }

    /// Whether a slot's listeners are our own.
    pub fn holds(&self, slot: usize) -> bool {
        matches!(self.seats[slot], SlotSockets::Held(_))
    }

    /// Whether a slot has a listener.
    pub fn is_taken(&self, slot: usize) -> bool {
        !matches!(self.seats[slot], SlotSockets::Empty)
    }

    /// The inodes of a slot's listeners, by which they are found among a process's descriptors.
    pub fn inodes(&self, slot: usize) -> Vec<u64> {
        self.seats[slot].inodes()
    }

    /// Returns the policy that it started with: the planned one, or, without counts, one that needs none.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Returns the features that were planned and that it lacks.
    pub fn missing(&self) -> &[Missing] {
        &self.missing
    }

    /// Whether connections are counted.
    pub fn counting(&self) -> bool {
        self.pinned.counting()
    }

    /// Sets the weights of all slots; those not named get 1.
    pub fn weigh(&self, weights: &[(usize, u32)]) {
        for slot in 0..self.seats.len() {
            let weight = weights.iter().rev().find(|(at, _)| *at == slot);
            let weight = weight.map_or(1, |(_, weight)| *weight);
            self.table().slot(slot).weight().store(weight, Relaxed);
        }
        self.table().publish();
    }

    /// Whether its sockets are of UDP.
    pub fn datagrams(&self) -> bool {
        self.table().flags().load(Relaxed) & DATAGRAMS != 0
    }

    /// Chooses by another policy from now on.
    pub fn set_policy(&self, policy: Policy) {
        self.table().policy().store(policy.number(), Relaxed);
    }

    /// Has new SYNs dropped from now on, so that their clients' retries reach a successor. Datagrams are refused, as
    /// the closed port soon will, so that the queues can be read empty.
    ///
    /// # Errors
    /// A listener does not take the filter, and still answers.
    pub fn close(&self) -> std::io::Result<()> {
        self.table().flags().fetch_or(CLOSING, Relaxed);
        if self.datagrams() {
            return Ok(());
        }
        self.held().try_for_each(socket::drop_syns)
    }

    /// As [`Dispatcher::close`], but refuses new connections: a load balancer then turns to another machine at once.
    pub fn refuse(&self) {
        self.table().flags().fetch_or(CLOSING | REFUSING, Relaxed);
    }

    /// Returns the listeners that are our own, which we may hold back.
    fn held(&self) -> impl Iterator<Item = &OwnedFd> {
        self.seats.iter().flat_map(SlotSockets::held)
    }

    /// Undoes [`Dispatcher::close`].
    pub fn open(&self) {
        self.table()
            .flags()
            .fetch_and(!(CLOSING | REFUSING), Relaxed);
        if self.datagrams() {
            return; // a filter on them is their worker's own
        }
        for listener in self.held() {
            let _ = socket::admit_syns(listener);
        }
    }

    /// Returns the receive queues of a slot's UDP sockets, summed over its addresses.
    pub fn receive_queue(&self, slot: usize) -> ReceiveQueue {
        let queue = |address| {
            let queue = self.with(slot, address, |one| Ok(receive_queue(one)));
            queue.ok()?.ok()
        };
        (0..self.pinned.addresses())
            .filter_map(queue)
            .fold(ReceiveQueue::default(), std::ops::Add::add)
    }

    /// Returns length and limit of a slot's accept queues, summed over its addresses; of UDP sockets, both in bytes.
    pub fn queue(&self, slot: usize) -> AcceptQueue {
        sum(&self.queues(slot))
    }

    /// Publishes the length of a slot's queues for the programs. Returns the same as [`Dispatcher::queue`].
    pub fn publish_queues(&self, slot: usize) -> AcceptQueue {
        let queues = self.queues(slot);
        let lengths: Vec<u32> = queues.iter().map(|queue| queue.length).collect();
        self.table().publish_queues(slot, &lengths);
        sum(&queues)
    }

    /// Returns length and limit of a slot's queue at each address; zeros if they cannot be read.
    fn queues(&self, slot: usize) -> Vec<AcceptQueue> {
        let datagrams = self.datagrams();
        self.take_out_closed(slot);
        let look = |listener: BorrowedFd<'_>| -> std::io::Result<AcceptQueue> {
            if !datagrams {
                return socket::accept_queue(listener);
            }
            let queue = receive_queue(listener)?;
            Ok(AcceptQueue {
                length: queue.waiting_bytes,
                limit: queue.limit_bytes,
            })
        };
        (0..self.pinned.addresses())
            .map(|address| {
                let queue = self.with(slot, address, |one| Ok(look(one)));
                queue.ok().and_then(Result::ok).unwrap_or_default()
            })
            .collect()
    }

    /// Takes a slot's listener out of the map if its worker shut it down, lest the program choose it. An array of
    /// reuseport sockets needs no such help: a listener that was shut down leaves it.
    fn take_out_closed(&self, slot: usize) {
        if !self.pinned.looks_up() {
            return;
        }
        for address in 0..self.pinned.addresses() {
            let listens = self.with(slot, address, |one| Ok(socket::listens(one)));
            if matches!(listens, Ok(false)) {
                self.pinned.take_out(address, slot);
            }
        }
    }

    /// Moves the connections in a slot's queues to the slots that the program chooses, and returns their number.
    ///
    /// The caller has marked the slot, so that the program does not choose it. It has also made sure that another slot
    /// of the group is good: with no other listener the kernel would reset the queue. Datagrams cannot be moved.
    ///
    /// # Errors
    /// A listener did not listen again; the slot is not chosen until it does.
    pub fn move_queues(&self, slot: usize) -> Result<u32, bpf::Error> {
        if self.datagrams() {
            return Ok(0);
        }
        let place = self.table().slot(slot);
        // Set before the move, so that a successor knows that one was begun. It stays if a listener does not come back.
        place.set_moving(true);
        let moved = self.move_all(slot);
        if moved.is_ok() || !self.is_closed(slot) {
            place.set_moving(false);
        }
        moved
    }

    fn move_all(&self, slot: usize) -> Result<u32, bpf::Error> {
        let mut moved = 0;
        for address in 0..self.pinned.addresses() {
            let waiting = self.with(slot, address, |listener| {
                self.move_queue(slot, address, listener)
            })?;
            if waiting > 0 {
                self.wake_others(slot, address);
            }
            moved += waiting;
        }
        Ok(moved)
    }

    /// Whether one of a slot's listeners does not listen.
    fn is_closed(&self, slot: usize) -> bool {
        (0..self.pinned.addresses()).any(|address| {
            let listens = self.with(slot, address, |one| Ok(socket::listens(one)));
            matches!(listens, Ok(false))
        })
    }

    /// Makes a slot's listeners listen again that did not come back from a move.
    ///
    /// # Errors
    /// They still do not listen.
    pub fn reopen(&self, slot: usize) -> Result<(), bpf::Error> {
        let place = self.table().slot(slot);
        for address in 0..self.pinned.addresses() {
            self.with(slot, address, |listener| {
                self.listen_again(slot, listener)
                    .map_err(|source| bpf::Error {
                        step: format!("listening again in slot {slot}"),
                        source,
                    })?;
                self.pinned.put(address, slot, listener)
            })?;
        }
        place.set_moving(false);
        Ok(())
    }

    fn listen_again(&self, slot: usize, listener: BorrowedFd<'_>) -> std::io::Result<()> {
        if socket::listens(listener) {
            return Ok(());
        }
        let limit = self.table().slot(slot).queue_limit().load(Relaxed);
        let backlog = match (&self.seats[slot], limit) {
            // Longer than any limit: the kernel cuts it.
            (SlotSockets::Remote(_), 0) => i32::MAX,
            (SlotSockets::Remote(_), limit) => i32::try_from(limit).unwrap_or(i32::MAX),
            _ => self.backlog,
        };
        socket::listen_again(listener, socket::address_of(listener)?, backlog)
    }

    fn move_queue(
        &self,
        slot: usize,
        address: usize,
        listener: BorrowedFd<'_>,
    ) -> Result<u32, bpf::Error> {
        let queue = socket::accept_queue(listener).unwrap_or_default();
        if queue.length == 0 {
            return Ok(0);
        }
        // Another process's listener comes back with its previous backlog.
        let backlog = match self.seats[slot] {
            SlotSockets::Remote(_) => i32::try_from(queue.limit).unwrap_or(i32::MAX),
            _ => self.backlog,
        };
        if self.pinned.looks_up() {
            self.pinned.take_out(address, slot);
        }
        socket::move_queue(listener, backlog).map_err(|source| bpf::Error {
            step: format!("moving the queue of slot {slot}"),
            source,
        })?;
        self.pinned.put(address, slot, listener)?;
        Ok(queue.length)
    }

    /// Wakes the workers that were given connections: not every kernel does (see [`socket::wake_waiters`]).
    fn wake_others(&self, slot: usize, address: usize) {
        for other in (0..self.seats.len()).filter(|other| *other != slot) {
            let _ = self.with(other, address, |listener| {
                if socket::accept_queue(listener).is_ok_and(|queue| queue.length > 0) {
                    socket::wake_waiters(listener);
                }
                Ok(())
            });
        }
    }

    /// Puts a slot's listeners back into the array if they left it (because a worker shut one down).
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn restore(&self, slot: usize) -> Result<(), bpf::Error> {
        for address in 0..self.pinned.addresses() {
            self.with(slot, address, |listener| {
                self.pinned.put(address, slot, listener)
            })?;
        }
        Ok(())
    }

    /// Removes program, maps and links; the sockets stay, and the kernel's hash chooses among them.
    pub fn end(self, paths: &Paths, cgroup: Option<&Path>) {
        for address in 0..self.pinned.addresses() {
            let _ = self.with_any(address, |member| {
                let _ = socket::detach_reuseport(member.as_fd());
                Ok(())
            });
        }
        let dir = self.pinned.dir().to_owned();
        drop(self);
        remove(paths, &dir, cgroup);
    }
}

fn sum(queues: &[AcceptQueue]) -> AcceptQueue {
    queues
        .iter()
        .fold(AcceptQueue::default(), |sum, one| AcceptQueue {
            length: sum.length + one.length,
            limit: sum.limit + one.limit,
        })
}

/// Returns the cookies of all sockets in this network namespace that can be in a group.
fn living(datagrams: bool) -> std::io::Result<HashSet<u64>> {
    let protocol = if datagrams {
        Protocol::Udp
    } else {
        Protocol::Tcp
    };
    let sockets = diag::sockets(protocol, Which::Listening, 0)?;
    Ok(sockets.iter().map(|entry| entry.socket.cookie).collect())
}

fn remove(paths: &Paths, dir: &Path, cgroup: Option<&Path>) {
    if let Err(error) = bpf::remove_pins(dir) {
        tracing::warn!("cannot remove the pins in {}: {error}", dir.display());
    }
    if let Some(path) = cgroup
        && let Err(error) = cgroup::remove(path)
    {
        tracing::warn!("cannot remove the cgroup {}: {error}", path.display());
    }
    paths.tidy();
}

/// Why the policy of a running group was not changed.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// No program of ours chooses for it.
    #[error(
        "cannot change how `{name}` is steered: no such group is steered here ({source}); `wakeone status` lists those that are"
    )]
    NotSteered {
        /// The group.
        name: String,
        /// The error from opening its pins.
        source: bpf::Error,
    },
    /// Its program is of another version.
    #[error(
        "cannot change how `{0}` is steered: another version of wakeone steers it; restart it with this one"
    )]
    OtherVersion(String),
    /// The policy needs counts that nobody keeps.
    #[error(
        "cannot steer `{name}` by {policy}: its connections are not counted (see `wakeone status`); shortest-queue needs no counts"
    )]
    Uncounted {
        /// The group.
        name: String,
        /// The policy that was asked for.
        policy: Policy,
    },
    /// The policy does not fit its sockets.
    #[error("cannot steer `{name}` by {why}")]
    Unfit {
        /// The group.
        name: String,
        /// The policy, the reason, and what fits.
        why: String,
    },
    /// The slot is not one of its own.
    #[error("cannot drain slot {slot} of `{name}`: it has no such slot (see `wakeone status`)")]
    NoSlot {
        /// The group.
        name: String,
        /// The slot that was asked for.
        slot: usize,
    },
}

/// Changes the policy of a group that another process runs, and returns its previous one.
///
/// # Errors
/// See [`PolicyError`].
pub fn change_policy(
    paths: &Paths,
    name: &str,
    policy: Policy,
) -> Result<Option<Policy>, PolicyError> {
    let pinned = open_group(paths, name)?;
    let table = pinned.table();
    if table.flags().load(Relaxed) & DATAGRAMS != 0 {
        policy.fits_datagrams().map_err(|why| PolicyError::Unfit {
            name: name.to_owned(),
            why,
        })?;
    }
    if policy.needs_counts() && !pinned.counting() {
        return Err(PolicyError::Uncounted {
            name: name.to_owned(),
            policy,
        });
    }
    Ok(Policy::of_number(
        table.policy().swap(policy.number(), Relaxed),
    ))
}

/// Drains a slot of a group that another process runs, or ends that. It gets no new connections while others can get
/// them.
///
/// # Errors
/// See [`PolicyError`]; there is no such slot.
pub fn change_drain(paths: &Paths, name: &str, slot: usize, on: bool) -> Result<(), PolicyError> {
    let pinned = open_group(paths, name)?;
    let table = pinned.table();
    if slot >= table.slots().load(Relaxed) as usize {
        return Err(PolicyError::NoSlot {
            name: name.to_owned(),
            slot,
        });
    }
    table.slot(slot).mark(flag::DRAINING, on);
    Ok(())
}

/// Opens the pins of a group of this version.
fn open_group(paths: &Paths, name: &str) -> Result<Pinned, PolicyError> {
    let pinned =
        Pinned::open(&paths.group_pins(name)).map_err(|source| PolicyError::NotSteered {
            name: name.to_owned(),
            source,
        })?;
    if pinned.table().contract().load(Relaxed) != table::CONTRACT {
        return Err(PolicyError::OtherVersion(name.to_owned()));
    }
    Ok(pinned)
}

/// A group's programs and maps, and whether they come from an earlier agent.
struct Found {
    pinned: Pinned,
    kept: bool,
    missing: Vec<Missing>,
}

/// Returns the pinned group of an earlier agent if it is to be taken over and fits; else a new one.
fn open_or_load(
    plan: &Plan<'_>,
    addresses: usize,
    fits: impl Fn(&Pinned) -> bool,
) -> Result<Found, Error> {
    plan.paths
        .prepare()
        .map_err(|why| Error::no_place(plan.name, why))?;
    let dir = plan.paths.group_pins(plan.name);
    sweep_halves(&plan.paths.pins);
    let found = plan.adopt.then(|| find(&dir, addresses)).flatten();
    let same_kind = |pinned: &Pinned| {
        let datagrams = pinned.table().flags().load(Relaxed) & DATAGRAMS != 0;
        datagrams == plan.datagrams.is_some() && pinned.looks_up() != plan.lookup.is_empty()
    };
    let load = LoadPlan {
        dir: &dir,
        addresses,
        cgroup: plan.cgroup.filter(|_| plan.datagrams.is_none()),
        read_queues: plan.read_queues,
        datagrams: plan.datagrams.is_some(),
        lookup: plan.lookup,
    };
    if let Some(pinned) = found.filter(|pinned| same_kind(pinned) && fits(pinned)) {
        return Ok(renew(plan.name, &load, pinned));
    }
    bpf::empty_arrays(&dir);
    bpf::remove_pins(&dir).map_err(|source| Error::Kernel {
        name: plan.name.to_owned(),
        source: bpf::Error {
            step: format!("removing {}", dir.display()),
            source,
        },
    })?;
    let Loaded { pinned, missing } = bpf::load(&load).map_err(|error| {
        plan.paths.tidy();
        Error::of(plan.name)(error)
    })?;
    Ok(Found {
        pinned,
        kept: false,
        missing,
    })
}

/// Has a group that is taken over run the programs of this build. If they cannot be loaded the old ones stay: they
/// follow the same contract.
fn renew(name: &str, load: &LoadPlan<'_>, pinned: Pinned) -> Found {
    let mut found = Found {
        pinned,
        kept: true,
        missing: Vec::new(),
    };
    if found.pinned.table().build().load(Relaxed) == bpf::BUILD {
        return found;
    }
    match bpf::replace(load) {
        Ok(Loaded { pinned, missing }) => {
            tracing::info!(
                event = "note",
                "`{name}`: the programs of another build of wakeone were replaced; all counts stay"
            );
            found.pinned = pinned;
            found.missing = missing;
        }
        Err(error) => tracing::warn!(
            event = "degraded",
            "`{name}` keeps the programs of another build of wakeone: {error}; stop and start the group to replace them"
        ),
    }
    found
}

/// Returns the group that is pinned there, if it is whole, of this layout, and of as many addresses.
fn find(dir: &Path, addresses: usize) -> Option<Pinned> {
    let pinned = Pinned::open(dir).ok()?;
    let table = pinned.table();
    let fits = table.contract().load(Relaxed) == table::CONTRACT
        && pinned.addresses() == addresses
        && table.slots().load(Relaxed) as usize <= table::MAX_SLOTS;
    fits.then_some(pinned)
}

/// Removes half-made groups whose maker is gone.
pub fn sweep_halves(pins: &Path) -> Vec<PathBuf> {
    let mut swept = Vec::new();
    for entry in std::fs::read_dir(pins).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(rest) = name
            .to_str()
            .and_then(|name| name.strip_prefix(bpf::TEMPORARY))
        else {
            continue;
        };
        let maker = rest
            .split('-')
            .next()
            .and_then(|pid| pid.parse::<u32>().ok());
        let alive = maker.is_some_and(|pid| Path::new(&format!("/proc/{pid}")).exists());
        if !alive && bpf::remove_pins(&entry.path()).is_ok() {
            swept.push(entry.path());
        }
    }
    swept
}
