//! The interface between the supervisor and the part that steers its connections. They know nothing else of each other.

use std::os::fd::OwnedFd;

use wakeone_model::layout::connections;

/// Steers connections to the slots of a group. The supervisor reports which workers are there.
///
/// All calls come from the supervisor's one thread, and none may block for longer than a rescue takes.
pub trait Steer: Send {
    /// The worker of this slot runs as `pid`: give it connections (unless the slot is draining).
    fn worker_up(&mut self, slot: usize, pid: u32);
    /// The worker died: do not choose it any more, and move its queue to others at once.
    fn worker_down(&mut self, slot: usize);
    /// Stops new connections to the slot, or allows them again. A slot drains while its worker starts and before it
    /// stops.
    fn drain(&mut self, slot: usize, on: bool);
    /// Stops all new connections: SYNs are dropped, so that the client's retry reaches a successor.
    fn close(&mut self);
    /// Stops all new connections. Each is refused at once if that is possible.
    fn refuse(&mut self) {
        self.close();
    }
    /// Whether [`Steer::replace`] is possible. It needs steering that chooses the very socket of a connection.
    fn can_replace(&self) -> bool {
        false
    }
    /// Worker `pid` serves the slot from now on, with these listeners, one for each address. The old ones are no longer
    /// chosen.
    ///
    /// # Errors
    /// The reason, as a sentence; the slot is unchanged.
    fn replace(&mut self, _slot: usize, _pid: u32, _listeners: &[OwnedFd]) -> Result<(), String> {
        Err("nothing steers connections here".to_owned())
    }
    /// Returns a new number for the connection IDs of a worker that is to start in a slot, or beside the one there. Packets
    /// whose ID has it go to its socket. `None`: this is no group for QUIC.
    fn quic_id(&mut self, _slot: usize, _beside: bool) -> Option<u16> {
        None
    }
    /// Returns how many connections the worker still has that [`Steer::replace`] replaced in this slot. `None`: it goes on with
    /// them when it is asked to end, as servers do by TCP.
    fn left_behind(&self, _slot: usize) -> Option<u64> {
        None
    }
    /// That worker has ended: nobody has its connections any more.
    fn forget_replaced(&mut self, _slot: usize) {}
    /// The worker of this slot runs as `pid`, and has opened these listeners itself, one for each address. It gets
    /// connections unless the slot is draining.
    ///
    /// # Errors
    /// The reason, as a sentence; the slot is unchanged.
    fn serve_own(&mut self, _slot: usize, _pid: u32, _listeners: &[OwnedFd]) -> Result<(), String> {
        Err("nothing steers connections here".to_owned())
    }
    /// The worker of this slot, which had opened its listeners itself, has ended. These sockets, which do not listen, stand
    /// for them. The kernel moves what still waits in those once the caller closes them.
    fn park(&mut self, _slot: usize, _sockets: &[OwnedFd]) {}
    /// There is one slot more, the last, with these listeners, one for each address. They do not listen yet. Asked only
    /// where [`Steer::can_replace`] says yes.
    ///
    /// # Errors
    /// The reason, as a sentence; there are as many slots as before.
    fn add(&mut self, _slot: usize, _listeners: &[OwnedFd]) -> Result<(), String> {
        Err("nothing steers connections here".to_owned())
    }
    /// The last slot is none any more: its listeners are not chosen from now on. Connections that wait there stay.
    fn remove(&mut self, _slot: usize) {}
    /// Returns the number of connections that wait in the slot's own accept queues.
    fn queued(&self, slot: usize) -> u32;
    /// Returns the number of connections that wait in a queue that all slots share.
    fn queued_for_all(&self) -> u32 {
        0
    }
    /// Returns the open connections of the slot's worker, queued ones included; 0 if they are not counted.
    fn active(&self, _slot: usize) -> u64 {
        0
    }
    /// Returns the connections that have come to the slot so far; `None`: nobody counts them.
    fn established(&self, _slot: usize) -> Option<u64> {
        None
    }
    /// Returns how many of those its workers have accepted, about; `None`: nobody counts them.
    fn accepted(&self, _slot: usize) -> Option<u64> {
        None
    }
    /// Whether connections wait for the slot's worker, or were moved away as it did not take them.
    fn is_behind(&self, _slot: usize) -> bool {
        false
    }
    /// Whether the slot's worker was seen waiting in accept, epoll or poll; `None` if that cannot be seen.
    fn accepting(&self, slot: usize) -> Option<bool>;
    /// Returns the events since the last call.
    fn events(&mut self) -> Vec<SteerEvent>;
}

/// An event outside the supervisor that is worth a log line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SteerEvent {
    /// The slot's worker stopped accepting, or reading, while something waits.
    Stuck {
        /// Which slot.
        slot: usize,
        /// The length of its queues at that time.
        queued: u32,
        /// The unit of that: `connections`, or `bytes` of datagrams.
        unit: &'static str,
    },
    /// The slot's queue was moved to others.
    Rescued(Move),
    /// The slot's worker accepts again.
    Resumed {
        /// Which slot.
        slot: usize,
        /// How long it had been stuck.
        after_ms: u64,
    },
    /// A summary of stuck workers and moves over some time (see [`crate::move_log::MoveLog`]).
    Summary {
        /// Which slot.
        slot: usize,
        /// Connections moved.
        moved: u64,
        /// The summary as a sentence.
        text: String,
    },
    /// Anything else, as a sentence.
    Note(String),
}

