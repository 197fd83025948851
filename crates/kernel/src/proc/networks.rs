//! The network namespaces of the machine, by the processes that are in them.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, Dir, Mode, OFlags, openat};

use crate::netns;
use crate::proc::process;
use crate::proc::stat::{self, Stat};

/// A process that is so old stays where it is, as good as always: engines enter the namespace and execute the server at once.
const SETTLED: Duration = Duration::from_secs(2);
/// Those that enter another one later are found again so often.
const ALL_AGAIN: Duration = Duration::from_secs(10);
/// While no process was started, those that ended are noticed so often.
const ENDED_AGAIN: Duration = Duration::from_secs(1);

/// Which processes are in which network namespace. A look costs little where few processes come and go.
#[derive(Debug)]
pub struct Networks {
    own: u64,
    known: HashMap<u32, Known>,
    all: Instant,
    /// The last process that was started before the last look; `None`: it cannot be told, or one may move yet.
    last: Option<u32>,
    looked: Instant,
    seen: BTreeMap<u64, Vec<u32>>,
}

/// A process at the last look.
#[derive(Debug, Clone, Copy)]
struct Known {
    /// The inode of its folder: that of another process with the same number differs.
    folder: u64,
    /// Its namespace; `None` if it is ours, cannot be told, or the process is a part of this one.
    network: Option<u64>,
    since: Instant,
}

impl Networks {
    /// Knows of none yet. The namespace that this thread is in counts as our own.
    ///
    /// # Errors
    /// /proc is not mounted.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            own: netns::own()?,
            known: HashMap::new(),
            all: Instant::now(),
            last: None,
            looked: Instant::now(),
            seen: BTreeMap::new(),
        })
    }

    /// Returns the namespaces other than our own that processes are in, and those, in order. Our own helpers do not count: they are where
    /// the thread was that started them.
    ///
    /// # Errors
    /// /proc cannot be read.
    pub fn look(&mut self) -> io::Result<BTreeMap<u64, Vec<u32>>> {
        let now = Instant::now();
        let last = last_started();
        if last.is_some() && last == self.last && now.duration_since(self.looked) < ENDED_AGAIN {
            return Ok(self.seen.clone());
        }
        self.looked = now;
        let again = now.duration_since(self.all) >= ALL_AGAIN;
        if again {
            self.all = now;
        }
        let mut known = HashMap::with_capacity(self.known.len());
        for (pid, folder) in folders()? {
            let before = self.known.get(&pid).filter(|one| one.folder == folder);
            let since = before.map_or(now, |one| one.since);
            let settled = before.filter(|one| !again && now.duration_since(one.since) >= SETTLED);
            let network = match settled {
                Some(one) => one.network,
                None => self.network_of(pid),
            };
            let one = Known {
                folder,
                network,
                since,
            };
            known.insert(pid, one);
        }
        self.known = known;
        let mut networks: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
        for (pid, one) in &self.known {
            if let Some(network) = one.network {
                networks.entry(network).or_default().push(*pid);
            }
        }
        networks.values_mut().for_each(|pids| pids.sort_unstable());
        let mut times = self.known.values().map(|one| one.since);
        let settled = times.all(|since| now.duration_since(since) >= SETTLED);
        self.last = last.filter(|_| settled);
        self.seen.clone_from(&networks);
        Ok(networks)
    }

    fn network_of(&self, pid: u32) -> Option<u64> {
        let network = netns::of(pid).ok().filter(|network| *network != self.own)?;
        (!is_ours(pid)).then_some(network)
    }
}

/// Whether other processes than ours are in a network namespace.
pub fn is_inhabited(namespace: u64) -> bool {
    let is_there = |pid: &u32| netns::of(*pid).is_ok_and(|one| one == namespace) && !is_ours(*pid);
    process::pids().iter().any(is_there)
}

/// Whether a process is this one, or a helper of it.
fn is_ours(pid: u32) -> bool {
    let own = std::process::id();
    pid == own || Stat::of(pid).is_ok_and(|stat| stat.parent == own)
}

/// The number that was given to a process or thread last (`loadavg_proc_show` in fs/proc/loadavg.c).
fn last_started() -> Option<u32> {
    let text = stat::text("/proc/loadavg").ok()?;
    text.split_whitespace().last()?.parse().ok()
}

/// The processes, each with the inode of its folder.
fn folders() -> io::Result<Vec<(u32, u64)>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = openat(CWD, "/proc", flags, Mode::empty())?;
    let mut folders = Vec::new();
    for entry in Dir::new(folder)? {
        let entry = entry?;
        let pid = entry.file_name().to_str().ok();
        if let Some(pid) = pid.and_then(|name| name.parse().ok()) {
            folders.push((pid, entry.ino()));
        }
    }
    Ok(folders)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn namespaces_are_seen_while_others_than_we_are_in_them() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: only root can make a network namespace");
        }
        let mut networks = Networks::new().expect("/proc");
        // A child of a shell, as those of ours count as helpers.
        let script = "unshare --net sh -c 'echo $$; exec sleep 60' & read _; kill $!; wait";
        let mut shell = Command::new("sh");
        shell.args(["-c", script]);
        shell.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut shell = shell.spawn().expect("sh");
        let mut line = String::new();
        let mut told = std::io::BufReader::new(shell.stdout.take().expect("stdout"));
        std::io::BufRead::read_line(&mut told, &mut line).expect("a line");
        let pid: u32 = line.trim().parse().expect("a pid");
        let there = netns::of(pid).expect("its namespace");
        for _ in 0..3 {
            let seen = networks.look().expect("look");
            assert_eq!(seen.get(&there), Some(&vec![pid]), "{seen:?}");
            assert!(!seen.contains_key(&netns::own().expect("own")));
            assert!(is_inhabited(there));
        }
        drop(shell.stdin.take());
        shell.wait().expect("wait");
        let seen = networks.look().expect("look");
        assert!(!seen.contains_key(&there), "{seen:?}");
        assert!(!is_inhabited(there));
    }
}
