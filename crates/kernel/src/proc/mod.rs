//! Other processes, seen from outside: by /proc, by their descriptors and by their memory.

pub mod counters;
pub mod doing;
pub mod exits;
pub(crate) mod line;
pub mod netstat;
pub mod networks;
pub mod process;
pub(crate) mod reader;
pub mod refusal;
pub mod sight;
pub mod stat;
pub mod threads;
pub mod waits;
