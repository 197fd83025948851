//! `wakeone run`: start a server with one queue a worker, steered and supervised.

use anyhow::Context;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use tracing::Level;
use tracing_subscriber::fmt::format;
use wakeone::group::{self, Group, Wish};
use wakeone::policy::{Affinity, Policy};
use wakeone::split;
use wakeone::supervisor::address::Address;
use wakeone::supervisor::{Options, state};

use crate::duration;

/// Start a server with one queue a worker: steered, supervised, restarted without a lost connection
///
/// Each worker gets listeners of its own, by systemd's protocol (LISTEN_FDS) or by their numbers in the command:
/// {fd} is the first listener's, {fd2} the second's. {slot} is the worker's slot, from 0.
/// SIGHUP restarts the workers one at a time, SIGTERM and SIGINT drain and stop, a second SIGINT kills.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples: wakeone run -w 4 -l :8080 -- gunicorn --bind fd://{fd} app:app
          wakeone run -w 4 -l udp://:5353 --affinity none -- ./dns-server
          wakeone run --split -- gunicorn -w 4 --bind :8080 app:app
          wakeone run --split --affinity none -- ./dns-server"
)]
pub struct Args {
    /// Number of workers, 1 to 256 [default: the number of CPUs]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    workers: Option<u16>,

    /// Address to listen on: :8080 (IPv6 and IPv4), 127.0.0.1:8080, [::1]:8080, localhost:8080, and by UDP
    /// udp://:53; repeatable
    #[arg(short, long, value_name = "ADDR", required_unless_present = "split")]
    listen: Vec<Address>,

    /// Start a server that opens one listener, or UDP socket, itself and shares it among its own workers or threads,
    /// and give each of those a queue of its own. `check`: change nothing, tell what would be done, end the server
    #[arg(
        long,
        value_name = "HOW",
        value_enum,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "on",
        conflicts_with_all = ["workers", "listen", "backlog", "weight", "user", "group", "keep_cap", "grace", "name"]
    )]
    split: Option<Split>,

    /// How a worker is chosen: hash, round-robin, random, least-connections, two-choices, shortest-queue, cpu or
    /// consistent [default: least-connections, for UDP shortest-queue, or the best that we may]
    #[arg(long, value_name = "NAME")]
    policy: Option<Policy>,

    /// Datagrams of one flow (addresses and ports) go to one worker, or each is placed by the policy: flow or none
    /// [default: flow]
    #[arg(long, value_name = "KIND")]
    affinity: Option<Affinity>,

    /// Move the queue of a stuck worker to others [default where it can be done]
    #[arg(long, overrides_with = "no_rescue")]
    rescue: bool,

    /// Leave the queue of a stuck worker where it is
    #[arg(long)]
    no_rescue: bool,

    /// How long a worker may leave connections waiting while another is idle
    #[arg(long, value_name = "TIME", default_value = "5ms", value_parser = duration::parse)]
    stuck_after: Duration,

    /// Length of each accept queue [default: net.core.somaxconn]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..))]
    backlog: Option<i32>,

    /// Weight of a slot, 1 for the others; repeatable
    #[arg(long, value_name = "SLOT=N", value_parser = weight)]
    weight: Vec<(usize, u32)>,

    /// User (name or number) that workers run as
    #[arg(long, value_name = "USER")]
    user: Option<String>,

    /// Group that workers run as [default: the user's; needed for a user without an entry in the user database]
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,

    /// Capability that workers keep, such as CAP_NET_RAW; repeatable
    #[arg(long, value_name = "CAP")]
    keep_cap: Vec<String>,

    /// How long a worker may take to end when asked to
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration::parse)]
    grace: Duration,

    /// Name of the group [default: from the first address]
    #[arg(long)]
    name: Option<String>,

    /// Serve OpenMetrics on this address, at /metrics
    #[arg(long, value_name = "ADDR:PORT")]
    metrics: Option<SocketAddr>,

    /// Waits and wake-ups are among the metrics: of the kernel's tracepoints, which cost the server some CPU time (`lab run cost` measures it)
    #[arg(long, requires = "metrics")]
    metrics_tracing: bool,

    /// Form of the lines on standard error
    #[arg(long, value_enum, default_value_t = Log::Text)]
    log: Log,

    /// Least important lines to write: error, warn, info or debug
    #[arg(long, value_name = "LEVEL", default_value_t = Level::INFO, value_parser = log_level)]
    log_level: Level,

    /// Where the group keeps its state [default: $WAKEONE_RUNTIME_DIR, /run/wakeone]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,

    /// The server, and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Split {
    /// Do it
    On,
    /// Tell whether it would be done
    Check,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Log {
    /// Short sentences
    Text,
    /// An object a line
    Json,
}

/// Supervises until told to stop.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    start_log(args.log, args.log_level);
    if let Some(how) = args.split {
        return split(&args, how);
    }
    match supervise(&args) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            // Our own errors are whole sentences; their sources are in them already.
            let (sentence, usage) = match error.downcast_ref::<group::Error>() {
                Some(own) => (own.to_string(), own.is_usage()),
                None => (format!("{error:#}"), false),
            };
            tracing::error!(event = "error", "wakeone run: {sentence}");
            Ok(ExitCode::from(if usage { 2 } else { 1 }))
        }
    }
}

