//! Results of `wakeone sim` for a person, and as JSON.

use std::fmt::Write as _;

use serde_json::{Map, json};
use wakeone_result::environment::Environment;
use wakeone_sim::result;
use wakeone_terminal::to_json;

use super::{Args, Found};

/// Formats a row for each way.
pub fn table(args: &Args, load: &str, found: &Found) -> String {
    let mut text = format!(
        "Simulated: {} workers, {load}. Times in ms.\n\n{:<24}{:>8}{:>8}{:>8}{:>8}{:>8}{:>7}{:>8}\n",
        args.workers, "", "mean", "p50", "p90", "p99", "p99.9", "most", "moved"
    );
    for (name, outcome) in &found.all {
        let ms = |quantile| number(outcome.quantile_s(quantile) * 1e3);
        let _ = writeln!(
            text,
            "{name:<24}{:>8}{:>8}{:>8}{:>8}{:>8}{:>6.2}x{:>7.1}%",
            number(outcome.mean_s * 1e3),
            ms(0.5),
            ms(0.9),
            ms(0.99),
            ms(0.999),
            outcome.max_over_mean(),
            outcome.counts.moved as f64 * 100.0 / args.requests as f64,
        );
    }
    text.push_str(&unserved(found));
    if args.clients.is_some() {
        text.push_str(&throughput(found));
    }
    let _ = write!(
        text,
        "\nmost: the share of the busiest worker, over the mean. moved: connections that rescue put\ninto another queue. {}\n",
        speed(found)
    );
    text
}

/// The answers a second of each way, which the workers decide in a closed loop.
fn throughput(found: &Found) -> String {
    let mut text = format!("\n{:<24}{:>16}\n", "", "answers/s");
    for (name, one) in &found.all {
        let _ = writeln!(text, "{name:<24}{:>16.0}", one.answers_per_s());
    }
    text
}

/// Counts of SYNs dropped, connections given up and requests lost; empty where all are 0.
fn unserved(found: &Found) -> String {
    let any = |one: &wakeone_sim::Counts| one.dropped_syns + one.given_up + one.lost > 0;
    if !found.all.iter().any(|(_, one)| any(&one.counts)) {
        return String::new();
    }
    let mut text = format!(
        "\n{:<24}{:>16}{:>16}{:>16}\n",
        "", "SYNs dropped", "given up", "lost"
    );
    for (name, one) in &found.all {
        let counts = &one.counts;
        let _ = writeln!(
            text,
            "{name:<24}{:>16}{:>16}{:>16}",
            counts.dropped_syns, counts.given_up, counts.lost
        );
    }
    text
}

/// Formats the speed of the simulation.
pub fn speed(found: &Found) -> String {
    format!("{:.1} million events/s.", found.events_per_s() / 1e6)
}

/// Rounds a rate to a tenth.
pub fn number_of(rate: f64) -> f64 {
    (rate * 10.0).round() / 10.0
}

/// Formats a value with three significant digits.
pub fn number(value: f64) -> String {
    let places = match value {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.places$}")
}

/// Formats the outcomes as a result of the lab.
pub fn json(
    args: &Args,
    rate: Option<f64>,
    found: &Found,
    environment: Environment,
) -> anyhow::Result<String> {
    let mut parameters = Map::new();
    for (name, value) in [
        ("seed", json!(args.seed)),
        ("requests", json!(args.requests)),
        ("workers", json!(args.workers)),
        ("threads", json!(args.threads)),
        ("event_loop", json!(args.event_loop)),
        // None in a closed loop, or where a range is swept.
        ("rate_per_s", json!(rate)),
        ("clients", json!(args.clients)),
        ("service_mean_ms", json!(args.service.mean_s() * 1e3)),
        ("backlog", json!(args.backlog)),
        ("rtt_ms", json!(args.rtt.as_secs_f64() * 1e3)),
        ("kept_connections", json!(args.keep_alive)),
        ("apart_ms", json!(args.apart.as_secs_f64() * 1e3)),
        ("events_per_s", json!(found.events_per_s())),
    ] {
        parameters.insert(name.into(), value);
    }
    let all = found.all.iter();
    let samples = all.map(|(name, outcome)| (name.clone(), result::sample(outcome)));
    let outcome = result::outcome(parameters, samples, environment);
    Ok(to_json(&outcome)?)
}
