//! The plan of a load: targets, times, the mix of requests, and its end.

use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use wakeone_model::address::Address;

use crate::{Error, Form, Shard};

/// A load, wholly described: two runs of one plan send the same requests at the same planned times.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The server.
    pub target: Address,
    /// The `Host` header.
    pub host: String,
    /// When requests are due.
    pub arrivals: Arrivals,
    /// When no further request is due.
    pub stop: Stop,
    /// The paths to request, with their weights, and the form of the requests.
    pub mix: Mix,
    /// Which local addresses connections come from.
    pub sources: Sources,
    /// How long a request may take from its sending (from `connect()` on a new connection) to its last byte.
    pub timeout: Duration,
    /// Decides arrival times and paths.
    pub seed: u64,
    /// How many threads send; each is one epoll loop and takes every n-th request of the plan.
    pub threads: usize,
    /// False: a new connection for each request, and `Connection: close`.
    pub keep_alive: bool,
    /// The part of the plan that is sent from here.
    pub shard: Shard,
}

/// When requests are due.
#[derive(Debug, Clone, PartialEq)]
pub enum Arrivals {
    /// At planned times, whatever became of earlier requests: independent clients.
    Open {
        /// Mean rate, requests a second.
        rate_per_s: f64,
        /// How the requests lie within that rate.
        spacing: Spacing,
    },
    /// An open loop whose rate changes, or whose number of clients is limited.
    Profile {
        /// One after the other; the plan ends with the last one.
        stages: Vec<Stage>,
        /// How the requests lie within the rates.
        spacing: Spacing,
        /// No more than this many requests at a time. A request that is due when all clients wait is sent when one is
        /// free, and its latency counts from when it was due. One that gets no client within the timeout is counted as
        /// `not_sent`.
        at_most: Option<usize>,
    },
    /// An open loop over connections that are opened before it begins, one after another, and then kept. Each request
    /// takes the one that has been idle longest. A request that is due when none is idle waits, as under
    /// [`Arrivals::Profile`]. A connection that is lost is opened again.
    Kept {
        /// Mean rate, requests a second.
        rate_per_s: f64,
        /// How the requests lie within that rate.
        spacing: Spacing,
        /// How many connections.
        connections: usize,
        /// How long after one connection the next is opened.
        apart: Duration,
    },
    /// A fixed number of clients, each sending its next request when its last one is answered.
    Closed {
        /// Simultaneous clients.
        concurrency: usize,
    },
}

/// A time of constant or evenly changing rate.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Stage {
    /// Requests a second at its beginning.
    pub from_per_s: f64,
    /// Requests a second at its end.
    pub to_per_s: f64,
    /// How long it lasts.
    pub length: Duration,
}

impl Stage {
    /// A constant rate.
    pub fn step(rate_per_s: f64, length: Duration) -> Self {
        Self {
            from_per_s: rate_per_s,
            to_per_s: rate_per_s,
            length,
        }
    }

    /// The mean number of requests in it.
    pub fn requests(&self) -> f64 {
        self.requests_in(self.length.as_secs_f64())
    }

    /// The mean number of requests in its first seconds.
    pub(crate) fn requests_in(&self, seconds: f64) -> f64 {
        let part = seconds / self.length.as_secs_f64();
        (self.from_per_s + (self.to_per_s - self.from_per_s) * part / 2.0) * seconds
    }

    /// Returns the time in s from the stage's beginning by which `n` requests are expected to have been due. It is the
    /// root of `n = from·t + (to - from)·t²/(2·length)`, in the form that loses no digits where both rates are close.
    pub(crate) fn time_of(&self, n: f64) -> f64 {
        let growth = (self.to_per_s - self.from_per_s) / self.length.as_secs_f64();
        let root = (self.from_per_s * self.from_per_s + 2.0 * growth * n)
            .max(0.0)
            .sqrt();
        if n > 0.0 {
            2.0 * n / (self.from_per_s + root)
        } else {
            0.0
        }
    }

