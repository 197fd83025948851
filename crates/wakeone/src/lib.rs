//! One queue for each worker and each connection into the right one: Group, Policy, Dispatcher, Rescue, Supervisor.

pub mod steer;
pub mod supervisor;
