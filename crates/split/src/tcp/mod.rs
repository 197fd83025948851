//! Listeners that several processes share.

pub(crate) mod listeners;
pub(crate) mod shared;
