//! `bpf/policy.h` compiled for this machine: the very functions that choose in the kernel.

use crate::contract::{wakeone_draw, wakeone_slot, wakeone_table};

unsafe extern "C" {
    fn wakeone_native_pick(table: *const wakeone_table, draw: *const wakeone_draw) -> i32;
    fn wakeone_native_two(
        table: *const wakeone_table,
        tier: u32,
        draw: *const wakeone_draw,
        second: *mut i32,
    ) -> i32;
    fn wakeone_native_tier(slot: *const wakeone_slot, agent_gone: u32) -> u32;
}

/// The tier that policies prefer: up, not draining, not stuck.
pub const TIER_GOOD: u32 = 3;

/// The slot for a new connection, or `None` where the choice is left to the kernel.
pub fn pick(table: &wakeone_table, draw: &wakeone_draw) -> Option<usize> {
    // SAFETY: both point to valid values of the layout that contract.h gives; the function only reads them.
    let slot = unsafe { wakeone_native_pick(table, draw) };
    usize::try_from(slot).ok()
}

/// The two candidates of two-choices within a tier.
pub fn two(
    table: &wakeone_table,
    tier: u32,
    draw: &wakeone_draw,
) -> (Option<usize>, Option<usize>) {
    let mut second = -1;
    // SAFETY: as in `pick`; `second` is written before the function returns.
    let first = unsafe { wakeone_native_two(table, tier, draw, &mut second) };
    (usize::try_from(first).ok(), usize::try_from(second).ok())
}

/// A slot's tier: 0 down, 1 draining, 2 stuck, 3 good.
pub fn tier(slot: &wakeone_slot, agent_gone: bool) -> u32 {
    // SAFETY: as in `pick`.
    unsafe { wakeone_native_tier(slot, agent_gone.into()) }
}
