//! The result of a measurement or a simulation, as `wakeone-lab run` and `wakeone sim` write it: plain data after
//! `docs/schema/lab-result.schema.json`, with the machine and the commit that it is of.

pub mod distribution;
pub mod environment;
pub mod outcome;
pub mod sample;
pub mod slices;
pub mod stats;

pub use outcome::Outcome;
pub use sample::Sample;

/// The commit that this was built from. `unknown`: a build from a tarball. `+changes` behind it: files differed.
pub const COMMIT: &str = env!("WAKEONE_COMMIT");

/// Version and commit in a line.
pub const VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (commit ",
    env!("WAKEONE_COMMIT"),
    ")"
);
