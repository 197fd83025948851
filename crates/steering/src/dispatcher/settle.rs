//! When the tag of a listener is known to be that of everything that waits there.
//!
//! A listener that is tagged while it listens may have connections in its queue that are in no count, or in that of its
//! previous slot. Until they are gone no move off this listener changes a count (`WAKEONE_UNSETTLED`).

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::Relaxed;

use wakeone_kernel::socket;

use super::Dispatcher;

impl Dispatcher {
    /// Settles the listeners whose queues were seen empty since they were tagged. Call it in each round. One whose
    /// queue was published with something in it is not borrowed to see that.
    pub fn settle_emptied(&mut self) {
        if !self.counting() {
            return;
        }
        if self.pinned.unsettle() {
            self.unsettled = (0..self.sockets.len()).collect();
        }
        let mut unsettled = std::mem::take(&mut self.unsettled);
        let waits = |slot: usize| self.table().slot(slot).queued().load(Relaxed) > 0;
        unsettled.retain(|slot| self.is_taken(*slot) && (waits(*slot) || !self.is_settled(*slot)));
        self.unsettled = unsettled;
    }

    fn is_settled(&self, slot: usize) -> bool {
        (0..self.pinned.addresses()).all(|address| {
            let settled = self.with(slot, address, |one| Ok(self.settle_empty(one)));
            settled.unwrap_or(false)
        })
    }

    /// Settles a listener if its queue is empty. Returns whether it is settled.
    fn settle_empty(&self, listener: BorrowedFd<'_>) -> bool {
        let Ok(cookie) = socket::cookie(listener) else {
            return false;
        };
        if !self.pinned.is_unsettled(cookie) {
            return true;
        }
        let is_empty = socket::accept_queue(listener).is_ok_and(|queue| queue.length == 0);
        if is_empty {
            self.pinned.settle(cookie);
        }
        is_empty
    }

    /// The port of its connections, if all have the same.
    pub fn port(&self) -> Option<u16> {
        if self.pinned.looks_up() || self.pinned.addresses() != 1 {
            return None;
        }
        let port = |one: BorrowedFd<'_>| Ok(socket::address(one).map(|at| at.port()));
        self.with_any(0, port).ok().flatten()
    }
}
