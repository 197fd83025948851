//! How long to wait before a worker that ended is started again.

use std::time::Duration;

/// The first delay of a worker that ends too soon; each further one doubles it.
pub const FIRST: Duration = Duration::from_millis(100);
/// No delay is longer than this (before jitter).
pub const CAP: Duration = Duration::from_secs(30);
/// A worker that ran this long is not in a crash loop: it is restarted at once, and its failures are forgotten.
pub const STABLE: Duration = Duration::from_secs(10);
/// Delays are spread by this share in both directions, so that slots that fail together do not return together.
pub const JITTER: f64 = 0.2;

/// The recent failures of one slot.
///
/// Each second that a worker runs forgives one earlier failure. A worker that is killed now and then returns fast;
/// one that dies as soon as it starts is tried less and less often.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Backoff {
    failures: u32,
}

impl Backoff {
    /// The delay before the next start, after a worker ran for `ran`. `jitter` is a random number in -1.0 ..= 1.0.
    pub fn after(&mut self, ran: Duration, jitter: f64) -> Duration {
        if ran >= STABLE {
            self.failures = 0;
            return Duration::ZERO;
        }
        let forgiven = u32::try_from(ran.as_secs()).unwrap_or(u32::MAX);
        self.failures = self.failures.saturating_sub(forgiven).saturating_add(1);
        let doublings = (self.failures - 1).min(20);
        let delay = CAP.min(FIRST * 2u32.pow(doublings));
        delay.mul_f64(1.0 + JITTER * jitter.clamp(-1.0, 1.0))
    }

    /// Failures in a row that are not forgiven.
    pub fn failures(&self) -> u32 {
        self.failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn delays_follow_the_table() {
        // each row: how long the worker ran each time, and the delay that followed
        let table: &[&[(u64, u64)]] = &[
            &[
                (0, 100),
                (0, 200),
                (0, 400),
                (0, 800),
                (0, 1600),
                (0, 3200),
                (0, 6400),
                (0, 12800),
                (0, 25600),
                (0, 30000),
                (0, 30000),
            ],
            &[(10_000, 0), (20_000, 0)],
            &[(0, 100), (0, 200), (10_000, 0), (0, 100)],
            &[(2000, 100), (2000, 100), (2000, 100)],
            &[(0, 100), (0, 200), (0, 400), (2000, 200), (9000, 100)],
            &[(999, 100), (999, 200), (1000, 200), (1000, 200)],
        ];
        for row in table {
            let mut backoff = Backoff::default();
            for (step, &(ran, delay)) in row.iter().enumerate() {
                assert_eq!(
                    backoff.after(ms(ran), 0.0),
                    ms(delay),
                    "step {step} of {row:?}"
                );
            }
        }
    }

    #[test]
    fn jitter_stays_within_a_fifth() {
        for (jitter, least, most) in [
            (-1.0, 80, 80),
            (1.0, 120, 120),
            (0.5, 110, 110),
            (-9.0, 80, 80),
            (9.0, 120, 120),
        ] {
            let delay = Backoff::default().after(ms(0), jitter);
            assert!(
                delay >= ms(least) && delay <= ms(most),
                "{jitter}: {delay:?}"
            );
        }
    }

    #[test]
    fn a_million_failures_do_not_overflow() {
        let mut backoff = Backoff {
            failures: u32::MAX - 1,
        };
        assert_eq!(backoff.after(ms(0), 0.0), CAP);
        assert_eq!(backoff.after(ms(0), 0.0), CAP);
        assert_eq!(backoff.failures(), u32::MAX);
    }
}