    fn check(&self) -> Result<(), String> {
        let rates = [self.from_per_s, self.to_per_s];
        if rates.iter().any(|r| !r.is_finite() || *r < 0.0) || rates == [0.0, 0.0] {
            let [from, to] = rates;
            return Err(format!(
                "a rate from {from} to {to} requests/s cannot be planned: give rates above 0"
            ));
        }
        if self.length.is_zero() {
            return Err("a stage of no length sends nothing: give it a time".to_owned());
        }
        Ok(())
    }
}

/// How open-loop requests are spaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Spacing {
    /// Exponential gaps, as from many independent clients.
    Poisson,
    /// Equal gaps.
    Constant,
}

/// The end of a plan: whichever comes first. At least one must be given.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stop {
    /// This many requests.
    pub requests: Option<u64>,
    /// No request is due at or after this time; those under way are still waited for.
    pub duration: Option<Duration>,
}

/// Where connections come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sources {
    /// The address the kernel picks: about 28,000 ports for one target.
    System,
    /// `count` addresses from 127.1.0.1 on, taken in turn, so that ports do not run out. IPv4 loopback targets only.
    Loopback {
        /// How many addresses.
        count: u32,
    },
}

/// 127.1.0.1 … 127.254.255.255: leaves 127.0.0.0/16, where servers and resolvers sit, and the broadcast address alone.
const LOOPBACK_SOURCES_MAX: u32 = 0xFE_FFFF - 0x01_0000;

/// One path of a mix.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct MixEntry {
    /// Its share is weight / sum of weights.
    pub weight: u64,
    /// Path and query, `/…`.
    pub path: String,
}

/// The paths to request, and the form of the requests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mix {
    /// The paths by weight; never empty in a valid plan.
    pub entries: Vec<MixEntry>,
    /// The common form of all requests.
    pub form: Form,
}

impl Mix {
    /// Only this path.
    pub fn one(path: impl Into<String>) -> Self {
        Self::weighted([(1, path.into())])
    }

    /// Several paths by weight: `Mix::weighted([(99, "/work?us=1000"), (1, "/work?us=100000")])`.
    pub fn weighted<P: Into<String>>(entries: impl IntoIterator<Item = (u64, P)>) -> Self {
        Self {
            entries: entries
                .into_iter()
                .map(|(weight, path)| MixEntry {
                    weight,
                    path: path.into(),
                })
                .collect(),
            form: Form::default(),
        }
    }
}

impl FromStr for MixEntry {
    type Err = String;

    /// `WEIGHT:PATH`, as in `99:/work?us=1000`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (weight, path) = text
            .split_once(':')
            .ok_or_else(|| format!("'{text}' is not WEIGHT:PATH, as in 99:/work?us=1000"))?;
        let weight = weight
            .parse()
            .map_err(|_| format!("the weight '{weight}' of '{text}' is not a whole number"))?;
        let entry = Self {
            weight,
            path: path.to_owned(),
        };
        check_path(&entry.path)?;
        Ok(entry)
    }
}

/// A path goes into the request line as it is, so it must not be able to end that line.
fn check_path(path: &str) -> Result<(), String> {
    if !path.starts_with('/') {
        return Err(format!("the path '{path}' does not start with '/'"));
    }
    if path.bytes().any(|b| b <= b' ' || b == 0x7f) {
        return Err(format!(
            "the path {path:?} has a space or control character in it: write it as %20"
        ));
    }
    Ok(())
}

impl Plan {
    /// Checks that the plan can be run; the error is one sentence.
    pub fn check(&self) -> Result<(), Error> {
        self.check_arrivals()
            .and_then(|()| self.check_mix())
            .and_then(|()| self.check_sources())
            .map_err(Error::Plan)?;
        let no = |what: &str| Err(Error::Plan(what.to_owned()));
        if self.stop == Stop::default() && !matches!(self.arrivals, Arrivals::Profile { .. }) {
            return no("the load would never end: give a number of requests or a duration");
        }
        if self.threads == 0 {
            return no("at least one thread is needed to send");
        }
        if self.timeout.is_zero() {
            return no("a timeout of 0 would fail every request: give one above 0");
        }
        if self.host.bytes().any(|b| b <= b' ' || b == 0x7f) {
            return no("the host name has a space or control character in it");
        }
        Ok(())
    }

