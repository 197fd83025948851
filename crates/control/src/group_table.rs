//! The table of a group: that of its programs, by the pins, or a file in the group's folder where the workers share one
//! queue and no program chooses.

use std::fs::File;
use std::sync::atomic::Ordering::Relaxed;

use rustix::fs::{Mode, OFlags};
use wakeone_bpf::table::{self, ONE_QUEUE, Table};
use wakeone_bpf::{self as bpf, Pinned, RunStatistics};
use wakeone_kernel::socket::arming::{self, Records};

use crate::paths::Paths;

/// The name of the file in the group's folder.
pub const FILE: &str = "table";
/// The name of the file with the workers' entries as the server made them.
pub const ENTRIES: &str = "entries";

/// The table of a group.
#[derive(Debug)]
pub enum GroupTable {
    /// Programs choose, and these are their pins.
    Pinned(Box<Pinned>),
    /// The workers share one queue.
    OneQueue(Table),
}

impl GroupTable {
    /// Opens the table of a group, of this version or another one.
    ///
    /// # Errors
    /// There is none.
    pub fn open(paths: &Paths, name: &str) -> Result<Self, bpf::Error> {
        let file = open(paths, name, FILE);
        match file.and_then(|file| Table::open(&file, true).ok()) {
            Some(table) => Ok(Self::OneQueue(table)),
            None => {
                Pinned::open(&paths.group_pins(name)).map(|pinned| Self::Pinned(Box::new(pinned)))
            }
        }
    }

    /// The table itself.
    pub fn table(&self) -> &Table {
        match self {
            Self::Pinned(pinned) => pinned.table(),
            Self::OneQueue(table) => table,
        }
    }

    /// Whether this version wrote it.
    pub fn is_ours(&self) -> bool {
        self.table().contract().load(Relaxed) == table::CONTRACT
    }

    /// Whether open connections are counted.
    pub fn counting(&self) -> bool {
        match self {
            Self::Pinned(pinned) => pinned.counting(),
            Self::OneQueue(_) => true,
        }
    }

    /// Run statistics of its programs.
    pub fn run_statistics(&self) -> Vec<RunStatistics> {
        match self {
            Self::Pinned(pinned) => pinned.run_statistics(),
            Self::OneQueue(_) => Vec::new(),
        }
    }

    /// Whether its workers share one queue.
    pub fn is_one_queue(&self) -> bool {
        self.table().flags().load(Relaxed) & ONE_QUEUE != 0
    }
}

/// Whether an agent of this boot left an entry of a worker that is not as its server made it.
pub fn has_changed_entries(paths: &Paths, name: &str) -> bool {
    let records = open(paths, name, ENTRIES).and_then(|file| Records::open(&file).ok());
    records.is_some_and(|records| records.is_changed())
}

/// Makes those entries as their server made them.
///
/// # Errors
/// One cannot be changed.
pub fn repair_entries(paths: &Paths, name: &str) -> std::io::Result<()> {
    open(paths, name, ENTRIES).map_or(Ok(()), |file| arming::repair(&file))
}

fn open(paths: &Paths, name: &str, file: &str) -> Option<File> {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let path = paths.runtime.join(name).join(file);
    Some(File::from(
        rustix::fs::open(path, flags, Mode::empty()).ok()?,
    ))
}
