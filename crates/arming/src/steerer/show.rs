//! The table shows the workers here.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Relaxed;

use wakeone_bpf::table::flag;
use wakeone_kernel::schedule;

use super::{OURS, Shown, Steerer};
use crate::loads::Counted;

impl Steerer {
    pub(super) fn publish_queue(&self, queued: u32, limit: u32) {
        // The queues are for all; the first slot shows their sum.
        let slot = self.table.slot(0);
        slot.queued().store(queued, Relaxed);
        slot.queue_limit().store(limit, Relaxed);
    }

    pub(super) fn publish(&mut self) {
        self.show();
        for (slot, shown) in self.shown.iter().enumerate() {
            let slot = self.table.slot(slot);
            slot.active().store(shown.active as i64, Relaxed);
            let before = slot.flags().load(Relaxed);
            if before & OURS != shown.flags {
                slot.flags().fetch_and(!(OURS & !shown.flags), Relaxed);
                slot.flags().fetch_or(shown.flags, Relaxed);
            }
            if slot.pid().swap(shown.pid, Relaxed) != shown.pid {
                self.control.changed.store(true, Relaxed);
            }
        }
        let slots = self.shown.len();
        for gone in slots..self.table.slots().load(Relaxed) as usize {
            let slot = self.table.slot(gone);
            slot.active().store(0, Relaxed);
            slot.flags().store(0, Relaxed);
            slot.pid().store(0, Relaxed);
        }
        self.table.slots().store(slots as u32, Relaxed);
        self.table
            .heartbeat_ns()
            .store(schedule::coarse_ns(), Relaxed);
    }

    /// Sums up the workers of each slot.
    fn show(&mut self) {
        let found = self.workers.values().filter_map(|one| one.slot).max();
        let found = found.map_or(0, |most| most + 1);
        let slots = self.slots.count().unwrap_or(found.max(self.shown.len()));
        self.shown.fill(Shown::default());
        self.shown.resize(slots, Shown::default());
        let mut summed = BTreeSet::new();
        for (place, worker) in &self.workers {
            let Some(slot) = worker.slot else { continue };
            let shown = &mut self.shown[slot];
            shown.pid = worker.waiter.entry.pid;
            // It may wait for several listeners.
            if summed.insert(Counted::of(&worker.waiter)) {
                shown.active += worker.load(&self.counts);
            }
            shown.flags |= flag::UP;
            let arming = &self.listeners[worker.listener].arming;
            if arming.is_armed(*place) {
                shown.flags |= flag::ARMED;
            }
            if arming.is_busy(*place) {
                shown.flags |= flag::STUCK;
            }
        }
        for (slot, pid) in self.slots.given() {
            let shown = &mut self.shown[slot];
            shown.pid = pid;
            // One that does not wait in epoll is woken as always.
            if shown.flags == 0 {
                shown.flags = flag::UP | flag::ARMED;
            }
        }
    }
}
