//! Which process is meant.

use std::io;

use serde::{Deserialize, Serialize};
use wakeone_kernel::proc::stat::Stat;

/// A process's permanent identity: a pid is used again, but a pid with its start time is not (until the next boot).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// The process id.
    pub pid: u32,
    /// Field 22 of /proc/PID/stat: clock ticks since boot.
    pub started: u64,
}

impl Identity {
    /// The identity of the process that has this pid now.
    ///
    /// # Errors
    /// There is none, or /proc cannot be read.
    pub fn of(pid: u32) -> io::Result<Self> {
        let started = Stat::of(pid)?.started;
        Ok(Self { pid, started })
    }

    /// Whether this very process still runs (in this boot). A zombie does not. If process 1 never waits for children,
    /// orphans stay zombies for ever.
    pub fn lives(&self) -> bool {
        Self::of(self.pid).is_ok_and(|now| now == *self)
            && !matches!(
                wakeone_kernel::proc::process::state(self.pid),
                Some('Z' | 'X')
            )
    }
}
