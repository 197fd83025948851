//! Requests a second of each architecture, from 20 to 15,000 simultaneous clients.

mod explain;
mod present;
mod setup;

use serde_json::json;
use std::collections::BTreeMap;
use std::time::Duration;
use wakeone_kernel::proc::netstat::Counters;
use wakeone_load::{Arrivals, ErrorKind, Event, Mix, Plan};
use wakeone_serve::Model;

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Sample, Settings};
use crate::present::Block;
use crate::result::{Expectation, Outcome};
use crate::{cpus, measure, stats};
use explain::Point;
use setup::{Book, Cell, Kind, Lacks};

card!(published);

/// The experiment.
pub struct Architectures;

/// A load's beginning, which is not measured, lasts at least this long.
const WARM_UP: Duration = Duration::from_millis(500);
/// A usual rate, in requests/s. At this rate all clients have had their turn in the warm-up, and two in the measured
/// time. A measurement shorter than one turn of all would only see the first connections.
const USUAL_RATE: f64 = 10_000.0;
/// The measured time is cut into pieces to see how steady the rate is.
const PIECE: Duration = Duration::from_millis(250);
/// How long a client waits for its answer, and the server for a request. A full accept queue drops the client's last ACK and its
/// data. TCP then sends the data again after 0.2, 0.4, 0.8 … s (`tcp_retransmit_timer`), up to 51 s after the first time.
const PATIENCE: Duration = Duration::from_secs(60);

/// The time at which the measured part of a load begins, and the time at which it ends; both in whole pieces.
fn times(clients: usize, quick: bool) -> (Duration, Duration) {
    let turn = clients as f64 / USUAL_RATE;
    let least: f64 = if quick { 1.0 } else { 1.5 };
    let pieces = |seconds: f64| PIECE * (seconds / PIECE.as_secs_f64()).ceil() as u32;
    let warm_up = pieces(WARM_UP.as_secs_f64() + turn);
    (warm_up, warm_up + pieces(least.max(2.0 * turn)))
}

impl Experiment for Architectures {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let lacks = Lacks::look();
        let (mut arms, mut left_out) = (Vec::new(), BTreeMap::new());
        let (mut group, mut before) = (0, None);
        for cell in setup::grid(settings.quick) {
            if let Some((what, why)) = lacks.of(&cell) {
                left_out.insert(what, why);
                continue;
            }
            // Architectures are compared at one number of clients: those are measured near each other in time.
            let place = Some((cell.kind, cell.clients));
            group += usize::from(before.is_some() && before != place);
            before = place;
            let (_, end) = times(cell.clients, settings.quick);
            arms.push(Arm {
                name: cell.name(),
                group,
                // The clients that wait at the end are answered as well.
                seconds: end.as_secs_f64() + 0.4 + cell.clients as f64 / USUAL_RATE,
            });
        }
        let mut design = Design {
            rounds: if settings.quick { 1 } else { 3 },
            arms,
            steady: "throughput_per_s",
            ..Design::default()
        };
        for (name, value) in [
            ("times_s", json!(described_times(settings.quick))),
            ("patience_s", json!(PATIENCE.as_secs())),
            ("blocking_workers", json!(setup::BLOCKING_WORKERS)),
            ("event_loop_workers", json!(cpus::count())),
            ("accept_queue", json!(accept_queue())),
            (
                "request",
                json!("GET /, a connection a request, closed loop"),
            ),
            ("build", json!(crate::environment::build())),
            ("left_out", json!(left_out)),
        ] {
            design.parameters.insert(name.into(), value);
        }
        design
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let cell = Cell::parse(&arm.name).ok_or_else(|| Error::Unknown(arm.name.clone()))?;
        let book = Book::new(cell.kind)?;
        let workers = setup::workers(cell.model, cpus::count());
        let server = setup::start(cell.model, workers, PATIENCE, &book)?;
        let overflows = listen_overflows();
        let (found, rates) = load(
            &plan(server.address, cell.clients, context),
            cell.clients,
            context,
        )?;
        let overflows = listen_overflows().saturating_sub(overflows);
        let mut sample = sample(&found, &rates);
        server.stop(&mut sample)?;
        sample.put("listen_overflows", "count", overflows as f64);
        sample.put("server_requests", "count", book.visits()? as f64);
        Ok(sample)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let cells = cells(outcome);
        let sum = |count: &dyn Fn(&Outcome, Cell, usize) -> Option<f64>| -> Option<f64> {
            let mut sum = 0.0;
            for cell in &cells {
                for round in 0..outcome.values(&cell.name(), "requests").len() {
                    // A metric that is missing must not pass for no error.
                    sum += count(outcome, *cell, round)?;
                }
            }
            (!cells.is_empty()).then_some(sum)
        };
        let silent = cells
            .iter()
            .filter(|c| {
                outcome
                    .median(&c.name(), "throughput_per_s")
                    .is_none_or(|r| r <= 0.0)
            })
            .count();
        let silent = (!cells.is_empty()).then_some(silent as f64);
        let mut all = vec![
            CARD.expect("no-unexplained-error", sum(&unexplained)),
            CARD.expect("every-point-answers", silent),
            CARD.expect("counts-agree", sum(&counted_apart)),
        ];
        let forking = present::CLAIMS.iter().find(|claim| claim.name == "forking");
        let ratio = forking.and_then(|claim| claim.measured(outcome, Kind::Embedded));
        if let (Some(claim), Some(ratio)) = (forking, ratio) {
            let published = format!("{:.1}", claim.published().unwrap_or(f64::NAN));
            let names = [("published", &*published)];
            all.push(CARD.expect_of("forking-far-behind", &names, Some(ratio)));
        }
        all
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        present::present(outcome)
    }
}

