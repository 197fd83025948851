//! The machine that measured, and how quiet it was: a number without them is hearsay.

use serde::{Deserialize, Serialize};
use std::fs;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Share of stolen CPU time from which on absolute numbers are worth little.
const NOISY_STEAL: f64 = 0.02;
/// Share of CPU time in use before the first point, from which on other work disturbs the measurement.
const NOISY_BUSY: f64 = 0.1;
/// How the release of the papers' kernel ends.
pub const PAPERS: &str = "-papers";
/// How long to look whether the machine is quiet.
const LOOK: Duration = Duration::from_millis(300);
/// Spread of the rounds, `(max − min) / median`, from which on a variant is called unsteady.
pub const NOISY_SPREAD: f64 = 0.5;

/// Where and when it was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// Kernel release.
    pub kernel: String,
    /// Machine architecture.
    pub arch: String,
    /// CPUs that this process may use.
    pub cpus: u64,
    /// Name of the CPU as the kernel gives it.
    pub cpu_model: String,
    /// Memory of the machine, in bytes.
    pub memory_bytes: u64,
    /// Start, UTC, RFC 3339.
    pub started: String,
    /// How long it took, in seconds.
    pub elapsed_s: f64,
    /// Load average over one minute before the first point. It remembers an experiment just before this one.
    pub load_before: f64,
    /// Share of CPU time that was in use just before the first point, 0 to 1.
    #[serde(default)]
    pub busy_before: f64,
    /// Load average over one minute after the last point.
    pub load_after: f64,
    /// Share of CPU time that the hypervisor gave to other guests meanwhile, 0 to 1.
    pub steal_share: f64,
    /// Facts about the machine that a reader must know before trusting the numbers.
    pub warnings: Vec<String>,
}

/// Takes the machine's state at the start; [`Watch::finish`] makes the [`Environment`].
#[derive(Debug)]
pub struct Watch {
    started: Instant,
    started_at: SystemTime,
    load_before: f64,
    busy_before: f64,
    ticks: CpuTicks,
}

/// CPU time of all CPUs since boot, in clock ticks.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct CpuTicks {
    total: u64,
    idle: u64,
    steal: u64,
}

impl CpuTicks {
    /// Share of the time since then in which a CPU was in use, 0 to 1.
    fn busy_since(&self, then: &Self) -> f64 {
        let total = self.total.saturating_sub(then.total);
        let idle = self.idle.saturating_sub(then.idle).min(total);
        (total - idle) as f64 / total.max(1) as f64
    }
}

impl Watch {
    /// Starts watching, with a look whether the machine is quiet.
    pub fn start() -> Self {
        let before = cpu_ticks(&read("/proc/stat"));
        std::thread::sleep(LOOK);
        let ticks = cpu_ticks(&read("/proc/stat"));
        Self {
            started: Instant::now(),
            started_at: SystemTime::now(),
            load_before: load_average(&read("/proc/loadavg")),
            busy_before: ticks.busy_since(&before),
            ticks,
        }
    }

    /// The environment of everything since the start.
    pub fn finish(&self) -> Environment {
        let now = cpu_ticks(&read("/proc/stat"));
        let total = now.total.saturating_sub(self.ticks.total).max(1);
        let mut environment = Environment {
            kernel: read("/proc/sys/kernel/osrelease").trim().into(),
            arch: std::env::consts::ARCH.into(),
            cpus: std::thread::available_parallelism().map_or(1, usize::from) as u64,
            cpu_model: cpu_model(&read("/proc/cpuinfo")),
            memory_bytes: memory_bytes(&read("/proc/meminfo")),
            started: rfc3339(self.started_at),
            elapsed_s: (self.started.elapsed().as_secs_f64() * 10.0).round() / 10.0,
            load_before: self.load_before,
            busy_before: self.busy_before,
            load_after: load_average(&read("/proc/loadavg")),
            steal_share: now.steal.saturating_sub(self.ticks.steal) as f64 / total as f64,
            warnings: Vec::new(),
        };
        environment.warnings = noise(&environment);
        if environment.kernel.contains(PAPERS) {
            environment.warnings.push(
                "This ran on the kernel of the papers in an emulated machine, which is many times slower: compare counts, shares, ratios and growth, not times.".into(),
            );
        }
        if build() == "debug" {
            environment.warnings.push(
                "This was a debug build, which serves several times slower: build with --release to measure.".into(),
            );
        }
        environment
    }
}

