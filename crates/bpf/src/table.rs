//! The table that a group's programs and user space share, mapped into memory.
//!
//! Reading a counter is a load, not a system call: the agent looks at all slots every millisecond.

use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::contract::{number, wakeone_slot, wakeone_table};

/// Slots that a table has room for.
pub const MAX_SLOTS: usize = 1 << number::SLOT_BITS;

/// Addresses that a group can have.
pub const MAX_ADDRESSES: usize = number::MAX_ADDRESSES as usize;

/// A slot's flags.
pub mod flag {
    pub use crate::contract::number::{
        SLOT_ARMED as ARMED, SLOT_DRAINING as DRAINING, SLOT_MOVING as MOVING,
        SLOT_SECOND as SECOND, SLOT_STUCK as STUCK, SLOT_UP as UP,
    };
}

pub use crate::contract::number::{
    CONTRACT, TABLE_AFFINITY as AFFINITY, TABLE_CLOSING as CLOSING, TABLE_COUNTED as COUNTED,
    TABLE_DATAGRAMS as DATAGRAMS, TABLE_DEFERS as DEFERS, TABLE_MARKED as MARKED,
    TABLE_ONE_QUEUE as ONE_QUEUE, TABLE_QUIC as QUIC, TABLE_REFUSING as REFUSING,
    TABLE_REPLACED as REPLACED, TABLE_SHARED as SHARED, TABLE_TOKENS as TOKENS,
    TABLE_UNNOTED as UNNOTED,
};

/// The time by the clock of flows, in which a table tells how long flows may be silent. It counts seconds of 2^30 ns.
pub fn flow_clock() -> u32 {
    (wakeone_kernel::schedule::coarse_ns() >> number::FLOW_SHIFT) as u32
}

/// As many slots as `least-connections` looks at for one choice.
pub const WINDOW: usize = number::WINDOW as usize;

/// Ways out of the programs, in the order of their numbers, with their names.
pub const EXITS: [&str; number::EXITS as usize] = {
    let mut names = [""; number::EXITS as usize];
    names[number::EXIT_SELECTED as usize] = "selected";
    names[number::EXIT_MIGRATED as usize] = "migrated";
    names[number::EXIT_RETRIED as usize] = "retried";
    names[number::EXIT_NO_SLOT as usize] = "no_slot";
    names[number::EXIT_SELECT_FAILED as usize] = "select_failed";
    names[number::EXIT_BAD_POLICY as usize] = "bad_policy";
    names[number::EXIT_CLOSING as usize] = "closing";
    names[number::EXIT_UNKNOWN_LISTENER as usize] = "unknown_listener";
    names[number::EXIT_MOVED_FULL as usize] = "moved_full";
    names[number::EXIT_BAD_TAG as usize] = "bad_tag";
    names[number::EXIT_BY_HASH as usize] = "by_hash";
    names[number::EXIT_STRAY as usize] = "stray";
    names[number::EXIT_BY_ID as usize] = "by_id";
    names[number::EXIT_BY_TOKEN as usize] = "by_token";
    names[number::EXIT_BY_FLOW as usize] = "by_flow";
    names
};

/// Ways out of the program for QUIC that chose a slot. They are not unusual.
const OF_QUIC: [u32; 2] = [number::EXIT_BY_TOKEN, number::EXIT_BY_FLOW];

/// A mapped table. All access is atomic: the kernel writes it at the same time.
#[derive(Debug)]
pub struct Table {
    base: NonNull<wakeone_table>,
}

// SAFETY: the mapping is shared memory that is only ever accessed through atomics.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

impl Drop for Table {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, and no reference into it outlives `self`.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), size_of::<wakeone_table>()) };
    }
}

macro_rules! atomic {
    ($kind:ident, $place:expr) => {
        // SAFETY: the place lies in the mapping, which lives as long as `self`; it is aligned (checked against
        // contract.h by its asserts), and everybody, the kernel included, accesses it atomically.
        unsafe { $kind::from_ptr(&raw mut $place) }
    };
}

