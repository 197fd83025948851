//! `wakeone sim` simulates a load under several ways of handing out connections.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::bail;
use serde_json::json;
use wakeone::policy::Policy;
use wakeone_sim::{Arrivals, Load, Outcome, Service, Setup, Wake, Way, run};

/// Simulate workers under a load: latency, shares and moves under each way of handing out connections
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  wakeone sim --workers 4 --rate 1000 --service 99:1ms,1:100ms
  wakeone sim --workers 16 --rate 12000 --service exp:1ms --policy least-connections,two-choices
  wakeone sim --rate 1000 --service lognormal:2ms:1.5 --find workers --p99 20ms

The choices are those of the programs in the kernel, and who is stuck is judged as by the agent.
Time is virtual: a minute of many workers takes a second of one CPU.")]
pub struct Args {
    /// How many workers serve
    #[arg(short, long, value_name = "N", default_value_t = 4)]
    workers: usize,

    /// Requests a second, from independent clients (Poisson)
    #[arg(long, value_name = "PER_S")]
    rate: f64,

    /// How long a worker works on a request: 1ms, exp:1ms, lognormal:1ms:2, pareto:1ms:1.5 or 99:1ms,1:100ms
    #[arg(long, value_name = "TIME")]
    service: Service,

    /// Requests that a worker serves at a time
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: usize,

    /// Requests compute all of their time, and share this many CPUs [default: they only wait]
    #[arg(long, value_name = "N")]
    cpus: Option<usize>,

    /// Policies, or all [default: hash, two-choices, least-connections]
    #[arg(long, value_name = "POLICY,...", value_delimiter = ',')]
    policy: Vec<String>,

    /// Move the queue of a worker that has not accepted for so long, in one more row a policy
    #[arg(long, value_name = "TIME", default_value = "5ms", value_parser = crate::duration::parse)]
    stuck_after: Duration,

    /// Requests come over N connections that are opened beforehand and kept [default: a new one each]
    #[arg(long, value_name = "N")]
    keep_alive: Option<usize>,

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

    /// Print the results as JSON
    #[arg(long)]
    json: bool,
}

/// The wish that `--find` looks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Find {
    /// The fewest workers
    Workers,
    /// The highest rate
    Rate,
}

/// A way of handing out connections, by name.
#[derive(Debug, Clone)]
struct Named {
    name: String,
    way: Way,
}

