//! The agent's look at UDP sockets. They have no accept queue, nothing is counted out, and datagrams that wait cannot
//! be moved. A worker that leaves datagrams waiting while another is idle is marked, and flows go elsewhere.

use std::sync::atomic::Ordering::Relaxed;

use wakeone_kernel::process;
use wakeone_kernel::table::flag;
use wakeone_model::judge::{SlotSample, WorkerState};
use wakeone_model::reads::Reads;

use crate::dispatcher::Dispatcher;

/// Looks at a slot. Publishes how much waits in its sockets and how much they dropped.
pub(crate) fn observe(dispatcher: &Dispatcher, slot: usize, reads: &mut Reads) -> SlotSample {
    let place = dispatcher.table().slot(slot);
    let selected = place.selected().load(Relaxed);
    let queue = dispatcher.receive_queue(slot);
    if dispatcher.pinned().addresses() == 1 {
        place.queued().store(queue.waiting_bytes, Relaxed);
    } else {
        dispatcher.publish_queues(slot);
    }
    place.queue_limit().store(queue.limit_bytes, Relaxed);
    place.dropped().store(queue.dropped.into(), Relaxed);
    let placed = selected.saturating_sub(queue.dropped.into());
    SlotSample {
        // A socket that nobody reads counts as served too, so that it is found stuck.
        serving: place.has(flag::UP) && !place.has(flag::DRAINING),
        queued: queue.waiting_bytes,
        room: queue.limit_bytes.saturating_sub(queue.waiting_bytes),
        accepted: reads.note(queue.waiting_bytes.into(), placed),
        // An empty queue does not make a worker idle: it may still work on the last datagram.
        active: 1,
    }
}

/// Returns the state of the slot's worker. A socket without a worker is read by nobody, so it counts as busy.
pub(crate) fn doing(dispatcher: &Dispatcher, slot: usize) -> WorkerState {
    let pid = dispatcher.table().slot(slot).pid().load(Relaxed);
    if pid == 0 {
        return WorkerState::Busy;
    }
    match process::doing_below(pid, &dispatcher.inodes(slot)) {
        WorkerState::Gone => WorkerState::Busy,
        state => state,
    }
}
