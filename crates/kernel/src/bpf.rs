//! Loading, pinning and finding again the programs and maps of a group.
//!
//! A group is a folder on bpffs. Loading fills a temporary folder and renames it as its last step; whoever finds the
//! final name finds all of it. After that, and after a restart, everything is reached through the pins alone.

use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{MapCore, MapFlags, MapHandle, MapMut, OpenMapMut, Program, ProgramMut};

use crate::skeletons::dispatch::{DispatchSkel, DispatchSkelBuilder, OpenDispatchSkel};
use crate::table::Table;
use crate::{datagram, socket};

pub use crate::skeletons::dispatch::types;

/// A step of loading that failed, and the kernel's answer.
#[derive(Debug, thiserror::Error)]
#[error("{step} failed: {source}")]
pub struct Error {
    /// What was tried.
    pub step: String,
    /// What the kernel said.
    pub source: io::Error,
}

impl Error {
    fn at<E: Into<io::Error>>(step: impl Into<String>) -> impl FnOnce(E) -> Self {
        let step = step.into();
        move |source| Self {
            step,
            source: source.into(),
        }
    }
}

fn from_bpf(error: libbpf_rs::Error) -> io::Error {
    match error.kind() {
        libbpf_rs::ErrorKind::PermissionDenied => io::Error::from_raw_os_error(nix::libc::EPERM),
        _ => io::Error::other(error.to_string()),
    }
}

/// libbpf's answer to a step, as an error that tells both; what was not permitted is still told apart.
pub(crate) fn failed(step: &str, error: &libbpf_rs::Error) -> io::Error {
    let kind = match error.kind() {
        libbpf_rs::ErrorKind::PermissionDenied => io::ErrorKind::PermissionDenied,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, format!("{step} failed: {error}"))
}

pub(crate) fn bpf_step(step: impl Into<String>) -> impl FnOnce(libbpf_rs::Error) -> Error {
    let step = step.into();
    move |source| Error {
        step,
        source: from_bpf(source),
    }
}

/// What to load.
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
}

/// Loads a group's programs and maps, and pins all of it.
///
/// # Errors
/// Which step failed; nothing is left then. `EPERM`: a capability is missing.
pub fn load(plan: &LoadPlan<'_>) -> Result<Pinned, Error> {
    libbpf_rs::set_print(Some((libbpf_rs::PrintLevel::Warn, quietly)));
    let temporary = Temporary::beside(plan.dir)?;
    let dir = &temporary.0;
    for address in 0..plan.addresses {
        load_address(plan, dir, address)?;
    }
    fs::rename(dir, plan.dir).map_err(Error::at(format!(
        "renaming the pins to {}",
        plan.dir.display()
    )))?;
    std::mem::forget(temporary);
    Pinned::open(plan.dir)
}

/// What libbpf has to say goes to the log's debug level: our own errors name step and reason.
fn quietly(_: libbpf_rs::PrintLevel, text: String) {
    tracing::debug!(target: "libbpf", "{}", text.trim_end());
}

fn load_address(plan: &LoadPlan<'_>, dir: &Path, address: usize) -> Result<(), Error> {
    let cgroup = match plan.cgroup {
        Some(path) if address == 0 => {
            Some(fs::File::open(path).map_err(Error::at(format!("opening {}", path.display())))?)
        }
        _ => None,
    };
    let load_programs = |walk| {
        if plan.datagrams {
            datagram::load_program(dir, address, walk)
        } else {
            load_programs(dir, address, cgroup.as_ref(), walk)
        }
    };
    // Reading the queues where they are needs CAP_PERFMON and a kernel that knows the call: try, then do without.
    match load_programs(plan.read_queues) {
        // Later steps do not depend on it, and have left pins that would be in the way.
        Err(error) if plan.read_queues && error.step == LOADING => {
            tracing::debug!("accept queues cannot be read in the program: {error}");
            load_programs(false)
        }
        done => done,
    }
}

/// The step that the verifier may refuse.
pub(crate) const LOADING: &str = "loading the dispatch program";

