//! Plain data and pure functions: snapshots, histograms, judgements. No I/O.

pub mod accept;
pub mod address;
pub mod advice;
pub mod arming;
pub mod backlog;
pub mod drift;
pub mod judge;
pub mod layout;
pub mod listener;
pub mod looks;
pub mod moves;
pub mod network;
pub mod quic;
pub mod reads;
pub mod snapshot;
pub mod verdict;
pub mod waits;
