//! The workloads: the requests, their rate, and the clients that send them.

use std::time::Duration;
use wakeone_load::{Arrivals, Mix, Plan, Spacing};

use crate::measure;
use crate::ways::Serving;

/// Workers of every variant.
pub const WORKERS: usize = 4;

/// A workload at one size.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    /// First part of the variants' names.
    pub name: &'static str,
    /// How many requests.
    pub requests: u64,
    /// When they are due.
    pub arrivals: Arrivals,
    /// The requests that they send.
    pub mix: Mix,
    /// How the workers serve.
    pub serving: Serving,
    /// About how long one load takes here, in seconds.
    pub seconds: f64,
}

/// Connections of `kept`.
pub const KEPT_CONNECTIONS: usize = 64;
/// How long after one connection of `kept` the next is opened.
pub const KEPT_APART: Duration = Duration::from_millis(4);
/// Requests a second of `kept`, over all connections.
pub const KEPT_RATE: f64 = 2400.0;
/// A request of `kept`, in µs of sleep: the event loop does nothing else meanwhile.
pub const KEPT_US: u64 = 1_000;

/// Requests a second of `stuck`.
pub const STUCK_RATE: f64 = 1000.0;
/// A usual request of `stuck`, in µs of sleep.
pub const STUCK_US: u64 = 1_000;
/// A slow request of `stuck`, in µs of sleep.
pub const STUCK_SLOW_US: u64 = 100_000;
/// One request in this many is a slow one.
pub const STUCK_ONE_IN: u64 = 100;
/// CPU time of a request of `cpu`, in µs. It is several times the cost of connection, accept, parsing and answer
/// together. So the server's work is the limit, as it was in the source.
pub const CPU_US: u64 = 300;
/// Simultaneous clients of `cpu`: the source's.
pub const CPU_CLIENTS: usize = 200;

/// All workloads, at the full size or at one that is done in a minute.
pub fn workloads(quick: bool) -> [Workload; 3] {
    let (kept, stuck, cpu) = if quick {
        (1_800, 1_500, 4_000)
    } else {
        (12_000, 10_000, 100_000)
    };
    [
        Workload {
            name: "kept",
            requests: kept,
            arrivals: Arrivals::Kept {
                rate_per_s: KEPT_RATE,
                spacing: Spacing::Poisson,
                connections: KEPT_CONNECTIONS,
                apart: KEPT_APART,
            },
            mix: Mix::one(format!("/work?us={KEPT_US}&kind=sleep")),
            serving: Serving::Loops,
            seconds: kept as f64 / KEPT_RATE
                + KEPT_APART.as_secs_f64() * KEPT_CONNECTIONS as f64
                + 0.5,
        },
        Workload {
            name: "stuck",
            requests: stuck,
            arrivals: measure::poisson(STUCK_RATE),
            mix: Mix::weighted([
                (STUCK_ONE_IN - 1, format!("/work?us={STUCK_US}&kind=sleep")),
                (1, format!("/work?us={STUCK_SLOW_US}&kind=sleep")),
            ]),
            serving: Serving::Blocking,
            seconds: stuck as f64 / STUCK_RATE + 0.5,
        },
        Workload {
            name: "cpu",
            requests: cpu,
            arrivals: Arrivals::Closed {
                concurrency: CPU_CLIENTS,
            },
            mix: Mix::one(format!("/work?us={CPU_US}&kind=cpu")),
            serving: Serving::Blocking,
            seconds: cpu as f64 * CPU_US as f64 * 1e-6 / crate::cpus::count() as f64 + 0.5,
        },
    ]
}

impl Workload {
    /// The load on a server.
    pub fn plan(&self, target: std::net::SocketAddr, seed: u64) -> Plan {
        let end = measure::for_requests(self.requests);
        measure::plan(target, self.arrivals.clone(), end, self.mix.clone(), seed)
    }
}

/// How far from even (0.1 is ten percent) the share of a worker in `stuck` may be by chance alone: three standard
/// deviations for `n` requests.
///
/// Two things are drawn. The first is the worker that gets a request: binomial with chance 1/k, so the relative
/// deviation is √((k−1)/n). The second is the worker that gets one of the m = n/100 slow requests, during which it
/// takes nothing else. Its stuck time has the relative deviation √((k−1)/m). This time is the share f of all its time,
/// so the deviation is f/(1−f) as large in the requests that it takes. At 1,000 requests/s, 1 % of 100 ms over 4
/// workers, f is 0.25.
pub fn chance_of_uneven(n: f64) -> f64 {
    let k = WORKERS as f64;
    let slow = n / STUCK_ONE_IN as f64;
    let stuck = STUCK_RATE / STUCK_ONE_IN as f64 * STUCK_SLOW_US as f64 * 1e-6 / k;
    let lever = stuck / (1.0 - stuck);
    3.0 * ((k - 1.0) / n + (k - 1.0) / slow * lever * lever).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chance_shrinks_with_the_sample_and_is_no_excuse_at_full_size() {
        assert!(chance_of_uneven(4_500.0) > 0.1);
        assert!(chance_of_uneven(50_000.0) < 0.1);
        assert!((chance_of_uneven(10_000.0) / chance_of_uneven(40_000.0) - 2.0).abs() < 1e-9);
    }

    #[test]
    fn the_published_sizes() {
        let [kept, stuck, cpu] = workloads(false);
        let plan = kept.plan("127.0.0.1:80".parse().unwrap(), 1);
        plan.check().unwrap();
        assert!(plan.keep_alive);
        assert_eq!((stuck.requests, cpu.requests), (10_000, 100_000));
        assert_eq!(cpu.arrivals, Arrivals::Closed { concurrency: 200 });
        let plan = stuck.plan("127.0.0.1:80".parse().unwrap(), 1);
        plan.check().unwrap();
        assert!(!plan.keep_alive);
    }
}