/// `(clients, warm-up, end of the load)` of each number of clients, in s.
fn described_times(quick: bool) -> Vec<(usize, f64, f64)> {
    let mut all: Vec<usize> = setup::grid(quick).iter().map(|c| c.clients).collect();
    all.sort_unstable();
    all.dedup();
    all.into_iter()
        .map(|clients| {
            let (warm_up, end) = times(clients, quick);
            (clients, warm_up.as_secs_f64(), end.as_secs_f64())
        })
        .collect()
}

/// How many connections wait at most in one accept queue here.
fn accept_queue() -> usize {
    let limit = std::fs::read_to_string("/proc/sys/net/core/somaxconn").ok();
    let limit = limit.and_then(|text| text.trim().parse().ok());
    // The kernel lets one more in than it says.
    setup::BACKLOG.min(limit.unwrap_or(usize::MAX)) + 1
}

fn listen_overflows() -> u64 {
    Counters::read(None).get("TcpExt", "ListenOverflows")
}

fn plan(target: std::net::SocketAddr, clients: usize, context: &Context<'_>) -> Plan {
    let arrivals = Arrivals::Closed {
        concurrency: clients,
    };
    let end = times(clients, context.settings.quick).1.as_secs_f64();
    let (end, mix) = (measure::for_seconds(end), Mix::one("/"));
    Plan {
        timeout: PATIENCE,
        ..measure::plan(target, arrivals, end, mix, context.seed)
    }
}

/// Sends the load. Returns its outcome, and the rate of each whole piece of the measured time in answers a second.
fn load(
    plan: &Plan,
    clients: usize,
    context: &mut Context<'_>,
) -> Result<(wakeone_load::Outcome, Vec<f64>), Error> {
    let (warm_up, end) = times(clients, context.settings.quick);
    let (cancel, report) = (context.cancel, &mut *context.progress);
    let mut rates = Vec::new();
    let outcome = wakeone_load::observe(plan, cancel, Some(PIECE), &mut |event| match event {
        Event::Progress(now) => report(now.elapsed.as_secs_f64() / end.as_secs_f64()),
        Event::Interval(piece) => {
            if piece.start >= warm_up && piece.start + PIECE <= end {
                rates.push(piece.completed as f64 / PIECE.as_secs_f64());
            }
        }
    });
    let outcome = outcome.map_err(|source| Error::Load {
        target: plan.target.into(),
        source,
    })?;
    context.check()?;
    Ok((outcome, rates))
}

/// Every metric in every round, so that the rounds of two metrics can be told apart.
fn sample(found: &wakeone_load::Outcome, rates: &[f64]) -> Sample {
    let mut sample = Sample::default();
    sample.put("throughput_per_s", "1/s", stats::mean(rates));
    sample.put("rate_variation", "ratio", stats::variation(rates));
    sample.put("requests", "count", found.completed as f64);
    sample.put("cancelled", "count", found.cancelled as f64);
    measure::latency(&mut sample, &found.latency);
    let errors = |wanted: &[ErrorKind]| -> f64 {
        let kinds = found.errors.iter();
        kinds
            .filter(|(kind, _)| wanted.contains(kind))
            .map(|(_, count)| *count as f64)
            .sum()
    };
    let all = found.errors.values().sum::<u64>() as f64;
    let timeouts = errors(&[ErrorKind::Timeout, ErrorKind::ConnectTimeout]);
    let resets = errors(&[ErrorKind::Reset]);
    for (name, count) in [
        ("errors", all),
        ("errors_timeout", timeouts),
        ("errors_reset", resets),
        ("errors_other", all - timeouts - resets),
    ] {
        sample.put(name, "count", count);
    }
    sample
}

/// The cells that were measured.
fn cells(outcome: &Outcome) -> Vec<Cell> {
    outcome
        .variants
        .iter()
        .filter_map(|v| Cell::parse(&v.name))
        .collect()
}

