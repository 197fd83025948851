//! Why something cannot be simulated.

/// A load or a setup that cannot be simulated, in one sentence.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0}")]
pub struct Error(pub String);
