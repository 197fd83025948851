//! Counts in the connections that were open before a group was steered, and counts all of them again.
//!
//! sock_diag lists the connections and their tags, and a program is run for each of those that have none
//! (`bpf/recount.bpf.c`).

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Iter, Link, MapCore, MapFlags, MapHandle, libbpf_sys};
use wakeone_kernel::socket;
use wakeone_kernel::socket::diag::{self, Entry};

use crate::contract::number::{FROZEN, TAG_COUNTED, UNSETTLED};
use crate::error::failed;
use crate::object::{clear, keep};
use crate::skeletons::recount::{OpenRecountMaps, RecountSkel, RecountSkelBuilder};
use crate::table::MAX_SLOTS;

/// The result of counting in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Recounted {
    /// Connections counted in.
    pub counted: u64,
    /// Connections that no known worker holds: they stay uncounted.
    pub unattributed: u64,
}

/// Counts in connections that were open before. It is loaded once and may run often.
#[derive(Debug)]
pub struct CountIn {
    /// The iterator. It notes which connections wait at the listeners of `queues`.
    queued: Link,
    queues: MapHandle,
    waiting: MapHandle,
    count_in: OwnedFd,
    listeners: MapHandle,
    tags: MapHandle,
}

/// The name under which the link is pinned that counts those connections out again.
pub(crate) const RELEASE_LINK: &str = "release_link";
/// The name under which their numbers are pinned.
const EARLY: &str = "early";

impl CountIn {
    /// Loads the programs for a pinned group, whose listeners were created in `cgroup`. From then on a connection is counted
    /// out also when its socket is closed.
    ///
    /// # Errors
    /// `EPERM` without CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN; or the kernel has no such programs.
    pub fn of(pins: &Path, cgroup: &Path) -> io::Result<Self> {
        // libbpf's message on standard error is in the error, too.
        libbpf_rs::set_print(None);
        let mut storage = MaybeUninit::uninit();
        let mut open = RecountSkelBuilder::default()
            .open(&mut storage)
            .map_err(|e| failed("reading the recount", &e))?;
        share_maps(&mut open.maps, pins)?;
        let mut loaded = open.load().map_err(|e| failed("loading the recount", &e))?;
        count_out_at_release(&mut loaded, pins, cgroup)?;
        let queued = loaded
            .progs
            .wakeone_queued
            .attach_iter(loaded.maps.queues.as_fd())
            .map_err(|e| failed("attaching the recount", &e))?;
        Ok(Self {
            queued,
            queues: keep(&loaded.maps.queues)?,
            waiting: keep(&loaded.maps.waiting)?,
            count_in: loaded.progs.wakeone_count_in.as_fd().try_clone_to_owned()?,
            listeners: keep(&loaded.maps.listeners)?,
            tags: keep(&loaded.maps.tags)?,
        })
    }

    /// Counts in the connections that a listener's address had open before. `held`: inodes of accepted connections and the slots
    /// of the workers that hold them. `listeners`: those whose queues are read. Connections that are counted already stay
    /// as they are. So it may be repeated for connections that were accepted meanwhile. Waiting connections that cannot be
    /// counted are marked: see [`crate::notes::Notes`].
    ///
    /// # Errors
    /// The kernel's.
    pub fn run(
        &self,
        listener: SocketAddr,
        held: &HashMap<u64, usize>,
        listeners: &[impl AsFd],
    ) -> io::Result<Recounted> {
        let unsettled: Vec<Vec<u8>> = self.listeners.keys().collect();
        let any = listener.ip().is_unspecified();
        let mut untagged = Vec::new();
        // It also gives each of them the cookie by which those that wait are known.
        diag::connections_with(self.tags.as_fd(), listener.port(), &mut |one, tag| {
            let concerns = one.local.is_ipv6() == listener.is_ipv6()
                && (any || one.local.ip() == listener.ip());
            if concerns && tag.is_none() {
                untagged.push(one);
            }
        })?;
        self.note_waiting(listeners)?;
        let mut sum = Recounted::default();
        for one in &untagged {
            let slot = match one.socket.inode {
                0 => self.queue_of(one.socket.cookie)?,
                inode => held.get(&inode).and_then(|slot| u32::try_from(*slot).ok()),
            };
            match self.count(one, slot)? {
                COUNTED => sum.counted += 1,
                LEFT_OUT => sum.unattributed += 1,
                _ => {}
            }
        }
        settle(&self.listeners, &unsettled);
        Ok(sum)
    }

