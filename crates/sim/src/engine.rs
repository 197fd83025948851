//! The events: a request comes, a request is finished, the agent looks.

use std::collections::VecDeque;

use rand::RngExt;
use rand_xoshiro::Xoshiro256PlusPlus;
use wakeone_kernel::table::MAX_SLOTS;

use crate::agent::Agent;
use crate::clock::Clock;
use crate::load::{Error, Gaps, Load, Works, stream};
use crate::outcome::{Outcome, Tally};
use crate::steering::Steering;
pub use crate::workers::Wake;
use crate::workers::{Asleep, Waiting, Worker};

/// How connections are handed out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Way {
    /// One queue for all workers.
    Shared(Wake),
    /// A queue for each worker, and a policy of `enum wakeone_policy` (`bpf/contract.h`) that chooses.
    Steered {
        /// The policy's number.
        policy: u32,
        /// The queue of a worker is moved that has not accepted for so long, in s. None: never.
        stuck_after_s: Option<f64>,
    },
}

/// Who serves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Setup {
    /// Workers, 1 to 256.
    pub workers: usize,
    /// Requests that a worker serves at a time; it accepts no more.
    pub threads: usize,
    /// The CPUs that requests need for all of their time. None: they need none, they wait for something else.
    pub cpus: Option<usize>,
    /// How connections are handed out.
    pub way: Way,
}

impl Setup {
    fn check(&self) -> Result<(), Error> {
        if !(1..=MAX_SLOTS).contains(&self.workers) {
            return Err(Error(format!(
                "{} workers cannot be simulated: a group has 1 to {MAX_SLOTS}",
                self.workers
            )));
        }
        if self.threads == 0 || self.cpus == Some(0) {
            return Err(Error(
                "a worker needs at least one thread, and a machine one CPU".into(),
            ));
        }
        Ok(())
    }
}

/// Simulates a load until its last request is finished. The first tenth of the requests is not measured: the queues fill.
///
/// # Errors
/// When the load or the setup cannot be simulated.
pub fn run(setup: &Setup, load: &Load) -> Result<Outcome, Error> {
    setup.check()?;
    let mut engine = Engine::new(setup, load)?;
    while engine.finished < load.requests {
        engine.step();
    }
    Ok(engine.close())
}

/// Opens connections one after another, each when all workers wait; the worker of each.
fn open(front: &mut Front, connections: usize) -> Vec<usize> {
    let one = |_| match front {
        Front::Shared { asleep, .. } => {
            let worker = asleep.wake().unwrap_or_default();
            asleep.sleep(worker);
            worker
        }
        Front::Steered { steering, .. } => {
            let slot = steering.pick();
            steering.enter(slot);
            slot
        }
    };
    (0..connections).map(one).collect()
}

/// Where what comes is put.
enum Front {
    Shared {
        queue: VecDeque<Waiting>,
        asleep: Asleep,
    },
    Steered {
        steering: Steering,
        agent: Option<Agent>,
    },
}

struct Engine {
    clock: Clock,
    gaps: Gaps,
    works: Works,
    /// Requests yet to come, and when the next one does.
    to_come: u64,
    next_arrival: f64,
    next_look: f64,
    threads: usize,
    workers: Vec<Worker>,
    front: Front,
    /// The worker of each connection that is kept, and how one is drawn for a request.
    kept: Option<(Vec<usize>, Xoshiro256PlusPlus)>,
    unmeasured: u64,
    finished: u64,
    tally: Tally,
    rescues: u64,
    moved: u64,
    events: u64,
}

impl Engine {
    fn new(setup: &Setup, load: &Load) -> Result<Self, Error> {
        let works = Works::new(load)?;
        let mut gaps = Gaps::new(load);
        let next_arrival = gaps.draw();
        let unmeasured = load.requests / 10;
        let front = match setup.way {
            Way::Shared(wake) => Front::Shared {
                queue: VecDeque::new(),
                asleep: Asleep::new(wake, setup.workers),
            },
            Way::Steered {
                policy,
                stuck_after_s,
            } => Front::Steered {
                steering: Steering::new(policy, setup.workers, load.seed),
                agent: stuck_after_s.map(|s| Agent::new(s, setup.workers, setup.threads)),
            },
        };
        let mut front = front;
        let kept = load
            .kept
            .map(|connections| (open(&mut front, connections), stream(load.seed, 4)));
        // What is accepted already is in no queue that could be moved.
        let looks = kept.is_none() && matches!(&front, Front::Steered { agent: Some(_), .. });
        let mut workers = Vec::new();
        workers.resize_with(setup.workers, Worker::default);
        Ok(Self {
            clock: Clock::new(setup.cpus.map_or(f64::INFINITY, |cpus| cpus as f64)),
            gaps,
            works,
            to_come: load.requests,
            next_arrival,
            next_look: if looks { 0.0 } else { f64::INFINITY },
            threads: setup.threads,
            workers,
            front,
            kept,
            unmeasured,
            finished: 0,
            tally: Tally::new(load.requests - unmeasured),
            rescues: 0,
            moved: 0,
            events: 0,
        })
    }

