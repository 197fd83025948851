//! N event loops, each with a listener of its own on the same port (`SO_REUSEPORT`). Nothing is
//! shared and no worker is woken in vain. But the kernel's hash of addresses and ports chooses the
//! queue, whether its worker is idle or stuck. nginx's `listen … reuseport` does the same.
//!
//! The queue is this worker's alone, so the whole queue is accepted at once.

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
            let Ready::Listener(index) = ready else {
                continue;
            };
            while !stop::requested() && reactor.accept(index)? {}
        }
    }
    reactor.stop_listening();
    while !reactor.is_empty() {
        reactor.turn()?;
    }
    Ok(())
}
