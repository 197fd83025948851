//! The outcome of a load.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::Stage;

/// How a request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// No process listens there.
    ConnectRefused,
    /// The handshake was not over within the timeout.
    ConnectTimeout,
    /// The connection was reset (RST) before the answer was whole.
    Reset,
    /// The server closed a kept connection while it was idle, as this request was sent: it has not read it.
    ClosedIdle,
    /// The answer was not whole within the timeout.
    Timeout,
    /// The server closed in good order before the answer was whole.
    EofEarly,
    /// The bytes received are no HTTP answer, or more bytes follow its end.
    BadResponse,
    /// A whole answer, but not a 2xx one.
    Status,
    /// Due, but no client of a limited number was free within the timeout.
    NotSent,
    /// No port left for this source and target (EADDRNOTAVAIL).
    AddressUnavailable,
    /// The accept queue of a UNIX socket is full (EAGAIN).
    QueueFull,
    /// The process has no file descriptor left (EMFILE).
    TooManyFiles,
    /// The server's certificate is not for its name, not valid now, or not by an authority that this machine trusts.
    Certificate,
    /// TLS failed otherwise: no common version, or not TLS at all.
    Tls,
    /// No route (EHOSTUNREACH, ENETUNREACH).
    Unreachable,
    /// Any other errno.
    Other(i32),
}

impl ErrorKind {
    /// All but those of an errno.
    const NAMED: [Self; 15] = [
        Self::ConnectRefused,
        Self::ConnectTimeout,
        Self::Reset,
        Self::ClosedIdle,
        Self::Timeout,
        Self::EofEarly,
        Self::BadResponse,
        Self::Status,
        Self::NotSent,
        Self::AddressUnavailable,
        Self::QueueFull,
        Self::TooManyFiles,
        Self::Certificate,
        Self::Tls,
        Self::Unreachable,
    ];
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::ConnectRefused => "connect_refused",
            Self::ConnectTimeout => "connect_timeout",
            Self::Reset => "reset",
            Self::ClosedIdle => "closed_idle",
            Self::Timeout => "timeout",
            Self::EofEarly => "eof_early",
            Self::BadResponse => "bad_response",
            Self::Status => "status",
            Self::NotSent => "not_sent",
            Self::AddressUnavailable => "address_unavailable",
            Self::QueueFull => "queue_full",
            Self::TooManyFiles => "too_many_files",
            Self::Certificate => "certificate",
            Self::Tls => "tls",
            Self::Unreachable => "unreachable",
            Self::Other(errno) => return f.pad(&format!("errno_{errno}")),
        })
    }
}

impl Serialize for ErrorKind {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ErrorKind {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        let errno = name
            .strip_prefix("errno_")
            .and_then(|text| text.parse().ok());
        let mut known = Self::NAMED.into_iter();
        let kind = known.find(|kind| kind.to_string() == name);
        kind.or(errno.map(Self::Other))
            .ok_or_else(|| serde::de::Error::custom(format!("`{name}` is no kind of failure")))
    }
}

/// Where the time of a request goes; 2xx answers only, ns.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phases {
    /// `connect()` until the connection takes the request. New connections only.
    #[serde(with = "crate::whole")]
    pub connect: Histogram<u64>,
    /// Request sent until the first byte of the answer. This is the accept queue and the server's work, which a client
    /// cannot tell apart.
    #[serde(with = "crate::whole")]
    pub wait: Histogram<u64>,
    /// Start (`connect()`, or the send on a kept connection) until the first byte of the answer.
    #[serde(with = "crate::whole")]
    pub first_byte: Histogram<u64>,
    /// First byte until the last.
    #[serde(with = "crate::whole")]
    pub receive: Histogram<u64>,
}

/// The part of one path of the mix.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PathOutcome {
    /// The path requested.
    pub path: String,
    /// 2xx answers.
    pub completed: u64,
    /// ns from the planned time.
    #[serde(with = "crate::whole")]
    pub latency: Histogram<u64>,
    /// Failed requests, ns from the planned time, and no less than the timeout: they count as still waiting.
    #[serde(with = "crate::whole")]
    pub failed: Histogram<u64>,
}

