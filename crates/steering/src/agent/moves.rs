//! The part of a round that moves queues: those of stuck workers, of slots without a worker, and on request.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use wakeone_bpf as bpf;
use wakeone_bpf::table::{EXITS, flag};
use wakeone_model::judge::{self, SlotSample, WorkerState};

use super::slot::SlotState;
use super::state::Core;
use super::transport::Told;
use wakeone_control::steer::{Move, SteerEvent};

/// Tells how rescues suffer from an agent without real-time priority. Others may then run between a rescue's shutdown and
/// listen, and a worker that comes to accept just then gets EINVAL. That is rare enough to go on.
#[must_use]
pub fn without_priority(error: &std::io::Error) -> String {
    format!(
        "a rescue may take longer, and a worker that accepts meanwhile fails: the agent has no real-time priority, which takes CAP_SYS_NICE: {error}"
    )
}

impl Core {
    /// Says what [`without_priority`] says, if queues are to be moved.
    pub(super) fn note_no_priority(&mut self, error: &std::io::Error) {
        if self.config.rescue {
            self.note(without_priority(error));
        }
    }

    /// Makes listeners listen again that a move left closed.
    pub(super) fn reopen(&mut self) {
        for slot in 0..self.slots.len() {
            let place = self.dispatcher.table().slot(slot);
            if !place.has(flag::MOVING) || !self.slots[slot].may_try() {
                continue;
            }
            if let Err(error) = self.dispatcher.reopen(slot) {
                self.slots[slot].retry_later();
                self.note(format!("slot {slot} gets no connections: {error}"));
            }
        }
    }

    /// Returns when no handshake will be under way in a slot any more; `None`: new ones begin.
    fn quiet_ns(&self, slot: usize) -> Option<u64> {
        self.slots[slot].quiet_ns(self.wait_ns())
    }

    pub(super) fn is_quiet(&self, slot: usize) -> bool {
        self.quiet_ns(slot)
            .is_some_and(|quiet| quiet <= self.now_ns())
    }

    /// Returns how long until the first slot with a queue to move has no handshake under way.
    pub(super) fn until_quiet(&self, samples: &[SlotSample]) -> Option<Duration> {
        let now = self.now_ns();
        let waiting = (0..samples.len()).filter(|slot| samples[*slot].queued > 0);
        let first = waiting
            .filter_map(|slot| self.quiet_ns(slot))
            .filter(|quiet| *quiet > now)
            .min();
        first.map(|quiet| Duration::from_nanos(quiet - now))
    }

    /// Moves the queues of slots whose worker is gone and that others can serve. A process that waits for such a queue
    /// has come anew, and takes it itself.
    pub(super) fn empty_abandoned(&mut self, samples: &[SlotSample]) {
        for (slot, sample) in samples.iter().enumerate() {
            if sample.queued > 0
                && self.is_emptying(slot)
                && self.is_quiet(slot)
                && self.worker_state(slot) != WorkerState::Waiting
            {
                self.move_queue(slot);
            }
        }
    }

    /// Whether the queue of a slot without a worker still has to be moved.
    pub(super) fn is_emptying(&self, slot: usize) -> bool {
        let state = &self.slots[slot];
        let waiting =
            || self.transport.can_move().is_ok() && self.dispatcher.queue(slot).length > 0;
        state.avoided.is_some_and(|avoided| avoided.down)
            && state.may_try()
            && self.another_serves(slot)
            && (!self.is_quiet(slot) || waiting())
    }

    /// Whether a stuck slot's queue can be moved now, if rescue is wanted.
    pub(super) fn may_move(&mut self, slot: usize, samples: &[SlotSample]) -> bool {
        let queued = samples[slot].queued;
        if !self.config.rescue || self.transport.can_move().is_err() || queued == 0 {
            return false;
        }
        if !self.slots[slot].may_try() || !self.is_quiet(slot) {
            return false;
        }
        let others = self.rooms(slot, samples);
        !others.is_empty() && judge::fits(queued, others.into_iter()) && self.can_afford()
    }

    /// Whether moves have taken no more than their share of the time.
    pub(super) fn can_afford(&mut self) -> bool {
        if self.budget.allows(self.now_ns()) {
            return true;
        }
        if !std::mem::replace(&mut self.told_dear, true) {
            self.note("queues of stuck workers are moved less often: each move walks over all connections of the port, those in TIME_WAIT included, and moves may take 1 % of the time".into());
        }
        false
    }

    /// Logs once that the map of moved connections was full.
    pub(super) fn tell_moved_full(&mut self) {
        let full = EXITS.iter().position(|exit| *exit == "moved_full");
        let full = full.is_some_and(|at| self.dispatcher.table().exits()[at] > 0);
        if full && !std::mem::replace(&mut self.told_moved_full, true) {
            self.note("no room to note some moved connections, of which 65,536 may be open: the slots that they were moved from count them as theirs until they close".into());
        }
    }

    /// Returns the room in the queues that a slot's connections could be moved to.
    fn rooms(&self, slot: usize, samples: &[SlotSample]) -> Vec<u32> {
        let others = samples.iter().enumerate().filter(|(other, sample)| {
            *other != slot && sample.serving && !self.slots[*other].is_stuck()
        });
        others.map(|(_, sample)| sample.room).collect()
    }

