//! Counts in the connections that were open before a group was steered, and counts all of them again.
//!
//! `bpf/recount.bpf.c`: iterators over the tags of a group, and a program that is run for each connection.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Iter, Link, MapCore, MapFlags, MapHandle, MapMut, ProgramMut, libbpf_sys};
use wakeone_kernel::socket::diag::{self, Entry, Which};
use wakeone_model::listener::Protocol;

use crate::contract::number::{FROZEN, UNSETTLED};
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
    /// The iterator tells which connections have tags, and notes who waits in which queue.
    known: Link,
    count_in: OwnedFd,
    listeners: MapHandle,
    waiting: MapHandle,
}

/// The name under which the link is pinned that counts those connections out again.
pub(crate) const RELEASE_LINK: &str = "release_link";

impl CountIn {
    /// Loads the programs for a pinned group, whose listeners were created in `cgroup`. From then on a connection is counted
    /// out also when its socket is closed.
    ///
    /// # Errors
    /// `EPERM` without CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN; or the kernel has no such programs.
    pub fn of(pins: &Path, cgroup: &Path) -> io::Result<Self> {
        load(pins, true, |loaded| {
            let release = pins.join(RELEASE_LINK);
            if !release.exists() {
                let mut link = loaded
                    .progs
                    .wakeone_release
                    .attach_cgroup(File::open(cgroup)?.as_raw_fd())
                    .map_err(|e| failed("attaching the program for closed sockets", &e))?;
                link.pin(release)
                    .map_err(|e| failed("pinning the program for closed sockets", &e))?;
            }
            Ok(Self {
                known: attach(&loaded.progs.wakeone_known, &loaded.maps.tags)?,
                count_in: loaded.progs.wakeone_count_in.as_fd().try_clone_to_owned()?,
                listeners: keep(&loaded.maps.listeners)?,
                waiting: keep(&loaded.maps.waiting)?,
            })
        })
    }

    /// Counts in the connections that a listener's address had open before. `held`: inodes of accepted connections and the slots
    /// of the workers that hold them. Connections that are counted already stay as they are. So it may be repeated for
    /// connections that were accepted meanwhile. Waiting connections that cannot be counted are marked: see
    /// [`crate::notes::Notes`].
    ///
    /// # Errors
    /// The kernel's.
    pub fn run(&self, listener: SocketAddr, held: &HashMap<u64, usize>) -> io::Result<Recounted> {
        let unsettled: Vec<Vec<u8>> = self.listeners.keys().collect();
        let any = listener.ip().is_unspecified();
        // It also gives each of them the cookie by which they are known below.
        let mut open = diag::sockets_at(Protocol::Tcp, Which::Open, listener)?;
        open.retain(|one| any || one.local.ip() == listener.ip());
        clear(&self.waiting)?;
        let known = cookies(&told(&self.known)?);
        let mut sum = Recounted::default();
        for one in &open {
            if known.contains(&one.socket.cookie) {
                continue;
            }
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

    /// The slot in whose queue a connection waits.
    fn queue_of(&self, cookie: u64) -> io::Result<Option<u32>> {
        let slot = self
            .waiting
            .lookup(&cookie.to_ne_bytes(), MapFlags::ANY)
            .map_err(|e| failed("reading who waits", &e))?;
        Ok(slot.and_then(|slot| slot.try_into().ok().map(u32::from_ne_bytes)))
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

fn cookies(told: &[u8]) -> HashSet<u64> {
    let words = told.as_chunks().0.iter();
    words.map(|word| u64::from_ne_bytes(*word)).collect()
}

/// Loads the programs that count in, or else the one that counts by tags, on a group's maps. Returns what `kept` keeps.
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
    for program in [
        &mut open.progs.wakeone_known,
        &mut open.progs.wakeone_count_in,
        &mut open.progs.wakeone_release,
    ] {
        program.set_autoload(counts_in);
    }
    open.progs.wakeone_tagged.set_autoload(!counts_in);
    let loaded = open.load().map_err(|e| failed("loading the recount", &e))?;
    kept(&loaded)
}

/// Attaches an iterator over the tags of a group.
fn attach(program: &ProgramMut<'_>, tags: &MapMut<'_>) -> io::Result<Link> {
    program
        .attach_iter(tags.as_fd())
        .map_err(|e| failed("attaching the recount", &e))
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

/// Counts the open connections of a group.
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
                link: attach(&loaded.progs.wakeone_tagged, &loaded.maps.tags)?,
                tagged: keep(&loaded.maps.data_tagged)?,
            })
        })
    }

    /// Returns how many open connections the tags of each slot count. The counts of moved ones are in the notes.
    ///
    /// # Errors
    /// The kernel's.
    pub fn tagged(&self) -> io::Result<Vec<i64>> {
        let key = 0_u32.to_ne_bytes();
        self.tagged
            .update(&key, &[0; 8 * MAX_SLOTS], MapFlags::ANY)
            .map_err(|e| failed("clearing the recount", &e))?;
        told(&self.link)?;
        let counts = self
            .tagged
            .lookup(&key, MapFlags::ANY)
            .map_err(|e| failed("reading the recount", &e))?
            .unwrap_or_default();
        let counts = counts.as_chunks().0.iter();
        Ok(counts.map(|word| i64::from_ne_bytes(*word)).collect())
    }
}

/// One walk over a group's tags. Returns what the program tells; reading drives it.
fn told(link: &Link) -> io::Result<Vec<u8>> {
    let mut iterator = Iter::new(link).map_err(|e| failed("starting the recount", &e))?;
    let mut told = Vec::new();
    loop {
        match iterator.read_to_end(&mut told) {
            Ok(_) => return Ok(told),
            // After a million tags of which nothing is told (MAX_ITER_OBJECTS, kernel/bpf/bpf_iter.c).
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}
