//! Flows that have more datagrams than one worker can read.
//!
//! A flow stays with its worker, as sessions need it. One sender's flow must not turn many readers into one, though. If
//! the workers shared one socket before, any of them got any datagram, so the flow is spread over all of them again. Else
//! it is only told: the kernel's hash would give it to one worker too.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use wakeone_bpf::table::{AFFINITY, SHARED};
use wakeone_model::judge::{self, SlotSample};

use super::state::Core;

/// A worker has a backlog for this many times the patience before its heaviest flow is spread.
const PATIENCES: u32 = 4;
/// A backlog that lasts so long is told. Where flows may be spread, one is spread even if it has not most of the
/// datagrams: several flows may be too much together.
const LASTING: Duration = Duration::from_secs(1);
impl Core {
    /// Looks for flows that one worker cannot serve while others are idle. Call it between the begin and the end of a
    /// round's probes.
    pub(super) fn watch_flows(&mut self, samples: &[SlotSample]) {
        let flags = self.dispatcher.table().flags().load(Relaxed);
        if flags & AFFINITY == 0 {
            return;
        }
        let shared = flags & SHARED != 0;
        for slot in 0..samples.len() {
            if self.is_too_much(slot, samples, shared) {
                self.note_heavy(slot, shared);
            }
        }
        self.forget_light();
    }

    fn is_too_much(&mut self, slot: usize, samples: &[SlotSample], shared: bool) -> bool {
        let now = self.now_ns();
        let place = self.dispatcher.table().slot(slot);
        let placed = place.selected().load(Relaxed);
        let backlog = &mut self.slots[slot].backlog;
        if backlog.note(now, samples[slot].queued > 0, placed) {
            place.heavy_lead().store(0, Relaxed);
        }
        let lasting = LASTING.max(self.config.stuck_after * PATIENCES);
        let lasts = |time: Duration| backlog.lasts(now, time.as_nanos() as u64);
        let one_flow = backlog.is_one_flow(placed, place.heavy_lead().load(Relaxed));
        let due = if shared {
            lasts(lasting) || (one_flow && lasts(self.config.stuck_after * PATIENCES))
        } else {
            one_flow && lasts(lasting)
        };
        let mut others = samples
            .iter()
            .enumerate()
            .filter(|(other, _)| *other != slot);
        due && others.any(|(other, one)| judge::idle(one, || self.probe(other)))
    }

    fn note_heavy(&mut self, slot: usize, shared: bool) {
        let place = self.dispatcher.table().slot(slot);
        let home = place.heavy_home().load(Relaxed);
        if shared {
            match self.dispatcher.pinned().spread(slot, home) {
                Ok(true) => {}
                Ok(false) => return, // it is elsewhere by now
                Err(error) => return tracing::debug!("a flow stays with slot {slot}: {error}"),
            }
            // Another flow may be heavy too: it shows after this one has gone.
            self.slots[slot].backlog = Default::default();
        }
        if !self.heavy.note(home, Instant::now()) {
            return;
        }
        self.note(if shared {
            "one client sends more datagrams than a worker can read: its flow is spread over all workers, as by the \
             shared socket (--affinity flow keeps it together)"
                .to_owned()
        } else {
            format!(
                "one client sends most of the datagrams, and worker {slot} alone cannot read them while others are idle: \
                 if each datagram stands for itself, --affinity none spreads them"
            )
        });
    }

    /// Forgets the flows that are not heavy any more, and publishes how many are.
    fn forget_light(&mut self) {
        let pinned = self.dispatcher.pinned();
        let heavy = self
            .heavy
            .keep(Instant::now(), |home| pinned.is_spread(home));
        let count = heavy as u32;
        let published = self.dispatcher.table().heavy_flows();
        if published.load(Relaxed) != count {
            published.store(count, Relaxed);
        }
    }
}
