//! The programs for connections: the one that chooses a socket, and the one that counts.

use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::path::Path;

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{MapType, ProgramMut, libbpf_sys};

use crate::error::{Error, bpf_step};
use crate::notices::NOTICES;
use crate::object::{attempt, pin_map, pin_program, prepare, share};
use crate::skeletons::dispatch::{
    DispatchSkel, DispatchSkelBuilder, OpenDispatchMaps, OpenDispatchSkel,
};
use wakeone_kernel::netns;

const DISPATCH: &str = "wakeone_dispatch";
const WALK: &str = "wakeone_dispatch_walk";

/// Loads one variant of the selection program for one address; only then pins it and its maps.
pub(crate) fn load_program(
    dir: &Path,
    (address, addresses): (usize, usize),
    walk: bool,
    kind: MapType,
) -> Result<(), Error> {
    let mut storage = MaybeUninit::uninit();
    let mut open = open_dispatch(&mut storage)?;
    if let Some(constants) = &mut open.maps.rodata_data {
        constants.address_number = address as u32;
        constants.address_count = addresses as u32;
        constants.sees_closed = (walk && kind == MapType::Sockmap).into();
    }
    let program = if walk {
        &mut open.progs.wakeone_dispatch_walk
    } else {
        &mut open.progs.wakeone_dispatch
    };
    prepare(program);
    let sockets = format!("sockets-{address}");
    let own = share(&mut open.maps.sockets, dir, &sockets)?;
    if own {
        open.maps
            .sockets
            .set_type(kind)
            .map_err(bpf_step("choosing the type of the map sockets"))?;
    }
    let new = share_common(&mut open.maps, dir)?;
    let mut loaded = attempt(if walk { WALK } else { DISPATCH }, || open.load())?;
    let program = if walk {
        &mut loaded.progs.wakeone_dispatch_walk
    } else {
        &mut loaded.progs.wakeone_dispatch
    };
    pin_program(program, dir, address, walk)?;
    if own {
        pin_map(&mut loaded.maps.sockets, dir, &sockets)?;
    }
    pin_common(&mut loaded, dir, new)
}

/// Opens the object with all programs left out.
pub(crate) fn open_dispatch<'obj>(
    storage: &'obj mut MaybeUninit<libbpf_rs::OpenObject>,
) -> Result<OpenDispatchSkel<'obj>, Error> {
    let mut open = DispatchSkelBuilder::default()
        .open(storage)
        .map_err(bpf_step("reading the BPF object"))?;
    open.progs.wakeone_dispatch.set_autoload(false);
    open.progs.wakeone_dispatch_walk.set_autoload(false);
    open.progs.wakeone_count.set_autoload(false);
    Ok(open)
}

/// Loads the counting program and attaches it for good: a link that came off while connections close would leave the
/// counts wrong, so it is pinned.
pub(crate) fn load_counting(dir: &Path, cgroup: &Path) -> Result<(), Error> {
    let cgroup =
        fs::File::open(cgroup).map_err(Error::at(format!("opening {}", cgroup.display())))?;
    with_counting(dir, |count| {
        let mut link = count
            .attach_cgroup(cgroup.as_raw_fd())
            .map_err(bpf_step("attaching the counting program to the cgroup"))?;
        count
            .pin(dir.join(COUNT))
            .map_err(bpf_step("pinning the counting program"))?;
        link.pin(dir.join(COUNT_LINK)).map_err(|error| {
            let _ = fs::remove_file(dir.join(COUNT));
            bpf_step("pinning the counting program's link")(error)
        })
    })
}

/// The name under which the counting program is pinned.
pub(crate) const COUNT: &str = "count";
/// The name under which its link to the cgroup is pinned.
pub(crate) const COUNT_LINK: &str = "count_link";

/// Loads the counting program with the maps that are pinned in a folder, and does something to it.
pub(crate) fn with_counting(
    dir: &Path,
    act: impl FnOnce(&mut ProgramMut<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut storage = MaybeUninit::uninit();
    let mut open = open_dispatch(&mut storage)?;
    if let Some(constants) = &mut open.maps.rodata_data {
        constants.network = network();
    }
    prepare(&mut open.progs.wakeone_count);
    open.maps
        .sockets
        .set_autocreate(false)
        .map_err(bpf_step("leaving out the map sockets"))?;
    share_common(&mut open.maps, dir)?;
    let mut loaded = attempt("wakeone_count", || open.load())?;
    act(&mut loaded.progs.wakeone_count)
}

/// The cookie of this network namespace, if the counting program can compare it with a socket's; else 0.
fn network() -> u64 {
    // SAFETY: it loads a program of two instructions, and needs nothing of us.
    let is_told = unsafe {
        libbpf_sys::libbpf_probe_bpf_helper(
            libbpf_sys::BPF_PROG_TYPE_SOCK_OPS,
            libbpf_sys::BPF_FUNC_get_netns_cookie,
            std::ptr::null(),
        )
    };
    if is_told == 1 {
        netns::own_cookie().unwrap_or_default()
    } else {
        0
    }
}

/// All addresses share the table and the maps that counting needs.
const COMMON: [&str; 5] = ["table", "listeners", "moved", "tags", NOTICES];

/// Has an object use the maps that all addresses share. Returns which of them are new and to be pinned: all for the first
/// object, and none for the others. (A group of an earlier build may lack the last ones.)
fn share_common(
    maps: &mut OpenDispatchMaps<'_>,
    dir: &Path,
) -> Result<[bool; COMMON.len()], Error> {
    let maps = [
        &mut maps.data_table,
        &mut maps.listeners,
        &mut maps.moved,
        &mut maps.tags,
        &mut maps.notices,
    ];
    let mut new = [false; COMMON.len()];
    for ((name, map), new) in COMMON.iter().zip(maps).zip(&mut new) {
        *new = share(map, dir, name)?;
    }
    Ok(new)
}

fn pin_common(
    loaded: &mut DispatchSkel<'_>,
    dir: &Path,
    new: [bool; COMMON.len()],
) -> Result<(), Error> {
    let maps = [
        &mut loaded.maps.data_table,
        &mut loaded.maps.listeners,
        &mut loaded.maps.moved,
        &mut loaded.maps.tags,
        &mut loaded.maps.notices,
    ];
    let named = COMMON.iter().zip(maps).zip(new);
    named
        .filter(|(_, new)| *new)
        .try_for_each(|((name, map), _)| pin_map(map, dir, name))
}
