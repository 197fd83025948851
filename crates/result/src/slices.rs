//! Measures small differences on a noisy machine: one load on one running server, whose setup is switched every 100 to
//! 250 ms.
//!
//! A whole load of each setup, one after the other, compares two moments of the machine as much as two setups. They differ
//! in other work on the machine, in the heat of the CPUs, in where the processes lie in memory. Slices of one load
//! have most of that in common, and neighbouring ones nearly all. So only neighbours are compared. In a *block* every
//! arm has two slices, in a random order and then in its mirror image: a drift along the block adds the same to each
//! arm. A block gives one ratio of each pair of arms, and the interval comes from drawing the blocks anew
//! ([`stats::bootstrap`]).
//!
//! Completed connections are counted a second, and for a second of the CPU time that client and server had. Other work on
//! the same machine takes whole CPUs from the former, and only caches from the latter.

use std::time::Duration;

use rand::seq::SliceRandom;
use rand::{SeedableRng, rngs::StdRng};
use serde::{Deserialize, Serialize};

use crate::stats;

/// How often the ratios are drawn anew for an interval.
const RESAMPLES: usize = 4000;
/// How sure an interval is.
pub const CONFIDENCE: f64 = 0.95;

/// Times of a load in slices.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Blocks, each with two slices of every arm.
    pub blocks: usize,
    /// The counted part of a slice.
    pub counted: Duration,
    /// The part after each switch that is not counted: connections of the arm before are still under way.
    pub settling: Duration,
}

impl Timing {
    /// As many blocks as fit into a time, if switching took none.
    pub fn for_seconds(seconds: f64, arms: usize, counted: Duration, settling: Duration) -> Self {
        let block = (counted + settling).as_secs_f64() * 2.0 * arms as f64;
        Self {
            blocks: ((seconds / block) as usize).max(2),
            counted,
            settling,
        }
    }
}

/// Two arms to compare, by their places: `a / b`.
pub type Pair = (usize, usize);

/// The counts of one variant's slices.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Slices {
    /// The setups that took turns.
    pub arms: Vec<String>,
    /// Which of them are compared: places above and below the line.
    pub pairs: Vec<Pair>,
    /// The counted part of each slice, in ms.
    pub counted_ms: f64,
    /// The part after each switch that was not counted, in ms.
    pub settling_ms: f64,
    /// For each round and each block, the completed connections a second of every arm, in the order of `arms`.
    pub rounds: Vec<Vec<Vec<f64>>>,
    /// The same for a second of CPU time of client and server together. It is empty where the kernel does not charge
    /// them with all of it (`softirq_is_charged` of the lab).
    pub cpu_rounds: Vec<Vec<Vec<f64>>>,
}

/// The unit of time that connections are counted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Per {
    /// Completed connections a second.
    Second,
    /// Completed connections for a second of CPU time of client and server. Other processes' CPU time is not in it.
    CpuSecond,
}

impl Per {
    /// The unit in words.
    pub fn name(self) -> &'static str {
        match self {
            Per::Second => "a second",
            Per::CpuSecond => "a second of CPU time",
        }
    }
}

/// A ratio of two arms, and how sure it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Contrast {
    /// The variant whose slices these are.
    pub variant: String,
    /// The arm above the line.
    pub a: String,
    /// The arm below the line.
    pub b: String,
    /// The unit of the compared numbers.
    pub per: Per,
    /// Mean of the middle half of the blocks' ratios.
    pub ratio: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
    /// How sure the interval is.
    pub confidence: f64,
    /// Mean of all blocks' ratios. A mean far from `ratio` shows that some blocks were disturbed.
    pub mean: f64,
    /// Blocks, all rounds together.
    pub blocks: usize,
    /// Slices of both arms in them.
    pub slices: usize,
    /// The ratio of each round by itself.
    pub rounds: Vec<f64>,
}

impl Contrast {
    /// Half the width of the interval.
    pub fn half_width(&self) -> f64 {
        (self.high - self.low) / 2.0
    }

    /// Whether the interval has this ratio in it.
    pub fn covers(&self, ratio: f64) -> bool {
        self.low <= ratio && ratio <= self.high
    }

    /// `0.994 [0.990, 0.998]`.
    pub fn shown(&self) -> String {
        format!("{:.3} [{:.3}, {:.3}]", self.ratio, self.low, self.high)
    }
}

impl Slices {
    /// Adds another round of the same arms.
    pub fn merge(&mut self, other: &Self) {
        self.rounds.extend(other.rounds.iter().cloned());
        self.cpu_rounds.extend(other.cpu_rounds.iter().cloned());
    }

    /// The ratios of the requested pairs; none where nothing was counted. `seed` decides which blocks are drawn.
    pub fn contrasts(&self, variant: &str, seed: u64) -> Vec<Contrast> {
        let both = [
            (Per::Second, &self.rounds),
            (Per::CpuSecond, &self.cpu_rounds),
        ];
        let all = both.into_iter().flat_map(|(per, rounds)| {
            let pairs = self.pairs.iter();
            pairs.filter_map(move |pair| {
                let by_round = rounds.iter().map(|round| log_ratios(round, *pair));
                self.contrast(variant, *pair, per, by_round.collect(), seed)
            })
        });
        all.collect()
    }