/// Simulates and prints.
pub fn run_args(args: &Args) -> anyhow::Result<ExitCode> {
    let ways = ways(args)?;
    let text = match (args.find, args.p99) {
        (Some(find), Some(p99)) => found(args, &ways, find, p99)?,
        _ => compared(args, &ways)?,
    };
    crate::output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn ways(args: &Args) -> anyhow::Result<Vec<Named>> {
    let asked: Vec<&str> = args.policy.iter().map(String::as_str).collect();
    let policies: Vec<Policy> = match asked.as_slice() {
        [] => vec![Policy::Hash, Policy::TwoChoices, Policy::LeastConnections],
        // Which CPU gets a packet is not simulated.
        ["all"] => Policy::ALL
            .into_iter()
            .filter(|one| *one != Policy::Cpu)
            .collect(),
        some => some
            .iter()
            .map(|name| name.parse::<Policy>())
            .collect::<Result<_, _>>()
            .map_err(anyhow::Error::msg)?,
    };
    if asked.len() > 1 && asked.contains(&"all") || policies.contains(&Policy::Cpu) {
        bail!("`all` stands alone, and `cpu` cannot be simulated: it depends on the network card");
    }
    let mut ways: Vec<Named> = [
        ("shared-accept", Wake::LongestAsleep),
        ("shared-epoll-exclusive", Wake::FirstRegistered),
    ]
    .map(|(name, wake)| Named {
        name: name.into(),
        way: Way::Shared(wake),
    })
    .into();
    for policy in policies {
        let steered = |stuck_after_s| Way::Steered {
            policy: policy.number(),
            stuck_after_s,
        };
        ways.push(Named {
            name: policy.to_string(),
            way: steered(None),
        });
        // A connection that was accepted stays where it is.
        if args.keep_alive.is_none() {
            ways.push(Named {
                name: format!("{policy}+rescue"),
                way: steered(Some(args.stuck_after.as_secs_f64())),
            });
        }
    }
    Ok(ways)
}

fn load(args: &Args, rate: f64) -> Load {
    Load {
        arrivals: Arrivals::Poisson { per_s: rate },
        service: args.service.clone(),
        requests: args.requests,
        kept: args.keep_alive,
        seed: args.seed,
    }
}

fn setup(args: &Args, workers: usize, way: Way) -> Setup {
    Setup {
        workers,
        threads: args.threads,
        cpus: args.cpus,
        way,
    }
}

/// The part of the servers' time that the load asks for.
fn utilisation(args: &Args, workers: usize, rate: f64) -> f64 {
    let servers = workers * args.threads;
    load(args, rate).utilisation(args.cpus.map_or(servers, |cpus| cpus.min(servers)))
}

fn compared(args: &Args, ways: &[Named]) -> anyhow::Result<String> {
    let busy = utilisation(args, args.workers, args.rate);
    if busy >= 1.0 {
        bail!(
            "{} requests/s are {:.0} % of what these workers serve, so queues would grow without end: give more workers or a lower rate",
            args.rate,
            busy * 100.0
        );
    }
    let begun = Instant::now();
    let mut all = Vec::new();
    for named in ways {
        let outcome = run(
            &setup(args, args.workers, named.way),
            &load(args, args.rate),
        )?;
        all.push((named.name.as_str(), outcome));
    }
    let took = begun.elapsed().as_secs_f64();
    if args.json {
        return Ok(format!("{:#}\n", as_json(args, busy, &all)));
    }
    Ok(table(args, busy, &all, took))
}

fn table(args: &Args, busy: f64, all: &[(&str, Outcome)], took: f64) -> String {
    let mut text = format!(
        "Simulated: {} workers, {} requests/s, {:.1} % busy. Times in ms.\n\n{:<24}{:>8}{:>8}{:>8}{:>8}{:>8}{:>7}{:>8}\n",
        args.workers,
        args.rate,
        busy * 100.0,
        "",
        "mean",
        "p50",
        "p90",
        "p99",
        "p99.9",
        "most",
        "moved"
    );
    for (name, outcome) in all {
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
            outcome.moved as f64 * 100.0 / args.requests as f64,
        );
    }
    let events: u64 = all.iter().map(|(_, outcome)| outcome.events).sum();
    let _ = write!(
        text,
        "\nmost: the share of the busiest worker, over the mean. moved: connections that rescue put\ninto another queue. {:.1} million events in {took:.1} s.\n",
        events as f64 / 1e6
    );
    text
}

/// Three digits that count.
fn number(value: f64) -> String {
    let places = match value {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.places$}")
}

fn as_json(args: &Args, busy: f64, all: &[(&str, Outcome)]) -> serde_json::Value {
    let row = |(name, outcome): &(&str, Outcome)| {
        json!({
            "name": name,
            "latency_ms_mean": outcome.mean_s * 1e3,
            "latency_ms_mean_error": outcome.mean_error_s * 1e3,
            "latency_ms_p50": outcome.quantile_s(0.5) * 1e3,
            "latency_ms_p90": outcome.quantile_s(0.9) * 1e3,
            "latency_ms_p99": outcome.quantile_s(0.99) * 1e3,
            "latency_ms_p999": outcome.quantile_s(0.999) * 1e3,
            "share_max_over_mean": outcome.max_over_mean(),
            "served": outcome.served,
            "rescues": outcome.rescues,
            "moved": outcome.moved,
            "events": outcome.events,
            "elapsed_s": outcome.elapsed_s,
        })
    };
    json!({
        "simulated": true,
        "workers": args.workers,
        "rate_per_s": args.rate,
        "utilisation": busy,
        "requests": args.requests,
        "seed": args.seed,
        "variants": all.iter().map(row).collect::<Vec<_>>(),
    })
}

