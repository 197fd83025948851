//! Histograms of waiting and of service times, with the buckets that `bpf/observe.h` counts in.

use serde::{Deserialize, Serialize};

/// Buckets an octave.
const STEPS: u64 = 16;

/// Waiting times in µs: log-linear, exact below 16 µs, then within 6 %.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waits {
    /// How many.
    pub count: u64,
    /// Their sum.
    pub sum_us: u64,
    /// The longest. After [`Waits::since`]: the upper end of the highest bucket that grew, at most the longest ever.
    pub max_us: u64,
    /// How many in each bucket.
    pub buckets: Vec<u32>,
}

impl Waits {
    /// Of these times in µs.
    pub fn of(times_us: impl IntoIterator<Item = u64>) -> Self {
        let mut waits = Self::default();
        for us in times_us {
            let bucket = bucket_of(us);
            if waits.buckets.len() <= bucket {
                waits.buckets.resize(bucket + 1, 0);
            }
            waits.count += 1;
            waits.sum_us = waits.sum_us.saturating_add(us);
            waits.max_us = waits.max_us.max(us);
            waits.buckets[bucket] += 1;
        }
        waits
    }

    /// The time below or at which the share `quantile` of all lies, µs (the middle of its bucket); `None` where there is
    /// none.
    pub fn quantile_us(&self, quantile: f64) -> Option<f64> {
        let total: u64 = self.buckets.iter().map(|n| u64::from(*n)).sum();
        if total == 0 {
            return None;
        }
        let rank = ((quantile * total as f64).ceil() as u64).clamp(1, total);
        let mut seen = 0;
        let bucket = self.buckets.iter().position(|n| {
            seen += u64::from(*n);
            seen >= rank
        })?;
        Some(self.middle_us(bucket))
    }

    /// The mean, µs; `None` where there is none.
    pub fn mean_us(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum_us as f64 / self.count as f64)
    }

    /// The times that were found, each with how many there were: the middle of its bucket, in µs.
    pub fn times_us(&self) -> impl Iterator<Item = (f64, u32)> {
        let filled = self.buckets.iter().enumerate().filter(|(_, n)| **n > 0);
        filled.map(|(bucket, n)| (self.middle_us(bucket), *n))
    }

    /// The middle of a bucket, µs, if it is not above the longest.
    fn middle_us(&self, bucket: usize) -> f64 {
        let (low, high) = (floor_us(bucket) as f64, floor_us(bucket + 1) as f64);
        let middle = (low + high - 1.0) / 2.0;
        middle.min(self.max_us as f64)
    }

    /// Returns the waits since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        let before = |bucket: usize| earlier.buckets.get(bucket).copied().unwrap_or(0);
        let buckets: Vec<u32> = self
            .buckets
            .iter()
            .enumerate()
            .map(|(bucket, n)| n.wrapping_sub(before(bucket)))
            .collect();
        let highest = buckets.iter().rposition(|n| *n > 0);
        let max_us = if self.max_us > earlier.max_us {
            self.max_us
        } else {
            highest.map_or(0, |b| (floor_us(b + 1) - 1).min(self.max_us))
        };
        Self {
            count: self.count.saturating_sub(earlier.count),
            sum_us: self.sum_us.saturating_sub(earlier.sum_us),
            max_us,
            buckets,
        }
    }

    /// Without the empty buckets at its end: the same times in less space.
    pub fn trimmed(mut self) -> Self {
        let used = self.buckets.iter().rposition(|n| *n > 0);
        self.buckets.truncate(used.map_or(0, |last| last + 1));
        self
    }

    /// Adds another's.
    pub fn add(&mut self, other: &Self) {
        self.count = self.count.saturating_add(other.count);
        self.sum_us = self.sum_us.saturating_add(other.sum_us);
        self.max_us = self.max_us.max(other.max_us);
        let longer = self.buckets.len().max(other.buckets.len());
        self.buckets.resize(longer, 0);
        for (mine, more) in self.buckets.iter_mut().zip(&other.buckets) {
            *mine = mine.wrapping_add(*more);
        }
    }
}

/// Lower end of a bucket, µs; of one beyond all that can be counted, which only a file can hold, the highest number.
pub fn floor_us(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < STEPS {
        bucket
    } else {
        let octave = bucket / STEPS - 1;
        if octave > 58 {
            return u64::MAX;
        }
        (STEPS + bucket % STEPS) << octave
    }
}

