//! Waiting until connections no longer arrive: the queues are empty, and stay so for a moment.

use std::time::{Duration, Instant};

/// How long queues must have been empty before a worker is asked to end.
///
/// A handshake under way when the slot began to drain still ends in its queue, a round trip later. And a server that
/// has just accepted needs a moment to get hold of the connection: asyncio drops those that it accepted in the very
/// turn of its loop in which its listener is closed (`Server._attach` asserts that it is open).
pub const SETTLE: Duration = Duration::from_millis(100);

/// A wait for queues to settle, not for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settling {
    until: Instant,
    empty_since: Option<Instant>,
}

impl Settling {
    /// Waits until then at the latest.
    pub fn until(until: Instant) -> Self {
        Self {
            until,
            empty_since: None,
        }
    }

    /// Whether the wait is over, with so many connections queued now.
    pub fn is_over(&mut self, now: Instant, queued: u32) -> bool {
        self.empty_since = if queued == 0 {
            self.empty_since.or(Some(now))
        } else {
            None
        };
        now >= self.until
            || self
                .empty_since
                .is_some_and(|since| now.duration_since(since) >= SETTLE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_must_stay_empty_for_a_moment() {
        let start = Instant::now();
        let mut settling = Settling::until(start + Duration::from_secs(5));
        let script = [
            (0, 2, false),
            (10, 0, false),
            (50, 1, false),
            (60, 0, false),
            (159, 0, false),
            (160, 0, true),
        ];
        for (at_ms, queued, over) in script {
            assert_eq!(
                settling.is_over(start + Duration::from_millis(at_ms), queued),
                over,
                "at {at_ms} ms"
            );
        }
    }

    #[test]
    fn queues_that_stay_full_are_not_waited_for_longer() {
        let start = Instant::now();
        let mut settling = Settling::until(start + Duration::from_secs(5));
        assert!(!settling.is_over(start + Duration::from_millis(4999), 9));
        assert!(settling.is_over(start + Duration::from_secs(5), 9));
    }
}
