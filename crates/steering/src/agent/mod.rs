//! The agent of a steered group: observe, judge, act, publish, a few hundred times a second.
//!
//! It stands beside the path of connections, never in it. If it dies, steering goes on. The program notices its old
//! heartbeat and ignores the marks that nobody would take back.

mod chores;
mod heavy;
mod heavy_flows;
mod moves;
mod pause;
mod probe_budget;
mod quic;
pub mod recount;
mod replaced;
mod rest;
mod rounds;
mod runs;
mod slot;
mod state;
mod steer;
mod stuck;
mod transport;

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use wakeone_bpf::chooser::Chooser;
use wakeone_bpf::table::Table;

use self::chores::Chore;
pub use self::moves::without_priority;
use self::quic::LeftBehind;
pub use self::rounds::Rounds;
use self::rounds::{Caller, Seat};
pub use self::state::{AgentConfig, Rescued};
use self::state::{Core, lock};
use crate::dispatcher::Dispatcher;
use wakeone_control::paths::Paths;

/// A running agent.
#[derive(Debug)]
pub struct Agent {
    core: Arc<Mutex<Core>>,
    /// `None` if nobody looks at the group.
    seat: Option<Seat>,
    /// `None` if nothing is counted.
    counts: Option<Chore>,
    /// For QUIC.
    left: LeftBehind,
    paths: Paths,
    cgroup: Option<PathBuf>,
}

impl Agent {
    /// Starts the agent of a group, whose looks are taken by `rounds`. `cgroup` is the cgroup to remove when the group ends.
    pub fn start(
        dispatcher: Dispatcher,
        config: AgentConfig,
        paths: Paths,
        cgroup: Option<PathBuf>,
        rounds: &Rounds,
    ) -> Self {
        let left = LeftBehind::default();
        let pins = dispatcher.pinned().dir().to_owned();
        let (is_quic, port) = (dispatcher.quic().is_some(), dispatcher.port().unwrap_or(0));
        let is_counting = dispatcher.counting();
        let core = Arc::new(Mutex::new(Core::new(dispatcher, config)));
        let seat = rounds.join(&core).map_err(|error| {
            lock(&core).note(format!("no agent, so no rescue: {error}"));
        });
        let seat = seat.ok();
        let counts = seat.as_ref().map(|seat| match is_quic {
            true => Some(quic::start(&seat.chores, &pins, left.clone())),
            false => is_counting.then(|| recount::start(&seat.chores, &pins, port)),
        });
        Self {
            core,
            counts: counts.flatten().and_then(Result::ok),
            seat,
            left,
            paths,
            cgroup,
        }
    }

    /// Ends the agent and takes the program away; the listeners stay.
    pub fn end(self) {
        drop((self.counts, self.seat));
        if let Some(core) = Arc::into_inner(self.core) {
            let core = core.into_inner().unwrap_or_else(PoisonError::into_inner);
            core.dispatcher.end(&self.paths, self.cgroup.as_deref());
        }
    }

    /// Returns a handle by which others may ask for a slot's queue to be moved.
    pub fn rescuer(&self) -> Rescuer {
        Rescuer {
            core: Arc::downgrade(&self.core),
            caller: self.seat.as_ref().map(|seat| seat.caller().clone()),
        }
    }

    /// Returns the bytes of datagrams that wait in UDP sockets now; 0 if the sockets are of TCP.
    pub fn unread_bytes(&self) -> u64 {
        let core = lock(&self.core);
        core.transport.unread_bytes(&core.dispatcher)
    }

    /// Does something to the dispatcher between two looks. It may have more slots afterwards.
    pub fn with_dispatcher<R>(&self, act: impl FnOnce(&mut Dispatcher) -> R) -> R {
        let mut core = lock(&self.core);
        let done = act(&mut core.dispatcher);
        core.fit_slots();
        drop(core);
        self.stir();
        done
    }

    /// Looks at the dispatcher between two looks.
    pub fn see_dispatcher<R>(&self, see: impl FnOnce(&Dispatcher) -> R) -> R {
        see(&lock(&self.core).dispatcher)
    }

    /// Reads or changes the table.
    pub fn with_table<R>(&self, act: impl FnOnce(&Table) -> R) -> R {
        act(lock(&self.core).dispatcher.table())
    }

    /// Notes which processes serve a slot's socket beside its worker; of a slot without one, which hold the socket.
    pub fn accompany(&self, slot: usize, others: Vec<u32>) {
        if let Some(state) = lock(&self.core).slots.get_mut(slot) {
            state.others = others;
        }
    }

    /// Notes whether our program chooses for the group, by what the kernel tells of its sockets.
    pub fn see_choosers(&self, seen: &[Chooser]) {
        let mut core = lock(&self.core);
        if let Some(ours) = core.dispatcher.pinned().chooses(seen) {
            core.see_chooser(ours);
        }
    }

    /// Stops choosing a slot whose socket left the group, and frees it.
    pub fn vacate(&self, slot: usize) {
        let mut core = lock(&self.core);
        core.dispatcher.leave(slot);
        core.slots[slot].forget_worker();
        drop(core);
        self.stir();
    }

    /// Runs `act` between two looks, when no queue is being moved.
    pub fn between_looks<R>(&self, act: impl FnOnce() -> R) -> R {
        let _core = lock(&self.core);
        act()
    }

    /// Connections or datagrams placed so far.
    pub fn placed(&self) -> u64 {
        lock(&self.core).placed()
    }

    fn wake(&self) {
        if let Some(seat) = &self.seat {
            seat.caller().call();
        }
    }

    /// Wakes the agent after a change of listeners or workers, so that it waits for the new ones.
    fn stir(&self) {
        lock(&self.core).stir();
        self.wake();
    }
}

/// Asks an agent for a rescue. Do not use it after [`Agent::end`].
#[derive(Debug, Clone)]
pub struct Rescuer {
    core: Weak<Mutex<Core>>,
    caller: Option<Caller>,
}

impl Rescuer {
    /// Has the agent's own thread move a slot's queue, as nobody interrupts that thread during a move. Returns where
    /// the result arrives.
    pub fn ask(&self, slot: usize) -> Receiver<Rescued> {
        let (answer, answered) = sync_channel(1);
        match (self.core.upgrade(), &self.caller) {
            (Some(core), Some(caller)) => {
                lock(&core).requests.push((slot, answer));
                caller.call();
            }
            _ => {
                let _ = answer.try_send(Err("its agent has ended".to_owned()));
            }
        }
        answered
    }
}
