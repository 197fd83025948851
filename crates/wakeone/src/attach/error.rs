//! Why a listener is not steered from outside.

use wakeone_control::state::StateError;
use wakeone_model::address::Address;
use wakeone_steering::dispatcher;

fn after(advice: &str) -> String {
    match advice {
        "" => String::new(),
        advice => format!("; {advice}"),
    }
}

/// Why a listener is not steered from outside, as one sentence with the way out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The listener does not allow it.
    #[error("cannot steer {address}: {why}{}", after(advice))]
    Unfit {
        /// The listener.
        address: Box<Address>,
        /// The reason.
        why: String,
        /// How the server could be started otherwise; may be empty.
        advice: String,
    },
    /// One worker takes every connection of a UNIX socket.
    #[error(
        "cannot steer {address}: one worker waits for it, and there is nothing to choose between"
    )]
    OneWorker {
        /// The listener.
        address: Box<Address>,
    },
    /// It belongs to a user who was not named.
    #[error(
        "{address} is not steered: its socket belongs to user {user}, and without being told only root's servers are steered and your own; if it is to be: attach --owner {user}, or owners = [\"{user}\"] for the target in agent.toml"
    )]
    Owner {
        /// The listener.
        address: Box<Address>,
        /// Name or number of the user who made one of its sockets.
        user: String,
    },
    /// The target means too many listeners.
    #[error(
        "{address} is not steered, nor are {others} others: a target means {most} listeners at most; name ADDRESS:PORT"
    )]
    Many {
        /// The first one that is left out.
        address: Box<Address>,
        /// How many more there are.
        others: usize,
        /// How many a target may mean.
        most: usize,
    },
    /// Looking at it failed.
    #[error(transparent)]
    Observe(#[from] wakeone_observe::Error),
    /// The kernel does not load the program. Another attempt would not change that.
    #[error("{source}{needed}")]
    Load {
        /// Its answer.
        source: dispatcher::Error,
        /// The capabilities or the kernel that it needs.
        needed: String,
    },
    /// The kernel refused.
    #[error(transparent)]
    Dispatcher(#[from] dispatcher::Error),
    /// The group's folder is not available, or somebody steers the group already.
    #[error(transparent)]
    State(#[from] StateError),
}
