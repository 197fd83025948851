//! A record of the processes that let their readers hang, and of the helpers that they hold.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use nix::unistd::Pid;

use super::helper::has_ended;

/// How long a process is not read after it has let a helper hang; doubled with each further time.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// A user with this many hanging processes, or helpers that they hold, is not read from at all.
const MOST_OF_USER: usize = 4;
/// With this many helpers given up and not ended, only root's and our own processes are read.
const MOST_LEFT_BEHIND: usize = 256;

/// The record, which all threads share.
#[derive(Debug, Default)]
pub(super) struct Suspects {
    processes: HashMap<u32, Suspect>,
    left_behind: Vec<LeftBehind>,
}

#[derive(Debug, Clone, Copy)]
struct Suspect {
    user: Option<u32>,
    until: Instant,
    pause: Duration,
}

/// A helper that was killed, and perhaps cannot be yet: it waits in a page of another process, or for a lock of it.
#[derive(Debug, Clone, Copy)]
struct LeftBehind {
    helper: Pid,
    user: Option<u32>,
}

impl Suspects {
    /// Whether nobody is suspected, so that no process needs to be looked up.
    pub fn is_empty(&self) -> bool {
        self.processes.is_empty() && self.left_behind.is_empty()
    }

    /// Whether a process has been suspected lately.
    pub fn is_paused(&self, pid: u32) -> bool {
        let now = Instant::now();
        self.processes
            .get(&pid)
            .is_some_and(|suspect| suspect.until > now)
    }

    /// Whether no process of a user is read. `None`: of somebody who could not be found out. Root and our own user are
    /// trusted: a process of theirs may hang, by a file system that does not answer say, but not to stop us.
    pub fn is_shunned(&self, user: Option<u32>) -> bool {
        let own = nix::unistd::geteuid().as_raw();
        if user.is_some_and(|user| user == 0 || user == own) {
            return false;
        }
        let processes = self.processes.values().filter(|one| one.user == user);
        let helpers = self.left_behind.iter().filter(|one| one.user == user);
        processes.count().max(helpers.count()) >= MOST_OF_USER
            || self.left_behind.len() >= MOST_LEFT_BEHIND
    }

    /// Notes a process that let a helper hang.
    pub fn suspect(&mut self, pid: u32, user: Option<u32>, helper: Pid) {
        let before = self.processes.get(&pid);
        let pause = before.map_or(FIRST_PAUSE, |one| (one.pause * 2).min(LONGEST_PAUSE));
        let until = Instant::now() + pause;
        self.processes.insert(pid, Suspect { user, until, pause });
        self.leave(helper, user);
    }

    /// Notes a helper that is no longer asked.
    pub fn leave(&mut self, helper: Pid, user: Option<u32>) {
        self.left_behind.push(LeftBehind { helper, user });
    }

    /// Forgets helpers that have ended, and processes that have not hung for long.
    pub fn forget(&mut self) {
        self.left_behind.retain(|one| !has_ended(one.helper));
        let now = Instant::now();
        self.processes
            .retain(|_, suspect| suspect.until + LONGEST_PAUSE > now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_shunned_after_a_few_processes_and_root_never() {
        let mut suspects = Suspects::default();
        let nobody = Pid::from_raw(i32::MAX);
        for pid in 1..=MOST_OF_USER as u32 {
            assert!(!suspects.is_shunned(Some(12345)));
            suspects.suspect(pid, Some(12345), nobody);
            suspects.suspect(pid + 100, Some(0), nobody);
        }
        assert!(suspects.is_shunned(Some(12345)) && !suspects.is_shunned(Some(12346)));
        assert!(!suspects.is_shunned(Some(0)) && !suspects.is_shunned(None));
        assert!(suspects.is_paused(1) && !suspects.is_paused(99));
        // The pause of each is over, and they are remembered.
        for suspect in suspects.processes.values_mut() {
            suspect.until = Instant::now();
        }
        suspects.forget();
        assert!(suspects.left_behind.is_empty(), "those helpers never were");
        assert!(!suspects.is_paused(1) && suspects.is_shunned(Some(12345)));
        suspects.suspect(1, Some(12345), nobody);
        assert_eq!(suspects.processes[&1].pause, 2 * FIRST_PAUSE);
    }

    #[test]
    fn helpers_that_stay_count_for_the_user_that_holds_them() {
        let mut suspects = Suspects::default();
        for _ in 0..MOST_OF_USER {
            suspects.leave(Pid::from_raw(i32::MAX), Some(12345));
        }
        assert!(suspects.is_shunned(Some(12345)) && !suspects.is_shunned(Some(12346)));
        for _ in 0..MOST_LEFT_BEHIND {
            suspects.leave(Pid::from_raw(i32::MAX), None);
        }
        assert!(suspects.is_shunned(Some(12346)) && !suspects.is_shunned(Some(0)));
    }
}
