//! A pause between two looks that grows with the time for which nothing has changed.

use std::time::{Duration, Instant};

/// The longest pause. A change in it is seen so much later.
const LONGEST: Duration = Duration::from_millis(10);

/// Since when nothing has changed, and until when not to look again.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pause {
    since: Instant,
    until: Instant,
}

impl Pause {
    /// Something has changed now: no pause.
    pub fn none(now: Instant) -> Self {
        Self {
            since: now,
            until: now,
        }
    }

    /// Nothing has changed still: pauses for this part of the time since.
    pub fn grow(&mut self, now: Instant, part: u32) {
        self.until = now + (now.duration_since(self.since) / part).min(LONGEST);
    }

    /// Whether it is too early to look.
    pub fn lasts(&self, now: Instant) -> bool {
        now < self.until
    }

    /// Whether nobody has looked for so long after it that whatever was seen before says nothing.
    pub fn is_stale(&self, now: Instant) -> bool {
        now >= self.until + LONGEST
    }
}
