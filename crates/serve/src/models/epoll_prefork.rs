//! Preforked event loops: N processes, each with an epoll instance of its own in which the same
//! listener is registered. The way it is registered decides which of them a connection wakes:
//!
//! * `wake-all`: `EPOLLIN` alone. All waiting workers are woken, one gets the connection: the
//!   thundering herd.
//! * `exclusive`: `EPOLLEXCLUSIVE`. One waiting worker is woken, always the first in the listener's
//!   list that waits: the load sticks to a few.
//! * `rotate`: `EPOLLEXCLUSIVE`, and a worker that has accepted registers the listener anew and so
//!   goes to the end of that list. The connections go round, without a patch to the kernel. nginx
//!   does it every 16 connections since 1.21.
//!
//! One connection is accepted for each time the listener is ready, so that the others of a burst
//! are left to workers that are idle. With a listener for each process (`--reuseport`) the
//! kernel's hash chooses and the mode makes no difference.

use crate::system::stop;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use crate::options::EpollMode;
use crate::reactor::{Reactor, Ready};
use crate::worker::Worker;

/// Serves until a stop is requested; all connections accepted are finished.
///
/// # Errors
/// When epoll fails.
pub fn serve(worker: &Worker, mode: EpollMode) -> Result<(), Errno> {
    let flags = match mode {
        EpollMode::WakeAll => EventFlags::IN,
        EpollMode::Exclusive | EpollMode::Rotate => EventFlags::IN | EventFlags::EXCLUSIVE,
    };
    let mut reactor = Reactor::new(worker, flags)?;
    let mut listening = true;
    while listening || !reactor.is_empty() {
        for ready in reactor.turn()? {
            let Ready::Listener(index) = ready else {
                continue;
            };
            if stop::requested() {
                continue;
            }
            if reactor.accept(index)? && mode == EpollMode::Rotate {
                reactor.register_anew(index)?;
            }
        }
        if listening && stop::requested() {
            listening = false;
            reactor.stop_listening();
        }
    }
    Ok(())
}