    /// Every thread of every shard has a number of its own, so that the shards together send what one would.
    pub(crate) fn lane(&self, thread: usize) -> usize {
        self.shard.number + self.shard.of * thread
    }

    /// How many threads there are, those of all shards.
    pub(crate) fn lanes(&self) -> usize {
        self.shard.of * self.threads
    }

    fn check_arrivals(&self) -> Result<(), String> {
        match &self.arrivals {
            Arrivals::Closed { .. } if self.shard.of > 1 => Err(
                "the clients of a closed loop follow no plan that could be divided: give a rate"
                    .to_owned(),
            ),
            Arrivals::Open { rate_per_s, .. } | Arrivals::Kept { rate_per_s, .. }
                if !(rate_per_s.is_finite() && *rate_per_s > 0.0) =>
            {
                Err(format!(
                    "a rate of {rate_per_s} requests/s cannot be planned: give one above 0"
                ))
            }
            Arrivals::Kept { connections, .. } if *connections < self.lanes() => Err(format!(
                "{connections} connections are too few for {} threads: each thread needs one",
                self.lanes()
            )),
            Arrivals::Kept { .. } if !self.keep_alive => Err(
                "connections that are opened beforehand must be kept: ask for keep-alive"
                    .to_owned(),
            ),
            Arrivals::Closed { concurrency: 0 }
            | Arrivals::Profile {
                at_most: Some(0), ..
            } => Err("at least one client is needed".to_owned()),
            Arrivals::Profile { stages, .. } if stages.is_empty() => {
                Err("a rate profile needs a stage".to_owned())
            }
            Arrivals::Profile { stages, .. } => stages.iter().try_for_each(Stage::check),
            _ => Ok(()),
        }
    }

    /// The stages of a profile, none for a constant load.
    pub fn stages(&self) -> &[Stage] {
        match &self.arrivals {
            Arrivals::Profile { stages, .. } => stages,
            _ => &[],
        }
    }

    /// How long requests become due, where that is known beforehand.
    pub fn length(&self) -> Option<Duration> {
        let staged = (!self.stages().is_empty())
            .then(|| {
                self.stages().iter().fold(Duration::ZERO, |sum, stage| {
                    sum.saturating_add(stage.length)
                })
            })
            .filter(|&length| length < Duration::MAX);
        [staged, self.stop.duration].into_iter().flatten().min()
    }

    fn check_mix(&self) -> Result<(), String> {
        let total = self
            .mix
            .entries
            .iter()
            .try_fold(0u64, |sum, e| sum.checked_add(e.weight));
        if total.is_none_or(|sum| sum == 0) {
            return Err(
                "the weights of the mix must add up to more than 0 and fit in 64 bits".to_owned(),
            );
        }
        self.mix.form.check()?;
        self.mix
            .entries
            .iter()
            .try_for_each(|e| check_path(&e.path))
    }

