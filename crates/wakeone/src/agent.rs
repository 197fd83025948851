//! The agent of a steered group: observe, judge, act, publish, a few hundred times a second.
//!
//! It stands beside the connections' way, never in it. If it dies, steering goes on; the program notices its old
//! heartbeat and ignores the marks that nobody would take back.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use wakeone_kernel::table::flag;
use wakeone_kernel::{capability, process, schedule};
use wakeone_model::judge::{self, Doing, Lap, Limits, Look, Memory};
use wakeone_model::reads::Reads;

use crate::datagrams;
use crate::dispatcher::Dispatcher;
use crate::group::FOR_THE_END;
use crate::paths::Paths;
use crate::questions::Questions;
use crate::steer::{Steer, SteerEvent};

/// The agent counts as gone when it has not looked for this long.
const HEARTBEAT_LIMIT: Duration = Duration::from_secs(1);
/// How often to look while connections are open: a quarter of the patience, within these bounds.
const BUSY_TICK: (Duration, Duration) = (Duration::from_micros(500), Duration::from_millis(5));
/// How often to look while none are.
const IDLE_TICK: Duration = Duration::from_millis(10);
/// How long a worker must have been stuck for its return to be an event.
const NEWSWORTHY: Duration = Duration::from_secs(1);
/// Events kept for a supervisor that does not ask.
const MOST_EVENTS: usize = 10_000;

/// What the agent is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Duties {
    /// Move the queues of stuck workers.
    pub rescue: bool,
    /// How long connections may wait without one being accepted, while another worker is idle.
    pub stuck_after: Duration,
}

/// A running agent.
#[derive(Debug)]
pub struct Agent {
    core: Arc<Mutex<Core>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    paths: Paths,
    cgroup: Option<PathBuf>,
}

impl Agent {
    /// Starts the agent of a group. `cgroup`: to be removed when the group ends.
    pub fn start(
        dispatcher: Dispatcher,
        duties: Duties,
        paths: Paths,
        cgroup: Option<PathBuf>,
    ) -> Self {
        let core = Arc::new(Mutex::new(Core::new(dispatcher, duties)));
        let stop = Arc::new(AtomicBool::new(false));
        let thread = {
            let (core, stop) = (Arc::clone(&core), Arc::clone(&stop));
            std::thread::Builder::new()
                .name("agent".into())
                .spawn(move || watch(&core, &stop))
        };
        let thread = match thread {
            Ok(thread) => Some(thread),
            Err(error) => {
                lock(&core).note(format!("no agent, so no rescue: {error}"));
                None
            }
        };
        Self {
            core,
            stop,
            thread,
            paths,
            cgroup,
        }
    }

    /// Ends the agent and takes the program away; the listeners stay.
    pub fn end(mut self) {
        self.stop();
        let Self {
            core,
            paths,
            cgroup,
            ..
        } = &mut self;
        let core = std::mem::replace(core, Arc::new(Mutex::new(Core::default())));
        if let Some(core) = Arc::into_inner(core) {
            let core = core.into_inner().unwrap_or_else(PoisonError::into_inner);
            if let Some(dispatcher) = core.dispatcher {
                dispatcher.end(paths, cgroup.as_deref());
            }
        }
    }

    /// By which others may ask for a slot's queue to be moved.
    pub fn rescuer(&self) -> Rescuer {
        Rescuer {
            core: Arc::downgrade(&self.core),
            thread: self.thread.as_ref().map(|thread| thread.thread().clone()),
        }
    }

    /// Bytes of datagrams that wait in UDP sockets now; 0 where the sockets are of TCP.
    pub fn unread_bytes(&self) -> u64 {
        let core = lock(&self.core);
        let dispatcher = core.dispatcher.as_ref().filter(|one| one.datagrams());
        dispatcher.map_or(0, |one| {
            (0..one.slots())
                .map(|slot| u64::from(one.receive_queue(slot).waiting_bytes))
                .sum()
        })
    }

    /// Does something to the dispatcher between two looks. It may have more slots afterwards.
    pub fn tell<R>(&self, act: impl FnOnce(&mut Dispatcher) -> R) -> Option<R> {
        let mut core = lock(&self.core);
        let dispatcher = core.dispatcher.as_mut()?;
        let told = act(dispatcher);
        let slots = dispatcher.slots();
        core.memory.resize_with(slots, Memory::default);
        core.reads.resize_with(slots, Reads::default);
        core.patience.resize(slots, None);
        core.laps.resize(slots, None);
        Some(told)
    }

