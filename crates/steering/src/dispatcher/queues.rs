//! The queues of a group's slots: their lengths, and moving what waits in them.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use wakeone_bpf as bpf;
use wakeone_bpf::table::HEARTBEAT_AT;
use wakeone_kernel::socket::moving::{Look, Place, Unsafe};
use wakeone_kernel::socket::receive_queue::{ReceiveQueue, receive_queue};
use wakeone_kernel::socket::reopening::may_reopen;
use wakeone_kernel::socket::{self, AcceptQueue};
use wakeone_model::listener::Protocol;

use super::Dispatcher;
use crate::slot_sockets::SlotSockets;

/// The outcome of a move.
#[derive(Debug, Clone, Copy, Default)]
pub struct Moved {
    /// Connections moved.
    pub connections: u32,
    /// How long it held up new connections, at most: see [`wakeone_kernel::socket::moving::move_queue`].
    pub took: Duration,
}

impl Dispatcher {
    /// Returns the receive queues of a slot's UDP sockets, summed over its addresses.
    pub fn receive_queue(&self, slot: usize) -> ReceiveQueue {
        let queue = |address| {
            let queue = self.with(slot, address, |one| Ok(receive_queue(one)));
            queue.ok()?.ok()
        };
        (0..self.pinned.addresses())
            .filter_map(queue)
            .fold(ReceiveQueue::default(), std::ops::Add::add)
    }

    /// Returns length and limit of a slot's accept queues, summed over its addresses; of UDP sockets, both in bytes.
    pub fn queue(&self, slot: usize) -> AcceptQueue {
        sum(&self.queues(slot))
    }

    /// Publishes the length of a slot's queues for the programs. Returns the same as [`Dispatcher::queue`].
    pub fn publish_queues(&self, slot: usize) -> AcceptQueue {
        let queues = self.queues(slot);
        let lengths: Vec<u32> = queues.iter().map(|queue| queue.length).collect();
        self.table().publish_queues(slot, &lengths);
        sum(&queues)
    }

    /// Publishes that nothing waits in a slot.
    pub fn publish_empty(&self, slot: usize) {
        let lengths = vec![0; self.pinned.addresses()];
        self.table().publish_queues(slot, &lengths);
    }

