//! Steers a server that runs already and does not know of it: its reuseport group gets our program, its open
//! connections are counted in, and its sockets are followed as they come and go.
//!
//! Wakeone keeps nothing of the server: it borrows a listener for a moment when something must be done to it. Detaching
//! takes off what was attached, and the group is as before.

mod attached;
mod candidate;
mod config;
mod elsewhere;
mod error;
mod everywhere;
mod leftovers;
mod manager;
mod one_queue;
mod pace;
mod recount;
mod search;
mod selection;
mod server;
mod servers;

pub use attached::{Attached, Presence};
pub use candidate::{AttachCandidate, Member, Sharing, examine, name_of};
pub use config::AttachConfig;
pub use error::Error;
pub use everywhere::Everywhere;
pub(crate) use manager::below_us;
pub use manager::{AttachManager, Event, Wanted};
pub use one_queue::OneQueue;
pub use selection::{MOST_GROUPS, Owners, admitted, meant, user};
pub use server::Server;
pub use servers::{Servers, WISH};
