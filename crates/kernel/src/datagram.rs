//! The program that chooses a socket for each UDP datagram: loading and pinning. Everything else of a group is the
//! same as for connections, and in [`crate::bpf`].

use std::mem::MaybeUninit;
use std::path::Path;

use libbpf_rs::MapMut;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};

use crate::bpf::{Error, LOADING, bpf_step};
use skeleton::DatagramSkelBuilder;

#[allow(
    missing_docs,
    rust_2018_idioms,
    clippy::all,
    clippy::undocumented_unsafe_blocks
)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/datagram.skel.rs"));
}

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
        for (map, name) in [
            (&mut open.maps.data_table, "table"),
            (&mut open.maps.listeners, "listeners"),
        ] {
            map.reuse_pinned_map(dir.join(name))
                .map_err(bpf_step(format!("sharing the map {name}")))?;
        }
    }
    let mut loaded = open.load().map_err(bpf_step(LOADING))?;
    let (program, name) = if walk {
        (&mut loaded.progs.wakeone_datagram_walk, "walk")
    } else {
        (&mut loaded.progs.wakeone_datagram, "plain")
    };
    program
        .pin(dir.join(format!("dispatch-{address}-{name}")))
        .map_err(bpf_step("pinning the dispatch program"))?;
    let pin = |map: &mut MapMut<'_>, name: String| {
        map.pin(dir.join(&name))
            .map_err(bpf_step(format!("pinning the map {name}")))
    };
    pin(&mut loaded.maps.sockets, format!("sockets-{address}"))?;
    pin(&mut loaded.maps.flows, format!("flows-{address}"))?;
    if address == 0 {
        pin(&mut loaded.maps.data_table, "table".into())?;
        pin(&mut loaded.maps.listeners, "listeners".into())?;
    }
    Ok(())
}
