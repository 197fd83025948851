//! A steered group: its folder, its agent, and the slot of each of its sockets.
//!
//! `attach`, `run --split` and [`crate::udp_group`] share this. Each of them has its own way to learn of sockets and of
//! the processes that serve them, and to know when the group ends. (`run` makes its sockets itself and has no others,
//! so its slots are those of its workers: see [`crate::group`].)

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use wakeone_bpf as bpf;
use wakeone_bpf::table::{Table, flag};
use wakeone_kernel::capability;
use wakeone_model::address::Address;
use wakeone_model::listener::Protocol;
use wakeone_model::network::Network;

use crate::metrics::Source;
use wakeone_control::move_log::MoveLog;
use wakeone_control::orphans::OrphanLog;
use wakeone_control::paths::Paths;
use wakeone_control::privileges::FOR_THE_END;
use wakeone_control::state::Identity;
use wakeone_control::state::{self, GroupDir, ListenAt, State, StateError, Task};
use wakeone_control::steer::{Steer, SteerEvent};
use wakeone_steering::agent::{Agent, AgentConfig, Rounds};
use wakeone_steering::dispatcher::Dispatcher;
use wakeone_steering::slot_sockets::RemoteFd;

/// The part of a group's state that does not change.
#[derive(Debug)]
pub struct Origin {
    /// The address of its sockets.
    pub listen: ListenAt,
    /// The command that made it: see [`Task::command`].
    pub command: Vec<String>,
    /// Whether its sockets are another program's, and go on without us.
    pub attached: bool,
    /// The network namespace of its sockets, if that is not ours.
    pub network: Option<Network>,
}

impl Origin {
    /// That of a server that makes its sockets itself. `command`: the one that we started it by, else empty.
    pub fn of_server(
        protocol: Protocol,
        address: Address,
        network: Option<Network>,
        command: &[String],
    ) -> Self {
        Self {
            listen: ListenAt::of(protocol, address),
            command: command.to_vec(),
            attached: true,
            network,
        }
    }

    /// Returns the state that `status` shows. `detach` reads it if the agent was killed.
    ///
    /// # Errors
    /// This process cannot be seen in /proc.
    pub fn state(&self, name: &str, slots: Vec<state::SlotRecord>) -> Result<State, StateError> {
        let own = Identity::of(std::process::id()).map_err(|source| StateError::File {
            what: "read",
            path: "/proc/self/stat".into(),
            source,
        })?;
        Ok(State {
            schema: state::SCHEMA,
            name: name.to_owned(),
            boot: state::boot_id(),
            supervisor: own,
            listen: vec![self.listen],
            // The server decides it.
            backlog: 0,
            task: Task {
                command: self.command.clone(),
                account: None,
                keep_caps: Vec::new(),
                nonblocking: false,
                stdin: false,
            },
            slots,
            attached: self.attached,
            one_queue: false,
            reserved: Vec::new(),
            workers: 0,
            serving: 0,
            fixed: None,
            network: self.network.clone(),
        })
    }
}

/// The place of a socket, and its worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketPlace {
    /// Its slot; `None` if the kernel's hash chooses, or if there was no room.
    pub slot: Option<usize>,
    /// The process to borrow it from.
    pub remote: RemoteFd,
    /// The process that serves it, if one was seen.
    pub worker: Option<u32>,
    /// Its worker has ended, and no other came in time.
    pub orphaned: bool,
}

/// A group with a state in its folder, steered once an agent is started.
#[derive(Debug)]
pub struct SteeredGroup {
    origin: Origin,
    dir: GroupDir,
    agent: Option<Agent>,
    moves: MoveLog,
    orphans: OrphanLog,
    /// By the socket's cookie.
    places: BTreeMap<u64, SocketPlace>,
    /// New sockets are not chosen yet: see [`SteeredGroup::hold_back`].
    holds_back: bool,
}

impl SteeredGroup {
    /// Takes the group's folder. Nothing is steered yet.
    ///
    /// # Errors
    /// Another process has the folder, or it cannot be made.
    pub fn take(runtime_dir: &Path, name: &str, origin: Origin) -> Result<Self, StateError> {
        GroupDir::take(runtime_dir, name).map(|dir| Self::in_folder(dir, origin))
    }

