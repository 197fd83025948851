//! The agent's view of TCP and UDP sockets. They differ in how a slot is sampled, what its worker does, and what can be
//! moved.

use std::fmt::Debug;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use wakeone_bpf::table::flag;
use wakeone_kernel::proc::doing::{Acceptors, Looks};
use wakeone_kernel::socket::AcceptQueue;
use wakeone_kernel::socket::receive_queue::ReceiveQueue;
use wakeone_model::judge::{SlotSample, WorkerState};
use wakeone_model::listener::Protocol;

use super::slot::SlotState;
use crate::dispatcher::Dispatcher;

/// The agent's view of sockets of one protocol.
pub(super) trait Transport: Debug + Sync {
    /// Samples a slot, and publishes what waits in its sockets.
    fn sample(
        &self,
        dispatcher: &Dispatcher,
        slot: usize,
        state: &mut SlotState,
        told: Told,
    ) -> SlotSample;

    /// Returns the state of the slot's worker, or of the freest of several: `others` serve its socket too. Those of their
    /// processes that accept are noted.
    fn worker_state(
        &self,
        dispatcher: &Dispatcher,
        slot: usize,
        others: &[u32],
        acceptors: &mut Acceptors,
        looks: &Looks,
    ) -> WorkerState;

    /// Whether its sockets may be watched by an epoll set all the time, which costs something for each arrival.
    fn may_watch(&self) -> bool;

    /// Whether these samples show work; `placed`: the program placed something since the last ones.
    fn is_busy(&self, samples: &[SlotSample], placed: bool) -> bool;

    /// Whether the table alone tells that nothing happened.
    fn is_counted(&self, dispatcher: &Dispatcher) -> bool;

    /// Whether a read takes the stuck mark off a worker, even if its state is unknown.
    fn read_is_recovery(&self) -> bool;

    /// Whether what waits in a slot's sockets can be moved; else the reason.
    fn can_move(&self) -> Result<(), &'static str>;

    /// Returns the bytes that would be lost with the sockets.
    fn unread_bytes(&self, dispatcher: &Dispatcher) -> u64;

    /// The unit of what waits.
    fn unit(&self) -> &'static str;
}

/// The facts that are known when a slot is sampled.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Told {
    /// Whether something waits there; `None`: nobody knows.
    pub waits: Option<bool>,
    /// The limit of its queue is to be read again: servers may call listen() anew with another backlog.
    pub refresh: bool,
}

/// Returns the view of sockets of this protocol.
pub(super) fn transport_of(protocol: Protocol) -> &'static dyn Transport {
    match protocol {
        Protocol::Udp => &Udp,
        // No program chooses among UNIX sockets.
        Protocol::Tcp | Protocol::Mptcp | Protocol::Unix => &Tcp,
    }
}

/// Whether a worker runs in the slot and may be given connections or datagrams.
pub(super) fn serving(dispatcher: &Dispatcher, slot: usize) -> bool {
    is_up(dispatcher, slot) && dispatcher.table().slot(slot).pid().load(Relaxed) != 0
}

fn is_up(dispatcher: &Dispatcher, slot: usize) -> bool {
    let place = dispatcher.table().slot(slot);
    place.has(flag::UP) && !place.has(flag::DRAINING)
}

/// Returns the state of the freest of a slot's worker and of `others`; `None` if there is nobody.
fn freest(
    dispatcher: &Dispatcher,
    slot: usize,
    others: &[u32],
    acceptors: &mut Acceptors,
    looks: &Looks,
) -> Option<WorkerState> {
    let worker = dispatcher.table().slot(slot).pid().load(Relaxed);
    let mut tops: Vec<u32> = std::iter::once(worker).filter(|pid| *pid != 0).collect();
    tops.extend(others.iter().filter(|pid| **pid != worker));
    (!tops.is_empty()).then(|| acceptors.doing(looks, &tops, &dispatcher.inodes(slot)))
}

/// Returns a number that grows with each connection that comes to a slot's accept queue. Those that the kernel placed are
/// counted for no slot, and count for all here.
pub(super) fn arrivals(dispatcher: &Dispatcher, slot: usize) -> u64 {
    let table = dispatcher.table();
    let place = table.slot(slot);
    let counted = place.established().load(Relaxed) + place.migrated_in().load(Relaxed);
    counted + table.unusual_exits()
}

/// Listeners: each has an accept queue, and open connections are counted.
#[derive(Debug)]
struct Tcp;

