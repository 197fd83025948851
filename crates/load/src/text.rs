//! The summary as text for people.

use std::fmt;

use crate::summary::{Quantiles, Summary};

/// More workers than this would push the numbers off the screen.
const WORKERS_SHOWN: usize = 16;
/// The row of all requests.
const ALL: &str = "all, with failures";
/// A bar this long is the busiest worker.
const BAR: f64 = 24.0;

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let p = &self.parameters;
        writeln!(
            f,
            "{} of {} requests to {} answered in {:.2} s: {:.1}/s",
            self.completed, self.planned, p.target, self.elapsed_s, self.throughput_per_s
        )?;
        self.table(f)?;
        self.connections(f)?;
        self.workers(f)?;
        self.failures(f)?;
        self.warnings(f)
    }
}

impl Summary {
    fn table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.completed == 0 {
            return Ok(());
        }
        let open = self.parameters.loop_kind == "open";
        let kept = self.parameters.keep_alive;
        let names = ["min", "mean", "p50", "p90", "p99", "p99.9", "max"].map(str::to_owned);
        writeln!(f)?;
        row(f, "ms", names.clone())?;
        quantiles(f, "latency", &self.latency_ms)?;
        self.with_failures(f, self.error_count(), self.latency_all_ms.as_ref())?;
        quantiles(f, "service", &self.service_ms)?;
        quantiles(f, "  connect", &self.connect_ms)?;
        quantiles(f, "  wait", &self.wait_ms)?;
        quantiles(f, "  receive", &self.receive_ms)?;
        let sent = if kept {
            "from the send"
        } else {
            "from connect()"
        };
        match open {
            true => writeln!(
                f,
                "latency: from the planned time; service: {sent}, which hides late sends"
            )?,
            false => writeln!(
                f,
                "a closed loop sends less while the server is slow: latency is no better than service"
            )?,
        }
        writeln!(
            f,
            "wait: sent to first byte, that is the accept queue and the server's work"
        )?;
        if self.error_count() > 0 {
            writeln!(
                f,
                "{ALL}: a failed request counts as a wait of {} ms, the timeout, or more",
                number(self.timeout_ms())
            )?;
        }
        if self.paths.len() > 1 {
            writeln!(f)?;
            row(f, "latency by path, ms", names)?;
            for path in &self.paths {
                quantiles(f, &path.path, &path.latency_ms)?;
                self.with_failures(f, path.errors, path.latency_all_ms.as_ref())?;
            }
        }
        self.stages(f)
    }

    fn timeout_ms(&self) -> f64 {
        self.parameters.timeout_s * 1e3
    }

    /// Writes the row of all requests below that of the answered ones, if some failed.
    fn with_failures(
        &self,
        f: &mut fmt::Formatter<'_>,
        errors: u64,
        all: Option<&Quantiles>,
    ) -> fmt::Result {
        let Some(q) = all.filter(|_| errors > 0) else {
            return Ok(());
        };
        let [p50, p90, p99, p999, max] =
            [q.p50, q.p90, q.p99, q.p999, q.max].map(|ms| self.at_least(ms));
        let mean = format!("≥{}", number(q.mean));
        let min = self.at_least(q.min);
        row(f, ALL, [min, mean, p50, p90, p99, p999, max])
    }

    /// Formats a time of a request that may have failed. One that is no shorter than the timeout is a lower bound.
    fn at_least(&self, ms: f64) -> String {
        match ms >= self.timeout_ms() {
            true => format!("≥{}", number(ms)),
            false => number(ms),
        }
    }

    fn stages(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.stages.len() < 2 {
            return Ok(());
        }
        writeln!(f)?;
        row(
            f,
            "rate, 1/s",
            ["planned", "done", "errors", "p50 ms", "p90", "p99", "max"].map(str::to_owned),
        )?;
        for stage in &self.stages {
            let q = stage.latency_all_ms.as_ref().unwrap_or(&stage.latency_ms);
            let rate = match (number(stage.from_per_s), number(stage.to_per_s)) {
                (from, to) if from == to => from,
                (from, to) => format!("{from} to {to}"),
            };
            let counts = [stage.planned, stage.completed, stage.errors].map(|n| n.to_string());
            let [planned, done, errors] = counts;
            let [p50, p90, p99, max] = [q.p50, q.p90, q.p99, q.max].map(|ms| self.at_least(ms));
            row(f, &rate, [planned, done, errors, p50, p90, p99, max])?;
        }
        Ok(())
    }

    fn connections(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.parameters.keep_alive {
            return Ok(());
        }
        let (opened, most) = (self.connections, self.connections_open_max);
        let end = self.connections_open_end;
        writeln!(
            f,
            "\nconnections: {opened} opened, at most {most} open at a time, {end} at the end"
        )
    }

    fn workers(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.by_worker.is_empty() {
            return Ok(());
        }
        let total: u64 = self.by_worker.values().sum();
        let most = self.by_worker.values().max().copied().unwrap_or(1) as f64;
        writeln!(f)?;
        let mut workers: Vec<_> = self.by_worker.iter().collect();
        workers.sort_by_key(|(name, _)| (name.len(), name.as_str()));
        for (name, count) in workers.iter().take(WORKERS_SHOWN) {
            let count = **count;
            let bar = "█".repeat((BAR * count as f64 / most).ceil() as usize);
            writeln!(
                f,
                "worker {name:<4} {count:>9} {:>6.1} %  {bar}",
                100.0 * count as f64 / total as f64
            )?;
        }
        match workers.len() {
            n if n > WORKERS_SHOWN => writeln!(
                f,
                "and {} more workers (--json shows all)",
                n - WORKERS_SHOWN
            ),
            _ => Ok(()),
        }
    }

    fn failures(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |counts: Vec<(String, u64)>| {
            counts
                .into_iter()
                .map(|(name, n)| format!("{name} {n}"))
                .collect::<Vec<_>>()
                .join(", ")
        };
        writeln!(f)?;
        match self.error_count() {
            0 => writeln!(f, "no errors")?,
            n => writeln!(
                f,
                "{n} errors ({} %): {}",
                number(100.0 * self.error_share()),
                list(self.errors.clone().into_iter().collect())
            )?,
        }
        if self
            .by_status
            .keys()
            .any(|status| !(200..300).contains(status))
        {
            writeln!(
                f,
                "statuses: {}",
                list(
                    self.by_status
                        .iter()
                        .map(|(s, n)| (s.to_string(), *n))
                        .collect()
                )
            )?;
        }
        match self.cancelled {
            0 => Ok(()),
            n => writeln!(f, "interrupted: {n} requests were under way"),
        }
    }

    /// Writes the warnings that a reader of the numbers needs: how the run itself may have distorted them.
    fn warnings(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let open = self.parameters.loop_kind == "open";
        let limited = self.parameters.concurrency.is_some();
        if open
            && !limited
            && self.lateness_ms.p99 > 1.0
            && self.lateness_ms.p99 > 0.1 * self.latency_ms.p99
        {
            writeln!(
                f,
                "warning: the generator itself was late (p99 {} ms): ask for less, add --threads or give it a CPU of its own",
                number(self.lateness_ms.p99)
            )?;
        }
        if let Some(n) = self.errors.get("not_sent") {
            writeln!(
                f,
                "warning: for {n} requests no client was free within the timeout: allow more with -c"
            )?;
        }
        if let Some(n) = self.errors.get("closed_idle") {
            writeln!(
                f,
                "warning: {n} requests met the end of an idle connection: the server closed it as they were sent"
            )?;
        }
        Ok(())
    }
}

fn quantiles(f: &mut fmt::Formatter<'_>, name: &str, q: &Quantiles) -> fmt::Result {
    // A row of nothing but zeros says nothing.
    if q.count == 0 || q.max < SHOWN_MS {
        return Ok(());
    }
    row(
        f,
        name,
        [q.min, q.mean, q.p50, q.p90, q.p99, q.p999, q.max].map(number),
    )
}

/// The least that [`number`] shows as more than 0.
const SHOWN_MS: f64 = 0.0005;

/// 76 columns; a longer name goes on a line of its own.
fn row(f: &mut fmt::Formatter<'_>, name: &str, cells: [String; 7]) -> fmt::Result {
    match name.chars().count() {
        0..=20 => write!(f, "{name:<20}")?,
        _ => write!(f, "{name}\n{:<20}", "")?,
    }
    cells.iter().try_for_each(|cell| write!(f, " {cell:>7}"))?;
    writeln!(f)
}

/// Formats three significant digits, in at most seven places.
pub(crate) fn number(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v if v >= 1.0 => format!("{v:.2}"),
        v => format!("{v:.3}"),
    }
}
