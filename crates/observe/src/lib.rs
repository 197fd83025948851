//! Observes running servers without touching them: the processes that listen, how they accept, and the fate of
//! connections.
//!
//! Everything is read from sock_diag and /proc, and from tracepoints and packet sockets if they are allowed. Nothing is stopped, no
//! descriptor's flags are changed, and a descriptor that must be duplicated is closed at once.

mod contents;
pub mod find;
mod grouping;
mod moment;
mod queued;
pub mod target;
pub mod text;
mod unread;
pub mod watcher;

pub use find::{Found, Look, elsewhere, find, find_anywhere, find_in};
pub use moment::Moment;
pub use target::Target;
pub use watcher::Watcher;

/// An error, as a sentence for the user.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing listens there.
    #[error("{0}")]
    NotFound(String),
    /// The kernel did not answer.
    #[error("{what} failed: {source}")]
    Kernel {
        /// The question to the kernel.
        what: &'static str,
        /// Its error.
        source: std::io::Error,
    },
}
