//! Counting in the connections that were open before a group was steered, and asking who steers it already.
//!
//! `bpf/recount.bpf.c`, an iterator over the TCP sockets of this thread's network namespace.

use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::path::Path;

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Iter, MapCore, MapFlags, MapHandle, ProgramMut};

use crate::bpf::failed;
use crate::skeletons::recount::RecountSkelBuilder;

/// What a recount came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Recounted {
    /// Connections counted in.
    pub counted: u64,
    /// Connections that no known worker holds, or that cannot be followed: they stay uncounted.
    pub homeless: u64,
}

/// Counts in what was open on this port before. `held`: inodes of accepted connections and the slots of the workers
/// that hold them. Connections that are counted already stay as they are, so that it may be done again for those that
/// were accepted meanwhile.
///
/// # Errors
/// `EPERM` without CAP_BPF and CAP_PERFMON; or the kernel knows no such iterator.
pub fn recount(
    pins: &Path,
    port: u16,
    held: impl IntoIterator<Item = (u64, usize)>,
) -> io::Result<Recounted> {
    // What it says on standard error is in the error, too.
    libbpf_rs::set_print(None);
    let mut storage = MaybeUninit::uninit();
    let mut open = RecountSkelBuilder::default()
        .open(&mut storage)
        .map_err(|e| failed("reading the recount", &e))?;
    let maps = [
        (&mut open.maps.data_table, "table"),
        (&mut open.maps.listeners, "listeners"),
        (&mut open.maps.tags, "tags"),
    ];
    for (map, name) in maps {
        map.reuse_pinned_map(pins.join(name))
            .map_err(|e| failed("sharing the group's maps", &e))?;
    }
    if let Some(data) = &mut open.maps.data_recount_data {
        data.recount.port = port.into();
    }
    open.progs.wakeone_udp_programs.set_autoload(false);
    let mut loaded = open.load().map_err(|e| failed("loading the recount", &e))?;
    for (inode, slot) in held {
        let slot = u32::try_from(slot).unwrap_or(u32::MAX);
        loaded
            .maps
            .held
            .update(&inode.to_ne_bytes(), &slot.to_ne_bytes(), MapFlags::ANY)
            .map_err(|e| failed("noting who holds a connection", &e))?;
    }
    // First who waits in which queue; then everything.
    pass(&loaded.progs.wakeone_recount)?;
    if let Some(data) = &mut loaded.maps.data_recount_data {
        data.recount.counting = 1;
    }
    pass(&loaded.progs.wakeone_recount)?;
    let done = loaded.maps.data_recount_data.as_ref();
    Ok(done.map_or_else(Recounted::default, |data| Recounted {
        counted: data.recount.counted,
        homeless: data.recount.homeless,
    }))
}

/// Whether a program chooses for a group of this port that has one of these sockets (cookies), which are of UDP or
/// listen by TCP.
///
/// # Errors
/// As [`recount`].
pub fn has_program(
    port: u16,
    udp: bool,
    listeners: impl IntoIterator<Item = u64>,
) -> io::Result<bool> {
    // What it says on standard error is in the error, too.
    libbpf_rs::set_print(None);
    let mut storage = MaybeUninit::uninit();
    let mut open = RecountSkelBuilder::default()
        .open(&mut storage)
        .map_err(|e| failed("reading the recount", &e))?;
    if let Some(data) = &mut open.maps.data_recount_data {
        data.recount.port = port.into();
    }
    open.progs.wakeone_recount.set_autoload(!udp);
    open.progs.wakeone_udp_programs.set_autoload(udp);
    let loaded = open.load().map_err(|e| failed("loading the recount", &e))?;
    let known = MapHandle::try_from(&loaded.maps.listeners)
        .map_err(|e| failed("keeping the recount's map", &e))?;
    for cookie in listeners {
        known
            .update(&cookie.to_ne_bytes(), &0_u32.to_ne_bytes(), MapFlags::ANY)
            .map_err(|e| failed("noting a listener", &e))?;
    }
    pass(if udp {
        &loaded.progs.wakeone_udp_programs
    } else {
        &loaded.progs.wakeone_recount
    })?;
    let done = loaded.maps.data_recount_data.as_ref();
    Ok(done.is_some_and(|data| data.recount.programs > 0))
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