    fn check_sources(&self) -> Result<(), String> {
        let Sources::Loopback { count } = self.sources else {
            return Ok(());
        };
        if count == 0 || count > LOOPBACK_SOURCES_MAX {
            return Err(format!(
                "{count} source addresses cannot be had: give 1 to {LOOPBACK_SOURCES_MAX}"
            ));
        }
        match self.target {
            Address::Inet(SocketAddr::V4(v4)) if v4.ip().is_loopback() => Ok(()),
            other => Err(format!(
                "source addresses in 127.0.0.0/8 cannot reach {other}: use the system's own address"
            )),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// One request, then another: a plan to be changed where a test needs it.
    pub(crate) fn plan() -> Plan {
        Plan {
            target: "127.0.0.1:80".parse().unwrap(),
            host: "localhost".into(),
            arrivals: Arrivals::Closed { concurrency: 1 },
            stop: Stop {
                requests: Some(1),
                duration: None,
            },
            mix: Mix::one("/"),
            sources: Sources::Loopback { count: 10 },
            timeout: Duration::from_secs(1),
            seed: 0,
            threads: 1,
            keep_alive: false,
            shard: Shard::default(),
        }
    }

    fn open(rate_per_s: f64) -> Arrivals {
        Arrivals::Open {
            rate_per_s,
            spacing: Spacing::Poisson,
        }
    }

    const SECOND: Duration = Duration::from_secs(1);

    fn profile(stages: Vec<Stage>, at_most: Option<usize>) -> Arrivals {
        Arrivals::Profile {
            stages,
            spacing: Spacing::Poisson,
            at_most,
        }
    }

    fn kept(connections: usize, rate_per_s: f64) -> Arrivals {
        Arrivals::Kept {
            rate_per_s,
            spacing: Spacing::Poisson,
            connections,
            apart: Duration::from_millis(1),
        }
    }

    type Spoil = fn(&mut Plan);

    #[test]
    fn a_good_plan_passes_and_each_bad_one_says_why() {
        plan().check().unwrap();
        let cases: [(Spoil, &str); 22] = [
            (|p| p.shard = Shard { number: 1, of: 2 }, "closed loop"),
            (|p| p.arrivals = kept(64, 0.0), "rate"),
            (|p| p.arrivals = kept(0, 1.0), "too few"),
            (|p| p.arrivals = kept(64, 1.0), "keep-alive"),
            (|p| p.stop = Stop::default(), "never end"),
            (|p| p.threads = 0, "thread"),
            (|p| p.timeout = Duration::ZERO, "timeout"),
            (|p| p.host = "a\r\nb".into(), "host"),
            (
                |p| p.arrivals = Arrivals::Closed { concurrency: 0 },
                "client",
            ),
            (|p| p.arrivals = open(f64::NAN), "rate"),
            (|p| p.arrivals = open(-1.0), "rate"),
            (|p| p.arrivals = profile(vec![], None), "stage"),
            (
                |p| p.arrivals = profile(vec![Stage::step(0.0, SECOND)], None),
                "rate",
            ),
            (
                |p| p.arrivals = profile(vec![Stage::step(1.0, Duration::ZERO)], None),
                "length",
            ),
            (
                |p| p.arrivals = profile(vec![Stage::step(1.0, SECOND)], Some(0)),
                "client",
            ),
            (|p| p.mix = Mix::default(), "weights"),
            (|p| p.mix = Mix::weighted([(0, "/")]), "weights"),
            (
                |p| p.mix = Mix::weighted([(u64::MAX, "/"), (1, "/")]),
                "weights",
            ),
            (|p| p.mix = Mix::one("work"), "start with"),
            (|p| p.mix = Mix::one("/ HTTP/1.1\r\nEvil: 1"), "space"),
            (|p| p.sources = Sources::Loopback { count: 0 }, "source"),
            (|p| p.target = "[::1]:80".parse().unwrap(), "cannot reach"),
        ];
        for (spoil, expected) in cases {
            let mut bad = plan();
            spoil(&mut bad);
            let said = bad.check().expect_err(expected).to_string();
            assert!(
                said.contains(expected),
                "{said:?} does not say {expected:?}"
            );
        }
    }

    #[test]
    fn mix_entries_parse() {
        assert_eq!(
            "99:/work?us=1".parse(),
            Ok(MixEntry {
                weight: 99,
                path: "/work?us=1".into()
            })
        );
        assert_eq!(
            "1:/a:b".parse(),
            Ok(MixEntry {
                weight: 1,
                path: "/a:b".into()
            })
        );
        for bad in ["/work", "x:/work", "-1:/work", "1:work", "1:/a b", ""] {
            assert!(bad.parse::<MixEntry>().is_err(), "{bad}");
        }
    }
}
