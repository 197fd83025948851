//! Sums up moves for the log. There may be hundreds a second, so the log tells their result and not each of them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use wakeone_model::layout::{connections, count};

use crate::steer::SteerEvent;

/// How soon the log tells the outcome for a worker that is stuck.
const FIRST: Duration = Duration::from_secs(1);
/// The time that each later entry sums up.
const EACH: Duration = Duration::from_secs(10);
/// A worker that is stuck again and again, where nothing is moved, is in one state. The log tells it again if that had
/// ended for so long.
const ENDED: Duration = Duration::from_secs(60);

/// The events of a slot since its last log entry.
#[derive(Debug, Clone, Copy)]
struct Sum {
    since: Instant,
    until: Instant,
    stuck: u64,
    moved: u64,
    /// The length of its queue when it was last found stuck, and its unit.
    waiting: (u32, &'static str),
}

/// Sums up what one agent saw, by slot.
#[derive(Debug, Default)]
pub struct MoveLog {
    sums: BTreeMap<usize, Sum>,
    /// When the log last had an entry for a slot.
    told: BTreeMap<usize, Instant>,
    /// When a slot last had a sum of which nothing was moved.
    unmoved: BTreeMap<usize, Instant>,
}

impl MoveLog {
    /// Returns the events to log now. Moves and stuck workers are summed up. Moves pass as well, for a log that tells
    /// each, and so do other events. Call it at least once a second, also without events.
    pub fn pass(&mut self, now: Instant, events: Vec<SteerEvent>) -> Vec<SteerEvent> {
        let mut passed = Vec::new();
        for event in events {
            match event {
                SteerEvent::Stuck { slot, queued, unit } => {
                    let sum = self.sum(slot, now);
                    sum.stuck += 1;
                    sum.waiting = (queued, unit);
                }
                SteerEvent::Rescued(one) => {
                    self.sum(one.slot, now).moved += u64::from(one.moved);
                    passed.push(event);
                }
                other => passed.push(other),
            }
        }
        let due = self.sums.iter().filter(|(_, sum)| sum.until <= now);
        let due: Vec<usize> = due.map(|(slot, _)| *slot).collect();
        for slot in due {
            if let Some(sum) = self.sums.remove(&slot) {
                self.told.insert(slot, now);
                if self.is_same_state(slot, &sum, now) {
                    continue;
                }
                passed.push(SteerEvent::Summary {
                    slot,
                    moved: sum.moved,
                    text: sentence(slot, &sum, now),
                });
            }
        }
        passed
    }

    /// Whether the log has told already that this worker is stuck and nothing is moved.
    fn is_same_state(&mut self, slot: usize, sum: &Sum, now: Instant) -> bool {
        if sum.moved > 0 {
            return false;
        }
        let before = self.unmoved.insert(slot, now);
        before.is_some_and(|before| now.duration_since(before) < ENDED)
    }

