//! One process with an event loop around poll(2). Each turn passes all connections to the kernel,
//! which checks each, and so does the loop afterwards, however few are ready. The `poll` column of
//! "Linux Applications Performance".

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use crate::system::stop;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::time::Timespec;

use crate::connections::{Connections, Interest, Token};
use crate::listener::Accepted;
use crate::worker::Worker;

const SWEEP: Duration = Duration::from_secs(1);
const SWEEP_STOPPING: Duration = Duration::from_millis(10);

/// The owner of a descriptor in the list.
#[derive(Clone, Copy)]
enum Source {
    Listener(usize),
    Store,
    Connection(Token),
}

/// Serves until a stop is requested; all connections accepted are finished.
///
/// # Errors
/// When poll fails.
pub fn serve(worker: &Worker) -> Result<(), Errno> {
    let mut connections = Connections::new(&worker.app)?;
    let mut swept = Instant::now();
    // After descriptors ran out, listeners are left alone until then.
    let mut accept_from = Instant::now();
    while !stop::requested() || !connections.is_empty() {
        let accepting = !stop::requested() && Instant::now() >= accept_from;
        for source in wait(worker, &connections, accepting)? {
            match source {
                Source::Connection(token) => {
                    connections.drive(token, &worker.app);
                }
                Source::Store => {
                    connections.store_ready(&worker.app);
                }
                Source::Listener(index) => {
                    if let Some(pause) = accept_all(worker, index, &mut connections) {
                        accept_from = Instant::now() + pause;
                    }
                }
            }
        }
        if stop::requested() || swept.elapsed() >= SWEEP {
            swept = Instant::now();
            connections.sweep(&worker.app);
        }
    }
    Ok(())
}

/// Waits until something is ready, a second at most, and returns it.
fn wait(worker: &Worker, connections: &Connections, accepting: bool) -> Result<Vec<Source>, Errno> {
    let mut sources = vec![Source::Store];
    let mut fds = vec![PollFd::from_borrowed_fd(
        connections.store_fd(),
        PollFlags::IN,
    )];
    if accepting {
        for (index, listener) in worker.listeners.iter().enumerate() {
            sources.push(Source::Listener(index));
            fds.push(PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN));
        }
    }
    for token in connections.tokens() {
        let Some((socket, interest)) = connections.get(token) else {
            continue;
        };
        let events = match interest {
            Interest::Read => PollFlags::IN,
            Interest::Write => PollFlags::OUT,
            Interest::Store | Interest::Closed => PollFlags::empty(),
        };
        sources.push(Source::Connection(token));
        fds.push(PollFd::from_borrowed_fd(socket, events));
    }
    let wait = match (stop::requested(), accepting, connections.is_empty()) {
        (true, ..) | (_, false, _) => SWEEP_STOPPING,
        (_, _, true) => Duration::from_secs(3600),
        (_, _, false) => SWEEP,
    };
    let wait = Timespec {
        tv_sec: wait.as_secs() as i64,
        tv_nsec: wait.subsec_nanos().into(),
    };
    match poll(&mut fds, Some(&wait)) {
        Ok(_) => Ok(fds
            .iter()
            .zip(sources)
            .filter(|(fd, _)| !fd.revents().is_empty())
            .map(|(_, source)| source)
            .collect()),
        Err(Errno::INTR) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Accepts all connections of a listener. When it cannot be accepted from, returns for how long to
/// leave the listeners alone.
fn accept_all(worker: &Worker, index: usize, connections: &mut Connections) -> Option<Duration> {
    while !stop::requested() {
        match worker.listeners[index].accept(true, &worker.faults) {
            Accepted::Connection(connection) => {
                connections.insert(connection, &worker.app);
            }
            Accepted::Nothing => return None,
            Accepted::Later(wait) if wait < Duration::from_millis(1) => {
                std::thread::sleep(wait);
                return None;
            }
            Accepted::Later(wait) => return Some(wait),
        }
    }
    None
}