/// Where a table has its agent's heartbeat, in bytes.
pub const HEARTBEAT_AT: u32 = std::mem::offset_of!(wakeone_table, heartbeat_ns) as u32;

impl Table {
    /// Makes a file the table of a group whose workers share one queue.
    ///
    /// # Errors
    /// It cannot be made as long, or not be mapped.
    pub fn create(file: &std::fs::File) -> std::io::Result<Self> {
        file.set_len(0)?;
        file.set_len(size_of::<wakeone_table>() as u64)?;
        let table = Self::map(file.as_fd(), true)?;
        table.flags().store(ONE_QUEUE, Ordering::Relaxed);
        table.contract().store(CONTRACT, Ordering::SeqCst);
        Ok(table)
    }

    /// Opens such a file.
    ///
    /// # Errors
    /// `InvalidData`: another version made it, or it is none. Or it cannot be mapped.
    pub fn open(file: &std::fs::File, writable: bool) -> std::io::Result<Self> {
        if file.metadata()?.len() == size_of::<wakeone_table>() as u64 {
            let table = Self::map(file.as_fd(), writable)?;
            if table.contract().load(Ordering::SeqCst) == CONTRACT {
                return Ok(table);
            }
        }
        Err(std::io::ErrorKind::InvalidData.into())
    }

