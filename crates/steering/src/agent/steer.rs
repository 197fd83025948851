//! The agent's answers to the supervisor.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Relaxed;

use wakeone_bpf::table::{COUNTED, flag};
use wakeone_kernel::capability;
use wakeone_model::judge::WorkerState;

use super::Agent;
use super::state::lock;
use crate::dispatcher::Dispatcher;
use crate::slot_sockets::copies;
use wakeone_control::privileges::FOR_THE_END;
use wakeone_control::steer::{Steer, SteerEvent};

impl Steer for Agent {
    fn worker_up(&mut self, slot: usize, pid: u32) {
        let mut core = lock(&self.core);
        core.slots[slot].forget_worker();
        let place = core.dispatcher.table().slot(slot);
        place.mark(flag::STUCK, false);
        place.pid().store(pid, Relaxed);
        // A worker that was told to end may have shut its listener down. Put it back into the array in any case.
        match core.dispatcher.restore(slot) {
            // Marked last: a slot that is up and has no socket would be chosen in vain.
            Ok(()) => {
                place.mark(flag::UP, true);
                core.take_down_bereft();
            }
            Err(error) => core.note(format!(
                "slot {slot} gets connections only from the kernel's choice: {error}"
            )),
        }
        drop(core);
        self.stir();
    }

    fn worker_down(&mut self, slot: usize) {
        let mut core = lock(&self.core);
        core.slots[slot].forget_worker();
        core.slots[slot].bereft = true;
        let place = core.dispatcher.table().slot(slot);
        place.pid().store(0, Relaxed);
        place.mark(flag::STUCK, false);
        place.restarts().fetch_add(1, Relaxed);
        core.dispatcher.forget_connections(slot);
        core.take_down_bereft();
        if self.seat.is_none() && core.slots[slot].avoided.is_some() {
            core.move_queue(slot);
        }
        drop(core);
        self.wake();
    }

    fn drain(&mut self, slot: usize, on: bool) {
        let core = lock(&self.core);
        if !on {
            // Its worker is ready, and has set the options of its listener.
            core.dispatcher.note_deferral(slot);
        }
        core.mark(slot, flag::DRAINING, on);
    }

    fn refuse(&mut self) {
        lock(&self.core).dispatcher.refuse();
    }

    fn can_replace(&self) -> bool {
        let core = lock(&self.core);
        core.transport.can_move().is_ok() || core.dispatcher.quic().is_some()
    }

    fn replace(&mut self, slot: usize, pid: u32, listeners: &[OwnedFd]) -> Result<(), String> {
        let copies = copies(listeners).map_err(|error| error.to_string())?;
        let mut core = lock(&self.core);
        core.dispatcher
            .replace(slot, copies)
            .map_err(|error| error.to_string())?;
        self.left.begin(slot);
        let place = core.dispatcher.table().slot(slot);
        place.pid().store(pid, Relaxed);
        place.restarts().fetch_add(1, Relaxed);
        for (flag, on) in [
            (flag::STUCK, false),
            (flag::DRAINING, false),
            (flag::UP, true),
        ] {
            place.mark(flag, on);
        }
        core.dispatcher.note_deferral(slot);
        core.slots[slot].forget_worker();
        core.slots[slot].baseline = None;
        drop(core);
        // A group at rest waits on its old listeners.
        self.stir();
        Ok(())
    }

    fn serve_own(&mut self, slot: usize, pid: u32, listeners: &[OwnedFd]) -> Result<(), String> {
        let copies = copies(listeners).map_err(|error| error.to_string())?;
        self.with_dispatcher(|dispatcher| dispatcher.replace(slot, copies))
            .map_err(|error| error.to_string())?;
        lock(&self.core).slots[slot].baseline = None;
        self.worker_up(slot, pid);
        Ok(())
    }

    fn park(&mut self, slot: usize, sockets: &[OwnedFd]) {
        if let Ok(copies) = copies(sockets) {
            self.with_dispatcher(|dispatcher| dispatcher.park(slot, copies));
        }
    }

    fn add(&mut self, _slot: usize, listeners: &[OwnedFd]) -> Result<(), String> {
        let copies = copies(listeners).map_err(|error| error.to_string())?;
        let added = self.with_dispatcher(|dispatcher| dispatcher.add(copies));
        added.map_err(|error| error.to_string())
    }

    fn remove(&mut self, _slot: usize) {
        self.with_dispatcher(Dispatcher::remove_last);
    }

    fn quic_id(&mut self, slot: usize, beside: bool) -> Option<u16> {
        let mut core = lock(&self.core);
        core.dispatcher.quic()?;
        match core.dispatcher.new_token(slot, beside) {
            Ok(token) => Some(token),
            Err(error) => {
                core.note(format!(
                    "the worker that starts in slot {slot} gets no WAKEONE_QUIC_ID: {error}"
                ));
                None
            }
        }
    }

    fn left_behind(&self, slot: usize) -> Option<u64> {
        let core = lock(&self.core);
        core.dispatcher.quic().map(|_| self.left.of(slot))
    }

    fn forget_replaced(&mut self, slot: usize) {
        lock(&self.core).dispatcher.forget_replaced(slot);
    }

    fn close(&mut self) {
        let mut core = lock(&self.core);
        let closed = capability::with(&FOR_THE_END, || core.dispatcher.close());
        if let Err(error) = closed {
            core.note(format!(
                "new connections still come while the group closes: {error}"
            ));
        }
    }

    fn queued(&self, slot: usize) -> u32 {
        lock(&self.core).dispatcher.queue(slot).length
    }

    fn active(&self, slot: usize) -> u64 {
        let core = lock(&self.core);
        let open = core.dispatcher.table().slot(slot).active().load(Relaxed);
        u64::try_from(open).unwrap_or(0)
    }

    fn established(&self, slot: usize) -> Option<u64> {
        let core = lock(&self.core);
        let table = core.dispatcher.table();
        let counted = table.flags().load(Relaxed) & COUNTED != 0;
        let counts = counted.then(|| table.slot(slot));
        counts.map(|slot| slot.established().load(Relaxed))
    }

    /// Those that wait, and those that were moved away, were not.
    fn accepted(&self, slot: usize) -> Option<u64> {
        let established = self.established(slot)?;
        let core = lock(&self.core);
        let moved = core.dispatcher.table().slot(slot).rescued().load(Relaxed);
        let waiting = core.dispatcher.queue(slot).length;
        Some(established.saturating_sub(moved + u64::from(waiting)))
    }

    fn is_behind(&self, slot: usize) -> bool {
        let core = lock(&self.core);
        let is_stuck = core.dispatcher.table().slot(slot).has(flag::STUCK);
        is_stuck || core.dispatcher.queue(slot).length > 0
    }

    fn accepting(&self, slot: usize) -> Option<bool> {
        match lock(&self.core).worker_state(slot) {
            WorkerState::Waiting => Some(true),
            state if state.is_elsewhere() => Some(false),
            _ => None,
        }
    }

    fn events(&mut self) -> Vec<SteerEvent> {
        std::mem::take(&mut lock(&self.core).events)
    }
}
