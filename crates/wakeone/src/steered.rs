//! A steered group: its folder, its agent, and which slot each of its sockets has.
//!
//! `attach`, `run --split` and [`crate::udp_group`] have this in common. Each of them keeps what differs: how it learns
//! of sockets, who serves them, and when the group ends. (`run` makes its sockets itself and never has others, so that
//! its slots are those of its workers: see [`crate::group`].)

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Instant;

use wakeone_kernel::{bpf, capability};

use crate::agent::{Agent, AgentConfig};
use crate::dispatcher::Dispatcher;
use crate::group::FOR_THE_END;
use crate::metrics::Source;
use crate::move_log::MoveLog;
use crate::paths::Paths;
use crate::slot_sockets::RemoteFd;
use crate::steer::{Steer, SteerEvent};
use crate::supervisor::listen::Endpoint;
use crate::supervisor::process::Identity;
use crate::supervisor::state::{self, GroupDir, State, StateError, Task};

/// What is written down of a group and does not change.
#[derive(Debug)]
pub struct Origin {
    /// Where its sockets are.
    pub listen: Endpoint,
    /// Length of each accept queue; 0 where that is the server's to say.
    pub backlog: i32,
    /// What it was made by: see [`Task::command`].
    pub command: Vec<String>,
    /// Its sockets are another program's, and go on without us.
    pub attached: bool,
}

/// Where a socket is, and who serves it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seated {
    /// Its slot; none where the kernel's hash chooses, or where there was no room.
    pub slot: Option<usize>,
    /// From whom to borrow it.
    pub remote: RemoteFd,
    /// Who serves it, as far as that was seen.
    pub worker: Option<u32>,
}

/// A group that is written down, and steered where an agent was started.
#[derive(Debug)]
pub struct SteeredGroup {
    origin: Origin,
    dir: GroupDir,
    agent: Option<Agent>,
    moves: MoveLog,
    /// By the socket's cookie.
    seats: BTreeMap<u64, Seated>,
}

impl SteeredGroup {
    /// Takes the group's folder. Nothing is steered yet.
    ///
    /// # Errors
    /// Somebody has it, or it cannot be made.
    pub fn take(runtime_dir: &Path, name: &str, origin: Origin) -> Result<Self, StateError> {
        Ok(Self {
            origin,
            dir: GroupDir::take(runtime_dir, name)?,
            agent: None,
            moves: MoveLog::default(),
            seats: BTreeMap::new(),
        })
    }

    /// Whether an agent before us attached it and was killed: its program is there still.
    ///
    /// # Errors
    /// What is written down cannot be read, or believed.
    pub fn was_attached(&self) -> Result<bool, StateError> {
        Ok(self.dir.load()?.is_some_and(|state| state.attached))
    }

    /// Has an agent steer it from now on. The sockets that the program knows get their slots.
    pub fn steer(
        &mut self,
        dispatcher: Dispatcher,
        config: AgentConfig,
        paths: &Paths,
        sockets: impl IntoIterator<Item = (u64, RemoteFd, Option<u32>)>,
    ) {
        let mut up = Vec::new();
        for (cookie, remote, worker) in sockets {
            // One without a slot is tried again when it is seen again.
            let Some(slot) = dispatcher.pinned().slot_of(cookie) else {
                continue;
            };
            let seated = Seated {
                slot: Some(slot),
                remote,
                worker,
            };
            self.seats.insert(cookie, seated);
            up.extend(worker.map(|worker| (slot, worker)));
        }
        let mut agent = Agent::start(dispatcher, config, paths.clone(), None);
        for (slot, worker) in up {
            agent.worker_up(slot, worker);
        }
        self.agent = Some(agent);
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        self.dir.name()
    }

    /// Who steers it, if anybody does.
    pub fn agent(&self) -> Option<&Agent> {
        self.agent.as_ref()
    }

    /// Where a socket is.
    pub fn seat_of(&self, cookie: u64) -> Option<Seated> {
        self.seats.get(&cookie).copied()
    }

    /// The slot of a socket.
    pub fn slot_of(&self, cookie: u64) -> Option<usize> {
        self.seat_of(cookie)?.slot
    }

    /// The cookies of its sockets.
    pub fn cookies(&self) -> impl Iterator<Item = u64> {
        self.seats.keys().copied()
    }

    /// Gives a socket a slot, or notes who has it and who serves it now. Where it is steered, its worker counts as there
    /// from now on.
    ///
    /// # Errors
    /// There is no slot for it: only the kernel's choice gives it anything.
    pub fn seat(
        &mut self,
        cookie: u64,
        remote: RemoteFd,
        worker: Option<u32>,
    ) -> Result<(), bpf::Error> {
        let before = self.seat_of(cookie);
        let mut slot = before.and_then(|before| before.slot);
        if let Some(agent) = &mut self.agent {
            match slot {
                Some(slot) if before.is_some_and(|before| before.remote != remote) => {
                    agent.with_dispatcher(|d| d.lend(slot, remote));
                }
                Some(_) => {}
                None => {
                    slot = agent
                        .with_dispatcher(|d| d.join(cookie, remote))
                        .transpose()?
                }
            }
            if let Some((slot, worker)) = slot.zip(worker) {
                agent.worker_up(slot, worker);
            }
        }
        self.seats.insert(
            cookie,
            Seated {
                slot,
                remote,
                worker,
            },
        );
        Ok(())
    }