/// As `bucket_of` in observe.bpf.c.
fn bucket_of(us: u64) -> usize {
    if us < STEPS {
        return us as usize;
    }
    let octave = u64::from(us.ilog2());
    ((octave - 3) * STEPS + ((us >> (octave - 4)) & (STEPS - 1))) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With all the buckets that the probes have.
    fn of(times: &[u64]) -> Waits {
        let mut waits = Waits::of(times.iter().copied());
        waits.buckets.resize(16 * 32, 0);
        waits
    }

    #[test]
    fn each_time_is_told_with_how_many_there_were() {
        let waits = Waits::of([3, 3, 7, 40]);
        // Two of 40 and 41 share a bucket, and none is longer than the longest.
        let told: Vec<_> = waits.times_us().collect();
        assert_eq!(told, [(3.0, 2), (7.0, 1), (40.0, 1)]);
        assert_eq!(Waits::default().times_us().count(), 0);
    }

    #[test]
    fn each_time_lies_in_its_bucket() {
        for us in (0..5000).chain([1 << 20, (1 << 33) + 12345, 1 << 62]) {
            let bucket = bucket_of(us);
            assert!(
                floor_us(bucket) <= us && us < floor_us(bucket + 1),
                "{us} in {bucket}"
            );
        }
    }

    #[test]
    fn quantiles_are_near_the_truth() {
        let times: Vec<u64> = (1..=10_000).collect();
        let waits = of(&times);
        for (quantile, truth) in [(0.5, 5000.0), (0.99, 9900.0), (0.001, 10.0)] {
            let found = waits.quantile_us(quantile).expect("there are some");
            assert!((found / truth - 1.0).abs() < 0.07, "{quantile}: {found}");
        }
        assert_eq!(of(&[3]).quantile_us(0.99), Some(3.0));
        assert_eq!(of(&[]).quantile_us(0.5), None);
        assert_eq!(waits.mean_us(), Some(5000.5));
    }

    #[test]
    fn nothing_has_no_mean_and_no_longest() {
        assert_eq!(of(&[]).mean_us(), None);
        let waits = of(&[5, 9000]);
        let none = waits.since(&waits);
        assert_eq!((none.count, none.max_us, none.mean_us()), (0, 0, None));
    }

    #[test]
    fn a_quantile_is_the_middle_of_its_bucket() {
        // 64 to 67 µs share a bucket. A second one keeps the longest wait from being the answer.
        assert_eq!((floor_us(48), floor_us(49)), (64, 68));
        assert_eq!(of(&[64, 5000]).quantile_us(0.5), Some(65.5));
        assert_eq!(of(&[64]).quantile_us(0.5), Some(64.0), "none was longer");
    }

    #[test]
    fn the_longest_since_then_is_known_where_it_is_the_longest_ever() {
        let (before, after) = (of(&[5]), of(&[5, 9001]));
        assert_eq!(after.since(&before).max_us, 9001);
        // The probes write the longest before its bucket (bpf/observe.bpf.c), and may be read between the two.
        let mut between = of(&[5]);
        between.max_us = 9001;
        assert_eq!(between.since(&before).max_us, 9001);
        // Otherwise its bucket is: 64 to 67 µs.
        let (before, after) = (of(&[9001]), of(&[9001, 65]));
        assert_eq!(after.since(&before).max_us, 67);
    }

    #[test]
    fn what_a_file_may_hold_does_no_harm() {
        let mad = Waits {
            count: u64::MAX,
            sum_us: u64::MAX,
            max_us: u64::MAX,
            buckets: vec![u32::MAX; 5000],
        };
        let mut sum = mad.clone();
        sum.add(&mad);
        assert_eq!(sum.quantile_us(1.0), Some(u64::MAX as f64));
        assert!(of(&[5]).since(&mad).quantile_us(0.5).is_some());
    }

    #[test]
    fn trimmed_it_tells_the_same() {
        let (before, after) = (of(&[5, 9000]), of(&[5, 9000, 7]));
        let trimmed = after.clone().trimmed();
        assert!(trimmed.buckets.len() < after.buckets.len());
        assert_eq!(trimmed.quantile_us(0.99), after.quantile_us(0.99));
        let since = after.since(&before);
        assert_eq!(
            trimmed.since(&before.trimmed()).quantile_us(0.5),
            since.quantile_us(0.5)
        );
        assert_eq!(of(&[]).trimmed().buckets.len(), 0);
    }

    #[test]
    fn a_difference_is_what_came_since() {
        let (before, after) = (of(&[5, 9000]), of(&[5, 9000, 7, 7]));
        let since = after.since(&before);
        assert_eq!((since.count, since.sum_us, since.max_us), (2, 14, 7));
        assert_eq!(since.quantile_us(1.0), Some(7.0));
        let mut sum = before.clone();
        sum.add(&since);
        assert_eq!(sum, after);
    }
}