/// `debug` or `release`: how this executable, which is also the server under test, was compiled.
pub fn build() -> &'static str {
    if cfg!(debug_assertions) {
        "debug"
    } else {
        "release"
    }
}

/// Returns a warning for each state of the machine that makes the numbers doubtful.
fn noise(environment: &Environment) -> Vec<String> {
    let mut warnings = Vec::new();
    if environment.steal_share > NOISY_STEAL {
        warnings.push(format!(
            "The hypervisor gave {:.1} % of the CPU time to others meanwhile: the machine was too noisy for absolute numbers; the ratios, paired by round, are the safer reading.",
            environment.steal_share * 100.0
        ));
    }
    if environment.busy_before > NOISY_BUSY {
        warnings.push(format!(
            "{:.0} % of the CPU time was in use before anything was measured: something else was running.",
            environment.busy_before * 100.0
        ));
    }
    warnings
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn load_average(text: &str) -> f64 {
    text.split_whitespace()
        .next()
        .and_then(|w| w.parse().ok())
        .unwrap_or(0.0)
}

/// The first line of /proc/stat: user nice system idle iowait irq softirq steal guest guest_nice (guest is in user).
fn cpu_ticks(text: &str) -> CpuTicks {
    let fields: Vec<u64> = text
        .lines()
        .next()
        .unwrap_or("")
        .split_whitespace()
        .skip(1)
        .take(8)
        .flat_map(str::parse)
        .collect();
    CpuTicks {
        total: fields.iter().sum(),
        // idle and iowait
        idle: fields.iter().skip(3).take(2).sum(),
        steal: fields.get(7).copied().unwrap_or(0),
    }
}

fn cpu_model(text: &str) -> String {
    text.lines()
        .find(|l| l.starts_with("model name") || l.starts_with("Model"))
        .and_then(|l| l.split_once(':'))
        .map_or_else(|| "unknown".into(), |(_, name)| name.trim().into())
}

fn memory_bytes(text: &str) -> u64 {
    let kib: Option<u64> = text
        .lines()
        .find(|l| l.starts_with("MemTotal:"))
        .and_then(|l| l.split_whitespace().nth(1))
        .and_then(|w| w.parse().ok());
    kib.unwrap_or(0) * 1024
}

/// UTC date and time; days to civil date after Howard Hinnant's `civil_from_days`.
fn rfc3339(time: SystemTime) -> String {
    let seconds = time
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs() as i64);
    let (days, rest) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let day_of_era = z.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 {
        shifted_month + 3
    } else {
        shifted_month - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z",
        rest / 3600,
        rest / 60 % 60,
        rest % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn dates() {
        let at = |s| rfc3339(UNIX_EPOCH + Duration::from_secs(s));
        assert_eq!(at(0), "1970-01-01T00:00:00Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(at(1_709_251_199), "2024-02-29T23:59:59Z");
    }

    #[test]
    fn steal_is_the_eighth_field() {
        let ticks = cpu_ticks("cpu  10 0 20 60 0 0 5 5 7 0\ncpu0 1 2 3\n");
        assert_eq!(
            ticks,
            CpuTicks {
                total: 100,
                idle: 60,
                steal: 5
            }
        );
        assert_eq!(cpu_ticks(""), CpuTicks::default());
    }

    #[test]
    fn a_stolen_or_busy_machine_is_said_to_be() {
        let mut environment = Watch::start().finish();
        (environment.steal_share, environment.busy_before) = (0.0, 0.05);
        assert!(noise(&environment).is_empty());
        (environment.steal_share, environment.busy_before) = (0.3, 0.5);
        assert_eq!(noise(&environment).len(), 2);
    }

    #[test]
    fn busy_is_what_is_not_idle() {
        let ticks = |total, idle| CpuTicks {
            total,
            idle,
            steal: 0,
        };
        assert_eq!(ticks(200, 130).busy_since(&ticks(100, 100)), 0.7);
        assert_eq!(ticks(100, 100).busy_since(&ticks(100, 100)), 0.0);
    }

    #[test]
    fn this_machine_has_a_name() {
        let environment = Watch::start().finish();
        assert!(
            !environment.kernel.is_empty() && environment.cpus > 0 && environment.memory_bytes > 0
        );
    }
}
