//! Whether the program is asked for connections: how often it ran, and how many connections came since.

use std::time::{Duration, Instant};

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
    pub fn note(&mut self, now: Instant, runs: u64, established: u64) -> Option<bool> {
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
