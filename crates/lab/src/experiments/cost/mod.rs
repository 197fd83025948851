//! What does choosing cost, and what does watching? Connections a second with and without it, and the time of a run of
//! each program.

mod watched;

use serde_json::json;
use wakeone_kernel::run_stats::RunStats;
use wakeone_load::{Arrivals, Mix, Plan};

use crate::experiment::{
    Arm, Card, Context, Design, Experiment, Pairing, Sample, Settings, Source, parameters,
};
use crate::measure::Trial;
use crate::present::{Bar, Block, Chart, Kind, Row, Style, Table, number};
use crate::result::{Expectation, Outcome};
use crate::ways::{self, Way};
use crate::{Error, measure, status};
use watched::{Doctor, VIEWS, View};

/// The experiment.
pub struct Cost;

const WORKERS: usize = 4;
/// Clients of the closed loop: enough that no worker is ever without work, few enough that queues stay short.
const CLIENTS: usize = 64;
/// The variant that measures the programs, with the kernel's statistics on.
const PROGRAMS: &str = "cost/programs";
/// The ways whose connections a second are compared.
const WAYS: [Way; 3] = [
    Way::ReuseportHash,
    Way::LeastConnections,
    Way::LeastConnectionsRescue,
];

const LEAST_TO_HASH: &str = "connections/s of least-connections / those of reuseport-hash";
const RESCUE_TO_HASH: &str = "connections/s of least-connections+rescue / those of reuseport-hash";
const WATCHED_TO_HASH: &str =
    "connections/s of reuseport-hash while doctor watches / those of reuseport-hash";
const UNTRACED_TO_HASH: &str = "connections/s of reuseport-hash while doctor watches without tracing / those of reuseport-hash";
const OURS: &str = "Wakeone's own goal";

const CARD: Card = Card {
    name: "cost",
    title: "What does choosing a worker cost?",
    question: "How many connections a second does a server of four workers take when a program chooses for each, and how long does a run of the program take?",
    source: Source {
        short: "Wakeone",
        long: "Beyond the papers: the price of the method that the other experiments show the use of.",
        url: "",
    },
    readme: include_str!("README.md"),
    published: "series,x,metric,unit,value,note\n",
};

impl Experiment for Cost {
    fn card(&self) -> &Card {
        &CARD
    }

    fn design(&self, settings: &Settings) -> Design {
        let seconds = load_seconds(settings);
        let mut arms = ways::arms("cost", &WAYS, 0, seconds + 0.5);
        arms.extend(VIEWS.map(|view| Arm {
            name: view.arm().into(),
            group: 0,
            seconds: seconds + 1.5,
        }));
        arms.push(Arm {
            name: PROGRAMS.into(),
            group: 1,
            seconds: seconds + 0.5,
        });
        let pairing =
            |name, way| ways::pairing(name, "cost", "throughput_per_s", way, Way::ReuseportHash);
        Design {
            rounds: if settings.quick { 7 } else { 15 },
            arms,
            pairings: vec![
                pairing(LEAST_TO_HASH, Way::LeastConnections),
                pairing(RESCUE_TO_HASH, Way::LeastConnectionsRescue),
                watching(WATCHED_TO_HASH, View::Tracing),
                watching(UNTRACED_TO_HASH, View::Proc),
            ],
            steady: "throughput_per_s",
            parameters: parameters([
                ("workers", json!(WORKERS)),
                ("clients", json!(CLIENTS)),
                ("load_s", json!(seconds)),
                (
                    "request",
                    json!("GET /whoami, a connection a request, closed loop"),
                ),
            ]),
        }
    }

    fn measure(&self, arm: &Arm, context: &mut Context<'_>) -> Result<Sample, Error> {
        if arm.name == PROGRAMS {
            return programs(context);
        }
        if let Some(view) = View::of(&arm.name) {
            return watched(view, context);
        }
        let (_, way) = ways::parse_arm(&arm.name, &WAYS)?;
        let mut trial = Trial::start(way, WORKERS)?;
        let found = trial.load(&plan(trial.address, context), context)?;
        let mut sample = measure::sample(&found, WORKERS);
        trial.end(&mut sample)?;
        Ok(sample)
    }