/// Loads the programs for one address; only then pins them and their maps. `cgroup`: count connections there.
fn load_programs(
    dir: &Path,
    address: usize,
    cgroup: Option<&fs::File>,
    walk: bool,
) -> Result<(), Error> {
    let mut storage = MaybeUninit::uninit();
    let mut open = DispatchSkelBuilder::default()
        .open(&mut storage)
        .map_err(bpf_step("reading the BPF object"))?;
    open.progs.wakeone_dispatch.set_autoload(!walk);
    open.progs.wakeone_dispatch_walk.set_autoload(walk);
    open.progs.wakeone_count.set_autoload(cgroup.is_some());
    if address > 0 {
        share_maps(&mut open, dir)?;
    }
    let mut loaded = open.load().map_err(bpf_step(LOADING))?;
    let program = if walk {
        &mut loaded.progs.wakeone_dispatch_walk
    } else {
        &mut loaded.progs.wakeone_dispatch
    };
    pin_program(program, dir, address, walk)?;
    pin_maps(&mut loaded, dir, address)?;
    match cgroup {
        Some(cgroup) => start_counting(&mut loaded, dir, cgroup),
        None => Ok(()),
    }
}

/// Attaches the counting program for good: a link that came off while connections close would leave the counts
/// wrong, so it is pinned.
fn start_counting(
    loaded: &mut DispatchSkel<'_>,
    dir: &Path,
    cgroup: &fs::File,
) -> Result<(), Error> {
    let count = &mut loaded.progs.wakeone_count;
    count
        .pin(dir.join("count"))
        .map_err(bpf_step("pinning the counting program"))?;
    let mut link = count
        .attach_cgroup(cgroup.as_raw_fd())
        .map_err(bpf_step("attaching the counting program to the cgroup"))?;
    link.pin(dir.join("count_link"))
        .map_err(bpf_step("pinning the counting program's link"))
}

/// The table, and what counting needs, are one for all addresses.
const SHARED: [&str; 4] = ["table", "listeners", "moved", "tags"];

fn share_maps(open: &mut OpenDispatchSkel<'_>, dir: &Path) -> Result<(), Error> {
    let maps = [
        &mut open.maps.data_table,
        &mut open.maps.listeners,
        &mut open.maps.moved,
        &mut open.maps.tags,
    ];
    SHARED
        .iter()
        .zip(maps)
        .try_for_each(|(name, map)| share_map(map, dir, name))
}

fn pin_maps(loaded: &mut DispatchSkel<'_>, dir: &Path, address: usize) -> Result<(), Error> {
    pin_map(&mut loaded.maps.sockets, dir, &format!("sockets-{address}"))?;
    if address > 0 {
        return Ok(());
    }
    let maps = [
        &mut loaded.maps.data_table,
        &mut loaded.maps.listeners,
        &mut loaded.maps.moved,
        &mut loaded.maps.tags,
    ];
    SHARED
        .iter()
        .zip(maps)
        .try_for_each(|(name, map)| pin_map(map, dir, name))
}

/// Has a map that is not loaded yet be the one that is pinned under a name.
pub(crate) fn share_map(map: &mut OpenMapMut<'_>, dir: &Path, name: &str) -> Result<(), Error> {
    map.reuse_pinned_map(dir.join(name))
        .map_err(bpf_step(format!("sharing the map {name}")))
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

fn program_name(address: usize, walk: bool) -> String {
    let kind = if walk { "walk" } else { "plain" };
    format!("dispatch-{address}-{kind}")
}

fn open_program(path: &Path) -> Result<OwnedFd, Error> {
    Program::fd_from_pinned_path(path).map_err(bpf_step(format!("opening {}", path.display())))
}

/// A temporary folder of pins that goes away with all its contents unless renamed.
struct Temporary(PathBuf);

impl Temporary {
    fn beside(dir: &Path) -> Result<Self, Error> {
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        // No dots: bpffs keeps them for itself (kernel/bpf/inode.c).
        let path = dir.with_file_name(format!("{TEMPORARY}{}-{name}", std::process::id()));
        fs::create_dir(&path).map_err(Error::at(format!("making {}", path.display())))?;
        Ok(Self(path))
    }
}

/// What the names of half-made groups begin with.
pub const TEMPORARY: &str = "tmp-";

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Err(error) = remove_pins(&self.0) {
            tracing::warn!("cannot remove {}: {error}", self.0.display());
        }
    }
}

