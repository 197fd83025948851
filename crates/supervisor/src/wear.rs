//! When a worker is replaced though it serves, or as it hangs. Pure: it is told what was seen.

use std::fmt;
use std::time::{Duration, Instant};

use wakeone_model::layout::connections;

/// The limits of workers; `None`: there is none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Connections that a worker gets.
    pub connections: Option<u64>,
    /// Time since its start.
    pub age: Option<Duration>,
    /// Memory of its own and of the processes below it, in bytes.
    pub memory: Option<u64>,
    /// How long it may accept nothing while connections wait.
    pub hang: Option<Duration>,
}

/// A worker's own limits are up to this part lower, so that those that were started together are not replaced together.
const SPREAD: f64 = 0.1;

/// A look at a worker that serves.
#[derive(Debug, Clone, Copy, Default)]
pub struct Seen {
    /// Connections that it got; `None`: nobody counts them.
    pub connections: Option<u64>,
    /// Time since its start.
    pub age: Duration,
    /// Memory of its own and of the processes below it, in bytes.
    pub memory: u64,
}

/// Why a worker is to be replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wear {
    /// It got so many connections.
    Connections(u64),
    /// It has run for so long.
    Age(Duration),
    /// It has so many bytes of memory.
    Memory(u64),
    /// It hangs.
    Hang(Hang),
}

/// A worker that hangs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hang {
    /// It has accepted nothing for so long.
    pub for_: Duration,
    /// It used a CPU all that time; else hardly any.
    pub spins: bool,
}

impl fmt::Display for Wear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connections(count) => write!(f, "it got {}", connections(*count)),
            Self::Age(age) => write!(f, "it has run for {}", seconds(*age)),
            Self::Memory(bytes) => write!(f, "it has {} MiB of memory", bytes >> 20),
            Self::Hang(hang) => {
                let cpu = if hang.spins {
                    "uses a whole CPU"
                } else {
                    "uses no CPU"
                };
                write!(
                    f,
                    "connections wait, and it has accepted none for {} and {cpu}",
                    seconds(hang.for_)
                )
            }
        }
    }
}

fn seconds(time: Duration) -> String {
    format!("{} s", time.as_secs())
}

impl Limits {
    /// Returns those of one worker. `part`: 0 to 1, drawn at random.
    pub fn of_worker(&self, part: f64) -> Self {
        let share = 1.0 - SPREAD * part.clamp(0.0, 1.0);
        let lower = |most: u64| ((most as f64 * share) as u64).max(1);
        Self {
            connections: self.connections.map(lower),
            age: self.age.map(|age| age.mul_f64(share)),
            memory: self.memory.map(lower),
            ..*self
        }
    }

    /// Returns the limit that a worker has reached.
    pub fn reached(&self, seen: &Seen) -> Option<Wear> {
        let is_over = |most: Option<u64>, seen| most.is_some_and(|most| seen >= most);
        match seen.connections {
            Some(got) if is_over(self.connections, got) => Some(Wear::Connections(got)),
            _ if self.age.is_some_and(|most| seen.age >= most) => Some(Wear::Age(seen.age)),
            _ if is_over(self.memory, seen.memory) => Some(Wear::Memory(seen.memory)),
            _ => None,
        }
    }
}

/// One look at what a worker does.
#[derive(Debug, Clone, Copy)]
pub struct Look {
    /// It waits for connections; `None`: that cannot be seen.
    pub waits: Option<bool>,
    /// About how many connections it has accepted so far; `None`: nobody counts them.
    pub accepted: Option<u64>,
    /// How many it has open.
    pub open: u64,
    /// Connections wait for it, or were moved away as it did not take them.
    pub behind: bool,
    /// Its CPU time so far.
    pub cpu: Duration,
}

/// The progress of a worker since it accepted last.
#[derive(Debug, Clone, Copy, Default)]
pub struct Progress {
    /// When it was last seen to wait or to have accepted, and its CPU time then.
    since: Option<(Instant, Duration)>,
    /// The most that it was known to have accepted. The counts are not of one moment.
    accepted: u64,
    open: u64,
    /// Connections waited since then.
    behind: bool,
    cpu: Duration,
}

/// One that uses at most this part of a CPU does nothing, and one that uses more than the other is busy all the time.
/// In between it may work on a long request.
const IDLE: f64 = 0.02;
const SPINS: f64 = 0.9;

impl Progress {
    /// Takes a look.
    pub fn note(&mut self, now: Instant, look: &Look) {
        let open = std::mem::replace(&mut self.open, look.open);
        let accepts = match look.accepted {
            Some(accepted) => accepted > self.accepted,
            None => open != look.open,
        };
        self.accepted = self.accepted.max(look.accepted.unwrap_or(0));
        if look.waits != Some(false) || accepts || self.since.is_none() {
            self.since = Some((now, look.cpu));
            self.behind = false;
        }
        self.behind |= look.behind;
        self.cpu = look.cpu;
    }

    /// How long it has accepted nothing.
    fn idle(&self, now: Instant) -> Duration {
        self.since.map_or(Duration::ZERO, |(since, _)| now - since)
    }

