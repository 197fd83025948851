//! The dispatch program of one group, from user space: loading or finding it, its listeners, its marks, its removal.

mod error;
mod load;
mod members;
mod plan;
mod queues;
pub mod quic;
mod settle;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

use wakeone_bpf::table::{
    self, CLOSING, COUNTED, DATAGRAMS, DEFERS, REFUSING, REPLACED, TOKENS, Table, flag,
};
use wakeone_bpf::{self as bpf, Feature, Missing, Pinned};
use wakeone_kernel::socket::moving::Holders;
use wakeone_kernel::{cgroup, socket};
use wakeone_model::listener::Protocol;

pub use self::error::Error;
pub use self::load::sweep_halves;
use self::load::{Found, open_or_load};
pub use self::plan::Plan;
use crate::slot_sockets::{RemoteFd, SlotSockets};
use wakeone_control::paths::Paths;
use wakeone_control::policy::Policy;
use wakeone_control::taken_out::TakenOut;

/// How long a flow may be silent before it counts as new: 300 s by the clock of flows. A NAT should keep its mapping as
/// long (RFC 4787, REQ-5), and a client that is silent for longer may come from another port.
pub const FLOW_SILENCE: u32 = 280;

/// A steered group. Dropping it leaves everything as it is; [`Dispatcher::end`] removes the program.
#[derive(Debug)]
pub struct Dispatcher {
    name: String,
    pinned: Pinned,
    /// The listeners of each slot.
    sockets: Vec<SlotSockets>,
    backlog: i32,
    kept: bool,
    missing: Vec<Missing>,
    policy: Policy,
    /// Listeners that left since the last sweep.
    left: usize,
    /// Whether the log says that a listener found no room.
    told_full: bool,
    /// Slots at whose listeners connections may wait that are not counted there: see [`Dispatcher::settle_emptied`].
    unsettled: BTreeSet<usize>,
    /// The processes that hold the listeners.
    holders: RefCell<Holders>,
    taken_out: TakenOut,
}

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
        dispatcher.sockets = listeners.into_iter().map(SlotSockets::Held).collect();
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
            sockets: Vec::new(),
            backlog: plan.backlog,
            kept: found.kept,
            missing: found.missing,
            policy: plan.policy,
            left: 0,
            told_full: false,
            unsettled: BTreeSet::new(),
            holders: RefCell::default(),
            taken_out: TakenOut::of(&plan.paths.runtime, plan.name),
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
        if plan.protocol() == Protocol::Udp || self.counting() || !plan.policy.needs_counts() {
            return Ok(());
        }
        if plan.by_name {
            return Err(Error::Uncounted {
                name: self.name.clone(),
                policy: plan.policy,
                why: self.why_uncounted(plan).to_owned(),
            });
        }
        self.policy = Policy::ShortestQueue;
        Ok(())
    }

    fn why_uncounted<'a>(&'a self, plan: &'a Plan<'_>) -> &'a str {
        let missing = |one: &&Missing| one.feature == Feature::Counting;
        match self.missing.iter().find(missing) {
            Some(missing) => &missing.why,
            None if self.kept => "the program of the earlier supervisor does not count them",
            None => plan
                .no_cgroup
                .unwrap_or("that takes a cgroup2 that the listeners are created in"),
        }
    }

    /// Logs each feature that this group lacks, once.
    fn tell_missing(&self, plan: &Plan<'_>) {
        if plan.protocol() == Protocol::Tcp && !self.counting() {
            let instead = if self.policy == plan.policy {
                String::new()
            } else {
                format!("; {} instead of {}", self.policy, plan.policy)
            };
            tracing::warn!(
                event = "degraded",
                "`{}`: connections are not counted: {}{instead}",
                self.name,
                self.why_uncounted(plan)
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

    /// Fills the table and only then attaches the program: it never runs on a half-filled table.
    fn fill(&mut self, plan: &Plan<'_>) -> Result<(), bpf::Error> {
        let table = self.table();
        table.contract().store(table::CONTRACT, Relaxed);
        let counted = if self.pinned.counting() { COUNTED } else { 0 };
        let tokens = match self.kept {
            true => table.flags().load(Relaxed) & TOKENS,
            false => 0,
        };
        table.flags().store(counted | plan.kind() | tokens, Relaxed);
        table.slots().store(self.sockets.len() as u32, Relaxed);
        table.flow_silence().store(FLOW_SILENCE, Relaxed);
        if plan.earlier_flows && !self.kept {
            let until = table::flow_clock().saturating_add(FLOW_SILENCE);
            table.flows_until().store(until, Relaxed);
        }
        self.weigh(plan.weights);
        self.set_policy(self.policy);
        for slot in 0..self.sockets.len() {
            self.admit(slot)?;
        }
        self.table().publish();
        self.attach_all()?;
        self.settle_emptied();
        if plan.adopt {
            // The group may have been closing when its supervisor was killed.
            self.open();
        }
        Ok(())
    }

    /// Attaches the programs to the groups of sockets.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn attach_all(&self) -> Result<(), bpf::Error> {
        (0..self.pinned.addresses()).try_for_each(|address| self.attach(address))
    }

    /// Attaches the program to the group of an address. If some sockets listen already, the others join their group.
    /// Else the group is made here, of the first slot's socket, which must then be the first to listen.
    fn attach(&self, address: usize) -> Result<(), bpf::Error> {
        let listens = |slot: &usize| {
            let listens = self.with(*slot, address, |one| Ok(socket::listens(one)));
            listens.unwrap_or(false)
        };
        let attach = |member: BorrowedFd<'_>| self.pinned.attach(address, member);
        match (0..self.sockets.len()).find(listens) {
            Some(slot) => self.with(slot, address, attach),
            None => self.with_any(address, attach),
        }
    }

    /// Makes a slot's listeners known, and has the program choose them if they listen. The slot is up from then on: a
    /// connection that comes before the first worker runs waits in the queue. Marks of an earlier agent are cleared.
    fn admit(&mut self, slot: usize) -> Result<(), bpf::Error> {
        if matches!(self.sockets[slot], SlotSockets::Empty) {
            self.table().slot(slot).flags().store(0, Relaxed);
            return Ok(());
        }
        self.unsettled.insert(slot);
        self.find_place(slot);
        for address in 0..self.pinned.addresses() {
            self.with(slot, address, |listener| {
                self.pinned
                    .know_listener(self.place_of_slot(slot), listener)
            })?;
        }
        self.note_deferral(slot);
        let place = self.table().slot(slot);
        if self.waits_to_listen(slot) {
            place.flags().store(0, Relaxed);
            return Ok(());
        }
        self.restore(slot)?;
        let second = place.flags().load(Relaxed) & flag::SECOND;
        place.flags().store(flag::UP | second, Relaxed);
        Ok(())
    }

    /// Has ties go in turn from now on if a listener of this slot holds connections back: they are in no count meanwhile.
    pub fn note_deferral(&self, slot: usize) {
        let defers = |address: &usize| {
            let defers = self.with(slot, *address, |one| Ok(socket::defers(one)));
            defers.unwrap_or(false)
        };
        if self.protocol() == Protocol::Tcp && (0..self.pinned.addresses()).any(|at| defers(&at)) {
            self.table().flags().fetch_or(DEFERS, Relaxed);
        }
    }

    /// Whether a slot's sockets are our own and do not listen yet.
    fn waits_to_listen(&self, slot: usize) -> bool {
        self.protocol() == Protocol::Tcp && !self.sockets[slot].held().iter().all(socket::listens)
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

    fn with<R>(
        &self,
        slot: usize,
        address: usize,
        act: impl FnOnce(BorrowedFd<'_>) -> Result<R, bpf::Error>,
    ) -> Result<R, bpf::Error> {
        self.sockets[slot]
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

    /// Runs `act` on each listener of the group, with its slot, until it fails.
    pub(crate) fn each_listener(
        &self,
        act: impl Fn(usize, BorrowedFd<'_>) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        let taken = |slot: &usize| !matches!(self.sockets[*slot], SlotSockets::Empty);
        for slot in (0..self.sockets.len()).filter(taken) {
            for address in 0..self.pinned.addresses() {
                self.sockets[slot].with(address, |listener| act(slot, listener))??;
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
        for slot in 0..self.sockets.len() {
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
        self.sockets.len()
    }

    /// Whether a slot's listeners are our own.
    pub fn holds(&self, slot: usize) -> bool {
        matches!(self.sockets[slot], SlotSockets::Held(_))
    }

    /// Whether a slot has a listener.
    pub fn is_taken(&self, slot: usize) -> bool {
        !matches!(self.sockets[slot], SlotSockets::Empty)
    }

    /// The inodes of a slot's listeners, by which they are found among a process's descriptors.
    pub fn inodes(&self, slot: usize) -> Vec<u64> {
        self.sockets[slot].inodes()
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
        for slot in 0..self.sockets.len() {
            let weight = weights.iter().rev().find(|(at, _)| *at == slot);
            let weight = weight.map_or(1, |(_, weight)| *weight);
            self.table().slot(slot).weight().store(weight, Relaxed);
        }
        self.table().publish();
    }

    /// Returns the protocol of its sockets.
    pub fn protocol(&self) -> Protocol {
        if self.table().flags().load(Relaxed) & DATAGRAMS != 0 {
            Protocol::Udp
        } else {
            Protocol::Tcp
        }
    }

    /// Whether another program chooses, or none: the server has set its own, or taken ours away.
    pub fn is_replaced(&self) -> bool {
        self.table().flags().load(Relaxed) & REPLACED != 0
    }

    /// Notes whether another chooses. Returns whether that is news.
    pub fn set_replaced(&self, replaced: bool) -> bool {
        let flags = self.table().flags();
        let before = match replaced {
            true => flags.fetch_or(REPLACED, Relaxed),
            false => flags.fetch_and(!REPLACED, Relaxed),
        };
        (before & REPLACED != 0) != replaced
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
        if self.protocol() == Protocol::Udp {
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
        self.sockets.iter().flat_map(SlotSockets::held)
    }

    /// Undoes [`Dispatcher::close`].
    pub fn open(&self) {
        self.table()
            .flags()
            .fetch_and(!(CLOSING | REFUSING), Relaxed);
        if self.protocol() == Protocol::Udp {
            return; // a filter on them is their worker's own
        }
        for listener in self.held() {
            let _ = socket::admit_syns(listener);
        }
    }

    /// Puts a slot's listeners back into the array if they left it (because a worker shut one down).
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn restore(&self, slot: usize) -> Result<(), bpf::Error> {
        for address in 0..self.pinned.addresses() {
            self.with(slot, address, |listener| {
                self.pinned.put(address, self.place_of_slot(slot), listener)
            })?;
        }
        self.table().slot(slot).gone().store(0, Relaxed);
        Ok(())
    }

    /// Removes program, maps and links; the sockets stay, and the kernel's hash chooses among them. A program of the
    /// server's own stays.
    pub fn end(self, paths: &Paths, cgroup: Option<&Path>) {
        let addresses = match self.is_replaced() {
            true => 0,
            false => self.pinned.addresses(),
        };
        for address in 0..addresses {
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
