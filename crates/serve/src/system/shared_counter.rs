//! Counters in a file, shared by all the processes that open it, without a lock: no process waits for one that was
//! stopped or killed while it counted.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

/// Bytes from one counter to the next: a line of the cache, so that counting in one does not slow another.
const STRIDE: usize = 64;

/// 64-bit counters in a file (native byte order), 64 bytes apart. They survive the end of
/// all processes, however they end, and the machine's as far as the file system wrote them back.
#[derive(Debug)]
pub struct SharedCounters {
    mapped: NonNull<AtomicU64>,
    length: NonZeroUsize,
    /// Kept so that the descriptor's number is not taken for something else in a listing.
    _file: File,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is only used atomically.
unsafe impl Send for SharedCounters {}
// SAFETY: as above.
unsafe impl Sync for SharedCounters {}

impl SharedCounters {
    /// Opens `count` counters in `path`, at 0 where the file is new.
    ///
    /// # Errors
    /// The error of opening, growing or mapping the file.
    pub fn open(path: &Path, count: usize) -> io::Result<Self> {
        // The last one ends the file: a single counter is a file of 8 bytes.
        let before_last = count.checked_sub(1).and_then(|n| n.checked_mul(STRIDE));
        let length = before_last
            .and_then(|bytes| NonZeroUsize::new(bytes + size_of::<u64>()))
            .ok_or(io::ErrorKind::InvalidInput)?;
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        if file.metadata()?.len() < length.get() as u64 {
            file.set_len(length.get() as u64)?;
        }
        // SAFETY: a new mapping at an address of the kernel's choice, of a file that has these bytes. Truncating the
        // file behind our back would send this process a SIGBUS; the directory belongs to the server.
        let mapped = unsafe {
            mmap(
                None,
                length,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_SHARED,
                &file,
                0,
            )
        }?;
        Ok(Self {
            mapped: mapped.cast(),
            length,
            _file: file,
        })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.length.get().div_ceil(STRIDE)
    }

    /// One of them.
    ///
    /// # Panics
    /// When there are fewer counters.
    pub fn at(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.count(), "counter {index} of {}", self.count());
        // SAFETY: within the mapping, which is page aligned, lives as long as self, and is only
        // accessed atomically by everyone.
        unsafe { self.mapped.byte_add(index * STRIDE).as_ref() }
    }
}

impl Drop for SharedCounters {
    fn drop(&mut self) {
        // SAFETY: mapped in `open` with this length, and nothing refers to it any more.
        let _ = unsafe { munmap(self.mapped.cast(), self.length.get()) };
    }
}

/// One such counter, in the first 8 bytes of a file.
#[derive(Debug)]
pub struct SharedCounter(SharedCounters);

impl SharedCounter {
    /// Opens the counter in `path`, at 0 if the file is new.
    ///
    /// # Errors
    /// The error of opening, growing or mapping the file.
    pub fn open(path: &Path) -> io::Result<Self> {
        SharedCounters::open(path, 1).map(Self)
    }

    /// Counts one and gives the new count.
    pub fn increment(&self) -> u64 {
        self.0.at(0).fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The count.
    pub fn get(&self) -> u64 {
        self.0.at(0).load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_across_openings_and_threads() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("count");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let counter = SharedCounter::open(&path).expect("it opens");
                    for _ in 0..1000 {
                        counter.increment();
                    }
                });
            }
        });
        assert_eq!(SharedCounter::open(&path)?.get(), 4000);
        Ok(())
    }

    #[test]
    fn each_counts_for_itself() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("counts");
        let (one, other) = (
            SharedCounters::open(&path, 3)?,
            SharedCounters::open(&path, 3)?,
        );
        one.at(2).store(7, Ordering::Relaxed);
        let all: Vec<u64> = (0..3)
            .map(|i| other.at(i).load(Ordering::Relaxed))
            .collect();
        assert_eq!((all, other.count()), (vec![0, 0, 7], 3));
        assert!(SharedCounters::open(&path, 0).is_err());
        Ok(())
    }
}
