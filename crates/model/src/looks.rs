//! How often a steerer of one queue may look: its looks take a small part of a CPU, whatever they cost.

use std::time::Duration;

/// Looks take at most one part in so many of a CPU.
const SHARE: u32 = 400;
/// But so much CPU time may be saved, for each CPU, for a time when connections only come. Those that clients open together,
/// and keep, have all come before that is spent: a look that changes entries takes some 100 µs, and few looks would leave them
/// where they came first. Where there are more CPUs there are more workers, whose looks cost more.
const SAVED_AT_MOST: Duration = Duration::from_millis(10);
/// Once so much is saved a look follows each connection, and until no more is left than so many looks take. Only one worker
/// may be armed then, and would get all that come until the next look.
const PROMPT_FROM: Duration = Duration::from_millis(4);
const PROMPT_LOOKS: u32 = 4;
/// As long as a worker is disarmed a look comes so often, unless that takes more than one part in so many of a CPU. Then looks are
/// rare.
const RARE: Duration = Duration::from_millis(20);
const AT_MOST: u32 = 100;
/// How soon a look follows a connection that is to cause one. A worker takes it within a part of that.
pub const PROMPT: Duration = Duration::from_micros(500);
/// The part of the mean that the last look is.
const NEWEST: u32 = 16;

/// How soon looks can come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pace {
    /// While connections only come: after each of them, if that is wanted.
    pub prompt: bool,
    /// While connections come and go: more seldom than a group wants them.
    pub rare: bool,
}

/// The wishes of a group to its steerer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// A look after this time, if that costs nothing.
    pub pause: Duration,
    /// To know soon whether somebody takes what waits.
    pub hurried: bool,
    /// Not to leave those alone that wait: a worker is not woken.
    pub disarmed: bool,
    /// Connections come, and none end.
    pub only_come: bool,
    /// A worker is not woken because it was refused a connection, and only until the next look.
    pub refused: bool,
}

impl Wanted {
    /// Returns the wishes of two groups together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            pause: self.pause.min(other.pause),
            hurried: self.hurried | other.hurried,
            disarmed: self.disarmed | other.disarmed,
            only_come: self.only_come & other.only_come,
            refused: self.refused | other.refused,
        }
    }
}

/// The next thing that a steerer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Next {
    /// It looks at the queue after this time: all that are armed may be busy.
    pub after: Duration,
    /// It looks at the counts as well.
    pub counts: bool,
}

/// The CPU time that looks may take.
#[derive(Debug, Clone)]
pub struct Budget {
    /// The mean CPU time of the last looks. To wake up for them is a part of it.
    cost: Duration,
    /// The CPU time that they may take still, above their share.
    saved: Duration,
    saved_at_most: Duration,
    prompt: bool,
}

impl Budget {
    /// That of a machine with so many CPUs.
    pub fn of(cpus: usize) -> Self {
        let saved_at_most = SAVED_AT_MOST * cpus.max(1) as u32;
        Self {
            cost: Duration::ZERO,
            saved: saved_at_most,
            saved_at_most,
            prompt: true,
        }
    }

    /// So much CPU time was taken, so long after the last time: for a look that counted, or for a glance.
    pub fn spend(&mut self, took: Duration, after: Duration, counted: bool) {
        if counted {
            self.cost = (self.cost * (NEWEST - 1) + took) / NEWEST;
        }
        let saved = (self.saved + after / SHARE).min(self.saved_at_most);
        self.saved = saved.saturating_sub(took);
        self.prompt &= self.saved > self.cost * PROMPT_LOOKS;
        self.prompt |= self.saved >= PROMPT_FROM;
    }

    /// How soon looks can come.
    pub fn pace(&self) -> Pace {
        Pace {
            prompt: self.prompt,
            rare: self.cost * AT_MOST > RARE,
        }
    }

