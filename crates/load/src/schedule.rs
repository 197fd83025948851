//! The plan, request by request: when each is due, its path, and its source address.

use rand::SeedableRng;
use rand::distr::Distribution;
use rand::distr::weighted::WeightedIndex;
use rand::rngs::Xoshiro256PlusPlus;
use rand_distr::Exp1;

use crate::recorder::Subject;
use crate::{Arrivals, Plan, Sources, Spacing, Stage};

/// One planned request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Due {
    /// Its number in the plan, from 0.
    pub index: u64,
    /// When it is due, ns from the start; 0 in a closed loop, where a request is due when its client is free.
    pub at_ns: u64,
    /// Its entry of the mix.
    pub entry: usize,
    /// Its source address, from 0.
    pub source: u32,
    /// Its stage of the profile; 0 without one.
    pub stage: usize,
}

impl Due {
    pub(crate) fn subject(&self) -> Subject {
        Subject {
            entry: self.entry,
            stage: self.stage,
        }
    }
}

/// Turns "the n-th request, at a rate of one" into a time, by the inverse of the sum of the rate. By the time-change
/// theorem for Poisson processes, a ramp keeps the spacing's statistics exactly.
#[derive(Debug)]
enum Pace {
    /// Due when a client is free.
    Closed,
    Rate(f64),
    Stages {
        stages: Vec<Stage>,
        current: usize,
        requests_before: f64,
        seconds_before: f64,
    },
}

impl Pace {
    /// The mean number of requests in so many seconds from the start.
    fn requests_until(&self, seconds: f64) -> f64 {
        match self {
            Self::Closed => f64::INFINITY,
            Self::Rate(rate_per_s) => rate_per_s * seconds,
            Self::Stages { stages, .. } => {
                let mut left = seconds;
                let stages = stages.iter().map(|stage| {
                    let within = left.min(stage.length.as_secs_f64());
                    left -= within;
                    stage.requests_in(within)
                });
                stages.sum()
            }
        }
    }

    /// The stage and the time, ns, at which `n` requests have passed; `None` after the last stage.
    fn at(&mut self, n: f64) -> Option<(usize, u64)> {
        match self {
            Self::Closed => Some((0, 0)),
            Self::Rate(rate_per_s) => Some((0, (n * 1e9 / *rate_per_s) as u64)),
            Self::Stages {
                stages,
                current,
                requests_before,
                seconds_before,
            } => {
                while n - *requests_before >= stages.get(*current)?.requests() {
                    *requests_before += stages[*current].requests();
                    *seconds_before += stages[*current].length.as_secs_f64();
                    *current += 1;
                }
                let seconds = *seconds_before + stages[*current].time_of(n - *requests_before);
                Some((*current, (seconds * 1e9) as u64))
            }
        }
    }
}

/// Up to so many requests a plan has exactly as many as its rates and times say. More of them differ from that by chance, but
/// by less than a thousandth.
const COUNTED: f64 = 1e7;

/// The requests of one thread, in order of time.
///
/// Poisson arrivals are those of independent users, given how many come: the sum of the rates over the time, or the number
/// asked for. Their gaps are exponential, scaled so that the time after the last request ends with the plan. Without that, chance
/// would decide the rate, and each seed would have its own.
///
/// Every thread walks the whole plan and keeps its own every n-th request, so that the plan is the same for any number of
/// threads. Arrivals and paths have generators of their own, so that a changed mix does not change the arrivals.
#[derive(Debug)]
pub struct Schedule {
    pace: Pace,
    spacing: Spacing,
    /// The sum of gaps so far, in units of the mean gap.
    passed: f64,
    /// The factor of each gap.
    scale: f64,
    gaps: Xoshiro256PlusPlus,
    paths: Xoshiro256PlusPlus,
    /// `None` where there is but one path.
    choice: Option<WeightedIndex<u64>>,
    sources: u32,
    next: u64,
    thread: u64,
    threads: u64,
    requests: u64,
    duration_ns: u64,
}

/// Keeps the two generators of one seed apart; any constant but 0 does.
const PATHS_STREAM: u64 = 0x9E37_79B9_7F4A_7C15;

