//! The live view of a watched server: its state, its keys, its drawing, and its recordings.
//!
//! Nothing here reads a kernel or a terminal. A [`Frame`] comes in, from a watcher or from a file; [`State`] holds the
//! data to be shown. [`draw()`] and [`plain::text`] turn it into a picture, the same for the same state.

pub mod draw;
pub mod fleet;
pub mod frame;
pub mod plain;
pub mod record;
pub mod state;
pub mod table;

#[cfg(test)]
mod fixtures;

pub use draw::draw;
pub use frame::{Frame, SlotLook, Steering};
pub use record::{BadRecording, Recorder, Replay};
pub use state::{Action, Change, Key, Source, State};

#[cfg(test)]
#[path = "../../../tests/support/foreign.rs"]
mod foreign;
