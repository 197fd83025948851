//! The processes of a server under test, and their CPU time, from /proc.

use std::fs;
use std::net::{Ipv4Addr, UdpSocket};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::error::Error;

/// The path of a program that is started by its name. It is also looked for in the directory of system services.
pub fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).chain(["/usr/sbin".into()]);
    places.map(|p| p.join(name)).find(|p| p.is_file())
}

/// This executable, which the experiments start again as a server or a reader.
///
/// # Errors
/// When the system does not say where it is.
pub fn own_program() -> Result<PathBuf, Error> {
    std::env::current_exe()
        .map_err(|e| Error::Server(format!("finding this executable failed: {e}")))
}

/// The `wakeone` command: the one beside this executable, else the one that is installed.
///
/// # Errors
/// There is none.
pub fn wakeone() -> Result<PathBuf, Error> {
    let own = own_program()?;
    let beside = own.with_file_name("wakeone");
    if beside.is_file() {
        return Ok(beside);
    }
    program("wakeone").ok_or_else(|| {
        Error::Missing(format!(
            "there is no `wakeone` beside {} or in PATH: build or install it too",
            own.display()
        ))
    })
}

/// The processes below `root` that have no children of their own, `root` itself if it has none: the workers.
pub fn leaves(root: u32) -> Vec<u32> {
    let below = children(root);
    if below.is_empty() {
        vec![root]
    } else {
        below.into_iter().flat_map(leaves).collect()
    }
}

/// A process and all that are below it.
pub fn tree(root: u32) -> Vec<u32> {
    let below = children(root).into_iter().flat_map(tree);
    std::iter::once(root).chain(below).collect()
}

fn children(pid: u32) -> Vec<u32> {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return Vec::new();
    };
    let lists = threads
        .flatten()
        .filter_map(|t| fs::read_to_string(t.path().join("children")).ok());
    lists
        .flat_map(|l| {
            l.split_whitespace()
                .flat_map(str::parse)
                .collect::<Vec<u32>>()
        })
        .collect()
}

/// CPU time that a process has had, in ns; 0 once it is gone.
pub fn cpu_ns(pid: u32) -> u64 {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return 0;
    };
    let times = threads
        .flatten()
        .filter_map(|t| fs::read_to_string(t.path().join("schedstat")).ok());
    times
        .filter_map(|s| s.split_whitespace().next()?.parse::<u64>().ok())
        .sum()
}

/// The memory of a process: its own, and its part of what it shares with others. 0 if it has ended.
pub fn memory_bytes(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let kib = text.lines().find_map(|line| {
        let value = line.strip_prefix("Pss:")?.trim().strip_suffix(" kB")?;
        value.parse::<u64>().ok()
    });
    kib.unwrap_or(0) * 1024
}

/// Whether the CPU time of a process includes the softirq for its packets, which is most of a connection over
/// loopback. It does not where the kernel accounts for interrupts by themselves (CONFIG_IRQ_TIME_ACCOUNTING). Measured
/// once, by sending.
pub fn softirq_is_charged() -> bool {
    static CHARGED: OnceLock<bool> = OnceLock::new();
    *CHARGED.get_or_init(|| {
        let hidden = (0..3).filter_map(|_| uncharged_share());
        hidden
            .min_by(f64::total_cmp)
            .is_some_and(|share| share < MOST_UNCHARGED)
    })
}

/// The largest uncharged share at which softirq counts as charged. About half of sending datagrams over loopback is
/// softirq.
const MOST_UNCHARGED: f64 = 0.15;

/// The share of a never sleeping thread's time in which it neither used nor waited for a CPU. The kernel charges it
/// elsewhere.
fn uncharged_share() -> Option<f64> {
    let receiver = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).ok()?;
    let sender = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).ok()?;
    sender.connect(receiver.local_addr().ok()?).ok()?;
    sender.set_nonblocking(true).ok()?;
    let spent = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        let used = Duration::new(time.tv_sec as u64, time.tv_nsec as u32);
        let books = fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        let waited = books.split_whitespace().nth(1)?.parse().ok()?;
        Some(used + Duration::from_nanos(waited))
    };
    let (before, start) = (spent()?, Instant::now());
    while start.elapsed() < Duration::from_millis(30) {
        for _ in 0..16 {
            let _ = sender.send(&[0; 8]);
        }
    }
    let (all, spent) = (start.elapsed(), spent()?.saturating_sub(before));
    Some(1.0 - spent.as_secs_f64() / all.as_secs_f64())
}