impl Transport for Tcp {
    fn sample(
        &self,
        dispatcher: &Dispatcher,
        slot: usize,
        state: &mut SlotState,
        told: Told,
    ) -> SlotSample {
        let place = dispatcher.table().slot(slot);
        let load = |counter: &AtomicU64| counter.load(Relaxed);
        let (established, arrived, left) = (
            load(place.established()),
            load(place.migrated_in()),
            load(place.migrated_out()),
        );
        let active = u64::try_from(place.active().load(Relaxed)).unwrap_or(0);
        let limit = place.queue_limit().load(Relaxed);
        let was_empty = place.queued().load(Relaxed) == 0 && limit > 0;
        let is_counted = dispatcher.counting() && !dispatcher.is_replaced();
        let nothing_came = state.lull.see(arrivals(dispatcher, slot));
        // Nothing came that could wait, or nothing is open. This spares the calls to borrow and read the listeners.
        let still_empty = is_counted && was_empty && (nothing_came || active == 0);
        let is_empty = told.waits.map_or(still_empty, |waits| !waits && limit > 0);
        let queue = if is_empty && !told.refresh {
            // A look before this one may have seen some there.
            if !was_empty {
                dispatcher.publish_empty(slot);
            }
            AcceptQueue { length: 0, limit }
        } else {
            dispatcher.publish_queues(slot)
        };
        place.queue_limit().store(queue.limit, Relaxed);
        SlotSample {
            serving: serving(dispatcher, slot),
            queued: queue.length,
            room: queue.limit.saturating_sub(queue.length),
            accepted: (established + arrived).saturating_sub(left + u64::from(queue.length)),
            active,
        }
    }

    fn worker_state(
        &self,
        dispatcher: &Dispatcher,
        slot: usize,
        others: &[u32],
        acceptors: &mut Acceptors,
        looks: &Looks,
    ) -> WorkerState {
        freest(dispatcher, slot, others, acceptors, looks).unwrap_or(WorkerState::Unknown)
    }

    fn may_watch(&self) -> bool {
        true
    }

    fn is_busy(&self, samples: &[SlotSample], _: bool) -> bool {
        samples.iter().any(|one| one.active > 0 || one.queued > 0)
    }

    fn is_counted(&self, dispatcher: &Dispatcher) -> bool {
        dispatcher.counting()
    }

    fn read_is_recovery(&self) -> bool {
        false
    }

    fn can_move(&self) -> Result<(), &'static str> {
        Ok(())
    }

    fn unread_bytes(&self, _: &Dispatcher) -> u64 {
        0
    }

    fn unit(&self) -> &'static str {
        "connections"
    }
}

/// UDP sockets have no accept queue, nothing is counted out, and datagrams that wait cannot be moved. A worker that
/// leaves datagrams waiting while another is idle is marked, and flows go elsewhere.
#[derive(Debug)]
struct Udp;

impl Transport for Udp {
    /// Also publishes how many datagrams its sockets dropped.
    fn sample(
        &self,
        dispatcher: &Dispatcher,
        slot: usize,
        state: &mut SlotState,
        told: Told,
    ) -> SlotSample {
        let now = Instant::now();
        if let Some(last) = state.standstill.repeat(now) {
            return SlotSample {
                serving: is_up(dispatcher, slot),
                ..last
            };
        }
        let place = dispatcher.table().slot(slot);
        let selected = place.selected().load(Relaxed);
        let nothing_came = state
            .lull
            .see(selected + dispatcher.table().unusual_exits());
        let still_empty = nothing_came && place.queued().load(Relaxed) == 0;
        let queue = if still_empty && !told.refresh && !dispatcher.is_replaced() {
            ReceiveQueue {
                waiting_bytes: 0,
                limit_bytes: place.queue_limit().load(Relaxed),
                dropped: u32::try_from(place.dropped().load(Relaxed)).unwrap_or(u32::MAX),
            }
        } else {
            dispatcher.receive_queue(slot)
        };
        if dispatcher.pinned().addresses() == 1 {
            place.queued().store(queue.waiting_bytes, Relaxed);
        } else {
            dispatcher.publish_queues(slot);
        }
        place.queue_limit().store(queue.limit_bytes, Relaxed);
        place.dropped().store(queue.dropped.into(), Relaxed);
        let placed = selected.saturating_sub(queue.dropped.into());
        let sample = SlotSample {
            // A socket that nobody reads counts as served too, so that it is found stuck.
            serving: is_up(dispatcher, slot),
            queued: queue.waiting_bytes,
            room: queue.limit_bytes.saturating_sub(queue.waiting_bytes),
            accepted: state.reads.note(queue.waiting_bytes.into(), placed),
            // An empty queue does not make a worker idle: it may still work on the last datagram.
            active: 1,
        };
        state.standstill.note(now, sample);
        sample
    }

    /// A socket without a worker is read by nobody, so it counts as busy.
    fn worker_state(
        &self,
        dispatcher: &Dispatcher,
        slot: usize,
        others: &[u32],
        acceptors: &mut Acceptors,
        looks: &Looks,
    ) -> WorkerState {
        match freest(dispatcher, slot, others, acceptors, looks) {
            None | Some(WorkerState::Gone) => WorkerState::Busy,
            Some(state) => state,
        }
    }

    fn may_watch(&self) -> bool {
        false
    }

    fn is_busy(&self, samples: &[SlotSample], placed: bool) -> bool {
        placed || samples.iter().any(|one| one.queued > 0)
    }

    fn is_counted(&self, _: &Dispatcher) -> bool {
        false
    }

    fn read_is_recovery(&self) -> bool {
        true
    }

    fn can_move(&self) -> Result<(), &'static str> {
        Err("what waits in UDP sockets cannot be moved")
    }

    fn unread_bytes(&self, dispatcher: &Dispatcher) -> u64 {
        (0..dispatcher.slots())
            .map(|slot| u64::from(dispatcher.receive_queue(slot).waiting_bytes))
            .sum()
    }

    fn unit(&self) -> &'static str {
        "bytes"
    }
}
