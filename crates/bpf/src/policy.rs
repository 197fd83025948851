//! `bpf/policy.h` compiled for this machine: the very functions that choose in the kernel; and `bpf/eligible.h`, which
//! lists the slots that they choose from.

use crate::contract::{wakeone_draw, wakeone_slot, wakeone_table};

unsafe extern "C" {
    fn wakeone_native_pick(table: *const wakeone_table, draw: *const wakeone_draw) -> i32;
    fn wakeone_native_pick_in_place(table: *const wakeone_table, draw: *const wakeone_draw) -> i32;
    fn wakeone_native_pick_living(table: *const wakeone_table, draw: *const wakeone_draw) -> i32;
    fn wakeone_native_two(
        table: *const wakeone_table,
        draw: *const wakeone_draw,
        second: *mut i32,
    ) -> i32;
    fn wakeone_native_tier(slot: *const wakeone_slot, ignore_stuck: u32) -> u32;
    fn wakeone_native_publish(table: *mut wakeone_table);
    fn wakeone_native_enter(table: *mut wakeone_table, slot: u32);
    fn wakeone_native_leave(table: *mut wakeone_table, slot: u32);
    fn wakeone_native_correct(table: *mut wakeone_table, slot: u32, by: i64);
}

/// The tier that policies prefer: up, not draining, not stuck.
pub const TIER_GOOD: u32 = 3;

/// The slot for a new connection, or `None` where the choice is left to the kernel.
pub fn pick(table: &wakeone_table, draw: &wakeone_draw) -> Option<usize> {
    // SAFETY: both point to valid values of the layout that contract.h gives; the function only reads them.
    let slot = unsafe { wakeone_native_pick(table, draw) };
    usize::try_from(slot).ok()
}

/// The same by the shorter way of the program that chooses for connections.
pub fn pick_in_place(table: &wakeone_table, draw: &wakeone_draw) -> Option<usize> {
    // SAFETY: as in `pick`.
    let slot = unsafe { wakeone_native_pick_in_place(table, draw) };
    usize::try_from(slot).ok()
}

/// The slot for a connection whose first slot has lost its socket.
pub fn pick_living(table: &wakeone_table, draw: &wakeone_draw) -> Option<usize> {
    // SAFETY: as in `pick`.
    let slot = unsafe { wakeone_native_pick_living(table, draw) };
    usize::try_from(slot).ok()
}

/// The two candidates of two-choices.
pub fn two(table: &wakeone_table, draw: &wakeone_draw) -> (Option<usize>, Option<usize>) {
    let mut second = -1;
    // SAFETY: as in `pick`; `second` is written before the function returns.
    let first = unsafe { wakeone_native_two(table, draw, &mut second) };
    (usize::try_from(first).ok(), usize::try_from(second).ok())
}

/// A slot's tier: 0 down, 1 draining, 2 stuck, 3 good.
pub fn tier(slot: &wakeone_slot, ignore_stuck: bool) -> u32 {
    // SAFETY: as in `pick`.
    unsafe { wakeone_native_tier(slot, ignore_stuck.into()) }
}

/// Lists the slots that may be chosen, after a change of flags, weights or their number.
pub fn publish(table: &mut wakeone_table) {
    // SAFETY: the table is valid, of the layout that contract.h gives, and ours alone.
    unsafe { wakeone_native_publish(table) }
}

/// Corrects a slot's active count.
///
/// # Safety
/// `table` points to a writable mapping of a whole table.
pub(crate) unsafe fn correct_shared(table: *mut wakeone_table, slot: u32, by: i64) {
    // SAFETY: the caller's promise; the function changes the table by atomic operations only.
    unsafe { wakeone_native_correct(table, slot, by) }
}

/// The same for a table that programs and other processes use meanwhile.
///
/// # Safety
/// `table` points to a writable mapping of a whole table.
pub(crate) unsafe fn publish_shared(table: *mut wakeone_table) {
    // SAFETY: the caller's promise. Fields that others change are accessed atomically. They may see a list half made:
    // each of its entries is the number of a slot all the same (eligible.h).
    unsafe { wakeone_native_publish(table) }
}

/// Counts a connection in.
///
/// # Panics
/// For a slot of 256 or more.
pub fn enter(table: &mut wakeone_table, slot: usize) {
    assert!(slot < table.slot.len(), "slot {slot}");
    // SAFETY: as in `publish`; the slot is one of the table's.
    unsafe { wakeone_native_enter(table, slot as u32) }
}

/// Counts a connection out.
///
/// # Panics
/// For a slot of 256 or more.
pub fn leave(table: &mut wakeone_table, slot: usize) {
    assert!(slot < table.slot.len(), "slot {slot}");
    // SAFETY: as in `publish`; the slot is one of the table's.
    unsafe { wakeone_native_leave(table, slot as u32) }
}
