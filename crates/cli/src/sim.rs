//! `wakeone sim` simulates a load under several ways of handing out connections.

mod arguments;
mod recorded;
mod search;
mod show;
mod trace;
mod ways;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use wakeone_sim::{
    Arrivals, Dispatch, Faults, Kept, Kind, Load, Next, Outcome, Repeated, Service, Setup, Stop,
    Trace, Wake, run, run_traced,
};

use arguments::{Find, Shared, Sweep, Tie};
use ways::Named;

/// Simulate workers under a load: latency, shares and moves under each way of handing out connections
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  wakeone sim --workers 4 --rate 1000 --service 99:1ms,1:100ms
  wakeone sim --workers 16 --rate 12000 --service exp:1ms --policy least-connections,two-choices
  wakeone sim --rate 1000 --service lognormal:2ms:1.5 --find workers --p99 20ms
  wakeone sim --rate 3000 --service exp:1ms --sweep workers=4..64 --json > sweep.json
  wakeone sim --arrivals file:load.json --service file:load.json --policy all
  wakeone sim --rate 1000 --service 2ms --backlog 128 --stop 0@5s:3s --trace stop.json
  wakeone sim --clients 200 --service exp:1ms
  wakeone sim --rate 2400 --service 1ms --keep-alive 64 --shared wake-all,steered-wake-all

The choices are those of the programs in the kernel, and who is stuck is judged as by the agent.
Time is virtual: a minute of many workers takes a second of one CPU.")]
pub struct Args {
    /// How many workers serve
    #[arg(short, long, value_name = "N", default_value_t = 4)]
    workers: usize,

    /// Requests a second [default: as recorded, for --arrivals file:FILE]
    #[arg(long, value_name = "PER_S")]
    rate: Option<f64>,

    /// Closed loop: so many clients, each of which sends its next request when the last one is answered
    #[arg(long, value_name = "N", conflicts_with_all = ["rate", "arrivals", "keep_alive", "find", "sweep"])]
    clients: Option<usize>,

    /// When requests come: poisson, constant, bursts:PEAK:LENGTH:PART (PEAK times the mean rate in PART of the time), or
    /// file:FILE
    #[arg(long, value_name = "PATTERN", default_value = "poisson", value_parser = arguments::arrivals)]
    arrivals: Arrivals,

    /// How long a worker works on a request: 1ms, exp:1ms, lognormal:1ms:2, pareto:1ms:1.5, 99:1ms,1:100ms or file:FILE
    #[arg(long, value_name = "TIME", value_parser = arguments::service)]
    service: Service,

    /// Requests that a worker serves at a time
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: usize,

    /// Workers are event loops: they accept at once, and their requests share them
    #[arg(long, conflicts_with = "threads")]
    event_loop: bool,

    /// Requests compute all of their time, and share this many CPUs [default: they only wait]
    #[arg(long, value_name = "N")]
    cpus: Option<usize>,

    /// How one shared queue wakes its workers
    #[arg(
        long,
        value_name = "WAY,...",
        value_delimiter = ',',
        default_value = "accept,exclusive,steered-exclusive"
    )]
    shared: Vec<Shared>,

    /// How often the steerer of one queue looks [default: 5ms, as attach]
    #[arg(long, value_name = "TIME", value_parser = crate::duration::parse)]
    look_every: Option<Duration>,

    /// Policies of a queue for each worker, or all [default: hash, two-choices, least-connections]
    #[arg(long, value_name = "POLICY,...", value_delimiter = ',')]
    policy: Vec<String>,

    /// Move the queue of a worker that has not accepted for so long, in one more row a policy
    #[arg(long, value_name = "TIME", default_value = "5ms", value_parser = crate::duration::parse)]
    stuck_after: Duration,

    /// Break ties between equally loaded workers for the one that made progress last, as the programs, or by chance
    #[arg(long, value_name = "RULE", default_value = "freshest")]
    tie: Tie,

    /// How many workers least-connections looks at for one choice: 4, 8, 16 or 32
    #[arg(long, value_name = "N", default_value_t = 32)]
    window: u32,

    /// How the policies weigh the workers, one each
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    weights: Vec<u32>,

    /// How fast the workers are, one each; 1 is a second of work in a second
    #[arg(long, value_name = "X,...", value_delimiter = ',')]
    speeds: Vec<f64>,

    /// Accept queues are limited: a SYN that finds N + 1 waiting is dropped, and sent again as Linux does
    #[arg(long, value_name = "N")]
    backlog: Option<u32>,

    /// A round trip between clients and workers: a connection counts one after its SYN
    #[arg(long, value_name = "TIME", default_value = "0ms", value_parser = crate::duration::parse)]
    rtt: Duration,

    /// Each worker pauses for LENGTH at random, EVERY so often, as for a garbage collector
    #[arg(long, value_name = "EVERY:LENGTH", value_parser = arguments::repeated)]
    pause: Option<Repeated>,

    /// Each worker crashes EVERY so often, loses what it has in hand, and is back after LENGTH
    #[arg(long, value_name = "EVERY:LENGTH", value_parser = arguments::repeated)]
    crash: Option<Repeated>,

    /// Stop a worker at a moment, for LENGTH; repeatable
    #[arg(long, value_name = "WORKER@AT:LENGTH", value_parser = arguments::stop)]
    stop: Vec<Stop>,

    /// Requests come over N connections that are opened beforehand and kept [default: a new one each]
    #[arg(long, value_name = "N")]
    keep_alive: Option<usize>,

    /// How long after one of these the next is opened
    #[arg(long, value_name = "TIME", default_value = "4ms", value_parser = crate::duration::parse)]
    apart: Duration,

    /// So many requests
    #[arg(short = 'n', long, value_name = "N", default_value_t = 200_000)]
    requests: u64,

    /// Same seed, same result
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Find the fewest workers, or the highest rate, that keep --p99
    #[arg(long, value_name = "WHAT", requires = "p99")]
    find: Option<Find>,

    /// The slowest one percent may take this long, for --find
    #[arg(long, value_name = "TIME", value_parser = crate::duration::parse, requires = "find")]
    p99: Option<Duration>,

    /// Simulate a range of workers or rates: workers=1..64 or rate=500..4000
    #[arg(long, value_name = "RANGE", conflicts_with_all = ["find", "trace"])]
    sweep: Option<Sweep>,

    /// Write one second of each way here, in the Chrome trace format (ui.perfetto.dev shows it)
    #[arg(long, value_name = "FILE", conflicts_with = "find")]
    trace: Option<PathBuf>,

    /// Print the results as JSON, in the form that `wakeone-lab report` draws
    #[arg(long)]
    json: bool,
}

