//! Figures of steered groups for programs that keep them: OpenMetrics over HTTP, JSON over a UNIX socket.
//!
//! [`table::METRICS`] says once what each metric is and where it comes from; what is served, what `wakeone metrics
//! --help-all` explains and what the tests compare with `wakeone status --json` are made of it.

pub mod figures;
mod http;
mod monitor;
pub mod socket;
pub mod table;

pub use figures::Figures;
pub use monitor::{Monitor, Source, bind};
pub use table::{exposition, help};
