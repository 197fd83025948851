//! The agent of a steered group: observe, judge, act, publish, a few hundred times a second.
//!
//! It stands beside the path of connections, never in it. If it dies, steering goes on. The program notices its old
//! heartbeat and ignores the marks that nobody would take back.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use wakeone_kernel::table::flag;
use wakeone_kernel::{capability, process, schedule};
use wakeone_model::judge::{self, Limits, ProgressBaseline, SlotHistory, SlotSample, WorkerState};
use wakeone_model::moves::{self, Arrivals, Budget};
use wakeone_model::reads::Reads;

use crate::datagrams;
use crate::dispatcher::Dispatcher;
use crate::group::FOR_THE_END;
use crate::paths::Paths;
use crate::probe_budget::ProbeBudget;
use crate::rest::{ListenerSet, Waker};
use crate::steer::{Steer, SteerEvent};

/// The agent counts as gone when it has not looked for this long.
const HEARTBEAT_LIMIT: Duration = Duration::from_secs(1);
/// How often to look while connections are open: a quarter of `stuck_after`, within these bounds.
const BUSY_TICK: (Duration, Duration) = (Duration::from_micros(500), Duration::from_millis(5));
/// How often to look while no connection is open.
const IDLE_TICK: Duration = Duration::from_millis(10);
/// After so long without a connection the agent sleeps until one comes. It sleeps for this long at most, as its
/// heartbeat must stay fresh.
const QUIET_AFTER: Duration = Duration::from_secs(1);
const LONGEST_SLEEP: Duration = Duration::from_millis(250);
/// While nothing happens, each look at everything is followed by cheap looks for this long.
const WHOLE_EVERY: Duration = Duration::from_secs(1);
/// How long a worker must have been stuck for its return to be an event.
const NEWSWORTHY: Duration = Duration::from_secs(1);
/// How long the end of a worker may take: the longest wait for handshakes plus a move.
const LONGEST_END: Duration = Duration::from_millis(100);
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

