//! Looks at running servers without touching them: who listens, how they accept, what becomes of connections.
//!
//! Everything is read from sock_diag and /proc, and from tracepoints where that is allowed; nothing is stopped, no
//! descriptor's flags are changed, and a descriptor that must be duplicated is closed at once.

pub mod find;
pub mod target;
pub mod text;
pub mod watcher;

pub use find::{Found, find};
pub use target::Target;
pub use watcher::Watcher;

/// What went wrong, in a sentence for the user.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing listens there.
    #[error("{0}")]
    NotFound(String),
    /// The kernel did not answer.
    #[error("{what} failed: {source}")]
    Kernel {
        /// What was asked.
        what: &'static str,
        /// What it said.
        source: std::io::Error,
    },
}
