//! Whether a worker that was started serves the listeners that it was given.

use super::elsewhere::{self, Whereabouts};
use super::report;
use super::slot::{self, Worker};
use super::watch::Watch;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use wakeone_kernel::proc::doing::{WorkerState, doing_below};
use wakeone_kernel::socket;

/// A worker whose accepting cannot be observed is taken to be ready after this long.
const ALIVE_IS_READY: Duration = Duration::from_millis(500);
/// A worker that is observed, but was not seen to accept, is taken to be ready after this long: it may wait in a way
/// unknown to us.
const UNSEEN_IS_READY: Duration = Duration::from_secs(10);
/// A worker that was not seen to accept within this time may listen somewhere else.
pub(super) const LOOK_ELSEWHERE: Duration = Duration::from_secs(2);
/// How often to look for that: it reads all of the worker's descriptors.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// The judgement on a worker that was not ready until now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    NotYet,
    /// It accepts, or cannot be observed.
    Ready,
    /// It was not seen to accept for long: it is given connections all the same.
    Unseen,
    /// It listens at this address, and no process accepts on the listeners that it was given.
    Elsewhere(SocketAddr),
    /// It has closed the listeners that it was given, and listens nowhere.
    Nowhere,
    /// It holds the listeners that it was given, and was not seen to accept yet. It may take long to start, or not
    /// know of them.
    Silent,
}

/// An observation of a worker from outside.
struct Observation<'a> {
    /// The inodes of its listeners.
    given: &'a [u64],
    /// The inodes of the sockets that reserve public addresses, which every worker has as well.
    reserved: &'a [u64],
    /// Whether it waits in accept, epoll or poll; `None`: unknown.
    accepting: Option<bool>,
    /// Earlier workers of the slot were seen to accept.
    seen: bool,
    /// They were, and the rolling restart can wait until this one is too.
    patient: bool,
}

/// Whether a worker waits in accept, epoll or poll for its listeners; `None`: unknown.
fn sees_accept(pid: u32, given: &[u64]) -> Option<bool> {
    match doing_below(pid, given) {
        WorkerState::Waiting => Some(true),
        state if state.is_elsewhere() => Some(false),
        _ => None,
    }
}

impl Watch<'_> {
    /// Gives connections to the worker of a slot once it is ready.
    pub(super) fn greet_worker(&mut self, slot: usize) {
        if !self.has_listeners(slot, false) {
            return;
        }
        let accepting = self.steer.accepting(slot);
        let reserved = self.reserving();
        let place = &mut self.group.slots[slot];
        let given = slot::inodes(&place.listeners);
        let seen = place.seen;
        let Some(worker) = place.worker_mut() else {
            return;
        };
        // If nothing steers, no agent has looked.
        let accepting = accepting.or_else(|| sees_accept(worker.process.pid(), &given));
        let observed = Observation {
            given: &given,
            reserved: &reserved,
            accepting,
            seen,
            patient: seen && self.roll.is_some(),
        };
        if worker.becomes_ready(slot, &observed, &self.group.task.command) {
            let pid = worker.process.pid();
            warn_if_blocking(slot, pid, &place.listeners);
            place.set_ready();
            place.seen |= accepting == Some(true);
            self.begin_count(slot);
            self.changed = true;
            self.steer.drain(slot, false);
        }
    }

    /// The same for a worker that starts beside another. The rolling restart gives it connections.
    pub(super) fn greet_successor(&mut self, slot: usize) {
        if !self.has_listeners(slot, true) {
            return;
        }
        let reserved = self.reserving();
        let place = &mut self.group.slots[slot];
        let Some(worker) = &mut place.successor else {
            return;
        };
        let given = slot::inodes(&place.spare);
        let accepting = sees_accept(worker.process.pid(), &given);
        let observed = Observation {
            given: &given,
            reserved: &reserved,
            accepting,
            seen: place.seen,
            patient: place.seen,
        };
        if worker.becomes_ready(slot, &observed, &self.group.task.command) {
            warn_if_blocking(slot, worker.process.pid(), &place.spare);
            worker.ready = true;
            place.seen |= accepting == Some(true);
        }
    }

    /// The inodes of the sockets that reserve public addresses.
    fn reserving(&self) -> Vec<u64> {
        let reserved = self.group.reserved.iter().flatten();
        slot::inodes(reserved.map(|one| &one.socket))
    }
}