    /// Maps the table behind a map's descriptor.
    ///
    /// # Errors
    /// The error of mmap: `EPERM` for a map that is not mappable.
    pub fn map(fd: BorrowedFd<'_>, writable: bool) -> std::io::Result<Self> {
        let protection = if writable {
            ProtFlags::READ | ProtFlags::WRITE
        } else {
            ProtFlags::READ
        };
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                size_of::<wakeone_table>(),
                protection,
                MapFlags::SHARED,
                fd.as_fd(),
                0,
            )?
        };
        let base = NonNull::new(base.cast()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        Ok(Self { base })
    }

    fn at(&self) -> *mut wakeone_table {
        self.base.as_ptr()
    }

    fn slot_at(&self, slot: usize) -> *mut wakeone_slot {
        assert!(slot < MAX_SLOTS, "slot {slot} of {MAX_SLOTS}");
        // SAFETY: within the array, just checked.
        unsafe {
            (&raw mut (*self.at()).slot)
                .cast::<wakeone_slot>()
                .add(slot)
        }
    }

    /// Version of the layout that the loader wrote.
    pub fn contract(&self) -> &AtomicU32 {
        atomic!(AtomicU32, (*self.at()).contract)
    }

    /// The policy's number.
    pub fn policy(&self) -> &AtomicU32 {
        atomic!(AtomicU32, (*self.at()).policy)
    }

    /// How many slots are in use.
    pub fn slots(&self) -> &AtomicU32 {
        atomic!(AtomicU32, (*self.at()).slots)
    }

    /// Flags of the whole group.
    pub fn flags(&self) -> &AtomicU32 {
        atomic!(AtomicU32, (*self.at()).flags)
    }

    /// `CLOCK_MONOTONIC_COARSE` at the agent's last look, in ns.
    pub fn heartbeat_ns(&self) -> &AtomicU64 {
        atomic!(AtomicU64, (*self.at()).heartbeat_ns)
    }

    /// Age of the heartbeat from which on the agent counts as gone, in ns.
    pub fn heartbeat_limit_ns(&self) -> &AtomicU64 {
        atomic!(AtomicU64, (*self.at()).heartbeat_limit_ns)
    }

    /// How long a flow may be silent before it counts as new, by the [`flow_clock`].
    pub fn flow_silence(&self) -> &AtomicU32 {
        atomic!(AtomicU32, (*self.at()).flow_silence)
    }

    /// Until when an unknown flow may be older than the program, by the [`flow_clock`].
    pub fn flows_until(&self) -> &AtomicU32 {
        atomic!(AtomicU32, (*self.at()).flows_until)
    }

    /// How many flows are too much for one worker.
    pub fn heavy_flows(&self) -> &AtomicU32 {
        atomic!(AtomicU32, (*self.at()).heavy_flows)
    }

    /// How many sockets without a slot began to listen at this port.
    pub fn changes(&self) -> &AtomicU32 {
        atomic!(AtomicU32, (*self.at()).changes)
    }

    /// How many of those the agent has looked at. While there are others the kernel's hash chooses.
    pub fn changes_seen(&self) -> &AtomicU32 {
        atomic!(AtomicU32, (*self.at()).changes_seen)
    }

    /// The longest handshake of late, in µs; 0 where none was measured.
    pub fn handshake_us(&self) -> &AtomicU32 {
        atomic!(AtomicU32, (*self.at()).handshake_us)
    }

    /// The port at which a socket that begins to listen is told of (see [`crate::notices`]); 0: none.
    pub fn port(&self) -> &AtomicU32 {
        atomic!(AtomicU32, (*self.at()).port)
    }

    /// Which build of the programs runs here, as [`crate::BUILD`].
    pub fn build(&self) -> &AtomicU64 {
        atomic!(AtomicU64, (*self.at()).build)
    }

    /// Publishes the queue lengths of a slot, one for each address. The programs do the same at the same time.
    ///
    /// # Panics
    /// For a slot of 256 or more.
    pub fn publish_queues(&self, slot: usize, waiting: &[u32]) {
        let queued = self.slot(slot).queued();
        if let [only] = waiting {
            return queued.store(*only, Ordering::Relaxed);
        }
        for (address, now) in waiting.iter().enumerate().take(MAX_ADDRESSES) {
            let own = atomic!(AtomicU32, (*self.at()).waiting[address][slot]);
            let before = own.swap(*now, Ordering::Relaxed);
            queued.fetch_add(now.wrapping_sub(before), Ordering::Relaxed);
        }
    }

    /// Notes in the map of moved connections.
    pub fn moved_live(&self) -> u64 {
        self.notes().load(Ordering::Relaxed)
    }

    /// The same, to be counted down with a note that is removed.
    pub(crate) fn notes(&self) -> &AtomicU64 {
        atomic!(AtomicU64, (*self.at()).moved_live)
    }

    /// Connections by which active counts were found wrong, and mended.
    pub fn drift_mended(&self) -> &AtomicU64 {
        atomic!(AtomicU64, (*self.at()).drift_mended)
    }

    /// The counters of the ways out, in the order of [`EXITS`]. The usual one is computed: the selections of all slots
    /// minus those of the other ways.
    pub fn exits(&self) -> [u64; EXITS.len()] {
        let mut exits = std::array::from_fn(|i| self.exit(i));
        let usual = match self.flags().load(Ordering::Relaxed) & QUIC {
            0 => number::EXIT_SELECTED,
            _ => number::EXIT_BY_ID,
        };
        let chosen: u64 = (0..MAX_SLOTS)
            .map(|slot| self.slot(slot).selected().load(Ordering::Relaxed))
            .sum();
        let otherwise = [
            number::EXIT_MIGRATED,
            number::EXIT_RETRIED,
            number::EXIT_STRAY,
            number::EXIT_SELECTED,
        ];
        let otherwise = otherwise.iter().chain(&OF_QUIC);
        let otherwise: u64 = otherwise.map(|exit| exits[*exit as usize]).sum();
        exits[usual as usize] = chosen.saturating_sub(otherwise);
        exits
    }

    /// The sum of those counters but the first and those of QUIC. They count what did not go the usual way.
    pub fn unusual_exits(&self) -> u64 {
        let all = 1..EXITS.len();
        let unusual = all.filter(|i| OF_QUIC.iter().all(|exit| *exit as usize != *i));
        unusual.map(|i| self.exit(i)).sum()
    }

    fn exit(&self, i: usize) -> u64 {
        atomic!(AtomicU64, (*self.at()).exits[i]).load(Ordering::Relaxed)
    }

    /// Has the programs choose from the slots as they are now. Call it after a change of flags, weights or their number
    /// ([`Slot::mark`] does). Any process may do so at any time.
    pub fn publish(&self) {
        // SAFETY: the mapping is a whole table. It is writable, since the caller has just changed a slot.
        unsafe { crate::policy::publish_shared(self.at()) }
    }

    /// One slot.
    ///
    /// # Panics
    /// For a slot of 256 or more.
    pub fn slot(&self, slot: usize) -> Slot<'_> {
        Slot {
            number: slot as u32,
            at: self.slot_at(slot),
            table: self,
        }
    }
}