/// The part of one stage of a rate profile.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageOutcome {
    /// The stage.
    pub stage: Stage,
    /// Requests planned in it.
    pub planned: u64,
    /// Requests with a 2xx answer.
    pub completed: u64,
    /// Requests that failed.
    pub errors: u64,
    /// ns from the planned time.
    #[serde(with = "crate::whole")]
    pub latency: Histogram<u64>,
    /// Failed requests, ns from the planned time, and no less than the timeout: they count as still waiting.
    #[serde(with = "crate::whole")]
    pub failed: Histogram<u64>,
}

/// The latencies of all requests, failed ones among them. A percentile of the answered ones alone hides the failures.
pub(crate) fn all(answered: &Histogram<u64>, failed: &Histogram<u64>) -> Histogram<u64> {
    let mut all = answered.clone();
    all.add(failed).expect("values of the same range");
    all
}

fn add_all<K: Ord + Clone>(into: &mut BTreeMap<K, u64>, from: &BTreeMap<K, u64>) {
    for (key, count) in from {
        *into.entry(key.clone()).or_default() += count;
    }
}

/// Adds the values of one histogram to another, whatever the range of either.
fn add_values(into: &mut Histogram<u64>, from: &Histogram<u64>) {
    into.auto(true);
    into.add(from).expect("it grows as it must");
}

/// The requests that ended within one interval of a load.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Interval {
    /// Its beginning, from the load's.
    pub start: Duration,
    /// Its length; the last one may be shorter than the others.
    pub length: Duration,
    /// Requests that became due.
    pub planned: u64,
    /// 2xx answers.
    pub completed: u64,
    /// Their latency, ns from the planned time.
    #[serde(with = "crate::whole")]
    pub latency: Histogram<u64>,
    /// Failed requests, ns from the planned time, and no less than the timeout: they count as still waiting.
    #[serde(with = "crate::whole")]
    pub failed: Histogram<u64>,
    /// The same from `connect()` or the send.
    #[serde(with = "crate::whole")]
    pub service: Histogram<u64>,
    /// Whole answers by their `X-Worker` header.
    pub by_worker: BTreeMap<String, u64>,
    /// Failures by kind.
    pub errors: BTreeMap<ErrorKind, u64>,
    /// Connections open at its end.
    pub connections_open: u64,
}

/// The outcome of a load. `completed + cancelled + sum(errors) == planned`, always.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
    /// From the start until the last request ended; at least the planned duration, if that ended the load.
    pub elapsed: Duration,
    /// Requests that became due.
    pub planned: u64,
    /// Requests that were begun (they got a descriptor and an address).
    pub started: u64,
    /// 2xx answers, whole and in time.
    pub completed: u64,
    /// Requests under way when the load was cancelled.
    pub cancelled: u64,
    /// 2xx answers, ns from the planned time to the last byte: correct under coordinated omission.
    #[serde(with = "crate::whole")]
    pub latency: Histogram<u64>,
    /// Failed requests, ns from the planned time, and no less than the timeout: they count as still waiting.
    #[serde(with = "crate::whole")]
    pub failed: Histogram<u64>,
    /// 2xx answers, ns from `connect()` (from the send on a kept connection) to the last byte.
    #[serde(with = "crate::whole")]
    pub service: Histogram<u64>,
    /// The phases of that time.
    pub phases: Phases,
    /// Every begun request: ns by which it was begun after its planned time. If this is not small, the generator is
    /// the bottleneck and not the server.
    #[serde(with = "crate::whole")]
    pub lateness: Histogram<u64>,
    /// Whole answers, of whatever status, by their `X-Worker` header.
    pub by_worker: BTreeMap<String, u64>,
    /// Whole answers by status.
    pub by_status: BTreeMap<u16, u64>,
    /// Failures by kind.
    pub errors: BTreeMap<ErrorKind, u64>,
    /// The same for each path of the mix, in its order.
    pub by_path: Vec<PathOutcome>,
    /// The same for each stage of a rate profile; empty without one.
    pub by_stage: Vec<StageOutcome>,
    /// Connections opened.
    pub connections: u64,
    /// The most that were open at a time: the sum of each thread's most.
    pub connections_open_max: u64,
    /// Connections open at the end.
    pub connections_open_end: u64,
    /// Bytes of answers received, heads included.
    pub bytes_received: u64,
}