    /// The same in a folder that is ours already.
    pub fn in_folder(dir: GroupDir, origin: Origin) -> Self {
        Self {
            origin,
            dir,
            agent: None,
            moves: MoveLog::default(),
            orphans: OrphanLog::default(),
            places: BTreeMap::new(),
            holds_back: false,
        }
    }

    /// Logs processes that keep its sockets after their workers ended; `ended`: a worker did just now.
    pub fn look_for_orphans(&mut self, ended: bool) {
        if ended {
            self.orphans.look_soon();
        }
        let mut orphans = std::mem::take(&mut self.orphans);
        orphans.look(|| self.state().ok());
        self.orphans = orphans;
    }

    /// Whether an earlier agent attached it and was killed: its program is still there.
    ///
    /// # Errors
    /// The state cannot be read, or not be trusted.
    pub fn was_attached(&self) -> Result<bool, StateError> {
        Ok(self.dir.load()?.is_some_and(|state| state.attached))
    }

    /// Has an agent steer it from now on. Sockets that the program knows get their slots.
    pub fn steer(
        &mut self,
        dispatcher: Dispatcher,
        config: AgentConfig,
        paths: &Paths,
        rounds: &Rounds,
        sockets: impl IntoIterator<Item = (u64, RemoteFd, Option<u32>)>,
    ) {
        let mut up = Vec::new();
        for (cookie, remote, worker) in sockets {
            // A socket without a slot is tried again when it is seen again.
            let Some(slot) = dispatcher.pinned().slot_of(cookie) else {
                continue;
            };
            let place = SocketPlace {
                slot: Some(slot),
                remote,
                worker,
                orphaned: false,
            };
            self.places.insert(cookie, place);
            up.extend(worker.map(|worker| (slot, worker)));
        }
        let mut agent = Agent::start(dispatcher, config, paths.clone(), None, rounds);
        for (slot, worker) in up {
            agent.worker_up(slot, worker);
        }
        self.agent = Some(agent);
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        self.dir.name()
    }

    /// Returns the agent that steers it, if any.
    pub fn agent(&self) -> Option<&Agent> {
        self.agent.as_ref()
    }

    /// Returns the place of a socket.
    pub fn place_of(&self, cookie: u64) -> Option<SocketPlace> {
        self.places.get(&cookie).copied()
    }

    /// Returns the slot of a socket.
    pub fn slot_of(&self, cookie: u64) -> Option<usize> {
        self.place_of(cookie)?.slot
    }

    /// Returns the cookies of its sockets.
    pub fn cookies(&self) -> impl Iterator<Item = u64> {
        self.places.keys().copied()
    }

    /// Assigns a socket a slot; for one that has a slot, notes its current holder and worker. If the group is steered,
    /// the worker counts as up from now on.
    ///
    /// # Errors
    /// There is no slot for it: it gets only what the kernel's hash chooses for it.
    pub fn assign(
        &mut self,
        cookie: u64,
        remote: RemoteFd,
        worker: Option<u32>,
    ) -> Result<(), bpf::Error> {
        let before = self.place_of(cookie);
        let mut slot = before.and_then(|before| before.slot);
        if let Some(agent) = &mut self.agent {
            match slot {
                Some(slot) if before.is_some_and(|before| before.remote != remote) => {
                    agent.with_dispatcher(|d| d.lend(slot, remote));
                }
                Some(_) => {}
                None => {
                    let publish = !self.holds_back;
                    slot = Some(agent.with_dispatcher(|d| {
                        let joined = d.join(cookie, remote);
                        if publish || joined.is_err() {
                            d.table().publish();
                        }
                        joined
                    })?);
                }
            }
            if let Some((slot, worker)) = slot.zip(worker) {
                agent.worker_up(slot, worker);
            }
        }
        self.places.insert(
            cookie,
            SocketPlace {
                slot,
                remote,
                worker,
                orphaned: false,
            },
        );
        Ok(())
    }

