//! The programs' notices that the sockets of a group changed: one began to listen, or the socket of a slot was not there.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use libbpf_rs::{MapHandle, RingBuffer, RingBufferBuilder};

use crate::error::{Error, bpf_step};

/// The name under which the map of notices is pinned.
pub(crate) const NOTICES: &str = "notices";

/// Tells of notices. Its descriptor is readable while there are some.
#[derive(Debug)]
pub struct Notices {
    ring: RingBuffer<'static>,
}

impl Notices {
    /// Opens those of a pinned group.
    ///
    /// # Errors
    /// The group was loaded by a build that has none, or the map cannot be mapped.
    pub fn of(dir: &Path) -> Result<Self, Error> {
        let step = || bpf_step("opening the notices of changed sockets");
        let map = MapHandle::from_pinned_path(dir.join(NOTICES)).map_err(step())?;
        let mut ring = RingBufferBuilder::new();
        ring.add(&map, |_| 0).map_err(step())?;
        let ring = ring.build().map_err(step())?;
        Ok(Self { ring })
    }

    /// Whether there were notices since the last call.
    pub fn take(&self) -> bool {
        self.ring.consume_raw() > 0
    }
}

impl AsFd for Notices {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring owns this descriptor, and `self` owns the ring.
        unsafe { BorrowedFd::borrow_raw(self.ring.epoll_fd()) }
    }
}
