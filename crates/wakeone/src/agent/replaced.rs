//! The agent stands aside when another program chooses for its group, or none.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use wakeone_kernel::bpf::table::flag;
use wakeone_model::judge::SlotSample;

use super::state::Core;

/// Handshakes that began before the program ran last have ended by then.
const HANDSHAKES_END: Duration = Duration::from_secs(2);
/// As many connections without a run of the program show that it is not asked any more.
const UNASKED: u64 = 8;

/// How often the program ran, and how many connections came since.
#[derive(Debug, Default)]
pub(super) struct Runs {
    /// The attached program can be seen, so nothing has to be inferred.
    pub seen: bool,
    runs: u64,
    /// When the number of runs last changed.
    changed: Option<Instant>,
    /// Connections established by the time when no handshake was left.
    established: Option<u64>,
}

impl Runs {
    /// Whether the program is asked for connections; `None` if too few came to tell.
    fn note(&mut self, now: Instant, runs: u64, established: u64) -> Option<bool> {
        let changed = *self.changed.get_or_insert(now);
        if std::mem::replace(&mut self.runs, runs) != runs {
            self.changed = Some(now);
            self.established = None;
            return Some(true);
        }
        if now.duration_since(changed) < HANDSHAKES_END {
            return None;
        }
        let before = *self.established.get_or_insert(established);
        (established.saturating_sub(before) >= UNASKED).then_some(false)
    }
}

impl Core {
    /// Notes whether our program chooses, as the kernel tells.
    pub fn see_chooser(&mut self, ours: bool) {
        self.runs.seen = true;
        self.set_replaced(!ours);
    }

    /// Infers it where the kernel does not tell: connections are counted that the program was not asked for.
    pub(super) fn infer_chooser(&mut self) {
        if self.runs.seen || !self.dispatcher.counting() {
            return;
        }
        let table = self.dispatcher.table();
        let runs = self.placed() + table.exits().iter().sum::<u64>();
        let slots = (0..self.slots.len()).map(|slot| table.slot(slot));
        let established: u64 = slots.map(|slot| slot.established().load(Relaxed)).sum();
        if let Some(ours) = self.runs.note(Instant::now(), runs, established) {
            self.set_replaced(!ours);
        }
    }

    fn set_replaced(&mut self, replaced: bool) {
        if !self.dispatcher.set_replaced(replaced) {
            return;
        }
        self.note(match replaced {
            true => "not steered any more: the server has set a program of its own on the group, or taken ours away; nothing is marked or moved, and a detach leaves its program alone".into(),
            false => "steered again by our program".into(),
        });
    }

    /// Takes all marks away: they are of no use, and nobody would.
    pub(super) fn stand_aside(&mut self, samples: &[SlotSample]) {
        let now = self.now_ns();
        for slot in 0..samples.len() {
            match self.slots[slot].history.stuck_since_ns {
                Some(since) => self.resume(slot, now, since),
                None => self.mark(slot, flag::STUCK, false),
            }
            self.slots[slot].avoided = None;
        }
        self.answer_requests(samples);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_not_asked_for_counted_connections_is_not_ours() {
        let (mut runs, start) = (Runs::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(runs.note(at(0), 0, 0), None);
        assert_eq!(runs.note(at(10), 5, 4), Some(true));
        // Handshakes end that began before.
        assert_eq!(runs.note(at(20), 5, 50), None);
        assert_eq!(runs.note(at(2_100), 5, 100), None);
        assert_eq!(runs.note(at(2_200), 5, 107), None);
        assert_eq!(runs.note(at(2_300), 5, 108), Some(false));
        assert_eq!(runs.note(at(2_400), 6, 109), Some(true));
        // Silence tells nothing.
        assert_eq!(runs.note(at(9_000), 6, 109), None);
        assert_eq!(runs.note(at(99_000), 6, 110), None);
    }
}
