//! The command of `--on-hang`.

use std::time::{Duration, Instant};

use super::Supervisor;
use super::process::Process;
use super::spawn::{self, ExecPipe, Gate, Order, SpawnError};
use super::wear::Wear;

/// The command about a worker that hangs has so long.
const HOOK: Duration = Duration::from_secs(30);

/// A command that runs before a worker that hangs is replaced.
#[derive(Debug)]
pub(super) struct Hook {
    pub slot: usize,
    /// The worker that hangs.
    pub about: u32,
    process: Process,
    _begins: ExecPipe,
    kill_at: Instant,
    /// Why that is to be replaced.
    pub wear: Wear,
}

impl Hook {
    /// Whether this is its process.
    pub fn is(&self, pid: u32) -> bool {
        self.process.pid() == pid
    }

    /// Whether it has ended. One that takes too long is killed.
    pub fn is_over(&self, now: Instant) -> bool {
        if now >= self.kill_at {
            self.process.kill();
        }
        !matches!(self.process.ended(), Ok(None))
    }
}

impl Drop for Hook {
    fn drop(&mut self) {
        self.process.kill();
    }
}

impl Supervisor {
    /// Runs the command about a worker that hangs: as the user of the workers, without capabilities.
    pub(super) fn run_hook(
        &self,
        slot: usize,
        about: u32,
        wear: Wear,
    ) -> Option<Result<Hook, SpawnError>> {
        let command = self.on_hang.as_ref()?.replace("{pid}", &about.to_string());
        let order = Order {
            command: vec!["/bin/sh".to_owned(), "-c".to_owned(), command],
            protocol: false,
            names: Vec::new(),
            reserved: 0,
            keep_caps: Vec::new(),
            stdin: false,
            ..self.order(slot)
        };
        let begin = || {
            let gate = Gate::new().map_err(std::io::Error::from)?;
            let (process, begins) = spawn::begin(&order, [], &gate)?;
            gate.open(1);
            Ok(Hook {
                slot,
                about,
                process,
                _begins: begins,
                kill_at: Instant::now() + HOOK,
                wear,
            })
        };
        Some(begin())
    }
}
