//! Counts the open connections of a group for QUIC: the IDs that clients used of late.

use std::io;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use wakeone_bpf::Pinned;
use wakeone_bpf::quic::place_of;
use wakeone_bpf::table::{MAX_SLOTS, flag};
use wakeone_kernel::capability;

use super::chores::{Chore, Chores, Leisure};
use crate::dispatcher::quic::IN_USE;
use wakeone_control::privileges::FOR_LOADING;

/// How often to count. In between the program counts the connections that it places.
const EVERY: Duration = Duration::from_secs(1);
/// Counts of all groups may take this part of the time: each reads all IDs.
const SHARE: u32 = 400;

/// How many connections the worker still has that was replaced in each slot.
#[derive(Debug, Clone, Default)]
pub(super) struct LeftBehind(Arc<Mutex<Vec<u64>>>);

impl LeftBehind {
    fn lock(&self) -> MutexGuard<'_, Vec<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A worker was replaced: nobody has counted what it has since.
    pub fn begin(&self, slot: usize) {
        let mut all = self.lock();
        all.resize(MAX_SLOTS, 0);
        all[slot] = u64::MAX;
    }

    /// Returns those of a slot at the last count.
    pub fn of(&self, slot: usize) -> u64 {
        self.lock().get(slot).copied().unwrap_or(0)
    }
}

/// Counts the connections of one group.
struct IdCounts {
    pinned: Pinned,
    left: LeftBehind,
}

impl IdCounts {
    fn of(pins: &Path, left: LeftBehind) -> Option<Self> {
        let pinned = Pinned::open(pins).ok().filter(|one| one.quic().is_some())?;
        Some(Self { pinned, left })
    }

    fn look(&mut self) -> io::Result<()> {
        let Some(quic) = self.pinned.quic() else {
            return Ok(());
        };
        let counts = quic.in_use(IN_USE)?;
        let table = self.pinned.table();
        // Held while the flags are read: a worker that is replaced meanwhile is not taken for one of before.
        let mut left = self.left.lock();
        left.resize(MAX_SLOTS, 0);
        for number in 0..table.slots().load(Relaxed) as usize {
            let slot = table.slot(number);
            let second = slot.has(flag::SECOND);
            let count = counts[place_of(number, second)];
            slot.active().store(count as i64, Relaxed);
            left[number] = counts[place_of(number, !second)];
        }
        Ok(())
    }
}

/// Has the connections of a pinned group counted in the background.
///
/// # Errors
/// See [`Chores::begin`].
pub(super) fn start(chores: &Arc<Chores>, pins: &Path, left: LeftBehind) -> io::Result<Chore> {
    let pins = pins.to_owned();
    chores.begin(EVERY, move || {
        let mut counts = capability::with(&FOR_LOADING, || IdCounts::of(&pins, left))?;
        Some(move |leisure: &mut Leisure| {
            let look = || capability::with(&FOR_LOADING, || counts.look());
            if let Some(Err(error)) = leisure.take(SHARE, look) {
                tracing::debug!("counting connections of QUIC failed: {error}");
            }
        })
    })
}
