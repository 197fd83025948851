//! The live view: the events of a running load as a block of text for a terminal. This module touches no terminal.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write;

use hdrhistogram::Histogram;

use crate::outcome::all;
use crate::text::number;
use crate::{Arrivals, ErrorKind, Event, Interval, Plan, Progress, Spacing};

/// More rows of workers than this do not fit beside the rest on 24 lines.
const WORKERS_SHOWN: usize = 7;
const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Room for the name before a row's content.
const LABEL: usize = 11;

/// Collects events and shows the progress of the load.
#[derive(Debug)]
pub struct View {
    title: String,
    progress: Progress,
    /// Rate and 99th percentile, ms, of past intervals.
    rates: VecDeque<f64>,
    p99s: VecDeque<f64>,
    last: Option<Interval>,
    by_worker: BTreeMap<String, u64>,
    errors: BTreeMap<ErrorKind, u64>,
}

/// More than the widest terminal shows.
const HISTORY: usize = 400;

impl View {
    /// Makes the view of a load that is about to start.
    pub fn new(plan: &Plan) -> Self {
        Self {
            title: format!("{}  {}", plan.target, describe(plan)),
            progress: Progress::default(),
            rates: VecDeque::new(),
            p99s: VecDeque::new(),
            last: None,
            by_worker: BTreeMap::new(),
            errors: BTreeMap::new(),
        }
    }

    /// Takes in an event of the load.
    pub fn take(&mut self, event: &Event<'_>) {
        match event {
            Event::Progress(now) => self.progress = **now,
            Event::Interval(interval) => self.take_interval(interval),
        }
    }

    fn take_interval(&mut self, interval: &Interval) {
        let seconds = interval.length.as_secs_f64();
        for (history, value) in [
            (
                &mut self.rates,
                interval.completed as f64 / seconds.max(1e-9),
            ),
            (
                &mut self.p99s,
                interval.latency.value_at_quantile(0.99) as f64 / 1e6,
            ),
        ] {
            history.push_back(value);
            if history.len() > HISTORY {
                history.pop_front();
            }
        }
        interval
            .by_worker
            .iter()
            .for_each(|(worker, n)| *self.by_worker.entry(worker.clone()).or_default() += n);
        interval
            .errors
            .iter()
            .for_each(|(kind, n)| *self.errors.entry(*kind).or_default() += n);
        self.last = Some(interval.clone());
    }

    /// The view in lines of at most `width` columns, without a newline at its end; at most 20 lines.
    pub fn text(&self, width: usize) -> String {
        let mut lines = vec![self.title.clone(), self.counts()];
        if let Some(last) = &self.last {
            lines.push(String::new());
            lines.push(chart("rate, 1/s", &self.rates, width));
            lines.push(chart("p99, ms", &self.p99s, width));
            lines.push(String::new());
            let names = ["p50", "p90", "p99", "p99.9", "max"]
                .map(|name| format!("{name:>9}"))
                .concat();
            lines.push(format!("{:<LABEL$}{names}", "ms, now"));
            lines.push(quantiles("latency", &last.latency));
            if !last.failed.is_empty() {
                let all = all(&last.latency, &last.failed);
                lines.push(quantiles("+ failures", &all));
            }
            lines.push(quantiles("service", &last.service));
        }
        self.workers(&mut lines, width);
        if !self.errors.is_empty() {
            let kinds: Vec<_> = self
                .errors
                .iter()
                .map(|(kind, n)| format!("{kind} {n}"))
                .collect();
            lines.push(String::new());
            lines.push(format!("{:<LABEL$}{}", "errors", kinds.join(", ")));
        }
        let cut = |line: String| {
            line.chars()
                .take(width)
                .collect::<String>()
                .trim_end()
                .to_owned()
        };
        lines.into_iter().map(cut).collect::<Vec<_>>().join("\n")
    }

    fn counts(&self) -> String {
        let Progress {
            elapsed,
            completed,
            errors,
            in_flight,
            ..
        } = self.progress;
        format!(
            "{:.0} s  answered {completed}  errors {errors}  under way {in_flight}",
            elapsed.as_secs_f64()
        )
    }

    fn workers(&self, lines: &mut Vec<String>, width: usize) {
        let total: u64 = self.by_worker.values().sum();
        let Some(most) = self.by_worker.values().max() else {
            return;
        };
        lines.push(String::new());
        let mut workers: Vec<_> = self.by_worker.iter().collect();
        workers.sort_by_key(|(name, _)| (name.len(), name.as_str()));
        let room = width.saturating_sub(LABEL + 9).min(50);
        for (name, count) in workers.iter().take(WORKERS_SHOWN) {
            let share = 100.0 * **count as f64 / total as f64;
            let bar = "█".repeat((room as f64 * **count as f64 / *most as f64).round() as usize);
            lines.push(format!(
                "{:<LABEL$}{share:>5.1} %  {bar}",
                format!("worker {name}")
            ));
        }
        if workers.len() > WORKERS_SHOWN {
            lines.push(format!(
                "and {} more workers",
                workers.len() - WORKERS_SHOWN
            ));
        }
    }
}