    fn judge(&self, outcome: &Outcome) -> Vec<Expectation> {
        let cheap = |name: &str, claim: &str, ratio: &str| {
            Expectation::new(name, claim, OURS, outcome.ratio(ratio), |m| m >= 0.95)
        };
        let mut expected = vec![
            cheap(
                "least-connections-throughput",
                "Least-connections takes at least 0.95 times as many connections a second as the kernel's hash",
                LEAST_TO_HASH,
            ),
            cheap(
                "rescue-throughput",
                "With rescue as well, at least 0.95 times as many",
                RESCUE_TO_HASH,
            ),
            quiet(outcome, "watched-throughput", WATCHED_TO_HASH),
            quiet(
                outcome,
                "watched-without-tracing-throughput",
                UNTRACED_TO_HASH,
            ),
            Expectation::new(
                "dispatch-ns",
                "The program that chooses takes at most 300 ns a run",
                OURS,
                outcome.median(PROGRAMS, "dispatch_ns"),
                |m| m <= 300.0,
            ),
            Expectation::new(
                "sock-ops-ns",
                "The program that counts takes at most 150 ns a run",
                OURS,
                outcome.median(PROGRAMS, "sock_ops_ns"),
                |m| m <= 150.0,
            ),
        ];
        expected.extend(measure::sound(outcome));
        expected
    }

    fn present(&self, outcome: &Outcome) -> Vec<Block> {
        let mut blocks = vec![Block::Heading("What it means".into())];
        blocks.extend(meaning(outcome).map(Block::Paragraph));
        blocks.push(Block::Table(table(outcome)));
        blocks.push(Block::Chart(chart(outcome)));
        blocks
    }
}

fn watching(name: &str, view: View) -> Pairing {
    Pairing {
        name: name.into(),
        a: view.arm().into(),
        b: ways::arm_name("cost", Way::ReuseportHash),
        metric: "throughput_per_s".into(),
    }
}

fn quiet(outcome: &Outcome, name: &str, ratio: &str) -> Expectation {
    let claim = if ratio == WATCHED_TO_HASH {
        "A server that doctor watches takes at least 0.98 times as many connections a second"
    } else {
        "Without tracing, too, at least 0.98 times as many"
    };
    Expectation::new(name, claim, OURS, outcome.ratio(ratio), |m| m >= 0.98)
}

fn load_seconds(settings: &Settings) -> f64 {
    if settings.quick { 1.0 } else { 3.0 }
}

fn plan(target: std::net::SocketAddr, context: &Context<'_>) -> Plan {
    let clients = Arrivals::Closed {
        concurrency: CLIENTS,
    };
    let end = measure::for_seconds(load_seconds(context.settings));
    measure::plan(target, clients, end, Mix::one("/whoami"), context.seed)
}

/// The kernel's hash, while doctor watches.
fn watched(view: View, context: &mut Context<'_>) -> Result<Sample, Error> {
    let mut trial = Trial::start(Way::ReuseportHash, WORKERS)?;
    let doctor = Doctor::start(view, trial.address)?;
    let found = trial.load(&plan(trial.address, context), context)?;
    let mut sample = measure::sample(&found, WORKERS);
    doctor.end(load_seconds(context.settings), &mut sample)?;
    trial.end(&mut sample)?;
    Ok(sample)
}

/// Mean time of a run of each program under the same load, from the kernel's own statistics.
fn programs(context: &mut Context<'_>) -> Result<Sample, Error> {
    let counting = RunStats::enable().map_err(|e| {
        Error::Missing(format!(
            "asking the kernel to count the runs of BPF programs failed: {e}; it needs CAP_SYS_ADMIN"
        ))
    })?;
    let mut trial = Trial::start(Way::LeastConnections, WORKERS)?;
    let address = trial.address;
    let before = status::read()?;
    let found = trial.load(&plan(address, context), context)?;
    let after = status::read()?;
    let mut sample = Sample::default();
    trial.end(&mut sample)?;
    drop(counting);
    sample.put("errors", "count", found.errors.values().sum::<u64>() as f64);
    sample.put("requests", "count", found.completed as f64);
    for (metric, program) in [("dispatch", "dispatc"), ("sock_ops", "count")] {
        let (runs, ns) = ran(&before, &after, address, program)?;
        sample.put(format!("{metric}_ns"), "ns", ns / runs);
        sample.put(
            format!("{metric}_runs_per_connection"),
            "ratio",
            runs / found.connections.max(1) as f64,
        );
    }
    Ok(sample)
}

