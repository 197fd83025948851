//! A counter in a file, shared by all the processes that open it, without a lock: nobody waits
//! for a process that was stopped or killed while it counted.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

const LENGTH: NonZeroUsize = NonZeroUsize::new(8).unwrap();

/// A 64-bit counter in the first 8 bytes of a file (native byte order). It survives the end of
/// all processes, however they end, and the machine's as far as the file system wrote it back.
#[derive(Debug)]
pub struct SharedCounter {
    mapped: NonNull<AtomicU64>,
    /// Kept so that nobody takes the number of the descriptor for something else in a listing.
    _file: File,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is only used atomically.
unsafe impl Send for SharedCounter {}
// SAFETY: as above.
unsafe impl Sync for SharedCounter {}

impl SharedCounter {
    /// Opens the counter in `path`, at 0 if the file is new.
    ///
    /// # Errors
    /// What opening, growing or mapping the file says.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        if file.metadata()?.len() < 8 {
            file.set_len(8)?;
        }
        // SAFETY: a new mapping at an address of the kernel's choice, of a file that has these 8
        // bytes. Whoever truncates the file behind our back gets this process a SIGBUS: the
        // directory belongs to the server.
        let mapped = unsafe {
            mmap(
                None,
                LENGTH,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_SHARED,
                &file,
                0,
            )
        }?;
        Ok(Self {
            mapped: mapped.cast(),
            _file: file,
        })
    }

    fn value(&self) -> &AtomicU64 {
        // SAFETY: the mapping is page aligned, 8 bytes long, lives as long as self, and is only
        // accessed atomically by everyone.
        unsafe { self.mapped.as_ref() }
    }

    /// Counts one and gives the new count.
    pub fn increment(&self) -> u64 {
        self.value().fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The count.
    pub fn get(&self) -> u64 {
        self.value().load(Ordering::Relaxed)
    }
}

impl Drop for SharedCounter {
    fn drop(&mut self) {
        // SAFETY: mapped in `open` with this length, and nothing refers to it any more.
        let _ = unsafe { munmap(self.mapped.cast(), LENGTH.get()) };
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
}