fn describe(plan: &Plan) -> String {
    let spacing = |spacing: Spacing| match spacing {
        Spacing::Poisson => "poisson",
        Spacing::Constant => "constant",
    };
    let mut text = match &plan.arrivals {
        Arrivals::Open {
            rate_per_s,
            spacing: s,
        } => format!("open loop, {rate_per_s}/s {}", spacing(*s)),
        Arrivals::Profile {
            stages, spacing: s, ..
        } => {
            let rates = |rate: f64| number(rate);
            let from = stages.first().map_or(0.0, |stage| stage.from_per_s);
            let to = stages.last().map_or(0.0, |stage| stage.to_per_s);
            match stages.len() {
                1 if from == to => format!("open loop, {}/s {}", rates(from), spacing(*s)),
                n => format!(
                    "open loop, {n} stages {}…{}/s {}",
                    rates(from),
                    rates(to),
                    spacing(*s)
                ),
            }
        }
        Arrivals::Kept {
            rate_per_s,
            spacing: s,
            connections,
            apart,
        } => format!(
            "open loop, {rate_per_s}/s {} over {connections} connections opened {} ms apart",
            spacing(*s),
            number(apart.as_secs_f64() * 1e3)
        ),
        Arrivals::Closed { concurrency } => format!("closed loop, {concurrency} clients"),
    };
    if let Arrivals::Profile {
        at_most: Some(most),
        ..
    } = plan.arrivals
    {
        let _ = write!(text, ", at most {most} at a time");
    }
    text
}

/// The newest values that fit, scaled to the greatest of them, with the last one in figures.
fn chart(name: &str, values: &VecDeque<f64>, width: usize) -> String {
    let room = width.saturating_sub(LABEL + 10).max(1);
    let shown: Vec<f64> = values
        .iter()
        .copied()
        .skip(values.len().saturating_sub(room))
        .collect();
    let top = shown.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    let level = |value: f64| LEVELS[((value / top * 8.0).ceil() as usize).clamp(1, 8) - 1];
    let line: String = shown.iter().map(|&value| level(value)).collect();
    format!(
        "{name:<LABEL$}{:>9} {line}",
        number(shown.last().copied().unwrap_or(0.0))
    )
}

fn quantiles(name: &str, histogram: &Histogram<u64>) -> String {
    let cells = [0.5, 0.9, 0.99, 0.999, 1.0].map(|quantile| {
        format!(
            "{:>9}",
            number(histogram.value_at_quantile(quantile) as f64 / 1e6)
        )
    });
    format!("{name:<LABEL$}{}", cells.concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recorder::histogram;
    use crate::{Mix, Sources, Stop};
    use std::time::Duration;

    fn view(workers: u64) -> View {
        let plan = Plan {
            target: "127.0.0.1:8080".parse().unwrap(),
            host: "localhost".into(),
            arrivals: Arrivals::Open {
                rate_per_s: 1000.0,
                spacing: Spacing::Poisson,
            },
            stop: Stop {
                requests: Some(1),
                duration: None,
            },
            mix: Mix::one("/"),
            sources: Sources::System,
            timeout: Duration::from_secs(1),
            seed: 1,
            threads: 1,
            keep_alive: false,
            shard: crate::Shard::default(),
        };
        let mut view = View::new(&plan);
        for n in 1..=100u64 {
            let mut latency = histogram();
            latency.record_n(n * 1_000_000, 1000).unwrap();
            let interval = Interval {
                start: Duration::from_secs(n - 1),
                length: Duration::from_secs(1),
                planned: 1000,
                completed: 1000,
                service: latency.clone(),
                latency,
                failed: {
                    let mut failed = histogram();
                    failed.record_n(5_000_000_000, 2).unwrap();
                    failed
                },
                by_worker: (0..workers)
                    .map(|worker| (worker.to_string(), 10 * (worker + 1)))
                    .collect(),
                errors: BTreeMap::from([(ErrorKind::Timeout, 2)]),
                connections_open: 1,
            };
            view.take(&Event::Interval(&interval));
        }
        let progress = Progress {
            elapsed: Duration::from_secs(100),
            completed: 100_000,
            ..Progress::default()
        };
        view.take(&Event::Progress(&progress));
        view
    }

    #[test]
    fn it_fits_a_terminal_and_says_what_is() {
        for (width, workers) in [(80, 4), (80, 64), (40, 4), (200, 300)] {
            let text = view(workers).text(width);
            assert!(text.lines().count() <= 21, "{text}");
            assert!(
                text.lines().all(|line| line.chars().count() <= width),
                "{text}"
            );
        }
        let text = view(4).text(80);
        for part in [
            "127.0.0.1:8080",
            "poisson",
            "100000",
            "timeout 200",
            "worker 3",
            "40.0 %",
        ] {
            assert!(text.contains(part), "{part} is missing:\n{text}");
        }
        // The 99th percentile rose evenly: so does its chart.
        let chart: Vec<_> = text
            .lines()
            .find(|l| l.starts_with("p99"))
            .unwrap()
            .chars()
            .collect();
        let levels: Vec<_> = chart.iter().filter(|c| LEVELS.contains(c)).collect();
        assert_eq!(levels.len(), 59);
        assert!(levels.windows(2).all(|w| w[0] <= w[1]) && levels[0] < levels[58]);
    }

    #[test]
    fn it_says_something_before_the_first_interval() {
        let fresh = View {
            last: None,
            by_worker: BTreeMap::new(),
            errors: BTreeMap::new(),
            ..view(1)
        };
        assert_eq!(fresh.text(80).lines().count(), 2);
    }
}