    fn contrast(
        &self,
        variant: &str,
        (a, b): Pair,
        per: Per,
        by_round: Vec<Vec<f64>>,
        seed: u64,
    ) -> Option<Contrast> {
        let logs: Vec<f64> = by_round.iter().flatten().copied().collect();
        if logs.len() < 2 {
            return None;
        }
        let (low, high) = stats::bootstrap(&logs, stats::midmean, RESAMPLES, CONFIDENCE, seed);
        let middles = by_round.iter().filter(|round| !round.is_empty());
        Some(Contrast {
            variant: variant.into(),
            a: self.arms.get(a)?.clone(),
            b: self.arms.get(b)?.clone(),
            per,
            ratio: stats::midmean(&logs).exp(),
            low: low.exp(),
            high: high.exp(),
            confidence: CONFIDENCE,
            mean: stats::mean(&logs).exp(),
            blocks: logs.len(),
            slices: logs.len() * 4,
            rounds: middles.map(|round| stats::midmean(round).exp()).collect(),
        })
    }
}

/// The logarithm of each block's ratio: a half and a double are equally far from 1. A block in which an arm completed nothing
/// has no ratio.
fn log_ratios(blocks: &[Vec<f64>], (a, b): Pair) -> Vec<f64> {
    let ratio = |block: &Vec<f64>| Some((block.get(a)? / block.get(b)?).ln());
    blocks
        .iter()
        .filter_map(ratio)
        .filter(|log| log.is_finite())
        .collect()
}

/// The arms of each block in the order of their slices: shuffled, then the same backwards.
pub fn order(arms: usize, blocks: usize, seed: u64) -> Vec<Vec<usize>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let block = |_| {
        let mut forth: Vec<usize> = (0..arms).collect();
        forth.shuffle(&mut rng);
        let back = forth.clone().into_iter().rev();
        forth.extend(back);
        forth
    };
    (0..blocks).map(block).collect()
}

/// The counts of one slice, or of several.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Count {
    /// Connections.
    pub completed: f64,
    /// The time that they took.
    pub seconds: f64,
    /// CPU time of client and server.
    pub cpu_seconds: f64,
    /// How often a process of the server went to sleep.
    pub switches: f64,
}

impl Count {
    fn add(&mut self, other: Self) {
        self.completed += other.completed;
        self.seconds += other.seconds;
        self.cpu_seconds += other.cpu_seconds;
        self.switches += other.switches;
    }

    /// The rate, rounded to a tenth; 0 where no time was spent.
    pub fn per(&self, seconds: f64) -> f64 {
        let rate = self.completed / seconds;
        if rate.is_finite() {
            (rate * 10.0).round() / 10.0
        } else {
            0.0
        }
    }
}

/// Takes the slices in their order; `take` returns one slice of an arm. The result has the counts of each block, an
/// arm each.
///
/// # Errors
/// That of `take`.
pub fn take_all<E>(
    arms: usize,
    blocks: usize,
    seed: u64,
    mut take: impl FnMut(usize) -> Result<Count, E>,
) -> Result<Vec<Vec<Count>>, E> {
    let mut all = Vec::with_capacity(blocks);
    for block in order(arms, blocks, seed) {
        let mut counts = vec![Count::default(); arms];
        for arm in block {
            counts[arm].add(take(arm)?);
        }
        all.push(counts);
    }
    Ok(all)
}

/// A number of each arm of each block.
pub fn of_each(round: &[Vec<Count>], number: impl Fn(&Count) -> f64) -> Vec<Vec<f64>> {
    let of_block = |block: &Vec<Count>| block.iter().map(&number).collect();
    round.iter().map(of_block).collect()
}

