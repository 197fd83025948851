//! When the mark of a stuck worker lapses, by what its connections show.

use wakeone_model::judge::{SlotHistory, SlotSample, WorkerState, lapses};

/// Long after the mark.
const LATER_NS: u64 = 60_000_000_000;

fn look(queued: u32, active: u64) -> SlotSample {
    SlotSample {
        serving: true,
        queued,
        active,
        ..Default::default()
    }
}

/// Whether a mark lapses without rescue, where the slot had `marked` when it was set, and has `now`.
fn lapsed(marked: SlotSample, now: SlotSample) -> bool {
    let mut memory = SlotHistory::default();
    memory.mark(0, &marked, 5);
    lapses(LATER_NS, &now, &memory, false, || (WorkerState::Busy, 6))
}

#[test]
fn a_worker_that_closes_connections_is_none_that_hangs() {
    assert!(lapsed(look(0, 3), look(0, 2)), "it closed one of three");
    assert!(!lapsed(look(0, 3), look(0, 3)), "it closed none");
    assert!(!lapsed(look(0, 3), look(0, 4)), "one came");
    assert!(lapsed(look(0, 3), look(0, 0)), "none is left");
    assert!(lapsed(look(0, 0), look(0, 0)), "it had none");
}

#[test]
fn connections_that_wait_are_none_that_a_worker_has() {
    // Two of its three waited, and were moved.
    assert!(!lapsed(look(2, 3), look(0, 1)));
    assert!(!lapsed(look(2, 5), look(0, 3)));
    assert!(lapsed(look(2, 5), look(0, 2)));
}

#[test]
fn a_trial_ends_when_the_worker_is_seen_to_be_well() {
    let mut memory = SlotHistory::default();
    memory.begin_trial();
    memory.begin_trial();
    assert!(memory.is_on_trial());
    memory.end_trial();
    assert!(!memory.is_on_trial());
}
