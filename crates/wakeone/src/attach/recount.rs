//! Counting in the connections that were open before a server was attached.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use wakeone_bpf::recount::{CountIn, Recounted};
use wakeone_kernel::proc::process;

use super::candidate::Member;
use wakeone_steering::dispatcher::Dispatcher;

/// The number of attempts to count in open connections. One accepted during an attempt is found by the next.
const RECOUNTS: u32 = 8;

/// Counts in the connections that sockets had before they got their slots, in several attempts. An attempt misses those
/// that are accepted while their holders are looked up.
#[derive(Debug)]
pub(super) struct Attempts {
    attempt: u32,
    due: Instant,
    sum: Recounted,
}

impl Attempts {
    /// The first one is due after a time.
    pub fn after(time: Duration) -> Self {
        Self {
            attempt: 0,
            due: Instant::now() + time,
            sum: Recounted::default(),
        }
    }

    /// Whether it is time for the next attempt.
    pub fn is_due(&self) -> bool {
        Instant::now() >= self.due
    }

    /// Attempts it once. Returns the result once nothing is left to be found.
    pub fn attempt(
        &mut self,
        program: &CountIn,
        address: SocketAddr,
        members: &[Member],
        slots: &BTreeMap<u32, Vec<usize>>,
    ) -> Option<io::Result<Recounted>> {
        self.due = Instant::now() + Duration::from_millis(5 << self.attempt);
        self.attempt += 1;
        // One that the server has closed meanwhile has no queue any more.
        let listeners = members.iter().filter_map(|one| one.remote.borrow().ok());
        match program.run(address, &held(slots), &listeners.collect::<Vec<_>>()) {
            Ok(done) => {
                self.sum.counted += done.counted;
                self.sum.unattributed = done.unattributed;
                let over = done.unattributed == 0;
                (over || self.attempt >= RECOUNTS).then_some(Ok(self.sum))
            }
            Err(error) => Some(Err(error)),
        }
    }

    /// Attempts it until nothing is left to be found.
    fn all(
        &mut self,
        program: &CountIn,
        address: SocketAddr,
        members: &[Member],
        slots: &BTreeMap<u32, Vec<usize>>,
    ) -> io::Result<Recounted> {
        loop {
            if let Some(done) = self.attempt(program, address, members, slots) {
                return done;
            }
            std::thread::sleep(self.due.saturating_duration_since(Instant::now()));
        }
    }
}

/// Counts in connections opened before, and returns when all attempts are over. Also returns the program, if there is one.
pub(super) fn count_in(
    (pins, cgroup): (&Path, &Path),
    address: SocketAddr,
    members: &[Member],
    slots: &BTreeMap<u32, Vec<usize>>,
) -> (Recounted, Option<CountIn>) {
    let mut attempts = Attempts::after(Duration::ZERO);
    let program = CountIn::of(pins, cgroup);
    let done = program.as_ref().map_err(ToString::to_string);
    let done = done.and_then(|program| {
        attempts
            .all(program, address, members, slots)
            .map_err(|error| error.to_string())
    });
    let sum = done.unwrap_or_else(|error| {
        tracing::warn!(
            event = "degraded",
            "connections open before are not counted: {error}"
        );
        attempts.sum
    });
    (sum, program.ok())
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
fn held(slots: &BTreeMap<u32, Vec<usize>>) -> HashMap<u64, usize> {
    let mut held = HashMap::new();
    for (pid, slots) in slots {
        let sockets = process::sockets_of(*pid).unwrap_or_default();
        let sockets: HashSet<u64> = sockets.into_iter().map(|(_, inode)| inode).collect();
        held.extend(sockets.into_iter().zip(slots.iter().copied().cycle()));
    }
    held
}
