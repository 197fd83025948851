//! Loading a group's programs and maps, one program after the other.
//!
//! The selection program is required. Reading the accept queues in the program and counting connections are optional
//! features: the loader names each one that this kernel or our privileges lack, and loads the rest without it. The
//! verifier sees each program once.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use libbpf_rs::MapType;
use wakeone_kernel::capability::Capability;

use crate::error::Error;
use crate::object::{program_name, take_message};
use crate::pinned::{BUILD, Pinned, remove_pins};
use crate::{datagram, dispatch, join, lookup, quic};
use wakeone_kernel::capability;
use wakeone_kernel::socket::private::Place;

/// The plan of a load.
#[derive(Debug, Clone, Copy)]
pub struct LoadPlan<'a> {
    /// The group's final folder on bpffs.
    pub dir: &'a Path,
    /// How many listeners each slot has: one reuseport group, one program, one array of sockets for each.
    pub addresses: usize,
    /// The cgroup that the listeners were created in, or for QUIC the one that the workers run in; `None` leaves connections
    /// uncounted.
    pub cgroup: Option<&'a Path>,
    /// Have the program read the accept queues itself where it may; otherwise it goes by the published lengths.
    pub read_queues: bool,
    /// The sockets are of UDP. Nothing is counted then.
    pub datagrams: bool,
    /// They are for QUIC: packets go by the IDs of their connections. Those are learned from what the processes of `cgroup`
    /// send.
    pub quic: bool,
    /// The public address and the private port of each address, where the listeners are on private ports; else empty.
    pub lookup: &'a [Place],
    /// The ports that the workers, which run in `cgroup`, bind themselves and share; else empty.
    pub joins: &'a [u16],
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
    loading.learn()?;
    loading.look_up()?;
    loading.join()?;
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
        if self.plan.quic {
            quic::load_program(self.dir, (address, self.plan.addresses), walk)
        } else if self.plan.datagrams {
            datagram::load_program(self.dir, (address, self.plan.addresses), walk)
        } else {
            let sockets = match self.plan.lookup {
                [] => MapType::ReuseportSockarray,
                _ => MapType::Sockmap,
            };
            dispatch::load_program(self.dir, (address, self.plan.addresses), walk, sockets)
        }
    }

    fn count(&mut self) {
        let Some(cgroup) = self.plan.cgroup.filter(|_| !self.plan.datagrams) else {
            return;
        };
        if !allowed(Capability::CAP_NET_ADMIN) {
            self.lack(Feature::Counting, "it needs CAP_NET_ADMIN".into());
        } else if let Err(error) = dispatch::load_counting(self.dir, cgroup) {
            self.lack(Feature::Counting, error.to_string());
        }
    }

    /// Has the IDs of connections learned.
    fn learn(&self) -> Result<(), Error> {
        match self.plan.cgroup {
            _ if !self.plan.quic => Ok(()),
            Some(cgroup) => quic::load_learning(self.dir, cgroup),
            None => Err(Error {
                step: "learning the connection IDs of QUIC".into(),
                source: std::io::Error::other("that takes a cgroup2 that the workers run in"),
            }),
        }
    }

    /// Has the public addresses lead to the sockets. They are in the map only once they listen.
    fn look_up(&self) -> Result<(), Error> {
        for (address, place) in self.plan.lookup.iter().enumerate() {
            lookup::attach(self.dir, address, place, self.plan.cgroup)?;
        }
        Ok(())
    }

    /// Has the workers' own listeners join the groups.
    fn join(&self) -> Result<(), Error> {
        match (self.plan.joins, self.plan.cgroup) {
            ([], _) => Ok(()),
            (ports, Some(cgroup)) => join::attach(self.dir, ports, cgroup),
            (_, None) => Err(Error {
                step: "having the workers share an address".into(),
                source: std::io::Error::other("that takes a cgroup2 that they run in"),
            }),
        }
    }

    fn lack(&mut self, feature: Feature, why: String) {
        tracing::debug!("{feature:?} is missing: {why}");
        self.missing.push(Missing { feature, why });
    }
}

/// Whether this process may do the things that a capability allows a loader: CAP_SYS_ADMIN allows them too.
fn allowed(capability: Capability) -> bool {
    capability::has_over_all(capability) || capability::has_over_all(Capability::CAP_SYS_ADMIN)
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