fn found(args: &Args, ways: &[Named], find: Find, p99: Duration) -> anyhow::Result<String> {
    let mut rows = Vec::new();
    for named in ways {
        let keeps = |workers: usize, rate: f64| -> anyhow::Result<bool> {
            if utilisation(args, workers, rate) >= 1.0 {
                return Ok(false);
            }
            let outcome = run(&setup(args, workers, named.way), &load(args, rate))?;
            Ok(outcome.quantile_s(0.99) <= p99.as_secs_f64())
        };
        let value = match find {
            Find::Workers => fewest(|workers| keeps(workers, args.rate))?.map(|n| n as f64),
            Find::Rate => highest(args.rate, |rate| keeps(args.workers, rate))?,
        };
        rows.push((named.name.as_str(), value));
    }
    let what = match find {
        Find::Workers => "workers",
        Find::Rate => "rate_per_s",
    };
    if args.json {
        let rows: serde_json::Map<_, _> = rows
            .iter()
            .map(|(name, value)| ((*name).to_owned(), json!({ what: value })))
            .collect();
        return Ok(format!(
            "{:#}\n",
            json!({ "simulated": true, "found": rows })
        ));
    }
    let mut text = format!(
        "Simulated: {} with a p99 of at most {} ms.\n\n",
        match find {
            Find::Workers => format!("the fewest workers for {} requests/s", args.rate),
            Find::Rate => format!("the most requests/s of {} workers", args.workers),
        },
        number(p99.as_secs_f64() * 1e3)
    );
    for (name, value) in rows {
        let value = value.map_or("none".to_owned(), |value| format!("{value:.0}"));
        let _ = writeln!(text, "{name:<24}{value:>10}");
    }
    Ok(text)
}

/// The smallest number of workers that `keeps` holds for; a larger one is taken to hold as well.
fn fewest(keeps: impl Fn(usize) -> anyhow::Result<bool>) -> anyhow::Result<Option<usize>> {
    let most = wakeone_kernel::table::MAX_SLOTS;
    if !keeps(most)? {
        return Ok(None);
    }
    let (mut too_few, mut enough) = (0, most);
    while enough - too_few > 1 {
        let middle = (too_few + enough) / 2;
        if keeps(middle)? {
            enough = middle;
        } else {
            too_few = middle;
        }
    }
    Ok(Some(enough))
}

/// How exactly a rate is looked for.
const FINE: f64 = 1.01;

/// The highest rate that `keeps` holds for, to one percent, from a first guess on.
fn highest(guess: f64, keeps: impl Fn(f64) -> anyhow::Result<bool>) -> anyhow::Result<Option<f64>> {
    let (mut low, mut high) = (guess, guess);
    while keeps(high)? {
        (low, high) = (high, high * 2.0);
    }
    while low >= guess / 1e6 && !keeps(low)? {
        (low, high) = (low / 2.0, low);
    }
    if low < guess / 1e6 {
        return Ok(None);
    }
    while high / low > FINE {
        let middle = (low * high).sqrt();
        if keeps(middle)? {
            low = middle;
        } else {
            high = middle;
        }
    }
    Ok(Some(low))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fewest_and_the_highest_are_found() {
        for least in [1, 2, 37, 256] {
            assert_eq!(fewest(|n| Ok(n >= least)).unwrap(), Some(least));
        }
        assert_eq!(fewest(|_| Ok(false)).unwrap(), None);
        for most in [3.0, 100.0, 54_321.0] {
            let found = highest(100.0, |rate| Ok(rate <= most)).unwrap().unwrap();
            assert!(found <= most && found * FINE >= most, "{found} of {most}");
        }
        assert_eq!(highest(100.0, |_| Ok(false)).unwrap(), None);
    }
}
