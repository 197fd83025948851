//! Whether a count is wrong, told from recounts that take time while connections come and go.

/// A slot's counters at one moment: those that only grow are read before `active`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CountSample {
    /// Connections that came: established there, or moved there.
    pub came: u64,
    /// Connections that went: closed, or moved away.
    pub went: u64,
    /// The count of open connections.
    pub active: i64,
}

/// The least and the greatest number by which a slot's count may be too large, as the recounts so far tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drift {
    least: i64,
    most: i64,
    /// Recounts that agree.
    passes: u32,
}

impl Default for Drift {
    fn default() -> Self {
        Self {
            least: i64::MIN,
            most: i64::MAX,
            passes: 0,
        }
    }
}

/// So many recounts must agree that a count is wrong: a walk over all sockets may pass over one, or meet it twice.
const AGREE: u32 = 2;

impl Drift {
    /// Notes a recount that found `open` connections. `before` was read before it, and `after` when it had ended. `ended` is how
    /// many connections it may have counted here that another slot counted before, as they had been moved there, and that then
    /// went from there. Returns what to add to the count now, if that is certainly wrong.
    pub fn see(
        &mut self,
        before: CountSample,
        after: CountSample,
        open: i64,
        ended: i64,
    ) -> Option<i64> {
        let came = i64::try_from(after.came.saturating_sub(before.came)).unwrap_or(i64::MAX);
        let went = i64::try_from(after.went.saturating_sub(before.went)).unwrap_or(i64::MAX);
        let seen = before.active.saturating_sub(open);
        // A recount may miss connections that went meanwhile, and may have found those that came, or that went elsewhere.
        let most = seen.saturating_add(came).saturating_add(ended);
        let least = seen.saturating_sub(went);
        if least > self.most || most < self.least {
            // It is another drift than before.
            *self = Self::default();
        }
        self.least = self.least.max(least);
        self.most = self.most.min(most);
        self.passes += 1;
        let excess = match (self.least, self.most) {
            (least, _) if least > 0 => least,
            (_, most) if most < 0 => most,
            _ => 0,
        };
        if excess == 0 {
            // A drift may come at any time. The bounds of the last moment do not hold for it.
            *self = Self::default();
            return None;
        }
        if self.passes < AGREE {
            return None;
        }
        *self = Self::default();
        Some(-excess)
    }