    /// Notes which connections wait in the queues of these listeners.
    fn note_waiting(&self, listeners: &[impl AsFd]) -> io::Result<()> {
        clear(&self.waiting)?;
        let marked = listeners.iter().try_for_each(|one| self.mark(one.as_fd()));
        let walked = marked.and_then(|()| walk(&self.queued));
        // Whatever failed: a later walk must find no listener that is not held any more. It fails for those that were not marked.
        for one in listeners {
            let _ = self.queues.delete(&descriptor(one.as_fd()));
        }
        walked
    }

    /// Has the next walk read the queue of a listener, if it has a slot.
    fn mark(&self, listener: BorrowedFd<'_>) -> io::Result<()> {
        let cookie = socket::cookie(listener)?.to_ne_bytes();
        let Some(number) = number_at(&self.listeners, &cookie)? else {
            return Ok(());
        };
        let slot = (number & !UNSETTLED).to_ne_bytes();
        self.queues
            .update(&descriptor(listener), &slot, MapFlags::ANY)
            .map_err(|e| failed("marking a listener", &e))
    }

    /// The slot in whose queue a connection waits.
    fn queue_of(&self, cookie: u64) -> io::Result<Option<u32>> {
        number_at(&self.waiting, &cookie.to_ne_bytes())
    }

    /// Has the program count one connection in, or leave it out. Returns its answer.
    fn count(&self, one: &Entry, slot: Option<u32>) -> io::Result<u32> {
        let packet = packet(one, slot);
        let mut run = libbpf_sys::bpf_test_run_opts {
            sz: size_of::<libbpf_sys::bpf_test_run_opts>() as u64,
            data_in: packet.as_ptr().cast(),
            data_size_in: packet.len() as u32,
            ..Default::default()
        };
        // SAFETY: the descriptor is open; `run` is a zeroed struct of `sz` bytes but for `packet`, which the kernel only reads.
        let done =
            unsafe { libbpf_sys::bpf_prog_test_run_opts(self.count_in.as_raw_fd(), &raw mut run) };
        match done {
            0 => Ok(run.retval),
            error => Err(io::Error::from_raw_os_error(-error)),
        }
    }
}

/// `enum wakeone_counted_in` of bpf/recount.bpf.c.
const COUNTED: u32 = 2;
const LEFT_OUT: u32 = 3;

/// `struct wakeone_open` of bpf/recount.bpf.c.
fn packet(one: &Entry, slot: Option<u32>) -> Vec<u8> {
    let (local, remote) = (one.local.ip().to_canonical(), one.peer.ip().to_canonical());
    let mut packet = vec![0; 16];
    for address in [local, remote] {
        let mut bytes = match address {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        };
        bytes.resize(16, 0);
        packet.extend(bytes);
    }
    packet.extend(one.local.port().to_be_bytes());
    packet.extend(one.peer.port().to_be_bytes());
    packet.extend(u32::from(local.is_ipv6()).to_ne_bytes());
    packet.extend(slot.unwrap_or(FROZEN).to_ne_bytes());
    packet.extend(u32::from(one.socket.inode == 0).to_ne_bytes());
    packet.extend(one.socket.cookie.to_ne_bytes());
    packet
}

/// Has connections that are counted in counted out when their sockets are closed.
fn count_out_at_release(
    loaded: &mut RecountSkel<'_>,
    pins: &Path,
    cgroup: &Path,
) -> io::Result<()> {
    let early = pins.join(EARLY);
    if !early.exists() {
        let pinned = loaded.maps.data_early.pin(early);
        pinned.map_err(|e| failed("pinning the numbers of early connections", &e))?;
    }
    let (at, program) = (pins.join(RELEASE_LINK), &loaded.progs.wakeone_release);
    if at.exists() {
        // An older build's does not keep those numbers.
        let link = Link::open(at).and_then(|mut link| link.update_prog(program));
        return link.map_err(|e| failed("replacing the program for closed sockets", &e));
    }
    let mut link = program
        .attach_cgroup(File::open(cgroup)?.as_raw_fd())
        .map_err(|e| failed("attaching the program for closed sockets", &e))?;
    link.pin(at)
        .map_err(|e| failed("pinning the program for closed sockets", &e))
}

