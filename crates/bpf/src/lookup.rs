//! Listeners on a private port, found by a program for their public address: moving their queues costs the same however
//! many connections the public port has (see `bpf/lookup.bpf.c`).

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Link, Program, ProgramMut, libbpf_sys};

use crate::error::{Error, bpf_step, from_bpf};
use wakeone_kernel::socket::private::{Place, private_ip};

use crate::object::{attempt, info_of, prepare, share};
use crate::skeletons::lookup::{LookupSkelBuilder, types};

/// An address as the kernel has it in memory.
fn words(ip: Ipv6Addr) -> [u32; 4] {
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(ip.octets().chunks_exact(4)) {
        *word = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    words
}

fn place_of(of: &Place) -> types::wakeone_place {
    let mut place = types::wakeone_place {
        any: of.public.ip().is_unspecified().into(),
        port: of.public.port().into(),
        private_port: of.private_port.into(),
        ..Default::default()
    };
    match of.public.ip() {
        IpAddr::V4(ip) => {
            place.takes_ip4 = 1;
            place.ip4 = u32::from_ne_bytes(ip.octets());
        }
        IpAddr::V6(ip) => {
            place.takes_ip4 = of.dual_stack.into();
            place.takes_ip6 = 1;
            place.listens_ip6 = (!of.dual_stack).into();
            place.ip6 = words(ip);
        }
    }
    if let IpAddr::V6(ip) = private_ip(of.public, of.dual_stack) {
        place.private_ip6 = words(ip);
    }
    place
}

/// The names of the pinned links begin with these.
const LINKS: [&str; 2] = ["lookup-", "name-"];

/// Whether a pin of a group is a link of ours.
pub(crate) fn is_pin(name: &str) -> bool {
    LINKS.iter().any(|link| name.starts_with(link))
}

/// Whether the group that is pinned there finds its listeners by a lookup program.
pub(crate) fn is_pinned(dir: &Path) -> bool {
    dir.join(format!("{}0", LINKS[0])).exists()
}

/// Directs this network namespace's connections to an address to the sockets of a pinned map, and has the sockets of a
/// cgroup show that address. Both last as long as their pins.
pub(crate) fn attach(
    dir: &Path,
    address: usize,
    place: &Place,
    cgroup: Option<&Path>,
) -> Result<(), Error> {
    let cgroup = cgroup.ok_or_else(|| Error {
        step: "having listeners show their public address".into(),
        source: io::Error::other("that takes a cgroup2 that they are created in"),
    })?;
    let open =
        |path: &Path| File::open(path).map_err(Error::at(format!("opening {}", path.display())));
    let netns = open(Path::new("/proc/thread-self/ns/net"))?;
    let cgroup = open(cgroup)?;
    if address == 0 {
        tell_earlier(&netns);
    }
    with_programs(dir, address, place, |lookup, name| {
        let link = lookup
            .attach_netns(netns.as_raw_fd())
            .map_err(|error| not_attached(&error))?;
        pin(link, dir, LINKS[0], address)?;
        let link = name
            .attach_cgroup(cgroup.as_raw_fd())
            .map_err(bpf_step("attaching the program for getsockname"))?;
        pin(link, dir, LINKS[1], address)
    })
}

/// Logs the programs of others that run before ours. Ours cannot replace their choice.
fn tell_earlier(netns: &File) {
    let others: Vec<String> = programs(netns)
        .into_iter()
        .filter(|name| name != LOOKUP)
        .collect();
    if !others.is_empty() {
        tracing::info!(
            event = "note",
            "sk_lookup programs of others ({}) were in this network namespace first: connections that one of them gives to a socket do not come here; see them with `bpftool link`",
            others.join(", ")
        );
    }
}

/// As the kernel names our own: it cuts names at 15 bytes.
const LOOKUP: &str = "wakeone_lookup";
/// As many such programs fit into a network namespace.
const MOST: usize = 64;

/// The names of the lookup programs of a network namespace, in the order in which they are asked.
fn programs(netns: &File) -> Vec<String> {
    let mut ids = [0_u32; MOST];
    let mut count = MOST as u32;
    // SAFETY: `ids` has room for `count` numbers, and the kernel writes no more than that.
    let done = unsafe {
        libbpf_sys::bpf_prog_query(
            netns.as_raw_fd(),
            libbpf_sys::BPF_SK_LOOKUP,
            0,
            std::ptr::null_mut(),
            ids.as_mut_ptr(),
            &mut count,
        )
    };
    if done != 0 {
        return Vec::new();
    }
    let name = |id: &u32| {
        let program = Program::fd_from_id(*id).ok()?;
        let name = info_of(program.as_fd())?.name;
        let bytes: Vec<u8> = name.iter().map(|byte| *byte as u8).collect();
        let end = bytes.iter().position(|byte| *byte == 0)?;
        Some(String::from_utf8_lossy(&bytes[..end]).into_owned())
    };
    ids.iter().take(count as usize).filter_map(name).collect()
}

fn not_attached(error: &libbpf_rs::Error) -> Error {
    /// The kernel's answer when a namespace has 64 such programs (E2BIG, kernel/bpf/net_namespace.c).
    const FULL: &str = "Argument list too long";
    // With its causes.
    let text = format!("{error:#}");
    let source = if text.contains(FULL) {
        io::Error::other(format!(
            "this network namespace has {MOST} such programs, and can have no more: see them with `bpftool link`, or leave --lookup away"
        ))
    } else {
        from_bpf(error)
    };
    Error {
        step: "attaching the lookup program".into(),
        source,
    }
}

fn pin(mut link: Link, dir: &Path, kind: &str, address: usize) -> Result<(), Error> {
    link.pin(dir.join(format!("{kind}{address}")))
        .map_err(bpf_step("pinning a link of the lookup programs"))
}

/// Has the links of a pinned group run the programs of this build: no connection misses them.
pub(crate) fn replace(dir: &Path, address: usize, place: &Place) -> Result<(), Error> {
    let step = || bpf_step("replacing the lookup programs");
    with_programs(dir, address, place, |lookup, name| {
        let programs: [&Program<'_>; 2] = [lookup, name];
        for (kind, program) in LINKS.iter().zip(programs) {
            let mut link = Link::open(dir.join(format!("{kind}{address}"))).map_err(step())?;
            link.update_prog(program).map_err(step())?;
        }
        Ok(())
    })
}

/// Loads the lookup program of an address, and the one for getsockname of its listeners' family.
fn with_programs(
    dir: &Path,
    address: usize,
    place: &Place,
    act: impl FnOnce(&mut ProgramMut<'_>, &mut ProgramMut<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut storage = MaybeUninit::uninit();
    let mut open = LookupSkelBuilder::default()
        .open(&mut storage)
        .map_err(bpf_step("reading the BPF object"))?;
    if let Some(constants) = &mut open.maps.rodata_data {
        constants.place = place_of(place);
    }
    let ip6 = place.public.is_ipv6();
    prepare(&mut open.progs.wakeone_lookup);
    let (own, other) = if ip6 {
        (&mut open.progs.wakeone_name6, &mut open.progs.wakeone_name4)
    } else {
        (&mut open.progs.wakeone_name4, &mut open.progs.wakeone_name6)
    };
    prepare(own);
    other.set_autoload(false);
    share(&mut open.maps.sockets, dir, &format!("sockets-{address}"))?;
    let mut loaded = attempt(LOOKUP, || open.load())?;
    let name = if ip6 {
        &mut loaded.progs.wakeone_name6
    } else {
        &mut loaded.progs.wakeone_name4
    };
    act(&mut loaded.progs.wakeone_lookup, name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use libbpf_rs::ErrorExt;

    #[test]
    fn a_namespace_that_is_full_is_told_from_other_refusals() {
        let of = |errno| {
            let error = libbpf_rs::Error::from_raw_os_error(errno);
            not_attached(&error.context("failed to attach")).to_string()
        };
        let full = of(nix::libc::E2BIG);
        assert!(full.contains("has 64 such programs"), "{full}");
        let other = of(nix::libc::EINVAL);
        assert!(!other.contains("64") && other.contains("failed"), "{other}");
    }
}