    /// Moves the queue of a slot that the program does not choose now.
    pub(super) fn move_queue(&mut self, slot: usize) {
        if let Err(error) = self.check_reopening(slot) {
            self.slots[slot].retry_later();
            if !std::mem::replace(&mut self.told_closed, true) {
                self.note(format!("queues are not moved: {error}"));
            }
        } else if let Err(error) = self.try_move(slot) {
            let state = &mut self.slots[slot];
            state.retry_later();
            let why = format!("slot {slot} is not rescued (next try each second): {error}");
            if state.told_unmoved.as_ref() != Some(&why) {
                state.told_unmoved = Some(why.clone());
                self.note(why);
            }
        }
    }

    /// Checks that a slot's listeners would listen again after a move, or their worker would get no connection any more.
    /// This may walk over all connections of the port, as a move does.
    fn check_reopening(&mut self, slot: usize) -> Result<(), bpf::Error> {
        let before = Instant::now();
        let checked = self.dispatcher.may_reopen(slot);
        self.budget.spend(before.elapsed().as_nanos() as u64);
        checked
    }

    /// Moves it, and counts and reports the connections moved.
    fn try_move(&mut self, slot: usize) -> Result<u32, bpf::Error> {
        self.dispatcher.search_holders();
        let before = Instant::now();
        let moved = self.dispatcher.move_queues(slot);
        let took = moved
            .as_ref()
            .map_or_else(|_| before.elapsed(), |moved| moved.took);
        self.budget.spend(took.as_nanos() as u64);
        let moved = moved?.connections;
        if moved > 0 {
            let took_us = took.as_micros() as u64;
            let place = self.dispatcher.table().slot(slot);
            place.rescues().fetch_add(1, Relaxed);
            place.rescued().fetch_add(moved.into(), Relaxed);
            // All is read anew: the move emptied the queue.
            let (state, dispatcher) = (&mut SlotState::default(), &self.dispatcher);
            let told = Told {
                refresh: true,
                ..Told::default()
            };
            let sample = self.transport.sample(dispatcher, slot, state, told);
            self.slots[slot].history.moved(&sample);
            self.event(SteerEvent::Rescued(Move {
                slot,
                moved,
                took_us,
            }));
        }
        Ok(moved)
    }

    /// Moves the queues that somebody asked for, each after its handshakes under way have ended.
    pub(super) fn answer_requests(&mut self, samples: &[SlotSample]) {
        for (slot, answer) in std::mem::take(&mut self.requests) {
            let moved = match self.may_rescue(slot, samples) {
                Ok(()) if samples[slot].queued == 0 => Ok(0),
                Ok(()) if self.is_held(slot) => {
                    let checked = self.check_reopening(slot);
                    let moved = checked.and_then(|()| self.try_move(slot));
                    moved.map_err(|error| error.to_string())
                }
                Ok(()) => {
                    // The program must not choose the slot meanwhile.
                    self.mark(slot, flag::STUCK, true);
                    let now = self.now_ns();
                    self.slots[slot].avoid(now, false);
                    self.requests.push((slot, answer));
                    continue;
                }
                Err(why) => Err(why.to_owned()),
            };
            self.release(slot);
            let _ = answer.try_send(
                moved.map_err(|why| format!("cannot move the queue of slot {slot}: {why}")),
            );
        }
    }

    /// Whether a slot is marked, and no handshake is under way there.
    fn is_held(&self, slot: usize) -> bool {
        self.dispatcher.table().slot(slot).has(flag::STUCK) && self.is_quiet(slot)
    }

    /// Undoes the preparation of a rescue that somebody asked for.
    fn release(&mut self, slot: usize) {
        let Some(state) = self.slots.get_mut(slot) else {
            return;
        };
        if state.avoided.is_some() && !state.is_stuck() {
            state.avoided = state.avoided.filter(|avoided| avoided.down);
            self.mark(slot, flag::STUCK, false);
        }
    }

    /// Whether a person may have a slot's queue moved although its worker does not seem stuck.
    fn may_rescue(&self, slot: usize, samples: &[SlotSample]) -> Result<(), &'static str> {
        self.transport.can_move()?;
        if self.dispatcher.is_replaced() {
            return Err(
                "the server's own program chooses for the group, and is not interfered with",
            );
        }
        if !self.config.rescue {
            return Err("rescue is off for this group; start or attach it with --rescue");
        }
        let Some(sample) = samples.get(slot) else {
            return Err("there is no such slot");
        };
        let others = self.rooms(slot, samples);
        if others.is_empty() {
            return Err("no other slot has a live listener, and the kernel would reset what waits");
        }
        if !judge::fits(sample.queued, others.into_iter()) {
            return Err("the queues of the others have no room for it");
        }
        // Between shutdown and listen an accept fails, and a worker that does not expect this may end.
        let nobody = self.dispatcher.table().slot(slot).pid().load(Relaxed) == 0;
        match self.worker_state(slot) {
            _ if sample.queued == 0 => Ok(()),
            state if state.is_elsewhere() => Ok(()),
            WorkerState::Waiting => {
                Err("its worker waits for connections there, and serves it itself")
            }
            WorkerState::Unknown | WorkerState::Gone if nobody && self.dispatcher.holds(slot) => {
                Ok(())
            }
            _ => Err("what its worker does cannot be seen, and it must not be waiting there"),
        }
    }
}
