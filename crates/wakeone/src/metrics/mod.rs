//! Metrics of steered groups for programs that store them: OpenMetrics over HTTP, JSON over a UNIX socket.
//!
//! [`table::METRICS`] is the one place that says what each metric is and where it comes from. The served text, the
//! output of `wakeone metrics --help-all`, and the tests against `wakeone status --json` are made from it.

mod http;
mod monitor;
pub mod socket;
pub mod table;
pub mod values;

pub use monitor::{Monitor, Source, bind};
pub use table::{exposition, help};
pub use values::Metrics;
