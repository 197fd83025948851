//! The processes of a worker's group that outlive its first process.
//!
//! A shell that runs the server as its child ends at SIGTERM, and the server does not. Such processes are asked to end,
//! and have the grace for what they have in hand.

use std::collections::HashSet;
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use wakeone_kernel::proc::process;
use wakeone_kernel::proc::stat::Stat;

use super::process::Process;
use super::report;

/// How often to look whether they have ended: it reads /proc/PID/stat of all processes.
pub(super) const LOOK: Duration = Duration::from_millis(50);
/// A process that is killed ends within this time, or is not waited for: its disk or network does not answer.
const KILLED: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    New,
    Asked,
    /// The log says so. Processes that end together with their leader are not worth a line.
    Told,
    Killed {
        until: Instant,
    },
}

/// The group of a process that has ended.
#[derive(Debug)]
struct Left {
    slot: usize,
    /// It led the group, and was not waited for yet. So no other group can have its number.
    leader: Child,
    kill_at: Instant,
    step: Step,
}

impl Left {
    fn signal(&self, signal: Signal) {
        let group = i32::try_from(self.leader.id()).ok().and_then(Pid::from_raw);
        if let Some(group) = group {
            let _ = kill_process_group(group, signal);
        }
    }

    /// Does what is due; returns whether to wait for it further.
    fn go_on(&mut self, now: Instant) -> bool {
        match self.step {
            Step::New => {
                self.signal(Signal::TERM);
                self.signal(Signal::CONT);
                self.step = Step::Asked;
            }
            Step::Asked => {
                report::left(self.slot, self.leader.id());
                self.step = Step::Told;
            }
            Step::Told if now >= self.kill_at => {
                report::kill_left(self.slot, self.leader.id());
                self.signal(Signal::KILL);
                self.step = Step::Killed {
                    until: now + KILLED,
                };
            }
            Step::Killed { until } => return now < until,
            Step::Told => {}
        }
        true
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        let _ = self.leader.wait();
    }
}

/// The groups of all workers that have ended.
#[derive(Debug, Default)]
pub struct Remains {
    all: Vec<Left>,
    looked: Option<Instant>,
}

impl Remains {
    /// Notes that a worker has ended; its group has until `kill_at` to end too.
    pub fn add(&mut self, slot: usize, process: Process, kill_at: Instant) {
        if let Some(leader) = process.into_child() {
            self.all.push(Left {
                slot,
                leader,
                kill_at,
                step: Step::New,
            });
            self.looked = None;
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// Whether this process has ended, and is to be waited for here.
    pub fn has(&self, pid: u32) -> bool {
        self.all.iter().any(|left| left.leader.id() == pid)
    }

    /// Ends the grace of all.
    pub fn hurry(&mut self, now: Instant) {
        for left in &mut self.all {
            left.kill_at = left.kill_at.min(now);
        }
        self.looked = None;
    }

    /// Kills all at once.
    pub fn kill(&mut self) {
        self.all
            .drain(..)
            .for_each(|left| left.signal(Signal::KILL));
    }

    /// Continues their ends.
    pub fn go_on(&mut self, now: Instant) {
        let rests = self.looked.is_some_and(|when| now < when + LOOK);
        if self.all.is_empty() || rests {
            return;
        }
        self.looked = Some(now);
        let living = living_groups();
        self.all
            .retain_mut(|left| living.contains(&left.leader.id()) && left.go_on(now));
    }
}

/// The process groups that have a living process.
fn living_groups() -> HashSet<u32> {
    let stats = process::pids()
        .into_iter()
        .filter_map(|pid| Stat::of(pid).ok());
    let living = stats.filter(|stat| !matches!(stat.state, 'Z' | 'X'));
    living.map(|stat| stat.group).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// Starts a shell that leads a group and ends; plays the steps of what it leaves. Returns how long that took.
    fn leave(script: &str, grace: Duration) -> Duration {
        use std::os::unix::process::CommandExt;
        let child = Command::new("sh")
            .args(["-c", script])
            .process_group(0)
            .spawn()
            .expect("sh");
        let process = Process::child(child).expect("watch");
        while process.ended().expect("poll").is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let pid = process.pid();
        let begun = Instant::now();
        let mut remains = Remains::default();
        remains.add(0, process, begun + grace);
        assert!(remains.has(pid));
        while remains.count() > 0 {
            assert!(begun.elapsed() < Duration::from_secs(60), "{script}");
            remains.go_on(Instant::now());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!living_groups().contains(&pid), "{script}");
        begun.elapsed()
    }

    #[test]
    fn a_group_that_outlives_its_leader_is_asked_and_then_killed() {
        let hour = Duration::from_secs(3600);
        leave("true", hour);
        leave("sleep 60 & exit 3", hour);
        let grace = Duration::from_millis(300);
        let ignores = "(trap '' TERM; sleep 60) & sleep 0.2; exit 3";
        assert!(leave(ignores, grace) >= grace, "it had its grace");
    }
}
