//! The events: a request comes, a request is finished, and rarer ones.

use std::collections::{BinaryHeap, VecDeque};

use rand::RngExt;
use rand_xoshiro::Xoshiro256PlusPlus;
use wakeone_model::arming::Change;

use crate::arrivals::{Arrivals, Gaps};
use crate::error::Error;
use crate::faults::{Draws, Stop};
use crate::front::Front;
use crate::happening::{Happening, Rare};
use crate::kept::{Kept, Taken};
use crate::load::{Load, Next};
use crate::outcome::{Counts, Outcome, Tally};
use crate::random::stream;
use crate::servers::{Kind, Servers};
use crate::service::Works;
use crate::setup::Setup;
use crate::syn;
use crate::trace::{Span, Trace, What};
use crate::workers::{Waiting, Worker};

/// Simulates a load until its last request has ended. The first tenth of the requests is not measured, because the
/// queues fill; all are where the work of each is given ([`Service::Recorded`](crate::Service::Recorded)).
///
/// # Errors
/// When the load or the setup cannot be simulated.
pub fn run(setup: &Setup, load: &Load) -> Result<Outcome, Error> {
    Ok(Engine::new(setup, load, None)?.finish_all().0)
}

/// Simulates the same and records the events of a part of length `length_s`, from the first measured request on.
///
/// # Errors
/// When the load or the setup cannot be simulated.
pub fn run_traced(setup: &Setup, load: &Load, length_s: f64) -> Result<(Outcome, Trace), Error> {
    let trace = Trace::of(length_s);
    let (outcome, trace) = Engine::new(setup, load, Some(trace))?.finish_all();
    Ok((outcome, trace.unwrap_or_else(|| Trace::of(length_s))))
}

struct Engine<'a> {
    setup: &'a Setup,
    servers: Servers,
    workers: Vec<Worker>,
    front: Front,
    gaps: Gaps,
    works: Works,
    /// Requests yet to come, and when the next one does.
    to_come: u64,
    next_arrival: f64,
    /// The clients of a closed loop whose next request has not come yet; `None` in an open loop.
    free_clients: Option<u64>,
    rare: BinaryHeap<Rare>,
    next_rare: f64,
    draws: Draws,
    /// Draws which of the busy event loops looks for connections first.
    chance: Xoshiro256PlusPlus,
    kept: Option<Kept>,
    unmeasured: u64,
    ended: u64,
    counts: Counts,
    tally: Tally,
    trace: Option<Trace>,
    /// Room for a queue that is being moved.
    moving: VecDeque<Waiting>,
}

impl<'a> Engine<'a> {
    fn new(setup: &'a Setup, load: &Load, trace: Option<Trace>) -> Result<Self, Error> {
        setup.check()?;
        load.check()?;
        if load.kept.is_some_and(|of| of.next == Next::LongestIdle)
            && setup.faults.crashes.is_some()
        {
            return Err(Error(
                "crashes are not simulated where requests take their connections in turn".into(),
            ));
        }
        let mut front = Front::new(setup, load.seed);
        let mut gaps = Gaps::new(&load.arrivals, load.seed);
        let kept = load.kept.map(|of| Kept::open(of, &mut front, load.seed));
        let mut workers = Vec::new();
        workers.resize_with(setup.workers, Worker::default);
        let unmeasured = load.unmeasured();
        let clients = match load.arrivals {
            Arrivals::Closed(clients) => Some(clients as u64),
            _ => None,
        };
        let cpus = setup.cpus.map_or(f64::INFINITY, |cpus| cpus as f64);
        let mut engine = Self {
            setup,
            servers: Servers::new(setup.kind, setup.workers, cpus),
            workers,
            front,
            next_arrival: clients.map_or_else(|| gaps.draw(), |_| 0.0),
            free_clients: clients,
            gaps,
            works: Works::new(&load.service, load.seed)?,
            to_come: load.requests,
            rare: BinaryHeap::with_capacity(2 * setup.workers + 64),
            next_rare: f64::INFINITY,
            draws: Draws::new(load.seed),
            chance: stream(load.seed, 6),
            kept,
            unmeasured,
            ended: 0,
            counts: Counts::default(),
            tally: Tally::new(load.requests - unmeasured),
            trace,
            moving: VecDeque::new(),
        };
        engine.plan();
        Ok(engine)
    }

