//! The agent: it samples the slots as often as the real one, and uses the same judge.

use wakeone_model::judge::{self, Limits, ProgressBaseline, SlotHistory, SlotSample, WorkerState};
use wakeone_model::moves::{self, Arrivals, Budget};

use wakeone_bpf::table::flag;

use crate::servers::Kind;
use crate::steering::Steering;
use crate::workers::Worker;

const NS: f64 = 1e9;
/// How often to look while connections are open: a quarter of the patience, within these bounds (as the real agent).
const BUSY_TICK_S: (f64, f64) = (0.0005, 0.005);
/// How often to look while none are.
const IDLE_TICK_S: f64 = 0.010;
/// Room in an accept queue that has no limit.
const ROOM: u32 = u32::MAX / 2048;

/// The time of a move: shutdown() and listen(), as measured with few connections on the port.
const MOVE_S: f64 = 60e-6;

/// The state of the agent.
#[derive(Debug)]
pub(crate) struct Agent {
    limits: Limits,
    kind: Kind,
    /// The most that an accept queue holds.
    room: u32,
    /// The state of each slot in this look.
    looks: Vec<SlotSample>,
    /// The queues to be moved now.
    moves: Vec<usize>,
    history: Vec<SlotHistory>,
    baselines: Vec<Option<ProgressBaseline>>,
    arrivals: Vec<Arrivals>,
    avoided_ns: Vec<u64>,
    budget: Budget,
    /// The CPU time of a worker that was always busy, in ns; `None` where requests wait for something else than a CPU.
    cpu_ns: Option<u64>,
}

impl Agent {
    /// `backlog`: of the accept queues.
    pub(crate) fn new(
        stuck_after_s: f64,
        workers: usize,
        kind: Kind,
        backlog: Option<u32>,
    ) -> Self {
        Self {
            limits: Limits {
                stuck_after_ns: (stuck_after_s * NS) as u64,
            },
            kind,
            room: backlog.map_or(ROOM, |backlog| backlog.saturating_add(1).min(ROOM)),
            looks: Vec::with_capacity(workers),
            moves: Vec::with_capacity(workers),
            history: vec![SlotHistory::default(); workers],
            baselines: vec![None; workers],
            arrivals: vec![Arrivals::default(); workers],
            avoided_ns: vec![0; workers],
            budget: Budget::default(),
            cpu_ns: None,
        }
    }

    /// Takes one look: marks stuck slots. Returns the time of the next look, in s; [`Agent::next_move`] returns the
    /// queues to be moved now. `cpu_s`: the CPU time so far of a worker that was always busy; `None` where requests wait
    /// for something else.
    pub(crate) fn look(
        &mut self,
        now: f64,
        cpu_s: Option<f64>,
        steering: &mut Steering,
        workers: &[Worker],
    ) -> f64 {
        let now_ns = (now * NS) as u64 + 1;
        self.cpu_ns = cpu_s.map(|cpu_s| (cpu_s * NS) as u64);
        let mut looks = std::mem::take(&mut self.looks);
        looks.clear();
        looks.extend((0..workers.len()).map(|slot| self.see(steering, workers, slot)));
        for (slot, arrivals) in self.arrivals.iter_mut().enumerate() {
            arrivals.see(now_ns, steering.selected(slot));
        }
        self.moves.clear();
        for slot in 0..looks.len() {
            if self.judge(slot, now_ns, &looks, steering, workers) {
                self.budget.spend((MOVE_S * NS) as u64);
                self.history[slot].moved(&SlotSample {
                    queued: 0,
                    ..looks[slot]
                });
                self.moves.push(slot);
            }
        }
        // `next_move` takes the last one.
        self.moves.reverse();
        let busy = looks.iter().any(|look| look.active > 0 || look.queued > 0);
        let next = now + self.pause(now_ns, busy, &looks);
        self.looks = looks;
        next
    }

    /// Returns a queue to be moved.
    pub(crate) fn next_move(&mut self) -> Option<usize> {
        self.moves.pop()
    }

    fn see(&self, steering: &Steering, workers: &[Worker], slot: usize) -> SlotSample {
        let queued = workers[slot].queue.len() as u32;
        SlotSample {
            serving: !workers[slot].down,
            queued,
            room: self.room.saturating_sub(queued),
            accepted: workers[slot].accepted,
            active: steering.active(slot),
        }
    }