/// How often a process of the server went to sleep for a connection, by arm.
pub fn sleeps(round: &[Vec<Count>]) -> Vec<f64> {
    let arms = round.first().map_or(0, Vec::len);
    let of = |arm: usize| {
        let mut all = Count::default();
        round.iter().for_each(|block| all.add(block[arm]));
        all.switches / all.completed.max(1.0)
    };
    (0..arms).map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::RngExt;
    use std::convert::Infallible;

    /// A machine whose speed drifts slowly, jitters from slice to slice, and now and then is busy with something else.
    struct Machine {
        rng: StdRng,
        speed: f64,
        slice: f64,
    }

    impl Machine {
        fn new(seed: u64) -> Self {
            Self {
                rng: StdRng::seed_from_u64(seed),
                speed: 20_000.0,
                slice: 0.0,
            }
        }

        /// Sum of twelve draws: near enough to normal, with a deviation of 1.
        fn normal(&mut self) -> f64 {
            (0..12).map(|_| self.rng.random::<f64>()).sum::<f64>() - 6.0
        }

        fn rate(&mut self, cost: f64) -> f64 {
            self.slice += 1.0;
            self.speed *= 1.0 + 0.01 * self.normal();
            let wave = 1.0 + 0.3 * (self.slice / 40.0).sin();
            let jitter = 1.0 + 0.05 * self.normal();
            let busy = if self.rng.random_bool(0.05) { 0.5 } else { 1.0 };
            self.speed * wave * jitter * busy * cost
        }
    }

    /// A slice of a second.
    fn second(completed: f64) -> Count {
        Count {
            completed,
            seconds: 1.0,
            cpu_seconds: 2.0,
            switches: completed / 2.0,
        }
    }

    /// The contrasts of arms that keep these shares of the machine's speed.
    fn measured(seed: u64, blocks: usize, shares: &[f64]) -> Vec<Contrast> {
        let mut machine = Machine::new(seed);
        let taken = take_all(shares.len(), blocks, seed, |arm| {
            Ok::<Count, Infallible>(second(machine.rate(shares[arm])))
        });
        let Ok(round) = taken;
        let slices = Slices {
            arms: (0..shares.len()).map(|arm| arm.to_string()).collect(),
            pairs: (1..shares.len()).map(|arm| (arm, 0)).collect(),
            counted_ms: 1.0,
            settling_ms: 1.0,
            rounds: vec![of_each(&round, |count| count.per(count.seconds))],
            cpu_rounds: Vec::new(),
        };
        slices.contrasts("x", seed)
    }

    #[test]
    fn the_order_is_balanced_and_mirrored() {
        let blocks = order(3, 50, 7);
        for block in &blocks {
            assert!((0..3).all(|i| block[i] == block[5 - i]), "{block:?}");
            let mut once = block[..3].to_vec();
            once.sort_unstable();
            assert_eq!(once, [0, 1, 2]);
        }
        let different: std::collections::BTreeSet<_> = blocks.iter().collect();
        assert_eq!(different.len(), 6, "every order comes");
        assert_eq!(blocks, order(3, 50, 7));
        assert_ne!(blocks, order(3, 50, 8));
    }

    #[test]
    fn intervals_cover_the_truth_on_a_noisy_machine() {
        let (mut of_97, mut of_1, mut widest) = (0, 0, 0.0_f64);
        for seed in 0..40 {
            let found = measured(seed, 300, &[1.0, 0.97, 1.0]);
            of_97 += usize::from(found[0].covers(0.97));
            of_1 += usize::from(found[1].covers(1.0));
            widest = widest.max(found[0].half_width());
            assert!(!found[0].covers(1.0), "3 % are told apart: {found:?}");
        }
        // 95 of 100 should hold it. Of 40, fewer than 34 come once in a hundred series.
        assert!(of_97 >= 34 && of_1 >= 34, "{of_97} and {of_1} of 40");
        assert!(widest < 0.012, "{widest}");
    }

    #[test]
    fn sleeps_are_for_a_connection_of_their_arm() {
        let blocks = vec![vec![second(100.0), second(0.0)]; 2];
        assert_eq!(sleeps(&blocks), [0.5, 0.0]);
        assert!(sleeps(&[]).is_empty());
    }

    #[test]
    fn a_drift_along_the_blocks_takes_no_side() {
        let mut speed = 10_000.0;
        let taken = take_all(2, 100, 3, |arm| {
            speed += 5.0;
            Ok::<Count, Infallible>(second(speed * [1.0, 0.97][arm]))
        });
        let Ok(round) = taken;
        let rates = of_each(&round, |count| count.completed);
        for log in log_ratios(&rates, (1, 0)) {
            assert!((log.exp() - 0.97).abs() < 1e-9);
        }
    }

    #[test]
    fn the_same_slices_give_the_same_interval() {
        assert_eq!(measured(5, 50, &[1.0, 0.9]), measured(5, 50, &[1.0, 0.9]));
        let found = &measured(5, 50, &[1.0, 0.9])[0];
        assert!(found.low < found.ratio && found.ratio < found.high);
        assert_eq!((found.blocks, found.slices), (50, 200));
        assert_eq!((found.a.as_str(), found.b.as_str()), ("1", "0"));
    }

    #[test]
    fn rounds_are_kept_apart_and_put_together() {
        let block = |a: f64| vec![100.0, a];
        let mut slices = Slices {
            arms: vec!["b".into(), "a".into()],
            pairs: vec![(1, 0)],
            counted_ms: 125.0,
            settling_ms: 25.0,
            rounds: vec![vec![block(98.0), block(98.0), block(0.0)]],
            cpu_rounds: vec![vec![block(50.0); 3]],
        };
        let mut next = slices.clone();
        next.rounds = vec![vec![block(96.0), block(96.0)]];
        slices.merge(&next);
        let found = slices.contrasts("x", 1);
        assert_eq!((found[0].per, found[1].per), (Per::Second, Per::CpuSecond));
        assert!((found[1].ratio - 0.5).abs() < 1e-9 && found[1].blocks == 6);
        let found = &found[0];
        assert_eq!(found.blocks, 4, "a block without an answer has no ratio");
        assert_eq!(
            found
                .rounds
                .iter()
                .map(|r| (r * 1e6).round())
                .collect::<Vec<_>>(),
            [980_000.0, 960_000.0]
        );
    }
}