    /// Has new sockets wait until all that appeared have their slots: the first would get the connections of all others.
    pub fn hold_back(&mut self) {
        self.holds_back = true;
    }

    /// Has the sockets that were held back chosen.
    pub fn let_in(&mut self) {
        self.holds_back = false;
        if let Some(agent) = &self.agent {
            agent.with_table(Table::publish);
        }
    }

    /// How many sockets without a slot have begun to listen, as the programs saw it.
    pub fn changes(&self) -> u32 {
        let count = |agent: &Agent| agent.with_table(|table| table.changes().load(Relaxed));
        self.agent.as_ref().map_or(0, count)
    }

    /// Notes that the sockets of so many changes were looked at. The program chooses again, if there were no more.
    pub fn see_changes(&self, changes: u32) {
        if let Some(agent) = &self.agent {
            agent.with_table(|table| table.changes_seen().store(changes, Relaxed));
        }
    }

    /// Has the programs notice sockets that begin to listen at this port; 0: none.
    pub fn notice(&self, port: u16) {
        if let Some(agent) = &self.agent {
            agent.with_table(|table| table.port().store(port.into(), Relaxed));
        }
    }

    /// As [`SteeredGroup::assign`], and logs if the socket gets no slot.
    pub fn assign_or_warn(&mut self, cookie: u64, remote: RemoteFd, worker: u32) {
        if let Err(error) = self.assign(cookie, remote, Some(worker)) {
            tracing::warn!("{}: process {}: {error}", self.origin.listen, remote.pid);
            let slot = None;
            let worker = Some(worker);
            self.places.insert(
                cookie,
                SocketPlace {
                    slot,
                    remote,
                    worker,
                    orphaned: false,
                },
            );
        }
    }

    /// Whether a socket does not listen because a move left it closed, and a process still has it: the agent makes it
    /// listen again as soon as it can. Notes the process if the previous one is gone.
    pub fn is_left_closed(&mut self, cookie: u64) -> bool {
        let (Some(place), Some(agent)) = (self.place_of(cookie), &self.agent) else {
            return false;
        };
        let is_moving = |slot| agent.with_table(|table| table.slot(slot).has(flag::MOVING));
        if !place.slot.is_some_and(is_moving) {
            return false;
        }
        if place.remote.borrow().is_ok() {
            return true;
        }
        let holder = RemoteFd::find(place.remote.inode);
        if let Some(holder) = holder {
            self.lend(cookie, holder);
        }
        holder.is_some()
    }

    /// Stops choosing a socket, and frees its slot. Returns whether it had one.
    pub fn leave(&mut self, cookie: u64) -> bool {
        let left = self.places.remove(&cookie).and_then(|place| place.slot);
        match (left, &self.agent) {
            (Some(slot), Some(agent)) => {
                agent.vacate(slot);
                true
            }
            _ => false,
        }
    }

    /// Removes what the program knows of a socket that left for good.
    pub fn forget(&self, cookie: u64) {
        if let Some(agent) = &self.agent {
            agent.see_dispatcher(|d| d.pinned().forget_listener(cookie));
        }
    }

    /// Notes that a socket's worker is gone and others hold the socket: it is not chosen while others are, and its queue
    /// is moved. `holders` may have it served again.
    pub fn bereave(&mut self, cookie: u64, holders: Vec<u32>) {
        let Some(place) = self.places.get_mut(&cookie) else {
            return;
        };
        place.worker = None;
        place.orphaned = true;
        if let (Some(slot), Some(agent)) = (place.slot, &mut self.agent) {
            agent.worker_down(slot);
            agent.accompany(slot, holders);
        }
    }

    /// Notes which processes serve a socket beside its worker.
    pub fn accompany(&self, cookie: u64, others: Vec<u32>) {
        if let (Some(slot), Some(agent)) = (self.slot_of(cookie), &self.agent) {
            agent.accompany(slot, others);
        }
    }

