//! One queue, the right worker: steers the workers that share a listener, or several, from outside. It needs no BPF.
//!
//! Connections wait in the one queue that they share there. [`wakeone_model::arming`] decides who of them is woken,
//! [`wakeone_kernel::socket::arming`] changes their epoll entries, and this crate stands between: it finds the workers
//! ([`members`]), counts their connections ([`loads`]), and looks some two hundred times a second ([`SharedGroup`]).

mod control;
mod group;
mod listener;
mod loads;
mod members;
mod shares;
mod slots;
mod steerer;

pub use group::SharedGroup;
pub use members::{Shared, Unsteerable, examine};
pub use slots::Slots;
