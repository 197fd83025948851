//! The library that `wakeone run --split` has a server's loader put before the C library, and what the two say to each
//! other.
//!
//! The library (`src/c`) sees when a process of the server first waits for connections on a listener that it shares
//! with others, and asks the broker in the `wakeone` process for a queue of its own. All that is decided is decided
//! there.

pub mod protocol;

/// The library, to be written to a file that `LD_PRELOAD` names.
pub static LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libwakeone-split.so"));

/// The environment variable that names the broker.
pub const VARIABLE: &str = "WAKEONE_SPLIT";

#[cfg(test)]
#[path = "../../../tests/support/foreign.rs"]
mod foreign;