    fn hangs(&self, now: Instant, limit: Duration) -> Option<Hang> {
        let (since, cpu) = self.since?;
        let for_ = now - since;
        let part = self.cpu.saturating_sub(cpu).as_secs_f64() / for_.as_secs_f64();
        let spins = part >= SPINS;
        let hangs = for_ >= limit && self.behind && (spins || part <= IDLE);
        hangs.then_some(Hang { for_, spins })
    }
}

/// Returns the worker that hangs for longest: its place among these. If more than half of them have made no progress for half
/// of the limit, there is too much to do, and none is replaced.
pub fn hanging(all: &[Progress], now: Instant, limit: Duration) -> Option<(usize, Hang)> {
    let slow = all.iter().filter(|one| one.idle(now) >= limit / 2).count();
    if slow * 2 > all.len() {
        return None;
    }
    let hang = |(place, one): (usize, &Progress)| Some((place, one.hangs(now, limit)?));
    all.iter()
        .enumerate()
        .filter_map(hang)
        .max_by_key(|(_, hang)| hang.for_)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(4);

    #[test]
    fn each_limit_is_reached_and_up_to_a_tenth_before() {
        let limits = Limits {
            connections: Some(1000),
            age: Some(Duration::from_secs(100)),
            memory: Some(1 << 30),
            hang: None,
        };
        let lowest = limits.of_worker(1.0);
        assert_eq!(limits.of_worker(0.0), limits);
        assert_eq!(
            (lowest.connections, lowest.age),
            (Some(900), Some(Duration::from_secs(90)))
        );
        assert_eq!(
            Limits {
                connections: Some(1),
                ..limits
            }
            .of_worker(1.0)
            .connections,
            Some(1)
        );
        let seen = Seen::default();
        assert_eq!(limits.reached(&seen), None);
        assert_eq!(
            Limits::default().reached(&Seen {
                memory: u64::MAX,
                ..seen
            }),
            None
        );
        let connections = Seen {
            connections: Some(1000),
            ..seen
        };
        assert_eq!(limits.reached(&connections), Some(Wear::Connections(1000)));
        let age = Duration::from_secs(100);
        assert_eq!(limits.reached(&Seen { age, ..seen }), Some(Wear::Age(age)));
        let memory = 1 << 30;
        assert_eq!(
            limits.reached(&Seen { memory, ..seen }),
            Some(Wear::Memory(memory))
        );
    }

    /// The fourth of four workers does this once a second, and the others wait. When is it found to hang, and does it spin?
    fn found(look: impl Fn(u32) -> Look) -> Option<(u32, bool)> {
        found_beside(&look, |_| Look {
            waits: Some(true),
            accepted: Some(0),
            open: 0,
            behind: false,
            cpu: Duration::ZERO,
        })
    }

    fn found_beside(
        look: impl Fn(u32) -> Look,
        others: impl Fn(u32) -> Look,
    ) -> Option<(u32, bool)> {
        let start = Instant::now();
        let mut all = [Progress::default(); 4];
        for second in 0..20 {
            let now = start + Duration::from_secs(second.into());
            all[..3]
                .iter_mut()
                .for_each(|one| one.note(now, &others(second)));
            all[3].note(now, &look(second));
            if let Some((place, hang)) = hanging(&all, now, LIMIT) {
                assert_eq!(place, 3);
                return Some((second, hang.spins));
            }
        }
        None
    }

    const ASLEEP: Look = Look {
        waits: Some(false),
        accepted: Some(7),
        open: 3,
        behind: true,
        cpu: Duration::ZERO,
    };

    fn spinning(second: u32) -> Look {
        Look {
            cpu: Duration::from_secs(second.into()),
            ..ASLEEP
        }
    }

    #[test]
    fn one_that_accepts_nothing_and_uses_no_cpu_or_a_whole_one_hangs() {
        assert_eq!(found(|_| ASLEEP), Some((4, false)));
        assert_eq!(found(spinning), Some((4, true)));
        let once = |second| Look {
            waits: Some(second == 3),
            ..ASLEEP
        };
        assert_eq!(found(once), Some((7, false)));
    }

    #[test]
    fn one_that_gets_on_does_not() {
        assert_eq!(
            found(|_| Look {
                behind: false,
                ..ASLEEP
            }),
            None,
            "nothing waits"
        );
        assert_eq!(
            found(|_| Look {
                waits: None,
                ..ASLEEP
            }),
            None,
            "nobody knows"
        );
        let accepts = |second: u32| Look {
            accepted: Some(second.into()),
            ..spinning(second)
        };
        assert_eq!(found(accepts), None);
        let works = |second| Look {
            cpu: Duration::from_secs(second) / 2,
            ..ASLEEP
        };
        assert_eq!(found(|second| works(second.into())), None, "a long request");
    }

    #[test]
    fn where_all_are_slow_nobody_is_replaced() {
        assert_eq!(found_beside(spinning, spinning), None);
        assert_eq!(found_beside(|_| ASLEEP, |_| ASLEEP), None);
    }
}
