//! Discrete events in virtual time: many workers, on a machine that need not exist.
//!
//! Each choice is made by `bpf/policy.h` in its native build, and each look of the agent, or of the steerer of one queue, is
//! judged by `wakeone-model`: the simulator has no second copy of either. It adds the workers, their CPUs, the queues and the load. The same seed
//! gives the same result.

mod agent;
mod arrivals;
mod asleep;
mod calendar;
mod datagrams;
mod engine;
mod error;
mod faults;
mod front;
mod happening;
mod kept;
mod load;
mod outcome;
mod random;
pub mod result;
mod servers;
mod service;
mod setup;
mod steerer;
mod steering;
mod syn;
pub mod theory;
mod trace;
mod workers;

pub use arrivals::Arrivals;
pub use asleep::Wake;
pub use datagrams::{Costs, Datagrams, DatagramsRead, Placement, Reading, read_datagrams};
pub use engine::{run, run_traced};
pub use error::Error;
pub use faults::{Faults, Repeated, Stop};
pub use load::{Kept, Load, Next};
pub use outcome::{Counts, Outcome};
pub use servers::Kind;
pub use service::{Service, time_s};
pub use setup::{Dispatch, Setup};
pub use trace::{Mark, Span, Trace, What};
pub use wakeone_bpf::policy_group::{MOST_SLOTS, Variant};
