//! The result of a simulated load.

use hdrhistogram::Histogram;

/// The confidence interval of the mean is computed from the means of this many parts of the run.
const BATCHES: usize = 20;
/// Student's t for 95 % and 19 degrees of freedom.
const T_95: f64 = 2.093;

/// The result of a simulated load.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// From arrival to answer, in ns.
    pub latency: Histogram<u64>,
    /// The mean of that, in s, without the histogram's rounding.
    pub mean_s: f64,
    /// Half of the interval in which the true mean lies with 95 %, in s, from the means of parts of the run.
    pub mean_error_s: f64,
    /// Requests that each worker served.
    pub served: Vec<u64>,
    /// The counters.
    pub counts: Counts,
    /// Virtual time that passed, in s.
    pub elapsed_s: f64,
}

/// Counters of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Events that were simulated: arrivals, ends, looks, and rarer ones.
    pub events: u64,
    /// Queues that the agent moved.
    pub rescues: u64,
    /// Connections that were moved with them.
    pub moved: u64,
    /// Entries that the steerer of one queue changed.
    pub changes: u64,
    /// SYNs that found a full queue.
    pub dropped_syns: u64,
    /// Connections that a client gave up after its last SYN was dropped.
    pub given_up: u64,
    /// Requests lost: their worker crashed, or none was up.
    pub lost: u64,
}

impl Outcome {
    /// A quantile of the latency, in s.
    pub fn quantile_s(&self, quantile: f64) -> f64 {
        self.latency.value_at_quantile(quantile) as f64 / 1e9
    }

    /// Answers a second, of all requests.
    pub fn answers_per_s(&self) -> f64 {
        self.served.iter().sum::<u64>() as f64 / self.elapsed_s
    }

    /// The largest share of a worker over the mean.
    pub fn max_over_mean(&self) -> f64 {
        let sum: u64 = self.served.iter().sum();
        let most = self.served.iter().max().copied().unwrap_or(0);
        most as f64 * self.served.len() as f64 / sum.max(1) as f64
    }
}

/// Sums up as it goes.
#[derive(Debug)]
pub(crate) struct Tally {
    latency: Histogram<u64>,
    batch_size: u64,
    batches: Vec<f64>,
    in_batch: u64,
    sum: f64,
}

impl Tally {
    /// A sum for this many requests.
    pub(crate) fn new(requests: u64) -> Self {
        let mut latency = Histogram::new_with_bounds(1, 3_600_000_000_000, 3)
            .unwrap_or_else(|_| unreachable!("bounds that hdrhistogram takes"));
        latency.auto(true);
        Self {
            latency,
            batch_size: (requests / BATCHES as u64).max(1),
            batches: Vec::with_capacity(BATCHES + 1),
            in_batch: 0,
            sum: 0.0,
        }
    }

    /// A request took this long, in s.
    pub(crate) fn add(&mut self, took: f64) {
        self.latency.saturating_record((took * 1e9) as u64);
        self.sum += took;
        self.in_batch += 1;
        if self.in_batch == self.batch_size && self.batches.len() < BATCHES {
            let before: f64 = self.batches.iter().sum();
            self.batches.push(self.sum - before);
            self.in_batch = 0;
        }
    }

    /// The latency, its mean and how sure that is, in s.
    pub(crate) fn close(self) -> (Histogram<u64>, f64, f64) {
        let mean = self.sum / self.latency.len().max(1) as f64;
        let size = self.batch_size as f64;
        let of_batches: Vec<f64> = self.batches.iter().map(|sum| sum / size).collect();
        let n = of_batches.len() as f64;
        if n < 2.0 {
            return (self.latency, mean, f64::INFINITY);
        }
        let middle = of_batches.iter().sum::<f64>() / n;
        let variance = of_batches.iter().map(|m| (m - middle).powi(2)).sum::<f64>() / (n - 1.0);
        (self.latency, mean, T_95 * (variance / n).sqrt())
    }
}