/// One worker's place in the table.
#[derive(Debug, Clone, Copy)]
pub struct Slot<'a> {
    number: u32,
    at: *mut wakeone_slot,
    table: &'a Table,
}

macro_rules! fields {
    ($($(#[$doc:meta])* $name:ident: $kind:ident;)*) => {
        impl<'a> Slot<'a> {
            $(
                $(#[$doc])*
                pub fn $name(&self) -> &'a $kind {
                    let _ = self.table;
                    atomic!($kind, (*self.at).$name)
                }
            )*
        }
    };
}

fields! {
    /// See [`flag`].
    flags: AtomicU32;
    /// Its share relative to the others'; 0: none.
    weight: AtomicU32;
    /// Connections established and not yet closed, queued ones included.
    active: AtomicI64;
    /// Times the program chose it.
    selected: AtomicU64;
    /// Handshakes completed here.
    established: AtomicU64;
    /// Connections counted out.
    closed: AtomicU64;
    /// Queued connections that came from another slot.
    migrated_in: AtomicU64;
    /// Queued connections that went to another slot.
    migrated_out: AtomicU64;
    /// Whether the program found no socket here when it last tried.
    gone: AtomicU32;
    /// Accept queue length that the agent saw last; of UDP the bytes that wait.
    queued: AtomicU32;
    /// The accept queue's limit; of UDP the receive buffer's, in bytes.
    queue_limit: AtomicU32;
    /// Times its queue was moved away.
    rescues: AtomicU64;
    /// Connections moved by that.
    rescued: AtomicU64;
    /// Time marked stuck, in ns.
    stuck_ns: AtomicU64;
    /// Workers started again here.
    restarts: AtomicU64;
    /// Its worker; 0: none.
    pid: AtomicU32;
    /// Datagrams that its sockets had no room for.
    dropped: AtomicU64;
    /// The home of the flow that may have most of its datagrams.
    heavy_home: AtomicU32;
    /// How many more datagrams that flow had than all others, at least; user space sets it to 0.
    heavy_lead: AtomicU32;
}

impl Slot<'_> {
    /// Sets or clears a flag, and publishes the change. Only one thread at a time may set and clear [`flag::STUCK`].
    pub fn mark(&self, flag: u32, on: bool) {
        if self.has(flag) == on {
            return;
        }
        if flag & flag::STUCK != 0 && on {
            self.table.flags().fetch_or(MARKED, Ordering::Relaxed);
        }
        if on {
            self.flags().fetch_or(flag, Ordering::SeqCst);
        } else {
            self.flags().fetch_and(!flag, Ordering::SeqCst);
        }
        self.table.publish();
        let stuck = |slot| self.table.slot(slot).has(flag::STUCK);
        if flag & flag::STUCK != 0 && !on && !(0..MAX_SLOTS).any(stuck) {
            self.table.flags().fetch_and(!MARKED, Ordering::Relaxed);
        }
    }

    /// Notes that its listeners are closed for a moment, or no longer. No choice goes by it: nothing is published.
    pub fn set_moving(&self, on: bool) {
        if on {
            self.flags().fetch_or(flag::MOVING, Ordering::SeqCst);
        } else {
            self.flags().fetch_and(!flag::MOVING, Ordering::SeqCst);
        }
    }

    /// Corrects its active count, which was found wrong.
    pub fn correct(&self, by: i64) {
        let slot = self.number;
        // SAFETY: the mapping is a whole table, and writable for whoever corrects it.
        unsafe { crate::policy::correct_shared(self.table.at(), slot, by) }
    }

    /// Whether a flag is set.
    pub fn has(&self, flag: u32) -> bool {
        self.flags().load(Ordering::Relaxed) & flag != 0
    }
}
