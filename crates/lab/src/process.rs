//! The processes of a server under test, and their CPU time, from /proc.

use std::fs;
use std::path::PathBuf;

/// Where a program is that is started by its name; also looked for where system services are kept.
pub fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).chain(["/usr/sbin".into()]);
    places.map(|p| p.join(name)).find(|p| p.is_file())
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
}