/// A running agent.
#[derive(Debug)]
pub struct Agent {
    core: Arc<Mutex<Core>>,
    stop: Arc<AtomicBool>,
    waker: Option<Arc<Waker>>,
    thread: Option<JoinHandle<()>>,
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
        let core = Arc::new(Mutex::new(Core::new(dispatcher, config)));
        let stop = Arc::new(AtomicBool::new(false));
        let started = Waker::new().and_then(|waker| {
            let waker = Arc::new(waker);
            let (core, stop, own) = (Arc::clone(&core), Arc::clone(&stop), Arc::clone(&waker));
            let thread = std::thread::Builder::new().name("agent".into());
            Ok((waker, thread.spawn(move || watch(&core, &stop, &own))?))
        });
        let (waker, thread) = match started {
            Ok((waker, thread)) => (Some(waker), Some(thread)),
            Err(error) => {
                lock(&core).note(format!("no agent, so no rescue: {error}"));
                (None, None)
            }
        };
        Self {
            core,
            stop,
            waker,
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

    /// Returns a handle by which others may ask for a slot's queue to be moved.
    pub fn rescuer(&self) -> Rescuer {
        Rescuer {
            core: Arc::downgrade(&self.core),
            waker: self.waker.clone(),
        }
    }

    /// Returns the bytes of datagrams that wait in UDP sockets now; 0 if the sockets are of TCP.
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
    pub fn with_dispatcher<R>(&self, act: impl FnOnce(&mut Dispatcher) -> R) -> Option<R> {
        let mut core = lock(&self.core);
        let dispatcher = core.dispatcher.as_mut()?;
        let told = act(dispatcher);
        let slots = dispatcher.slots();
        core.history.resize_with(slots, SlotHistory::default);
        core.reads.resize_with(slots, Reads::default);
        core.retry_rescue_at.resize(slots, None);
        core.baselines.resize(slots, None);
        core.arrivals.resize_with(slots, Arrivals::default);
        core.avoided.resize(slots, None);
        drop(core);
        self.stir();
        Some(told)
    }

    /// Runs `act` between two looks, when no queue is being moved.
    pub fn between_looks<R>(&self, act: impl FnOnce() -> R) -> R {
        let _core = lock(&self.core);
        act()
    }

    /// Notes that the worker is gone and its listener soon will be. Returns when its queue was moved and no handshake
    /// is under way, or after [`LONGEST_END`].
    pub fn worker_gone(&mut self, slot: usize) {
        self.worker_down(slot);
        let begun = Instant::now();
        while self.thread.is_some()
            && begun.elapsed() < LONGEST_END
            && lock(&self.core).is_emptying(slot)
        {
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Connections or datagrams placed so far.
    pub fn placed(&self) -> u64 {
        lock(&self.core).dispatcher.as_ref().map_or(0, placed)
    }

    /// Returns how long after its last SYN a socket of this group may still get a connection.
    pub fn handshake_wait(&self) -> Duration {
        Duration::from_nanos(lock(&self.core).wait_ns())
    }

    fn wake(&self) {
        if let Some(waker) = &self.waker {
            waker.wake();
        }
    }

    /// Wakes the agent after a change of listeners or workers, so that it waits for the new ones.
    fn stir(&self) {
        let mut core = lock(&self.core);
        core.sleeps_on = None;
        core.busy_at = Some(Instant::now());
        drop(core);
        self.wake();
    }

    fn stop(&mut self) {
        self.stop.store(true, Release);
        if let Some(thread) = self.thread.take() {
            self.wake();
            let _ = thread.join();
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Asks an agent for a rescue. Do not use it after [`Agent::end`].
#[derive(Debug, Clone)]
pub struct Rescuer {
    core: Weak<Mutex<Core>>,
    waker: Option<Arc<Waker>>,
}

/// How many connections were moved, or why none were.
pub type Rescued = Result<u32, String>;

impl Rescuer {
    /// Has the agent's own thread move a slot's queue, as nobody interrupts that thread during a move. Returns where
    /// the result arrives.
    pub fn ask(&self, slot: usize) -> Receiver<Rescued> {
        let (answer, answered) = sync_channel(1);
        match (self.core.upgrade(), &self.waker) {
            (Some(core), Some(waker)) => {
                lock(&core).asked.push((slot, answer));
                waker.wake();
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

fn watch(core: &Mutex<Core>, stop: &AtomicBool, waker: &Waker) {
    if let Err(error) = schedule::real_time() {
        // Without it a woken worker could run before us, between a rescue's shutdown and listen. It would then see a
        // socket that does not listen. That is rare enough to go on.
        tracing::debug!("the agent runs without real-time priority: {error}");
    }
    while !stop.load(Acquire) {
        let (time, arrivals) = {
            let mut core = lock(core);
            let pause = core.tick();
            core.rest(pause)
        };
        if waker.sleep(time, arrivals.as_deref()) {
            lock(core).came();
        }
    }
}

/// A slot that the program does not choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Avoided {
    since_ns: u64,
    /// Its worker is gone, and others serve its queue.
    down: bool,
}

/// The state that the agent's thread and the supervisor's calls share. One of them works on it at a time.
#[derive(Debug, Default)]
struct Core {
    dispatcher: Option<Dispatcher>,
    config: Option<AgentConfig>,
    history: Vec<SlotHistory>,
    /// For each suspect slot: how much each slot had accepted when it became suspect.
    baselines: Vec<Option<ProgressBaseline>>,
    /// Of UDP sockets: the reads seen so far, and, in `placed`, the datagrams placed until the last look.
    reads: Vec<Reads>,
    placed: u64,
    /// When a slot marked stuck may be tried again, so that a failing rescue is not repeated all the time.
    retry_rescue_at: Vec<Option<Instant>>,
    events: Vec<SteerEvent>,
    /// Slots whose queues somebody asked to move.
    asked: Vec<(usize, SyncSender<Rescued>)>,
    /// When each slot was last given something.
    arrivals: Vec<Arrivals>,
    /// Slots that the program does not choose now, so that their queues can be moved.
    avoided: Vec<Option<Avoided>>,
    /// The time that moves may take.
    budget: Budget,
    /// Whether the log says that moves are held back.
    told_dear: bool,
    decayed_ns: u64,
    /// When everything was last looked at, and the sum of placements by then.
    whole: Option<(Instant, u64)>,
    /// When the limits of the queues were last looked at.
    limits_seen: Option<Instant>,
    /// Reports connections while the group is quiet.
    sleeps_on: Option<Arc<ListenerSet>>,
    /// When something last happened.
    busy_at: Option<Instant>,
    probes: ProbeBudget,
    started: Option<Instant>,
}

impl Core {
    fn new(dispatcher: Dispatcher, config: AgentConfig) -> Self {
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
            config: Some(config),
            history: vec![SlotHistory::default(); slots],
            baselines: vec![None; slots],
            reads: vec![Reads::default(); slots],
            placed: 0,
            retry_rescue_at: vec![None; slots],
            events: Vec::new(),
            asked: Vec::new(),
            arrivals: vec![Arrivals::default(); slots],
            avoided: vec![None; slots],
            budget: Budget::default(),
            told_dear: false,
            decayed_ns: 0,
            whole: None,
            limits_seen: None,
            sleeps_on: None,
            busy_at: Some(Instant::now()),
            probes: ProbeBudget::default(),
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

    /// Does one round. Returns how long to sleep.
    fn tick(&mut self) -> Duration {
        let (Some(dispatcher), Some(config)) = (&self.dispatcher, self.config) else {
            return IDLE_TICK;
        };
        dispatcher
            .table()
            .heartbeat_ns()
            .store(schedule::coarse_ns(), Relaxed);
        if self.is_still_idle() {
            self.note_idle();
            return IDLE_TICK;
        }
        let Some(dispatcher) = &self.dispatcher else {
            return IDLE_TICK;
        };
        let now = Instant::now();
        self.whole = Some((now, placed(dispatcher)));
        // Sockets come and go.
        self.sleeps_on = None;
        let seen = self.limits_seen;
        let refresh = seen.is_none_or(|seen| now.duration_since(seen) >= WHOLE_EVERY);
        if refresh {
            self.limits_seen = Some(now);
        }
        let (looks, busy) = if dispatcher.datagrams() {
            let looks: Vec<SlotSample> = (0..dispatcher.slots())
                .zip(&mut self.reads)
                .map(|(slot, reads)| datagrams::observe(dispatcher, slot, reads))
                .collect();
            let placed = placed(dispatcher);
            let came = std::mem::replace(&mut self.placed, placed) != placed;
            let busy = came || looks.iter().any(|look| look.queued > 0);
            (looks, busy)
        } else {
            let looks: Vec<SlotSample> = (0..dispatcher.slots())
                .map(|slot| observe(dispatcher, slot, refresh))
                .collect();
            let busy = looks.iter().any(|look| look.active > 0 || look.queued > 0);
            (looks, busy)
        };
        self.see_arrivals();
        self.reopen();
        self.probes.begin();
        self.judge(&looks, config);
        self.probes.end();
        self.empty_abandoned(&looks);
        self.answer_asked(&looks, config);
        let pause = if busy {
            (config.stuck_after / 4).clamp(BUSY_TICK.0, BUSY_TICK.1)
        } else {
            IDLE_TICK
        };
        self.until_quiet(&looks)
            .map_or(pause, |until| until.min(pause))
    }

    /// Returns how to sleep after a round: for `pause`, or, if nothing came for a while, until something does.
    fn rest(&mut self, pause: Duration) -> (Duration, Option<Arc<ListenerSet>>) {
        let now = Instant::now();
        if !self.is_still_idle() {
            self.busy_at = Some(now);
        }
        let quiet = self
            .busy_at
            .is_some_and(|at| now.duration_since(at) >= QUIET_AFTER);
        if !quiet {
            self.sleeps_on = None;
            return (pause, None);
        }
        if self.sleeps_on.is_none() {
            let dispatcher = self.dispatcher.as_ref();
            let arrivals = dispatcher.map(ListenerSet::of);
            match arrivals.transpose() {
                Ok(arrivals) => self.sleeps_on = arrivals.map(Arc::new),
                Err(error) => {
                    tracing::debug!("the agent looks again and again: {error}");
                    self.busy_at = Some(now);
                }
            }
        }
        match &self.sleeps_on {
            Some(arrivals) => (LONGEST_SLEEP, Some(Arc::clone(arrivals))),
            None => (pause, None),
        }
    }

    /// Notes that a connection came to a group that was quiet. Nothing had waited before.
    fn came(&mut self) {
        self.note_idle();
        self.busy_at = Some(Instant::now());
        self.sleeps_on = None;
        self.whole = None;
    }

    /// Whether nothing happened since the last look at everything: no connection came, is open or waits, and nothing is
    /// under way. Counters in shared memory tell this without a system call.
    fn is_still_idle(&self) -> bool {
        let (Some(dispatcher), Some((when, before))) = (&self.dispatcher, self.whole) else {
            return false;
        };
        let is_idle = |slot: usize| {
            let place = dispatcher.table().slot(slot);
            place.active().load(Relaxed) <= 0
                && place.queued().load(Relaxed) == 0
                && !place.has(flag::MOVING)
        };
        dispatcher.counting()
            && !dispatcher.datagrams()
            && when.elapsed() < WHOLE_EVERY
            && self.asked.is_empty()
            && self.avoided.iter().all(Option::is_none)
            && self.history.iter().all(|one| one.stuck_since_ns.is_none())
            && placed(dispatcher) == before
            && (0..dispatcher.slots()).all(is_idle)
    }

    /// Notes that no connection waits, as a look at empty queues would.
    fn note_idle(&mut self) {
        let now = self.now_ns();
        for history in &mut self.history {
            history.nothing_waits(now);
        }
    }

    /// Notes placements since the last look, and how long handshakes take now.
    fn see_arrivals(&mut self) {
        let now = self.now_ns();
        let Some(dispatcher) = &self.dispatcher else {
            return;
        };
        for (slot, arrivals) in self.arrivals.iter_mut().enumerate() {
            let selected = dispatcher.table().slot(slot).selected().load(Relaxed);
            arrivals.see(now, selected);
        }
        if now - self.decayed_ns >= DECAY_EVERY_NS {
            self.decayed_ns = now;
            let longest = dispatcher.table().handshake_us();
            longest.store(moves::decayed(longest.load(Relaxed)), Relaxed);
        }
    }

    /// Makes listeners listen again that a move left closed.
    fn reopen(&mut self) {
        for slot in 0..self.retry_rescue_at.len() {
            let Some(dispatcher) = &self.dispatcher else {
                return;
            };
            let place = dispatcher.table().slot(slot);
            if !place.has(flag::MOVING) || !self.may_try(slot) {
                continue;
            }
            if let Err(error) = dispatcher.reopen(slot) {
                self.retry_rescue_at[slot] = Some(Instant::now() + Duration::from_secs(1));
                self.note(format!("slot {slot} gets no connections: {error}"));
            }
        }
    }

    /// Returns how long to wait for handshakes.
    fn wait_ns(&self) -> u64 {
        let counting = self.dispatcher.as_ref().filter(|one| one.counting());
        let longest = counting.map(|one| one.table().handshake_us().load(Relaxed));
        moves::wait_ns(longest.map(|us| u64::from(us) * 1_000))
    }

    /// Notes that the program does not choose a slot from now on.
    fn avoid(&mut self, slot: usize, down: bool) {
        let since_ns = self.now_ns();
        let avoided = self.avoided[slot].get_or_insert(Avoided { since_ns, down });
        avoided.down = down;
    }

    /// Returns when no handshake will be under way in a slot any more; `None`: new ones begin.
    fn quiet_ns(&self, slot: usize) -> Option<u64> {
        let avoided = self.avoided[slot]?;
        Some(self.arrivals[slot].quiet_ns(avoided.since_ns, self.wait_ns()))
    }

    fn is_quiet(&self, slot: usize) -> bool {
        self.quiet_ns(slot)
            .is_some_and(|quiet| quiet <= self.now_ns())
    }

    /// Returns how long until the first slot with a queue to move has no handshake under way.
    fn until_quiet(&self, looks: &[SlotSample]) -> Option<Duration> {
        let now = self.now_ns();
        let waiting = (0..looks.len()).filter(|slot| looks[*slot].queued > 0);
        let first = waiting
            .filter_map(|slot| self.quiet_ns(slot))
            .filter(|quiet| *quiet > now)
            .min();
        first.map(|quiet| Duration::from_nanos(quiet - now))
    }

    /// Moves the queues of slots whose worker is gone and that others can serve.
    fn empty_abandoned(&mut self, looks: &[SlotSample]) {
        for (slot, look) in looks.iter().enumerate() {
            if look.queued > 0 && self.is_emptying(slot) && self.is_quiet(slot) {
                self.move_queue(slot);
            }
        }
    }

    /// Whether the queue of a slot without a worker still has to be moved.
    fn is_emptying(&self, slot: usize) -> bool {
        let down = self.avoided[slot].is_some_and(|avoided| avoided.down);
        let waiting = || {
            let dispatcher = self.dispatcher.as_ref();
            dispatcher.is_some_and(|one| !one.datagrams() && one.queue(slot).length > 0)
        };
        down && self.may_try(slot)
            && self.another_serves(slot)
            && (!self.is_quiet(slot) || waiting())
    }

    /// Whether a slot's last move did not fail just now.
    fn may_try(&self, slot: usize) -> bool {
        self.retry_rescue_at[slot].is_none_or(|until| Instant::now() >= until)
    }

    fn now_ns(&self) -> u64 {
        self.started
            .map_or(0, |started| started.elapsed().as_nanos() as u64)
            + 1
    }

    fn judge(&mut self, looks: &[SlotSample], config: AgentConfig) {
        let now = self.now_ns();
        let limits = Limits {
            stuck_after_ns: config.stuck_after.as_nanos() as u64,
        };
        for slot in 0..looks.len() {
            self.see_read(slot, &looks[slot], now);
            let suspect = judge::suspect(now, &looks[slot], &mut self.history[slot], limits);
            if !suspect {
                self.baselines[slot] = None;
            }
            if let Some(since) = self.history[slot].stuck_since_ns {
                self.look_after(slot, looks, now, since, config);
            } else if suspect
                && judge::stuck(self.another_sooner(slot, looks, now, limits), || {
                    self.doing(slot)
                })
            {
                self.history[slot].stuck_since_ns = Some(now);
                self.mark(slot, flag::STUCK, true);
                self.avoid(slot, false);
                let datagrams = self.dispatcher.as_ref().is_some_and(Dispatcher::datagrams);
                self.event(SteerEvent::Stuck {
                    slot,
                    queued: looks[slot].queued,
                    unit: if datagrams { "bytes" } else { "connections" },
                });
            }
        }
    }

    /// Takes the stuck mark off a UDP socket that is read now and then: a read is a sign of life by itself.
    fn see_read(&mut self, slot: usize, look: &SlotSample, now: u64) {
        let Some(since) = self.history[slot].stuck_since_ns else {
            return;
        };
        let datagrams = self.dispatcher.as_ref().is_some_and(Dispatcher::datagrams);
        if datagrams && judge::recovered(look, &self.history[slot], WorkerState::Unknown) {
            self.resume(slot, now, since);
        }
    }

    /// Takes a slot's mark away.
    fn resume(&mut self, slot: usize, now: u64, since: u64) {
        self.history[slot].stuck_since_ns = None;
        self.avoided[slot] = None;
        self.mark(slot, flag::STUCK, false);
        let stuck_ns = now.saturating_sub(since);
        if let Some(dispatcher) = &self.dispatcher {
            let place = dispatcher.table().slot(slot);
            place.stuck_ns().fetch_add(stuck_ns, Relaxed);
        }
        // The end of a long request is no news. The return of a worker is, if it was away long enough for a person to
        // notice.
        if stuck_ns >= NEWSWORTHY.as_nanos() as u64 {
            let after_ms = stuck_ns / 1_000_000;
            self.event(SteerEvent::Resumed { slot, after_ms });
        }
    }

    /// Looks after a slot that is marked stuck: it is well again, or it is time to move its queue. That time comes when
    /// the handshakes under way have ended, and again if one came late.
    fn look_after(
        &mut self,
        slot: usize,
        looks: &[SlotSample],
        now: u64,
        since: u64,
        config: AgentConfig,
    ) {
        let may_move = self.may_move(slot, looks, config);
        let doing = if may_move {
            self.doing_now(slot)
        } else {
            self.doing(slot)
        };
        if judge::recovered(&looks[slot], &self.history[slot], doing) {
            self.resume(slot, now, since);
        } else if may_move && matches!(doing, WorkerState::Busy | WorkerState::Stopped) {
            self.move_queue(slot);
        }
    }

    /// Whether a stuck slot's queue can be moved now, if rescue is wanted.
    fn may_move(&mut self, slot: usize, looks: &[SlotSample], config: AgentConfig) -> bool {
        let datagrams = self.dispatcher.as_ref().is_none_or(Dispatcher::datagrams);
        if !config.rescue || datagrams || looks[slot].queued == 0 {
            return false;
        }
        if !self.may_try(slot) || !self.is_quiet(slot) {
            return false;
        }
        let others = self.rooms(slot, looks);
        !others.is_empty()
            && judge::fits(looks[slot].queued, others.into_iter())
            && self.can_afford()
    }

    /// Whether moves have taken no more than their share of the time.
    fn can_afford(&mut self) -> bool {
        if self.budget.allows(self.now_ns()) {
            return true;
        }
        if !std::mem::replace(&mut self.told_dear, true) {
            self.note("queues of stuck workers are moved less often: each move walks over all connections of the port, those in TIME_WAIT included, and moves may take 1 % of the time".into());
        }
        false
    }

    /// Returns the room in the queues that a slot's connections could be moved to.
    fn rooms(&self, slot: usize, looks: &[SlotSample]) -> Vec<u32> {
        let others = looks.iter().enumerate().filter(|(other, look)| {
            *other != slot && look.serving && self.history[*other].stuck_since_ns.is_none()
        });
        others.map(|(_, look)| look.room).collect()
    }

    /// Moves the queues that somebody asked for, each after its handshakes under way have ended.
    fn answer_asked(&mut self, looks: &[SlotSample], config: AgentConfig) {
        for (slot, answer) in std::mem::take(&mut self.asked) {
            let moved = match self.may_rescue(slot, looks, config) {
                Ok(()) if looks[slot].queued == 0 => Ok(0),
                Ok(()) if self.is_held(slot) => self.try_move(slot).map_err(|e| e.to_string()),
                Ok(()) => {
                    // The program must not choose the slot meanwhile.
                    self.mark(slot, flag::STUCK, true);
                    self.avoid(slot, false);
                    self.asked.push((slot, answer));
                    continue;
                }
                Err(why) => Err(why),
            };
            self.release(slot);
            let _ = answer.try_send(
                moved.map_err(|why| format!("cannot move the queue of slot {slot}: {why}")),
            );
        }
    }

    /// Whether a slot is marked, and no handshake is under way there.
    fn is_held(&self, slot: usize) -> bool {
        let dispatcher = self.dispatcher.as_ref();
        dispatcher.is_some_and(|one| one.table().slot(slot).has(flag::STUCK)) && self.is_quiet(slot)
    }

    /// Undoes the preparation of a rescue that somebody asked for.
    fn release(&mut self, slot: usize) {
        let Some(avoided) = self.avoided.get(slot).copied().flatten() else {
            return;
        };
        if self.history[slot].stuck_since_ns.is_none() {
            self.mark(slot, flag::STUCK, false);
            self.avoided[slot] = Some(avoided).filter(|avoided| avoided.down);
        }
    }

    /// Whether a person may have a slot's queue moved although its worker does not seem stuck.
    fn may_rescue(
        &self,
        slot: usize,
        looks: &[SlotSample],
        config: AgentConfig,
    ) -> Result<(), String> {
        let no = |why: &str| Err(why.to_owned());
        let Some(dispatcher) = &self.dispatcher else {
            return no("its agent has ended");
        };
        if dispatcher.datagrams() {
            return no("what waits in UDP sockets cannot be moved");
        }
        if !config.rescue {
            return no("rescue is off for this group; start or attach it with --rescue");
        }
        let Some(look) = looks.get(slot) else {
            return no("there is no such slot");
        };
        let others = self.rooms(slot, looks);
        if others.is_empty() {
            return no("no other slot has a live listener, and the kernel would reset what waits");
        }
        if !judge::fits(look.queued, others.into_iter()) {
            return no("the queues of the others have no room for it");
        }
        // Between shutdown and listen an accept fails, and a worker that does not expect this may end.
        let nobody = dispatcher.table().slot(slot).pid().load(Relaxed) == 0;
        match doing(dispatcher, slot) {
            _ if look.queued == 0 => Ok(()),
            WorkerState::Busy | WorkerState::Stopped => Ok(()),
            WorkerState::Waiting => {
                no("its worker waits for connections there, and serves it itself")
            }
            WorkerState::Unknown | WorkerState::Gone if nobody && dispatcher.holds(slot) => Ok(()),
            WorkerState::Unknown | WorkerState::Gone => {
                no("what its worker does cannot be seen, and it must not be waiting there")
            }
        }
    }

    /// Moves the queue of a slot that the program does not choose now.
    fn move_queue(&mut self, slot: usize) {
        if let Err(error) = self.try_move(slot) {
            self.retry_rescue_at[slot] = Some(Instant::now() + Duration::from_secs(1));
            self.note(format!("slot {slot} is not rescued for a second: {error}"));
        }
    }

    /// Moves it, and counts and reports the connections moved.
    fn try_move(&mut self, slot: usize) -> Result<u32, wakeone_kernel::bpf::Error> {
        let Some(dispatcher) = &self.dispatcher else {
            return Ok(0);
        };
        let before = Instant::now();
        let moved = dispatcher.move_queues(slot);
        let took = before.elapsed();
        self.budget.spend(took.as_nanos() as u64);
        let moved = moved?;
        if moved > 0 {
            let took_us = took.as_micros() as u64;
            let place = dispatcher.table().slot(slot);
            place.rescues().fetch_add(1, Relaxed);
            place.rescued().fetch_add(moved.into(), Relaxed);
            let look = observe(dispatcher, slot, false);
            self.history[slot].moved(&look);
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

    /// Returns the state of a worker, if this round's budget allows to look.
    fn doing(&self, slot: usize) -> WorkerState {
        let Some(dispatcher) = &self.dispatcher else {
            return WorkerState::Unknown;
        };
        self.probes.ask(slot, || doing(dispatcher, slot))
    }

    /// The same for a slot whose queue is about to be moved.
    fn doing_now(&self, slot: usize) -> WorkerState {
        let Some(dispatcher) = &self.dispatcher else {
            return WorkerState::Unknown;
        };
        self.probes.insist(slot, || doing(dispatcher, slot))
    }

    /// Whether another worker would serve this slot's queue sooner.
    fn another_sooner(
        &mut self,
        slot: usize,
        looks: &[SlotSample],
        now: u64,
        limits: Limits,
    ) -> bool {
        let history = &self.history;
        let others = || {
            let all = looks.iter().enumerate();
            all.filter(|(other, _)| *other != slot && history[*other].stuck_since_ns.is_none())
        };
        others().any(|(other, look)| judge::idle(look, || self.doing(other)))
            || self.baselines[slot]
                .as_ref()
                .is_some_and(|baseline| baseline.overtaken(now, others(), limits))
            || {
                self.baselines[slot].get_or_insert_with(|| ProgressBaseline::start(now, looks));
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

/// Connections or datagrams placed so far.
fn placed(dispatcher: &Dispatcher) -> u64 {
    (0..dispatcher.slots())
        .map(|slot| dispatcher.table().slot(slot).selected().load(Relaxed))
        .sum()
}

fn doing(dispatcher: &Dispatcher, slot: usize) -> WorkerState {
    if dispatcher.datagrams() {
        return datagrams::doing(dispatcher, slot);
    }
    match dispatcher.table().slot(slot).pid().load(Relaxed) {
        0 => WorkerState::Unknown,
        pid => process::doing_below(pid, &dispatcher.inodes(slot)),
    }
}

/// Whether a worker runs in the slot and may be given connections or datagrams.
fn serving(dispatcher: &Dispatcher, slot: usize) -> bool {
    let place = dispatcher.table().slot(slot);
    place.has(flag::UP) && !place.has(flag::DRAINING) && place.pid().load(Relaxed) != 0
}

/// Looks at a slot, and publishes its queue's length. `refresh`: read its limit again, as servers may call listen()
/// anew with another backlog.
fn observe(dispatcher: &Dispatcher, slot: usize, refresh: bool) -> SlotSample {
    let place = dispatcher.table().slot(slot);
    let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Relaxed);
    let (established, arrived, left) = (
        load(place.established()),
        load(place.migrated_in()),
        load(place.migrated_out()),
    );
    let active = u64::try_from(place.active().load(Relaxed)).unwrap_or(0);
    // No connection is open that could wait: the queue was empty and still is. This spares the system call.
    let queue = if !refresh
        && dispatcher.counting()
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
    SlotSample {
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
        core.history[slot] = SlotHistory::default();
        core.avoided[slot] = None;
        let Some(dispatcher) = &core.dispatcher else {
            return;
        };
        let place = dispatcher.table().slot(slot);
        place.mark(flag::STUCK, false);
        place.pid().store(pid, Relaxed);
        // A worker that was told to end may have shut its listener down. Put it back into the array in any case.
        let restored = dispatcher.restore(slot);
        // Marked last: a slot that is up and has no socket would be chosen in vain.
        if restored.is_ok() {
            place.mark(flag::UP, true);
        }
        if let Err(error) = restored {
            core.note(format!(
                "slot {slot} gets connections only from the kernel's choice: {error}"
            ));
        }
        drop(core);
        self.stir();
    }

    fn worker_down(&mut self, slot: usize) {
        let mut core = lock(&self.core);
        core.history[slot] = SlotHistory::default();
        core.avoided[slot] = None;
        let another = core.another_serves(slot);
        let Some(dispatcher) = &core.dispatcher else {
            return;
        };
        let place = dispatcher.table().slot(slot);
        place.pid().store(0, Relaxed);
        place.mark(flag::STUCK, false);
        place.restarts().fetch_add(1, Relaxed);
        if another {
            // Others serve and this slot has no worker: have them chosen, and give them its queue.
            place.mark(flag::UP, false);
            core.avoid(slot, true);
            if self.thread.is_none() {
                core.move_queue(slot);
            }
            drop(core);
            self.wake();
        }
        // If this was the last worker, its queue waits for its successor, and so do new connections.
    }

    fn drain(&mut self, slot: usize, on: bool) {
        lock(&self.core).mark(slot, flag::DRAINING, on);
    }

    fn refuse(&mut self) {
        if let Some(dispatcher) = &lock(&self.core).dispatcher {
            dispatcher.refuse();
        }
    }

    fn can_replace(&self) -> bool {
        let core = lock(&self.core);
        core.dispatcher.as_ref().is_some_and(|one| !one.datagrams())
    }

    fn replace(&mut self, slot: usize, pid: u32, listeners: &[OwnedFd]) -> Result<(), String> {
        let mut core = lock(&self.core);
        let Some(dispatcher) = &mut core.dispatcher else {
            return Err("its agent has ended".to_owned());
        };
        let replaced = duplicate(std::iter::once(listeners.iter().collect()))
            .map_err(|error| error.to_string())
            .and_then(|mut copies| {
                let copies = copies.pop().unwrap_or_default();
                dispatcher
                    .replace(slot, copies)
                    .map_err(|error| error.to_string())
            });
        replaced?;
        let place = dispatcher.table().slot(slot);
        place.pid().store(pid, Relaxed);
        place.restarts().fetch_add(1, Relaxed);
        for (flag, on) in [
            (flag::STUCK, false),
            (flag::DRAINING, false),
            (flag::UP, true),
        ] {
            place.mark(flag, on);
        }
        core.history[slot] = SlotHistory::default();
        core.baselines[slot] = None;
        core.avoided[slot] = None;
        drop(core);
        // A group at rest waits on its old listeners.
        self.stir();
        Ok(())
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
            .map_or(WorkerState::Unknown, |one| doing(one, slot))
        {
            WorkerState::Waiting => Some(true),
            WorkerState::Busy | WorkerState::Stopped => Some(false),
            WorkerState::Unknown | WorkerState::Gone => None,
        }
    }

    fn events(&mut self) -> Vec<SteerEvent> {
        std::mem::take(&mut lock(&self.core).events)
    }
}

/// Duplicates listeners, by slot, then by address, as descriptors of our own.
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