/// CPU time and context switches of processes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// CPU time in ns, the kernel's part included.
    pub cpu_ns: u64,
    /// How often a thread of theirs went to sleep.
    pub voluntary_switches: u64,
    /// How often a thread of theirs lost its CPU to another.
    pub involuntary_switches: u64,
}

impl Usage {
    /// The usage of the [`leaves`] below `root` so far.
    pub fn of_leaves(root: u32) -> Self {
        leaves(root)
            .into_iter()
            .map(Self::of)
            .fold(Self::default(), |a, b| Self {
                cpu_ns: a.cpu_ns + b.cpu_ns,
                voluntary_switches: a.voluntary_switches + b.voluntary_switches,
                involuntary_switches: a.involuntary_switches + b.involuntary_switches,
            })
    }

    /// That of the leaves below `root`, and the CPU time of this process, the client.
    pub fn with_own(root: u32) -> (Self, Duration) {
        let now = clock_gettime(ClockId::ProcessCPUTime);
        let own = Duration::new(now.tv_sec as u64, now.tv_nsec as u32);
        (Self::of_leaves(root), own)
    }

    /// The usage of a process so far; zero once it is gone.
    pub fn of(pid: u32) -> Self {
        let threads = fs::read_dir(format!("/proc/{pid}/task"));
        let statuses: Vec<String> = threads
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|t| fs::read_to_string(t.path().join("status")).ok())
            .collect();
        let sum = |field: &str| {
            let lines = statuses.iter().flat_map(|s| s.lines());
            lines
                .filter_map(|l| l.strip_prefix(field)?.trim().parse::<u64>().ok())
                .sum()
        };
        Self {
            cpu_ns: cpu_ns(pid),
            voluntary_switches: sum("voluntary_ctxt_switches:"),
            involuntary_switches: sum("nonvoluntary_ctxt_switches:"),
        }
    }

    /// The usage since `before`.
    pub fn since(&self, before: &Self) -> Self {
        let less = |now: u64, then: u64| now.saturating_sub(then);
        Self {
            cpu_ns: less(self.cpu_ns, before.cpu_ns),
            voluntary_switches: less(self.voluntary_switches, before.voluntary_switches),
            involuntary_switches: less(self.involuntary_switches, before.involuntary_switches),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn programs_are_found() {
        assert!(program("sh").is_some_and(|path| path.ends_with("sh")));
        assert_eq!(program("no program has this name"), None);
    }

    #[test]
    fn leaves_are_those_without_children() {
        let mut shell = Command::new("sh")
            .args(["-c", "sleep 30 & sleep 30 & wait"])
            .spawn()
            .unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
        while leaves(shell.id()).len() < 2 && std::time::Instant::now() < deadline {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let found = leaves(shell.id());
        for pid in &found {
            let _ = nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(*pid as i32),
                nix::sys::signal::Signal::SIGKILL,
            );
        }
        let _ = shell.wait();
        assert_eq!(found.len(), 2);
        assert!(!found.contains(&shell.id()));
    }

    #[test]
    fn cpu_time_grows_with_work() {
        let before = cpu_ns(std::process::id());
        let mut sum = 0u64;
        while cpu_ns(std::process::id()) - before < 1_000_000 {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(cpu_ns(std::process::id()) > before);
        assert_eq!(cpu_ns(u32::MAX), 0);
    }

    #[test]
    fn sleeps_are_counted() {
        // Threads of other tests come and go in this process: look at a child's.
        let mut sleeper = Command::new("sh")
            .args(["-c", "while read line; do echo; done"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let (mut to, mut from) = (
            sleeper.stdin.take().unwrap(),
            sleeper.stdout.take().unwrap(),
        );
        let before = Usage::of_leaves(sleeper.id());
        for _ in 0..5 {
            std::io::Write::write_all(&mut to, b"a\n").unwrap();
            std::io::Read::read_exact(&mut from, &mut [0]).unwrap();
        }
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
        let slept = || {
            Usage::of_leaves(sleeper.id())
                .since(&before)
                .voluntary_switches
        };
        while slept() == 0 && std::time::Instant::now() < deadline {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let slept = slept();
        drop(to);
        let _ = sleeper.wait();
        assert!(slept >= 1, "{slept}");
        assert_eq!(Usage::of(u32::MAX), Usage::default());
    }
}