    /// The next event.
    fn step(&mut self) {
        self.events += 1;
        let finish = self.clock.next().unwrap_or(f64::INFINITY);
        let arrival = if self.to_come > 0 {
            self.next_arrival
        } else {
            f64::INFINITY
        };
        if finish <= arrival && finish <= self.next_look {
            self.finish(finish);
        } else if arrival <= self.next_look {
            self.clock.advance(arrival);
            self.arrive();
        } else {
            self.clock.advance(self.next_look);
            self.look();
        }
    }

    fn arrive(&mut self) {
        let arrived = self.clock.now();
        let waiting = Waiting {
            arrived,
            work: self.works.draw(),
        };
        self.to_come -= 1;
        self.next_arrival = arrived + self.gaps.draw();
        if let Some((workers, random)) = &mut self.kept {
            let worker = workers[random.random_range(0..workers.len())];
            return self.put(worker, waiting);
        }
        match &mut self.front {
            Front::Shared { queue, asleep } => {
                queue.push_back(waiting);
                if let Some(worker) = asleep.wake() {
                    self.accept(worker);
                }
            }
            Front::Steered { steering, .. } => {
                let slot = steering.pick();
                steering.enter(slot);
                self.put(slot, waiting);
            }
        }
    }

    /// A connection comes into a worker's own queue, and the worker takes it if it can.
    fn put(&mut self, slot: usize, waiting: Waiting) {
        self.workers[slot].queue.push_back(waiting);
        if self.workers[slot].busy < self.threads {
            self.accept(slot);
        } else {
            self.publish_queue(slot);
        }
    }

    fn publish_queue(&mut self, slot: usize) {
        if let Front::Steered { steering, .. } = &mut self.front {
            steering.set_queue(slot, self.workers[slot].queue.len());
        }
    }

    /// A worker takes what has waited longest, or goes to sleep.
    fn accept(&mut self, worker: usize) {
        let next = match &mut self.front {
            Front::Shared { queue, .. } if self.kept.is_none() => queue.pop_front(),
            _ => self.workers[worker].queue.pop_front(),
        };
        if let Some(waiting) = next {
            self.workers[worker].busy += 1;
            self.workers[worker].accepted += 1;
            self.clock.begin(worker, waiting.arrived, waiting.work);
            self.publish_queue(worker);
        }
        self.wait_for_more(worker, next.is_some());
    }

    /// A worker with a thread to spare waits for the shared queue.
    fn wait_for_more(&mut self, worker: usize, took: bool) {
        let spare = self.kept.is_none() && self.workers[worker].busy < self.threads;
        let Front::Shared { asleep, queue } = &mut self.front else {
            return;
        };
        if spare && (!took || queue.is_empty()) {
            asleep.sleep(worker);
        }
    }

    fn finish(&mut self, at: f64) {
        let Some(done) = self.clock.finish(at) else {
            return;
        };
        self.finished += 1;
        let worker = &mut self.workers[done.worker];
        let was_full = worker.busy == self.threads;
        worker.busy -= 1;
        if let (Front::Steered { steering, .. }, None) = (&mut self.front, &self.kept) {
            steering.leave(done.worker);
        }
        if self.finished > self.unmeasured {
            self.tally.add(at - done.arrived);
        }
        // A worker with another thread to spare waits already.
        if was_full {
            self.accept(done.worker);
        }
    }

    fn look(&mut self) {
        let Front::Steered {
            steering,
            agent: Some(agent),
        } = &mut self.front
        else {
            self.next_look = f64::INFINITY;
            return;
        };
        let (moves, next) = agent.look(self.clock.now(), steering, &self.workers);
        self.next_look = next;
        for one in moves {
            self.move_queue(one.slot);
        }
    }

    /// The policy chooses again for each connection that waits at a slot, in the order in which they came.
    fn move_queue(&mut self, from: usize) {
        let waiting = std::mem::take(&mut self.workers[from].queue);
        self.rescues += 1;
        self.moved += waiting.len() as u64;
        self.publish_queue(from);
        for one in waiting {
            if let Front::Steered { steering, .. } = &mut self.front {
                steering.leave(from);
                let slot = steering.pick();
                steering.enter(slot);
                self.put(slot, one);
            }
        }
    }

    fn close(self) -> Outcome {
        let (latency, mean_s, mean_error_s) = self.tally.close();
        Outcome {
            latency,
            mean_s,
            mean_error_s,
            served: self.workers.iter().map(|worker| worker.accepted).collect(),
            rescues: self.rescues,
            moved: self.moved,
            events: self.events,
            elapsed_s: self.clock.now(),
        }
    }
}