    fn sum(&mut self, slot: usize, now: Instant) -> &mut Sum {
        let told = self.told.get(&slot).copied();
        self.sums.entry(slot).or_insert_with(|| {
            // After an entry for a slot, the next sum begins where that one ended.
            let recent = told.filter(|told| now.duration_since(*told) < EACH);
            Sum {
                since: recent.unwrap_or(now),
                until: recent.map_or(now + FIRST, |told| told + EACH),
                stuck: 0,
                moved: 0,
                waiting: (0, "connections"),
            }
        })
    }
}

fn sentence(slot: usize, sum: &Sum, now: Instant) -> String {
    let seconds = now.duration_since(sum.since).as_secs().max(1);
    let time = match seconds {
        1 => "the last second".to_owned(),
        seconds => format!("the last {seconds} s"),
    };
    let (waiting, unit) = sum.waiting;
    let times = count(sum.stuck, "time", "times");
    match (sum.moved, sum.stuck) {
        (0, _) if unit == "bytes" => format!(
            "worker {slot} was stuck {times} in {time}, with {waiting} bytes waiting; others get what is new"
        ),
        (0, _) => format!(
            "worker {slot} was stuck {times} in {time}; {} waited for it, and none could be moved",
            connections(waiting.into())
        ),
        (moved, 0 | 1) => format!("{} moved from worker {slot} in {time}", connections(moved)),
        (moved, _) => format!(
            "{} moved from worker {slot} in {time}, in which it was stuck {times}",
            connections(moved)
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steer::Move;

    fn stuck(slot: usize, queued: u32) -> SteerEvent {
        SteerEvent::Stuck {
            slot,
            queued,
            unit: "connections",
        }
    }

    fn rescued(slot: usize, moved: u32) -> SteerEvent {
        SteerEvent::Rescued(Move {
            slot,
            moved,
            took_us: 80,
        })
    }

    /// The sentences. A single move has none here.
    fn texts(events: Vec<SteerEvent>) -> Vec<String> {
        let text = |event| match event {
            SteerEvent::Summary { text, .. } | SteerEvent::Note(text) => Some(text),
            SteerEvent::Rescued(_) => None,
            other => panic!("{other:?}"),
        };
        events.into_iter().filter_map(text).collect()
    }

    #[test]
    fn moves_are_summed_up_and_a_stuck_worker_has_an_outcome() {
        let mut log = MoveLog::default();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(
            log.pass(at(0), vec![stuck(0, 3), rescued(0, 3)]),
            [rescued(0, 3)]
        );
        assert_eq!(log.pass(at(500), vec![rescued(0, 1)]), [rescued(0, 1)]);
        assert_eq!(
            texts(log.pass(at(1_000), Vec::new())),
            ["4 connections moved from worker 0 in the last second"]
        );
        // Hundreds of moves become one line in ten seconds.
        let mut told = Vec::new();
        for n in 0..120 {
            told.extend(log.pass(at(1_050 + n * 100), vec![stuck(0, 1), rescued(0, 1)]));
        }
        assert_eq!(
            texts(told),
            [
                "101 connections moved from worker 0 in the last 10 s, in which it was stuck 101 times"
            ]
        );
    }

    #[test]
    fn a_worker_that_is_stuck_again_and_again_is_told_once() {
        let mut log = MoveLog::default();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut told = Vec::new();
        // 33 times a second for two minutes, then well for two, then once more.
        for n in 0..4_000 {
            told.extend(log.pass(at(n * 30), vec![stuck(0, 1)]));
        }
        for n in 120..240 {
            told.extend(log.pass(at(n * 1_000), Vec::new()));
        }
        assert_eq!(texts(told).len(), 1);
        log.pass(at(240_000), vec![stuck(0, 1)]);
        assert_eq!(texts(log.pass(at(241_000), Vec::new())).len(), 1);
    }

    #[test]
    fn what_cannot_be_moved_is_said() {
        let mut log = MoveLog::default();
        let start = Instant::now();
        let later = start + FIRST;
        let bytes = SteerEvent::Stuck {
            slot: 2,
            queued: 1300,
            unit: "bytes",
        };
        let note = SteerEvent::Note("at once".into());
        let told = log.pass(start, vec![stuck(1, 1), bytes, note]);
        assert_eq!(texts(told), ["at once"]);
        assert_eq!(
            texts(log.pass(later, Vec::new())),
            [
                "worker 1 was stuck 1 time in the last second; 1 connection waited for it, and none could be moved",
                "worker 2 was stuck 1 time in the last second, with 1300 bytes waiting; others get what is new",
            ]
        );
        // After a while without moves it begins anew.
        let next = later + 3 * EACH;
        assert_eq!(log.pass(next, vec![rescued(1, 1)]), [rescued(1, 1)]);
        assert_eq!(
            texts(log.pass(next + FIRST, Vec::new())),
            ["1 connection moved from worker 1 in the last second"]
        );
    }
}