    fn stop(&mut self) {
        self.stop.store(true, Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Asks an agent for a rescue. Not to be used once [`Agent::end`] is called.
#[derive(Debug, Clone)]
pub struct Rescuer {
    core: Weak<Mutex<Core>>,
    thread: Option<Thread>,
}

/// How many connections were moved, or why none were.
pub type Rescued = Result<u32, String>;

impl Rescuer {
    /// Has the agent's own thread, which nobody interrupts in the middle of it, move a slot's queue; what came of it.
    pub fn ask(&self, slot: usize) -> Receiver<Rescued> {
        let (answer, answered) = sync_channel(1);
        match (self.core.upgrade(), &self.thread) {
            (Some(core), Some(thread)) => {
                lock(&core).asked.push((slot, answer));
                thread.unpark();
            }
            _ => {
                let _ = answer.try_send(Err("its agent has ended".to_owned()));
            }
        }
        answered
    }
}

fn lock(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    core.lock().unwrap_or_else(PoisonError::into_inner)
}

fn watch(core: &Mutex<Core>, stop: &AtomicBool) {
    if let Err(error) = schedule::real_time() {
        // Between a rescue's shutdown and listen a woken worker could run before us and see a socket that does not
        // listen. Rare enough to go on without.
        tracing::debug!("the agent runs without real-time priority: {error}");
    }
    while !stop.load(Acquire) {
        let next = lock(core).tick();
        std::thread::park_timeout(next);
    }
}

/// What both the agent's thread and the supervisor's calls work on, one at a time.
#[derive(Debug, Default)]
struct Core {
    dispatcher: Option<Dispatcher>,
    duties: Option<Duties>,
    memory: Vec<Memory>,
    /// Since a slot is suspect: what the others had accepted then.
    laps: Vec<Option<Lap>>,
    /// Of UDP sockets: what was seen of reads, and how many datagrams had been placed.
    reads: Vec<Reads>,
    placed: u64,
    /// When a slot marked stuck may be looked at again, so that what cannot be rescued is not tried all the time.
    patience: Vec<Option<Instant>>,
    events: Vec<SteerEvent>,
    /// Slots whose queues somebody asked to be moved.
    asked: Vec<(usize, SyncSender<Rescued>)>,
    questions: Questions,
    started: Option<Instant>,
}

impl Core {
    fn new(dispatcher: Dispatcher, duties: Duties) -> Self {
        let slots = dispatcher.slots();
        let table = dispatcher.table();
        table
            .heartbeat_limit_ns()
            .store(HEARTBEAT_LIMIT.as_nanos() as u64, Relaxed);
        table.heartbeat_ns().store(schedule::coarse_ns(), Relaxed);
        for slot in 0..slots {
            table.slot(slot).mark(flag::STUCK, false);
        }
        Self {
            dispatcher: Some(dispatcher),
            duties: Some(duties),
            memory: vec![Memory::default(); slots],
            laps: vec![None; slots],
            reads: vec![Reads::default(); slots],
            placed: 0,
            patience: vec![None; slots],
            events: Vec::new(),
            asked: Vec::new(),
            questions: Questions::default(),
            started: Some(Instant::now()),
        }
    }

    fn note(&mut self, text: String) {
        self.event(SteerEvent::Note(text));
    }

    fn event(&mut self, event: SteerEvent) {
        if self.events.len() < MOST_EVENTS {
            self.events.push(event);
        }
    }

    /// One round. Returns how long to sleep.
    fn tick(&mut self) -> Duration {
        let (Some(dispatcher), Some(duties)) = (&self.dispatcher, self.duties) else {
            return IDLE_TICK;
        };
        dispatcher
            .table()
            .heartbeat_ns()
            .store(schedule::coarse_ns(), Relaxed);
        let (looks, busy) = if dispatcher.datagrams() {
            let looks: Vec<Look> = (0..dispatcher.slots())
                .zip(&mut self.reads)
                .map(|(slot, reads)| datagrams::observe(dispatcher, slot, reads))
                .collect();
            let placed = placed(dispatcher);
            let came = std::mem::replace(&mut self.placed, placed) != placed;
            let busy = came || looks.iter().any(|look| look.queued > 0);
            (looks, busy)
        } else {
            let looks: Vec<Look> = (0..dispatcher.slots())
                .map(|slot| observe(dispatcher, slot))
                .collect();
            let busy = looks.iter().any(|look| look.active > 0 || look.queued > 0);
            (looks, busy)
        };
        self.questions.begin();
        self.judge(&looks, duties);
        self.questions.end();
        for (slot, answer) in std::mem::take(&mut self.asked) {
            let _ = answer.try_send(self.rescue_now(slot, &looks, duties));
        }
        if busy {
            (duties.stuck_after / 4).clamp(BUSY_TICK.0, BUSY_TICK.1)
        } else {
            IDLE_TICK
        }
    }

    fn now_ns(&self) -> u64 {
        self.started
            .map_or(0, |started| started.elapsed().as_nanos() as u64)
            + 1
    }

    fn judge(&mut self, looks: &[Look], duties: Duties) {
        let now = self.now_ns();
        let limits = Limits {
            stuck_after_ns: duties.stuck_after.as_nanos() as u64,
        };
        for slot in 0..looks.len() {
            self.see_read(slot, &looks[slot], now);
            let suspect = judge::suspect(now, &looks[slot], &mut self.memory[slot], limits);
            if !suspect {
                self.laps[slot] = None;
            }
            if let Some(since) = self.memory[slot].stuck_since_ns {
                self.look_after(slot, looks, now, since, duties);
            } else if suspect
                && judge::stuck(self.another_sooner(slot, looks, now, limits), || {
                    self.doing(slot)
                })
            {
                self.memory[slot].stuck_since_ns = Some(now);
                self.mark(slot, flag::STUCK, true);
                let datagrams = self.dispatcher.as_ref().is_some_and(Dispatcher::datagrams);
                self.event(SteerEvent::Stuck {
                    slot,
                    queued: looks[slot].queued,
                    unit: if datagrams { "bytes" } else { "connections" },
                });
                self.rescue(slot, looks, duties);
            }
        }
    }

    /// Of UDP nobody need wait for a socket that is read now and then: a read is a sign of life by itself.
    fn see_read(&mut self, slot: usize, look: &Look, now: u64) {
        let Some(since) = self.memory[slot].stuck_since_ns else {
            return;
        };
        let datagrams = self.dispatcher.as_ref().is_some_and(Dispatcher::datagrams);
        if datagrams && judge::recovered(look, &self.memory[slot], Doing::Unknown) {
            self.resume(slot, now, since);
        }
    }

    /// Takes a slot's mark away.
    fn resume(&mut self, slot: usize, now: u64, since: u64) {
        self.memory[slot].stuck_since_ns = None;
        self.mark(slot, flag::STUCK, false);
        let stuck_ns = now.saturating_sub(since);
        if let Some(dispatcher) = &self.dispatcher {
            let place = dispatcher.table().slot(slot);
            place.stuck_ns().fetch_add(stuck_ns, Relaxed);
        }
        // A long request is over: no news. A worker that was away for a person's notice is back: news.
        if stuck_ns >= NEWSWORTHY.as_nanos() as u64 {
            let after_ms = stuck_ns / 1_000_000;
            self.event(SteerEvent::Resumed { slot, after_ms });
        }
    }

    /// A slot that is marked stuck: is it well again, or did more arrive (handshakes that were half done)?
    fn look_after(&mut self, slot: usize, looks: &[Look], now: u64, since: u64, duties: Duties) {
        let doing = self.doing(slot);
        if judge::recovered(&looks[slot], &self.memory[slot], doing) {
            self.resume(slot, now, since);
        } else if looks[slot].queued > 0 && matches!(doing, Doing::Busy | Doing::Stopped) {
            self.rescue(slot, looks, duties);
        }
    }

    /// Moves a stuck slot's queue where that is wished for and possible; tells whether it did.
    fn rescue(&mut self, slot: usize, looks: &[Look], duties: Duties) -> bool {
        if !duties.rescue || self.patience[slot].is_some_and(|until| Instant::now() < until) {
            return false;
        }
        let others = self.rooms(slot, looks);
        if others.is_empty() || !judge::fits(looks[slot].queued, others.into_iter()) {
            return false;
        }
        self.move_queue(slot)
    }

    /// The room in the queues of those that a slot's connections could be moved to.
    fn rooms(&self, slot: usize, looks: &[Look]) -> Vec<u32> {
        let others = looks.iter().enumerate().filter(|(other, look)| {
            *other != slot && look.serving && self.memory[*other].stuck_since_ns.is_none()
        });
        others.map(|(_, look)| look.room).collect()
    }

    /// Moves a slot's queue because a person said so, whether or not its worker seems stuck.
    fn rescue_now(&mut self, slot: usize, looks: &[Look], duties: Duties) -> Rescued {
        let cannot = |why: &str| Err(format!("cannot move the queue of slot {slot}: {why}"));
        if self.dispatcher.as_ref().is_some_and(Dispatcher::datagrams) {
            return cannot("what waits in UDP sockets cannot be moved");
        }
        if !duties.rescue {
            return cannot("rescue is off for this group; start or attach it with --rescue");
        }
        let Some(look) = looks.get(slot) else {
            return cannot("there is no such slot");
        };
        let others = self.rooms(slot, looks);
        if others.is_empty() {
            return cannot(
                "no other slot has a live listener, and the kernel would reset what waits",
            );
        }
        if !judge::fits(look.queued, others.into_iter()) {
            return cannot("the queues of the others have no room for it");
        }
        // The program must not choose the slot meanwhile.
        self.mark(slot, flag::STUCK, true);
        let moved = self.try_move(slot);
        if self.memory[slot].stuck_since_ns.is_none() {
            self.mark(slot, flag::STUCK, false);
        }
        moved.or_else(|error| cannot(&error.to_string()))
    }

    /// Moves the queue of a slot that the program does not choose now; tells whether anything moved.
    fn move_queue(&mut self, slot: usize) -> bool {
        match self.try_move(slot) {
            Ok(moved) => moved > 0,
            Err(error) => {
                self.patience[slot] = Some(Instant::now() + Duration::from_secs(1));
                self.note(format!("slot {slot} is not rescued for a second: {error}"));
                false
            }
        }
    }

    /// Moves it, and counts and tells what was moved.
    fn try_move(&mut self, slot: usize) -> Result<u32, wakeone_kernel::bpf::Error> {
        let Some(dispatcher) = &self.dispatcher else {
            return Ok(0);
        };
        let before = Instant::now();
        let moved = dispatcher.move_queues(slot)?;
        if moved > 0 {
            let took_us = before.elapsed().as_micros() as u64;
            let place = dispatcher.table().slot(slot);
            place.rescues().fetch_add(1, Relaxed);
            place.rescued().fetch_add(moved.into(), Relaxed);
            let look = observe(dispatcher, slot);
            self.memory[slot].moved(&look);
            self.event(SteerEvent::Rescued {
                slot,
                moved,
                took_us,
            });
        }
        Ok(moved)
    }

    fn mark(&self, slot: usize, flag: u32, on: bool) {
        if let Some(dispatcher) = &self.dispatcher {
            dispatcher.table().slot(slot).mark(flag, on);
        }
    }

    /// What a worker does, as far as may be asked in this round.
    fn doing(&self, slot: usize) -> Doing {
        let Some(dispatcher) = &self.dispatcher else {
            return Doing::Unknown;
        };
        self.questions.ask(slot, || doing(dispatcher, slot))
    }

    /// Whether another worker would serve what waits in this slot sooner.
    fn another_sooner(&mut self, slot: usize, looks: &[Look], now: u64, limits: Limits) -> bool {
        let memory = &self.memory;
        let others = || {
            let all = looks.iter().enumerate();
            all.filter(|(other, _)| *other != slot && memory[*other].stuck_since_ns.is_none())
        };
        others().any(|(other, look)| judge::idle(look, || self.doing(other)))
            || self.laps[slot]
                .as_ref()
                .is_some_and(|lap| lap.overtaken(now, others(), limits))
            || {
                self.laps[slot].get_or_insert_with(|| Lap::start(now, looks));
                false
            }
    }

    /// Whether a slot other than this one can be given connections.
    fn another_serves(&self, slot: usize) -> bool {
        self.dispatcher.as_ref().is_some_and(|dispatcher| {
            (0..dispatcher.slots()).any(|other| other != slot && serving(dispatcher, other))
        })
    }
}

/// Datagrams placed so far.
fn placed(dispatcher: &Dispatcher) -> u64 {
    (0..dispatcher.slots())
        .map(|slot| dispatcher.table().slot(slot).selected().load(Relaxed))
        .sum()
}

fn doing(dispatcher: &Dispatcher, slot: usize) -> Doing {
    if dispatcher.datagrams() {
        return datagrams::doing(dispatcher, slot);
    }
    match dispatcher.table().slot(slot).pid().load(Relaxed) {
        0 => Doing::Unknown,
        pid => match process::doing_below(pid, &dispatcher.inodes(slot)) {
            process::Doing::Waiting => Doing::Waiting,
            process::Doing::Busy => Doing::Busy,
            process::Doing::Stopped => Doing::Stopped,
            process::Doing::Unknown | process::Doing::Gone => Doing::Unknown,
        },
    }
}

/// Whether a worker runs in the slot and may be given something.
fn serving(dispatcher: &Dispatcher, slot: usize) -> bool {
    let place = dispatcher.table().slot(slot);
    place.has(flag::UP) && !place.has(flag::DRAINING) && place.pid().load(Relaxed) != 0
}

/// Looks at a slot, and publishes its queue's length.
fn observe(dispatcher: &Dispatcher, slot: usize) -> Look {
    let place = dispatcher.table().slot(slot);
    let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Relaxed);
    let (established, arrived, left) = (
        load(place.established()),
        load(place.migrated_in()),
        load(place.migrated_out()),
    );
    let active = u64::try_from(place.active().load(Relaxed)).unwrap_or(0);
    // No connection is open that could wait: the queue was empty and is, and the system call is spared.
    let queue = if dispatcher.counting()
        && active == 0
        && place.queued().load(Relaxed) == 0
        && place.queue_limit().load(Relaxed) > 0
    {
        wakeone_kernel::socket::AcceptQueue {
            length: 0,
            limit: place.queue_limit().load(Relaxed),
        }
    } else {
        dispatcher.publish_queues(slot)
    };
    place.queue_limit().store(queue.limit, Relaxed);
    Look {
        serving: serving(dispatcher, slot),
        queued: queue.length,
        room: queue.limit.saturating_sub(queue.length),
        accepted: (established + arrived).saturating_sub(left + u64::from(queue.length)),
        active,
    }
}

impl Steer for Agent {
    fn worker_up(&mut self, slot: usize, pid: u32) {
        let mut core = lock(&self.core);
        core.memory[slot] = Memory::default();
        let Some(dispatcher) = &core.dispatcher else {
            return;
        };
        let place = dispatcher.table().slot(slot);
        place.mark(flag::STUCK, false);
        place.pid().store(pid, Relaxed);
        // A worker that was told to end may have shut its listener down: in the array again, whatever happened.
        let restored = dispatcher.restore(slot);
        // Last: a slot that is up and has no socket would be chosen in vain.
        if restored.is_ok() {
            place.mark(flag::UP, true);
        }
        if let Err(error) = restored {
            core.note(format!(
                "slot {slot} gets connections only from the kernel's choice: {error}"
            ));
        }
    }

    fn worker_down(&mut self, slot: usize) {
        let mut core = lock(&self.core);
        core.memory[slot] = Memory::default();
        let another = core.another_serves(slot);
        let Some(dispatcher) = &core.dispatcher else {
            return;
        };
        let place = dispatcher.table().slot(slot);
        place.pid().store(0, Relaxed);
        place.mark(flag::STUCK, false);
        place.restarts().fetch_add(1, Relaxed);
        if another {
            // Nobody serves this slot, and others are there: choose those, and give them what waits here.
            place.mark(flag::UP, false);
            core.move_queue(slot);
        }
        // The last worker is gone: what waits, waits for its successor, and so does what comes now.
    }

    fn drain(&mut self, slot: usize, on: bool) {
        lock(&self.core).mark(slot, flag::DRAINING, on);
    }

    fn close(&mut self) {
        let mut core = lock(&self.core);
        let closed = capability::with(&FOR_THE_END, || {
            core.dispatcher.as_ref().map(Dispatcher::close)
        });
        if let Some(Err(error)) = closed {
            core.note(format!(
                "new connections still come while the group closes: {error}"
            ));
        }
    }

    fn queued(&self, slot: usize) -> u32 {
        lock(&self.core)
            .dispatcher
            .as_ref()
            .map_or(0, |dispatcher| dispatcher.queue(slot).length)
    }

    fn active(&self, slot: usize) -> u64 {
        let core = lock(&self.core);
        let open = core
            .dispatcher
            .as_ref()
            .map(|dispatcher| dispatcher.table().slot(slot).active().load(Relaxed));
        open.and_then(|open| u64::try_from(open).ok()).unwrap_or(0)
    }

    fn accepting(&self, slot: usize) -> Option<bool> {
        let core = lock(&self.core);
        match core
            .dispatcher
            .as_ref()
            .map_or(Doing::Unknown, |one| doing(one, slot))
        {
            Doing::Waiting => Some(true),
            Doing::Busy | Doing::Stopped => Some(false),
            Doing::Unknown => None,
        }
    }

    fn events(&mut self) -> Vec<SteerEvent> {
        std::mem::take(&mut lock(&self.core).events)
    }
}

/// Listeners by slot, then by address, as descriptors of our own.
///
/// # Errors
/// Out of descriptors.
pub fn duplicate<'a>(
    listeners: impl Iterator<Item = Vec<&'a OwnedFd>>,
) -> std::io::Result<Vec<Vec<OwnedFd>>> {
    listeners
        .map(|slot| slot.into_iter().map(OwnedFd::try_clone).collect())
        .collect()
}