    /// Plans the first of each rare event.
    fn plan(&mut self) {
        // The agent moves queues, and accepted connections are in none.
        if self.kept.is_none() && matches!(&self.front, Front::Steered { agent: Some(_), .. }) {
            self.happens(0.0, Happening::AgentLooks);
        }
        // Kept connections are opened anew only when a worker crashes.
        let opens = self.kept.is_none() || self.setup.faults.crashes.is_some();
        if opens
            && matches!(
                &self.front,
                Front::Shared {
                    steerer: Some(_),
                    ..
                }
            )
        {
            self.happens(0.0, Happening::SteererLooks);
        }
        for worker in 0..self.setup.workers {
            self.plan_pause(worker, 0.0);
            self.plan_crash(worker);
        }
        for stop in &self.setup.faults.stops {
            // Before the first request comes, which may come at the same moment.
            if stop.at_s <= 0.0 {
                self.stop(*stop);
            } else {
                self.happens(stop.at_s, Happening::Stop(*stop));
            }
        }
    }

    /// Plans the next pause of a worker that works again `from_s` from now, in s.
    fn plan_pause(&mut self, worker: usize, from_s: f64) {
        if let Some(pauses) = self.setup.faults.pauses {
            let at = self.servers.now() + from_s + self.draws.distance(pauses);
            self.happens(at, Happening::Pause { worker });
        }
    }

    fn plan_crash(&mut self, worker: usize) {
        if let Some(crashes) = self.setup.faults.crashes {
            let at = self.servers.now() + self.draws.distance(crashes);
            self.happens(at, Happening::Crash { worker });
        }
    }

    fn happens(&mut self, at: f64, happening: Happening) {
        self.rare.push(Rare { at, happening });
        self.next_rare = self.rare.peek().map_or(f64::INFINITY, |first| first.at);
    }

    fn finish_all(mut self) -> (Outcome, Option<Trace>) {
        let requests = self.to_come;
        while self.ended < requests {
            self.step();
        }
        let (latency, mean_s, mean_error_s) = self.tally.close();
        let outcome = Outcome {
            latency,
            mean_s,
            mean_error_s,
            served: self.workers.iter().map(|worker| worker.accepted).collect(),
            counts: self.counts,
            elapsed_s: self.servers.now(),
        };
        (outcome, self.trace)
    }

    /// The next event.
    #[inline]
    fn step(&mut self) {
        self.counts.events += 1;
        let finish = self.servers.next();
        if finish <= self.next_arrival && finish <= self.next_rare {
            self.finish(finish);
        } else if self.next_arrival <= self.next_rare {
            self.servers.advance(self.next_arrival);
            self.arrive();
        } else {
            self.servers.advance(self.next_rare);
            self.happen();
        }
    }

    fn arrive(&mut self) {
        let now = self.servers.now();
        let mut one = Waiting {
            arrived: now,
            work: self.works.draw(),
            hash: 0,
            dropped: 0,
        };
        self.to_come -= 1;
        self.next_arrival = self.after_arrival(now);
        if let Some(kept) = &mut self.kept {
            return match kept.take(one) {
                Taken::By(worker) => self.put(worker, one),
                Taken::Later => {}
                Taken::Nobody => self.lose(1),
            };
        }
        if let Front::Steered { steering, .. } = &mut self.front {
            one.hash = steering.hash();
        }
        self.connect(one);
    }

