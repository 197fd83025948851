//! The programs and maps of a group, found again by their pins.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use libbpf_rs::{MapCore, MapFlags, MapHandle, Program};

use crate::chooser::Chooser;
use crate::contract::number::{self, UNSETTLED};
use crate::error::{Error, bpf_step, from_bpf};
use crate::lookup;
use crate::notes::Notes;
use crate::object::{info_of, program_name};
use crate::quic::{self, Quic};
use crate::table::{MAX_SLOTS, Table, UNNOTED, flow_clock};
use wakeone_kernel::socket;

/// Names this build of the programs, in a group's table: their object files, hashed.
pub const BUILD: u64 = match u64::from_str_radix(env!("WAKEONE_PROGRAMS"), 16) {
    Ok(build) => build,
    Err(_) => panic!("WAKEONE_PROGRAMS is written by build.rs"),
};

fn open_program(path: &Path) -> Result<OwnedFd, Error> {
    Program::fd_from_pinned_path(path).map_err(bpf_step(format!("opening {}", path.display())))
}

/// A flow that was seen within so many ticks of the [`flow_clock`] is in use.
const LATELY: u32 = 10;

/// Removes a folder of pins with its contents. A pinned object goes away unless somebody else holds it.
///
/// # Errors
/// The file system's error; none where the folder does not exist.
pub fn remove_pins(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Takes every socket out of a pinned group's arrays, so that another group's can have them: a socket stands in one
/// array only, and the attached program keeps its array alive when the pins are gone.
pub fn empty_arrays(dir: &Path) {
    for address in 0.. {
        let path = dir.join(format!("sockets-{address}"));
        let Ok(sockets) = MapHandle::from_pinned_path(&path) else {
            return;
        };
        for slot in 0..sockets.max_entries() {
            let _ = sockets.delete(&slot.to_ne_bytes());
        }
    }
}

/// A loaded group, held through its pins.
#[derive(Debug)]
pub struct Pinned {
    dir: PathBuf,
    table: Table,
    table_map: MapHandle,
    listeners: MapHandle,
    /// The maps for counting connections; a group of UDP sockets has none.
    counts: Option<Counts>,
    quic: Option<Quic>,
    addresses: Vec<Address>,
    counting: bool,
    /// Its listeners are on private ports.
    looks_up: bool,
}

#[derive(Debug)]
struct Counts {
    moved: MapHandle,
    tags: MapHandle,
}

/// The parts of a group that belong to one address.
#[derive(Debug)]
struct Address {
    sockets: MapHandle,
    /// Of UDP: the homes of flows.
    homes: Option<MapHandle>,
    program: OwnedFd,
    /// The program reads the accept queues itself.
    walks: bool,
}

impl Pinned {
    /// Opens a group by its pins.
    ///
    /// # Errors
    /// A pin is missing, or may not be opened.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let map = |name: &str| {
            MapHandle::from_pinned_path(dir.join(name))
                .map_err(bpf_step(format!("opening {}", dir.join(name).display())))
        };
        let table_map = map("table")?;
        let table = Table::map(table_map.as_fd(), true).map_err(Error::at("mapping the table"))?;
        let mut addresses = Vec::new();
        while dir.join(format!("sockets-{}", addresses.len())).exists() {
            let number = addresses.len();
            let walks = dir.join(program_name(number, true)).exists();
            let program = dir.join(program_name(number, walks));
            let homes = format!("homes-{number}");
            addresses.push(Address {
                sockets: map(&format!("sockets-{number}"))?,
                homes: dir.join(&homes).exists().then(|| map(&homes)).transpose()?,
                program: open_program(&program)?,
                walks,
            });
        }
        Ok(Self {
            table,
            table_map,
            listeners: map("listeners")?,
            counts: if dir.join("tags").exists() {
                Some(Counts {
                    moved: map("moved")?,
                    tags: map("tags")?,
                })
            } else {
                None
            },
            quic: quic::is_pinned(dir).then(|| Quic::open(dir)).transpose()?,
            addresses,
            counting: dir.join("count_link").exists(),
            looks_up: lookup::is_pinned(dir),
            dir: dir.to_owned(),
        })
    }

    /// The folder of its pins.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The shared table.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// The map that holds the table.
    pub fn table_map(&self) -> BorrowedFd<'_> {
        self.table_map.as_fd()
    }

    /// Addresses (reuseport groups) that it dispatches.
    pub fn addresses(&self) -> usize {
        self.addresses.len()
    }

    /// Whether connections are counted.
    pub fn counting(&self) -> bool {
        self.counting
    }

    /// Whether its listeners are on private ports, and found by a lookup program.
    pub fn looks_up(&self) -> bool {
        self.looks_up
    }

    /// The connection IDs of a group for QUIC.
    pub fn quic(&self) -> Option<&Quic> {
        self.quic.as_ref()
    }

    /// Whether the program reads the accept queues' lengths itself.
    pub fn walks(&self) -> bool {
        !self.addresses.is_empty() && self.addresses.iter().all(|address| address.walks)
    }

    /// Notes in the map of moved connections.
    pub fn moved(&self) -> usize {
        self.counts
            .as_ref()
            .map_or(0, |counts| counts.moved.keys().count())
    }

    /// Returns the notes of moved connections; `None` for a group of UDP sockets.
    pub fn notes(&self) -> Option<Notes> {
        let moved = &self.counts.as_ref()?.moved;
        Some(Notes::of(MapHandle::try_from(moved).ok()?))
    }

    /// The number under which a listener, given by its cookie, is registered.
    fn number_of(&self, cookie: u64) -> Option<u32> {
        let found = self.listeners.lookup(&cookie.to_ne_bytes(), MapFlags::ANY);
        let bytes: [u8; 4] = found.ok()??.try_into().ok()?;
        Some(u32::from_ne_bytes(bytes))
    }

    /// The slot that a listener, given by its cookie, is registered for.
    pub fn slot_of(&self, cookie: u64) -> Option<usize> {
        let place = self.place_of(cookie)?;
        (place < 2 * MAX_SLOTS).then_some(place % MAX_SLOTS)
    }

    /// The place that a socket, given by its cookie, is registered for: its slot, or of QUIC the slot's second place.
    pub fn place_of(&self, cookie: u64) -> Option<usize> {
        Some((self.number_of(cookie)? & !UNSETTLED) as usize)
    }

    /// Registers a listener: its connections are counted for the slot. Of QUIC it may be the second place of a slot.
    ///
    /// # Errors
    /// The error of the map operation.
    pub fn know_listener(&self, place: usize, listener: impl AsFd) -> Result<(), Error> {
        let place = u32::try_from(place).map_or(u32::MAX, |place| place & !UNSETTLED);
        self.register(place, listener.as_fd())
    }

    fn register(&self, place: u32, listener: BorrowedFd<'_>) -> Result<(), Error> {
        let cookie =
            socket::cookie(listener).map_err(Error::at("asking for the listener's cookie"))?;
        let known = self.number_of(cookie);
        let number = match known.filter(|known| known & !UNSETTLED == place) {
            Some(known) => known,
            // Connections may wait there that have no tag of this place.
            None if self.counts.is_some() && socket::listens(listener) => place | UNSETTLED,
            None => place,
        };
        // Before the tag is written, so that what waits there is never taken for tagged.
        self.listeners
            .update(&cookie.to_ne_bytes(), &number.to_ne_bytes(), MapFlags::ANY)
            .map_err(bpf_step("noting the listener"))?;
        let Some(counts) = &self.counts else {
            return Ok(());
        };
        let mut tag = [0; 8];
        tag[..4].copy_from_slice(&place.to_ne_bytes());
        counts
            .tags
            .update(&listener.as_raw_fd().to_ne_bytes(), &tag, MapFlags::ANY)
            .map_err(bpf_step("tagging the listener"))
    }

    /// Whether connections may wait at a listener, given by its cookie, whose tag is not the listener's own.
    pub fn is_unsettled(&self, cookie: u64) -> bool {
        self.number_of(cookie)
            .is_some_and(|number| number & UNSETTLED != 0)
    }

    /// Notes that what waits at a listener from now on has its tag, or a note.
    pub fn settle(&self, cookie: u64) {
        if let Some(number) = self.number_of(cookie) {
            self.set_number(cookie, number & !UNSETTLED);
        }
    }

    /// Whether a move could not be noted. If so, marks all listeners, as any of them may have got a connection so.
    pub fn unsettle(&self) -> bool {
        if self.table.flags().load(Ordering::Relaxed) & UNNOTED == 0 {
            return false;
        }
        for cookie in self.known_listeners() {
            if let Some(number) = self.number_of(cookie) {
                self.set_number(cookie, number | UNSETTLED);
            }
        }
        self.table.flags().fetch_and(!UNNOTED, Ordering::SeqCst);
        true
    }

    fn set_number(&self, cookie: u64, number: u32) {
        let (key, value) = (cookie.to_ne_bytes(), number.to_ne_bytes());
        // It fails only for a listener that was forgotten meanwhile.
        let _ = self.listeners.update(&key, &value, MapFlags::EXIST);
    }

    /// The cookies of all registered listeners.
    pub fn known_listeners(&self) -> Vec<u64> {
        let cookie = |key: Vec<u8>| Some(u64::from_ne_bytes(key.try_into().ok()?));
        self.listeners.keys().filter_map(cookie).collect()
    }

    /// How many listeners can be registered at a time.
    pub fn listener_limit(&self) -> usize {
        self.listeners.max_entries() as usize
    }

    /// Removes a listener that is gone, given by its cookie, from the table of listeners.
    pub fn forget_listener(&self, cookie: u64) {
        let _ = self.listeners.delete(&cookie.to_ne_bytes());
    }

    /// Puts a listening TCP socket, or a bound UDP socket, into the array of its address, whatever stood there.
    ///
    /// # Errors
    /// `EINVAL` for a socket that does not listen, or of UDP one that is not bound with `SO_REUSEPORT`; a sentence for one
    /// that speaks MPTCP, which cannot be steered.
    pub fn put(&self, address: usize, slot: usize, listener: impl AsFd) -> Result<(), Error> {
        let sockets = &self.addresses[address].sockets;
        let key = u32::try_from(slot).unwrap_or(u32::MAX).to_ne_bytes();
        // A listener that is there already stays: it must not be missing between delete and update. (User space reads
        // cookies.)
        let there = sockets.lookup(&key, MapFlags::ANY).ok().flatten();
        if let (Some(there), Ok(cookie)) = (there, socket::cookie(&listener))
            && there == cookie.to_ne_bytes()
        {
            return Ok(());
        }
        let fd = u64::try_from(listener.as_fd().as_raw_fd()).unwrap_or(u64::MAX);
        let update = || sockets.update(&key, &fd.to_ne_bytes(), MapFlags::ANY);
        // Replacing another socket leaves no moment without one. A socket that stands elsewhere gives EBUSY.
        update()
            .or_else(|_| {
                let _ = sockets.delete(&key);
                update()
            })
            .map_err(|error| Error {
                step: format!("putting the listener into slot {slot}"),
                source: if socket::is_mptcp(&listener) {
                    io::Error::other(
                        "it is an MPTCP socket, which the kernel lets no program choose; listen by TCP (a Go server: GODEBUG=multipathtcp=0)",
                    )
                } else {
                    from_bpf(&error)
                },
            })
    }

    /// Takes a slot's listener out of the map, so that no program chooses it: one that is shut down leaves an array of
    /// reuseport sockets by itself, but not the map of a group that looks up.
    pub fn take_out(&self, address: usize, slot: usize) {
        let key = u32::try_from(slot).unwrap_or(u32::MAX).to_ne_bytes();
        let _ = self.addresses[address].sockets.delete(&key);
    }

    /// Lets the program choose for the whole reuseport group of this member.
    ///
    /// # Errors
    /// The error of setsockopt.
    pub fn attach(&self, address: usize, member: impl AsFd) -> Result<(), Error> {
        socket::attach_reuseport(member, self.addresses[address].program.as_fd())
            .map_err(Error::at("attaching the dispatch program"))
    }

    /// Whether one of its programs chooses for its sockets, by what was seen of theirs; `None` if none of them was
    /// among these.
    pub fn chooses(&self, seen: &[Chooser]) -> Option<bool> {
        let is_known = |one: &&Chooser| {
            let entry = self
                .listeners
                .lookup(&one.cookie.to_ne_bytes(), MapFlags::ANY);
            entry.is_ok_and(|entry| entry.is_some())
        };
        let id = |address: &Address| Some(info_of(address.program.as_fd())?.id);
        let ids: Vec<u32> = self.addresses.iter().filter_map(id).collect();
        let own = |one: &Chooser| one.program.is_some_and(|id| ids.contains(&id));
        let mut here = seen.iter().filter(is_known);
        let first = own(here.next()?);
        // Of two groups at an address one may be ours.
        Some(first || here.any(own))
    }

    /// Has each datagram of the flows with this home placed anew, if a slot has them now. Returns whether it had.
    ///
    /// # Errors
    /// The error of the map operation.
    pub fn spread(&self, slot: usize, home: u32) -> Result<bool, Error> {
        let mut spread = false;
        for homes in self.homes() {
            let there = home_in(homes, home).is_some_and(|at| at as usize == slot + 1);
            if there {
                let mut value = [0; 8];
                value[..4].copy_from_slice(&number::HOME_EACH.to_ne_bytes());
                value[4..].copy_from_slice(&flow_clock().to_ne_bytes());
                homes
                    .update(&home.to_ne_bytes(), &value, MapFlags::ANY)
                    .map_err(bpf_step("spreading a flow"))?;
                spread = true;
            }
        }
        Ok(spread)
    }

    /// Whether each datagram of the flows with this home is placed anew, and they are in use.
    pub fn is_spread(&self, home: u32) -> bool {
        self.homes()
            .any(|homes| home_in(homes, home) == Some(number::HOME_EACH))
    }

    fn homes(&self) -> impl Iterator<Item = &MapHandle> {
        self.addresses.iter().filter_map(|one| one.homes.as_ref())
    }

    /// The sockets of an address's group, by slot.
    pub fn sockets(&self, address: usize) -> BorrowedFd<'_> {
        self.addresses[address].sockets.as_fd()
    }

    /// Run count and run time of each program, where the kernel keeps statistics.
    pub fn run_statistics(&self) -> Vec<RunStatistics> {
        let dispatch = self
            .addresses
            .iter()
            .enumerate()
            .filter_map(|(number, address)| {
                run_statistics(format!("dispatch-{number}"), address.program.as_fd())
            });
        let count = Program::fd_from_pinned_path(self.dir.join("count"))
            .ok()
            .and_then(|fd| run_statistics("count".into(), fd.as_fd()));
        dispatch.chain(count).collect()
    }
}

/// Where the flows with this home go, if they were seen within [`LATELY`].
fn home_in(homes: &MapHandle, home: u32) -> Option<u32> {
    let value = homes.lookup(&home.to_ne_bytes(), MapFlags::ANY).ok()??;
    let word = |at: usize| Some(u32::from_ne_bytes(value.get(at..at + 4)?.try_into().ok()?));
    let (at, used) = (word(0)?, word(4)?);
    (flow_clock().saturating_sub(used) <= LATELY).then_some(at)
}

/// The kernel's counters of a program while statistics were on.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct RunStatistics {
    /// `dispatch-N` for the Nth address, or `count`.
    pub name: String,
    /// Times it ran.
    pub run_cnt: u64,
    /// Time it took in all, in ns.
    pub run_time_ns: u64,
}

fn run_statistics(name: String, program: BorrowedFd<'_>) -> Option<RunStatistics> {
    let info = info_of(program)?;
    Some(RunStatistics {
        name,
        run_cnt: info.run_cnt,
        run_time_ns: info.run_time_ns,
    })
}
