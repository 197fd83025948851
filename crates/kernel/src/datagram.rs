//! The program that chooses a socket for each UDP datagram: loading and pinning. Everything else of a group is the
//! same as for connections, and in [`crate::bpf`].

use std::mem::MaybeUninit;
use std::path::Path;

use libbpf_rs::skel::{OpenSkel, SkelBuilder};

use crate::bpf::{Error, LOADING, bpf_step, pin_map, pin_program, share_map};
use crate::skeletons::datagram::DatagramSkelBuilder;

/// Loads the program for one address; only then pins it and its maps.
pub(crate) fn load_program(dir: &Path, address: usize, walk: bool) -> Result<(), Error> {
    let mut storage = MaybeUninit::uninit();
    let mut open = DatagramSkelBuilder::default()
        .open(&mut storage)
        .map_err(bpf_step("reading the BPF object"))?;
    open.progs.wakeone_datagram.set_autoload(!walk);
    open.progs.wakeone_datagram_walk.set_autoload(walk);
    // Nothing is counted, so nothing is tagged.
    open.maps
        .tags
        .set_autocreate(false)
        .map_err(bpf_step("leaving out the map tags"))?;
    if address > 0 {
        share_map(&mut open.maps.data_table, dir, "table")?;
        share_map(&mut open.maps.listeners, dir, "listeners")?;
    }
    let mut loaded = open.load().map_err(bpf_step(LOADING))?;
    let program = if walk {
        &mut loaded.progs.wakeone_datagram_walk
    } else {
        &mut loaded.progs.wakeone_datagram
    };
    pin_program(program, dir, address, walk)?;
    pin_map(&mut loaded.maps.sockets, dir, &format!("sockets-{address}"))?;
    pin_map(&mut loaded.maps.flows, dir, &format!("flows-{address}"))?;
    if address == 0 {
        pin_map(&mut loaded.maps.data_table, dir, "table")?;
        pin_map(&mut loaded.maps.listeners, dir, "listeners")?;
    }
    Ok(())
}
