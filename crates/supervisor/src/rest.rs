//! The processes that outlive the server's first one. A daemon is the server; a forgotten child is not.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use wakeone_kernel::proc::process::{children, sockets_of, tree};
use wakeone_kernel::proc::stat::Stat;
use wakeone_kernel::socket::diag::{self, Which};
use wakeone_model::listener::Protocol;

/// How often to look at them.
const LOOK: Duration = Duration::from_millis(200);
/// A process that is killed ends within this time, or is not waited for.
const KILLED: Duration = Duration::from_secs(1);

/// Their end.
#[derive(Debug, Default)]
pub struct Rest {
    looked: Option<Instant>,
    /// The log says that they are the server now.
    told_serving: bool,
    /// When they are killed; `None`: nobody asks them to end.
    kill_at: Option<Instant>,
    asked: HashSet<u32>,
    killed: bool,
}

impl Rest {
    /// Whether nobody is to be waited for any more. `first`: the first process, which has ended; its process group is
    /// asked to end, and killed after `grace`. Others chose to leave that group, and live on. `told`: the server was told
    /// to end, so those that serve have no more than the grace either.
    pub fn is_over(&mut self, first: u32, told: bool, grace: Duration) -> bool {
        let now = Instant::now();
        if self.looked.is_some_and(|when| now < when + LOOK) {
            return false;
        }
        let again = self.looked.replace(now).is_some();
        let left = left();
        if !again && !left.is_empty() {
            // A server that kills its workers ends before the last of them.
            return false;
        }
        let serving = serving(&left);
        if self.kill_at.is_none() {
            if !serving.is_empty() && !told {
                if !std::mem::replace(&mut self.told_serving, true) {
                    tracing::info!(
                        event = "left",
                        "the server's first process has ended; {} hold its listeners, and are waited for: SIGTERM ends them",
                        named(&serving)
                    );
                }
                return false;
            }
            self.kill_at = Some(now + grace);
        }
        let group: Vec<u32> = left
            .iter()
            .filter(|(_, group)| *group == first)
            .map(|(pid, _)| *pid)
            .collect();
        let kill_at = self.kill_at.unwrap_or(now);
        if now >= kill_at {
            self.kill(&group);
        } else {
            self.ask(&group);
        }
        let nobody = group.is_empty() && serving.is_empty();
        let over = nobody || now >= kill_at + KILLED || (now >= kill_at && group.is_empty());
        if over && !left.is_empty() {
            let left: Vec<u32> = left.iter().map(|(pid, _)| *pid).collect();
            tracing::warn!(
                event = "left",
                "{} of the server run on, and are not waited for",
                named(&left)
            );
        }
        over
    }

    /// Asks those to end that were not asked yet: only the first process had the signal.
    fn ask(&mut self, group: &[u32]) {
        let new: Vec<u32> = group
            .iter()
            .copied()
            .filter(|pid| self.asked.insert(*pid))
            .collect();
        if !new.is_empty() {
            tracing::info!(
                event = "left",
                "the server's first process has ended and left {}: they are asked to end",
                named(&new)
            );
            signal(&new, Signal::TERM);
            signal(&new, Signal::CONT);
        }
    }

    fn kill(&mut self, group: &[u32]) {
        if !group.is_empty() && !std::mem::replace(&mut self.killed, true) {
            tracing::warn!(
                event = "left",
                "{} did not end within the grace, and are killed",
                named(group)
            );
        }
        signal(group, Signal::KILL);
    }
}

/// Our children that are the server's, with their process groups. Nobody but us waits for them, so each pid stays theirs.
fn left() -> Vec<(u32, u32)> {
    let ours = std::process::id();
    let group = |pid: u32| Stat::of(pid).ok().map(|stat| stat.group);
    let own = group(ours);
    children(ours)
        .into_iter()
        .filter_map(|pid| Some((pid, group(pid)?)))
        // Our own helpers.
        .filter(|(_, group)| Some(*group) != own)
        .collect()
}

/// Those of them that hold a listener or a UDP socket, or have a process below them that does.
fn serving(left: &[(u32, u32)]) -> Vec<u32> {
    if left.is_empty() {
        return Vec::new();
    }
    let all = [Protocol::Tcp, Protocol::Mptcp, Protocol::Udp];
    let sockets = all.map(|one| diag::sockets(one, Which::Listening, 0).unwrap_or_default());
    let inodes: HashSet<u64> = sockets
        .iter()
        .flatten()
        .map(|one| one.socket.inode)
        .collect();
    let holds = |pid: u32| {
        let held = sockets_of(pid).unwrap_or_default();
        held.iter().any(|(_, inode)| inodes.contains(inode))
    };
    let pids = left.iter().map(|(pid, _)| *pid);
    pids.filter(|pid| tree(*pid).any(holds)).collect()
}

fn signal(pids: &[u32], signal: Signal) {
    for pid in pids {
        if let Some(pid) = i32::try_from(*pid).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, signal);
        }
    }
}

fn named(pids: &[u32]) -> String {
    let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
    match pids.as_slice() {
        [one] => format!("process {one}"),
        all => format!("processes {}", all.join(", ")),
    }
}
