//! A load as data: when requests come, what they ask for, and what happens to the server meanwhile.

use serde::Deserialize;
use std::net::SocketAddr;
use std::time::Duration;
use wakeone_load::{Arrivals, Mix, Plan, Spacing, Stop};

use super::beside::Beside;
use super::sizes::Sizes;
use crate::measure;
use crate::ways::Serving;

/// A load, and the servers that get it.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Load {
    /// First part of the variants' names.
    pub name: String,
    /// The servers, by name.
    pub servers: Vec<String>,
    /// The server that nothing happens to, though it does to the others.
    #[serde(default)]
    pub undisturbed: String,
    /// The event that the server meets meanwhile.
    pub beside: Option<Beside>,
    /// How our own workers serve.
    #[serde(default)]
    pub serving: Serving,
    /// Workers, where this load has another number.
    pub workers: Option<usize>,
    /// Whether the latency is that of the first kind of requests alone.
    #[serde(default)]
    pub usual: bool,
    /// From how long on a request is late, in ms.
    pub late_ms: Option<u64>,
    /// The rate, as a multiple of what this server was measured to serve to so many clients.
    pub of_capacity: Option<(f64, String, usize)>,
    /// Whether our steered servers have the accept queues that `wakeone run` makes by itself.
    #[serde(default)]
    pub own_backlog: bool,
    /// Whether it is left out with `--quick`.
    #[serde(default)]
    pub whole: bool,
    /// For how long the same load is sent before anything counts.
    pub warm_up_s: Option<f64>,
    /// Whether CPU time and switches are counted, of the server and of the client.
    #[serde(default)]
    pub usage: bool,
    /// Whether the clients of a closed loop keep their connections.
    #[serde(default)]
    keep_alive: bool,
    rate_per_s: Option<f64>,
    /// Clients that each send a request once they have an answer.
    clients: Option<usize>,
    /// Connections that are kept, and how many ms apart they were opened.
    kept: Option<(usize, u64)>,
    requests: Option<Sizes<u64>>,
    seconds: Option<Sizes<f64>>,
    /// `(weight, path)`.
    mix: Vec<(u64, String)>,
    timeout_s: Option<f64>,
}

/// No load lasts longer than this, whatever becomes of a restart.
pub const LONGEST_S: f64 = 90.0;

impl Load {
    /// The clients' arrivals. Where the rate depends on the machine, it is this.
    pub fn arrivals(&self, measured_per_s: Option<f64>) -> Arrivals {
        let rate_per_s = measured_per_s.or(self.rate_per_s).unwrap_or(1.0);
        match (self.clients, self.kept) {
            (Some(concurrency), _) => Arrivals::Closed { concurrency },
            (None, Some((connections, apart_ms))) => Arrivals::Kept {
                rate_per_s,
                spacing: Spacing::Poisson,
                connections,
                apart: Duration::from_millis(apart_ms),
            },
            _ => measure::poisson(rate_per_s),
        }
    }

    /// The requests.
    pub fn mix(&self) -> Mix {
        Mix::weighted(self.mix.iter().cloned())
    }

    /// When it ends. Where it does not end by itself, the end of what happens beside it ends it.
    pub fn stop(&self, quick: bool) -> Stop {
        match (self.requests, self.seconds) {
            (Some(requests), _) => measure::for_requests(requests.of(quick)),
            (None, Some(seconds)) => measure::for_seconds(seconds.of(quick)),
            _ => measure::for_seconds(LONGEST_S),
        }
    }

    /// The load on a server.
    pub fn plan(&self, target: SocketAddr, quick: bool, measured: Option<f64>, seed: u64) -> Plan {
        let (arrivals, stop) = (self.arrivals(measured), self.stop(quick));
        let mut plan = measure::plan(target, arrivals, stop, self.mix(), seed);
        if let Some(seconds) = self.timeout_s {
            plan.timeout = Duration::from_secs_f64(seconds);
        }
        plan.keep_alive |= self.keep_alive;
        plan
    }

    /// About how long it takes with all that is before it, in seconds.
    pub fn typical_s(&self, quick: bool) -> f64 {
        let opening = self.kept.map_or(0.0, |(n, ms)| n as f64 * ms as f64 / 1e3);
        self.lasts_s(quick) + opening + self.warm_up_s.unwrap_or(0.0)
    }

    /// About how long its requests come, in seconds.
    pub fn lasts_s(&self, quick: bool) -> f64 {
        let requests = self.requests.map(|n| n.of(quick) as f64);
        let by_rate = requests.zip(self.rate_per_s).map(|(n, rate)| n / rate);
        let beside = self.beside.as_ref().map_or(0.0, |what| what.seconds(quick));
        let own = self.seconds.map(|s| s.of(quick)).or(by_rate);
        // A closed loop is as fast as the machine, by the work in it.
        let work = || {
            let weights: u64 = self.mix.iter().map(|(weight, _)| weight).sum();
            let us: f64 = self
                .mix
                .iter()
                .map(|(n, path)| *n as f64 * asked_us(path))
                .sum();
            requests.unwrap_or(0.0) * us / weights.max(1) as f64 / 1e6 / crate::cpus::count() as f64
        };
        own.unwrap_or_else(work).max(beside)
    }

    /// The numbers that a reader needs to do it again.
    pub fn parameters(&self, quick: bool) -> Vec<(String, serde_json::Value)> {
        let kept = self.kept.as_ref();
        let all = [
            ("requests", self.requests.map(|n| n.of(quick).into())),
            ("s", self.seconds.map(|s| s.of(quick).into())),
            ("rate_per_s", self.rate_per_s.map(Into::into)),
            ("of_capacity", self.of_capacity.as_ref().map(|c| c.0.into())),
            ("clients", self.clients.map(Into::into)),
            ("connections", kept.map(|k| k.0.into())),
            ("apart_ms", kept.map(|k| k.1.into())),
            ("workers", self.workers.map(Into::into)),
            ("timeout_s", self.timeout_s.map(Into::into)),
            ("mix", Some(serde_json::json!(self.mix))),
            (
                "beside",
                self.beside.as_ref().map(|what| what.parameter(quick)),
            ),
        ];
        let named =
            |(what, value): (&str, Option<_>)| Some((format!("{}_{what}", self.name), value?));
        all.into_iter().filter_map(named).collect()
    }
}

/// The µs that a path asks its worker for.
fn asked_us(path: &str) -> f64 {
    let text = path.split_once("us=").map_or("", |(_, rest)| rest);
    let digits = text.split(|c: char| !c.is_ascii_digit()).next();
    digits.and_then(|n| n.parse().ok()).unwrap_or(0.0)
}
