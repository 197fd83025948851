//! A pthread mutex in memory that forked processes share, as Apache's accept mutex is one.

use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use nix::libc;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};

const LENGTH: NonZeroUsize = NonZeroUsize::new(size_of::<libc::pthread_mutex_t>()).unwrap();

/// A mutex for this process and all that it forks. It is robust: when its holder dies, the next
/// one gets it.
#[derive(Debug)]
pub struct ProcessMutex(NonNull<libc::pthread_mutex_t>);

// SAFETY: the mapping belongs to the process, and a pthread mutex may be used by any thread.
unsafe impl Send for ProcessMutex {}
// SAFETY: as above.
unsafe impl Sync for ProcessMutex {}

/// Holds the mutex until it is dropped, in the thread that took it.
#[derive(Debug)]
pub struct Held<'a> {
    mutex: &'a ProcessMutex,
    /// A mutex is unlocked by the thread that locked it.
    _not_send: std::marker::PhantomData<*const ()>,
}

fn check(code: libc::c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

impl ProcessMutex {
    /// A new mutex, not held.
    ///
    /// # Errors
    /// When there is no memory, or the C library cannot share robust mutexes between processes.
    pub fn new() -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let memory = unsafe {
            mmap_anonymous(
                None,
                LENGTH,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_SHARED,
            )
        }?;
        let new = Self(memory.cast());
        let mut attributes = std::mem::MaybeUninit::uninit();
        // SAFETY: the attributes are initialised by the first call before the others use them;
        // the mutex is page aligned memory of the right size that nobody else uses yet.
        unsafe {
            check(libc::pthread_mutexattr_init(attributes.as_mut_ptr()))?;
            let attributes = attributes.as_mut_ptr();
            check(libc::pthread_mutexattr_setpshared(
                attributes,
                libc::PTHREAD_PROCESS_SHARED,
            ))?;
            check(libc::pthread_mutexattr_setrobust(
                attributes,
                libc::PTHREAD_MUTEX_ROBUST,
            ))?;
            check(libc::pthread_mutex_init(new.0.as_ptr(), attributes))?;
            check(libc::pthread_mutexattr_destroy(attributes))?;
        }
        Ok(new)
    }

    /// Waits for the mutex and takes it. Signals do not end the wait.
    ///
    /// # Errors
    /// `EDEADLK` and the like: mistakes of the caller.
    pub fn lock(&self) -> io::Result<Held<'_>> {
        // SAFETY: initialised in `new`, and mapped as long as self lives.
        let code = unsafe { libc::pthread_mutex_lock(self.0.as_ptr()) };
        if code == libc::EOWNERDEAD {
            // SAFETY: this thread holds the mutex. The data it protects (whose turn it is) is
            // consistent whenever the holder dies.
            check(unsafe { libc::pthread_mutex_consistent(self.0.as_ptr()) })?;
        } else {
            check(code)?;
        }
        Ok(Held {
            mutex: self,
            _not_send: std::marker::PhantomData,
        })
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // SAFETY: held by this thread since `lock`.
        unsafe { libc::pthread_mutex_unlock(self.mutex.0.as_ptr()) };
    }
}

impl Drop for ProcessMutex {
    fn drop(&mut self) {
        // The mutex is not destroyed: other processes may be using it in their mappings.
        // SAFETY: mapped in `new` with this length, and nothing refers to it any more.
        let _ = unsafe { munmap(self.0.cast(), LENGTH.get()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excludes_threads() -> io::Result<()> {
        let mutex = ProcessMutex::new()?;
        let inside = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        let held = mutex.lock().expect("it can be locked");
                        let others = inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                        assert_eq!(others, 0);
                        inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                        drop(held);
                    }
                });
            }
        });
        Ok(())
    }

    #[test]
    fn a_dead_holder_does_not_keep_it() -> io::Result<()> {
        let mutex = ProcessMutex::new()?;
        std::thread::scope(|scope| {
            // Threads that end without unlocking are dead holders, as processes are.
            scope.spawn(|| std::mem::forget(mutex.lock()));
        });
        drop(mutex.lock()?);
        drop(mutex.lock()?);
        Ok(())
    }
}
