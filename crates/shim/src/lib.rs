//! The library that `wakeone run --split` preloads into a server's processes, and the protocol between it and the
//! broker.
//!
//! The library (`src/c`) notices when a process or thread of the server first receives from a UDP socket that others
//! receive from too. It then asks the broker in the `wakeone` process for a queue of its own. The broker makes every
//! decision.

pub mod protocol;

/// The library, to be written to a file that `LD_PRELOAD` names.
pub static LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libwakeone-split.so"));

/// The environment variable that names the broker.
pub const VARIABLE: &str = "WAKEONE_SPLIT";

#[cfg(test)]
#[path = "../../../tests/support/foreign.rs"]
mod foreign;
