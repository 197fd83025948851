//! The interface of the steerer and its guardian: a mapped file with the entries as the server made them, and the requests
//! on the socket between the two.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use wakeone_model::arming::Change;

use crate::socket::entries::Entry;

/// Most entries of one listener.
pub const MOST: usize = 256;

/// The first word of the file: its format.
const FORMAT: u64 = 0x5741_4b45_454e_5401;

/// Returns the change of a word.
pub(super) fn change_of(word: u32) -> Option<Change> {
    let all = [Change::Arm, Change::Disarm, Change::ToEnd];
    all.into_iter().find(|one| *one as u32 == word)
}

/// How an entry is, compared with what the server made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    /// Nobody is here.
    Free = 0,
    /// As the server made it.
    AsMade = 1,
    /// Its worker is not woken.
    Disarmed = 2,
    /// It is taken out of its set for the moment of a change.
    Out = 3,
    /// The server has removed it.
    Gone = 4,
}

impl Condition {
    /// Whether the entry is not as its server made it, and is to be.
    pub fn is_changed(self) -> bool {
        matches!(self, Self::Disarmed | Self::Out)
    }

    fn of(word: u32) -> Self {
        match word {
            1 => Self::AsMade,
            2 => Self::Disarmed,
            3 => Self::Out,
            4 => Self::Gone,
            _ => Self::Free,
        }
    }
}

/// The record of an entry.
#[repr(C)]
struct Record {
    started: AtomicU64,
    inode: AtomicU64,
    data: AtomicU64,
    pid: AtomicU32,
    events: AtomicU32,
    epoll: AtomicI32,
    number: AtomicI32,
    /// The number by which its process has the listener now. It may have been another one when the entry was made.
    held: AtomicI32,
    condition: AtomicU32,
}

#[repr(C)]
struct Layout {
    format: AtomicU64,
    /// `CLOCK_MONOTONIC` until which the steerer has promised to be back, in ns.
    due_ns: AtomicU64,
    /// How often the guardian has made everything as it was, as the steerer was late.
    releases: AtomicU64,
    reserved: AtomicU64,
    records: [Record; MOST],
}

/// The mapped file. Both processes and whoever repairs after them read it; all access is atomic.
#[derive(Debug)]
pub struct Records {
    base: NonNull<Layout>,
}

// SAFETY: the mapping is shared memory that is only ever accessed through atomics.
unsafe impl Send for Records {}
// SAFETY: as above.
unsafe impl Sync for Records {}

impl Drop for Records {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, and no reference into it outlives `self`.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), size_of::<Layout>()) };
    }
}

impl Records {
    /// Makes a file empty records.
    ///
    /// # Errors
    /// It cannot be made as long, or not be mapped.
    pub fn create(file: &File) -> io::Result<Self> {
        file.set_len(0)?;
        file.set_len(size_of::<Layout>() as u64)?;
        let all = Self::map(file)?;
        all.layout().format.store(FORMAT, Ordering::Relaxed);
        Ok(all)
    }

    /// Opens records that another process left.
    ///
    /// # Errors
    /// `InvalidData`: it is no such file. Or it cannot be mapped.
    pub fn open(file: &File) -> io::Result<Self> {
        if file.metadata()?.len() != size_of::<Layout>() as u64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let all = Self::map(file)?;
        if all.layout().format.load(Ordering::Relaxed) == FORMAT {
            Ok(all)
        } else {
            Err(io::ErrorKind::InvalidData.into())
        }
    }