/// The rates of an architecture over the number of clients.
fn curve(outcome: &Outcome, kind: Kind, model: Model) -> Vec<(f64, f64)> {
    let mut curve: Vec<(f64, f64)> = cells(outcome)
        .into_iter()
        .filter(|c| c.kind == kind && c.model == model)
        .filter_map(|c| {
            let rate = outcome.median(&c.name(), "throughput_per_s")?;
            Some((c.clients as f64, rate))
        })
        .collect();
    curve.sort_by(|a, b| a.0.total_cmp(&b.0));
    curve
}

/// How many of one round's failures the model does not explain.
fn unexplained(outcome: &Outcome, cell: Cell, round: usize) -> Option<f64> {
    let name = cell.name();
    let of = |metric: &str| outcome.values(&name, metric).get(round).copied();
    let listeners = match cell.model {
        Model::Reuseport | Model::Dispatched => {
            outcome.parameter_u64("event_loop_workers").unwrap_or(1)
        }
        _ => 1,
    };
    Some(explain::unexplained(&Point {
        clients: cell.clients as f64,
        patience_s: outcome.parameter_u64("patience_s")? as f64,
        unhurried_per_s: curve(outcome, cell.kind, cell.model).first()?.1,
        places: (listeners * outcome.parameter_u64("accept_queue")?) as f64,
        overflows: of("listen_overflows")?,
        timeouts: of("errors_timeout")?,
        resets: of("errors_reset")?,
        others: of("errors_other")?,
    }))
}

fn counted_apart(outcome: &Outcome, cell: Cell, round: usize) -> Option<f64> {
    let name = cell.name();
    let of = |metric: &str| outcome.values(&name, metric).get(round).copied();
    let uncertain = of("errors")? + of("cancelled")?;
    Some(explain::counted_apart(
        of("server_requests")?,
        of("requests")?,
        uncertain,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::{self, Metric, Variant};

    const FINE: [(&str, f64); 9] = [
        ("throughput_per_s", 8000.0),
        ("requests", 9000.0),
        ("server_requests", 9000.0),
        ("cancelled", 0.0),
        ("errors", 0.0),
        ("errors_timeout", 0.0),
        ("errors_reset", 0.0),
        ("errors_other", 0.0),
        ("listen_overflows", 0.0),
    ];

    /// An outcome of one point of 5,000 clients with these changes, beside one of 20 at which all is well.
    fn outcome(change: &[(&str, f64)]) -> Outcome {
        let mut outcome = result::tests::outcome(&[]);
        outcome
            .parameters
            .insert("accept_queue".into(), json!(4097));
        outcome.parameters.insert("patience_s".into(), json!(60));
        for (clients, change) in [(20, &[][..]), (5000, change)] {
            let mut metrics: BTreeMap<String, Metric> = BTreeMap::new();
            for (name, value) in FINE.iter().chain(change) {
                metrics.insert((*name).into(), Metric::new("", vec![*value]));
            }
            outcome.variants.push(Variant {
                name: format!("embedded/{clients}/epoll"),
                metrics,
                distributions: BTreeMap::new(),
                slices: None,
                notes: BTreeMap::new(),
            });
        }
        outcome
    }

    fn failed(change: &[(&str, f64)]) -> Vec<String> {
        crate::result::tests::failing(Architectures.judge(&outcome(change)))
    }

    #[test]
    fn all_clients_have_their_turn() {
        let ms = Duration::from_millis;
        assert_eq!(times(20, true), (ms(750), ms(1750)));
        assert_eq!(times(15_000, false), (ms(2000), ms(5000)));
    }

    #[test]
    fn what_went_well_passes() {
        assert_eq!(failed(&[]), Vec::<String>::new());
        // The one reset that a queue of 4,097 gives 5,000 clients.
        assert_eq!(
            failed(&[
                ("errors", 1.0),
                ("errors_reset", 1.0),
                ("listen_overflows", 70.0)
            ]),
            Vec::<String>::new()
        );
    }

    #[test]
    fn each_fault_is_found() {
        let unexplained = ["no-unexplained-error"];
        assert_eq!(
            failed(&[("errors", 1.0), ("errors_reset", 1.0)]),
            unexplained
        );
        assert_eq!(
            failed(&[("errors", 9.0), ("errors_timeout", 9.0)]),
            unexplained
        );
        assert_eq!(
            failed(&[("errors", 1.0), ("errors_other", 1.0)]),
            unexplained
        );
        assert_eq!(failed(&[("server_requests", 8999.0)]), ["counts-agree"]);
        assert_eq!(failed(&[("server_requests", 9001.0)]), ["counts-agree"]);
        assert_eq!(
            failed(&[("throughput_per_s", 0.0)]),
            ["every-point-answers"]
        );
    }

    #[test]
    fn nothing_measured_is_no_success() {
        assert!(
            Architectures
                .judge(&result::tests::outcome(&[]))
                .iter()
                .all(|e| !e.holds)
        );
    }
}