/// Has the recount use a group's maps.
fn share_maps(maps: &mut OpenRecountMaps<'_>, pins: &Path) -> io::Result<()> {
    let maps = [
        (&mut maps.data_table, "table"),
        (&mut maps.listeners, "listeners"),
        (&mut maps.tags, "tags"),
        (&mut maps.moved, "moved"),
        // Not there before the first of these programs.
        (&mut maps.data_early, EARLY),
    ];
    for (map, name) in maps {
        let pin = pins.join(name);
        if name != EARLY || pin.exists() {
            map.reuse_pinned_map(pin)
                .map_err(|e| failed("sharing the group's maps", &e))?;
        }
    }
    Ok(())
}

/// The key of a socket in a map of the type `SK_STORAGE`.
fn descriptor(socket: BorrowedFd<'_>) -> [u8; 4] {
    socket.as_raw_fd().to_ne_bytes()
}

/// The number that a map has at a key.
fn number_at(map: &MapHandle, key: &[u8]) -> io::Result<Option<u32>> {
    let found = map
        .lookup(key, MapFlags::ANY)
        .map_err(|e| failed("reading a number of the recount", &e))?;
    Ok(found.and_then(|bytes| bytes.try_into().ok().map(u32::from_ne_bytes)))
}

/// Notes of listeners that what waits there has a tag or a note. Their keys were read before the recount.
fn settle(listeners: &MapHandle, keys: &[Vec<u8>]) {
    for key in keys {
        if let Ok(Some(number)) = number_at(listeners, key) {
            let settled = (number & !UNSETTLED).to_ne_bytes();
            let _ = listeners.update(key, &settled, MapFlags::EXIST);
        }
    }
}

/// Counts the open connections of a group.
#[derive(Debug)]
pub struct OpenConnections {
    tags: MapHandle,
    /// `None`: no connection was ever counted in.
    early: Option<MapHandle>,
}

impl OpenConnections {
    /// Opens the maps of a pinned group.
    ///
    /// # Errors
    /// `EPERM` without CAP_BPF.
    pub fn of(pins: &Path) -> io::Result<Self> {
        let open = |name: &str| {
            MapHandle::from_pinned_path(pins.join(name))
                .map_err(|e| failed("opening the group's maps", &e))
        };
        let early = pins.join(EARLY).exists();
        Ok(Self {
            tags: open("tags")?,
            early: early.then(|| open(EARLY)).transpose()?,
        })
    }

    /// Returns how many open connections with this local port (0: any) the tags of each slot count. The counts of moved ones
    /// are in the notes.
    ///
    /// # Errors
    /// The kernel's.
    pub fn tagged(&self, port: u16) -> io::Result<Vec<i64>> {
        let mut open = self.early()?;
        open.resize(MAX_SLOTS, 0);
        diag::connections_with(self.tags.as_fd(), port, &mut |_, tag| {
            let counting = tag.and_then(slot_that_counts);
            if let Some(open) = counting.and_then(|slot| open.get_mut(slot)) {
                *open += 1;
            }
        })?;
        Ok(open)
    }

    /// The numbers of those that were counted in. They are not taken from the list of sockets: one that the client has
    /// reset is counted until the server closes it, and not listed.
    fn early(&self) -> io::Result<Vec<i64>> {
        let Some(early) = &self.early else {
            return Ok(Vec::new());
        };
        let numbers = early
            .lookup(&0_u32.to_ne_bytes(), MapFlags::ANY)
            .map_err(|e| failed("reading the numbers of early connections", &e))?;
        let numbers = numbers.unwrap_or_default();
        let numbers = numbers.as_chunks().0.iter();
        Ok(numbers.map(|word| i64::from_ne_bytes(*word)).collect())
    }
}

/// The slot of a tag (`struct wakeone_tag`) that counts, and is not early.
fn slot_that_counts(tag: &[u8]) -> Option<usize> {
    let [slot, counted] = tag.as_chunks().0 else {
        return None;
    };
    (u32::from_ne_bytes(*counted) == TAG_COUNTED).then_some(u32::from_ne_bytes(*slot) as usize)
}

/// One walk over the marked queues: reading drives it.
fn walk(link: &Link) -> io::Result<()> {
    let mut iterator = Iter::new(link).map_err(|e| failed("starting the recount", &e))?;
    iterator.read_to_end(&mut Vec::new()).map(drop)
}