    /// The time of the arrival after one that comes now.
    #[inline]
    fn after_arrival(&mut self, now: f64) -> f64 {
        if let Some(free) = &mut self.free_clients {
            *free -= 1;
        }
        match (self.to_come, self.free_clients) {
            (0, _) | (_, Some(0)) => f64::INFINITY,
            (_, Some(_)) => now,
            (_, None) => now + self.gaps.draw(),
        }
    }

    /// Requests end, with an answer or without.
    #[inline]
    fn end(&mut self, requests: u64) {
        self.ended += requests;
        if self.setup.rtt_s > 0.0 && self.free_clients.is_some() {
            let at = self.servers.now() + self.setup.rtt_s;
            return (0..requests).for_each(|_| self.happens(at, Happening::Asks));
        }
        self.ask(requests);
    }

    /// So many clients of a closed loop ask again.
    #[inline]
    fn ask(&mut self, requests: u64) {
        if let Some(free) = &mut self.free_clients {
            *free += requests;
            if self.to_come > 0 && requests > 0 {
                self.next_arrival = self.servers.now();
            }
        }
    }

    /// A SYN comes.
    #[inline]
    fn connect(&mut self, one: Waiting) {
        let Some(worker) = self.choose(one.hash) else {
            return self.lose(1);
        };
        if self.setup.rtt_s == 0.0 {
            return self.complete(worker, one);
        }
        if self.has_no_room(worker) {
            return self.drop_syn(worker, one);
        }
        let at = self.servers.now() + self.setup.rtt_s;
        self.happens(at, Happening::Established { worker, one });
    }

    /// The worker to whose queue a connection goes. One queue for all is that of the first.
    #[inline]
    fn choose(&mut self, hash: u32) -> Option<usize> {
        match &mut self.front {
            Front::Shared { .. } => Some(0),
            Front::Steered { steering, .. } => steering.pick(hash),
        }
    }

    #[inline]
    fn has_no_room(&self, worker: usize) -> bool {
        let queue = match &self.front {
            Front::Shared { queue, .. } => queue,
            Front::Steered { .. } => &self.workers[worker].queue,
        };
        is_full(self.setup.backlog, queue.len())
    }

    /// A handshake is over, where the queue has room.
    #[inline]
    fn complete(&mut self, worker: usize, one: Waiting) {
        if self.has_no_room(worker) {
            self.drop_syn(worker, one);
        } else {
            self.establish(worker, one);
        }
    }

    /// A connection is in a queue from now on, and counts.
    #[inline]
    fn establish(&mut self, worker: usize, one: Waiting) {
        match &mut self.front {
            Front::Shared { queue, .. } => {
                queue.push_back(one);
                if let Some(soon) = self.front.ring(self.servers.now()) {
                    self.happens(soon, Happening::SteererLooks);
                }
                let woken = self.woken();
                if let Some(worker) = woken.or_else(|| self.busy_loop()) {
                    self.accept(worker);
                }
            }
            Front::Steered { steering, .. } => {
                steering.enter(worker, self.servers.now());
                self.put(worker, one);
            }
        }
    }

    /// The worker that is woken for a connection, and takes it. The kernel wakes a halted worker as well. It takes nothing,
    /// and the others do when they come round, or at once if they are woken too.
    #[inline]
    fn woken(&mut self) -> Option<usize> {
        let Front::Shared { asleep, .. } = &mut self.front else {
            return None;
        };
        let all = asleep.wakes_all();
        loop {
            let worker = asleep.wake()?;
            if can_accept(self.setup.kind, &self.workers[worker]) {
                return Some(worker);
            }
            if !all {
                return None;
            }
        }
    }

    /// A handshake ends. Since its SYN the queue may have filled, or its worker may be gone: the kernel gives its
    /// handshakes to another.
    fn end_handshake(&mut self, worker: usize, one: Waiting) {
        let steered = matches!(self.front, Front::Steered { .. });
        let there = match steered && self.workers[worker].down {
            true => self.choose(one.hash),
            false => Some(worker),
        };
        match there {
            Some(worker) => self.complete(worker, one),
            None => self.lose(1),
        }
    }

