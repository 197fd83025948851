//! The table that the programs have in the kernel, and the choice they make from it.

use rand::RngExt;
use rand_xoshiro::Xoshiro256PlusPlus;
use wakeone_bpf::contract::wakeone_draw;
use wakeone_bpf::policy_group::{Group, Variant};
use wakeone_bpf::table::flag;

use crate::random::stream;

const NS: f64 = 1e9;

/// A steered group, as the kernel sees it.
pub(crate) struct Steering {
    group: Group,
    flags: Vec<u32>,
    weights: Vec<u32>,
    random: Xoshiro256PlusPlus,
    tick: u64,
}

impl Steering {
    /// At most as many workers as the variant has slots; `weights`: one each, or none.
    pub(crate) fn new(
        variant: Variant,
        policy: u32,
        workers: usize,
        weights: &[u32],
        seed: u64,
    ) -> Self {
        let mut steering = Self {
            group: Group::new(variant, policy, workers),
            flags: vec![flag::UP; workers],
            weights: weights.to_vec(),
            random: stream(seed, 3),
            tick: 0,
        };
        steering.weights.resize(workers, 1);
        for slot in 0..workers {
            let weight = steering.weights[slot];
            steering.group.set(slot, flag::UP, weight);
        }
        steering.group.publish();
        steering
    }

    /// A hash for the addresses and ports of a new connection.
    #[inline]
    pub(crate) fn hash(&mut self) -> u32 {
        self.random.random()
    }

    /// Returns the slot for a connection; none where no slot is up.
    #[inline]
    pub(crate) fn pick(&mut self, hash: u32) -> Option<usize> {
        self.tick += 1;
        self.group.pick(&wakeone_draw {
            random: self.random.random(),
            hash,
            cpu: 0,
            tick: self.tick,
            agent_gone: 0,
            queues_fresh: 1,
            ..Default::default()
        })
    }

    /// A connection is open at a slot from now on.
    #[inline]
    pub(crate) fn enter(&mut self, slot: usize, now: f64) {
        self.group.enter(slot, (now * NS) as u64);
    }

    /// A connection is closed at a slot.
    #[inline]
    pub(crate) fn leave(&mut self, slot: usize, now: f64) {
        self.group.leave(slot, (now * NS) as u64);
    }

    /// A connection leaves a slot for another.
    #[inline]
    pub(crate) fn move_away(&mut self, slot: usize) {
        self.group.move_away(slot);
    }

    /// So many connections wait at a slot.
    #[inline]
    pub(crate) fn set_queue(&mut self, slot: usize, length: usize) {
        self.group.set_queued(slot, length as u32);
    }

    /// A slot gets a mark or loses it.
    pub(crate) fn mark(&mut self, slot: usize, flag: u32, on: bool) {
        let flags = if on {
            self.flags[slot] | flag
        } else {
            self.flags[slot] & !flag
        };
        if flags != self.flags[slot] {
            self.flags[slot] = flags;
            self.group.set(slot, flags, self.weights[slot]);
            self.group.publish();
        }
    }

    /// Open connections of a slot.
    pub(crate) fn active(&self, slot: usize) -> u64 {
        self.group.active(slot)
    }

    /// How often a slot was chosen.
    pub(crate) fn selected(&self, slot: usize) -> u64 {
        self.group.selected(slot)
    }
}
