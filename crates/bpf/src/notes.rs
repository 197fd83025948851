//! The notes that moves leave of connections: `struct wakeone_note` in `bpf/contract.h`.
//!
//! The counting program removes the note of a connection that it counts out. User space removes the others: of
//! connections that were never counted in, and of those whose end went unnoticed.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use wakeone_model::listener::Protocol;

use crate::contract::number::FROZEN;
use crate::table::{MAX_SLOTS, Table};
use wakeone_kernel::schedule::thread_time;
use wakeone_kernel::socket::diag::{self, Which};

/// Looking for the connections that have notes may take this part of the time.
const LOOKING_SHARE: u32 = 200;
/// At most that often.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// A note: one connection less in `from`, one more in `to`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Note {
    from: u32,
    to: u32,
}

impl Note {
    fn of(bytes: &[u8]) -> Option<Self> {
        let number = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        Some(Self {
            from: number(0)?,
            to: number(4)?,
        })
    }

    /// Returns what it changed in the count of each slot.
    fn changes(self) -> impl Iterator<Item = (usize, i64)> {
        [(self.from as usize, -1), (self.to as usize, 1)]
            .into_iter()
            .filter(move |(slot, _)| *slot < MAX_SLOTS && self.from != self.to)
    }
}

/// The notes at one moment.
#[derive(Debug)]
pub struct Noted(HashMap<u64, Note>);

impl Noted {
    /// Adds what they have changed in the count of each slot.
    pub fn add_to(&self, counts: &mut [i64]) {
        for (slot, by) in self.0.values().copied().flat_map(Note::changes) {
            if let Some(count) = counts.get_mut(slot) {
                *count += by;
            }
        }
    }

    /// Returns how many of them are not in a `later` one, by the slot that they come from: moved connections that have ended.
    pub fn ended(&self, later: &Self) -> HashMap<usize, i64> {
        let gone = self
            .0
            .iter()
            .filter(|(cookie, _)| !later.0.contains_key(*cookie));
        let mut ended = HashMap::new();
        for (slot, by) in gone.flat_map(|(_, note)| note.changes()) {
            if by < 0 {
                *ended.entry(slot).or_default() += 1;
            }
        }
        ended
    }
}

/// The notes of a group.
#[derive(Debug)]
pub struct Notes {
    moved: MapHandle,
    due: Instant,
    /// The connections whose notes seemed to be needed no more at the last look.
    missed: HashSet<u64>,
}

impl Notes {
    pub(crate) fn of(moved: MapHandle) -> Self {
        Self {
            moved,
            due: Instant::now(),
            missed: HashSet::new(),
        }
    }

    fn all(&self) -> HashMap<u64, Note> {
        let read = |key: Vec<u8>| {
            let note = Note::of(&self.moved.lookup(&key, MapFlags::ANY).ok()??)?;
            Some((u64::from_ne_bytes(key.try_into().ok()?), note))
        };
        self.moved.keys().filter_map(read).collect()
    }

    /// Returns the notes that there are now.
    pub fn now(&self) -> Noted {
        Noted(self.all())
    }

    /// Removes notes that nothing needs any more. Returns at once while there are none, and when called again soon: it
    /// asks the kernel for all connections on a port (0: on any).
    ///
    /// # Errors
    /// When the kernel does not show its sockets.
    pub fn tidy(&mut self, table: &Table, port: u16) -> io::Result<()> {
        if table.moved_live() == 0 || Instant::now() < self.due {
            return Ok(());
        }
        let began = thread_time();
        self.look(table, port)?;
        self.due = Instant::now() + LOOK_EVERY.max((thread_time() - began) * LOOKING_SHARE);
        Ok(())
    }

    fn look(&mut self, table: &Table, port: u16) -> io::Result<()> {
        // Before the sockets: a connection that is moved later has no note in this list.
        let notes = self.all();
        let open = diag::sockets(Protocol::Tcp, Which::Waiting, port)?;
        let waits: HashMap<u64, bool> = open
            .iter()
            .map(|entry| (entry.socket.cookie, entry.socket.inode == 0))
            .collect();
        // Nothing moves an accepted connection, and a note that changed no count says nothing at its end.
        let is_needed = |cookie: &u64, note: &Note| match waits.get(cookie) {
            Some(waits) => *waits || note.from != FROZEN,
            None => false,
        };
        let needless = notes
            .iter()
            .filter(|(cookie, note)| !is_needed(cookie, note));
        let needless: HashSet<u64> = needless.map(|(cookie, _)| *cookie).collect();
        // A dump of sockets may pass over one while others leave its place in the table: it is asked twice.
        for cookie in needless.intersection(&self.missed) {
            // The side that removes a note takes its change back. The counting program may have been first.
            if self.moved.delete(&cookie.to_ne_bytes()).is_ok() {
                table.notes().fetch_sub(1, Ordering::Relaxed);
                for (slot, by) in notes[cookie].changes() {
                    table.slot(slot).correct(-by);
                }
            }
        }
        self.missed = needless;
        Ok(())
    }
}
