//! Counts open connections again now and then, and mends what differs; removes the notes of moves that nothing needs.
//!
//! The programs keep the counts exact (`bpf/dispatch.bpf.c`). A count can still be wrong: connections went while the
//! counting program was off, or a process was killed between two steps of a correction.

use std::cell::OnceCell;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use wakeone_bpf::Pinned;
use wakeone_bpf::notes::Notes;
use wakeone_bpf::recount::OpenConnections;
use wakeone_kernel::capability;
use wakeone_model::drift::{CountSample, Drift};

use super::chores::{Chore, Chores, Leisure};
use wakeone_control::privileges::FOR_LOADING;

/// How often to look whether there is something to do.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often to recount, and how soon again where a count seems wrong.
const RECOUNT_EVERY: Duration = Duration::from_secs(10);
const RECOUNT_AGAIN: Duration = Duration::from_secs(1);
/// Recounts of all groups may take this part of the time: each walks over all connections of the network namespace.
const SHARE: u32 = 500;

/// Recounts the connections of a group.
#[derive(Debug)]
pub struct Recounts {
    pinned: Pinned,
    notes: Notes,
    port: u16,
    /// Opened for the first recount; `None` where our privileges allow none.
    open: OnceCell<Option<OpenConnections>>,
    drifts: Vec<Drift>,
    due: Instant,
    /// The sum of all that came and went, at the last recount that found nothing wrong.
    settled: Option<u64>,
}

impl Recounts {
    /// For the group that is pinned there, whose connections are counted. `port`: that of its connections; 0: several.
    /// Returns `None` for a group that has no counts.
    pub fn of(pins: &Path, port: u16) -> Option<Self> {
        let pinned = Pinned::open(pins).ok().filter(Pinned::counting)?;
        Some(Self {
            notes: pinned.notes()?,
            pinned,
            port,
            open: OnceCell::new(),
            drifts: Vec::new(),
            due: Instant::now() + RECOUNT_EVERY,
            settled: None,
        })
    }

    /// Removes needless notes, and recounts if it is time to.
    ///
    /// # Errors
    /// The kernel does not show its sockets.
    pub(super) fn look(&mut self, leisure: &mut Leisure) -> io::Result<()> {
        self.notes.tidy(self.pinned.table(), self.port)?;
        if Instant::now() < self.due {
            return Ok(());
        }
        let Some(done) = leisure.take(SHARE, || self.recount()) else {
            return Ok(());
        };
        let pause = match self.drifts.iter().any(Drift::is_suspected) {
            true => RECOUNT_AGAIN,
            false => RECOUNT_EVERY,
        };
        self.due = Instant::now() + pause;
        done
    }

    /// Recounts once, and mends what two recounts agree on. Does nothing if nothing happened since the last one.
    ///
    /// # Errors
    /// The kernel does not show its sockets.
    pub fn recount(&mut self) -> io::Result<()> {
        let before = self.samples();
        let happened = before.iter().map(|one| one.came + one.went).sum();
        if self.settled == Some(happened) {
            return Ok(());
        }
        let load = || {
            let open = OpenConnections::of(self.pinned.dir());
            let open = open.inspect_err(|error| {
                tracing::debug!("connections are not recounted: {error}");
            });
            open.ok()
        };
        let Some(open) = self
            .open
            .get_or_init(|| capability::with(&FOR_LOADING, load))
        else {
            return Ok(());
        };
        let noted = self.notes.now();
        let mut found = capability::with(&FOR_LOADING, || open.tagged(self.port))?;
        let left = self.notes.now();
        left.add_to(&mut found);
        let ended = noted.ended(&left);
        let after = self.samples();
        self.drifts.resize_with(before.len(), Drift::default);
        for (slot, drift) in self.drifts.iter_mut().enumerate() {
            let (before, after) = (before[slot], after[slot]);
            let ended = ended.get(&slot).copied().unwrap_or(0);
            let Some(by) = drift.see(before, after, found[slot], ended) else {
                continue;
            };
            let table = self.pinned.table();
            table.slot(slot).correct(by);
            table.drift_mended().fetch_add(by.unsigned_abs(), Relaxed);
            tracing::warn!(
                event = "drift",
                slot,
                by,
                "slot {slot} counted {} open connections {}; its count is mended",
                by.unsigned_abs(),
                if by < 0 { "too many" } else { "too few" }
            );
        }
        let is_right = !self.drifts.iter().any(Drift::is_suspected);
        self.settled = is_right.then_some(happened);
        Ok(())
    }

    /// Reads the counters of all slots: those that only grow before the counts.
    fn samples(&self) -> Vec<CountSample> {
        let table = self.pinned.table();
        let slots = 0..wakeone_bpf::table::MAX_SLOTS;
        let sample = |slot| {
            let place = table.slot(slot);
            let came = place.established().load(Ordering::SeqCst)
                + place.migrated_in().load(Ordering::SeqCst);
            let went =
                place.closed().load(Ordering::SeqCst) + place.migrated_out().load(Ordering::SeqCst);
            let active = place.active().load(Ordering::SeqCst);
            CountSample { came, went, active }
        };
        slots.map(sample).collect()
    }
}

/// Has the connections of a pinned group recounted in the background.
///
/// # Errors
/// See [`Chores::begin`].
pub(super) fn start(chores: &Arc<Chores>, pins: &Path, port: u16) -> io::Result<Chore> {
    let pins = pins.to_owned();
    chores.begin(LOOK_EVERY, move || {
        let recounts = || Recounts::of(&pins, port);
        let mut recounts = capability::with(&FOR_LOADING, recounts)?;
        Some(move |leisure: &mut Leisure| {
            if let Err(error) = recounts.look(leisure) {
                tracing::debug!("recounting connections failed: {error}");
            }
        })
    })
}
