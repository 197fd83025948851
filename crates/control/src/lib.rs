//! The control plane: the state files of groups ([`state`]) and their places ([`paths`]), the names of groups, and the
//! questions and answers between the commands and a process that steers.

pub mod account;
pub mod control;
pub mod group_table;
pub mod move_log;
pub mod named;
pub mod orphans;
pub mod paths;
pub mod policy;
pub mod privileges;
pub mod repair;
pub mod reserved;
pub mod scale;
pub mod state;
pub mod status;
pub mod steer;
pub mod taken_out;

#[cfg(test)]
#[path = "../../../tests/support/foreign.rs"]
mod foreign;
