//! The flows that lately had more datagrams than one worker can read.

use std::time::{Duration, Instant};

/// How long a flow counts as heavy since that was last seen.
const KEPT: Duration = Duration::from_secs(10);

/// The heavy flows of a group.
#[derive(Debug, Default)]
pub(super) struct HeavyFlows {
    /// The home of each, and when it was last seen heavy.
    seen: Vec<(u32, Instant)>,
    told: bool,
}

impl HeavyFlows {
    /// Notes a heavy flow. Returns whether it is the first one ever.
    pub fn note(&mut self, home: u32, now: Instant) -> bool {
        self.seen.retain(|(known, _)| *known != home);
        self.seen.push((home, now));
        !std::mem::replace(&mut self.told, true)
    }

    /// Forgets those that are not heavy any more, and returns how many are. A flow that is spread is heavy for as long as it is in
    /// use.
    pub fn keep(&mut self, now: Instant, is_spread: impl Fn(u32) -> bool) -> usize {
        self.seen.retain_mut(|(home, seen)| {
            if now.duration_since(*seen) < KEPT {
                return true;
            }
            *seen = now;
            is_spread(*home)
        });
        self.seen.len()
    }
}
