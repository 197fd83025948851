//! The little statistics that results need: order, spread, growth. Pure functions over slices.

use rand::{RngExt, SeedableRng, rngs::StdRng};

/// Median; the mean of the middle two for an even count; NaN for none.
pub fn median(values: &[f64]) -> f64 {
    if values.is_empty() {
        return f64::NAN;
    }
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 {
        sorted[middle]
    } else {
        (sorted[middle - 1] + sorted[middle]) / 2.0
    }
}

/// Smallest value; NaN for none.
pub fn min(values: &[f64]) -> f64 {
    values
        .iter()
        .copied()
        .min_by(f64::total_cmp)
        .unwrap_or(f64::NAN)
}

/// Largest value; NaN for none.
pub fn max(values: &[f64]) -> f64 {
    values
        .iter()
        .copied()
        .max_by(f64::total_cmp)
        .unwrap_or(f64::NAN)
}

/// The smallest of some.
pub fn least(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| min(values))
}

/// The largest of some.
pub fn most(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| max(values))
}

/// The sum of some.
pub fn sum(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum())
}

/// Arithmetic mean; NaN for none.
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Standard deviation over mean: 0 is constant. NaN for none.
pub fn variation(values: &[f64]) -> f64 {
    let middle = mean(values);
    let squares: Vec<f64> = values.iter().map(|v| (v - middle).powi(2)).collect();
    mean(&squares).sqrt() / middle
}

/// Ratios `a[i] / b[i]` of the rounds that both have.
pub fn paired_ratios(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter()
        .zip(b)
        .map(|(a, b)| a / b)
        .filter(|r| r.is_finite())
        .collect()
}

/// How far the values lie apart, as a share of their median: `(max − min) / median`; 0 for fewer than two.
pub fn spread(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    (max(values) - min(values)) / median(values)
}

/// Largest count over the mean count: 1 is even, `counts.len()` is all on one. 1 where nothing was counted.
pub fn max_over_mean(counts: &[u64]) -> f64 {
    let total: u64 = counts.iter().sum();
    match counts.iter().max() {
        Some(&most) if total > 0 => most as f64 * counts.len() as f64 / total as f64,
        _ => 1.0,
    }
}

/// Exponent `e` of the power law `y = c·x^e` that fits best (least squares over the logarithms): 1 is linear, 0 constant.
/// None for fewer than two usable points.
pub fn growth_exponent(points: &[(f64, f64)]) -> Option<f64> {
    let logs: Vec<(f64, f64)> = points
        .iter()
        .filter(|(x, y)| *x > 0.0 && *y > 0.0)
        .map(|(x, y)| (x.ln(), y.ln()))
        .collect();
    let n = logs.len() as f64;
    let (mx, my) = (
        logs.iter().map(|p| p.0).sum::<f64>() / n,
        logs.iter().map(|p| p.1).sum::<f64>() / n,
    );
    let variance: f64 = logs.iter().map(|p| (p.0 - mx).powi(2)).sum();
    let covariance: f64 = logs.iter().map(|p| (p.0 - mx) * (p.1 - my)).sum();
    (logs.len() > 1 && variance > 0.0).then(|| covariance / variance)
}

/// Mean of the middle half: a quarter of the values at each end is left out. It resists outliers as the median does,
/// and is surer than the median where there are none. NaN for no values.
pub fn midmean(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let out = sorted.len() / 4;
    mean(&sorted[out..sorted.len() - out])
}

/// A confidence interval of a statistic by the percentile bootstrap: as many values are drawn anew, with replacement,
/// `resamples` times. The same seed draws the same. NaN for no values.
pub fn bootstrap(
    values: &[f64],
    statistic: impl Fn(&[f64]) -> f64,
    resamples: usize,
    confidence: f64,
    seed: u64,
) -> (f64, f64) {
    if values.is_empty() || resamples == 0 {
        return (f64::NAN, f64::NAN);
    }
    let mut rng = StdRng::seed_from_u64(seed);
    let mut drawn = vec![0.0; values.len()];
    let mut found: Vec<f64> = (0..resamples)
        .map(|_| {
            drawn.fill_with(|| values[rng.random_range(0..values.len())]);
            statistic(&drawn)
        })
        .collect();
    found.sort_by(f64::total_cmp);
    let tail = (1.0 - confidence) / 2.0;
    let at = |share: f64| found[(share * (resamples - 1) as f64).round() as usize];
    (at(tail), at(1.0 - tail))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn variations() {
        assert_eq!(variation(&[5.0, 5.0]), 0.0);
        assert_eq!(variation(&[1.0, 3.0]), 0.5);
        assert!(variation(&[]).is_nan());
    }

    #[test]
    fn ratios_are_paired_and_finite() {
        assert_eq!(
            paired_ratios(&[2.0, 9.0, 1.0], &[1.0, 3.0, 0.0]),
            [2.0, 3.0]
        );
    }

    #[test]
    fn evenness() {
        assert_eq!(max_over_mean(&[5, 5, 5, 5]), 1.0);
        assert_eq!(max_over_mean(&[20, 0, 0, 0]), 4.0);
        assert_eq!(max_over_mean(&[0, 0]), 1.0);
    }

    #[test]
    fn middle_halves() {
        assert_eq!(midmean(&[1.0, 2.0, 3.0, 1000.0]), 2.5);
        assert_eq!(midmean(&[5.0]), 5.0);
        assert!(midmean(&[]).is_nan());
    }

    #[test]
    fn the_bootstrap_of_a_mean_is_the_textbook_s() {
        let values: Vec<f64> = (0..100).map(f64::from).collect();
        let (low, high) = bootstrap(&values, mean, 4000, 0.95, 1);
        // 49.5 ± 1.96 · 28.87 / √100
        assert!((low - 43.84).abs() < 0.5, "{low}");
        assert!((high - 55.16).abs() < 0.5, "{high}");
        assert_eq!(bootstrap(&values, mean, 4000, 0.95, 1), (low, high));
        assert_ne!(bootstrap(&values, mean, 4000, 0.95, 2), (low, high));
        assert_eq!(bootstrap(&[3.0; 9], mean, 100, 0.95, 1), (3.0, 3.0));
        assert!(bootstrap(&[], mean, 100, 0.95, 1).0.is_nan());
    }

    #[test]
    fn exponents() {
        let line: Vec<(f64, f64)> = (1..10).map(|x| (x as f64, 7.0 * x as f64)).collect();
        assert!((growth_exponent(&line).unwrap() - 1.0).abs() < 1e-9);
        let flat: Vec<(f64, f64)> = (1..10).map(|x| (x as f64, 7.0)).collect();
        assert!(growth_exponent(&flat).unwrap().abs() < 1e-9);
        assert_eq!(growth_exponent(&[(1.0, 1.0)]), None);
    }
}