    /// Returns the event loop that looks for connections first while all of them are busy: a random one.
    fn busy_loop(&mut self) -> Option<usize> {
        if self.setup.kind != Kind::EventLoop {
            return None;
        }
        let able = |worker: &usize| self.can_accept(*worker) && self.front.is_armed(*worker);
        let count = (0..self.workers.len()).filter(able).count();
        if count == 0 {
            return None;
        }
        let which = self.chance.random_range(0..count);
        let able = |worker: &usize| self.can_accept(*worker) && self.front.is_armed(*worker);
        (0..self.workers.len()).filter(able).nth(which)
    }

    /// A SYN finds a full queue. The client sends it again, or gives up.
    fn drop_syn(&mut self, worker: usize, mut one: Waiting) {
        self.counts.dropped_syns += 1;
        one.dropped += 1;
        self.note(What::Dropped, worker);
        match syn::again_s(one.dropped) {
            Some(after) => {
                self.happens(self.servers.now() + after, Happening::Syn(one));
            }
            None => {
                self.counts.given_up += 1;
                self.end(1);
            }
        }
    }

    #[inline]
    fn can_accept(&self, worker: usize) -> bool {
        can_accept(self.setup.kind, &self.workers[worker])
    }

    /// A connection comes into a worker's own queue, and the worker takes it if it can.
    #[inline]
    fn put(&mut self, slot: usize, one: Waiting) {
        if self.can_accept(slot) {
            self.begin(slot, one);
        } else {
            self.workers[slot].queue.push_back(one);
            self.publish_queue(slot);
        }
    }

    fn publish_queue(&mut self, slot: usize) {
        if let Front::Steered { steering, .. } = &mut self.front {
            steering.set_queue(slot, self.workers[slot].queue.len());
        }
    }

    #[inline]
    fn begin(&mut self, worker: usize, one: Waiting) {
        let of = &mut self.workers[worker];
        of.busy += 1;
        of.accepted += 1;
        if let Front::Shared { .. } = self.front
            && self.kept.is_none()
        {
            self.front.enter(worker, self.servers.now());
        }
        let speed = self.setup.speeds.get(worker).copied().unwrap_or(1.0);
        self.servers.begin(worker, one.arrived, one.work / speed);
    }

    /// Lets a worker take waiting connections while it can, and then wait for more.
    fn accept(&mut self, worker: usize) {
        while self.can_accept(worker) {
            let next = match &mut self.front {
                Front::Shared { queue, asleep, .. } if self.kept.is_none() => {
                    let looks = asleep.is_armed(worker);
                    looks.then(|| queue.pop_front()).flatten()
                }
                _ => self.workers[worker].queue.pop_front(),
            };
            let Some(one) = next else {
                return self.wait_for_more(worker);
            };
            self.begin(worker, one);
            self.publish_queue(worker);
        }
    }

    /// A worker with a thread to spare, or an event loop with nothing to do, waits for the shared queue.
    #[inline]
    fn wait_for_more(&mut self, worker: usize) {
        let waits = match self.setup.kind {
            Kind::Threads(_) => self.can_accept(worker),
            Kind::EventLoop => self.workers[worker].busy == 0,
        };
        if let Front::Shared { asleep, .. } = &mut self.front
            && waits
            && self.kept.is_none()
        {
            asleep.sleep(worker);
        }
    }

