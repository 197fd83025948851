//! The summary as text for people.

use std::fmt;

use crate::summary::{Quantiles, Summary};

/// More workers than this would push the numbers off the screen.
const WORKERS_SHOWN: usize = 16;
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
        writeln!(f)?;
        row(
            f,
            "ms",
            ["min", "mean", "p50", "p90", "p99", "p99.9", "max"].map(str::to_owned),
        )?;
        quantiles(f, "latency", &self.latency_ms)?;
        if open {
            quantiles(f, "service", &self.service_ms)?;
        }
        quantiles(f, "  connect", &self.connect_ms)?;
        quantiles(f, "  first byte", &self.first_byte_ms)?;
        if self.paths.len() > 1 {
            for path in &self.paths {
                quantiles(f, &path.path, &path.latency_ms)?;
            }
        }
        writeln!(
            f,
            "{}",
            match open {
                true => "latency: from the planned time; service: from connect()",
                false => "latency: from connect(); a closed loop does not see what it did not send",
            }
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
        let errors: u64 = self.errors.values().sum();
        let list = |counts: Vec<(String, u64)>| {
            counts
                .into_iter()
                .map(|(name, n)| format!("{name} {n}"))
                .collect::<Vec<_>>()
                .join(", ")
        };
        writeln!(f)?;
        match errors {
            0 => writeln!(f, "no errors")?,
            n => writeln!(
                f,
                "{n} errors: {}",
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

    /// What a reader of the numbers must know about how they came to be.
    fn warnings(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let open = self.parameters.loop_kind == "open";
        if open && self.lateness_ms.p99 > 1.0 && self.lateness_ms.p99 > 0.1 * self.latency_ms.p99 {
            writeln!(
                f,
                "warning: the generator itself was late (p99 {} ms): ask for less, add --threads or give it a CPU of its own",
                number(self.lateness_ms.p99)
            )?;
        }
        let lost = self
            .errors
            .get("timeout")
            .or(self.errors.get("connect_timeout"));
        if lost.is_some() {
            writeln!(
                f,
                "warning: requests that timed out took longer than any latency shown above"
            )?;
        }
        Ok(())
    }
}

fn quantiles(f: &mut fmt::Formatter<'_>, name: &str, q: &Quantiles) -> fmt::Result {
    if q.count == 0 {
        return Ok(());
    }
    row(
        f,
        name,
        [q.min, q.mean, q.p50, q.p90, q.p99, q.p999, q.max].map(number),
    )
}

fn row(f: &mut fmt::Formatter<'_>, name: &str, cells: [String; 7]) -> fmt::Result {
    write!(f, "{name:<20}")?;
    cells.iter().try_for_each(|cell| write!(f, " {cell:>7}"))?;
    writeln!(f)
}

/// Three digits that matter, in at most seven places.
pub(crate) fn number(value: f64) -> String {
    match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v if v >= 1.0 => format!("{v:.2}"),
        v => format!("{v:.3}"),
    }
}