/// Runs a server of others' making with its listener split.
fn split(args: &Args, how: Split) -> anyhow::Result<ExitCode> {
    let options = split::Options {
        command: args.command.clone(),
        policy: args.policy,
        affinity: args.affinity.unwrap_or_default(),
        rescue: wish(args).rescue != Some(false),
        stuck_after: args.stuck_after,
        runtime_dir: runtime_dir(args),
        check: how == Split::Check,
        metrics: args.metrics,
        metrics_tracing: args.metrics_tracing,
    };
    match split::run(&options) {
        Ok(code) => Ok(ExitCode::from(code)),
        Err(error) => {
            tracing::error!(event = "error", "wakeone run: {error}");
            Ok(ExitCode::FAILURE)
        }
    }
}

fn runtime_dir(args: &Args) -> PathBuf {
    let given = args.runtime_dir.clone();
    given.unwrap_or_else(state::default_runtime_dir)
}

fn supervise(args: &Args) -> anyhow::Result<()> {
    let group = Group::new(&options(args)?, &wish(args))?;
    let supervisor = group.supervisor();
    for endpoint in supervisor.endpoints() {
        let policy = group.policy(endpoint);
        let (address, workers, name) = (
            endpoint.address,
            supervisor.listeners().len(),
            supervisor.name(),
        );
        tracing::info!(event = "listening", %address, workers, group = name, %policy, "listening on {endpoint}: {workers} queues, policy {policy}, group `{name}`");
    }
    group.run()?;
    Ok(())
}

fn wish(args: &Args) -> Wish {
    Wish {
        policy: args.policy,
        affinity: args.affinity,
        rescue: match (args.rescue, args.no_rescue) {
            (_, true) => Some(false),
            (true, false) => Some(true),
            (false, false) => None,
        },
        stuck_after: args.stuck_after,
        weights: args.weight.clone(),
        metrics: args.metrics,
        metrics_tracing: args.metrics_tracing,
    }
}

fn options(args: &Args) -> anyhow::Result<Options> {
    let cpus =
        || std::thread::available_parallelism().map(|count| count.get().min(state::MOST_SLOTS));
    Ok(Options {
        name: args.name.clone(),
        workers: match args.workers {
            Some(workers) => workers.into(),
            None => cpus().context("cannot tell the number of CPUs; give -w")?,
        },
        listen: args.listen.clone(),
        backlog: args.backlog,
        command: args.command.clone(),
        user: args.user.clone(),
        group: args.group.clone(),
        keep_caps: args.keep_cap.clone(),
        grace: args.grace,
        runtime_dir: runtime_dir(args),
    })
}

/// The log of a service: sentences, as `run` has them by default.
pub fn start_plain_log() {
    start_log(Log::Text, Level::INFO);
}

/// Lines for people show the sentence alone; lines for programs carry the fields too.
///
/// A line that cannot be written is lost (whoever read our standard error is gone): serving goes on. By default the
/// failure would be printed, to the same place, and that panics.
fn start_log(form: Log, level: Level) {
    let builder = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(level)
        .log_internal_errors(false);
    match form {
        Log::Json => builder.json().flatten_event(true).with_target(false).init(),
        Log::Text => {
            let sentence = format::debug_fn(|writer, field, value| {
                if field.name() == "message" {
                    write!(writer, "{value:?}")
                } else {
                    Ok(())
                }
            });
            builder
                .without_time()
                .with_level(false)
                .with_target(false)
                .with_ansi(false)
                .fmt_fields(sentence)
                .init();
        }
    }
}

/// `trace` is no level of ours: nothing is written at it.
fn log_level(text: &str) -> Result<Level, String> {
    text.parse()
        .ok()
        .filter(|level| *level <= Level::DEBUG && !text.starts_with(|c: char| c.is_ascii_digit()))
        .ok_or_else(|| format!("`{text}` is no level; there are error, warn, info and debug"))
}

/// `SLOT=N`, both numbers.
pub fn weight(text: &str) -> Result<(usize, u32), String> {
    let parse = || {
        let (slot, weight) = text.split_once('=')?;
        Some((
            slot.parse().ok()?,
            weight.parse().ok().filter(|weight| *weight > 0)?,
        ))
    };
    parse().ok_or_else(|| format!("`{text}` is no weight; write SLOT=N, as in 0=2"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_go_down_to_debug() {
        assert_eq!(log_level("debug"), Ok(Level::DEBUG));
        assert_eq!(log_level("error"), Ok(Level::ERROR));
        for text in ["", "trace", "3", "loud"] {
            assert!(log_level(text).is_err(), "{text}");
        }
    }

    #[test]
    fn weights_name_a_slot() {
        assert_eq!(weight("3=7"), Ok((3, 7)));
        for text in ["", "3", "=7", "3=", "3=0", "a=1", "-1=1"] {
            assert!(weight(text).is_err(), "{text}");
        }
    }
}
