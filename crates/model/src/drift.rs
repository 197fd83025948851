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
    /// Notes a recount that found `open` connections. `before` was read before it, and `after` when it had ended. Returns
    /// what to add to the count now, if that is certainly wrong.
    pub fn see(&mut self, before: CountSample, after: CountSample, open: i64) -> Option<i64> {
        let came = i64::try_from(after.came.saturating_sub(before.came)).unwrap_or(i64::MAX);
        let went = i64::try_from(after.went.saturating_sub(before.went)).unwrap_or(i64::MAX);
        let seen = before.active.saturating_sub(open);
        // A recount may miss connections that went meanwhile, and may have found those that came.
        let (least, most) = (seen.saturating_sub(went), seen.saturating_add(came));
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

    fn sample(came: u64, went: u64, active: i64) -> CountSample {
        CountSample { came, went, active }
    }

    #[test]
    fn a_drift_of_a_quiet_slot_is_mended_when_two_recounts_agree() {
        let mut drift = Drift::default();
        let still = sample(10, 5, 8);
        assert_eq!(drift.see(still, still, 5), None);
        assert!(drift.is_suspected());
        assert_eq!(drift.see(still, still, 5), Some(-3));
        assert!(!drift.is_suspected());
        let below = sample(10, 5, -2);
        assert_eq!(drift.see(below, below, 0), None);
        assert_eq!(drift.see(below, below, 0), Some(2));
    }

    #[test]
    fn a_busy_slot_is_mended_by_what_is_certain() {
        let mut drift = Drift::default();
        // 20 too many; 4 came and 6 went meanwhile.
        assert_eq!(drift.see(sample(100, 90, 30), sample(104, 96, 28), 8), None);
        assert_eq!(
            drift.see(sample(200, 190, 30), sample(202, 191, 31), 11),
            Some(-18)
        );
        // The rest is smaller than what comes and goes in a recount. It is found when less does.
        assert_eq!(
            drift.see(sample(300, 290, 12), sample(302, 292, 12), 10),
            None
        );
        assert!(!drift.is_suspected());
        assert_eq!(
            drift.see(sample(400, 390, 12), sample(400, 390, 12), 10),
            None
        );
        assert_eq!(
            drift.see(sample(400, 390, 12), sample(400, 390, 12), 10),
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
                proptest::prop_assert_eq!(drift.see(before, after, found), None);
            }
        });
    }

    #[test]
    fn a_single_slip_of_a_walk_is_forgotten() {
        let mut drift = Drift::default();
        let still = sample(10, 5, 5);
        assert_eq!(drift.see(still, still, 4), None);
        assert_eq!(drift.see(still, still, 5), None);
        assert_eq!(drift.see(still, still, 6), None);
        assert_eq!(drift.see(still, still, 5), None);
    }
}
