//! Connections lost in a restart.

pub mod servers;

use serde_json::json;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use wakeone_load::{Arrivals, Mix, Plan};

use crate::card::{Card, card};
use crate::error::Error;
use crate::experiment::{Arm, Context, Design, Experiment, Sample, Settings, parameters};
use crate::present::{Bar, Block, Chart, Row, Style, Table, cell, number};
use crate::result::{Expectation, Outcome, Variant};
use crate::under_test::ServerUnderTest;
use crate::{answers, measure, stats, views};
use servers::Kind;

card!();

/// The experiment.
pub struct Restart;

const RESTARTS: usize = 3;
const RATE_PER_S: f64 = 1000.0;
/// No load lasts longer than this.
pub const LONGEST: Duration = Duration::from_secs(60);
const CLIENTS: usize = 64;
/// The loads: first part of the variants' names.
const LOADS: [&str; 2] = ["steady", "full"];

/// The load under which HAProxy is restarted often.
const MANY: &str = "many";
const MANY_RESTARTS: usize = 10;
const MANY_RATE_PER_S: f64 = 3000.0;
const MANY_PAUSE: Duration = Duration::from_millis(250);
/// HAProxy as it is, and attached to.
const HAPROXY: [Kind; 2] = [Kind::Haproxy, Kind::HaproxyAttached];

fn load_seconds(quick: bool) -> f64 {
    if quick { 2.0 } else { 4.0 }
}

fn arm_name(load: &str, kind: Kind) -> String {
    format!("{load}/{}", kind.name())
}

impl Experiment for Restart {
    fn card(&self) -> &'static Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let seconds = load_seconds(settings.quick);
        let mut design = Design {
            rounds: if settings.quick { 2 } else { 5 },
            parameters: parameters([
                ("restarts", json!(RESTARTS)),
                ("load_s", json!(seconds)),
                ("steady_rate_per_s", json!(RATE_PER_S)),
                ("full_clients", json!(CLIENTS)),
                ("many_restarts", json!(MANY_RESTARTS)),
                ("many_rate_per_s", json!(MANY_RATE_PER_S)),
            ]),
            ..Design::default()
        };
        let many_seconds = MANY_PAUSE.as_secs_f64() * (MANY_RESTARTS as f64 + 1.0) + 2.0;
        let loads = [
            (LOADS[0], &servers::ALL[..], seconds + 1.0),
            (LOADS[1], &servers::ALL, seconds + 1.0),
            (MANY, &HAPROXY, many_seconds),
        ];
        for (group, (load, kinds, seconds)) in loads.into_iter().enumerate() {
            for kind in kinds {
                let name = arm_name(load, *kind);
                let arm = Arm {
                    name,
                    group,
                    seconds,
                };
                design.offer(arm, kind.name(), kind.lacks());
            }
        }
        design
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        let (load, name) = arm.name.split_once('/').unwrap_or_default();
        let kind = servers::ALL
            .into_iter()
            .chain(HAPROXY)
            .find(|k| k.name() == name);
        let kind = kind.ok_or_else(|| Error::Unknown(arm.name.clone()))?;
        let pause =
            Duration::from_secs_f64(load_seconds(context.settings.quick) / (RESTARTS as f64 + 1.0));
        let plan = |address, context: &Context<'_>| plan(address, kind, load, context);
        let (restarts, pause) = match load {
            MANY => (MANY_RESTARTS, MANY_PAUSE),
            _ => (RESTARTS, pause),
        };
        measure_restarts(kind, servers::WORKERS, plan, restarts, pause, context)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let lost = |load: &str, kind| stats::sum(outcome.values(&arm_name(load, kind), "lost"));
        vec![
            CARD.expect(
                "wakeone-loses-none-steady",
                lost("steady", servers::WAKEONE),
            ),
            CARD.expect("wakeone-loses-none-full", lost("full", servers::WAKEONE)),
            CARD.expect("reuseport-loses-some", lost("full", servers::REUSEPORT)),
            CARD.expect(
                "attached-haproxy-loses-none",
                lost(MANY, Kind::HaproxyAttached),
            ),
            answers::agree(outcome),
        ]
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        let mut blocks = views::meaning([meaning(outcome)]);
        blocks.push(Block::Table(table(outcome)));
        blocks.push(Block::Chart(chart(outcome)));
        blocks
    }
}

