//! Loading a group's programs and maps, one program after the other.
//!
//! The selection program is required. Reading the accept queues in the program and counting connections are optional
//! features: the loader names each one that this kernel or our privileges lack, and loads the rest without it. The
//! verifier sees each program once.

use std::cell::RefCell;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use caps::Capability;
use libbpf_rs::btf::{Btf, types::Func};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{MapMut, MapType, OpenMapMut, OpenProgramMut, ProgramMut};

use crate::bpf::datagram;
use crate::bpf::lookup::{self, Place};
use crate::bpf::skeletons::dispatch::{
    DispatchSkel, DispatchSkelBuilder, OpenDispatchMaps, OpenDispatchSkel,
};
use crate::bpf::{BUILD, Error, Pinned, bpf_step, from_bpf, program_name, remove_pins};
use crate::capability;

/// The plan of a load.
#[derive(Debug, Clone, Copy)]
pub struct LoadPlan<'a> {
    /// The group's final folder on bpffs.
    pub dir: &'a Path,
    /// How many listeners each slot has: one reuseport group, one program, one array of sockets for each.
    pub addresses: usize,
    /// The cgroup that the listeners were created in; `None` leaves connections uncounted.
    pub cgroup: Option<&'a Path>,
    /// Have the program read the accept queues itself where it may; otherwise it goes by the published lengths.
    pub read_queues: bool,
    /// The sockets are of UDP. Nothing is counted then.
    pub datagrams: bool,
    /// The public address and the private port of each address, where the listeners are on private ports; else empty.
    pub lookup: &'a [Place],
}

/// A loaded group, and the features it was planned with and does not have.
#[derive(Debug)]
pub struct Loaded {
    /// Its programs and maps.
    pub pinned: Pinned,
    /// The missing features, each once.
    pub missing: Vec<Missing>,
}

/// A feature that a group does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// The feature.
    pub feature: Feature,
    /// The reason, as the end of a sentence.
    pub why: String,
}

/// An optional feature of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feature {
    /// The program reads the length of each queue itself; without it, it uses the lengths that the agent publishes.
    ReadQueues,
    /// Open connections are counted.
    Counting,
}

/// Loads a group's programs and maps, and pins all of it.
///
/// # Errors
/// The required step that failed; nothing is left then. `PermissionDenied`: a capability is missing.
pub fn load(plan: &LoadPlan<'_>) -> Result<Loaded, Error> {
    libbpf_rs::set_print(Some((libbpf_rs::PrintLevel::Warn, take_message)));
    let temporary = Temporary::beside(plan.dir)?;
    let mut loading = load_selection(plan, &temporary.0)?;
    loading.count();
    loading.look_up()?;
    let missing = loading.missing;
    fs::rename(&temporary.0, plan.dir).map_err(Error::at(format!(
        "renaming the pins to {}",
        plan.dir.display()
    )))?;
    std::mem::forget(temporary);
    let pinned = Pinned::open(plan.dir)?;
    pinned.table().build().store(BUILD, Ordering::Relaxed);
    Ok(Loaded { pinned, missing })
}

/// Loads the selection program of each address, with the maps that are pinned in a folder or new ones.
pub(crate) fn load_selection<'a>(
    plan: &'a LoadPlan<'a>,
    dir: &'a Path,
) -> Result<Loading<'a>, Error> {
    let mut loading = Loading {
        plan,
        dir,
        walks: false,
        missing: Vec::new(),
    };
    for address in 0..plan.addresses {
        loading.load_address(address)?;
    }
    Ok(loading)
}

/// A load under way.
pub(crate) struct Loading<'a> {
    plan: &'a LoadPlan<'a>,
    dir: &'a Path,
    /// The variant that reads the queues itself loads here.
    pub(crate) walks: bool,
    pub(crate) missing: Vec<Missing>,
}

impl Loading<'_> {
    /// The first address shows which variant loads; the others get that one. The plain one goes first: where that does
    /// not load, none does.
    fn load_address(&mut self, address: usize) -> Result<(), Error> {
        if address > 0 {
            return self.select(address, self.walks);
        }
        self.select(0, false)?;
        if !self.plan.read_queues {
            return Ok(());
        }
        if !allowed(Capability::CAP_PERFMON) {
            self.lack(Feature::ReadQueues, "it needs CAP_PERFMON".into());
            return Ok(());
        }
        match self.select(0, true) {
            Ok(()) => {
                self.walks = true;
                let plain = self.dir.join(program_name(0, false));
                fs::remove_file(plain).map_err(Error::at("removing the other program's pin"))?;
            }
            Err(error) => self.lack(Feature::ReadQueues, error.to_string()),
        }
        Ok(())
    }

    /// Loads one variant of the selection program and pins it and its maps.
    fn select(&self, address: usize, walk: bool) -> Result<(), Error> {
        if self.plan.datagrams {
            datagram::load_program(self.dir, (address, self.plan.addresses), walk)
        } else {
            let sockets = match self.plan.lookup {
                [] => MapType::ReuseportSockarray,
                _ => MapType::Sockmap,
            };
            load_dispatch(self.dir, (address, self.plan.addresses), walk, sockets)
        }
    }

    fn count(&mut self) {
        let Some(cgroup) = self.plan.cgroup.filter(|_| !self.plan.datagrams) else {
            return;
        };
        if !allowed(Capability::CAP_NET_ADMIN) {
            self.lack(Feature::Counting, "it needs CAP_NET_ADMIN".into());
        } else if let Err(error) = load_counting(self.dir, cgroup) {
            self.lack(Feature::Counting, error.to_string());
        }
    }

    /// Has the public addresses lead to the sockets. They are in the map only once they listen.
    fn look_up(&self) -> Result<(), Error> {
        for (address, place) in self.plan.lookup.iter().enumerate() {
            lookup::attach(self.dir, address, place, self.plan.cgroup)?;
        }
        Ok(())
    }

    fn lack(&mut self, feature: Feature, why: String) {
        tracing::debug!("{feature:?} is missing: {why}");
        self.missing.push(Missing { feature, why });
    }
}

