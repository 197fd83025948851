//! The listeners of a slot: our own, or one that another process lends.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use wakeone_kernel::proc::process;
use wakeone_kernel::proc::waits::{Held, Processes};
use wakeone_kernel::socket::inode_of;

/// A listener that another process holds. It is borrowed for a moment at a time. A descriptor that is kept would keep
/// the listener in its group after the server has closed it, and swallow connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteFd {
    /// The process that holds it.
    pub pid: u32,
    /// Its number there.
    pub fd: i32,
    /// Its inode, which shows that it is the same socket.
    pub inode: u64,
}

impl From<&Held> for RemoteFd {
    fn from(held: &Held) -> Self {
        Self {
            pid: held.pid,
            fd: held.fd,
            inode: held.inode,
        }
    }
}

impl RemoteFd {
    /// Finds a process that holds a socket.
    pub fn find(inode: u64) -> Option<Self> {
        let all = Processes::read();
        let holder = all.held.iter().find(|held| held.inode == inode);
        holder.map(Self::from)
    }

    /// Borrows the listener for a moment.
    pub fn borrow(&self) -> io::Result<OwnedFd> {
        self.same(process::descriptor_of(self.pid, self.fd)?)
    }

    /// Returns a borrowed descriptor if it refers to the same listener.
    fn same(&self, listener: OwnedFd) -> io::Result<OwnedFd> {
        if inode_of(&listener).unwrap_or(0) == self.inode {
            Ok(listener)
        } else {
            Err(io::ErrorKind::NotFound.into())
        }
    }
}

/// A listener that is borrowed again and again. Its lender's pidfd is kept, which keeps nothing of the server alive.
#[derive(Debug)]
pub struct RemoteSocket {
    remote: RemoteFd,
    /// None if it could not be opened. Each borrowing then opens one, and reports why that fails.
    handle: Option<OwnedFd>,
}

impl RemoteSocket {
    fn borrow(&self) -> io::Result<OwnedFd> {
        match &self.handle {
            Some(handle) => self.remote.same(process::descriptor_by(
                handle,
                self.remote.pid,
                self.remote.fd,
            )?),
            None => self.remote.borrow(),
        }
    }
}

/// The listeners of a slot.
#[derive(Debug)]
pub enum SlotSockets {
    /// Our own, one for each address.
    Held(Vec<OwnedFd>),
    /// Another process's. Its group has one address.
    Remote(RemoteSocket),
    /// None: the slot is free.
    Empty,
}

impl SlotSockets {
    /// Returns the listener that another process lends.
    pub fn of(remote: RemoteFd) -> Self {
        let handle = process::handle_of(remote.pid).ok();
        SlotSockets::Remote(RemoteSocket { remote, handle })
    }

    /// Runs `act` on the listener of an address.
    ///
    /// # Errors
    /// There is none, or it cannot be borrowed.
    pub fn with<R>(&self, address: usize, act: impl FnOnce(BorrowedFd<'_>) -> R) -> io::Result<R> {
        match self {
            SlotSockets::Held(listeners) => {
                let listener = listeners.get(address).ok_or(io::ErrorKind::NotFound)?;
                Ok(act(listener.as_fd()))
            }
            SlotSockets::Remote(remote) => Ok(act(remote.borrow()?.as_fd())),
            SlotSockets::Empty => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Returns those that are our own.
    pub fn held(&self) -> &[OwnedFd] {
        match self {
            SlotSockets::Held(listeners) => listeners,
            _ => &[],
        }
    }

    /// Returns their inodes.
    pub fn inodes(&self) -> Vec<u64> {
        match self {
            SlotSockets::Held(listeners) => listeners
                .iter()
                .map(|one| inode_of(one).unwrap_or(0))
                .collect(),
            SlotSockets::Remote(remote) => vec![remote.remote.inode],
            SlotSockets::Empty => Vec::new(),
        }
    }
}

/// Duplicates the listeners of a slot as descriptors of our own.
///
/// # Errors
/// Out of descriptors.
pub fn copies<'a>(listeners: impl IntoIterator<Item = &'a OwnedFd>) -> io::Result<Vec<OwnedFd>> {
    listeners.into_iter().map(OwnedFd::try_clone).collect()
}

/// Duplicates listeners, by slot, then by address, as descriptors of our own.
///
/// # Errors
/// Out of descriptors.
pub fn duplicate<'a>(
    listeners: impl Iterator<Item = Vec<&'a OwnedFd>>,
) -> std::io::Result<Vec<Vec<OwnedFd>>> {
    listeners.map(copies).collect()
}
