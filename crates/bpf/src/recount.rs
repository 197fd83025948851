//! Counts in the connections that were open before a group was steered, and counts all of them again.
//!
//! `bpf/recount.bpf.c`, an iterator over the TCP sockets of this thread's network namespace.

use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::path::Path;

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Iter, Link, MapCore, MapFlags, MapHandle, MapMut, ProgramMut};

use crate::contract::number::UNSETTLED;
use crate::error::failed;
use crate::skeletons::recount::{OpenRecountMaps, RecountSkel, RecountSkelBuilder};
use crate::table::MAX_SLOTS;

/// The result of a recount.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Recounted {
    /// Connections counted in.
    pub counted: u64,
    /// Connections that no known worker holds, or that cannot be followed: they stay uncounted.
    pub unattributed: u64,
    /// The kernel lets no iterator switch callbacks on: no connection that was open before can be counted.
    pub no_callbacks: bool,
}

impl Recounted {
    /// Returns a sentence on the kernel feature that is missing for counting earlier connections.
    pub fn missing(&self) -> Option<&'static str> {
        self.no_callbacks.then_some(
            "connections that were open before attach are not counted (the kernel lets no iterator switch callbacks on before 6.12)",
        )
    }
}

/// Whether an iterator may switch callbacks on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Callbacks {
    /// The recount finds out at the first connection.
    Probed,
    /// The recount behaves as on a kernel that lets no iterator switch callbacks on. For tests.
    Refused,
}

/// Counts in connections that were open before. It is loaded once and may run often.
#[derive(Debug)]
pub struct CountIn {
    link: Link,
    listeners: MapHandle,
    held: MapHandle,
    waiting: MapHandle,
    recount: MapHandle,
}

impl CountIn {
    /// Loads the program for a pinned group.
    ///
    /// # Errors
    /// `EPERM` without CAP_BPF and CAP_PERFMON; or the kernel knows no such iterator.
    pub fn of(pins: &Path) -> io::Result<Self> {
        load(pins, true, |loaded| {
            Ok(Self {
                link: attach(&loaded.progs.wakeone_recount)?,
                listeners: keep(&loaded.maps.listeners)?,
                held: keep(&loaded.maps.held)?,
                waiting: keep(&loaded.maps.waiting)?,
                recount: keep(&loaded.maps.data_recount)?,
            })
        })
    }

    /// Counts in the connections that were open on this port before. `held`: inodes of accepted connections and the slots of
    /// the workers that hold them. Connections that are counted already stay as they are. So it may be repeated for
    /// connections that were accepted meanwhile. Waiting connections that cannot be counted are marked: see
    /// [`crate::notes::Notes`].
    ///
    /// # Errors
    /// The kernel's.
    pub fn run(
        &self,
        port: u16,
        held: impl IntoIterator<Item = (u64, usize)>,
        callbacks: Callbacks,
    ) -> io::Result<Recounted> {
        let begun = Recounted {
            no_callbacks: callbacks == Callbacks::Refused,
            ..Recounted::default()
        };
        let unsettled: Vec<Vec<u8>> = self.listeners.keys().collect();
        clear(&self.held)?;
        clear(&self.waiting)?;
        for (inode, slot) in held {
            let slot = u32::try_from(slot).unwrap_or(u32::MAX);
            self.held
                .update(&inode.to_ne_bytes(), &slot.to_ne_bytes(), MapFlags::ANY)
                .map_err(|e| failed("noting who holds a connection", &e))?;
        }
        // The first pass notes which connection waits in which queue; the second counts.
        let noted = self.pass(port, 0, begun)?;
        let counted = self.pass(port, 1, noted)?;
        settle(&self.listeners, &unsettled);
        Ok(counted)
    }

    /// One walk over all sockets. Returns the sums after it.
    fn pass(&self, port: u16, counting: u32, before: Recounted) -> io::Result<Recounted> {
        // struct wakeone_recount of bpf/recount.bpf.c.
        let state = [
            &u32::from(port).to_ne_bytes()[..],
            &counting.to_ne_bytes(),
            &before.counted.to_ne_bytes(),
            &before.unattributed.to_ne_bytes(),
            &u64::from(before.no_callbacks).to_ne_bytes(),
        ];
        let words = walk(&self.link, &self.recount, &state.concat())?;
        let word = |at: usize| words.get(at).map_or(0, |one| u64::from_ne_bytes(*one));
        Ok(Recounted {
            counted: word(1),
            unattributed: word(2),
            no_callbacks: word(3) != 0,
        })
    }
}

