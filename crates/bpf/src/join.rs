//! Lets the workers of a cgroup, which open their own listeners, share their address (see `bpf/join.bpf.c`).

use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::path::Path;

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Link, ProgramMut};

use crate::error::{Error, bpf_step};
use crate::object::{attempt, prepare};
use crate::skeletons::join::JoinSkelBuilder;

/// The pinned links, one for each address family.
const LINKS: [&str; 2] = ["join-4", "join-6"];

/// Whether a pin of a group is a link of ours.
pub(crate) fn is_pin(name: &str) -> bool {
    LINKS.contains(&name)
}

/// From now on each socket of TCP that a process of this cgroup binds to one of these ports shares it. That lasts as long
/// as the pins.
pub(crate) fn attach(dir: &Path, ports: &[u16], cgroup: &Path) -> Result<(), Error> {
    let at = File::open(cgroup).map_err(Error::at(format!("opening {}", cgroup.display())))?;
    with_programs(ports, |name, program| {
        let mut link = program
            .attach_cgroup(at.as_raw_fd())
            .map_err(bpf_step("attaching the program for bind"))?;
        link.pin(dir.join(name))
            .map_err(bpf_step("pinning a link of the programs for bind"))
    })
}

/// Has the links of a pinned group run the programs of this build.
pub(crate) fn replace(dir: &Path, ports: &[u16]) -> Result<(), Error> {
    let step = || bpf_step("replacing the programs for bind");
    with_programs(ports, |name, program| {
        let mut link = Link::open(dir.join(name)).map_err(step())?;
        link.update_prog(program).map_err(step())
    })
}

fn with_programs(
    ports: &[u16],
    act: impl Fn(&str, &mut ProgramMut<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut storage = MaybeUninit::uninit();
    let mut open = JoinSkelBuilder::default()
        .open(&mut storage)
        .map_err(bpf_step("reading the BPF object"))?;
    if let Some(constants) = &mut open.maps.rodata_data {
        for (place, port) in constants.ports.iter_mut().zip(ports) {
            *place = u32::from(*port);
        }
    }
    prepare(&mut open.progs.wakeone_join4);
    prepare(&mut open.progs.wakeone_join6);
    let mut loaded = attempt("wakeone_join4", || open.load())?;
    act(LINKS[0], &mut loaded.progs.wakeone_join4)?;
    act(LINKS[1], &mut loaded.progs.wakeone_join6)
}
