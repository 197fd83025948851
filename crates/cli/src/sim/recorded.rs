//! Loads from files: results of `wakeone load --json`, HDR logs, recordings of `wakeone top`, and lists of times.

use std::path::Path;

use anyhow::{Context, bail};
use hdrhistogram::Histogram;
use hdrhistogram::serialization::interval_log::{
    IntervalLogHistogram, IntervalLogIterator, LogEntry,
};
use wakeone_sim::{Arrivals, Service, time_s};
use wakeone_top::Replay;

/// A load as a file records it.
#[derive(Debug, Default)]
pub struct Recorded {
    /// Service times: weights, and times in s.
    parts: Vec<(f64, f64)>,
    /// Requests in each interval: its length in s, and their number.
    counts: Vec<(f64, u64)>,
    /// The times at which requests arrived, in s.
    times: Vec<f64>,
}

/// Reads a file of any of these kinds.
pub fn read(path: &Path) -> anyhow::Result<Recorded> {
    let bytes =
        std::fs::read(path).with_context(|| format!("reading {} failed", path.display()))?;
    parse(&bytes).with_context(|| {
        format!(
            "{} is no load that can be simulated: give a result of `wakeone load --json`, an HDR log, a recording of \
             `wakeone top`, or a list with a time a line",
            path.display()
        )
    })
}

fn parse(bytes: &[u8]) -> anyhow::Result<Recorded> {
    let text = std::str::from_utf8(bytes)?.trim_start();
    if text.starts_with('{') {
        return match serde_json::from_str::<wakeone_load::Summary>(text) {
            Ok(summary) => of_load(&summary),
            Err(_)
                if text
                    .lines()
                    .next()
                    .is_some_and(|line| line.contains("\"watch\"")) =>
            {
                of_top(bytes)
            }
            Err(error) => Err(error.into()),
        };
    }
    if text.contains(",HISTF") {
        return of_log(bytes);
    }
    of_list(text)
}

/// Reads a load's result: service times as clients saw them, and the requests of each interval.
fn of_load(summary: &wakeone_load::Summary) -> anyhow::Result<Recorded> {
    let intervals = summary.intervals.iter();
    Ok(Recorded {
        parts: parts(&decode(&summary.service_ns_hdr)?),
        counts: intervals
            .map(|interval| (interval.length_s, interval.planned))
            .collect(),
        times: Vec::new(),
    })
}

fn decode(base64: &str) -> anyhow::Result<Histogram<u64>> {
    wakeone_load::decode(base64).map_err(anyhow::Error::msg)
}

fn parts(histogram: &Histogram<u64>) -> Vec<(f64, f64)> {
    let recorded = histogram.iter_recorded();
    let of = |value: u64| histogram.median_equivalent(value).max(1) as f64 / 1e9;
    recorded
        .map(|at| (at.count_at_value() as f64, of(at.value_iterated_to())))
        .collect()
}

/// Reads a log of histograms in ns: those tagged `service` if there are any, else the untagged ones.
fn of_log(bytes: &[u8]) -> anyhow::Result<Recorded> {
    let mut all = Vec::new();
    for entry in IntervalLogIterator::new(bytes) {
        match entry {
            Ok(LogEntry::Interval(interval)) => all.push(interval),
            Ok(_) => {}
            Err(error) => bail!("the log cannot be read: {error:?}"),
        }
    }
    let is_service =
        |one: &IntervalLogHistogram<'_>| one.tag().is_some_and(|tag| tag.as_str() == "service");
    let tagged = all.iter().any(is_service);
    let mut recorded = Recorded::default();
    for one in all.iter().filter(|one| is_service(one) == tagged) {
        let histogram = decode(one.encoded_histogram())?;
        recorded.parts.extend(parts(&histogram));
        let length = one.duration().as_secs_f64();
        recorded.counts.push((length, histogram.len()));
    }
    Ok(recorded)
}