    /// Returns the next thing to do, `since` the last look.
    pub fn next(&self, wanted: &Wanted, since: Duration) -> Next {
        let pause = wanted.pause;
        // Refusals are few, and a burst waits.
        let soon = wanted.refused || wanted.only_come && self.saved > self.cost;
        let mut look_every = match soon {
            true => pause,
            false => self.pause_of(pause, SHARE),
        };
        if wanted.disarmed {
            // It may cost more than its share.
            look_every = look_every.min(match wanted.only_come {
                true => self.pause_of(RARE, AT_MOST),
                false => RARE,
            });
        }
        let left = look_every.saturating_sub(since);
        let (after, counts) = match wanted.hurried {
            true => (pause, wanted.only_come && self.prompt || left <= pause),
            false if wanted.disarmed && left > pause * 2 => (pause, false),
            false => (left, true),
        };
        Next { after, counts }
    }

    /// The time between two looks that are to take one part in `share` of a CPU.
    pub fn pause_of(&self, pause: Duration, share: u32) -> Duration {
        pause.max(self.cost * share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOK: Duration = Duration::from_micros(100);
    const EVERY: Duration = Duration::from_millis(5);

    fn wanted(disarmed: bool) -> Wanted {
        Wanted {
            pause: EVERY,
            hurried: false,
            disarmed,
            only_come: true,
            refused: false,
        }
    }

    fn look(after: Duration) -> Next {
        let counts = true;
        Next { after, counts }
    }

    fn glance(after: Duration) -> Next {
        let counts = false;
        Next { after, counts }
    }

    /// Nobody is disarmed.
    fn pause_of(budget: &Budget) -> Duration {
        let next = budget.next(&wanted(false), Duration::ZERO);
        assert!(next.counts, "nobody is disarmed");
        next.after
    }

    #[test]
    fn looks_keep_to_their_share_once_what_was_saved_is_spent() {
        let mut budget = Budget::of(2);
        let (mut now, mut spent, mut prompt) = (Duration::ZERO, Duration::ZERO, 0);
        let mut pause = EVERY;
        while now < Duration::from_secs(10) {
            prompt += u32::from(budget.pace().prompt);
            budget.spend(LOOK, pause, true);
            spent += LOOK;
            pause = pause_of(&budget);
            now += pause;
        }
        assert!(spent <= SAVED_AT_MOST * 2 + now / SHARE + LOOK, "{spent:?}");
        assert!(spent >= now / SHARE, "{spent:?}");
        assert!((190..250).contains(&prompt), "{prompt} looks were prompt");
    }

    #[test]
    fn a_group_that_rests_saves_for_prompt_looks() {
        let mut budget = Budget::of(2);
        (0..400).for_each(|_| budget.spend(LOOK, Duration::ZERO, true));
        assert!(!budget.pace().prompt);
        assert_eq!(pause_of(&budget), budget.pause_of(EVERY, SHARE));
        (0..10).for_each(|_| budget.spend(LOOK, Duration::from_millis(100), true));
        assert!(!budget.pace().prompt, "saved for a moment only");
        (0..20).for_each(|_| budget.spend(LOOK, Duration::from_millis(100), true));
        assert!(budget.pace().prompt);
        assert_eq!(pause_of(&budget), EVERY);
    }

    #[test]
    fn the_queue_is_looked_at_between_two_looks_that_are_far_apart() {
        let mut budget = Budget::of(2);
        let next = |budget: &Budget, hurried, since| {
            let wanted = Wanted {
                hurried,
                ..wanted(true)
            };
            budget.next(&wanted, since)
        };
        assert_eq!(next(&budget, true, EVERY), look(EVERY));
        (0..400).for_each(|_| budget.spend(LOOK, Duration::ZERO, true));
        assert_eq!(next(&budget, false, Duration::ZERO), glance(EVERY));
        assert_eq!(next(&budget, true, Duration::ZERO), glance(EVERY));
        assert_eq!(next(&budget, false, RARE - EVERY), look(EVERY));
    }

    #[test]
    fn nobody_is_left_out_for_long_by_old_counts() {
        let mut budget = Budget::of(2);
        (0..200).for_each(|_| budget.spend(LOOK * 20, Duration::ZERO, true));
        assert!(budget.pace().rare);
        let next = |only_come| {
            let wanted = Wanted {
                only_come,
                ..wanted(true)
            };
            budget.next(&wanted, RARE)
        };
        assert_eq!(next(false), look(Duration::ZERO));
        assert_eq!(next(true), glance(EVERY));
    }
}