/// The virtual time that a trace covers, in s.
const TRACED_S: f64 = 1.0;

/// Simulated outcomes, by name, and the wall-clock time that they took.
struct Found {
    all: Vec<(String, Outcome)>,
    took: Duration,
}

impl Found {
    /// Events a second of wall-clock time.
    fn events_per_s(&self) -> f64 {
        let events: u64 = self.all.iter().map(|(_, one)| one.counts.events).sum();
        events as f64 / self.took.as_secs_f64().max(1e-9)
    }
}

/// Simulates and prints.
pub fn run_args(args: &Args) -> anyhow::Result<ExitCode> {
    let ways = ways::ways(args)?;
    let text = match (args.find, args.p99, &args.sweep) {
        (Some(find), Some(p99), _) => search::found(args, &ways, find, p99)?,
        (_, _, Some(sweep)) => search::swept(args, &ways, sweep)?,
        _ => compared(args, &ways)?,
    };
    wakeone_terminal::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// The requested rate, or the recorded one.
fn rate(args: &Args) -> anyhow::Result<f64> {
    match (args.rate, &args.arrivals) {
        (Some(rate), _) => Ok(rate),
        (None, Arrivals::Recorded(_)) => Ok(args.arrivals.per_s()),
        (None, _) => bail!("a rate is missing: give --rate PER_S, or --arrivals file:FILE"),
    }
}

fn load(args: &Args, arrivals: Arrivals) -> Load {
    Load {
        arrivals,
        service: args.service.clone(),
        requests: args.requests,
        kept: args.keep_alive.map(|connections| Kept {
            connections,
            next: Next::Any,
            apart_s: args.apart.as_secs_f64(),
        }),
        seed: args.seed,
    }
}

fn setup(args: &Args, workers: usize, way: Dispatch) -> Setup {
    Setup {
        kind: if args.event_loop {
            Kind::EventLoop
        } else {
            Kind::Threads(args.threads)
        },
        cpus: args.cpus,
        backlog: args.backlog,
        weights: args.weights.clone(),
        speeds: args.speeds.clone(),
        rtt_s: args.rtt.as_secs_f64(),
        faults: Faults {
            pauses: args.pause,
            crashes: args.crash,
            stops: args.stop.clone(),
        },
        ..Setup::new(workers, way)
    }
}

/// The share of the workers' time that the load needs.
fn utilisation(args: &Args, workers: usize, rate: f64) -> f64 {
    let setup = setup(args, workers, Dispatch::Shared(Wake::LongestAsleep));
    rate * args.service.mean_s() / setup.capacity()
}

/// The arrivals of one simulation, in words too: `1000 requests/s, 53.5 % busy`.
fn arrivals(args: &Args) -> anyhow::Result<(Arrivals, String)> {
    if let Some(clients) = args.clients {
        return Ok((Arrivals::Closed(clients), format!("{clients} clients")));
    }
    let rate = rate(args)?;
    let busy = utilisation(args, args.workers, rate);
    if busy >= 1.0 {
        bail!(
            "{rate} requests/s are {:.0} % of what these workers serve, so queues would grow without end: give more workers or a lower rate",
            busy * 100.0
        );
    }
    let words = format!(
        "{} requests/s, {:.1} % busy",
        show::number_of(rate),
        busy * 100.0
    );
    Ok((args.arrivals.at(rate), words))
}

fn compared(args: &Args, ways: &[Named]) -> anyhow::Result<String> {
    let (arrivals, words) = arrivals(args)?;
    let load = load(args, arrivals);
    let watch = args.json.then(wakeone_result::environment::Watch::start);
    let begun = Instant::now();
    let (mut all, mut traces) = (Vec::new(), Vec::new());
    for named in ways {
        let setup = setup(args, args.workers, named.way);
        let outcome = if args.trace.is_some() {
            let (outcome, trace) = run_traced(&setup, &load, TRACED_S)?;
            traces.push((named.name.as_str(), trace));
            outcome
        } else {
            run(&setup, &load)?
        };
        all.push((named.name.clone(), outcome));
    }
    let took = begun.elapsed();
    let found = Found { all, took };
    write_trace(args, &traces)?;
    match watch {
        Some(watch) => {
            let rate = load.arrivals.per_s();
            show::json(
                args,
                rate.is_finite().then_some(rate),
                &found,
                watch.finish(),
            )
        }
        None => Ok(show::table(args, &words, &found)),
    }
}

fn write_trace(args: &Args, traces: &[(&str, Trace)]) -> anyhow::Result<()> {
    let Some(path) = &args.trace else {
        return Ok(());
    };
    let text = trace::chrome(traces, args.event_loop || args.threads > 1).to_string();
    std::fs::write(path, text).with_context(|| format!("writing {} failed", path.display()))
}
