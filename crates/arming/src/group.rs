//! A group whose workers share one queue, as the manager of attached servers sees it.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, eventfd};
use wakeone_bpf::table::{MAX_SLOTS, Table, flag};
use wakeone_control::group_table;
use wakeone_control::policy::Policy;
use wakeone_control::state::{GroupDir, StateError};
use wakeone_kernel::socket::arming::Waiter;

use crate::control::Control;
use crate::members::Shared;
use crate::slots::Slots;
use crate::steerer::Steerer;

/// A steered group.
#[derive(Debug)]
pub struct SharedGroup {
    table: Arc<Table>,
    control: Arc<Control>,
    thread: Option<JoinHandle<()>>,
}

impl SharedGroup {
    /// Steers the workers of these listeners from now on. Their load is that of all together. `dir`: the group's folder.
    /// `workers`: those that wait for the first already. `holders`: the processes that hold it. For policy and weights see [`SharedGroup::set_policy`] and
    /// [`SharedGroup::set_weights`].
    ///
    /// # Errors
    /// A file in the folder cannot be made, or the guardian or the thread cannot be started. Nothing is steered then.
    pub fn start(
        dir: &GroupDir,
        shared: &[Shared],
        slots: Slots,
        workers: &[Waiter],
        holders: &[u32],
        policy: Policy,
        weights: &[(usize, u32)],
    ) -> Result<Self, StateError> {
        let table = Arc::new(dir.create(group_table::FILE, Table::create)?);
        let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let waker = waker.map_err(|error| dir.failed("steer from", error.into()))?;
        table.heartbeat_limit_ns().store(HEARTBEAT_NS, Relaxed);
        let control = Arc::new(Control {
            stops: AtomicBool::new(false),
            is_gone: AtomicBool::new(false),
            changed: AtomicBool::new(false),
            slots: Mutex::new(None),
            waker,
        });
        let mut group = Self {
            table,
            control,
            thread: None,
        };
        group.set_policy(policy);
        group.set_weights(weights);
        let begin = |file: &std::fs::File| {
            let (table, control) = (Arc::clone(&group.table), Arc::clone(&group.control));
            let steerer = Steerer::new(shared, slots, workers, holders, file, table, control)?;
            std::thread::Builder::new()
                .name("wakeone-arming".into())
                .spawn(move || steerer.run())
        };
        group.thread = Some(dir.create(group_table::ENTRIES, begin)?);
        Ok(group)
    }

    /// Steers by a policy that [fits](Policy::fits_one_queue) from now on.
    pub fn set_policy(&self, policy: Policy) {
        self.table.policy().store(policy.number(), Relaxed);
    }

    /// The policy.
    pub fn policy(&self) -> Policy {
        let number = self.table.policy().load(Relaxed);
        Policy::of_number(number).unwrap_or_default()
    }

    /// Sets the weights of slots; those not named get 1.
    pub fn set_weights(&self, weights: &[(usize, u32)]) {
        let named = |slot: usize| weights.iter().find(|(one, _)| *one == slot);
        for slot in 0..MAX_SLOTS {
            let weight = named(slot).map_or(1, |(_, weight)| *weight);
            self.table.slot(slot).weight().store(weight, Relaxed);
        }
    }

    /// Gives the slots to other processes.
    pub fn set_slots(&self, slots: Slots) {
        let mut next = self
            .control
            .slots
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *next = Some(slots);
        drop(next);
        self.wake();
    }

    /// Has a slot's workers woken no more, or again.
    pub fn drain(&self, slot: usize, on: bool) {
        self.table.slot(slot).mark(flag::DRAINING, on);
        self.wake();
    }

    /// Returns the open connections of a slot's workers.
    pub fn active(&self, slot: usize) -> u64 {
        u64::try_from(self.table.slot(slot).active().load(Relaxed)).unwrap_or(0)
    }

    /// Whether the slot's worker was armed and did not take what waited.
    pub fn is_behind(&self, slot: usize) -> bool {
        self.table.slot(slot).has(flag::STUCK)
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.control.waker, &1_u64.to_ne_bytes());
    }

    /// The workers' processes, by slot.
    pub fn workers(&self) -> Vec<Option<u32>> {
        let slots = self.table.slots().load(Relaxed) as usize;
        let pid = |slot| Some(self.table.slot(slot).pid().load(Relaxed)).filter(|pid| *pid != 0);
        (0..slots.min(MAX_SLOTS)).map(pid).collect()
    }

    /// Whether a listener is gone.
    pub fn is_gone(&self) -> bool {
        self.control.is_gone.load(Relaxed)
    }

    /// Whether workers came or went since the last call.
    pub fn take_changed(&self) -> bool {
        self.control.changed.swap(false, Relaxed)
    }

    /// Ends the steering: every entry is as the server made it.
    pub fn end(mut self) {
        self.control.stops.store(true, Relaxed);
        self.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }

    /// Removes the files of a group that has ended from its folder.
    pub fn clear(dir: &GroupDir) {
        for file in [group_table::FILE, group_table::ENTRIES] {
            dir.remove(file);
        }
    }
}

/// After so long without a look the steerer counts as gone.
const HEARTBEAT_NS: u64 = 2_000_000_000;