impl Worker {
    /// Whether the worker is ready now. Logs the reason if it is not, or if that is doubtful.
    fn becomes_ready(
        &mut self,
        slot: usize,
        observed: &Observation<'_>,
        command: &[String],
    ) -> bool {
        let pid = self.process.pid();
        match self.judge(observed) {
            Verdict::NotYet => false,
            Verdict::Ready => true,
            Verdict::Unseen => {
                report::never_seen(slot, pid);
                true
            }
            Verdict::Elsewhere(at) => {
                if self.elsewhere.replace(at) != Some(at) {
                    report::elsewhere(slot, pid, &elsewhere::shown(at), command);
                }
                false
            }
            Verdict::Nowhere => {
                if !std::mem::replace(&mut self.told_nowhere, true) {
                    report::nowhere(slot, pid, command);
                }
                false
            }
            Verdict::Silent => {
                let named = report::names_listener(command);
                if !named && !observed.seen && !std::mem::replace(&mut self.told_silent, true) {
                    report::silent(slot, pid);
                }
                false
            }
        }
    }

    fn judge(&mut self, observed: &Observation<'_>) -> Verdict {
        if self.exec_pipe.is_some() {
            return Verdict::NotYet;
        }
        let ran = self.ran();
        match observed.accepting {
            None if ran < ALIVE_IS_READY => Verdict::NotYet,
            None => Verdict::Ready,
            Some(true) => match self.whereabouts_now(observed) {
                Whereabouts { holds: true, .. } => Verdict::Ready,
                Whereabouts { elsewhere, .. } => nobody_accepts(elsewhere, ran),
            },
            Some(false) if ran < LOOK_ELSEWHERE => Verdict::NotYet,
            Some(false) => match self.whereabouts(observed.given, observed.reserved) {
                Whereabouts {
                    holds: true,
                    elsewhere: None,
                } if ran < UNSEEN_IS_READY || observed.patient => Verdict::Silent,
                Whereabouts {
                    holds: true,
                    elsewhere: None,
                } => Verdict::Unseen,
                Whereabouts { elsewhere, .. } => nobody_accepts(elsewhere, ran),
            },
        }
    }

    /// Looks again if the last look saw the listeners: it may have closed them since, and now wait for something else.
    fn whereabouts_now(&mut self, observed: &Observation<'_>) -> Whereabouts {
        self.looked = self.looked.filter(|(_, seen)| !seen.holds);
        self.whereabouts(observed.given, observed.reserved)
    }

    /// Looks where it listens, but not all the time.
    pub(super) fn whereabouts(&mut self, given: &[u64], reserved: &[u64]) -> Whereabouts {
        match self.looked {
            Some((when, seen)) if when.elapsed() < LOOK_AGAIN => seen,
            _ => {
                let seen = elsewhere::look(self.process.pid(), given, reserved);
                self.looked = Some((Instant::now(), seen));
                seen
            }
        }
    }
}

/// Warns of a worker that has a blocking listener in an event loop. A loop that accepts until there is no connection left
/// waits in accept for the next one, and serves nobody meanwhile.
fn warn_if_blocking(slot: usize, pid: u32, listeners: &[OwnedFd]) {
    let blocking = listeners.iter().filter(|one| socket::is_blocking(one));
    if elsewhere::polls(pid, &slot::inodes(blocking)) {
        report::blocking(slot, pid);
    }
}

/// The judgement on a worker that does not hold the listeners that it was given: it waits for something else. A
/// process that has just begun may be about to pass them on.
fn nobody_accepts(elsewhere: Option<SocketAddr>, ran: Duration) -> Verdict {
    match elsewhere {
        Some(at) => Verdict::Elsewhere(at),
        None if ran < LOOK_ELSEWHERE => Verdict::NotYet,
        None => Verdict::Nowhere,
    }
}
