//! N event loops, each with a listener of its own. A program in the kernel puts each connection
//! into the queue of the right one: ours. The worker is an ordinary one, which serves the listener
//! that it was handed; `wakeone run` makes the listeners and attaches the program.
//!
//! One connection is accepted at a time, between the events of the others. The connections left in
//! the queue are still seen as waiting, and can be moved to another worker when this one gets
//! stuck.

use crate::system::stop;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use crate::reactor::{Reactor, Ready};
use crate::worker::Worker;

/// Serves until a stop is requested; all connections accepted are finished.
///
/// # Errors
/// When epoll fails.
pub fn serve(worker: &Worker) -> Result<(), Errno> {
    let mut reactor = Reactor::new(worker, EventFlags::IN)?;
    while !stop::requested() {
        for ready in reactor.turn()? {
            if let (Ready::Listener(index), false) = (ready, stop::requested()) {
                reactor.accept(index)?;
            }
        }
    }
    reactor.stop_listening();
    while !reactor.is_empty() {
        reactor.turn()?;
    }
    Ok(())
}