    #[inline]
    fn finish(&mut self, at: f64) {
        let done = self.servers.finish(at);
        self.workers[done.worker].busy -= 1;
        if self.kept.is_none() {
            self.front.leave(done.worker, at);
        }
        self.end(1);
        if self.ended > self.unmeasured {
            // The SYN, and the answer, are under way for half of it each.
            self.tally.add(at - done.arrived + self.setup.rtt_s);
        }
        if let Some(trace) = &mut self.trace {
            if self.ended == self.unmeasured + 1 {
                trace.begin(at);
            }
            trace.span(Span {
                worker: done.worker,
                arrived_s: done.arrived,
                began_s: done.began,
                ended_s: at,
            });
        }
        // It came after those that wait for this worker already.
        let came = self
            .kept
            .as_mut()
            .and_then(|kept| kept.give_back(done.worker));
        self.accept(done.worker);
        if let Some(one) = came {
            self.put(done.worker, one);
        }
    }

    fn note(&mut self, what: What, worker: usize) {
        if let Some(trace) = &mut self.trace {
            trace.mark(what, worker, self.servers.now());
        }
    }

    /// Requests end without an answer.
    fn lose(&mut self, requests: u64) {
        self.counts.lost += requests;
        self.end(requests);
    }
}

/// Whether a queue takes no more: the kernel admits one more than the backlog.
#[inline]
fn is_full(backlog: Option<u32>, length: usize) -> bool {
    backlog.is_some_and(|backlog| length > backlog as usize)
}

/// Whether a worker can begin with a request now.
#[inline]
fn can_accept(kind: Kind, worker: &Worker) -> bool {
    let room = match kind {
        Kind::Threads(threads) => worker.busy < threads,
        Kind::EventLoop => true,
    };
    room && !worker.is_halted()
}