/// A move of a slot's queue to others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// Which slot.
    pub slot: usize,
    /// Connections moved.
    pub moved: u32,
    /// How long the listener was closed and the kernel walked over the port's connections, in µs.
    pub took_us: u64,
}

impl Move {
    /// Writes it to the log, for those who want each.
    pub fn log(&self, from: std::fmt::Arguments<'_>) {
        let Self {
            slot,
            moved,
            took_us,
        } = *self;
        let moved_ones = connections(moved.into());
        tracing::debug!(
            event = "rescue",
            slot,
            moved,
            took_us,
            "{moved_ones} moved from {from} in {took_us} µs"
        );
    }
}

impl SteerEvent {
    /// Writes it to the log of a process that steers other servers.
    pub fn log(&self, who: &impl std::fmt::Display) {
        match self {
            // MoveLog sums these up.
            Self::Stuck { .. } => {}
            Self::Rescued(one) => one.log(format_args!("slot {} of {who}", one.slot)),
            Self::Resumed { slot, after_ms } => {
                tracing::info!("{who}: slot {slot} accepts again after {after_ms} ms");
            }
            Self::Summary { text, .. } => tracing::info!(event = "moved", "{who}: {text}"),
            Self::Note(text) => tracing::warn!("{who}: {text}"),
        }
    }
}

/// Those who steer a group, as one: by TCP and by UDP it is steered in different ways.
///
/// Without any, the kernel's own hash spreads connections over the listeners. The queue of a dead worker then waits for
/// the worker that takes its slot.
#[derive(Default)]
pub struct Together<'a>(pub Vec<&'a mut dyn Steer>);

impl Together<'_> {
    /// The sum of the counts of those who count; `None`: nobody does.
    fn sum(&self, count: impl Fn(&dyn Steer) -> Option<u64>) -> Option<u64> {
        let counts = self.0.iter().filter_map(|one| count(&**one));
        counts.reduce(|one, other| one + other)
    }
}

impl Steer for Together<'_> {
    fn worker_up(&mut self, slot: usize, pid: u32) {
        self.0.iter_mut().for_each(|one| one.worker_up(slot, pid));
    }

    fn worker_down(&mut self, slot: usize) {
        self.0.iter_mut().for_each(|one| one.worker_down(slot));
    }

    fn drain(&mut self, slot: usize, on: bool) {
        self.0.iter_mut().for_each(|one| one.drain(slot, on));
    }

    fn close(&mut self) {
        self.0.iter_mut().for_each(|one| one.close());
    }

    fn refuse(&mut self) {
        self.0.iter_mut().for_each(|one| one.refuse());
    }

    /// Whether all can. One of UDP can only for QUIC: other datagrams in a socket's queue are read by the process that has the
    /// socket.
    fn can_replace(&self) -> bool {
        !self.0.is_empty() && self.0.iter().all(|one| one.can_replace())
    }

    fn replace(&mut self, slot: usize, pid: u32, listeners: &[OwnedFd]) -> Result<(), String> {
        self.0
            .iter_mut()
            .try_for_each(|one| one.replace(slot, pid, listeners))
    }

    fn quic_id(&mut self, slot: usize, beside: bool) -> Option<u16> {
        let mut all = self.0.iter_mut();
        all.find_map(|one| one.quic_id(slot, beside))
    }

    fn left_behind(&self, slot: usize) -> Option<u64> {
        self.sum(|one| one.left_behind(slot))
    }

    fn forget_replaced(&mut self, slot: usize) {
        self.0.iter_mut().for_each(|one| one.forget_replaced(slot));
    }

    fn serve_own(&mut self, slot: usize, pid: u32, listeners: &[OwnedFd]) -> Result<(), String> {
        self.0
            .iter_mut()
            .try_for_each(|one| one.serve_own(slot, pid, listeners))
    }

    fn park(&mut self, slot: usize, sockets: &[OwnedFd]) {
        self.0.iter_mut().for_each(|one| one.park(slot, sockets));
    }

    fn add(&mut self, slot: usize, listeners: &[OwnedFd]) -> Result<(), String> {
        for at in 0..self.0.len() {
            if let Err(why) = self.0[at].add(slot, listeners) {
                self.0[..at].iter_mut().for_each(|one| one.remove(slot));
                return Err(why);
            }
        }
        Ok(())
    }

    fn remove(&mut self, slot: usize) {
        self.0.iter_mut().for_each(|one| one.remove(slot));
    }

    /// Adds connections and bytes, as callers only ask whether anything waits.
    fn queued(&self, slot: usize) -> u32 {
        self.0
            .iter()
            .fold(0, |sum, one| sum.saturating_add(one.queued(slot)))
    }

    fn queued_for_all(&self) -> u32 {
        self.0.iter().map(|one| one.queued_for_all()).sum()
    }

    fn active(&self, slot: usize) -> u64 {
        self.0.iter().map(|one| one.active(slot)).sum()
    }

    fn established(&self, slot: usize) -> Option<u64> {
        self.sum(|one| one.established(slot))
    }

    fn accepted(&self, slot: usize) -> Option<u64> {
        self.sum(|one| one.accepted(slot))
    }

    fn is_behind(&self, slot: usize) -> bool {
        self.0.iter().any(|one| one.is_behind(slot))
    }

    /// A worker that waits for one protocol is ready; a server may serve the other by another thread.
    fn accepting(&self, slot: usize) -> Option<bool> {
        self.0
            .iter()
            .filter_map(|one| one.accepting(slot))
            .reduce(|one, other| one || other)
    }

    fn events(&mut self) -> Vec<SteerEvent> {
        self.0.iter_mut().flat_map(|one| one.events()).collect()
    }
}