    fn map(file: &File) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                size_of::<Layout>(),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file.as_fd(),
                0,
            )?
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base })
    }

    fn layout(&self) -> &Layout {
        // SAFETY: the mapping is as long, lives as long as `self`, and consists of atomics only.
        unsafe { self.base.as_ref() }
    }

    fn record(&self, at: usize) -> Option<&Record> {
        self.layout().records.get(at)
    }

    /// Writes an entry down, as its server made it. `held`: the listener's number now.
    pub(super) fn note(&self, at: usize, entry: &Entry, held: i32) {
        let Some(record) = self.record(at) else {
            return;
        };
        let order = Ordering::Relaxed;
        record.pid.store(entry.pid, order);
        record.started.store(entry.started, order);
        record.epoll.store(entry.epoll, order);
        record.number.store(entry.number, order);
        record.inode.store(entry.inode, order);
        record.events.store(entry.events, order);
        record.data.store(entry.data, order);
        record.held.store(held, order);
        self.set(at, Condition::AsMade);
    }

    /// The entry of a place as its server made it, and the number by which its process has the listener.
    pub fn entry(&self, at: usize) -> Option<(Entry, i32)> {
        let record = self.record(at)?;
        let order = Ordering::Relaxed;
        let entry = Entry {
            pid: record.pid.load(order),
            started: record.started.load(order),
            epoll: record.epoll.load(order),
            number: record.number.load(order),
            inode: record.inode.load(order),
            events: record.events.load(order),
            data: record.data.load(order),
        };
        (self.condition(at) != Condition::Free).then(|| (entry, record.held.load(order)))
    }

    /// How the entry of a place is.
    pub fn condition(&self, at: usize) -> Condition {
        let condition = |record: &Record| Condition::of(record.condition.load(Ordering::SeqCst));
        self.record(at).map_or(Condition::Free, condition)
    }

    pub(super) fn set(&self, at: usize, condition: Condition) {
        if let Some(record) = self.record(at) {
            record.condition.store(condition as u32, Ordering::SeqCst);
        }
    }

    /// Whether an entry is not as its server made it.
    pub fn is_changed(&self) -> bool {
        (0..MOST).any(|at| self.condition(at).is_changed())
    }

    /// The changes that make every entry as its server made it.
    pub(super) fn changed(&self) -> Vec<(usize, Change)> {
        let all = (0..MOST).filter(|at| self.condition(*at).is_changed());
        all.map(|at| (at, Change::Arm)).collect()
    }

    pub(super) fn due_ns(&self) -> &AtomicU64 {
        &self.layout().due_ns
    }

    pub(super) fn releases(&self) -> &AtomicU64 {
        &self.layout().releases
    }
}

/// Bytes of the head of a request, and of each change in it.
pub(super) const WORD: usize = 4;
/// The longest request.
pub(super) const MOST_BYTES: usize = WORD * (1 + 2 * MOST);
/// The first word of a request that comes with a pidfd for the place that follows.
pub(super) const ENLIST: u32 = 1;
/// That of a request to forget a place.
pub(super) const DISMISS: u32 = 2;
/// That of a request with set and listener for the place that follows.
pub(super) const LEND: u32 = 4;
/// That of changes: pairs of place and [`Change`].
pub(super) const CHANGES: u32 = 3;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_was_noted_is_read_back_by_whoever_comes_next() {
        let file = tempfile::tempfile().expect("file");
        let records = Records::create(&file).expect("records");
        let entry = Entry {
            pid: 7,
            started: 1 << 40,
            epoll: 3,
            number: 5,
            inode: 99,
            events: 0x8000_0001,
            data: u64::MAX,
        };
        records.note(2, &entry, 6);
        records.set(2, Condition::Disarmed);
        drop(records);
        let again = Records::open(&file).expect("records");
        assert_eq!(again.entry(2), Some((entry, 6)));
        assert!(again.is_changed());
        assert_eq!(again.entry(1), None);
        assert_eq!(again.entry(MOST), None);
    }

    proptest! {
        #[test]
        fn no_file_breaks_the_reader(bytes in proptest::collection::vec(any::<u8>(), 0..64), whole: bool) {
            use std::os::unix::fs::FileExt;
            let file = tempfile::tempfile().expect("file");
            file.write_all_at(&bytes, 0).expect("written");
            if whole {
                file.set_len(size_of::<Layout>() as u64).expect("longer");
            }
            if let Ok(records) = Records::open(&file) {
                for at in 0..=MOST {
                    let _ = records.entry(at);
                }
            }
        }
    }
}