/// Loads the program that counts in, or else the one that counts by tags, on a group's maps. Returns what `kept` keeps.
fn load<T>(
    pins: &Path,
    counts_in: bool,
    kept: impl FnOnce(&RecountSkel<'_>) -> io::Result<T>,
) -> io::Result<T> {
    // libbpf's message on standard error is in the error, too.
    libbpf_rs::set_print(None);
    let mut storage = MaybeUninit::uninit();
    let mut open = RecountSkelBuilder::default()
        .open(&mut storage)
        .map_err(|e| failed("reading the recount", &e))?;
    share_maps(&mut open.maps, pins)?;
    open.progs.wakeone_recount.set_autoload(counts_in);
    open.progs.wakeone_tagged.set_autoload(!counts_in);
    let loaded = open.load().map_err(|e| failed("loading the recount", &e))?;
    kept(&loaded)
}

fn attach(program: &ProgramMut<'_>) -> io::Result<Link> {
    program
        .attach()
        .map_err(|e| failed("attaching the recount", &e))
}

fn keep(map: &MapMut<'_>) -> io::Result<MapHandle> {
    MapHandle::try_from(map).map_err(|e| failed("keeping the recount's maps", &e))
}

/// Removes all entries.
fn clear(map: &MapHandle) -> io::Result<()> {
    let keys: Vec<Vec<u8>> = map.keys().collect();
    for key in keys {
        map.delete(&key)
            .map_err(|e| failed("clearing the recount", &e))?;
    }
    Ok(())
}

/// Has the recount use a group's maps.
fn share_maps(maps: &mut OpenRecountMaps<'_>, pins: &Path) -> io::Result<()> {
    let maps = [
        (&mut maps.data_table, "table"),
        (&mut maps.listeners, "listeners"),
        (&mut maps.tags, "tags"),
        (&mut maps.moved, "moved"),
    ];
    for (map, name) in maps {
        map.reuse_pinned_map(pins.join(name))
            .map_err(|e| failed("sharing the group's maps", &e))?;
    }
    Ok(())
}

/// Notes of listeners that what waits there has a tag or a note. Their keys were read before the recount.
fn settle(listeners: &MapHandle, keys: &[Vec<u8>]) {
    for key in keys {
        let Ok(Some(number)) = listeners.lookup(key, MapFlags::ANY) else {
            continue;
        };
        let Ok(number) = number.try_into().map(u32::from_ne_bytes) else {
            continue;
        };
        let settled = (number & !UNSETTLED).to_ne_bytes();
        let _ = listeners.update(key, &settled, MapFlags::EXIST);
    }
}

/// Counts the open connections of a group, over all TCP sockets of this thread's network namespace.
#[derive(Debug)]
pub struct OpenConnections {
    link: Link,
    tagged: MapHandle,
}

impl OpenConnections {
    /// Loads the program. It is loaded once and may run often.
    ///
    /// # Errors
    /// As [`CountIn::of`].
    pub fn of(pins: &Path) -> io::Result<Self> {
        load(pins, false, |loaded| {
            Ok(Self {
                link: attach(&loaded.progs.wakeone_tagged)?,
                tagged: keep(&loaded.maps.data_tagged)?,
            })
        })
    }

    /// Returns how many open connections the tags of each slot count. The counts of moved ones are in the notes.
    ///
    /// # Errors
    /// The kernel's.
    pub fn tagged(&self) -> io::Result<Vec<i64>> {
        let counts = walk(&self.link, &self.tagged, &[0; 8 * MAX_SLOTS])?;
        Ok(counts.into_iter().map(i64::from_ne_bytes).collect())
    }
}

/// One walk over all sockets, by a program whose variables, in a map of their own, begin like this. Returns the words of 64 bits
/// there after it.
fn walk(link: &Link, variables: &MapHandle, begin: &[u8]) -> io::Result<Vec<[u8; 8]>> {
    let key = 0_u32.to_ne_bytes();
    variables
        .update(&key, begin, MapFlags::ANY)
        .map_err(|e| failed("clearing the recount", &e))?;
    let mut iterator = Iter::new(link).map_err(|e| failed("starting the recount", &e))?;
    // It prints nothing: reading drives it.
    iterator.read_to_end(&mut Vec::new())?;
    let after = variables
        .lookup(&key, MapFlags::ANY)
        .map_err(|e| failed("reading the recount", &e))?
        .unwrap_or_default();
    Ok(after.as_chunks().0.to_vec())
}
