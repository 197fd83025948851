//! One process with an event loop: all connections in one epoll instance, which reports the ready
//! ones however many there are. The `epoll` column of "Linux Applications Performance".
//!
//! No other process accepts, so the whole queue is accepted at once.

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
            if let Ready::Listener(index) = ready {
                while !stop::requested() && reactor.accept(index)? {}
            }
        }
    }
    reactor.stop_listening();
    while !reactor.is_empty() {
        reactor.turn()?;
    }
    Ok(())
}
