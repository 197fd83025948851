//! Where a slot's listeners are: our own, or another process's that lends them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use wakeone_kernel::process;

use crate::supervisor::adopt::inode_of;

/// A listener that another process holds. It is borrowed for a moment at a time: a descriptor kept would keep the
/// listener in its group when the server has closed it, and swallow connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lent {
    /// Who holds it.
    pub pid: u32,
    /// Its number there.
    pub fd: i32,
    /// Its inode, by which it is known to be the same.
    pub inode: u64,
}

impl Lent {
    /// The listener, for a moment.
    pub(crate) fn borrow(&self) -> io::Result<OwnedFd> {
        let listener = process::descriptor_of(self.pid, self.fd)?;
        if inode_of(&listener).unwrap_or(0) == self.inode {
            Ok(listener)
        } else {
            Err(io::ErrorKind::NotFound.into())
        }
    }
}

/// The listeners of a slot.
#[derive(Debug)]
pub enum Seat {
    /// Our own, one for each address.
    Held(Vec<OwnedFd>),
    /// Another's, of the one address that its group has.
    Lent(Lent),
    /// None: the slot is free.
    Empty,
}

impl Seat {
    /// Does something to the listener of an address.
    ///
    /// # Errors
    /// There is none, or it cannot be borrowed.
    pub fn with<R>(&self, address: usize, act: impl FnOnce(BorrowedFd<'_>) -> R) -> io::Result<R> {
        match self {
            Seat::Held(listeners) => {
                let listener = listeners.get(address).ok_or(io::ErrorKind::NotFound)?;
                Ok(act(listener.as_fd()))
            }
            Seat::Lent(lent) => Ok(act(lent.borrow()?.as_fd())),
            Seat::Empty => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Those that are our own.
    pub fn held(&self) -> &[OwnedFd] {
        match self {
            Seat::Held(listeners) => listeners,
            _ => &[],
        }
    }

    /// Their inodes.
    pub fn inodes(&self) -> Vec<u64> {
        match self {
            Seat::Held(listeners) => listeners
                .iter()
                .map(|one| inode_of(one).unwrap_or(0))
                .collect(),
            Seat::Lent(lent) => vec![lent.inode],
            Seat::Empty => Vec::new(),
        }
    }
}