impl Interval {
    /// Adds what another generator saw in the same time.
    pub(crate) fn add(&mut self, other: &Self) {
        self.length = self.length.max(other.length);
        self.planned += other.planned;
        self.completed += other.completed;
        self.connections_open += other.connections_open;
        for (into, from) in [
            (&mut self.latency, &other.latency),
            (&mut self.failed, &other.failed),
            (&mut self.service, &other.service),
        ] {
            add_values(into, from);
        }
        add_all(&mut self.by_worker, &other.by_worker);
        add_all(&mut self.errors, &other.errors);
    }
}

impl Outcome {
    /// Adds what another generator saw in the same time, of the same plan.
    pub(crate) fn add(&mut self, other: &Self) {
        self.elapsed = self.elapsed.max(other.elapsed);
        for (into, from) in [
            (&mut self.planned, other.planned),
            (&mut self.started, other.started),
            (&mut self.completed, other.completed),
            (&mut self.cancelled, other.cancelled),
            (&mut self.connections, other.connections),
            (&mut self.connections_open_max, other.connections_open_max),
            (&mut self.connections_open_end, other.connections_open_end),
            (&mut self.bytes_received, other.bytes_received),
        ] {
            *into += from;
        }
        for (into, from) in [
            (&mut self.latency, &other.latency),
            (&mut self.failed, &other.failed),
            (&mut self.service, &other.service),
            (&mut self.phases.connect, &other.phases.connect),
            (&mut self.phases.wait, &other.phases.wait),
            (&mut self.phases.first_byte, &other.phases.first_byte),
            (&mut self.phases.receive, &other.phases.receive),
            (&mut self.lateness, &other.lateness),
        ] {
            add_values(into, from);
        }
        add_all(&mut self.by_worker, &other.by_worker);
        add_all(&mut self.by_status, &other.by_status);
        add_all(&mut self.errors, &other.errors);
        for (into, from) in self.by_path.iter_mut().zip(&other.by_path) {
            into.completed += from.completed;
            add_values(&mut into.latency, &from.latency);
            add_values(&mut into.failed, &from.failed);
        }
        for (into, from) in self.by_stage.iter_mut().zip(&other.by_stage) {
            into.planned += from.planned;
            into.completed += from.completed;
            into.errors += from.errors;
            add_values(&mut into.latency, &from.latency);
            add_values(&mut into.failed, &from.failed);
        }
    }

    /// All failures.
    pub fn error_count(&self) -> u64 {
        self.errors.values().sum()
    }

    /// 2xx answers a second; 0 if nothing ended.
    pub fn throughput_per_s(&self) -> f64 {
        if self.elapsed.is_zero() {
            0.0
        } else {
            self.completed as f64 / self.elapsed.as_secs_f64()
        }
    }

    /// The busiest worker's answers over the mean of all workers seen: 1 is even. `None` without attribution.
    pub fn share_max_over_mean(&self) -> Option<f64> {
        let most = *self.by_worker.values().max()?;
        let total: u64 = self.by_worker.values().sum();
        Some(most as f64 * self.by_worker.len() as f64 / total as f64)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::Plan;
    use crate::recorder::Recorder;

    /// The outcome of a load whose requests were answered in these times, and which took a second.
    pub(crate) fn outcome(plan: &Plan, latencies_us: &[u64]) -> Outcome {
        let mut outcome = Recorder::new(plan).outcome(plan);
        outcome.elapsed = Duration::from_secs(1);
        for us in latencies_us {
            outcome.planned += 1;
            outcome.completed += 1;
            for histogram in [&mut outcome.latency, &mut outcome.service] {
                histogram.record(us * 1000).expect("a latency");
            }
            *outcome.by_status.entry(200).or_default() += 1;
        }
        outcome
    }

    #[test]
    fn kinds_of_failures_are_read_as_they_are_written() {
        let mut all: BTreeMap<ErrorKind, u64> = BTreeMap::new();
        for (number, kind) in ErrorKind::NAMED.into_iter().enumerate() {
            all.insert(kind, number as u64);
        }
        all.insert(ErrorKind::Other(110), 7);
        let json = serde_json::to_string(&all).expect("JSON");
        let read: BTreeMap<ErrorKind, u64> = serde_json::from_str(&json).expect("read");
        assert_eq!(read, all);
        serde_json::from_str::<ErrorKind>("\"bad_luck\"").expect_err("none");
    }
}
