//! The control plane: what groups write down ([`state`]), where ([`paths`]), how they are named, and what a process that
//! steers them is asked and told.

pub mod account;
pub mod control;
pub mod endpoint;
pub mod identity;
pub mod move_log;
pub mod named;
pub mod orphans;
pub mod paths;
pub mod policy;
pub mod privileges;
pub mod repair;
pub mod reserved;
pub mod state;
pub mod status;
pub mod steer;
pub mod taken_out;

#[cfg(test)]
#[path = "../../../tests/support/foreign.rs"]
mod foreign;