    fn pause(&self, now_ns: u64, busy: bool, looks: &[SlotSample]) -> f64 {
        let patience = self.limits.stuck_after_ns as f64 / NS;
        let pause = if busy {
            (patience / 4.0).clamp(BUSY_TICK_S.0, BUSY_TICK_S.1)
        } else {
            IDLE_TICK_S
        };
        let marked = (0..looks.len())
            .filter(|slot| looks[*slot].queued > 0 && self.history[*slot].stuck_since_ns.is_some());
        let quiet = marked
            .map(|slot| self.quiet_ns(slot))
            .filter(|quiet| *quiet > now_ns)
            .min();
        quiet.map_or(pause, |quiet| pause.min((quiet - now_ns) as f64 / NS))
    }

    fn quiet_ns(&self, slot: usize) -> u64 {
        // On loopback a handshake takes no time that could be measured.
        self.arrivals[slot].quiet_ns(self.avoided_ns[slot], moves::wait_ns(Some(0)))
    }

    /// Judges a slot; returns true where its queue is to be moved now.
    fn judge(
        &mut self,
        slot: usize,
        now_ns: u64,
        looks: &[SlotSample],
        steering: &mut Steering,
        workers: &[Worker],
    ) -> bool {
        let suspect = judge::suspect(now_ns, &looks[slot], &mut self.history[slot], self.limits);
        if !suspect {
            self.baselines[slot] = None;
        }
        if self.history[slot].stuck_since_ns.is_some() {
            return self.look_after(slot, now_ns, looks, steering, workers);
        }
        if suspect && self.is_stuck(slot, now_ns, looks, workers) {
            self.history[slot].stuck_since_ns = Some(now_ns);
            self.avoided_ns[slot] = now_ns;
            steering.mark(slot, flag::STUCK, true);
        }
        false
    }

    /// Whether a suspect is stuck.
    fn is_stuck(
        &mut self,
        slot: usize,
        now_ns: u64,
        looks: &[SlotSample],
        workers: &[Worker],
    ) -> bool {
        let sooner = self.another_sooner(slot, now_ns, looks, workers);
        let doing = self.doing(&workers[slot]);
        judge::stuck(sooner, &mut self.history[slot], self.limits, || doing)
    }

    fn look_after(
        &mut self,
        slot: usize,
        now_ns: u64,
        looks: &[SlotSample],
        steering: &mut Steering,
        workers: &[Worker],
    ) -> bool {
        let doing = self.doing(&workers[slot]);
        if judge::recovered(&looks[slot], &self.history[slot], doing) {
            self.history[slot].stuck_since_ns = None;
            steering.mark(slot, flag::STUCK, false);
            return false;
        }
        let others = looks.iter().enumerate().filter(|(other, look)| {
            *other != slot && look.serving && self.history[*other].stuck_since_ns.is_none()
        });
        looks[slot].queued > 0
            && judge::fits(looks[slot].queued, others.map(|(_, look)| look.room))
            && self.quiet_ns(slot) <= now_ns
            && self.budget.allows(now_ns)
    }

    fn doing(&self, worker: &Worker) -> WorkerState {
        let full = match self.kind {
            Kind::Threads(threads) => worker.busy >= threads,
            // It works on the requests in hand.
            Kind::EventLoop => worker.busy > 0,
        };
        if worker.halts > 0 {
            WorkerState::Stopped
        } else if worker.down {
            WorkerState::Busy
        } else if full {
            let running = |cpu_ns| WorkerState::Running { cpu_ns };
            self.cpu_ns.map_or(WorkerState::Busy, running)
        } else {
            WorkerState::Waiting
        }
    }

    fn another_sooner(
        &mut self,
        slot: usize,
        now_ns: u64,
        looks: &[SlotSample],
        workers: &[Worker],
    ) -> bool {
        let others = || {
            let all = looks.iter().enumerate();
            all.filter(|(other, _)| *other != slot && self.history[*other].stuck_since_ns.is_none())
        };
        let idle = others().any(|(other, look)| judge::idle(look, || self.doing(&workers[other])));
        let overtaken = self.baselines[slot]
            .as_ref()
            .is_some_and(|baseline| baseline.overtaken(now_ns, others(), self.limits));
        if !idle && !overtaken && self.baselines[slot].is_none() {
            self.baselines[slot] = Some(ProgressBaseline::start(now_ns, looks));
        }
        idle || overtaken
    }
}
