//! The listeners of a group that come and go: each gets a slot, and leaves it again.

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;

use wakeone_bpf::table;
use wakeone_bpf::{self as bpf, Pinned};
use wakeone_kernel::socket;
use wakeone_kernel::socket::diag::{self, Which};
use wakeone_model::listener::Protocol;

use super::Dispatcher;
use crate::slot_sockets::{RemoteFd, SlotSockets};

/// Number of listeners that leave between two sweeps of the map of listeners. A sweep lists all listening sockets.
const SWEEP_AFTER: usize = 64;

impl Dispatcher {
    /// Assigns a listener its previous slot, or the first free one. Returns `None` if there is no room.
    pub(super) fn place(&mut self, cookie: u64, remote: RemoteFd) -> Option<usize> {
        let slot = self
            .pinned
            .slot_of(cookie)
            .filter(|slot| {
                !matches!(
                    self.sockets.get(*slot),
                    Some(SlotSockets::Held(_) | SlotSockets::Remote(_))
                )
            })
            .unwrap_or_else(|| self.free());
        if slot >= table::MAX_SLOTS {
            return None;
        }
        while self.sockets.len() <= slot {
            self.sockets.push(SlotSockets::Empty);
        }
        self.sockets[slot] = SlotSockets::of(remote);
        Some(slot)
    }

    /// Returns a free slot. Connections of an earlier listener may still be open in one, and its next listener would
    /// count as loaded: so it is taken only if there is no other.
    fn free(&self) -> usize {
        let open = |slot: &usize| self.table().slot(*slot).active().load(Relaxed).max(0);
        let end = Some(self.sockets.len()).filter(|end| *end < table::MAX_SLOTS);
        (0..self.sockets.len())
            .filter(|slot| !self.is_taken(*slot))
            .chain(end)
            .min_by_key(open)
            .unwrap_or(table::MAX_SLOTS)
    }

    /// Takes in a listener that appeared in an attached group. Returns its slot, which is chosen once the caller has published
    /// the table: of several that appeared at once, the first would get all connections meanwhile.
    ///
    /// # Errors
    /// There is no slot left, or the kernel's answer.
    pub fn join(&mut self, cookie: u64, remote: RemoteFd) -> Result<usize, bpf::Error> {
        if self.left >= SWEEP_AFTER {
            self.forget_gone();
        }
        let mut joined = self.try_join(cookie, remote);
        if joined.is_err() && self.is_full() {
            self.forget_gone();
            joined = self.try_join(cookie, remote);
        }
        self.tell_full(&joined);
        joined
    }

    fn try_join(&mut self, cookie: u64, remote: RemoteFd) -> Result<usize, bpf::Error> {
        let was_known = self.pinned.slot_of(cookie).is_some();
        let slot = self.place(cookie, remote).ok_or_else(no_slot)?;
        let admitted = self.enter(slot);
        if admitted.is_err() {
            self.vacate(slot);
            if !was_known {
                self.pinned.forget_listener(cookie);
            }
        }
        self.settle_emptied();
        admitted.map(|()| slot)
    }

    /// Takes a slot with its listeners into the table.
    fn enter(&mut self, slot: usize) -> Result<(), bpf::Error> {
        // Set before the program may choose it.
        let place = self.table().slot(slot);
        if place.weight().load(Relaxed) == 0 {
            place.weight().store(1, Relaxed);
        }
        let slots = self.table().slots();
        slots.fetch_max(self.sockets.len() as u32, Relaxed);
        self.admit(slot)
    }

    /// Has one slot more, the last, with listeners of our own, one for each address. They do not listen yet, and the
    /// program chooses them from [`Dispatcher::raise`] on.
    ///
    /// # Errors
    /// There is no slot left, or the kernel's answer.
    pub fn add(&mut self, listeners: Vec<OwnedFd>) -> Result<(), bpf::Error> {
        let slot = self.sockets.len();
        if slot >= table::MAX_SLOTS {
            return Err(no_slot());
        }
        if self.is_full() {
            self.forget_gone();
        }
        self.sockets.push(SlotSockets::Held(listeners));
        let added = self.enter(slot);
        if added.is_err() {
            self.remove_last();
        }
        self.settle_emptied();
        added
    }

    /// Gives up the last slot. Connections that wait in its listeners stay there.
    pub fn remove_last(&mut self) {
        let last = self.sockets.len().saturating_sub(1);
        self.leave(last);
        self.sockets.truncate(last);
        self.unsettled.remove(&last);
        self.table().slots().store(last as u32, Relaxed);
        self.table().publish();
    }

