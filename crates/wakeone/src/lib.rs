//! One queue for each worker and each connection into the right one: Group, Policy, Dispatcher, Rescue, Supervisor.

pub mod agent;
pub mod attach;
pub mod control;
pub mod detach;
pub mod dispatcher;
pub mod group;
pub mod metrics;
pub mod move_log;
pub mod named;
pub mod notify;
pub mod orphans;
pub mod paths;
pub mod policy;
mod privileges;
pub mod repair;
pub mod reserved;
pub mod slot_sockets;
pub mod split;
pub mod status;
pub mod steer;
pub mod steered;
pub mod supervisor;
mod taken_out;
pub mod udp_group;
pub mod watchdog;

#[cfg(test)]
#[path = "../../../tests/support/foreign.rs"]
mod foreign;
