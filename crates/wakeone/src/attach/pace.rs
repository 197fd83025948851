//! How often a group is looked at.

use std::time::{Duration, Instant};

/// A group counts as quiet after so long without a connection.
const QUIET_AFTER: Duration = Duration::from_secs(1);
/// How often to look at the sockets of a group that gets connections, if new ones are noticed at once.
const FOLLOW: Duration = Duration::from_millis(500);
/// How often to look at the sockets of a quiet group, and at its workers. The end of a process is noticed at once, and whoever sends
/// something ends the quiet. The second value if new sockets are noticed at once as well.
const QUIET_FOLLOW: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(3));
pub(super) const QUIET_WORKERS: Duration = Duration::from_secs(10);
/// A group is looked at after this part of the time to its next look if others are looked at then.
const EARLY: f64 = 0.75;

/// How often a group is looked at: seldom while it gets no connections.
#[derive(Debug)]
pub(super) struct Pace {
    /// Connections placed in it so far.
    placed: u64,
    changed: Instant,
    followed: Instant,
    every: Duration,
}

impl Pace {
    pub fn new() -> Self {
        let now = Instant::now();
        Self {
            placed: 0,
            changed: now,
            followed: now,
            every: Duration::ZERO,
        }
    }

    /// Whether no connection came for a while; `placed` is the number so far.
    pub fn is_quiet(&mut self, placed: u64, now: Instant) -> bool {
        if std::mem::replace(&mut self.placed, placed) != placed {
            self.changed = now;
        }
        now.duration_since(self.changed) >= QUIET_AFTER
    }

    /// Whether no connection had come for a while at the last look.
    pub fn was_quiet(&self) -> bool {
        self.changed.elapsed() >= QUIET_AFTER
    }

    /// Whether it is time to look at the sockets; notes the look as taken. `noticed`: new ones are noticed without a look.
    pub fn is_due(&mut self, quiet: bool, noticed: bool, now: Instant) -> bool {
        self.every = match (quiet, noticed) {
            (true, true) => QUIET_FOLLOW.1,
            (true, false) => QUIET_FOLLOW.0,
            (false, true) => FOLLOW,
            (false, false) => Duration::ZERO,
        };
        self.is_after(self.every, now)
    }

    /// The same while other groups are looked at, which reads much of what this look needs. So groups that were attached to one
    /// after the other are soon looked at together.
    pub fn is_due_with_others(&mut self, now: Instant) -> bool {
        self.is_after(self.every.mul_f64(EARLY), now)
    }

    fn is_after(&mut self, time: Duration, now: Instant) -> bool {
        let due = now.duration_since(self.followed) >= time;
        if due {
            self.followed = now;
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_looked_at_seldom_while_nothing_comes_to_it() {
        let mut pace = Pace::new();
        let start = pace.changed;
        let at = |ms| start + Duration::from_millis(ms);
        // Until it counts as quiet, each look is due, or two a second where new sockets are noticed.
        assert!(!pace.is_quiet(0, at(50)) && pace.is_due(false, false, at(50)));
        assert!(!pace.is_quiet(0, at(100)) && pace.is_due(false, false, at(100)));
        let due = (1..=20).filter(|n| pace.is_due(false, true, at(100 + n * 50)));
        assert_eq!(due.count(), 2);
        assert!(pace.is_quiet(0, at(4_100)) && pace.is_due(true, true, at(4_100)));
        let due = (1..20).filter(|n| pace.is_due(true, false, at(4_100 + n * 50)));
        assert_eq!(due.count(), 3);
        let due = (20..150).filter(|n| pace.is_due(true, true, at(4_100 + n * 50)));
        assert_eq!(due.count(), 2);
        // Where others are looked at, it is looked at a bit sooner.
        assert!(pace.is_due(true, true, at(13_850)) && !pace.is_due_with_others(at(16_050)));
        assert!(pace.is_due_with_others(at(16_100)) && !pace.is_due(true, true, at(19_050)));
        // The first connection ends that.
        assert!(!pace.is_quiet(1, at(19_100)) && pace.is_due(false, false, at(19_100)));
        assert!(!pace.is_quiet(1, at(19_650)) && pace.is_due(false, true, at(19_650)));
    }
}
