//! Parsers for the arguments of `wakeone sim`.

use std::ops::RangeInclusive;
use std::path::Path;
use std::str::FromStr;

use wakeone_sim::{Arrivals, Repeated, Service, Stop};

use super::recorded;

/// The wish that `--find` looks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Find {
    /// The fewest workers
    Workers,
    /// The highest rate
    Rate,
}

/// Decides between equally loaded workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Tie {
    /// Any of them
    Chance,
    /// The one that accepted or finished something last
    Freshest,
}

/// Which of the workers that share one queue are woken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Shared {
    /// In turn: blocking accept()
    Accept,
    /// The first in the order of the wait list: EPOLLEXCLUSIVE
    Exclusive,
    /// All: epoll without EPOLLEXCLUSIVE
    WakeAll,
    /// As exclusive, with `wakeone attach`
    SteeredExclusive,
    /// As wake-all, with `wakeone attach`
    SteeredWakeAll,
}

/// A range that `--sweep` goes through.
#[derive(Debug, Clone, PartialEq)]
pub enum Sweep {
    /// A range of workers.
    Workers(RangeInclusive<usize>),
    /// A range of requests a second.
    Rate(f64, f64),
}

impl FromStr for Sweep {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("`{text}` is no range: give one such as workers=1..64 or rate=500..4000");
        let (what, range) = text.split_once('=').ok_or_else(wrong)?;
        let (from, to) = range.split_once("..").ok_or_else(wrong)?;
        let number = |text: &str| {
            text.parse::<f64>()
                .ok()
                .filter(|n| n.is_finite() && *n > 0.0)
        };
        let (low, high) = number(from).zip(number(to)).ok_or_else(wrong)?;
        let whole = low.fract() == 0.0 && high.fract() == 0.0;
        match what {
            _ if low > high => Err(wrong()),
            "workers" if whole => Ok(Self::Workers(low as usize..=high as usize)),
            "rate" => Ok(Self::Rate(low, high)),
            _ => Err(wrong()),
        }
    }
}

fn file<T>(
    text: &str,
    of: fn(recorded::Recorded) -> anyhow::Result<T>,
) -> Option<Result<T, String>> {
    let path = Path::new(text.strip_prefix("file:")?);
    let read = recorded::read(path).and_then(of);
    Some(read.map_err(|error| format!("{error:#}")))
}

/// Parses a pattern of arrivals.
pub fn arrivals(text: &str) -> Result<Arrivals, String> {
    let parsed = || text.parse().map_err(|error: wakeone_sim::Error| error.0);
    file(text, recorded::Recorded::arrivals).unwrap_or_else(parsed)
}

/// Parses a service time.
pub fn service(text: &str) -> Result<Service, String> {
    let parsed = || text.parse().map_err(|error: wakeone_sim::Error| error.0);
    file(text, recorded::Recorded::service).unwrap_or_else(parsed)
}

fn seconds(text: &str) -> Option<f64> {
    crate::duration::parse(text)
        .ok()
        .map(|time| time.as_secs_f64())
}

/// Parses `10s:200ms`.
pub fn repeated(text: &str) -> Result<Repeated, String> {
    let times = text.split_once(':');
    let found = times.and_then(|(every, lasts)| {
        Some(Repeated {
            every_s: seconds(every)?,
            lasts_s: seconds(lasts)?,
        })
    });
    found.ok_or_else(|| {
        format!("`{text}` does not say how often and for how long: give two times, as in 10s:200ms")
    })
}

/// Parses `0@5s:3s`.
pub fn stop(text: &str) -> Result<Stop, String> {
    let parts = text
        .split_once('@')
        .and_then(|(worker, rest)| Some((worker, rest.split_once(':')?)));
    let found = parts.and_then(|(worker, (at, lasts))| {
        Some(Stop {
            worker: worker.parse().ok()?,
            at_s: seconds(at)?,
            lasts_s: seconds(lasts)?,
            busy: false,
        })
    });
    found.ok_or_else(|| {
        format!("`{text}` does not say which worker stops when and for how long: give them as in 0@5s:3s")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_typed_is_understood_or_refused_in_a_sentence() {
        assert_eq!("workers=1..64".parse(), Ok(Sweep::Workers(1..=64)));
        assert_eq!("rate=0.5..40".parse(), Ok(Sweep::Rate(0.5, 40.0)));
        for text in [
            "",
            "workers",
            "workers=4",
            "workers=9..1",
            "workers=1.5..3",
            "x=1..2",
            "rate=0..1",
        ] {
            assert!(
                text.parse::<Sweep>()
                    .is_err_and(|why| why.contains("no range")),
                "{text}"
            );
        }
        assert_eq!(
            repeated("10s:200ms"),
            Ok(Repeated {
                every_s: 10.0,
                lasts_s: 0.2
            })
        );
        assert!(repeated("10s").is_err() && repeated("1:x").is_err());
        assert_eq!(
            stop("2@5s:300ms").map(|stop| (stop.worker, stop.at_s, stop.lasts_s)),
            Ok((2, 5.0, 0.3))
        );
        assert!(stop("5s:3s").is_err() && stop("x@5s:3s").is_err());
        assert!(service("file:/nonexistent").is_err_and(|why| why.contains("reading")));
        assert!(arrivals("file:/nonexistent").is_err());
    }
}
