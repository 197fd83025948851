//! The state file of a supervisor, so that the next one can take over workers that outlived it.
//!
//! A group has a folder `RUNTIME_DIR/NAME` (mode 0700) with `state.json` and `lock`. A supervisor holds the lock as
//! long as it lives, which tells a living one from a dead one's files. The file is read as if an attacker had written
//! it.

mod dir;
mod format;
#[cfg(test)]
mod tests;

pub use dir::{GroupDir, SOCKET, StateError, boot_id, default_runtime_dir, load, names};
pub use format::{
    Beside, Endpoint, Identity, ListenAt, MOST_ADDRESSES, MOST_SLOTS, Reserved, SCHEMA, SPLIT,
    SlotRecord, State, Task, is_name,
};
