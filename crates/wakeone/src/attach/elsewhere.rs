//! Another network namespace than ours.

use std::io;

use wakeone_kernel::netns;

/// A network namespace, and how it is entered.
#[derive(Debug)]
pub struct Elsewhere {
    /// The inode of its file.
    pub namespace: u64,
    /// Processes that are in it: by them it is entered. Empty: this thread is in it itself.
    pub pids: Vec<u32>,
}

/// The processes of another network namespace than this thread's; empty: it is this thread's, or nobody knows.
pub fn inhabitants(elsewhere: Option<&Elsewhere>) -> &[u32] {
    elsewhere.map_or(&[], |there| &there.pids)
}

/// Does something there, or here.
///
/// # Errors
/// The namespace has ended, or cannot be entered.
pub fn within<T>(elsewhere: Option<&Elsewhere>, act: impl FnOnce() -> T) -> io::Result<T> {
    match elsewhere {
        Some(there) if !there.pids.is_empty() => netns::within(there.namespace, &there.pids, act),
        _ => Ok(act()),
    }
}
