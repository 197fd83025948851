//! Discrete events in virtual time: many workers, on a machine that need not be here.
//!
//! Each choice is made by `bpf/policy.h` in its native build, and each look of the agent is judged by `wakeone-model`:
//! the simulator has no second copy of either. It adds the workers, their CPUs, the queues and the load. The same seed
//! gives the same result.

mod agent;
mod clock;
mod engine;
mod load;
mod outcome;
mod steering;
pub mod theory;
mod workers;

pub use engine::{Setup, Wake, Way, run};
pub use load::{Arrivals, Error, Load, Service};
pub use outcome::Outcome;