/// Restarts a server under a load `restarts` times, `pause` apart. The sample has the lost requests and the durations of
/// the restarts.
///
/// # Errors
/// When the server or the load fails.
pub fn measure_restarts(
    kind: Kind,
    workers: usize,
    plan: impl Fn(SocketAddr, &Context<'_>) -> Plan,
    restarts: usize,
    pause: Duration,
    context: &mut Context<'_>,
) -> Result<Sample, Error> {
    let mut restartable = ServerUnderTest::start(kind.launch(workers))?;
    let plan = plan(restartable.address, context);
    let over = AtomicBool::new(false);
    let (found, restarted) = std::thread::scope(|scope| {
        let (server, over) = (&mut restartable, &over);
        let thread = scope.spawn(move || {
            let restart = |nth| kind.restart(server, workers, nth);
            let took = restart_all(restart, restarts, pause);
            over.store(true, Ordering::Relaxed);
            took
        });
        (load_until(&plan, over, context), thread.join())
    });
    let took = restarted
        .unwrap_or_else(|_| Err(Error::Server("a thread of the experiment panicked".into())))?;
    let found = found?;
    restartable.answers.client_saw(&found);
    let mut sample = measure::sample(&found, 0);
    restartable.stop(&mut sample)?;
    // Workers of different generations bear the same names; shares say nothing here.
    sample.metrics.retain(|name, _| !name.starts_with("share_"));
    sample.put("lost", "count", found.errors.values().sum::<u64>() as f64);
    sample.put("planned", "count", (found.planned - found.cancelled) as f64);
    sample.put(
        "restart_ms",
        "ms",
        took.as_secs_f64() * 1000.0 / restarts as f64,
    );
    Ok(sample)
}

fn plan(target: SocketAddr, kind: Kind, load: &str, context: &Context<'_>) -> Plan {
    let arrivals = match load {
        "steady" => measure::poisson(RATE_PER_S),
        MANY => measure::poisson(MANY_RATE_PER_S),
        _ => Arrivals::Closed {
            concurrency: CLIENTS,
        },
    };
    // The end of the restarts ends it; this only keeps a failure of theirs from lasting.
    let end = measure::for_seconds(LONGEST.as_secs_f64());
    Plan {
        timeout: Duration::from_secs(5),
        ..measure::plan(target, arrivals, end, Mix::one(kind.path()), context.seed)
    }
}

/// Runs the load until the restarts are `over`, or the user stops it. Requests under way then count as neither
/// answered nor lost.
fn load_until(
    plan: &Plan,
    over: &AtomicBool,
    context: &mut Context<'_>,
) -> Result<wakeone_load::Outcome, Error> {
    let (cancel, report) = (context.cancel, &mut *context.progress);
    let typical = load_seconds(context.settings.quick);
    let outcome = wakeone_load::run(plan, over, &mut |now| {
        if cancel.load(Ordering::Relaxed) {
            over.store(true, Ordering::Relaxed);
        }
        report(now.elapsed.as_secs_f64() / typical);
    })
    .map_err(|source| Error::Load {
        target: plan.target,
        source,
    })?;
    context.check()?;
    Ok(outcome)
}

/// Restarts `restarts` times, with a pause before each and one after the last. Returns the time without the pauses.
fn restart_all(
    mut restart: impl FnMut(usize) -> Result<(), Error>,
    restarts: usize,
    pause: Duration,
) -> Result<Duration, Error> {
    let mut took = Duration::ZERO;
    for nth in 1..=restarts {
        std::thread::sleep(pause);
        let start = std::time::Instant::now();
        restart(nth)?;
        took += start.elapsed();
    }
    std::thread::sleep(pause);
    Ok(took)
}

/// The kinds of errors that any variant had.
fn kinds(outcome: &Outcome) -> Vec<String> {
    let names = outcome
        .variants
        .iter()
        .flat_map(|v| v.metrics.keys())
        .filter(|m| m.starts_with("errors_"));
    names
        .cloned()
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect()
}

fn table(outcome: &Outcome) -> Table {
    let kinds = kinds(outcome);
    let sum = |name: &str, metric: &str| outcome.values(name, metric).iter().sum::<f64>();
    let row = |v: &Variant| {
        let (planned, lost) = (sum(&v.name, "planned"), sum(&v.name, "lost"));
        let all = [planned, lost, (lost / planned * 1e6).round()].map(number);
        let medians = ["throughput_per_s", "restart_ms", "latency_ms_p99"];
        let medians = medians.map(|metric| cell(v.median(metric)));
        let each = kinds.iter().map(|kind| number(sum(&v.name, kind)));
        Row::named(v.name.clone(), all.into_iter().chain(medians).chain(each))
    };
    let head = [
        "connections",
        "lost",
        "per million",
        "answers/s",
        "restart ms",
        "p99 ms",
    ];
    let head = head.map(str::to_owned).into_iter();
    let named = |kind: &String| kind.trim_start_matches("errors_").replace('_', " ");
    Table::new(
        "All rounds together; three restarts in each (HAProxy: ten).",
        head.chain(kinds.iter().map(named)),
        outcome.variants.iter().map(row),
    )
}

fn chart(outcome: &Outcome) -> Chart {
    let bar = |v: &Variant| {
        let lost = v.metrics.get("lost")?;
        let colour = if v.name.ends_with("wakeone") || v.name.ends_with("attach") {
            4
        } else if v.name.ends_with("nginx-reload") {
            1
        } else {
            2
        };
        Some(Bar {
            style: Style::ours(v.name.clone(), colour),
            value: stats::mean(&lost.values),
            range: Some((lost.min, lost.max)),
        })
    };
    let bars = outcome.variants.iter().filter_map(bar).collect();
    let title = "Connections lost in three restarts.";
    Chart::bars(title, "Mean of the rounds.", ("lost", false), bars)
}

fn meaning(outcome: &Outcome) -> String {
    let lost = |kind: Kind| -> Option<f64> {
        let of = |load: &&str| {
            outcome
                .values(&arm_name(load, kind), "lost")
                .iter()
                .sum::<f64>()
        };
        let measured = LOADS
            .iter()
            .any(|l| outcome.variant(&arm_name(l, kind)).is_some());
        measured.then(|| LOADS.iter().map(of).sum())
    };
    let say = |(kind, words): (Kind, &str)| match lost(kind)? {
        0.0 => Some(format!("{words} lost none")),
        n => Some(format!("{words} lost {}", number(n))),
    };
    let told: Vec<String> = [
        (servers::REUSEPORT, "a plain reuseport server"),
        (Kind::Nginx, "nginx's reload with fewer and more workers"),
        (servers::WAKEONE, "a rolling restart under wakeone"),
    ]
    .into_iter()
    .filter_map(say)
    .collect();
    let ours = if told.is_empty() {
        String::new()
    } else {
        format!(
            "In {RESTARTS} restarts a round under both loads, {}. ",
            told.join(", ")
        )
    };
    format!(
        "{ours}{}A listener that closes takes what waits in its queue with it; where the listeners outlive the workers there is nothing to lose.",
        haproxy_meaning(outcome)
    )
}

/// Tells how many requests restarts of HAProxy lose, where both sides were measured.
fn haproxy_meaning(outcome: &Outcome) -> String {
    let lost = |kind: Kind| {
        let values = outcome.values(&arm_name(MANY, kind), "lost");
        let each: Vec<String> = values.iter().map(|v| number(*v)).collect();
        (!each.is_empty()).then(|| each.join(", "))
    };
    let [Some(as_it_is), Some(attached)] = HAPROXY.map(lost) else {
        return String::new();
    };
    let names = [("as_it_is", &*as_it_is), ("attached", &*attached)];
    CARD.say("haproxy", outcome, &names).unwrap_or_default()
}
