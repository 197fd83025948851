//! Counting in the connections that were open before a server was attached.

use std::collections::{BTreeMap, HashSet};
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use wakeone_kernel::bpf::recount::{self, Callbacks, Uncounted};
use wakeone_kernel::proc::process;

use super::candidate::Member;
use crate::dispatcher::Dispatcher;

/// The number of attempts to count in open connections. One accepted during an attempt is found by the next.
const RECOUNTS: usize = 8;

/// Counts in connections opened before. One accepted while its holder was looked up is found by the next attempt.
pub(super) fn count_in(
    pins: &Path,
    address: SocketAddr,
    slots: &BTreeMap<u32, Vec<usize>>,
) -> recount::Recounted {
    let mut sum = recount::Recounted::default();
    for attempt in 0..RECOUNTS {
        match recount::recount(pins, address.port(), held(slots), Callbacks::Probed) {
            Ok(done) => {
                sum.counted += done.counted;
                sum.unattributed = done.unattributed;
                sum.no_callbacks = done.no_callbacks;
                if done.unattributed == 0 || done.no_callbacks {
                    break;
                }
            }
            Err(error) => {
                tracing::warn!(
                    event = "degraded",
                    "connections open before are not counted: {error}"
                );
                break;
            }
        }
        std::thread::sleep(Duration::from_millis(5 << attempt));
    }
    if let Some(missing) = sum.missing() {
        tracing::warn!(event = "degraded", "{missing}");
    }
    sum
}

/// Returns the connections that we or an earlier agent marked as uncounted.
pub(super) fn uncounted(dispatcher: &Dispatcher) -> Option<Uncounted> {
    if !dispatcher.counting() {
        return None;
    }
    Uncounted::of(dispatcher.pinned().dir()).unwrap_or_else(|error| {
        tracing::debug!("uncounted connections are not looked after: {error}");
        None
    })
}

/// The slots that each worker serves.
pub(super) fn slots_of_workers(
    dispatcher: &Dispatcher,
    members: &[Member],
) -> BTreeMap<u32, Vec<usize>> {
    let mut slots: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for member in members {
        if let Some(slot) = dispatcher.pinned().slot_of(member.cookie)
            && let Some(worker) = member.worker()
        {
            slots.entry(worker).or_default().push(slot);
        }
    }
    slots
}

/// Returns the sockets that workers hold, each with a slot. Threads of one process cannot be told apart, so its sockets
/// are dealt evenly to its slots.
fn held(slots: &BTreeMap<u32, Vec<usize>>) -> Vec<(u64, usize)> {
    let mut held = Vec::new();
    for (pid, slots) in slots {
        let sockets = process::sockets_of(*pid).unwrap_or_default();
        let sockets: HashSet<u64> = sockets.into_iter().map(|(_, inode)| inode).collect();
        held.extend(sockets.into_iter().zip(slots.iter().copied().cycle()));
    }
    held
}
