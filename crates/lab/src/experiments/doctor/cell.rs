//! One server in one situation, and doctor beside it.

use serde_json::Value;
use std::time::Duration;

use super::truth::{Truth, wrong};
use super::{Cell, TRIALS, metric_of};
use crate::error::{Error, joined};
use crate::experiment::{Context, Sample};
use crate::trials::beside::{self, Trial};
use crate::trials::server::Who;
use crate::under_test::ServerUnderTest;
use crate::{measure, verdict};

/// Doctor comes when the load has begun, and has gone when it ends.
const BEGINS: Duration = Duration::from_millis(600);
const WATCHES: &str = "4s";

/// Measures it.
///
/// # Errors
/// When the server does not start, or doctor says nothing.
pub fn measure(cell: &Cell, context: &mut Context<'_>) -> Result<Sample, Error> {
    let launch = cell.server.launch(TRIALS.table.workers, &[])?;
    let mut server = ServerUnderTest::start(launch)?;
    let quick = context.settings.quick;
    let plan = cell.load.plan(server.address, quick, None, context.seed);
    let trial = Trial {
        who: Who::Other(cell.server),
        workers: TRIALS.table.workers,
        plan: &plan,
        typical_s: cell.load.typical_s(quick),
    };
    let (address, begins) = (
        server.address,
        cell.load.typical_s(quick) - cell.load.lasts_s(quick),
    );
    let (loaded, said) = std::thread::scope(|scope| {
        let doctor = scope.spawn(move || {
            // After the connections were opened.
            std::thread::sleep(Duration::from_secs_f64(begins.max(0.0)) + BEGINS);
            verdict::doctor(address, WATCHES)
        });
        let loaded = beside::load(&trial, &mut server, cell.load.beside.as_ref(), context);
        (loaded, doctor.join())
    });
    let (loaded, said) = (loaded?.0, joined(said)?);
    let mut sample = measure::sample(&loaded, TRIALS.table.workers);
    // By their names, which are numbers of processes in some servers.
    let (most, all) = loaded
        .by_worker
        .values()
        .fold((0, 0), |(most, all), n| (*n.max(&most), all + n));
    let busiest = most as f64 * TRIALS.table.workers as f64 / (all as f64).max(1.0);
    sample.metrics.retain(|name, _| !name.starts_with("share_"));
    sample.put("busiest", "ratio", busiest);
    enter(cell, &said, &mut sample);
    match server.stop(&mut sample) {
        // Requests of an overloaded server are given up.
        Ok(()) | Err(Error::Counts { .. }) => Ok(sample),
        Err(error) => Err(error),
    }
}

/// Enters what doctor found, and whether that is so.
fn enter(cell: &Cell, said: &Value, sample: &mut Sample) {
    let findings = said["findings"].as_array().into_iter().flatten();
    let found: Vec<String> = findings
        .filter_map(|one| one["code"].as_str().map(str::to_owned))
        .collect();
    let wait_ms_p99 = said["totals"]["wait_us_p99"].as_f64().map(|us| us / 1e3);
    let of = |name: &str| sample.metrics.get(name).map_or(0.0, |(_, value)| *value);
    let truth = Truth {
        wait_ms_p99,
        latency_ms_p99: of("latency_ms_p99"),
        busiest: of("busiest"),
        shared: cell.server.shared,
    };
    let wrong = wrong(&cell.load.name, &found, &truth);
    for code in &found {
        sample.put(metric_of(code), "count", 1.0);
    }
    if let Some(ms) = wait_ms_p99 {
        sample.put("wait_ms_p99", "ms", ms);
    }
    sample.put("wrong", "count", f64::from(u8::from(wrong.is_some())));
    if let Some(why) = wrong {
        sample.notes.insert("wrong".into(), why);
    }
}
