//! Plain data and pure functions: snapshots, histograms, judgements. No I/O.

pub mod judge;
