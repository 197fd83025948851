//! The table that the programs have in the kernel, and the choice they make from it.

use rand::RngExt;
use rand_xoshiro::Xoshiro256PlusPlus;
use wakeone_kernel::contract::{wakeone_draw, wakeone_table};
use wakeone_kernel::policy;
use wakeone_kernel::table::flag;

use crate::load::stream;

/// A steered group, as the kernel sees it.
pub(crate) struct Steering {
    table: Box<wakeone_table>,
    random: Xoshiro256PlusPlus,
    tick: u64,
}

impl Steering {
    /// At most [`wakeone_kernel::table::MAX_SLOTS`] workers of one weight.
    pub(crate) fn new(policy_number: u32, workers: usize, seed: u64) -> Self {
        let mut table = Box::new(wakeone_table {
            policy: policy_number,
            slots: workers as u32,
            ..Default::default()
        });
        for slot in &mut table.slot[..workers] {
            slot.flags = flag::UP;
            slot.weight = 1;
        }
        policy::publish(&mut table);
        Self {
            table,
            random: stream(seed, 3),
            tick: 0,
        }
    }

    /// The slot for a connection.
    pub(crate) fn pick(&mut self) -> usize {
        let draw = wakeone_draw {
            random: self.random.random(),
            hash: self.random.random(),
            cpu: 0,
            tick: self.tick,
            agent_gone: 0,
            queues_fresh: 1,
            ..Default::default()
        };
        self.tick += 1;
        // A group whose slots are all up always has one to give.
        let slot = policy::pick_in_place(&self.table, &draw).unwrap_or_default();
        self.table.slot[slot].selected += 1;
        slot
    }

    /// A connection is open at a slot from now on.
    pub(crate) fn enter(&mut self, slot: usize) {
        policy::enter(&mut self.table, slot);
    }

    /// No more.
    pub(crate) fn leave(&mut self, slot: usize) {
        policy::leave(&mut self.table, slot);
    }

    /// So many connections wait at a slot.
    pub(crate) fn set_queue(&mut self, slot: usize, length: usize) {
        self.table.slot[slot].queued = length as u32;
    }

    /// A slot is marked stuck, or no more.
    pub(crate) fn mark_stuck(&mut self, slot: usize, on: bool) {
        let flags = &mut self.table.slot[slot].flags;
        *flags = if on {
            *flags | flag::STUCK
        } else {
            *flags & !flag::STUCK
        };
        policy::publish(&mut self.table);
    }

    /// Open connections of a slot.
    pub(crate) fn active(&self, slot: usize) -> u64 {
        u64::try_from(self.table.slot[slot].active).unwrap_or(0)
    }

    /// How often a slot was chosen.
    pub(crate) fn selected(&self, slot: usize) -> u64 {
        self.table.slot[slot].selected
    }
}