/// The rare events.
impl Engine<'_> {
    fn happen(&mut self) {
        let Some(Rare { happening, .. }) = self.rare.pop() else {
            return;
        };
        match happening {
            Happening::AgentLooks => self.look(),
            Happening::SteererLooks => self.steer(),
            Happening::Syn(one) => self.connect(one),
            Happening::Established { worker, one } => self.end_handshake(worker, one),
            Happening::Asks => self.ask(1),
            Happening::Stop(stop) => self.stop(stop),
            Happening::Leaves { worker } => self.leaves(worker),
            Happening::Pause { worker } => self.pause(worker),
            Happening::GoOn { worker, life } => self.go_on(worker, life),
            Happening::Crash { worker } => self.crash(worker),
            Happening::Restart { worker } => self.restart(worker),
        }
        self.next_rare = self.rare.peek().map_or(f64::INFINITY, |first| first.at);
    }

    fn look(&mut self) {
        let Front::Steered {
            steering,
            agent: Some(agent),
        } = &mut self.front
        else {
            return;
        };
        let next = agent.look(
            self.servers.now(),
            self.servers.cpu_s(),
            steering,
            &self.workers,
        );
        self.happens(next, Happening::AgentLooks);
        while let Some(slot) = self.next_move() {
            self.counts.rescues += 1;
            self.counts.moved += self.workers[slot].queue.len() as u64;
            self.note(What::Moved, slot);
            self.move_queue(slot);
        }
    }

    /// The steerer of one queue looks. Where it arms a worker that waits, the kernel looks at the queue.
    fn steer(&mut self) {
        let (workers, now) = (&self.workers, self.servers.now());
        let works = |worker: usize| !workers[worker].is_halted();
        let Some((changes, next)) = self.front.steer(now, works) else {
            return;
        };
        self.happens(next, Happening::SteererLooks);
        self.counts.changes += changes.len() as u64;
        for (worker, change) in changes {
            if let Front::Shared { queue, asleep, .. } = &mut self.front
                && change != Change::Disarm
                && !queue.is_empty()
                && asleep.has(worker)
            {
                asleep.remove(worker);
                self.accept(worker);
            }
        }
    }

    fn next_move(&mut self) -> Option<usize> {
        match &mut self.front {
            Front::Steered { agent, .. } => agent.as_mut()?.next_move(),
            Front::Shared { .. } => None,
        }
    }

    /// The policy chooses again for each connection that waits at a slot, in the order in which they came.
    fn move_queue(&mut self, from: usize) {
        let mut moving = std::mem::take(&mut self.moving);
        std::mem::swap(&mut moving, &mut self.workers[from].queue);
        self.publish_queue(from);
        for one in moving.drain(..) {
            let Front::Steered { steering, .. } = &mut self.front else {
                continue;
            };
            steering.move_away(from);
            match steering.pick(one.hash) {
                Some(slot) => {
                    steering.enter(slot, self.servers.now());
                    self.put(slot, one);
                }
                None => self.lose(1),
            }
        }
        self.moving = moving;
    }

    fn pause(&mut self, worker: usize) {
        let lasts_s = self
            .setup
            .faults
            .pauses
            .map_or(0.0, |pauses| pauses.lasts_s);
        self.halt(worker, lasts_s);
        self.plan_pause(worker, lasts_s);
    }

    fn stop(&mut self, stop: Stop) {
        let Stop {
            worker, lasts_s, ..
        } = stop;
        if stop.busy {
            let now = self.servers.now();
            self.front.enter(worker, now);
            self.happens(now + lasts_s, Happening::Leaves { worker });
        }
        self.halt(worker, lasts_s);
    }

    fn leaves(&mut self, worker: usize) {
        self.front.leave(worker, self.servers.now());
    }

    /// A worker does nothing for a while.
    fn halt(&mut self, worker: usize, lasts_s: f64) {
        let of = &mut self.workers[worker];
        let life = of.lives;
        if of.down {
            return;
        }
        of.halts += 1;
        if of.halts == 1 {
            self.servers.halt(worker);
            self.note(What::Halted, worker);
        }
        let at = self.servers.now() + lasts_s;
        self.happens(at, Happening::GoOn { worker, life });
    }

    fn go_on(&mut self, worker: usize, life: u32) {
        let of = &mut self.workers[worker];
        if of.lives == life && !of.down {
            of.halts -= 1;
            if of.halts == 0 {
                self.servers.go_on(worker);
                self.note(What::WentOn, worker);
                self.accept(worker);
            }
        }
    }

    /// A worker loses its requests in hand. Its own queue goes to the others, as the kernel moves it when a listener
    /// closes.
    fn crash(&mut self, worker: usize) {
        let of = &mut self.workers[worker];
        let in_hand = std::mem::take(&mut of.busy);
        (of.halts, of.down) = (0, true);
        self.servers.lose(worker);
        self.note(What::Crashed, worker);
        let now = self.servers.now();
        self.front.end(worker);
        if self.kept.is_none() {
            (0..in_hand).for_each(|_| self.front.leave(worker, now));
        }
        self.lose(in_hand as u64);
        self.leave_queue(worker);
        if let Some(crashes) = self.setup.faults.crashes {
            let at = self.servers.now() + crashes.lasts_s;
            self.happens(at, Happening::Restart { worker });
        }
    }

    /// Empties a crashed worker's queue. Requests of kept connections are lost, and their clients connect anew.
    fn leave_queue(&mut self, worker: usize) {
        let Some(mut kept) = self.kept.take() else {
            return self.move_queue(worker);
        };
        let waiting = self.workers[worker].queue.len();
        self.workers[worker].queue.clear();
        self.lose(waiting as u64);
        for of in kept.of(worker) {
            self.front.leave(worker, self.servers.now());
            // Where no worker is up they wait for this one to come back.
            match self.front.open() {
                Some(other) => *of = other,
                None => self.front.enter(worker, self.servers.now()),
            }
        }
        self.kept = Some(kept);
    }

    fn restart(&mut self, worker: usize) {
        let of = &mut self.workers[worker];
        of.down = false;
        of.lives += 1;
        self.front.join(worker);
        // With kept connections it waits for those that are opened anew.
        if let Front::Shared { asleep, .. } = &mut self.front
            && self.kept.is_some()
        {
            asleep.sleep(worker);
        }
        self.note(What::Restarted, worker);
        self.plan_crash(worker);
        self.accept(worker);
    }
}
