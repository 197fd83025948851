//! The agent of a steered group: observe, judge, act, publish, a few hundred times a second.
//!
//! It stands beside the path of connections, never in it. If it dies, steering goes on. The program notices its old
//! heartbeat and ignores the marks that nobody would take back.

mod background;
mod heavy;
mod heavy_flows;
mod moves;
mod pause;
mod probe_budget;
mod quic;
pub mod recount;
mod replaced;
mod rest;
mod runs;
mod slot;
mod state;
mod steer;
mod stuck;
mod transport;

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use wakeone_bpf::chooser::Chooser;
use wakeone_bpf::table::Table;
use wakeone_kernel::schedule;

use self::background::Background;
pub use self::moves::without_priority;
use self::quic::LeftBehind;
use self::rest::Waker;
pub use self::state::{AgentConfig, Rescued};
use self::state::{Core, lock};
use crate::dispatcher::Dispatcher;
use wakeone_control::paths::Paths;

/// The agent rests for this many times as long as its last round took, but no longer than that. So rounds of up to 6 ms take a
/// fifth of a CPU at most. With many workers that all have queues a round is long.
const LEISURE: u32 = 4;
const LONGEST_LEISURE: Duration = Duration::from_millis(25);

/// A running agent.
#[derive(Debug)]
pub struct Agent {
    core: Arc<Mutex<Core>>,
    /// `None` if it could not be started.
    thread: Option<AgentThread>,
    /// `None` if nothing is counted.
    counts: Option<Background>,
    /// For QUIC.
    left: LeftBehind,
    paths: Paths,
    cgroup: Option<PathBuf>,
}

impl Agent {
    /// Starts the agent of a group. `cgroup` is the cgroup to remove when the group ends.
    pub fn start(
        dispatcher: Dispatcher,
        config: AgentConfig,
        paths: Paths,
        cgroup: Option<PathBuf>,
    ) -> Self {
        let left = LeftBehind::default();
        let pins = dispatcher.pinned().dir();
        let counts = match dispatcher.quic() {
            Some(_) => Some(quic::start(pins, left.clone())),
            None if dispatcher.counting() => {
                Some(recount::start(pins, dispatcher.port().unwrap_or(0)))
            }
            None => None,
        };
        let core = Arc::new(Mutex::new(Core::new(dispatcher, config)));
        let thread = AgentThread::start(&core).map_err(|error| {
            lock(&core).note(format!("no agent, so no rescue: {error}"));
        });
        Self {
            core,
            thread: thread.ok(),
            counts: counts.and_then(Result::ok),
            left,
            paths,
            cgroup,
        }
    }

    /// Ends the agent and takes the program away; the listeners stay.
    pub fn end(self) {
        drop((self.thread, self.counts));
        if let Some(core) = Arc::into_inner(self.core) {
            let core = core.into_inner().unwrap_or_else(PoisonError::into_inner);
            core.dispatcher.end(&self.paths, self.cgroup.as_deref());
        }
    }

    /// Returns a handle by which others may ask for a slot's queue to be moved.
    pub fn rescuer(&self) -> Rescuer {
        Rescuer {
            core: Arc::downgrade(&self.core),
            waker: self.thread.as_ref().map(|one| Arc::clone(&one.waker)),
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
        if let Some(thread) = &self.thread {
            thread.waker.wake();
        }
    }

    /// Wakes the agent after a change of listeners or workers, so that it waits for the new ones.
    fn stir(&self) {
        lock(&self.core).stir();
        self.wake();
    }
}

/// The thread of an agent. Dropping this ends it.
#[derive(Debug)]
struct AgentThread {
    stop: Arc<AtomicBool>,
    waker: Arc<Waker>,
    handle: Option<JoinHandle<()>>,
}

impl AgentThread {
    /// # Errors
    /// Out of descriptors or threads.
    fn start(core: &Arc<Mutex<Core>>) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let waker = Arc::new(Waker::new()?);
        let (core, its_stop, its_waker) = (Arc::clone(core), Arc::clone(&stop), Arc::clone(&waker));
        let thread = std::thread::Builder::new().name("agent".into());
        let handle = Some(thread.spawn(move || watch(&core, &its_stop, &its_waker))?);
        Ok(Self {
            stop,
            waker,
            handle,
        })
    }
}

impl Drop for AgentThread {
    fn drop(&mut self) {
        self.stop.store(true, Release);
        self.waker.wake();
        if let Some(handle) = self.handle.take() {
            let _ = handle.join();
        }
    }
}

fn watch(core: &Mutex<Core>, stop: &AtomicBool, waker: &Waker) {
    if let Err(error) = schedule::real_time() {
        lock(core).note_no_priority(&error);
    }
    while !stop.load(Acquire) {
        let (time, arrivals) = {
            let mut core = lock(core);
            let begun = Instant::now();
            let pause = core.tick();
            let leisure = (begun.elapsed() * LEISURE).min(LONGEST_LEISURE);
            core.rest(pause.max(leisure))
        };
        if waker.sleep(time, arrivals.as_deref()) {
            lock(core).came();
        }
    }
}

/// Asks an agent for a rescue. Do not use it after [`Agent::end`].
#[derive(Debug, Clone)]
pub struct Rescuer {
    core: Weak<Mutex<Core>>,
    waker: Option<Arc<Waker>>,
}

impl Rescuer {
    /// Has the agent's own thread move a slot's queue, as nobody interrupts that thread during a move. Returns where
    /// the result arrives.
    pub fn ask(&self, slot: usize) -> Receiver<Rescued> {
        let (answer, answered) = sync_channel(1);
        match (self.core.upgrade(), &self.waker) {
            (Some(core), Some(waker)) => {
                lock(&core).requests.push((slot, answer));
                waker.wake();
            }
            _ => {
                let _ = answer.try_send(Err("its agent has ended".to_owned()));
            }
        }
        answered
    }
}