    /// Has the program choose other listeners of our own for a slot, one for each address. They listen already, and may have
    /// made a group of their own. Connections that wait in the old ones stay there.
    ///
    /// # Errors
    /// The kernel's answer; the old ones then keep their place.
    pub fn replace(&mut self, slot: usize, listeners: Vec<OwnedFd>) -> Result<(), bpf::Error> {
        if !self.is_replaced() {
            for (address, listener) in listeners.iter().enumerate() {
                self.pinned.attach(address, listener.as_fd())?;
            }
        }
        if self.quic().is_some() {
            self.replace_beside(slot, &listeners)?;
            self.sockets[slot] = SlotSockets::Held(listeners);
            return Ok(());
        }
        let know = |pinned: &Pinned| {
            let mut all = listeners.iter();
            all.try_for_each(|one| pinned.know_listener(slot, one))
        };
        let known = know(&self.pinned);
        if known.is_err() && self.is_full() {
            self.forget_gone();
            know(&self.pinned)?;
        } else {
            known?;
        }
        let old = std::mem::replace(&mut self.sockets[slot], SlotSockets::Held(listeners));
        self.unsettled.insert(slot);
        let put = self.restore(slot);
        if put.is_err() {
            self.sockets[slot] = old;
            let _ = self.restore(slot);
        }
        self.settle_emptied();
        put
    }

    /// Has a slot hold sockets that do not listen, one for each address: it is not chosen until [`Dispatcher::replace`].
    pub fn park(&mut self, slot: usize, sockets: Vec<OwnedFd>) {
        self.leave(slot);
        self.sockets[slot] = SlotSockets::Held(sockets);
        self.unsettled.remove(&slot);
    }

    /// Whether the map of listeners is full.
    fn is_full(&self) -> bool {
        self.pinned.known_listeners().len() >= self.pinned.listener_limit()
    }

    /// Logs that a listener found no room: once, until one finds room again. A listener that closed meanwhile is not
    /// logged.
    fn tell_full<T>(&mut self, joined: &Result<T, bpf::Error>) {
        match joined {
            Ok(_) => self.told_full = false,
            Err(error) if !self.told_full => {
                let no_slot = error.source.kind() == std::io::ErrorKind::QuotaExceeded;
                if no_slot || self.is_full() {
                    self.told_full = true;
                    tracing::warn!(
                        event = "degraded",
                        "`{}`: a new listener gets connections only from the kernel's choice, for there is no room: {error}",
                        self.name
                    );
                }
            }
            Err(_) => {}
        }
    }

    /// Forgets the listeners that are gone. One that left and still lives stays known: connections that waited in it
    /// carry its tag, and a move counts them by that tag.
    pub(super) fn forget_gone(&mut self) {
        let living = match living(self.protocol()) {
            Ok(living) => living,
            Err(error) => {
                tracing::debug!(
                    "`{}`: listeners that are gone stay known: {error}",
                    self.name
                );
                return;
            }
        };
        self.left = 0;
        // A listener in a slot may not listen yet, or not for a moment.
        let admitted: HashSet<u64> = (0..self.sockets.len())
            .flat_map(|slot| (0..self.pinned.addresses()).map(move |address| (slot, address)))
            .filter_map(|(slot, address)| {
                let cookie = self.sockets[slot].with(address, |one| socket::cookie(one));
                cookie.ok()?.ok()
            })
            .collect();
        for cookie in self.pinned.known_listeners() {
            if !living.contains(&cookie) && !admitted.contains(&cookie) {
                self.pinned.forget_listener(cookie);
            }
        }
    }

    /// Frees the slot of a listener that another process closed.
    pub fn leave(&mut self, slot: usize) {
        self.forget_connections(slot);
        let place = self.table().slot(slot);
        place.pid().store(0, Relaxed);
        place.queued().store(0, Relaxed);
        place.queue_limit().store(0, Relaxed);
        place.dropped().store(0, Relaxed);
        self.vacate(slot);
        self.table().publish();
        self.left += 1;
    }

    /// Empties a slot. The caller publishes the table.
    fn vacate(&mut self, slot: usize) {
        self.table().slot(slot).flags().store(0, Relaxed);
        self.sockets[slot] = SlotSockets::Empty;
    }

    /// Changes the process that lends a slot's listener: another one may hold it when the first one ends.
    pub fn lend(&mut self, slot: usize, remote: RemoteFd) {
        self.sockets[slot] = SlotSockets::of(remote);
    }
}

fn no_slot() -> bpf::Error {
    bpf::Error {
        step: format!("finding a slot beside the {} there are", table::MAX_SLOTS),
        source: std::io::ErrorKind::QuotaExceeded.into(),
    }
}

/// Returns the cookies of all sockets in this network namespace that can be in a group.
fn living(protocol: Protocol) -> std::io::Result<HashSet<u64>> {
    let sockets = diag::sockets(protocol, Which::Listening, 0)?;
    Ok(sockets.iter().map(|entry| entry.socket.cookie).collect())
}