/// Whether this process may do the things that a capability allows a loader: CAP_SYS_ADMIN allows them too.
fn allowed(capability: Capability) -> bool {
    capability::has(capability) || capability::has(Capability::CAP_SYS_ADMIN)
}

fn load_dispatch(
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
    let first = share_common(&mut open.maps, dir)?;
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
    if first {
        pin_common(&mut loaded, dir)?;
    }
    Ok(())
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
fn load_counting(dir: &Path, cgroup: &Path) -> Result<(), Error> {
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
    prepare(&mut open.progs.wakeone_count);
    open.maps
        .sockets
        .set_autocreate(false)
        .map_err(bpf_step("leaving out the map sockets"))?;
    share_common(&mut open.maps, dir)?;
    let mut loaded = attempt("wakeone_count", || open.load())?;
    act(&mut loaded.progs.wakeone_count)
}

/// All addresses share the table and the maps that counting needs.
const COMMON: [&str; 4] = ["table", "listeners", "moved", "tags"];

/// Has an object use the maps that all addresses share. Returns whether it is the first, which has to pin them.
fn share_common(maps: &mut OpenDispatchMaps<'_>, dir: &Path) -> Result<bool, Error> {
    let maps = [
        &mut maps.data_table,
        &mut maps.listeners,
        &mut maps.moved,
        &mut maps.tags,
    ];
    let mut first = false;
    for (name, map) in COMMON.iter().zip(maps) {
        first |= share(map, dir, name)?;
    }
    Ok(first)
}

fn pin_common(loaded: &mut DispatchSkel<'_>, dir: &Path) -> Result<(), Error> {
    let maps = [
        &mut loaded.maps.data_table,
        &mut loaded.maps.listeners,
        &mut loaded.maps.moved,
        &mut loaded.maps.tags,
    ];
    COMMON
        .iter()
        .zip(maps)
        .try_for_each(|(name, map)| pin_map(map, dir, name))
}

/// Has a map that is not loaded yet be the one that is pinned under a name. Returns whether there is none yet, so that
/// this one is to be pinned.
pub(crate) fn share(map: &mut OpenMapMut<'_>, dir: &Path, name: &str) -> Result<bool, Error> {
    let path = dir.join(name);
    if !path.exists() {
        return Ok(true);
    }
    map.reuse_pinned_map(path)
        .map_err(bpf_step(format!("sharing the map {name}")))?;
    Ok(false)
}

/// Pins a map under a name.
pub(crate) fn pin_map(map: &mut MapMut<'_>, dir: &Path, name: &str) -> Result<(), Error> {
    map.pin(dir.join(name))
        .map_err(bpf_step(format!("pinning the map {name}")))
}

/// Pins the program of an address, under a name that tells whether it reads the queues itself.
pub(crate) fn pin_program(
    program: &mut ProgramMut<'_>,
    dir: &Path,
    address: usize,
    walk: bool,
) -> Result<(), Error> {
    program
        .pin(dir.join(program_name(address, walk)))
        .map_err(bpf_step("pinning the dispatch program"))
}

/// The beginning of the step that gives a program to the verifier.
const LOADING: &str = "loading the program ";

impl Error {
    /// Whether a program did not load: it will not load the next time either.
    pub fn is_load(&self) -> bool {
        self.step.starts_with(LOADING)
    }
}

const DISPATCH: &str = "wakeone_dispatch";
const WALK: &str = "wakeone_dispatch_walk";

/// Has a program loaded with its object, once: libbpf loads a program again where the first time had no log.
pub(crate) fn prepare(program: &mut OpenProgramMut<'_>) {
    /// `BPF_LOG_STATS` (include/linux/bpf_verifier.h): the verifier's complaint and its statistics alone.
    const STATISTICS: u32 = 4;
    /// `BPF_LOG_LEVEL1`: each instruction on the way there too, which is slow.
    const INSTRUCTIONS: u32 = 1;
    let level = if tracing::enabled!(target: "verifier", tracing::Level::DEBUG) {
        STATISTICS | INSTRUCTIONS
    } else {
        STATISTICS
    };
    program.set_autoload(true);
    program.set_log_level(level);
    spoil(program);
}

/// Makes a program bad for a test that names it in `WAKEONE_TEST_BROKEN`: loaded as another type, it calls what that type
/// may not call. Release builds do not have this.
#[cfg(debug_assertions)]
fn spoil(program: &mut OpenProgramMut<'_>) {
    let broken = std::env::var("WAKEONE_TEST_BROKEN").unwrap_or_default();
    if broken.split(',').any(|name| program.name() == name) {
        program.set_prog_type(libbpf_rs::ProgramType::SocketFilter);
    }
}

#[cfg(not(debug_assertions))]
fn spoil(_: &mut OpenProgramMut<'_>) {}

thread_local! {
    /// The verifier's log of the program that this thread tries to load.
    static VERIFIER: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Logs libbpf's messages at debug level: our own errors name step and reason. Keeps the verifier's log for those.
fn take_message(_: libbpf_rs::PrintLevel, text: String) {
    const BEGIN: &str = "-- BEGIN PROG LOAD LOG --\n";
    const END: &str = "-- END PROG LOAD LOG --";
    match text.split_once(BEGIN) {
        Some((_, log)) => {
            let log = log.split(END).next().unwrap_or_default().to_owned();
            VERIFIER.replace(log);
        }
        None => tracing::debug!(target: "libbpf", "{}", text.trim_end()),
    }
}

/// Loads an object with one program. The error tells the verifier's reason; its last lines are logged.
pub(crate) fn attempt<T>(
    program: &str,
    load: impl FnOnce() -> libbpf_rs::Result<T>,
) -> Result<T, Error> {
    /// Lines of the verifier that tell where it stopped.
    const LINES: usize = 20;
    tracing::debug!("{LOADING}{program}");
    VERIFIER.take();
    load().map_err(|error| {
        let log = VERIFIER.take();
        let lines: Vec<&str> = log.lines().collect();
        for line in &lines[lines.len().saturating_sub(LINES)..] {
            tracing::debug!(target: "verifier", "{program}: {line}");
        }
        Error {
            step: format!("{LOADING}{program}"),
            source: refusal(&error, &log),
        }
    })
}

/// The kernel's error, with the verifier's reason where the verifier refused. A kernel that lacks the whole feature is
/// reported as such: the verifier would only name the first instruction that it does not know.
fn refusal(error: &libbpf_rs::Error, log: &str) -> io::Error {
    let plain = from_bpf(error);
    if moves_no_connections() {
        return io::Error::new(
            plain.kind(),
            "this kernel does not move connections from a closing listener, which came with Linux 5.14 (tested from 6.1 on)",
        );
    }
    match reason(log) {
        Some(reason) => io::Error::new(
            plain.kind(),
            format!("the kernel's verifier refuses it: {reason}"),
        ),
        None => plain,
    }
}

/// Whether the kernel's BTF is there and lacks the function that moves connections (net/core/sock_reuseport.c).
fn moves_no_connections() -> bool {
    let btf = Btf::from_vmlinux();
    btf.is_ok_and(|btf| {
        btf.type_by_name::<Func<'_>>("reuseport_migrate_sock")
            .is_none()
    })
}

/// The verifier's complaint: its last line but for the statistics.
fn reason(log: &str) -> Option<&str> {
    const STATISTICS: [&str; 3] = ["verification time ", "stack depth ", "processed "];
    let told =
        |line: &&str| !line.is_empty() && !STATISTICS.iter().any(|about| line.starts_with(about));
    log.lines().map(str::trim).rfind(told)
}

/// A temporary folder of pins that goes away with all its contents unless renamed.
pub(crate) struct Temporary(pub(crate) PathBuf);

impl Temporary {
    pub(crate) fn beside(dir: &Path) -> Result<Self, Error> {
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        // No dots: bpffs keeps them for itself (kernel/bpf/inode.c).
        let path = dir.with_file_name(format!("{TEMPORARY}{}-{name}", std::process::id()));
        fs::create_dir(&path).map_err(Error::at(format!("making {}", path.display())))?;
        Ok(Self(path))
    }
}

/// The beginning of the names of half-made groups.
pub const TEMPORARY: &str = "tmp-";

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Err(error) = remove_pins(&self.0) {
            tracing::warn!("cannot remove {}: {error}", self.0.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_complaint_stands_before_the_statistics() {
        let log = "0: R1=ctx() R10=fp0\n; int wakeone_dispatch()\ninvalid bpf_context access off=40 size=8\n\
                   verification time 12 usec\nstack depth 0\nprocessed 3 insns (limit 1000000) max_states_per_insn 0\n";
        assert_eq!(
            reason(log),
            Some("invalid bpf_context access off=40 size=8")
        );
        assert_eq!(reason("processed 3 insns\n\n"), None);
        assert_eq!(reason(""), None);
    }
}
