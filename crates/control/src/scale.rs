//! Changes how many workers a group has, by the signals of its supervisor.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::paths::Paths;
use crate::state::{self, State};

/// The supervisor answers a signal within this time, and looks at signals at least every 200 ms.
const ANSWERS: Duration = Duration::from_secs(5);
/// How often to look for its answer.
const LOOK: Duration = Duration::from_millis(5);

/// Why the number of workers was not changed.
#[derive(Debug, thiserror::Error)]
pub enum ScaleError {
    /// No supervisor of this version has workers there.
    #[error("cannot change how many workers `{0}` has: {1}")]
    Unfit(String, String),
    /// The supervisor is another user's.
    #[error("cannot signal process {pid}, the supervisor of `{name}`: {source}")]
    Denied {
        /// The group.
        name: String,
        /// Its supervisor.
        pid: u32,
        /// Why.
        source: std::io::Error,
    },
}

/// Has a group get so many workers. Returns how many it was to have before. Those that are missing start, and those that are
/// too many retire, after this.
///
/// # Errors
/// See [`ScaleError`].
pub fn scale(paths: &Paths, name: &str, workers: usize) -> Result<usize, ScaleError> {
    let mut state = scalable(paths, name, workers)?;
    let before = state.workers;
    while state.workers != workers {
        let signal = match state.workers < workers {
            true => Signal::TTIN,
            false => Signal::TTOU,
        };
        let pid = state.supervisor.pid;
        let process = Pid::from_raw(pid.cast_signed()).ok_or(rustix::io::Errno::SRCH);
        let sent = process.and_then(|process| kill_process(process, signal));
        sent.map_err(|errno| ScaleError::Denied {
            name: name.to_owned(),
            pid,
            source: errno.into(),
        })?;
        state = answered(paths, name, workers, state.workers)?;
    }
    Ok(before)
}

/// Returns how many workers of a group serve; 0 while there are others than there are to be.
///
/// # Errors
/// Its state cannot be read any more.
pub fn serving(paths: &Paths, name: &str) -> Result<usize, ScaleError> {
    Ok(state_of(paths, name)?.serving)
}

/// Waits until there are to be another number of workers than so many. Returns the state then.
fn answered(paths: &Paths, name: &str, workers: usize, was: usize) -> Result<State, ScaleError> {
    let until = Instant::now() + ANSWERS;
    loop {
        let state = scalable(paths, name, workers)?;
        if state.workers != was {
            return Ok(state);
        }
        if Instant::now() >= until {
            let why = "its supervisor does not answer; its log may say why";
            return Err(ScaleError::Unfit(name.to_owned(), why.to_owned()));
        }
        std::thread::sleep(LOOK);
    }
}

/// Returns the state of a group that can have so many workers.
fn scalable(paths: &Paths, name: &str, workers: usize) -> Result<State, ScaleError> {
    let state = state_of(paths, name)?;
    let room = state.slots.len();
    let why = match &state.fixed {
        _ if state.attached => "its workers are not ours; tell the server itself".to_owned(),
        _ if !state.supervisor.lives() => {
            "it has no supervisor; `wakeone run` takes over, with -w for their number".to_owned()
        }
        // It would be stopped by the signal.
        _ if state.workers == 0 => {
            "another version of wakeone supervises it; restart it with this one".to_owned()
        }
        Some(why) => why.clone(),
        None if !(1..=room).contains(&workers) => format!(
            "there is room for 1 to {room}; `wakeone run --max-workers` makes more, and takes over the workers that run"
        ),
        None => return Ok(state),
    };
    Err(ScaleError::Unfit(name.to_owned(), why))
}

fn state_of(paths: &Paths, name: &str) -> Result<State, ScaleError> {
    let unfit = |why: String| ScaleError::Unfit(name.to_owned(), why);
    let state = state::load(&paths.runtime, name);
    let state = state.map_err(|error| unfit(error.to_string()))?;
    let state = state.filter(|state| state.boot == state::boot_id());
    state.ok_or_else(|| unfit("no supervisor has written down its state".to_owned()))
}
