//! The slots of a group for QUIC. Each has two places for a socket: while a worker is replaced, the old one has its
//! connections by one of them, and the new one gets new connections by the other.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;

use wakeone_bpf as bpf;
use wakeone_bpf::quic::{Quic, place_of};
use wakeone_bpf::table::{MAX_SLOTS, flag};
use wakeone_kernel::socket;

use super::Dispatcher;

/// A connection counts as open for so long after its client's last packet: 30 s by the clock of flows, as servers usually give
/// up a silent one then. Its end cannot be seen, as it is encrypted.
pub const IN_USE: u32 = 28;

impl Dispatcher {
    /// The connection IDs of a group for QUIC.
    pub fn quic(&self) -> Option<&Quic> {
        self.pinned.quic()
    }

    /// The place of a slot's socket for what is new: the slot's number, or that of its second place.
    pub(super) fn place_of_slot(&self, slot: usize) -> usize {
        let second = self.quic().is_some() && self.table().slot(slot).has(flag::SECOND);
        place_of(slot, second)
    }

    /// The other place of a slot.
    fn other_place(&self, slot: usize) -> usize {
        (self.place_of_slot(slot) + MAX_SLOTS) % (2 * MAX_SLOTS)
    }

    /// Has the table tell at which of the two places a slot's sockets are: an earlier supervisor may have replaced its worker.
    pub(super) fn find_place(&self, slot: usize) {
        let cookie = self.with(slot, 0, |one| Ok(socket::cookie(one)));
        let known = cookie.ok().and_then(Result::ok);
        let place = known.and_then(|cookie| self.pinned.place_of(cookie));
        let flags = self.table().slot(slot).flags();
        match place.is_some_and(|place| place >= MAX_SLOTS) {
            true => flags.fetch_or(flag::SECOND, Relaxed),
            false => flags.fetch_and(!flag::SECOND, Relaxed),
        };
    }

    /// Has new connections of a slot go to other sockets of our own, one for each address. The old ones keep theirs until
    /// [`Dispatcher::forget_replaced`].
    pub(super) fn replace_beside(
        &mut self,
        slot: usize,
        listeners: &[OwnedFd],
    ) -> Result<(), bpf::Error> {
        let place = self.other_place(slot);
        for (address, listener) in listeners.iter().enumerate() {
            self.pinned.know_listener(place, listener)?;
            self.pinned.put(address, place, listener.as_fd())?;
        }
        self.table()
            .slot(slot)
            .flags()
            .fetch_xor(flag::SECOND, Relaxed);
        Ok(())
    }

    /// The worker that was replaced in a slot has ended: nobody has its connections any more.
    pub fn forget_replaced(&mut self, slot: usize) {
        if self.quic().is_none() {
            return;
        }
        let place = self.other_place(slot);
        for address in 0..self.pinned.addresses() {
            self.pinned.take_out(address, place);
        }
        self.forget_place(place);
    }

    /// The worker of a slot has ended: nobody has its connections any more.
    pub fn forget_connections(&self, slot: usize) {
        if self.quic().is_some() {
            self.forget_place(self.place_of_slot(slot));
            self.table().slot(slot).active().store(0, Relaxed);
        }
    }

    fn forget_place(&self, place: usize) {
        let Some(quic) = self.quic() else { return };
        if let Err(error) = quic.forget(place) {
            tracing::debug!("`{}`: old connection IDs stay: {error}", self.name);
        }
    }

    /// Returns a token for a slot's newest socket, or for the one beside it, that no other socket has. Packets whose connection
    /// ID has it go there, once the server is seen to put it into its IDs.
    ///
    /// # Errors
    /// There is no room for another token, or no random number.
    pub fn new_token(&self, slot: usize, beside: bool) -> std::io::Result<u16> {
        let quic = self.quic().ok_or(std::io::ErrorKind::Unsupported)?;
        let place = match beside {
            true => self.other_place(slot),
            false => self.place_of_slot(slot),
        };
        quic.new_token(place)
    }
}
