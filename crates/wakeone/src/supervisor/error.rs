//! What can go wrong, each as one sentence for the user.

use super::account::AccountError;
use super::adopt::AdoptError;
use super::listen::ListenError;
use super::process::Ending;
use super::spawn::SpawnError;
use super::state::StateError;
use std::io;

/// Why there is no supervisor, or no longer one.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The options cannot be.
    #[error("{0}")]
    Usage(String),
    /// The account cannot be.
    #[error(transparent)]
    Account(#[from] AccountError),
    /// The addresses cannot be had.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The group's folder cannot be had.
    #[error(transparent)]
    State(#[from] StateError),
    /// Workers of an earlier supervisor cannot be taken over.
    #[error(transparent)]
    Adopt(#[from] AdoptError),
    /// The first workers cannot be started.
    #[error("cannot start the workers: {0}")]
    Start(#[from] SpawnError),
    /// The first workers all ended before they were ready.
    #[error(
        "the command {ending} in every slot before it was ready; what it says is above, or run it alone: {command}"
    )]
    EndsAtOnce {
        /// The command line.
        command: String,
        /// What the last of them did.
        ending: Ending,
    },
    /// New workers cannot start beside the old ones, which was asked for.
    #[error(
        "--restart start-first takes {needed} descriptors here, and the limit is {limit}; raise it with `ulimit -Hn {needed}`, or leave --restart away"
    )]
    FewDescriptors {
        /// How many it takes.
        needed: u64,
        /// How many there can be.
        limit: u64,
    },
    /// A system call failed that does not fail.
    #[error("the supervisor cannot {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

impl Error {
    /// Whether the arguments were wrong (exit code 2), not the world (1).
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            Self::Usage(_)
                | Self::Account(
                    AccountError::User(_) | AccountError::Group(_) | AccountError::NoGroup(_)
                )
        )
    }
}
