//! A group whose workers share one queue, as the manager of attached servers sees it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, eventfd};
use wakeone_bpf::table::{MAX_SLOTS, Table};
use wakeone_control::group_table;
use wakeone_control::policy::Policy;
use wakeone_control::state::{GroupDir, StateError};
use wakeone_kernel::socket::arming::Waiter;

use crate::control::Control;
use crate::members::Shared;
use crate::steerer::Steerer;

/// A steered group.
#[derive(Debug)]
pub struct SharedGroup {
    shared: Shared,
    dir: GroupDir,
    table: Arc<Table>,
    control: Arc<Control>,
    thread: Option<JoinHandle<()>>,
}

impl SharedGroup {
    /// Steers the workers of a listener from now on. `holders`: the processes that hold it. `weights`: see
    /// [`SharedGroup::set_weights`], and for the policy [`SharedGroup::set_policy`].
    ///
    /// # Errors
    /// A file in the folder cannot be made, or the guardian or the thread cannot be started. Nothing is steered then, and
    /// the group's state is removed.
    pub fn start(
        dir: GroupDir,
        shared: Shared,
        workers: &[Waiter],
        holders: &[u32],
        policy: Policy,
        weights: &[(usize, u32)],
    ) -> Result<Self, StateError> {
        let made = || -> Result<_, StateError> {
            let table = dir.create(group_table::FILE, Table::create)?;
            let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
            let waker = waker.map_err(|error| dir.failed("steer from", error.into()))?;
            Ok((table, waker))
        };
        let (table, waker) = made().inspect_err(|_| dir.forget())?;
        let mut group = Self {
            shared,
            dir,
            table: Arc::new(table),
            control: Arc::new(Control {
                stops: AtomicBool::new(false),
                is_gone: AtomicBool::new(false),
                changed: AtomicBool::new(false),
                waker,
            }),
            thread: None,
        };
        group.set_policy(policy);
        group.set_weights(weights);
        let begin = |file: &std::fs::File| group.begin(file, workers, holders);
        let begun = group.dir.create(group_table::ENTRIES, begin);
        group.thread = Some(begun.inspect_err(|_| group.dir.forget())?);
        Ok(group)
    }

    fn begin(
        &self,
        entries: &std::fs::File,
        workers: &[Waiter],
        holders: &[u32],
    ) -> io::Result<JoinHandle<()>> {
        self.table.heartbeat_limit_ns().store(HEARTBEAT_NS, Relaxed);
        let (table, control) = (Arc::clone(&self.table), Arc::clone(&self.control));
        let steerer = Steerer::new(self.shared, workers, holders, entries, table, control)?;
        std::thread::Builder::new()
            .name("wakeone-arming".into())
            .spawn(move || steerer.run())
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

    /// The group's folder.
    pub fn dir(&self) -> &GroupDir {
        &self.dir
    }

    /// Its listener.
    pub fn shared(&self) -> &Shared {
        &self.shared
    }

    /// The workers' processes, by slot.
    pub fn workers(&self) -> Vec<Option<u32>> {
        let slots = self.table.slots().load(Relaxed) as usize;
        let pid = |slot| Some(self.table.slot(slot).pid().load(Relaxed)).filter(|pid| *pid != 0);
        (0..slots.min(MAX_SLOTS)).map(pid).collect()
    }

    /// Whether its listener is gone.
    pub fn is_gone(&self) -> bool {
        self.control.is_gone.load(Relaxed)
    }

    /// Whether workers came or went since the last call.
    pub fn take_changed(&self) -> bool {
        self.control.changed.swap(false, Relaxed)
    }

    /// Ends the steering: every entry is as the server made it. Returns the group's folder.
    pub fn end(mut self) -> GroupDir {
        self.control.stops.store(true, Relaxed);
        let _ = rustix::io::write(&self.control.waker, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        for file in [group_table::FILE, group_table::ENTRIES] {
            self.dir.remove(file);
        }
        self.dir
    }
}

/// After so long without a look the steerer counts as gone.
const HEARTBEAT_NS: u64 = 2_000_000_000;