/// Removes a folder of pins, whatever is in it. What is pinned there goes away when nobody else holds it.
///
/// # Errors
/// What the file system says; nothing where the folder does not exist.
pub fn remove_pins(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Takes every socket out of a pinned group's arrays, so that another group's can have them: a socket stands in one
/// array only, and the attached program keeps its array alive when the pins are gone.
pub fn empty_arrays(dir: &Path) {
    for address in 0.. {
        let path = dir.join(format!("sockets-{address}"));
        let Ok(sockets) = MapHandle::from_pinned_path(&path) else {
            return;
        };
        for slot in 0..sockets.max_entries() {
            let _ = sockets.delete(&slot.to_ne_bytes());
        }
    }
}

/// A loaded group, held through its pins.
#[derive(Debug)]
pub struct Pinned {
    dir: PathBuf,
    table: Table,
    listeners: MapHandle,
    /// What counting connections takes; a group of UDP sockets has none.
    counts: Option<Counts>,
    addresses: Vec<Address>,
    counting: bool,
}

#[derive(Debug)]
struct Counts {
    moved: MapHandle,
    tags: MapHandle,
}

/// What one address of a group has to itself.
#[derive(Debug)]
struct Address {
    sockets: MapHandle,
    program: OwnedFd,
    /// The program reads the accept queues itself.
    walks: bool,
}

impl Pinned {
    /// Opens a group by its pins.
    ///
    /// # Errors
    /// What is missing, or may not be opened.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let map = |name: &str| {
            MapHandle::from_pinned_path(dir.join(name))
                .map_err(bpf_step(format!("opening {}", dir.join(name).display())))
        };
        let table = map("table")?;
        let table = Table::map(table.as_fd(), true).map_err(Error::at("mapping the table"))?;
        let mut addresses = Vec::new();
        while dir.join(format!("sockets-{}", addresses.len())).exists() {
            let number = addresses.len();
            let walks = dir.join(program_name(number, true)).exists();
            let program = dir.join(program_name(number, walks));
            addresses.push(Address {
                sockets: map(&format!("sockets-{number}"))?,
                program: open_program(&program)?,
                walks,
            });
        }
        Ok(Self {
            table,
            listeners: map("listeners")?,
            counts: if dir.join("tags").exists() {
                Some(Counts {
                    moved: map("moved")?,
                    tags: map("tags")?,
                })
            } else {
                None
            },
            addresses,
            counting: dir.join("count_link").exists(),
            dir: dir.to_owned(),
        })
    }

    /// The folder of its pins.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The shared table.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Addresses (reuseport groups) that it dispatches.
    pub fn addresses(&self) -> usize {
        self.addresses.len()
    }

    /// Whether connections are counted.
    pub fn counting(&self) -> bool {
        self.counting
    }

    /// Whether the program reads the accept queues' lengths itself.
    pub fn walks(&self) -> bool {
        !self.addresses.is_empty() && self.addresses.iter().all(|address| address.walks)
    }

    /// Entries in the map of connections that were moved and still live.
    pub fn moved(&self) -> usize {
        self.counts
            .as_ref()
            .map_or(0, |counts| counts.moved.keys().count())
    }

    /// The slot that a listener, by its cookie, was made known for.
    pub fn slot_of(&self, cookie: u64) -> Option<usize> {
        let found = self.listeners.lookup(&cookie.to_ne_bytes(), MapFlags::ANY);
        let bytes: [u8; 4] = found.ok()??.try_into().ok()?;
        Some(u32::from_ne_bytes(bytes) as usize).filter(|slot| *slot < crate::table::MAX_SLOTS)
    }

    /// Makes a listener known: its connections are counted for the slot.
    ///
    /// # Errors
    /// What the maps say.
    pub fn know_listener(&self, slot: usize, listener: impl AsFd) -> Result<(), Error> {
        let fd = listener.as_fd();
        let cookie = socket::cookie(fd).map_err(Error::at("asking for the listener's cookie"))?;
        let slot = u32::try_from(slot).unwrap_or(u32::MAX);
        self.listeners
            .update(&cookie.to_ne_bytes(), &slot.to_ne_bytes(), MapFlags::ANY)
            .map_err(bpf_step("noting the listener"))?;
        let Some(counts) = &self.counts else {
            return Ok(());
        };
        let mut tag = [0; 8];
        tag[..4].copy_from_slice(&slot.to_ne_bytes());
        counts
            .tags
            .update(&fd.as_raw_fd().to_ne_bytes(), &tag, MapFlags::ANY)
            .map_err(bpf_step("tagging the listener"))
    }

    /// Makes room in the table of listeners: one that is gone, by its cookie.
    pub fn forget_listener(&self, cookie: u64) {
        let _ = self.listeners.delete(&cookie.to_ne_bytes());
    }

    /// Puts a listening TCP socket, or a bound UDP socket, into the array of its address, whatever stood there.
    ///
    /// # Errors
    /// `EINVAL` for a socket that does not listen, or of UDP one that is not bound with `SO_REUSEPORT`; a sentence for one
    /// that speaks MPTCP, which cannot be steered.
    pub fn put(&self, address: usize, slot: usize, listener: impl AsFd) -> Result<(), Error> {
        let sockets = &self.addresses[address].sockets;
        let key = u32::try_from(slot).unwrap_or(u32::MAX).to_ne_bytes();
        // It stands there: it must not be missed for the moment between delete and update. (User space reads cookies.)
        let there = sockets.lookup(&key, MapFlags::ANY).ok().flatten();
        if let (Some(there), Ok(cookie)) = (there, socket::cookie(&listener))
            && there == cookie.to_ne_bytes()
        {
            return Ok(());
        }
        // A socket fits in one place only: an update over itself is EBUSY.
        let _ = sockets.delete(&key);
        let fd = u64::try_from(listener.as_fd().as_raw_fd()).unwrap_or(u64::MAX);
        sockets
            .update(&key, &fd.to_ne_bytes(), MapFlags::ANY)
            .map_err(|error| Error {
                step: format!("putting the listener into slot {slot}"),
                source: if socket::is_mptcp(&listener) {
                    io::Error::other(
                        "it is an MPTCP socket, which the kernel lets no program choose; listen by TCP (a Go server: GODEBUG=multipathtcp=0)",
                    )
                } else {
                    from_bpf(error)
                },
            })
    }

    /// Lets the program choose for the whole reuseport group of this member.
    ///
    /// # Errors
    /// What setsockopt says.
    pub fn attach(&self, address: usize, member: impl AsFd) -> Result<(), Error> {
        socket::attach_reuseport(member, self.addresses[address].program.as_fd())
            .map_err(Error::at("attaching the dispatch program"))
    }

    /// Run count and run time of each program, where the kernel keeps statistics.
    pub fn run_statistics(&self) -> Vec<RunStatistics> {
        let dispatch = self
            .addresses
            .iter()
            .enumerate()
            .filter_map(|(number, address)| {
                run_statistics(format!("dispatch-{number}"), address.program.as_fd())
            });
        let count = Program::fd_from_pinned_path(self.dir.join("count"))
            .ok()
            .and_then(|fd| run_statistics("count".into(), fd.as_fd()));
        dispatch.chain(count).collect()
    }
}

/// What the kernel counted of a program while statistics were on.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct RunStatistics {
    /// `dispatch-N` for the Nth address, or `count`.
    pub name: String,
    /// Times it ran.
    pub run_cnt: u64,
    /// Time it took in all, in ns.
    pub run_time_ns: u64,
}

fn run_statistics(name: String, program: BorrowedFd<'_>) -> Option<RunStatistics> {
    let mut info = libbpf_rs::libbpf_sys::bpf_prog_info::default();
    let mut size = size_of_val(&info) as u32;
    // SAFETY: `info` is a zeroed bpf_prog_info of `size` bytes: all its pointers are null and their lengths 0.
    let done = unsafe {
        libbpf_rs::libbpf_sys::bpf_prog_get_info_by_fd(program.as_raw_fd(), &mut info, &mut size)
    };
    (done == 0).then_some(RunStatistics {
        name,
        run_cnt: info.run_cnt,
        run_time_ns: info.run_time_ns,
    })
}
