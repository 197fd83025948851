//! An honest load generator: plan, send, record; latency from the planned time.
//!
//! A [`Plan`] defines the requests, their targets and their times; [`run`] sends them and returns an [`Outcome`].
//! Three rules make the numbers honest:
//!
//! * In the open loop a request is due at its planned time whatever became of the ones before. Its latency counts from
//!   that time ("coordinated omission", after Gil Tene's wrk2). The time from `connect()` is kept beside it.
//! * Every planned request ends in exactly one place: `completed`, one kind of `errors`, or `cancelled`.
//! * The plan depends on its seed alone: same seed, same arrival times, paths and sources, with any number of threads.
//!
//! Each thread is one epoll loop over non-blocking sockets; there is no async runtime, and no allocation a request once the
//! tables have grown.

mod compare;
mod deadlines;
mod engine;
mod error;
mod form;
mod hdrlog;
mod live;
mod outcome;
mod plan;
mod progress;
mod recorder;
mod response;
mod run;
mod schedule;
mod shard;
mod socket;
mod summary;
mod text;
mod tls;
mod view;
mod whole;

pub use compare::{Comparison, Difference, ErrorShares, MetricComparison, Verdict};
pub use error::Error;
pub use form::{Form, Header};
pub use hdrlog::write_hdr_log;
pub use live::Live;
pub use outcome::{ErrorKind, Interval, Outcome, PathOutcome, Phases, StageOutcome};
pub use plan::{Arrivals, Mix, MixEntry, Plan, Sources, Spacing, Stage, Stop};
pub use progress::{Event, Progress};
pub use response::{BadResponse, ResponseReader, Step};
pub use run::{observe, observe_live, raise_descriptor_limit, run};
pub use schedule::{Due, Schedule};
pub use shard::{Clock, Merged, PART_SCHEMA, Part, Shard, merge, plan_hash};
pub use summary::{
    IntervalSummary, Parameters, PathSummary, Quantiles, SCHEMA, StageSummary, Summary,
};
pub use tls::Tls;
pub use view::View;
pub use whole::decode;

#[cfg(test)]
#[path = "../../../tests/support/foreign.rs"]
mod foreign;
