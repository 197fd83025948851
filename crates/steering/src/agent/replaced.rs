//! The agent stands aside when another program chooses for its group, or none.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use wakeone_bpf::table::flag;
use wakeone_model::judge::SlotSample;

use super::state::Core;

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
