//! Why a process is given no queue of its own.

use wakeone_control::state::MOST_SLOTS;

/// Why a process stays with the socket that it has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// Nobody else has the socket.
    #[error("no other process has the socket")]
    Alone,
    /// It has a queue already.
    #[error("it has a queue of its own already")]
    Has,
    /// One of its epoll sets has the shared socket, from before the fork.
    #[error(
        "one of its epoll sets has the shared socket already (registered before the fork, or by io_uring)"
    )]
    Registered,
    /// The same for a UDP socket, where threads would have queues.
    #[error("it is in an epoll set")]
    Polled,
    /// We may not read its descriptors.
    #[error("its descriptors may not be seen: {0}")]
    Hidden(String),
    /// The server has several sockets at that address itself.
    #[error("the server has several sockets of its own at that address")]
    Several,
    /// The server has set a program of its own on the socket.
    #[error("a program of the server chooses already")]
    Chooser,
    /// There is nowhere to put another queue.
    #[error("there are {MOST_SLOTS} queues already")]
    Full,
    /// The kernel cannot make one.
    #[error("no second socket like it can be made: {0}")]
    Sibling(String),
    /// Without steering, one process must serve the shared socket itself.
    #[error("it serves the shared socket itself: nothing keeps datagrams from that")]
    First,
    /// The group's folder cannot be had, or steering failed.
    #[error("{0}")]
    Steering(String),
}

impl Reason {
    /// Whether it comes up only when a queue is made.
    pub fn is_late(&self) -> bool {
        matches!(self, Self::Sibling(_) | Self::Steering(_))
    }
}
