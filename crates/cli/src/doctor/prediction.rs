//! What each policy would bring a server, simulated from what was just measured.

use serde::Serialize;
use wakeone_control::policy::Policy;
use wakeone_model::accept::Shape;
use wakeone_model::layout::{Cell, Column, Style, number, table, words, wrap};
use wakeone_model::snapshot::Watch;
use wakeone_model::waits::Waits;
use wakeone_sim::{Arrivals, Dispatch, Load, Service, Setup, Wake};

/// Fewer connections say too little about the slowest one percent.
const FEWEST: u64 = 200;
/// The part of the connections that may be accepted while another is open: after a reset, which is no close().
const OVERLAPPING: f64 = 0.02;
/// Where workers are busier than this, a small error of the measurement is a large one of the result.
const MOST_BUSY: f64 = 0.95;
/// Simulated requests of each way.
const REQUESTS: u64 = 100_000;
/// As `wakeone run` without `--stuck-after`.
const STUCK_AFTER_S: f64 = 0.005;

const COLUMNS: [Column; 5] = [
    words("policy", 0),
    number("mean", 0),
    number("p50", 2),
    number("p90", 1),
    number("p99", 0),
];

/// A simulated way of handing out connections, from connect() to the last byte.
#[derive(Debug, Serialize)]
pub struct Simulated {
    /// `now`, or the policy.
    name: String,
    latency_ms_mean: f64,
    latency_ms_p50: f64,
    latency_ms_p90: f64,
    latency_ms_p99: f64,
}

/// What a simulation says of a listener.
#[derive(Debug, Serialize)]
pub struct Prediction {
    /// No figure of it was measured.
    simulated: bool,
    workers: usize,
    requests_per_s: f64,
    /// Time between accept() and close().
    service_ms_mean: f64,
    /// The share of the workers' time that requests need.
    busy: f64,
    ways: Vec<Simulated>,
}

/// Simulates a listener's load, or tells why that would say nothing.
pub fn predict(watch: &Watch) -> Result<Prediction, String> {
    let workers = workers(watch)?;
    let connections = watch
        .traced_connections()
        .ok_or("connections cannot be counted without tracing")?;
    if connections < FEWEST {
        return Err(format!(
            "{connections} connections are too few: it takes {FEWEST}, so watch for longer"
        ));
    }
    let (held, overlapping) = watch.held();
    if held.count < FEWEST || overlapping as f64 > OVERLAPPING * connections as f64 {
        return Err(format!(
            "{overlapping} of {connections} connections were accepted while another was open: only workers that serve one \
             at a time can be simulated"
        ));
    }
    let service = Service::Mix(parts(&held));
    let requests_per_s = connections as f64 / watch.seconds().max(1e-9);
    let busy = requests_per_s * service.mean_s() / workers as f64;
    if busy > MOST_BUSY {
        return Err(format!(
            "the workers are {:.0} % busy, where queues depend on everything",
            busy * 100.0
        ));
    }
    let load = Load {
        arrivals: Arrivals::Poisson {
            per_s: requests_per_s,
        },
        service,
        requests: REQUESTS,
        kept: None,
        seed: 1,
    };
    let simulated: Result<Vec<Simulated>, String> = ways(watch)
        .into_iter()
        .map(|(name, way)| simulate(name, &Setup::new(workers, way), &load))
        .collect();
    Ok(Prediction {
        simulated: true,
        workers,
        requests_per_s,
        service_ms_mean: load.service.mean_s() * 1e3,
        busy,
        ways: simulated?,
    })
}

/// Service times: weights, and times in s. A bucket is 6 % wide, so the sum that was counted mends the mean.
fn parts(held: &Waits) -> Vec<(f64, f64)> {
    let found: Vec<(f64, f64)> = held.times_us().map(|(us, n)| (f64::from(n), us)).collect();
    let sum_us: f64 = found.iter().map(|(n, us)| n * us).sum();
    let mend = held.sum_us as f64 / sum_us.max(1.0);
    let seconds = |us: f64| us * mend * 1e-6;
    found.into_iter().map(|(n, us)| (n, seconds(us))).collect()
}

/// The number of workers, if each serves a connection at a time as far as its accept model tells.
fn workers(watch: &Watch) -> Result<usize, String> {
    let shape = watch.model.shape;
    if !matches!(shape, Shape::Shared | Shape::Mutex | Shape::SocketPerWorker) {
        return Err("only processes that accept for themselves can be simulated".into());
    }
    let mut pids: Vec<u32> = watch.serves.values().flatten().copied().collect();
    pids.sort_unstable();
    pids.dedup();
    if pids.len() < 2 {
        return Err("one worker has nothing to choose from".into());
    }
    Ok(pids.len())
}

/// The present way, where it is known, and those that `wakeone run` would bring.
fn ways(watch: &Watch) -> Vec<(&'static str, Dispatch)> {
    let now = match watch.model.shape {
        Shape::SocketPerWorker => {
            (watch.steered != Some(true)).then(|| steered(Policy::Hash, None))
        }
        // Which worker is woken changes the shares, and not the times of workers that serve one at a time.
        _ => Some(Dispatch::Shared(Wake::LongestAsleep)),
    };
    let mut ways: Vec<(&str, Dispatch)> = now.into_iter().map(|way| ("now", way)).collect();
    let rescue = Some(STUCK_AFTER_S);
    ways.extend([
        (
            "least-connections+rescue",
            steered(Policy::LeastConnections, rescue),
        ),
        ("two-choices+rescue", steered(Policy::TwoChoices, rescue)),
        ("hash+rescue", steered(Policy::Hash, rescue)),
    ]);
    ways
}

fn steered(policy: Policy, stuck_after_s: Option<f64>) -> Dispatch {
    Dispatch::steered(policy.number(), stuck_after_s)
}

fn simulate(name: &str, setup: &Setup, load: &Load) -> Result<Simulated, String> {
    let outcome = wakeone_sim::run(setup, load).map_err(|error| error.to_string())?;
    let ms = |quantile| outcome.quantile_s(quantile) * 1e3;
    Ok(Simulated {
        name: name.into(),
        latency_ms_mean: outcome.mean_s * 1e3,
        latency_ms_p50: ms(0.5),
        latency_ms_p90: ms(0.9),
        latency_ms_p99: ms(0.99),
    })
}

/// The prediction as lines of doctor's text.
pub fn lines(prediction: &Prediction, style: Style) -> String {
    let ms = |time: f64| Cell::from(format!("{time:.1}"));
    let rows: Vec<Vec<Cell>> = prediction
        .ways
        .iter()
        .map(|way| {
            vec![
                Cell::from(&way.name),
                ms(way.latency_ms_mean),
                ms(way.latency_ms_p50),
                ms(way.latency_ms_p90),
                ms(way.latency_ms_p99),
            ]
        })
        .collect();
    let title = format!(
        "latency in ms, simulated: {:.0} requests/s of {:.1} ms in {} workers, {:.0} % busy",
        prediction.requests_per_s,
        prediction.service_ms_mean,
        prediction.workers,
        prediction.busy * 100.0
    );
    let mut lines = vec![String::new()];
    lines.extend(wrap(&title, "  ", style));
    lines.extend(table(&COLUMNS, &rows, 4, style));
    lines.join("\n") + "\n"
}
