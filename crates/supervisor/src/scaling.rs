//! More or fewer workers while the group runs. The first slots have workers, and the others have listeners that do not
//! listen.

use super::report;
use super::watch::Watch;
use nix::sys::signal::Signal;

impl Watch<'_> {
    /// A signal asks for so many workers more.
    pub(super) fn scale(&mut self, signal: Signal, more: isize) {
        let now = self.group.workers;
        let wanted = now.saturating_add_signed(more);
        let room = self.group.slots.len();
        if let Some(why) = self.fixed() {
            report::not_scaled(signal, wanted, why);
        } else if !(1..=room).contains(&wanted) {
            let why = format!("there is room for 1 to {room}; --max-workers makes more");
            report::not_scaled(signal, wanted, &why);
        } else if wanted != now {
            report::scales(now, wanted);
            self.group.workers = wanted;
            self.changed = true;
        }
    }

    /// Why the number of workers cannot change, as the end of a sentence.
    pub(super) fn fixed(&self) -> Option<&'static str> {
        let group = &self.group;
        match () {
            () if group.endpoints.iter().any(|at| at.udp) => {
                Some("what waits in a worker's UDP socket would be lost with it")
            }
            () if group
                .slots_in_use()
                .iter()
                .any(|slot| slot.spare.is_empty()) =>
            {
                Some("its workers have no second listeners, as with --restart stop-first")
            }
            () if !self.steer.can_replace() => {
                Some("nothing keeps connections from a worker that is to end")
            }
            () => None,
        }
    }

    /// Starts workers that are missing in number, or has the last ones retire. A rolling restart ends first.
    pub(super) fn go_on_scaling(&mut self) {
        if self.closing.is_some() || self.roll.is_some() || self.group.in_use == self.group.workers
        {
            return;
        }
        if let Some(why) = self.fixed() {
            // A takeover found more workers than there are to be.
            report::stays(self.group.in_use, self.group.workers, why);
            self.group.workers = self.group.in_use;
        }
        let first = self.group.in_use;
        while self.group.in_use < self.group.workers && self.widen() {}
        let new: Vec<usize> = (first..self.group.in_use).collect();
        self.restart(&new);
        while self.group.in_use > self.group.workers && self.narrow() {}
        self.changed = true;
    }

    /// Takes one slot more into use; returns whether that was done. Its last worker must have ended.
    fn widen(&mut self) -> bool {
        let slot = self.group.in_use;
        let place = &self.group.slots[slot];
        if place.retiring.is_some() {
            return false;
        }
        if let Err(why) = self.steer.add(slot, &place.listeners) {
            report::stays(slot, self.group.workers, &why);
            self.group.workers = slot;
            return false;
        }
        self.group.in_use += 1;
        true
    }

    /// Has the worker of the last slot retire, whose listeners are not chosen any more; returns whether that was done.
    fn narrow(&mut self) -> bool {
        let slot = self.group.in_use - 1;
        let place = &self.group.slots[slot];
        // A worker that did not get ready still ends on the other listeners.
        if place.retiring.is_some() || place.successor.is_some() {
            return false;
        }
        if let Some(worker) = self.worker(slot) {
            report::leaves(slot, worker.process.pid());
        }
        self.steer.remove(slot);
        let grace = self.group.grace;
        self.group.slots[slot].rest(grace);
        self.group.in_use = slot;
        true
    }
}