impl Schedule {
    /// The share of thread number `thread` (from 0) of a plan that passed [`Plan::check`].
    pub fn new(plan: &Plan, thread: usize) -> Self {
        let choice = (plan.mix.entries.len() > 1).then(|| {
            WeightedIndex::new(plan.mix.entries.iter().map(|e| e.weight)).expect("checked weights")
        });
        let (pace, spacing) = match &plan.arrivals {
            Arrivals::Open {
                rate_per_s,
                spacing,
            }
            | Arrivals::Kept {
                rate_per_s,
                spacing,
                ..
            } => (Pace::Rate(*rate_per_s), *spacing),
            Arrivals::Profile {
                stages, spacing, ..
            } => {
                let stages = stages.clone();
                (
                    Pace::Stages {
                        stages,
                        current: 0,
                        requests_before: 0.0,
                        seconds_before: 0.0,
                    },
                    *spacing,
                )
            }
            Arrivals::Closed { .. } => (Pace::Closed, Spacing::Constant),
        };
        let gaps = Xoshiro256PlusPlus::seed_from_u64(plan.seed);
        let asked = plan.stop.requests.unwrap_or(u64::MAX);
        let until = plan
            .stop
            .duration
            .map_or(f64::INFINITY, |d| d.as_secs_f64());
        let expected = pace.requests_until(until).min(asked as f64);
        let (requests, scale) = match spacing {
            Spacing::Poisson if expected <= COUNTED => counted(expected, gaps.clone()),
            _ => (asked, 1.0),
        };
        Self {
            pace,
            spacing,
            passed: 0.0,
            scale,
            gaps,
            paths: Xoshiro256PlusPlus::seed_from_u64(plan.seed ^ PATHS_STREAM),
            choice,
            sources: match plan.sources {
                Sources::System => 1,
                Sources::Loopback { count } => count,
            },
            next: 0,
            thread: plan.lane(thread) as u64,
            threads: plan.lanes() as u64,
            requests,
            duration_ns: plan.stop.duration.map_or(u64::MAX, |d| {
                u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
            }),
        }
    }

    /// Returns the next request of the whole plan, whichever thread sends it.
    fn step(&mut self) -> Option<Due> {
        let index = self.next;
        if index >= self.requests {
            return None;
        }
        self.next += 1;
        self.pass();
        let Some((stage, at_ns)) = self
            .pace
            .at(self.passed)
            .filter(|&(_, at_ns)| at_ns < self.duration_ns)
        else {
            self.requests = 0; // and it stays ended
            return None;
        };
        let entry = self
            .choice
            .as_ref()
            .map_or(0, |choice| choice.sample(&mut self.paths));
        Some(Due {
            index,
            at_ns,
            entry,
            source: (index % u64::from(self.sources)) as u32,
            stage,
        })
    }

    /// Goes on by one gap.
    fn pass(&mut self) {
        match self.spacing {
            // From the index and not by adding up: no rounding error grows over a long run.
            Spacing::Constant => self.passed = (self.next - 1) as f64,
            Spacing::Poisson => {
                let gap: f64 = Exp1.sample(&mut self.gaps);
                self.passed += gap * self.scale;
            }
        }
    }
}

/// The number of requests where so many are expected, and the factor by which their gaps and one more fill the time.
fn counted(expected: f64, mut gaps: Xoshiro256PlusPlus) -> (u64, f64) {
    // A product such as 100 · 2.3 is not to count as one more than it is.
    let requests = (expected - 1e-6).ceil();
    let gap = |_| -> f64 { Exp1.sample(&mut gaps) };
    let all: f64 = (0..=requests as u64).map(gap).sum();
    (requests as u64, expected / all)
}

impl Iterator for Schedule {
    type Item = Due;

