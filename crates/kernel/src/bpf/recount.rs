//! Counts in the connections that were open before a group was steered.
//!
//! `bpf/recount.bpf.c`, an iterator over the TCP sockets of this thread's network namespace.

use std::collections::HashSet;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Iter, MapCore, MapFlags, MapHandle, ProgramMut};

use wakeone_model::listener::Protocol;

use crate::bpf::error::failed;
use crate::bpf::skeletons::recount::RecountSkelBuilder;
use crate::socket::diag::{self, Which};

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

/// Counts in the connections that were open on this port before. `held`: inodes of accepted connections and the slots
/// of the workers that hold them. Connections that are counted already stay as they are. So the recount may be
/// repeated for connections that were accepted meanwhile. Waiting connections that cannot be counted are marked: see
/// [`Uncounted`].
///
/// # Errors
/// `EPERM` without CAP_BPF and CAP_PERFMON; or the kernel knows no such iterator.
pub fn recount(
    pins: &Path,
    port: u16,
    held: impl IntoIterator<Item = (u64, usize)>,
    callbacks: Callbacks,
) -> io::Result<Recounted> {
    // libbpf's message on standard error is in the error, too.
    libbpf_rs::set_print(None);
    let mut storage = MaybeUninit::uninit();
    let mut open = RecountSkelBuilder::default()
        .open(&mut storage)
        .map_err(|e| failed("reading the recount", &e))?;
    let maps = [
        (&mut open.maps.data_table, "table"),
        (&mut open.maps.listeners, "listeners"),
        (&mut open.maps.tags, "tags"),
        (&mut open.maps.moved, "moved"),
    ];
    for (map, name) in maps {
        map.reuse_pinned_map(pins.join(name))
            .map_err(|e| failed("sharing the group's maps", &e))?;
    }
    if let Some(data) = &mut open.maps.data_recount_data {
        data.recount.port = port.into();
        data.recount.no_callbacks = (callbacks == Callbacks::Refused).into();
    }
    let mut loaded = open.load().map_err(|e| failed("loading the recount", &e))?;
    for (inode, slot) in held {
        let slot = u32::try_from(slot).unwrap_or(u32::MAX);
        loaded
            .maps
            .held
            .update(&inode.to_ne_bytes(), &slot.to_ne_bytes(), MapFlags::ANY)
            .map_err(|e| failed("noting who holds a connection", &e))?;
    }
    // The first pass notes which connection waits in which queue; the second counts.
    pass(&loaded.progs.wakeone_recount)?;
    if let Some(data) = &mut loaded.maps.data_recount_data {
        data.recount.counting = 1;
    }
    pass(&loaded.progs.wakeone_recount)?;
    let done = loaded.maps.data_recount_data.as_ref();
    Ok(done.map_or_else(Recounted::default, |data| Recounted {
        counted: data.recount.counted,
        unattributed: data.recount.unattributed,
        no_callbacks: data.recount.no_callbacks != 0,
    }))
}

/// The marks of connections that waited in accept queues and could not be counted: a move of one changes no count. A
/// mark is of no use once its connection is accepted, and nothing in the kernel removes it.
#[derive(Debug)]
pub struct Uncounted {
    moved: MapHandle,
    due: Instant,
}

/// `WAKEONE_UNCOUNTED`
const UNCOUNTED: u32 = u32::MAX;
/// Looking for the connections that still wait may take this part of the time.
const LOOKING_SHARE: u32 = 200;
/// At most that often.
const LOOK_EVERY: Duration = Duration::from_millis(100);

impl Uncounted {
    /// The marks of a group; `None` where there are none.
    ///
    /// # Errors
    /// The error of the map operation.
    pub fn of(pins: &Path) -> io::Result<Option<Self>> {
        let moved = MapHandle::from_pinned_path(pins.join("moved"))
            .map_err(|e| failed("opening the map of moved connections", &e))?;
        let marks = Self {
            moved,
            due: Instant::now(),
        };
        Ok((!marks.cookies().is_empty()).then_some(marks))
    }

    /// Connections marked, by their cookies.
    fn cookies(&self) -> Vec<u64> {
        let marked = |key: Vec<u8>| {
            let value = self.moved.lookup(&key, MapFlags::ANY).ok()??;
            (value == UNCOUNTED.to_ne_bytes()).then_some(u64::from_ne_bytes(key.try_into().ok()?))
        };
        self.moved.keys().filter_map(marked).collect()
    }

    /// Takes away the marks of connections that wait no more; true when none is left. Returns at once when called again
    /// soon: it asks the kernel for all connections of the listener.
    ///
    /// # Errors
    /// When the kernel does not show its sockets.
    pub fn tidy(&mut self, listener: SocketAddr) -> io::Result<bool> {
        let began = Instant::now();
        if began < self.due {
            return Ok(false);
        }
        let open = diag::sockets_at(Protocol::Tcp, Which::Waiting, listener)?;
        let waiting = open.iter().filter(|entry| entry.socket.inode == 0);
        let waiting: HashSet<u64> = waiting.map(|entry| entry.socket.cookie).collect();
        let mut left = false;
        for cookie in self.cookies() {
            if waiting.contains(&cookie) {
                left = true;
            } else {
                let _ = self.moved.delete(&cookie.to_ne_bytes());
            }
        }
        self.due = Instant::now() + LOOK_EVERY.max(began.elapsed() * LOOKING_SHARE);
        Ok(!left)
    }
}

/// One walk over all sockets.
fn pass(program: &ProgramMut<'_>) -> io::Result<()> {
    let link = program
        .attach()
        .map_err(|e| failed("attaching the recount", &e))?;
    let mut iterator = Iter::new(&link).map_err(|e| failed("starting the recount", &e))?;
    // It prints nothing: reading drives it.
    iterator.read_to_end(&mut Vec::new())?;
    Ok(())
}
