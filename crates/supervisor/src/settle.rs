//! Waits until connections no longer arrive: the queues are empty, and stay so for a moment.

use std::time::{Duration, Instant};

/// How long queues must be empty before a worker without open connections is asked to end. A handshake that was under
/// way when the slot began to drain still ends in its queue, a round trip later.
pub const SETTLE: Duration = Duration::from_millis(100);

/// The same for a worker with open connections. Some servers drop connections that they have accepted and not yet
/// read when they are told to end. asyncio does so in the turn of its loop in which its listener is closed
/// (`Server._attach` asserts that it is open). gunicorn's gthread drops every connection that has sent nothing yet.
/// Waiting for longer is of no use: connections kept alive would stay for ever.
pub const LINGER: Duration = Duration::from_secs(1);

/// A wait for queues to settle, with a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settling {
    until: Instant,
    empty_since: Option<Instant>,
}

impl Settling {
    /// Waits until this time at the latest.
    pub fn until(until: Instant) -> Self {
        Self {
            until,
            empty_since: None,
        }
    }

    /// Whether the wait is over, with this many connections queued and open now.
    pub fn is_over(&mut self, now: Instant, queued: u32, active: u64) -> bool {
        let since = if queued == 0 {
            self.empty_since.unwrap_or(now)
        } else {
            now
        };
        self.empty_since = (queued == 0).then_some(since);
        let enough = if active == 0 { SETTLE } else { LINGER };
        now >= self.until || (queued == 0 && now.duration_since(since) >= enough)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays (ms, connections queued, connections open, whether it is over) with 5 s to wait.
    fn play(script: &[(u64, u32, u64, bool)]) {
        let start = Instant::now();
        let mut settling = Settling::until(start + Duration::from_secs(5));
        for &(at_ms, queued, active, over) in script {
            let now = start + Duration::from_millis(at_ms);
            assert_eq!(settling.is_over(now, queued, active), over, "at {at_ms} ms");
        }
    }

    #[test]
    fn queues_must_stay_empty_for_a_moment() {
        play(&[
            (0, 2, 2, false),
            (10, 0, 0, false),
            (50, 1, 1, false),
            (60, 0, 0, false),
            (159, 0, 0, false),
            (160, 0, 0, true),
        ]);
    }

    #[test]
    fn open_connections_are_waited_for_a_little_longer() {
        play(&[(0, 0, 3, false), (500, 0, 1, false), (600, 0, 0, true)]);
        play(&[(0, 0, 3, false), (999, 0, 3, false), (1000, 0, 3, true)]);
    }

    #[test]
    fn queues_that_stay_full_are_not_waited_for_longer() {
        play(&[(4999, 9, 9, false), (5000, 9, 9, true)]);
    }
}