    fn next(&mut self) -> Option<Due> {
        loop {
            let due = self.step()?;
            if due.index % self.threads == self.thread {
                return Some(due);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mix, Shard, Stop};
    use std::time::Duration;

    fn plan(arrivals: Arrivals, requests: u64) -> Plan {
        Plan {
            target: "127.0.0.1:80".parse().unwrap(),
            host: "localhost".into(),
            arrivals,
            stop: Stop {
                requests: Some(requests),
                duration: None,
            },
            mix: Mix::weighted([(99, "/a"), (1, "/b")]),
            sources: Sources::Loopback { count: 1000 },
            timeout: Duration::from_secs(1),
            seed: 7,
            threads: 1,
            keep_alive: false,
            shard: Shard::default(),
        }
    }

    const POISSON: Arrivals = Arrivals::Open {
        rate_per_s: 1000.0,
        spacing: Spacing::Poisson,
    };

    #[test]
    fn the_seed_alone_decides_the_plan() {
        let one = plan(POISSON, 10_000);
        let first: Vec<_> = Schedule::new(&one, 0).collect();
        assert_eq!(first, Schedule::new(&one, 0).collect::<Vec<_>>());
        let other = Plan {
            seed: 8,
            ..one.clone()
        };
        assert_ne!(first, Schedule::new(&other, 0).collect::<Vec<_>>());
        let three = Plan { threads: 3, ..one };
        let mut merged: Vec<_> = (0..3).flat_map(|t| Schedule::new(&three, t)).collect();
        merged.sort_by_key(|due| due.index);
        assert_eq!(
            first, merged,
            "three threads must send the very plan of one"
        );
    }

    #[test]
    fn shards_together_send_the_very_plan_of_one() {
        let one = plan(POISSON, 10_000);
        let whole: Vec<_> = Schedule::new(&one, 0).collect();
        let of_shard = |number| {
            let part = Plan {
                threads: 2,
                shard: Shard { number, of: 5 },
                ..one.clone()
            };
            (0..2).flat_map(move |thread| Schedule::new(&part, thread).collect::<Vec<_>>())
        };
        let mut merged: Vec<_> = (0..5).flat_map(of_shard).collect();
        assert!((0..5).all(|number| of_shard(number).count() == 2000));
        merged.sort_by_key(|due| due.index);
        assert_eq!(whole, merged);
    }

    #[test]
    fn a_changed_mix_keeps_the_arrivals() {
        let one = plan(POISSON, 1000);
        let other = Plan {
            mix: Mix::one("/"),
            ..one.clone()
        };
        let times = |p: &Plan| Schedule::new(p, 0).map(|d| d.at_ns).collect::<Vec<_>>();
        assert_eq!(times(&one), times(&other));
    }

    /// Mean and deviation of the gaps, and the share of short ones, against the exponential distribution's; the bounds are
    /// over six standard errors wide and the seed is fixed.
    #[test]
    fn poisson_gaps_are_exponential() {
        let n = 100_000;
        let times: Vec<_> = Schedule::new(&plan(POISSON, n), 0)
            .map(|d| d.at_ns as f64)
            .collect();
        let gaps: Vec<_> = std::iter::once(times[0])
            .chain(times.windows(2).map(|w| w[1] - w[0]))
            .collect();
        let mean = gaps.iter().sum::<f64>() / n as f64;
        let deviation = (gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / n as f64).sqrt();
        assert!(
            (mean / 1e6 - 1.0).abs() < 0.02,
            "mean gap {mean} ns, not 1 ms"
        );
        assert!(
            (deviation / mean - 1.0).abs() < 0.04,
            "coefficient of variation {}",
            deviation / mean
        );
        for quantile in [0.1, 0.5, 0.9, 0.99] {
            let bound = -(1.0f64 - quantile).ln() * 1e6;
            let share = gaps.iter().filter(|&&g| g < bound).count() as f64 / n as f64;
            assert!(
                (share - quantile).abs() < 0.01,
                "{share} of the gaps are below the {quantile} quantile"
            );
        }
        let serial: f64 = gaps
            .windows(2)
            .map(|w| (w[0] - mean) * (w[1] - mean))
            .sum::<f64>()
            / n as f64;
        assert!(
            (serial / deviation.powi(2)).abs() < 0.02,
            "neighbouring gaps depend on each other"
        );
    }

    #[test]
    fn constant_gaps_are_equal_to_the_nanosecond() {
        let arrivals = Arrivals::Open {
            rate_per_s: 3.0,
            spacing: Spacing::Constant,
        };
        let times: Vec<_> = Schedule::new(&plan(arrivals, 7), 0)
            .map(|d| d.at_ns)
            .collect();
        assert_eq!(
            times,
            [
                0,
                333_333_333,
                666_666_666,
                1_000_000_000,
                1_333_333_333,
                1_666_666_666,
                2_000_000_000
            ]
        );
    }

    #[test]
    fn weights_and_sources_are_respected() {
        let all: Vec<_> = Schedule::new(&plan(POISSON, 100_000), 0).collect();
        let rare = all.iter().filter(|d| d.entry == 1).count();
        assert!(
            (800..1200).contains(&rare),
            "{rare} of 100,000 at weight 1 of 100"
        );
        let mut uses = [0; 1000];
        all.iter().for_each(|d| uses[d.source as usize] += 1);
        assert!(uses.iter().all(|&n| n == 100), "sources are taken in turn");
    }

    /// Whatever the seed, as many requests as the rate and the time say, or as were asked for in the time that they take.
    #[test]
    fn chance_does_not_decide_the_rate() {
        let second = Duration::from_secs(1);
        let at = |per_s, spacing| Arrivals::Open {
            rate_per_s: per_s,
            spacing,
        };
        let ramp = |spacing| Arrivals::Profile {
            stages: vec![
                Stage {
                    from_per_s: 0.0,
                    to_per_s: 100.0,
                    length: second,
                },
                Stage::step(50.0, 9 * second),
            ],
            spacing,
            at_most: Some(5),
        };
        for seed in 0..50 {
            for spacing in [Spacing::Poisson, Spacing::Constant] {
                for (arrivals, seconds, expected) in [
                    (at(100.0, spacing), 3.0, 300),
                    (at(100.0, spacing), 2.3, 230),
                    (at(0.1, spacing), 3.0, 1),
                    (ramp(spacing), 3.0, 150),
                    (ramp(spacing), 0.5, 13),
                    (ramp(spacing), 100.0, 500),
                ] {
                    let mut timed = plan(arrivals, 1 << 40);
                    timed.seed = seed;
                    timed.stop.duration = Some(Duration::from_secs_f64(seconds));
                    let all: Vec<_> = Schedule::new(&timed, 0).collect();
                    assert_eq!(all.len(), expected, "seed {seed}: {timed:?}");
                    let end_ns = (seconds * 1e9) as u64;
                    assert!(all.is_sorted_by_key(|due| due.at_ns));
                    assert!(all.iter().all(|due| due.at_ns < end_ns));
                }
            }
            let mut asked = plan(POISSON, 300);
            asked.seed = seed;
            let last = Schedule::new(&asked, 0).last().unwrap().at_ns as f64 / 1e9;
            assert!(
                (0.25..0.3).contains(&last),
                "300 at 1,000/s end at {last} s"
            );
        }
    }

    #[test]
    fn the_duration_ends_an_open_plan() {
        let mut short = plan(
            Arrivals::Open {
                rate_per_s: 1000.0,
                spacing: Spacing::Constant,
            },
            1 << 40,
        );
        short.stop.duration = Some(Duration::from_millis(50));
        let mut schedule = Schedule::new(&short, 0);
        assert_eq!(schedule.by_ref().count(), 50);
        assert_eq!(schedule.next(), None, "and it stays ended");
    }

    /// The number of arrivals in each part of a profile is what the rate says; six deviations of a Poisson count are allowed.
    #[test]
    fn a_profile_has_its_rates() {
        let seconds = Duration::from_secs;
        let ramp = Stage {
            from_per_s: 0.0,
            to_per_s: 10_000.0,
            length: seconds(10),
        };
        let down = Stage {
            from_per_s: 10_000.0,
            to_per_s: 0.0,
            length: seconds(2),
        };
        let stages = vec![
            Stage::step(1000.0, seconds(5)),
            ramp,
            Stage::step(500.0, seconds(3)),
            down,
        ];
        for spacing in [Spacing::Poisson, Spacing::Constant] {
            let arrivals = Arrivals::Profile {
                stages: stages.clone(),
                spacing,
                at_most: None,
            };
            let all: Vec<_> = Schedule::new(&plan(arrivals, u64::MAX), 0).collect();
            assert!(
                all.windows(2).all(|w| w[0].at_ns <= w[1].at_ns),
                "time goes on"
            );
            let within = |from: f64, to: f64| {
                all.iter()
                    .filter(|d| (from * 1e9..to * 1e9).contains(&(d.at_ns as f64)))
                    .count() as f64
            };
            for (from, to, expected) in [
                (0.0, 5.0, 5000.0),
                (5.0, 15.0, 50_000.0),
                (5.0, 10.0, 12_500.0), // half the ramp's time is a quarter of its requests
                (15.0, 18.0, 1500.0),
                (18.0, 20.0, 10_000.0),
                (18.0, 19.0, 7500.0),
                (20.0, 1e6, 0.0),
            ] {
                let (found, allowed) = (within(from, to), 6.0 * f64::sqrt(expected) + 2.0);
                assert!(
                    (found - expected).abs() <= allowed,
                    "{found} within {from}…{to} s, not {expected}"
                );
            }
            let stage = |n| all.iter().filter(|d| d.stage == n).count() as f64;
            assert_eq!(stage(1), within(5.0, 15.0));
            assert_eq!(all.len() as f64, within(0.0, 20.0));
        }
    }
}