    /// Whether another recount is needed soon.
    pub fn is_suspected(&self) -> bool {
        self.passes > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn sample(came: u64, went: u64, active: i64) -> CountSample {
        CountSample { came, went, active }
    }

    #[test]
    fn a_drift_of_a_quiet_slot_is_mended_when_two_recounts_agree() {
        let mut drift = Drift::default();
        let still = sample(10, 5, 8);
        assert_eq!(drift.see(still, still, 5, 0), None);
        assert!(drift.is_suspected());
        assert_eq!(drift.see(still, still, 5, 0), Some(-3));
        assert!(!drift.is_suspected());
        let below = sample(10, 5, -2);
        assert_eq!(drift.see(below, below, 0, 0), None);
        assert_eq!(drift.see(below, below, 0, 0), Some(2));
    }

    #[test]
    fn a_busy_slot_is_mended_by_what_is_certain() {
        let mut drift = Drift::default();
        // 20 too many; 4 came and 6 went meanwhile.
        assert_eq!(
            drift.see(sample(100, 90, 30), sample(104, 96, 28), 8, 0),
            None
        );
        assert_eq!(
            drift.see(sample(200, 190, 30), sample(202, 191, 31), 11, 0),
            Some(-18)
        );
        // The rest is smaller than what comes and goes in a recount. It is found when less does.
        assert_eq!(
            drift.see(sample(300, 290, 12), sample(302, 292, 12), 10, 0),
            None
        );
        assert!(!drift.is_suspected());
        assert_eq!(
            drift.see(sample(400, 390, 12), sample(400, 390, 12), 10, 0),
            None
        );
        assert_eq!(
            drift.see(sample(400, 390, 12), sample(400, 390, 12), 10, 0),
            Some(-2)
        );
    }

    #[test]
    fn right_counts_are_left_alone_whatever_comes_and_goes() {
        proptest::proptest!(|(events in proptest::collection::vec((0_i64..5, 0_i64..5, 0_i64..5, 0_i64..5), 1..50))| {
            let mut drift = Drift::default();
            let (mut came, mut went) = (0_i64, 0_i64);
            for (in_early, out_early, in_late, out_late) in events {
                let open = came - went;
                let before = sample(came as u64, went as u64, open);
                let out_early = out_early.min(open + in_early);
                let out_late = out_late.min(open + in_early - out_early + in_late);
                // The recount finds what came before it passed, without what went by then.
                let found = open + in_early - out_early;
                came += in_early + in_late;
                went += out_early + out_late;
                let after = sample(came as u64, went as u64, came - went);
                proptest::prop_assert_eq!(drift.see(before, after, found, 0), None);
            }
        });
    }

    /// Connections to two workers, with their counts and notes as the programs keep them.
    #[derive(Default)]
    struct Group {
        open: Vec<Connection>,
        counts: [CountSample; 2],
        born: usize,
    }

    struct Connection {
        id: usize,
        /// The part of the table of sockets in which a walk finds it.
        bucket: usize,
        tag: usize,
        at: usize,
        noted: bool,
    }

    const BUCKETS: usize = 3;

    impl Group {
        /// One connection comes, is moved to the other worker, or goes.
        fn happens(&mut self, (what, which): (u8, usize)) {
            let at = which % self.open.len().max(1);
            match (what, self.open.is_empty()) {
                (1, false) => {
                    let one = &mut self.open[at];
                    let from = one.at;
                    one.at = 1 - from;
                    one.noted = true;
                    self.counts[from].went += 1;
                    self.counts[from].active -= 1;
                    self.counts[1 - from].came += 1;
                    self.counts[1 - from].active += 1;
                }
                (2, false) => {
                    let from = self.open.swap_remove(at).at;
                    self.counts[from].went += 1;
                    self.counts[from].active -= 1;
                }
                _ => {
                    let slot = which % 2;
                    let (id, bucket) = (self.born, self.born % BUCKETS);
                    self.born += 1;
                    let (tag, at, noted) = (slot, slot, false);
                    self.open.push(Connection {
                        id,
                        bucket,
                        tag,
                        at,
                        noted,
                    });
                    self.counts[slot].came += 1;
                    self.counts[slot].active += 1;
                }
            }
        }

        /// The notes: of each connection that is not where it was born, both places.
        fn notes(&self) -> BTreeMap<usize, (usize, usize)> {
            let moved = self
                .open
                .iter()
                .filter(|one| one.noted && one.at != one.tag);
            moved.map(|one| (one.id, (one.tag, one.at))).collect()
        }
    }

    #[test]
    fn right_counts_are_left_alone_while_queues_are_moved() {
        let events = proptest::collection::vec((0_u8..3, 0_usize..8), 0..6);
        let recount = proptest::collection::vec(events, BUCKETS + 3);
        proptest::proptest!(|(recounts in proptest::collection::vec(recount, 1..12))| {
            let (mut group, mut drifts) = (Group::default(), [Drift::default(); 2]);
            for steps in recounts {
                let mut steps = steps.into_iter();
                let mut pass = |group: &mut Group| {
                    for event in steps.next().unwrap_or_default() {
                        group.happens(event);
                    }
                };
                let before = group.counts;
                pass(&mut group);
                let noted = group.notes();
                let mut found = [0_i64; 2];
                for bucket in 0..BUCKETS {
                    pass(&mut group);
                    for one in group.open.iter().filter(|one| one.bucket == bucket) {
                        found[one.tag] += 1;
                    }
                }
                pass(&mut group);
                let left = group.notes();
                for (from, to) in left.values() {
                    found[*from] -= 1;
                    found[*to] += 1;
                }
                pass(&mut group);
                for slot in 0..2 {
                    let ended = noted.iter().filter(|(id, note)| note.0 == slot && !left.contains_key(id));
                    let ended = ended.count() as i64;
                    let mended = drifts[slot].see(before[slot], group.counts[slot], found[slot], ended);
                    proptest::prop_assert_eq!(mended, None);
                }
            }
        });
    }

    #[test]
    fn a_single_slip_of_a_walk_is_forgotten() {
        let mut drift = Drift::default();
        let still = sample(10, 5, 5);
        assert_eq!(drift.see(still, still, 4, 0), None);
        assert_eq!(drift.see(still, still, 5, 0), None);
        assert_eq!(drift.see(still, still, 6, 0), None);
        assert_eq!(drift.see(still, still, 5, 0), None);
    }
}
