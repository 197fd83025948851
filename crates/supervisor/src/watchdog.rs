//! Signs of life for the service manager's watchdog (`WatchdogSec=`), which restarts us if they stay away too long.

use std::time::{Duration, Instant};

use sd_notify::NotifyState;

use crate::notify::notify_if_room;

/// Reports that its owner's loop goes round, as often as the service manager asked for.
#[derive(Debug)]
pub struct Watchdog {
    /// None if the service manager does not watch us.
    every: Option<Duration>,
    last: Option<Instant>,
}

impl Watchdog {
    /// Returns a watchdog as the environment asks for it (`WATCHDOG_USEC`).
    pub fn from_env() -> Self {
        Self {
            // Half of it, as sd_watchdog_enabled(3) recommends.
            every: sd_notify::watchdog_enabled().map(|limit| limit / 2),
            last: None,
        }
    }

    /// Sends a sign of life if one is due. Call it once a round.
    pub fn feed(&mut self) {
        if self.due().is_some_and(|left| left.is_zero()) {
            self.last = Some(Instant::now());
            notify_if_room(&[NotifyState::Watchdog]);
        }
    }

    /// Returns how long until the next one is due; `None` if the service manager does not watch us.
    pub fn due(&self) -> Option<Duration> {
        let every = self.every?;
        let left = |last: Instant| every.saturating_sub(last.elapsed());
        Some(self.last.map_or(Duration::ZERO, left))
    }
}
