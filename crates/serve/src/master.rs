//! The process that makes the workers and waits for them. It restarts none: the connections that
//! are lost when a worker dies are part of an architecture's properties.

use crate::system::fork::{Fork, fork};
use crate::system::stop;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use rustix::process::{getppid, set_parent_process_death_signal};

use crate::Error;

/// Forks `count` workers. In each, `work` gets all of `state` and its number, and when it is done
/// the process ends. In the caller, `state` is dropped: only the workers keep the listeners, so
/// that the port is closed when the last one is gone. Then `ready` is called, and this waits until
/// all have ended and passes a stop on to them.
///
/// # Errors
/// When a worker cannot be made, or workers end without having been told to.
pub fn run<S>(
    count: usize,
    state: S,
    work: impl FnOnce(S, usize) -> Result<(), Error>,
    ready: impl FnOnce(),
) -> Result<(), Error> {
    let mut pids = Vec::with_capacity(count);
    let master = std::process::id();
    for index in 0..count {
        match fork() {
            Ok(Fork::Child) => become_worker(master, || work(state, index)),
            Ok(Fork::Parent(pid)) => pids.push((index, pid)),
            Err(source) => {
                tell(&pids, Signal::SIGKILL);
                return Err(Error::Fork {
                    index,
                    count,
                    source,
                });
            }
        }
    }
    drop(state);
    ready();
    wait_for(pids)
}

/// Does the work of a worker, and ends the process. Call it in the process just forked.
pub fn become_worker(master: u32, work: impl FnOnce() -> Result<(), Error>) -> ! {
    // Without its master no process would ever end it.
    let _ = set_parent_process_death_signal(Some(rustix::process::Signal::TERM));
    if getppid().is_none_or(|parent| parent.as_raw_nonzero().get() != master as i32) {
        std::process::exit(1);
    }
    let code = match work() {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("{error}");
            1
        }
    };
    std::process::exit(code)
}

fn tell(workers: &[(usize, Pid)], signal: Signal) {
    for (_, pid) in workers {
        let _ = kill(*pid, signal);
    }
}

fn wait_for(mut workers: Vec<(usize, Pid)>) -> Result<(), Error> {
    let (mut told, mut failed) = (false, 0);
    while !workers.is_empty() {
        if stop::requested() && !told {
            told = true;
            tell(&workers, Signal::SIGTERM);
        }
        let (pid, how) = match waitpid(None, None) {
            Ok(WaitStatus::Exited(pid, 0)) => (pid, None),
            Ok(WaitStatus::Exited(pid, code)) => (pid, Some(format!("with status {code}"))),
            Ok(WaitStatus::Signaled(pid, signal, _)) => (pid, Some(format!("by {signal}"))),
            Err(Errno::ECHILD) => break,
            Ok(_) | Err(_) => continue,
        };
        let Some(position) = workers.iter().position(|(_, other)| *other == pid) else {
            continue;
        };
        let (index, _) = workers.swap_remove(position);
        if how.is_some() || !(told || stop::requested()) {
            failed += 1;
            let how = how.unwrap_or_else(|| "without having been told to".to_owned());
            eprintln!(
                "worker {index} (pid {pid}) ended {how}; {} left",
                workers.len()
            );
        }
    }
    match (stop::requested(), failed) {
        (true, 0) => Ok(()),
        (_, count) => Err(Error::Workers { count }),
    }
}