/// How often a program ran between two looks at the status, and how long that took in ns.
fn ran(
    before: &serde_json::Value,
    after: &serde_json::Value,
    address: std::net::SocketAddr,
    program: &str,
) -> Result<(f64, f64), Error> {
    let missing = || {
        Error::Server(format!(
            "`wakeone status --json` shows no run of the program {program} on {address}"
        ))
    };
    let (from, to) = (
        status::program(before, address, program).unwrap_or((0, 0)),
        status::program(after, address, program).ok_or_else(missing)?,
    );
    let (runs, ns) = (to.0.saturating_sub(from.0), to.1.saturating_sub(from.1));
    if runs == 0 {
        Err(missing())
    } else {
        Ok((runs as f64, ns as f64))
    }
}

fn meaning(outcome: &Outcome) -> Option<String> {
    let least = outcome.ratio(LEAST_TO_HASH)?;
    let dispatch = outcome.median(PROGRAMS, "dispatch_ns")?;
    let runs = outcome.median(PROGRAMS, "dispatch_runs_per_connection")?;
    let sock_ops = outcome.median(PROGRAMS, "sock_ops_ns")?;
    let ends = outcome.median(PROGRAMS, "sock_ops_runs_per_connection")?;
    let per_connection_us = (dispatch * runs + sock_ops * ends) / 1000.0;
    let verdict = if least >= 0.95 {
        "costs next to nothing"
    } else {
        "costs a share that is to be seen"
    };
    Some(format!(
        "Choosing {verdict} here: {} times the connections a second of the kernel's hash. The programs take {} ns ({} runs a connection) and {} ns ({} runs, both ends counted): {} µs of a whole connection.",
        number(least),
        number(dispatch),
        number(runs),
        number(sock_ops),
        number(ends),
        number(per_connection_us)
    ))
}

/// The variants whose connections a second are compared, and their titles.
fn compared() -> impl Iterator<Item = (String, &'static str)> {
    let ways = WAYS.map(|way| (ways::arm_name("cost", way), way.name()));
    let views = VIEWS.map(|view| (view.arm().to_owned(), view.title()));
    ways.into_iter().chain(views)
}

fn table(outcome: &Outcome) -> Table {
    let row = |(arm, title): (String, &str)| {
        let variant = outcome.variant(&arm)?;
        let rate = variant.metrics.get("throughput_per_s")?;
        let cell = |name: &str| variant.median(name).map_or_else(|| "–".into(), number);
        Some(Row::ours(vec![
            title.into(),
            number(rate.median),
            number(rate.min),
            number(rate.max),
            cell("latency_ms_p50"),
            cell("latency_ms_p99"),
            cell("share_max_over_mean"),
            cell("watcher_cpu_percent"),
        ]))
    };
    Table {
        caption: "Connections a second: connect, accept, reply, close.".into(),
        head: [
            "",
            "median",
            "min",
            "max",
            "p50 ms",
            "p99 ms",
            "share max/mean",
            "doctor's CPU %",
        ]
        .map(str::to_owned)
        .into(),
        rows: compared().filter_map(row).collect(),
    }
}

fn chart(outcome: &Outcome) -> Chart {
    let bar = |(place, (arm, title)): (usize, (String, &str))| {
        let rate = outcome.variant(&arm)?.metrics.get("throughput_per_s")?;
        let colour = WAYS.get(place).map_or(place + 2, |way| way.colour());
        let style = Style::ours(title, colour);
        Some(Bar {
            style,
            value: rate.median,
            range: Some((rate.min, rate.max)),
        })
    };
    Chart {
        title: "Connections a second.".into(),
        note: "Longer is better. Client and server share the CPUs.".into(),
        kind: Kind::Bars {
            unit: "/s".into(),
            bars: compared().enumerate().filter_map(bar).collect(),
            log: false,
        },
    }
}
