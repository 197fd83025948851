//! When the queue of a slot may be moved: after the handshakes that are under way there, and for a bounded share of the
//! time.

/// The kernel resets a connection whose handshake ends on another CPU while the listener is shut down
/// (net/ipv4/inet_connection_sock.c, `inet_csk_reqsk_queue_add`). On loopback all end within this.
pub const SETTLED_NS: u64 = 300_000;
/// How long handshakes are expected to take where nobody measures them.
const UNMEASURED_NS: u64 = 10_000_000;
/// A slot is not waited for longer, however far away its clients are.
pub const LONGEST_WAIT_NS: u64 = 50_000_000;

/// How long to wait after the last SYN of a slot. `round_trip_ns`: the longest handshake of late, where they are measured.
pub fn wait_ns(round_trip_ns: Option<u64>) -> u64 {
    let expected = round_trip_ns.map_or(UNMEASURED_NS, |longest| longest.saturating_mul(3) / 2);
    expected.saturating_add(SETTLED_NS).min(LONGEST_WAIT_NS)
}

/// The longest round trip of late, a second later: it is forgotten by and by.
pub fn decayed(round_trip_us: u32) -> u32 {
    round_trip_us - round_trip_us.div_ceil(4)
}

/// When a slot was last given a connection, as far as could be seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Arrivals {
    selected: u64,
    last_ns: u64,
}

impl Arrivals {
    /// Notes how often the slot was chosen so far.
    pub fn see(&mut self, now_ns: u64, selected: u64) {
        if selected != self.selected {
            *self = Self {
                selected,
                last_ns: now_ns,
            };
        }
    }

    /// The time from which on no handshake is under way in a slot that is avoided since `avoided_ns`.
    pub fn quiet_ns(&self, avoided_ns: u64, wait_ns: u64) -> u64 {
        let ended = self.last_ns.saturating_add(wait_ns);
        ended.clamp(avoided_ns + SETTLED_NS, avoided_ns + LONGEST_WAIT_NS)
    }
}

/// Moves may take one part in this many of the time: each holds up new connections of its port
/// (net/ipv4/inet_connection_sock.c, `inet_csk_bind_conflict`, walks all sockets of the port under a lock).
const SHARE: u64 = 100;
/// The most that is saved up while there is nothing to move, in ns: a second's worth.
const MOST_SAVED_NS: i64 = 10_000_000;

/// The time that a group's moves may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    saved_ns: i64,
    at_ns: u64,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            saved_ns: MOST_SAVED_NS,
            at_ns: 0,
        }
    }
}

impl Budget {
    /// Whether a move may begin. How long it takes is known only afterwards, so it may leave a debt.
    pub fn allows(&mut self, now_ns: u64) -> bool {
        let passed = now_ns.saturating_sub(self.at_ns);
        // The remainder of the division is not lost: the moment advances by the counted part only.
        let earned = passed / SHARE;
        self.at_ns += earned * SHARE;
        let earned = i64::try_from(earned).unwrap_or(i64::MAX);
        self.saved_ns = self.saved_ns.saturating_add(earned).min(MOST_SAVED_NS);
        self.saved_ns > 0
    }

    /// A move took this long.
    pub fn spend(&mut self, took_ns: u64) {
        let took = i64::try_from(took_ns).unwrap_or(i64::MAX);
        self.saved_ns = self.saved_ns.saturating_sub(took);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const SECOND: u64 = 1_000 * MS;

    #[test]
    fn handshakes_are_waited_for_as_long_as_they_take_of_late() {
        assert_eq!(wait_ns(Some(0)), SETTLED_NS);
        assert_eq!(wait_ns(Some(10 * MS)), 15 * MS + SETTLED_NS);
        assert_eq!(wait_ns(Some(SECOND)), LONGEST_WAIT_NS);
        assert_eq!(wait_ns(Some(u64::MAX)), LONGEST_WAIT_NS);
        assert!(wait_ns(None) > SETTLED_NS);
    }

    #[test]
    fn a_long_round_trip_is_forgotten_in_the_end() {
        let mut longest = u32::MAX;
        for _ in 0..100 {
            longest = decayed(longest);
        }
        assert_eq!(longest, 0);
        assert_eq!(decayed(1000), 750, "by a quarter each time");
    }

    #[test]
    fn a_slot_is_quiet_when_its_last_handshake_has_ended() {
        let mut arrivals = Arrivals::default();
        arrivals.see(100 * MS, 7);
        arrivals.see(200 * MS, 7);
        for (name, avoided, wait, quiet) in [
            (
                "the last SYN was long ago",
                200 * MS,
                15 * MS,
                200 * MS + SETTLED_NS,
            ),
            ("it came just now", 101 * MS, 15 * MS, 115 * MS),
            (
                "clients are far away",
                100 * MS,
                SECOND,
                100 * MS + LONGEST_WAIT_NS,
            ),
        ] {
            assert_eq!(arrivals.quiet_ns(avoided, wait), quiet, "{name}");
        }
        arrivals.see(210 * MS, 8);
        assert_eq!(arrivals.quiet_ns(209 * MS, 15 * MS), 225 * MS);
    }

    #[test]
    fn however_long_moves_take_they_have_a_hundredth_of_the_time() {
        for took in [50_000, 2 * MS, 9 * MS, 300 * MS] {
            let mut budget = Budget::default();
            let (mut now, mut spent) = (0, 0);
            while now < 100 * SECOND {
                if budget.allows(now) {
                    budget.spend(took);
                    spent += took;
                    now += took;
                }
                now += MS;
            }
            let allowed = now / SHARE + took + 10 * MS;
            assert!(spent <= allowed, "{spent} of {allowed} for {took}");
            // Nor much less than that where there is always something to move.
            assert!(spent >= (now / SHARE).min(now / MS * took / 2), "{spent}");
        }
    }

    #[test]
    fn nothing_is_saved_up_for_longer_than_a_second() {
        let mut budget = Budget::default();
        assert!(budget.allows(1_000 * SECOND));
        budget.spend(10 * MS);
        assert!(!budget.allows(1_000 * SECOND), "all of it is spent");
        budget.spend(MS);
        assert!(!budget.allows(1_000 * SECOND));
        assert!(!budget.allows(1_000 * SECOND + 99 * MS));
        assert!(budget.allows(1_000 * SECOND + 101 * MS));
    }

    #[test]
    fn a_clock_asked_often_loses_nothing() {
        let mut budget = Budget::default();
        budget.spend(11 * MS);
        let first = (0..2_000_000)
            .map(|n| n * 99)
            .find(|now| budget.allows(*now));
        assert!(first.is_some_and(|ns| ns <= 101 * MS), "{first:?}");
    }
}
