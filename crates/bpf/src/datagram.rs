//! The program that chooses a socket for each UDP datagram: loading and pinning. Everything else of a group is the
//! same as for connections, and in [`crate::bpf`].

use std::mem::MaybeUninit;
use std::path::Path;

use libbpf_rs::skel::{OpenSkel, SkelBuilder};

use crate::error::{Error, bpf_step};
use crate::notices::NOTICES;
use crate::object::{attempt, pin_new, pin_program, prepare, share_all};
use crate::skeletons::datagram::DatagramSkelBuilder;

/// Loads one variant of the program for one address; only then pins it and its maps.
pub(crate) fn load_program(
    dir: &Path,
    (address, addresses): (usize, usize),
    walk: bool,
) -> Result<(), Error> {
    let mut storage = MaybeUninit::uninit();
    let mut open = DatagramSkelBuilder::default()
        .open(&mut storage)
        .map_err(bpf_step("reading the BPF object"))?;
    if let Some(constants) = &mut open.maps.rodata_data {
        constants.address_number = address as u32;
        constants.address_count = addresses as u32;
    }
    open.progs.wakeone_datagram.set_autoload(false);
    open.progs.wakeone_datagram_walk.set_autoload(false);
    let (name, program) = if walk {
        (
            "wakeone_datagram_walk",
            &mut open.progs.wakeone_datagram_walk,
        )
    } else {
        ("wakeone_datagram", &mut open.progs.wakeone_datagram)
    };
    prepare(program);
    // Nothing is counted, so nothing is tagged.
    open.maps
        .tags
        .set_autocreate(false)
        .map_err(bpf_step("leaving out the map tags"))?;
    let names = [
        "table".to_owned(),
        "listeners".to_owned(),
        format!("sockets-{address}"),
        format!("homes-{address}"),
        NOTICES.to_owned(),
    ];
    let maps = [
        &mut open.maps.data_table,
        &mut open.maps.listeners,
        &mut open.maps.sockets,
        &mut open.maps.homes,
        &mut open.maps.notices,
    ];
    let new = share_all(maps, dir, &names)?;
    let mut loaded = attempt(name, || open.load())?;
    let program = if walk {
        &mut loaded.progs.wakeone_datagram_walk
    } else {
        &mut loaded.progs.wakeone_datagram
    };
    pin_program(program, dir, address, walk)?;
    let maps = [
        &mut loaded.maps.data_table,
        &mut loaded.maps.listeners,
        &mut loaded.maps.sockets,
        &mut loaded.maps.homes,
        &mut loaded.maps.notices,
    ];
    pin_new(maps, dir, &names, new)
}
