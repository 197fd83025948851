//! The sockets and processes of one moment, for all listeners that are followed then.

use wakeone_kernel::proc::sight::Sights;
use wakeone_kernel::socket::diag::Listening;

/// The kernel's table of listening sockets, and the processes that hold them. Each is read once for all listeners, when it is first
/// needed: processes after sockets.
#[derive(Debug)]
pub struct Moment {
    /// The listening sockets.
    pub listening: Listening,
    pub(crate) sights: Sights,
}

impl Moment {
    /// Now, for listeners at a port; 0: at any.
    pub fn at(port: u16) -> Self {
        Self {
            listening: Listening::at(port),
            sights: Sights::default(),
        }
    }
}
