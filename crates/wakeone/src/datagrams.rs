//! What the agent looks at where the sockets are of UDP: there is no accept queue, nothing is counted out, and what
//! waits cannot be moved. A worker that leaves datagrams waiting while another is idle is marked, and flows go elsewhere.

use std::sync::atomic::Ordering::Relaxed;

use wakeone_kernel::process;
use wakeone_kernel::table::flag;
use wakeone_model::judge::{SlotSample, WorkerState};
use wakeone_model::reads::Reads;

use crate::dispatcher::Dispatcher;

/// Looks at a slot, and publishes what waits in its sockets and what they dropped.
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
        // A socket that nobody reads is served too, and by nobody: it is to be found stuck.
        serving: place.has(flag::UP) && !place.has(flag::DRAINING),
        queued: queue.waiting_bytes,
        room: queue.limit_bytes.saturating_sub(queue.waiting_bytes),
        accepted: reads.note(queue.waiting_bytes.into(), placed),
        // An empty queue does not make a worker idle: it may be at the last datagram still.
        active: 1,
    }
}

/// What the slot's worker does. A socket without a worker is read by nobody.
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