    /// Returns length and limit of a slot's queue at each address; zeros if they cannot be read.
    fn queues(&self, slot: usize) -> Vec<AcceptQueue> {
        let protocol = self.protocol();
        self.take_out_closed(slot);
        let look = |listener: BorrowedFd<'_>| -> std::io::Result<AcceptQueue> {
            if protocol == Protocol::Tcp {
                return socket::accept_queue(listener);
            }
            let queue = receive_queue(listener)?;
            Ok(AcceptQueue {
                length: queue.waiting_bytes,
                limit: queue.limit_bytes,
            })
        };
        (0..self.pinned.addresses())
            .map(|address| {
                let queue = self.with(slot, address, |one| Ok(look(one)));
                queue.ok().and_then(Result::ok).unwrap_or_default()
            })
            .collect()
    }

    /// Takes a slot's listener out of the map if its worker shut it down, lest the program choose it. An array of
    /// reuseport sockets needs no such help: a listener that was shut down leaves it.
    fn take_out_closed(&self, slot: usize) {
        if !self.pinned.looks_up() {
            return;
        }
        for address in 0..self.pinned.addresses() {
            let listens = self.with(slot, address, |one| Ok(socket::listens(one)));
            if matches!(listens, Ok(false)) {
                self.pinned.take_out(address, slot);
            }
        }
    }

    /// Checks that a slot's listeners would listen again after a move.
    ///
    /// # Errors
    /// The reason if they would not, or might not.
    pub fn may_reopen(&self, slot: usize) -> Result<(), bpf::Error> {
        if self.protocol() == Protocol::Udp {
            return Ok(());
        }
        let workers = || {
            let slots = 0..self.sockets.len();
            let pids = slots.map(|slot| self.table().slot(slot).pid().load(Relaxed));
            pids.filter(|pid| *pid != 0)
        };
        for address in 0..self.pinned.addresses() {
            let check = |listener: BorrowedFd<'_>| may_reopen(listener, workers());
            // A listener that cannot be borrowed cannot be closed either.
            if let Ok(Err(source)) = self.sockets[slot].with(address, check) {
                return Err(bpf::Error {
                    step: "closing a listener for a move".into(),
                    source,
                });
            }
        }
        Ok(())
    }

    /// Moves the connections in a slot's queues to the slots that the program chooses.
    ///
    /// The caller has marked the slot, so that the program does not choose it, and asked [`Dispatcher::may_reopen`]. It
    /// has also made sure that another slot of the group is good: with no other listener the kernel would reset the
    /// queue. Datagrams cannot be moved.
    ///
    /// # Errors
    /// A listener did not listen again; the slot is not chosen until it does.
    pub fn move_queues(&self, slot: usize) -> Result<Moved, bpf::Error> {
        if self.protocol() == Protocol::Udp {
            return Ok(Moved::default());
        }
        let place = self.table().slot(slot);
        // Set before the move, so that a successor knows that one was begun. It stays if a listener does not come back.
        place.set_moving(true);
        let moved = self.move_all(slot);
        if moved.is_ok() || !(self.is_closed(slot) || self.taken_out.is_there()) {
            place.set_moving(false);
        }
        moved
    }

    fn move_all(&self, slot: usize) -> Result<Moved, bpf::Error> {
        let mut all = Moved::default();
        for address in 0..self.pinned.addresses() {
            let moved = self.with(slot, address, |listener| {
                self.move_queue(slot, address, listener)
            })?;
            if moved.connections > 0 {
                self.wake_others(slot, address);
            }
            all.connections += moved.connections;
            all.took += moved.took;
        }
        Ok(all)
    }

    /// Whether one of a slot's listeners does not listen.
    fn is_closed(&self, slot: usize) -> bool {
        (0..self.pinned.addresses()).any(|address| {
            let listens = self.with(slot, address, |one| Ok(socket::listens(one)));
            matches!(listens, Ok(false))
        })
    }

    /// Makes a slot's listeners listen again that did not come back from a move, and puts them back into their workers'
    /// epoll sets.
    ///
    /// # Errors
    /// They still do not listen, or are not back.
    pub fn reopen(&self, slot: usize) -> Result<(), bpf::Error> {
        let place = self.table().slot(slot);
        for address in 0..self.pinned.addresses() {
            self.with(slot, address, |listener| {
                self.listen_again(slot, listener)
                    .map_err(|source| bpf::Error {
                        step: format!("listening again in slot {slot}"),
                        source,
                    })?;
                self.pinned.put(address, slot, listener)
            })?;
        }
        self.taken_out.put_back().map_err(|source| bpf::Error {
            step: format!("giving the worker of slot {slot} its listener back"),
            source,
        })?;
        place.set_moving(false);
        Ok(())
    }

    fn listen_again(&self, slot: usize, listener: BorrowedFd<'_>) -> std::io::Result<()> {
        if socket::listens(listener) {
            return Ok(());
        }
        let limit = self.table().slot(slot).queue_limit().load(Relaxed);
        let backlog = match (&self.sockets[slot], limit) {
            // Longer than any limit: the kernel cuts it.
            (SlotSockets::Remote(_), 0) => i32::MAX,
            (SlotSockets::Remote(_), limit) => i32::try_from(limit).unwrap_or(i32::MAX),
            _ => self.backlog,
        };
        socket::listen_again(listener, socket::address_of(listener)?, backlog)
    }

    fn move_queue(
        &self,
        slot: usize,
        address: usize,
        listener: BorrowedFd<'_>,
    ) -> Result<Moved, bpf::Error> {
        let queue = socket::accept_queue(listener).unwrap_or_default();
        if queue.length == 0 {
            return Ok(Moved::default());
        }
        // Another process's listener comes back with its previous backlog.
        let backlog = match self.sockets[slot] {
            SlotSockets::Remote(_) => i32::try_from(queue.limit).unwrap_or(i32::MAX),
            _ => self.backlog,
        };
        let failed = |source| bpf::Error {
            step: format!("moving the queue of slot {slot}"),
            source,
        };
        let look = match self.look_at_holders(slot, address) {
            Err(Unsafe::Waits(_)) => return Ok(Moved::default()),
            other => other.map_err(|why| failed(io::Error::other(why.to_string())))?,
        };
        if self.pinned.looks_up() {
            self.pinned.take_out(address, slot);
        }
        let place = Place {
            sockets: self.pinned.sockets(address),
            slot: slot as u32,
            table: self.pinned.table_map(),
            heartbeat_at: HEARTBEAT_AT,
        };
        let moved = (self.taken_out).move_queue(listener, backlog, &look, Some(place));
        let moved = match moved {
            // Its worker does something else by now. There is another look soon.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Moved::default(),
            other => Moved {
                connections: queue.length,
                took: other.map_err(failed)?,
            },
        };
        self.pinned.put(address, slot, listener)?;
        Ok(moved)
    }

    /// Searches the processes that hold the listeners, if that is due. It takes longer than a move, and does not hold
    /// connections back.
    pub fn search_holders(&self) {
        let all = || self.sockets.iter().flat_map(SlotSockets::inodes).collect();
        self.holders.borrow_mut().search(all);
    }

    /// Returns what the holders of a slot's listener do now.
    fn look_at_holders(&self, slot: usize, address: usize) -> Result<Look, Unsafe> {
        let inodes = self.sockets[slot].inodes();
        let inode = inodes.get(address).copied().unwrap_or(0);
        let worker = self.table().slot(slot).pid().load(Relaxed);
        self.holders.borrow().look(inode, [worker])
    }

    /// Wakes the workers that were given connections: not every kernel does (see [`socket::wake_waiters`]).
    fn wake_others(&self, slot: usize, address: usize) {
        for other in (0..self.sockets.len()).filter(|other| *other != slot) {
            let _ = self.with(other, address, |listener| {
                if socket::accept_queue(listener).is_ok_and(|queue| queue.length > 0) {
                    socket::wake_waiters(listener);
                }
                Ok(())
            });
        }
    }
}

fn sum(queues: &[AcceptQueue]) -> AcceptQueue {
    queues
        .iter()
        .fold(AcceptQueue::default(), |sum, one| AcceptQueue {
            length: sum.length + one.length,
            limit: sum.limit + one.limit,
        })
}