/// Reads a recording: how many connections arrived in each refresh, and how much CPU time its workers used for each
/// of them.
fn of_top(bytes: &[u8]) -> anyhow::Result<Recorded> {
    let mut replay = Replay::new(bytes)?;
    let mut recorded = Recorded::default();
    while let Some(frames) = replay.refresh()? {
        for frame in frames {
            let (first, last) = (&frame.watch.first, &frame.watch.last);
            let length = last.at_ns.saturating_sub(first.at_ns) as f64 / 1e9;
            let connections = match (&first.trace, &last.trace) {
                (Some(before), Some(after)) if !after.gaps.connections => {
                    after.connections.saturating_sub(before.connections)
                }
                // Without tracing, only the number for all listeners of the namespace is known.
                _ => last
                    .host
                    .passive_opens
                    .saturating_sub(first.host.passive_opens),
            };
            let cpu = |pid: &u32| first.workers.get(pid).map(|worker| worker.cpu_ns);
            let used: u64 = last
                .workers
                .iter()
                .filter_map(|(pid, worker)| Some(worker.cpu_ns.saturating_sub(cpu(pid)?)))
                .sum();
            recorded.counts.push((length, connections));
            if connections > 0 && used > 0 {
                let each = used as f64 / 1e9 / connections as f64;
                recorded.parts.push((connections as f64, each));
            }
        }
    }
    Ok(recorded)
}

/// Reads a list: a time a line, in s or with a unit.
fn of_list(text: &str) -> anyhow::Result<Recorded> {
    let mut recorded = Recorded::default();
    for (place, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let time = line.parse().ok().or_else(|| time_s(line));
        let Some(time) = time.filter(|time: &f64| time.is_finite() && *time >= 0.0) else {
            bail!("line {} is no time", place + 1);
        };
        recorded.times.push(time);
    }
    Ok(recorded)
}

impl Recorded {
    /// Its service times.
    pub fn service(self) -> anyhow::Result<Service> {
        let mut parts = self.parts;
        if parts.is_empty() {
            parts = self.times.iter().map(|time| (1.0, *time)).collect();
        }
        parts.retain(|(weight, time)| *weight > 0.0 && *time > 0.0);
        if parts.is_empty() {
            bail!("it has no service times");
        }
        Ok(Service::Mix(parts))
    }

    /// Its arrivals.
    pub fn arrivals(self) -> anyhow::Result<Arrivals> {
        if self.times.is_empty() {
            Ok(Arrivals::counted(&self.counts, 1)?)
        } else {
            Ok(Arrivals::recorded(self.times)?)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, SystemTime};

    #[test]
    fn a_list_is_service_times_or_arrivals() {
        let list = "# a comment\n0.5\n1ms\n\n2s\n";
        let parts = vec![(1.0, 0.5), (1.0, 0.001), (1.0, 2.0)];
        let parsed = || parse(list.as_bytes()).unwrap();
        assert_eq!(parsed().service().unwrap(), Service::Mix(parts));
        // Two gaps in 1.999 s, and their mean after the last.
        assert!((parsed().arrivals().unwrap().per_s() * 0.9995 - 1.0).abs() < 1e-9);
        for bad in ["x", "-1", "1\nNaN", "{}", "{\"watch\":1}"] {
            assert!(parse(bad.as_bytes()).is_err(), "{bad}");
        }
        assert!(parse(b"").unwrap().service().is_err());
        assert!(parse(b"").unwrap().arrivals().is_err());
    }

    #[test]
    fn a_log_has_service_times_and_how_many_came_when() {
        let mut histogram = Histogram::new(3).unwrap();
        histogram.record_n(1_000_000, 300).unwrap();
        let mut slow = Histogram::new(3).unwrap();
        slow.record_n(9_000_000, 300).unwrap();
        let interval = |start| wakeone_load::Interval {
            start: Duration::from_secs(start),
            length: Duration::from_secs(1),
            planned: 300,
            completed: 300,
            latency: slow.clone(),
            failed: slow.clone(),
            service: histogram.clone(),
            by_worker: std::collections::BTreeMap::default(),
            errors: std::collections::BTreeMap::default(),
            connections_open: 0,
        };
        let mut log = Vec::new();
        let intervals = [interval(0), interval(1)];
        wakeone_load::write_hdr_log(&mut log, SystemTime::now(), &intervals).unwrap();
        let service = parse(&log).unwrap().service().unwrap();
        assert!((service.mean_s() / 0.001 - 1.0).abs() < 0.01, "{service:?}");
        let arrivals = parse(&log).unwrap().arrivals().unwrap();
        assert!((arrivals.per_s() / 300.0 - 1.0).abs() < 0.02);
    }
}
