//! The errors of the supervisor, each as one sentence for the user.

use super::adopt::AdoptError;
use super::listen::ListenError;
use super::process::Ending;
use super::spawn::SpawnError;
use std::io;
use wakeone_control::account::AccountError;
use wakeone_control::state::StateError;

/// Why the supervisor cannot start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The options contradict one another.
    #[error("{0}")]
    Usage(String),
    /// The account does not exist, or may not be used.
    #[error(transparent)]
    Account(#[from] AccountError),
    /// The addresses cannot be bound.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The group's folder cannot be used.
    #[error(transparent)]
    State(#[from] StateError),
    /// Workers of an earlier supervisor cannot be taken over.
    #[error(transparent)]
    Adopt(#[from] AdoptError),
    /// The first workers cannot be started.
    #[error("cannot start the workers: {0}")]
    Start(#[from] SpawnError),
    /// The first workers all ended before they were ready.
    #[error("the command {ending} in every slot before it was ready; {advice}")]
    EndsAtOnce {
        /// What to do.
        advice: String,
        /// How the last of them ended.
        ending: Ending,
    },
    /// New workers cannot start beside the old ones, although that was requested.
    #[error(
        "--restart start-first takes {needed} descriptors here, and the limit is {limit}; raise it with `ulimit -Hn {needed}`, or leave --restart away"
    )]
    FewDescriptors {
        /// How many are needed.
        needed: u64,
        /// The limit.
        limit: u64,
    },
    /// A system call failed that normally does not.
    #[error("the supervisor cannot {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

impl Error {
    /// Whether the arguments were wrong (exit code 2), rather than the environment (1).
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

impl Error {
    /// Whether workers go on serving after a [`run`](super::Supervisor::run) that failed so, for the next supervisor to
    /// take over. Otherwise the group could not be started, and has ended.
    pub fn leaves_workers(&self) -> bool {
        !matches!(self, Self::Start(_) | Self::EndsAtOnce { .. })
    }
}
