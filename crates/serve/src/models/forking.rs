//! A process for each connection, forked when it is accepted, as in inetd and the first web
//! servers. The `forking` column of "Linux Applications Performance".

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::time::Duration;

use crate::system::fork::{Fork, fork};
use crate::system::stop;
use rustix::io::Errno;
use rustix::process::set_parent_process_death_signal;

use crate::app::App;
use crate::blocking::converse;
use crate::store::Lazy;
use crate::worker::Worker;

/// How often a fork is tried again while the system has no room for a process.
const FORK_TRIES: u32 = 100;
const FORK_WAIT: Duration = Duration::from_millis(10);

/// Serves until a stop is requested; all connections accepted are finished.
///
/// # Errors
/// When signals cannot be handled.
pub fn serve(mut worker: Worker) -> Result<(), std::io::Error> {
    // The end of a child interrupts accept, so that it is not left as a zombie until the next
    // connection.
    stop::interrupt_when_children_end()?;
    let mut children = HashSet::new();
    let mut store = Lazy::default();
    while !stop::requested() {
        if let Some(connection) = worker.accept() {
            store.warm(&worker.app.place);
            match fork_for(&worker, &mut children) {
                Some(Fork::Child) => {
                    // The port must be closed when the parent is gone.
                    worker.listeners.clear();
                    child(connection, worker.app, store)
                }
                Some(Fork::Parent(pid)) => {
                    children.insert(pid);
                }
                None => worker.faults.count(Errno::AGAIN), // the client sees the close
            }
        }
        reap(&mut children, false);
    }
    for pid in &children {
        let _ = kill(*pid, Signal::SIGTERM);
    }
    reap(&mut children, true);
    Ok(())
}

/// Forks; when there is no room, after waiting for some.
fn fork_for(worker: &Worker, children: &mut HashSet<Pid>) -> Option<Fork> {
    for _ in 0..FORK_TRIES {
        match fork() {
            Ok(fork) => return Some(fork),
            Err(error) => {
                if let Some(code) = error.raw_os_error() {
                    worker.faults.count(Errno::from_raw_os_error(code));
                }
                std::thread::sleep(FORK_WAIT);
                reap(children, false);
            }
        }
    }
    None
}

fn child(connection: OwnedFd, app: App, mut store: Lazy) -> ! {
    let _ = set_parent_process_death_signal(Some(rustix::process::Signal::TERM));
    let app = App {
        pid: std::process::id(),
        ..app
    };
    converse(connection, &app, &mut store);
    std::process::exit(0)
}

/// Takes note of children that have ended; with `all`, waits for all of them.
fn reap(children: &mut HashSet<Pid>, all: bool) {
    let flags = (!all).then_some(WaitPidFlag::WNOHANG);
    while !children.is_empty() {
        match waitpid(None, flags) {
            Ok(WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..)) => {
                children.remove(&pid);
            }
            Ok(WaitStatus::StillAlive) => return,
            Err(nix::errno::Errno::EINTR) | Ok(_) => {}
            Err(_) => return,
        }
    }
}
