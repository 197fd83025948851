//! Plain data and pure functions: snapshots, histograms, judgements. No I/O.

pub mod accept;
pub mod judge;
pub mod listener;
pub mod waits;
