//! A distribution small enough for a result file and fine enough to draw: eight buckets to each doubling.
//!
//! Bucket borders lie on powers of two of the unit. The sources print histograms in powers of two, which are therefore
//! exact sums of buckets and not estimates.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Buckets to each doubling.
const STEPS: f64 = 8.0;

/// Counts of values in buckets; the buckets that hold nothing are left out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Distribution {
    /// Unit of the borders.
    pub unit: String,
    /// Exclusive upper border of each bucket, rising. Its lower border is the upper one divided by 2^(1/8).
    pub upper: Vec<f64>,
    /// How many values fell into each bucket.
    pub count: Vec<u64>,
}

impl Distribution {
    /// Buckets from an HDR histogram of nanoseconds, in milliseconds.
    pub fn from_ns(histogram: &Histogram<u64>) -> Self {
        let mut distribution = Self {
            unit: "ms".into(),
            ..Self::default()
        };
        for bucket in histogram.iter_recorded() {
            distribution.add(
                bucket.value_iterated_to() as f64 / 1e6,
                bucket.count_at_value(),
            );
        }
        distribution
    }

    /// Counts `count` values of this size. Values must come in rising order or through [`Distribution::merge`].
    fn add(&mut self, value: f64, count: u64) {
        let step = (value.max(1e-6).log2() * STEPS).floor() + 1.0;
        let upper = (step / STEPS).exp2();
        match self.upper.iter().rposition(|&u| same(u, upper)) {
            Some(place) => self.count[place] += count,
            None => {
                let place = self.upper.partition_point(|&u| u < upper);
                self.upper.insert(place, upper);
                self.count.insert(place, count);
            }
        }
    }

    /// Adds the counts of another one.
    pub fn merge(&mut self, other: &Self) {
        if self.unit.is_empty() {
            self.unit.clone_from(&other.unit);
        }
        for (&upper, &count) in other.upper.iter().zip(&other.count) {
            // A hair below the border lies in the bucket that ends there.
            self.add(upper * 0.99, count);
        }
    }

    /// How many values there are.
    pub fn total(&self) -> u64 {
        self.count.iter().sum()
    }

    /// Counts in powers of two: `(lower border, count)` for [0,1), [1,2), [2,4) … up to the largest value.
    pub fn powers_of_two(&self) -> Vec<(u64, u64)> {
        let mut rows: Vec<(u64, u64)> = vec![(0, 0)];
        for (&upper, &count) in self.upper.iter().zip(&self.count) {
            let lower = upper * (-1.0 / STEPS).exp2();
            // The added hair keeps a border that is 1.9999999 from falling into the row below.
            let row = if lower < 0.999_999 {
                0
            } else {
                1 + (lower * 1.000_001).log2().floor() as usize
            };
            while rows.len() <= row {
                rows.push((1 << (rows.len() - 1), 0));
            }
            rows[row].1 += count;
        }
        rows
    }

    /// The quantile function as a line: points `(share of values that are at most this large, value)`, rising. Within a
    /// bucket it goes from the lower border to the upper one; between buckets it jumps.
    pub fn quantiles(&self) -> Vec<(f64, f64)> {
        let total = self.total().max(1) as f64;
        let mut sum = 0;
        let mut points = Vec::with_capacity(2 * self.upper.len());
        for (&upper, &count) in self.upper.iter().zip(&self.count) {
            points.push((sum as f64 / total, upper * (-1.0 / STEPS).exp2()));
            sum += count;
            points.push((sum as f64 / total, upper));
        }
        points
    }
}

fn same(a: f64, b: f64) -> bool {
    (a / b - 1.0).abs() < 1e-6
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values_ms: &[f64]) -> Distribution {
        let mut histogram = Histogram::<u64>::new_with_bounds(1, 3_600_000_000_000, 3).unwrap();
        for value in values_ms {
            histogram.record((value * 1e6) as u64).unwrap();
        }
        Distribution::from_ns(&histogram)
    }

    #[test]
    fn powers_of_two_count_each_value_once() {
        let rows = of(&[0.2, 1.1, 1.9, 3.0, 17.0, 31.0, 72.65]).powers_of_two();
        assert_eq!(
            rows,
            [
                (0, 1),
                (1, 2),
                (2, 1),
                (4, 0),
                (8, 0),
                (16, 2),
                (32, 0),
                (64, 1)
            ]
        );
    }

    #[test]
    fn merging_is_adding() {
        let mut sum = of(&[1.5, 40.0]);
        sum.merge(&of(&[1.5, 0.3, 900.0]));
        assert_eq!(sum, of(&[0.3, 1.5, 1.5, 40.0, 900.0]));
        assert!(sum.upper.is_sorted());
        assert_eq!(sum.total(), 5);
    }

    #[test]
    fn quantiles_jump_over_empty_buckets() {
        let points = of(&[1.0, 1.0, 1.0, 64.0]).quantiles();
        assert_eq!(points.len(), 4);
        assert_eq!((points[1].0, points[2].0, points[3].0), (0.75, 0.75, 1.0));
        assert!(points[1].1 < 1.2 && points[2].1 > 50.0, "{points:?}");
    }
}
