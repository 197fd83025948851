//! The state of an agent, and one round of it: sample all slots, judge them, act, and decide how long to sleep.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use wakeone_bpf::table::flag;
use wakeone_kernel::proc::doing::Looks;
use wakeone_kernel::schedule;
use wakeone_model::judge::{LOOKS_A_PATIENCE, SlotSample, WorkerState};
use wakeone_model::moves::{self, Budget};

use super::heavy_flows::HeavyFlows;
use super::probe_budget::ProbeBudget;
use super::rest::{ListenerSet, Waiting};
use super::runs::Runs;
use super::slot::{Avoided, SlotState};
use super::transport::{Told, Transport, arrivals, serving, transport_of};
use crate::dispatcher::Dispatcher;
use wakeone_control::steer::SteerEvent;

/// The agent counts as gone when it has not looked for this long.
const HEARTBEAT_LIMIT: Duration = Duration::from_secs(1);
/// How often to look while connections are open: a quarter of `stuck_after`, within these bounds.
const BUSY_TICK: (Duration, Duration) = (Duration::from_micros(500), Duration::from_millis(5));
/// How often to look while no connection is open.
const IDLE_TICK: Duration = Duration::from_millis(10);
/// After so long without a connection the agent sleeps until one comes. It sleeps for this long at most, as its
/// heartbeat must stay fresh.
const QUIET_AFTER: Duration = Duration::from_secs(1);
const LONGEST_SLEEP: Duration = Duration::from_millis(450);
/// The listeners of a group are watched together once none has changed for so long.
const SETTLED_AFTER: Duration = Duration::from_millis(500);
/// While nothing happens, each look at everything is followed by cheap looks for this long; the second value if nothing has happened
/// for ten times the first.
const WHOLE_EVERY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));
/// How often to read the limits of queues where nothing waits: a server seldom calls listen() anew with another backlog. For sockets
/// of another process each read is four system calls and two switches to the helper that borrows them.
const LIMITS_EVERY: Duration = Duration::from_secs(10);
/// How often the longest recent handshake is lowered.
const DECAY_EVERY_NS: u64 = 1_000_000_000;
/// Events kept for a supervisor that does not ask.
const MOST_EVENTS: usize = 10_000;

/// The tasks of an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AgentConfig {
    /// Move the queues of stuck workers.
    pub rescue: bool,
    /// How long connections may wait without one being accepted, while another worker is idle.
    pub stuck_after: Duration,
}

/// The result of a look at a group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Look {
    /// When to look again.
    pub pause: Duration,
    /// Nothing waits, and nothing is under way: a later look is as good.
    pub calm: bool,
}

impl Look {
    fn calm(pause: Duration) -> Self {
        Self { pause, calm: true }
    }
}

/// How many connections were moved, or why none were.
pub type Rescued = Result<u32, String>;

/// The state that the agent's thread and the supervisor's calls share. One of them works on it at a time.
#[derive(Debug)]
pub(super) struct Core {
    pub dispatcher: Dispatcher,
    pub transport: &'static dyn Transport,
    pub config: AgentConfig,
    pub slots: Vec<SlotState>,
    pub events: Vec<SteerEvent>,
    /// Slots whose queues somebody asked to move.
    pub requests: Vec<(usize, SyncSender<Rescued>)>,
    /// The time that moves may take.
    pub budget: Budget,
    /// Whether the log says that moves are held back.
    pub told_dear: bool,
    /// Whether the log says that a listener would not listen again after a move.
    pub told_closed: bool,
    /// Whether it says that there was no room to note moved connections.
    pub told_moved_full: bool,
    pub probes: ProbeBudget,
    pub runs: Runs,
    pub heavy: HeavyFlows,
    decayed_ns: u64,
    /// When everything was last looked at, and the sum of placements by then.
    whole: Option<(Instant, u64)>,
    /// When the limits of the queues were last looked at.
    limits_seen: Option<Instant>,
    /// Tells where connections wait, and reports the first one while the group is quiet.
    listeners: Option<Arc<ListenerSet>>,
    /// When listeners or workers last changed, or the listeners could not be had.
    stirred_at: Instant,
    /// When something last happened.
    busy_at: Instant,
    started: Instant,
}

