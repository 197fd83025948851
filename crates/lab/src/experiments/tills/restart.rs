//! The short form of the experiment `restart`, for every way. It counts the requests lost when the server is restarted
//! under load.

use std::time::Duration;
use wakeone_load::{Mix, Plan};

use super::workload::WORKERS;
use crate::error::Error;
use crate::experiment::{Context, Sample};
use crate::experiments::restart::{self, servers::Kind};
use crate::measure;
use crate::ways::Way;

/// First part of the variants' names.
pub const NAME: &str = "restart";
/// Restarts of each measurement.
pub const RESTARTS: usize = 2;
/// Requests a second: five eighths of the workers' capacity, so that queues are seldom empty for long.
pub const RATE_PER_S: f64 = 2500.0;
/// A request, in µs of sleep.
pub const WORK_US: u64 = 1_000;

/// How long the server serves before, between and after the restarts.
fn pause(quick: bool) -> Duration {
    Duration::from_millis(if quick { 250 } else { 750 })
}

/// About how long one measurement takes.
pub fn seconds(quick: bool) -> f64 {
    pause(quick).as_secs_f64() * (RESTARTS as f64 + 1.0) + 1.0
}

/// Restarts a server of this way under load, and counts what was not answered.
pub fn measure(way: Way, context: &mut Context<'_>) -> Result<Sample, Error> {
    let plan = |address, context: &Context<'_>| Plan {
        timeout: Duration::from_secs(5),
        ..measure::plan(
            address,
            measure::poisson(RATE_PER_S),
            measure::for_seconds(restart::LONGEST.as_secs_f64()),
            Mix::one(format!("/work?us={WORK_US}&kind=sleep")),
            context.seed,
        )
    };
    let pause = pause(context.settings.quick);
    let mut sample =
        restart::measure_restarts(Kind::Ours(way), WORKERS, plan, RESTARTS, pause, context)?;
    // The lost requests are the result here, not a failure of the measurement.
    sample.metrics.retain(|name, _| !name.starts_with("errors"));
    Ok(sample)
}