    /// The same, and the log says where a socket has no slot.
    pub fn seat_or_tell(&mut self, cookie: u64, remote: RemoteFd, worker: u32) {
        if let Err(error) = self.seat(cookie, remote, Some(worker)) {
            tracing::warn!("{}: process {}: {error}", self.origin.listen, remote.pid);
            let slot = None;
            let worker = Some(worker);
            self.seats.insert(
                cookie,
                Seated {
                    slot,
                    remote,
                    worker,
                },
            );
        }
    }

    /// A socket is chosen no more, and its slot is free. Tells whether it had one.
    pub fn leave(&mut self, cookie: u64) -> bool {
        let left = self.seats.remove(&cookie).and_then(|seated| seated.slot);
        match (left, &self.agent) {
            (Some(slot), Some(agent)) => agent.with_dispatcher(|d| d.leave(slot)).is_some(),
            _ => false,
        }
    }

    /// A socket that left does not come back: what the program knows of it is removed.
    pub fn forget(&self, cookie: u64) {
        if let Some(agent) = &self.agent {
            agent.with_dispatcher(|d| d.pinned().forget_listener(cookie));
        }
    }

    /// The worker of a socket is gone: returns when what waits in it was moved to others, and no handshake is under way.
    pub fn worker_gone(&mut self, cookie: u64) {
        if let (Some(slot), Some(agent)) = (self.slot_of(cookie), &mut self.agent) {
            agent.worker_gone(slot);
        }
    }

    /// The same, and then it leaves.
    pub fn hand_over(&mut self, cookie: u64) {
        self.worker_gone(cookie);
        self.leave(cookie);
    }

    /// Somebody else has a socket now.
    pub fn lend(&mut self, cookie: u64, remote: RemoteFd) {
        let Some(seated) = self.seats.get_mut(&cookie) else {
            return;
        };
        seated.remote = remote;
        if let (Some(slot), Some(agent)) = (seated.slot, &self.agent) {
            agent.with_dispatcher(|d| d.lend(slot, remote));
        }
    }

    /// Does something between two looks of the agent, when no queue is being moved.
    pub fn between_looks<R>(&self, act: impl FnOnce() -> R) -> R {
        match &self.agent {
            Some(agent) => agent.between_looks(act),
            None => act(),
        }
    }

    /// Writes it down.
    ///
    /// # Errors
    /// That cannot be done.
    pub fn store(&self) -> Result<(), StateError> {
        self.dir.store(&self.state()?)
    }

    /// The same, now or as soon as that can be done. Steering goes on meanwhile.
    pub fn keep(&self) {
        match self.state() {
            Ok(state) => self.dir.keep(&state),
            Err(error) => tracing::warn!("{}: {error}", self.origin.listen),
        }
    }

    /// Writes down what could not be written before. Call it every second or so.
    pub fn catch_up(&self) {
        self.dir.catch_up();
    }

    /// Tells `status` who serves what. `detach` reads it if the agent was killed.
    fn state(&self) -> Result<State, StateError> {
        let own = Identity::of(std::process::id()).map_err(|source| StateError::File {
            what: "read",
            path: "/proc/self/stat".into(),
            source,
        })?;
        let Origin {
            listen,
            backlog,
            ref command,
            attached,
        } = self.origin;
        Ok(State {
            schema: state::SCHEMA,
            name: self.name().to_owned(),
            boot: state::boot_id(),
            supervisor: own,
            listen: vec![listen],
            backlog: backlog.max(0),
            task: Task {
                command: command.clone(),
                account: None,
                keep_caps: Vec::new(),
            },
            slots: self.slots(),
            attached,
            reserved: Vec::new(),
        })
    }

    /// Where the kernel's hash chooses, sockets are numbered.
    fn slots(&self) -> Vec<state::Slot> {
        let count = match &self.agent {
            Some(agent) => agent.with_dispatcher(|d| d.slots()).unwrap_or(0),
            None => self.seats.len(),
        };
        let empty = || state::Slot {
            worker: None,
            current: true,
            inodes: Vec::new(),
            beside: None,
        };
        let mut slots: Vec<_> = std::iter::repeat_with(empty).take(count.max(1)).collect();
        let mut told = BTreeSet::new();
        for (number, seated) in self.seats.values().enumerate() {
            let slot = match self.agent {
                Some(_) => seated.slot,
                None => Some(number),
            };
            if let Some(slot) = slot.and_then(|slot| slots.get_mut(slot)) {
                let who = seated.worker.unwrap_or(seated.remote.pid);
                // One process may serve many sockets. A worker of a group that is not attached has one slot (see
                // `State::decode`), so such a process is told once.
                let tell = self.origin.attached || told.insert(who);
                slot.worker = Identity::of(who).ok().filter(|_| tell);
                slot.inodes = vec![seated.remote.inode];
            }
        }
        slots
    }

    /// What its figures are read from. `traced`: those of the kernel's tracepoints too.
    pub fn source(&self, paths: &Paths, traced: bool) -> Source {
        let mut source = Source::open(paths, self.name());
        if let Some(agent) = &self.agent {
            source = source.with_rescuer(agent.rescuer());
        }
        if traced {
            source = source.traced(std::iter::once(self.origin.listen.address));
        }
        source
    }

    /// What its agent saw since the last call, with moves summed up for the log.
    pub fn events(&mut self) -> Vec<SteerEvent> {
        let seen = self.agent.as_mut().map(Steer::events).unwrap_or_default();
        self.moves.pass(Instant::now(), seen)
    }

    /// Takes program, pins and folder away. Sockets that are there still go on, and the kernel's hash chooses.
    pub fn end(self) {
        if let Some(agent) = self.agent {
            capability::with(&FOR_THE_END, || agent.end());
        }
        self.dir.forget();
    }
}