pub(super) fn lock(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    core.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Core {
    pub fn new(dispatcher: Dispatcher, config: AgentConfig) -> Self {
        let table = dispatcher.table();
        table
            .heartbeat_limit_ns()
            .store(HEARTBEAT_LIMIT.as_nanos() as u64, Relaxed);
        table.heartbeat_ns().store(schedule::coarse_ns(), Relaxed);
        for slot in 0..dispatcher.slots() {
            table.slot(slot).mark(flag::STUCK, false);
        }
        let now = Instant::now();
        let mut core = Self {
            transport: transport_of(dispatcher.protocol()),
            dispatcher,
            config,
            slots: Vec::new(),
            events: Vec::new(),
            requests: Vec::new(),
            budget: Budget::default(),
            told_dear: false,
            told_closed: false,
            told_moved_full: false,
            probes: ProbeBudget::default(),
            runs: Runs::default(),
            heavy: HeavyFlows::default(),
            decayed_ns: 0,
            whole: None,
            limits_seen: None,
            listeners: None,
            stirred_at: now,
            busy_at: now,
            started: now,
        };
        core.fit_slots();
        core
    }

    /// Has a state for each slot of the dispatcher, which may have got more.
    pub fn fit_slots(&mut self) {
        let slots = self.dispatcher.slots();
        self.slots.resize_with(slots, SlotState::default);
    }

    pub fn note(&mut self, text: String) {
        self.event(SteerEvent::Note(text));
    }

    pub fn event(&mut self, event: SteerEvent) {
        if self.events.len() < MOST_EVENTS {
            self.events.push(event);
        }
    }

    pub fn mark(&self, slot: usize, flag: u32, on: bool) {
        self.dispatcher.table().slot(slot).mark(flag, on);
    }

    pub fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64 + 1
    }

    /// Connections or datagrams placed so far.
    pub fn placed(&self) -> u64 {
        (0..self.dispatcher.slots())
            .map(|slot| self.dispatcher.table().slot(slot).selected().load(Relaxed))
            .sum()
    }

    /// Returns the state of a worker.
    pub fn worker_state(&self, slot: usize) -> WorkerState {
        self.state_by(&Looks::default(), slot)
    }

    /// The same by what was read in this round, if its budget allows to look.
    pub fn probe(&self, slot: usize) -> WorkerState {
        let look = |looks: &Looks| self.state_by(looks, slot);
        self.probes.ask(slot, look)
    }

    fn state_by(&self, looks: &Looks, slot: usize) -> WorkerState {
        let state = &self.slots[slot];
        let mut acceptors = state.acceptors.borrow_mut();
        let (dispatcher, others) = (&self.dispatcher, &state.others);
        self.transport
            .worker_state(dispatcher, slot, others, &mut acceptors, looks)
    }

    /// Whether a slot other than this one can be given connections.
    pub fn another_serves(&self, slot: usize) -> bool {
        (0..self.dispatcher.slots()).any(|other| other != slot && serving(&self.dispatcher, other))
    }

    /// Has slots without a worker not chosen, and their queues moved, as soon as others serve. The queue of the
    /// last worker waits for its successor.
    pub fn take_down_bereft(&mut self) {
        for slot in 0..self.slots.len() {
            let is_up = self.dispatcher.table().slot(slot).has(flag::UP);
            if self.slots[slot].bereft && is_up && self.another_serves(slot) {
                self.mark(slot, flag::UP, false);
                let now = self.now_ns();
                self.slots[slot].avoid(now, true);
            }
        }
    }

    /// Returns how long to wait for handshakes.
    pub fn wait_ns(&self) -> u64 {
        let counting = self.dispatcher.counting();
        let longest = counting.then(|| self.dispatcher.table().handshake_us().load(Relaxed));
        moves::wait_ns(longest.map(|us| u64::from(us) * 1_000))
    }

    /// Has the agent wait for the listeners and workers of now.
    pub fn stir(&mut self) {
        self.listeners = None;
        self.stirred_at = Instant::now();
        self.busy_at = self.stirred_at;
    }

    /// Does one round. Returns when the next is due.
    pub fn tick(&mut self) -> Look {
        self.dispatcher
            .table()
            .heartbeat_ns()
            .store(schedule::coarse_ns(), Relaxed);
        if self.is_still_idle() {
            self.note_idle();
            return Look::calm(IDLE_TICK);
        }
        let (samples, busy) = self.sample_all();
        self.see_arrivals();
        self.dispatcher.settle_emptied();
        self.reopen();
        self.infer_chooser();
        if self.dispatcher.is_replaced() {
            self.stand_aside(&samples);
            return Look::calm(IDLE_TICK);
        }
        self.probes
            .begin(samples.iter().map(|sample| sample.accepted));
        self.judge(&samples);
        self.watch_flows(&samples);
        self.probes.end();
        self.empty_abandoned(&samples);
        self.answer_requests(&samples);
        let pause = if busy {
            (self.config.stuck_after / LOOKS_A_PATIENCE).clamp(BUSY_TICK.0, BUSY_TICK.1)
        } else {
            IDLE_TICK
        };
        let until_quiet = self.until_quiet(&samples);
        Look {
            pause: until_quiet.map_or(pause, |until| until.min(pause)),
            calm: until_quiet.is_none()
                && samples.iter().all(|sample| sample.queued == 0)
                && (0..self.slots.len()).all(|slot| self.is_settled(slot)),
        }
    }

    /// Samples all slots. Also returns whether there is work.
    fn sample_all(&mut self) -> (Vec<SlotSample>, bool) {
        let now = Instant::now();
        let placed = self.placed();
        let before = self.whole.replace((now, placed));
        let waiting = self.waiting(now);
        let seen = self.limits_seen;
        let refresh = seen.is_none_or(|seen| now.duration_since(seen) >= LIMITS_EVERY);
        if refresh {
            self.limits_seen = Some(now);
            self.tell_moved_full();
        }
        let sample = |(slot, state): (usize, &mut SlotState)| {
            let waits = waiting.map(|waiting| waiting.has(slot));
            let told = Told { waits, refresh };
            self.transport.sample(&self.dispatcher, slot, state, told)
        };
        let samples: Vec<SlotSample> = self.slots.iter_mut().enumerate().map(sample).collect();
        let came = before.map_or(0, |(_, placed)| placed) != placed;
        if came {
            self.busy_at = now;
        }
        let busy = self.transport.is_busy(&samples, came);
        (samples, busy)
    }

    /// Returns how to sleep after a round: for `pause`, or, if nothing came for a while, until something does.
    pub fn rest(&mut self, pause: Duration) -> (Duration, Option<Arc<ListenerSet>>) {
        let now = Instant::now();
        if !self.is_still_idle() {
            self.busy_at = now;
        }
        if now.duration_since(self.busy_at) < QUIET_AFTER {
            return (pause, None);
        }
        match self.listeners(now) {
            Some(arrivals) => (LONGEST_SLEEP, Some(Arc::clone(arrivals))),
            None => (pause, None),
        }
    }

    /// The set of all listeners, unless they are new: servers open and close some one after the other.
    fn listeners(&mut self, now: Instant) -> Option<&Arc<ListenerSet>> {
        if self.listeners.is_none() && now.duration_since(self.stirred_at) >= SETTLED_AFTER {
            match ListenerSet::of(&self.dispatcher) {
                Ok(all) => self.listeners = Some(Arc::new(all)),
                Err(error) => {
                    tracing::debug!("the agent reads each queue: {error}");
                    self.stirred_at = now;
                }
            }
        }
        self.listeners.as_ref()
    }

    /// The slots where something waits, where one system call tells it. Else each queue is read after something came.
    fn waiting(&mut self, now: Instant) -> Option<Waiting> {
        match self.transport.may_watch() {
            true => self.listeners(now)?.waiting(),
            false => None,
        }
    }

    /// Notes that a connection came to a group that was quiet. Nothing had waited before.
    pub fn came(&mut self) {
        self.note_idle();
        self.busy_at = Instant::now();
        self.whole = None;
    }

    /// Whether nothing happened since the last look at everything: no connection came or waits, and nothing is under way.
    /// If connections are open, none came for a while either. Counters in shared memory tell this without a system call.
    fn is_still_idle(&self) -> bool {
        let Some((when, before)) = self.whole else {
            return false;
        };
        let whole_every = match self.busy_at.elapsed() < 10 * WHOLE_EVERY.0 {
            true => WHOLE_EVERY.0,
            false => WHOLE_EVERY.1,
        };
        let is_idle = |slot: usize| {
            let place = self.dispatcher.table().slot(slot);
            let lull = &self.slots[slot].lull;
            let none_came = || lull.lasts(arrivals(&self.dispatcher, slot));
            (place.active().load(Relaxed) <= 0 || none_came())
                && place.queued().load(Relaxed) == 0
                && !place.has(flag::MOVING)
        };
        self.transport.is_counted(&self.dispatcher)
            && when.elapsed() < whole_every
            && self.requests.is_empty()
            && (0..self.slots.len()).all(|slot| self.is_settled(slot))
            && self.placed() == before
            && (0..self.slots.len()).all(is_idle)
    }

    /// Whether nothing is under way in a slot. One that lost its worker gets nothing any more.
    fn is_settled(&self, slot: usize) -> bool {
        let state = &self.slots[slot];
        let is_over = |avoided: Avoided| avoided.down && self.is_quiet(slot);
        !state.is_stuck() && state.avoided.is_none_or(is_over)
    }

    /// Notes that no connection waits, as a look at empty queues would.
    fn note_idle(&mut self) {
        let now = self.now_ns();
        for state in &mut self.slots {
            state.history.nothing_waits(now);
        }
    }

    /// Notes placements since the last look, and how long handshakes take now.
    fn see_arrivals(&mut self) {
        let now = self.now_ns();
        let table = self.dispatcher.table();
        for (slot, state) in self.slots.iter_mut().enumerate() {
            let selected = table.slot(slot).selected().load(Relaxed);
            state.arrivals.see(now, selected);
        }
        if now - self.decayed_ns >= DECAY_EVERY_NS {
            self.decayed_ns = now;
            let longest = table.handshake_us();
            longest.store(moves::decayed(longest.load(Relaxed)), Relaxed);
        }
    }
}
