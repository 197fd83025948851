//! Whether one flow is more than the worker of a UDP socket can read.

/// Fewer datagrams than these prove nothing.
const FEWEST: u64 = 16;

/// How long a worker had datagrams waiting at each look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Backlog {
    since_ns: Option<u64>,
    /// The datagrams that were placed before.
    placed: u64,
}

impl Backlog {
    /// Notes a look: whether datagrams wait, and how many were placed so far. Returns whether a backlog begins.
    pub fn note(&mut self, now_ns: u64, waits: bool, placed: u64) -> bool {
        let begins = waits && self.since_ns.is_none();
        if begins {
            self.placed = placed;
        }
        self.since_ns = waits.then(|| self.since_ns.unwrap_or(now_ns));
        begins
    }

    /// Whether the worker has a backlog for so long.
    pub fn lasts(&self, now_ns: u64, patience_ns: u64) -> bool {
        self.since_ns
            .is_some_and(|since| now_ns.saturating_sub(since) >= patience_ns)
    }

    /// Whether one flow has most of the datagrams since the backlog began. `lead`: how many more it had than all others.
    pub fn is_one_flow(&self, placed: u64, lead: u32) -> bool {
        let came = placed.saturating_sub(self.placed);
        came >= FEWEST && 2 * u64::from(lead) > came
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backlog_lasts_until_a_look_finds_nothing() {
        let mut backlog = Backlog::default();
        assert!(!backlog.note(10, false, 5) && !backlog.lasts(10, 0));
        assert!(backlog.note(20, true, 9));
        assert!(!backlog.note(30, true, 12));
        assert!(backlog.lasts(30, 10) && !backlog.lasts(30, 11));
        assert!(!backlog.note(40, false, 13) && !backlog.lasts(50, 0));
        assert!(backlog.note(60, true, 14), "another one");
        assert!(backlog.lasts(60, 0) && !backlog.lasts(60, 1));
    }

    #[test]
    fn one_flow_has_most_of_many_datagrams() {
        let mut backlog = Backlog::default();
        backlog.note(1, true, 100);
        for (placed, lead, one) in [
            (116, 16, true),
            (115, 15, false),
            (116, 8, false),
            (116, 9, true),
            (1_100, 600, true),
            (1_100, 3, false),
            (90, 50, false),
        ] {
            assert_eq!(backlog.is_one_flow(placed, lead), one, "{placed} {lead}");
        }
    }
}