    /// Notes that another process holds a socket now.
    pub fn lend(&mut self, cookie: u64, remote: RemoteFd) {
        let Some(place) = self.places.get_mut(&cookie) else {
            return;
        };
        place.remote = remote;
        if let (Some(slot), Some(agent)) = (place.slot, &self.agent) {
            agent.with_dispatcher(|d| d.lend(slot, remote));
        }
    }

    /// Runs `act` between two looks of the agent, when no queue is being moved.
    pub fn between_looks<R>(&self, act: impl FnOnce() -> R) -> R {
        match &self.agent {
            Some(agent) => agent.between_looks(act),
            None => act(),
        }
    }

    /// Writes the state.
    ///
    /// # Errors
    /// The state cannot be written.
    pub fn store(&self) -> Result<(), StateError> {
        self.dir.store(&self.state()?)
    }

    /// The same, now or as soon as possible. Steering goes on meanwhile.
    pub fn keep(&self) {
        match self.state() {
            Ok(state) => self.dir.keep(&state),
            Err(error) => tracing::warn!("{}: {error}", self.origin.listen),
        }
    }

    /// Removes the state of a group that is not steered yet, and never will be.
    pub fn forget_state(&self) {
        self.dir.forget();
    }

    /// Writes a state that could not be written before. Call it every second or so.
    pub fn catch_up(&self) {
        self.dir.catch_up();
    }

    fn state(&self) -> Result<State, StateError> {
        let slots = self.slots();
        self.origin.state(self.name(), slots)
    }

    /// Returns the slots. Where the kernel's hash chooses, sockets are numbered instead.
    fn slots(&self) -> Vec<state::SlotRecord> {
        let count = match &self.agent {
            Some(agent) => agent.see_dispatcher(Dispatcher::slots),
            None => self.places.len(),
        };
        let empty = || state::SlotRecord {
            worker: None,
            current: true,
            inodes: Vec::new(),
            beside: None,
            orphaned: false,
        };
        let mut slots: Vec<_> = std::iter::repeat_with(empty).take(count.max(1)).collect();
        let mut told = BTreeSet::new();
        for (number, place) in self.places.values().enumerate() {
            let slot = match self.agent {
                Some(_) => place.slot,
                None => Some(number),
            };
            if let Some(slot) = slot.and_then(|slot| slots.get_mut(slot)) {
                let who = place.worker.unwrap_or(place.remote.pid);
                // One process may serve many sockets. A worker of a group that is not attached has one slot (see
                // `State::decode`), so such a process is told once.
                let tell = self.origin.attached || told.insert(who);
                slot.worker = Identity::of(who).ok().filter(|_| tell);
                slot.inodes = vec![place.remote.inode];
                slot.orphaned = place.orphaned;
            }
        }
        slots
    }

    /// Returns the source of its metrics. `traced`: include those of the kernel's tracepoints.
    pub fn source(&self, paths: &Paths, traced: bool) -> Source {
        let mut source = Source::open(paths, self.name());
        if let Some(agent) = &self.agent {
            source = source.with_rescuer(agent.rescuer());
        }
        if traced {
            source = source.traced(std::iter::once(self.origin.listen.address()));
        }
        source
    }

    /// Returns its agent's events since the last call, with moves summed up for the log.
    pub fn events(&mut self) -> Vec<SteerEvent> {
        let seen = self.agent.as_mut().map(Steer::events).unwrap_or_default();
        self.moves.pass(Instant::now(), seen)
    }

    /// Removes program and pins, and shows in the folder that the next server is waited for. At no time is there neither.
    ///
    /// # Errors
    /// The state cannot be written; the folder is removed then.
    pub fn rest(mut self) -> Result<Self, StateError> {
        if let Some(agent) = self.agent.take() {
            capability::with(&FOR_THE_END, || agent.end());
        }
        self.places.clear();
        self.store().inspect_err(|_| self.forget_state())?;
        Ok(self)
    }

    /// Removes program, pins and folder. Remaining sockets go on, and the kernel's hash chooses.
    pub fn end(self) {
        if let Some(agent) = self.agent {
            capability::with(&FOR_THE_END, || agent.end());
        }
        self.dir.forget();
    }
}
