//! The lock around accept that servers needed on kernels that woke everyone, in the kinds that
//! Apache offers.

use std::os::fd::{AsRawFd, OwnedFd};

use crate::system::process_mutex::{Held, ProcessMutex};
use rustix::fs::{
    CWD, FlockOperation, MemfdFlags, Mode, OFlags, fcntl_lock, flock, memfd_create, openat,
};
use rustix::io::Errno;

use crate::Error;
use crate::listener::Faults;
use crate::options::AcceptLock;

/// The lock of one worker.
#[derive(Debug)]
pub enum Lock {
    /// No lock.
    None,
    /// flock(2): belongs to the open file description, so each worker opens the file itself.
    Flock(OwnedFd),
    /// fcntl(2): belongs to the process.
    Fcntl(OwnedFd),
    /// A robust mutex in shared memory.
    Pthread(ProcessMutex),
}

/// Holds the turn until it is dropped.
#[derive(Debug)]
pub enum Turn<'a> {
    /// No lock.
    Free,
    /// Unlocked when it is dropped.
    Flock(&'a OwnedFd),
    /// Unlocked when it is dropped.
    Fcntl(&'a OwnedFd),
    /// Unlocks itself.
    Pthread(Held<'a>),
}

impl Lock {
    /// The lock, for the process that forks the workers.
    ///
    /// # Errors
    /// [`Error::AcceptLock`].
    pub fn new(kind: AcceptLock) -> Result<Self, Error> {
        let file = || memfd_create("accept-lock", MemfdFlags::CLOEXEC);
        Ok(match kind {
            AcceptLock::None => Self::None,
            AcceptLock::Flock => Self::Flock(file().map_err(failed)?),
            AcceptLock::Fcntl => Self::Fcntl(file().map_err(failed)?),
            AcceptLock::Pthread => Self::Pthread(ProcessMutex::new().map_err(failed)?),
        })
    }

    /// Makes the lock a worker's own; called in the worker.
    ///
    /// # Errors
    /// [`Error::AcceptLock`].
    pub fn for_worker(self) -> Result<Self, Error> {
        Ok(match self {
            Self::Flock(file) => {
                let path = format!("/proc/self/fd/{}", file.as_raw_fd());
                let flags = OFlags::RDWR | OFlags::CLOEXEC;
                Self::Flock(openat(CWD, path, flags, Mode::empty()).map_err(failed)?)
            }
            other => other,
        })
    }

    /// Waits for the turn; returns `None` when a signal came first.
    pub fn acquire(&self, faults: &Faults) -> Option<Turn<'_>> {
        let locked = match self {
            Self::None => Ok(Turn::Free),
            Self::Flock(file) => {
                flock(file, FlockOperation::LockExclusive).map(|()| Turn::Flock(file))
            }
            Self::Fcntl(file) => {
                fcntl_lock(file, FlockOperation::LockExclusive).map(|()| Turn::Fcntl(file))
            }
            Self::Pthread(mutex) => mutex.lock().map(Turn::Pthread).map_err(|error| {
                Errno::from_raw_os_error(error.raw_os_error().unwrap_or_default())
            }),
        };
        match locked {
            Ok(turn) => Some(turn),
            Err(Errno::INTR) => None,
            Err(error) => {
                faults.count(error);
                std::thread::sleep(std::time::Duration::from_millis(10));
                None
            }
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // Unlocking a held lock does not fail.
        let _ = match self {
            Self::Flock(file) => flock(file, FlockOperation::Unlock),
            Self::Fcntl(file) => fcntl_lock(file, FlockOperation::Unlock),
            Self::Free | Self::Pthread(_) => Ok(()),
        };
    }
}

fn failed(source: impl Into<std::io::Error>) -> Error {
    Error::AcceptLock(source.into())
}
