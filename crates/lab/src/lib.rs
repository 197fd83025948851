//! The published experiments of this field, measured here beside their numbers.
//!
//! An [`Experiment`] has a question, published numbers and a way to measure one point. The [`runner`] does what all of
//! them need: interleaved rounds, progress, medians, ratios paired by round, the machine's own noise. The result is a
//! [`result::Outcome`], plain data after `docs/schema/lab-result.schema.json`. Text and HTML are exporters of it and can
//! be made again from the file at any time.

pub mod alternate;
pub mod answers;
pub mod apps;
pub mod card;
pub mod cpus;
pub mod error;
pub mod experiment;
pub mod experiments;
pub mod html;
pub mod launch;
pub mod machine;
pub mod measure;
pub mod nginx;
pub mod papers;
pub mod present;
pub mod probe;
pub mod process;
pub mod published;
pub mod result;
pub mod runner;
pub mod scratch;
pub mod server;
pub mod status;
pub mod steered;
pub mod store;
pub mod template;
pub mod text;
pub mod trace;
pub mod trials;
pub mod under_test;
pub mod user;
pub mod verdict;
pub mod views;
pub mod ways;

pub use wakeone_result::{distribution, environment, slices, stats};

pub use error::Error;
pub use experiment::{Experiment, Settings};
pub use result::Outcome;
