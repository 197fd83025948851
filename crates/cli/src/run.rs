//! `wakeone run`: starts a server with one queue for each worker, steered and supervised.

use anyhow::Context;
use nix::sys::signal::Signal;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;
use wakeone::attach::AttachConfig;
use wakeone::group::{self, Group, SteeringConfig};
use wakeone::started;
use wakeone_control::policy::{Affinity, Policy};
use wakeone_control::state;
use wakeone_model::layout::counted;
use wakeone_supervisor::Options;
use wakeone_supervisor::address::Address;
use wakeone_supervisor::wear::Limits;

use crate::duration;
use crate::runtime_dir::RuntimeDir;

/// Start a server as it is and steer it, or its workers on listeners of ours: supervised, restarted without a lost connection
///
/// Without -l the server is started as it is, and whatever it opens is steered as by `wakeone attach`.
/// With -l each worker gets listeners of its own, by systemd's protocol (LISTEN_FDS) or by their numbers in the command:
/// {fd} is the first listener's, {fd2} the second's. A server that takes none gets the port by {port} and opens
/// its own listener, which it shares with the other workers. {slot} is the worker's slot, from 0.
/// SIGHUP restarts the workers one at a time, SIGTTIN and SIGTTOU start and end one, SIGTERM and SIGINT drain and stop, a second SIGINT kills.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples: wakeone run -- uvicorn --workers 4 app:app
          wakeone run -w 4 -l :8080 -- gunicorn --bind fd://{fd} app:app
          wakeone run -w 4 -l :8080 --queue one -- uvicorn --fd {fd} app:app
          wakeone run -w 4 -l :8080 -- granian --port {port} app:app
          wakeone run -w 4 -l udp://:5353 --affinity none -- ./dns-server
          wakeone run -w 4 -l udp://:443 --affinity quic -- hypercorn --quic-bind fd://{fd} app:app
          wakeone run -w 4 -l :8080 --max-requests 10000 --max-memory 512M -- gunicorn --bind fd://{fd} app:app
          wakeone run --lookup -w 4 -l :8080 -- gunicorn --bind fd://{fd} app:app
          wakeone run --split -- ./dns-server
          wakeone run --split --affinity none -- ./dns-server")]
pub struct Args {
    /// Number of workers, 1 to 256 [default: the number of CPUs]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256), requires = "listen")]
    workers: Option<u16>,

    /// There may be so many later, up to 256: `wakeone scale`, SIGTTIN (one more) and SIGTTOU (one less) change the number
    /// while it runs [default: twice as many, 32 at most]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256), requires = "listen")]
    max_workers: Option<u16>,

    /// Address to listen on: :8080 (IPv6 and IPv4), 127.0.0.1:8080, [::1]:8080, localhost:8080, and by UDP
    /// udp://:53; repeatable
    #[arg(short, long, value_name = "ADDR")]
    listen: Vec<Address>,

    /// Give each thread or process that receives from one UDP socket of the server a queue of its own; listeners are steered
    /// as without --split. `check`: change nothing, tell what would be done, end the server
    #[arg(
        long,
        value_name = "HOW",
        value_enum,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "on",
        conflicts_with_all = ["workers", "max_workers", "listen", "queue", "backlog", "weight", "lookup", "user", "group", "keep_cap", "nonblocking", "stdin", "name", "restart", "refuse"]
    )]
    split: Option<Split>,

    /// The workers share one accept queue for each address, and Wakeone changes who is woken; or each has its own, and a
    /// program chooses between them [default: each, and one where no program may be loaded]
    #[arg(long, value_name = "QUEUES", value_enum, requires = "listen")]
    queue: Option<Queue>,

    /// How a worker is chosen: hash, round-robin, random, least-connections, two-choices, shortest-queue, cpu or
    /// consistent [default: least-connections, for UDP other than QUIC shortest-queue, or the best that we may]
    #[arg(long, value_name = "NAME")]
    policy: Option<Policy>,

    /// Datagrams of one flow (addresses and ports) go to one worker (flow), those of one connection of QUIC (quic), or each is
    /// placed by the policy (none) [default: flow; with --split, a flow that is too much for one reader is spread]
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

    /// Have the listeners on a private port, where a program finds them for the public address: moving the queue of a stuck
    /// worker then takes as long with 100,000 connections as with none. Needs CAP_NET_ADMIN and cgroup2
    #[arg(long, requires = "listen")]
    lookup: bool,

    /// Length of each accept queue [default: net.core.somaxconn shared out among the workers, 128 at least]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..), requires = "listen")]
    backlog: Option<i32>,

    /// Weight of a slot, 1 for the others; repeatable
    #[arg(long, value_name = "SLOT=N", value_parser = weight, requires = "listen")]
    weight: Vec<(usize, u32)>,

    /// User (name or number) that workers run as
    #[arg(long, value_name = "USER", requires = "listen")]
    user: Option<String>,

    /// Group that workers run as [default: the user's; needed for a user without an entry in the user database]
    #[arg(long, value_name = "GROUP", requires = "listen")]
    group: Option<String>,

    /// Capability that workers keep, such as CAP_NET_RAW; repeatable
    #[arg(long, value_name = "CAP", requires = "listen")]
    keep_cap: Vec<String>,

    /// Make the listeners non-blocking (O_NONBLOCK) for the workers, as systemd's NonBlocking= does: for event loops that
    /// do not set it themselves, as tokio with LISTEN_FDS
    #[arg(long, requires = "listen")]
    nonblocking: bool,

    /// Give each worker its listener as standard input (descriptor 0) and by no other number, as inetd does for servers
    /// that wait: for Java's System.inheritedChannel()
    #[arg(long, requires = "listen")]
    stdin: bool,

    /// The signal that asks a worker to end: QUIT for nginx and PHP-FPM, USR1 for HAProxy, which drop requests in hand on TERM
    #[arg(long, value_name = "SIGNAL", default_value = "TERM", value_parser = signal, conflicts_with = "split", requires = "listen")]
    stop_signal: Signal,

    /// How long a worker may take to end when asked to; with --split also for processes that outlive the server's first one
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration::parse)]
    grace: Duration,

    /// A rolling restart starts each new worker before it ends the old one (start-first), which takes memory for one
    /// worker more, or after that (stop-first) [default: start-first; stop-first for UDP]
    #[arg(long, value_name = "ORDER", value_enum, requires = "listen")]
    restart: Option<Restart>,

    /// From SIGTERM on refuse new connections at once, so that a load balancer turns to another machine. Otherwise they
    /// are left to a successor: their SYNs are dropped, and clients try again
    #[arg(long, requires = "listen")]
    refuse: bool,

    /// Replace a worker that got so many connections: the new one starts first, as in a rolling restart. From outside a
    /// connection is a request, whatever it carries. Each worker's own limit is up to a tenth lower
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), requires = "listen")]
    max_requests: Option<u64>,

    /// The same for one that has run for so long
    #[arg(long, value_name = "TIME", value_parser = duration::parse, requires = "listen")]
    max_age: Option<Duration>,

    /// The same for one that has so much memory of its own, with the processes below it: 512M, 2G
    #[arg(long, value_name = "SIZE", value_parser = size, requires = "listen")]
    max_memory: Option<u64>,

    /// Replace a worker that has accepted nothing for so long, while connections wait for it, and uses no CPU or a whole one.
    /// The log has its stacks. If more than half of the workers are slow, none is replaced
    #[arg(long, value_name = "TIME", value_parser = duration::parse, requires = "listen")]
    hang_after: Option<Duration>,

    /// Run this by sh before that, as the workers' user, for 30 s at most; {pid} is the worker: 'py-spy dump --pid {pid}'
    #[arg(long, value_name = "CMD", requires = "hang_after")]
    on_hang: Option<String>,

    /// Name of the group [default: from the first address]
    #[arg(long, requires = "listen")]
    name: Option<String>,

    /// Serve OpenMetrics on this address, at /metrics
    #[arg(long, value_name = "ADDR:PORT", value_parser = crate::target::to_serve)]
    metrics: Option<SocketAddr>,

    /// Waits and wake-ups are among the metrics: of the kernel's tracepoints, which cost the server some CPU time (`wakeone-lab run cost` measures it)
    #[arg(long, requires = "metrics")]
    metrics_tracing: bool,

    #[command(flatten)]
    log: crate::log::LogArgs,

    #[command(flatten)]
    runtime: RuntimeDir,

    /// The server, and its arguments: whatever follows it is its own, and `--` may stand before it
    #[arg(trailing_var_arg = true, required = true, value_name = "CMD")]
    pub command: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Split {
    /// Do it
    On,
    /// Tell whether it would be done
    Check,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Queue {
    /// All workers have the same queue
    One,
    /// Each worker has its own
    Each,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Restart {
    /// The new worker starts beside the old one
    StartFirst,
    /// The old worker ends, then the new one starts
    StopFirst,
}

/// Supervises until told to stop.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    args.log.start();
    if let Some(how) = args.split {
        return split(&args, how);
    }
    if args.listen.is_empty() {
        return as_it_is(&args);
    }
    match supervise(&args) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            // Our own errors are whole sentences that include their sources.
            let (sentence, usage) = match error.downcast_ref::<group::Error>() {
                Some(own) => (own.to_string(), own.is_usage()),
                None => (format!("{error:#}"), false),
            };
            tracing::error!(event = "error", "wakeone run: {sentence}");
            Ok(ExitCode::from(if usage { 2 } else { 1 }))
        }
    }
}

/// How the listeners are steered that a server opens itself.
fn attach_config(args: &Args) -> AttachConfig {
    AttachConfig {
        policy: args.policy,
        affinity: args.affinity.unwrap_or_default(),
        rescue: steering_config(args).rescue == Some(true),
        stuck_after: args.stuck_after,
        weights: Vec::new(),
    }
}

/// Runs a server that opens its own listeners, and steers those.
fn as_it_is(args: &Args) -> anyhow::Result<ExitCode> {
    let options = started::Options {
        command: args.command.clone(),
        config: Some(attach_config(args)),
        grace: args.grace,
        runtime_dir: args.runtime.dir(),
        metrics: args.metrics,
        metrics_tracing: args.metrics_tracing,
    };
    Ok(ended(started::run(&options, &mut |event| {
        crate::log::event(event)
    })))
}

/// The same, and splits its UDP sockets.
fn split(args: &Args, how: Split) -> anyhow::Result<ExitCode> {
    let options = wakeone_split::Options {
        command: args.command.clone(),
        policy: args.policy,
        affinity: args.affinity,
        stuck_after: args.stuck_after,
        listeners: attach_config(args),
        grace: args.grace,
        runtime_dir: args.runtime.dir(),
        check: how == Split::Check,
        metrics: args.metrics,
        metrics_tracing: args.metrics_tracing,
    };
    Ok(ended(wakeone_split::run(&options, &mut |event| {
        crate::log::event(event)
    })))
}

/// The exit code of a server that opens its own listeners, or the failure to start it.
fn ended(code: Result<u8, impl std::fmt::Display>) -> ExitCode {
    code.map_or_else(
        |error| {
            tracing::error!(event = "error", "wakeone run: {error}");
            ExitCode::FAILURE
        },
        ExitCode::from,
    )
}

fn supervise(args: &Args) -> anyhow::Result<()> {
    let group = Group::new(&options(args)?, &steering_config(args))?;
    let supervisor = group.supervisor();
    for endpoint in supervisor.endpoints() {
        let policy = group.policy(endpoint);
        let (address, workers, name) = (
            endpoint.address,
            supervisor.listeners().len(),
            supervisor.name(),
        );
        let queues = match supervisor.shares(endpoint) {
            true => "one queue".to_owned(),
            false => counted(workers as u64, "queues"),
        };
        tracing::info!(event = "listening", %address, workers, group = name, %policy, "listening on {endpoint}: {queues}, policy {policy}, group `{name}`");
    }
    group.run()?;
    Ok(())
}

fn steering_config(args: &Args) -> SteeringConfig {
    SteeringConfig {
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
        most_workers: args.max_workers.map(usize::from),
        listen: args.listen.clone(),
        queue: args.queue.map(|queue| match queue {
            Queue::One => wakeone_supervisor::Queue::One,
            Queue::Each => wakeone_supervisor::Queue::Each,
        }),
        backlog: args.backlog,
        command: args.command.clone(),
        user: args.user.clone(),
        group: args.group.clone(),
        keep_caps: args.keep_cap.clone(),
        nonblocking: args.nonblocking,
        stdin: args.stdin,
        stop_signal: args.stop_signal,
        grace: args.grace,
        restart: args.restart.map(|order| match order {
            Restart::StartFirst => wakeone_supervisor::Restart::StartFirst,
            Restart::StopFirst => wakeone_supervisor::Restart::StopFirst,
        }),
        refuse: args.refuse,
        limits: Limits {
            connections: args.max_requests,
            age: args.max_age,
            memory: args.max_memory,
            hang: args.hang_after,
        },
        on_hang: args.on_hang.clone(),
        quic: args.affinity == Some(Affinity::Quic),
        lookup: args.lookup,
        runtime_dir: args.runtime.dir(),
    })
}

/// Parses the name of a signal, with or without SIG.
fn signal(text: &str) -> Result<Signal, String> {
    let name = text.to_uppercase();
    let name = name.strip_prefix("SIG").unwrap_or(&name);
    format!("SIG{name}")
        .parse()
        .map_err(|_| format!("`{text}` is no signal; write its name, as in TERM or QUIT"))
}

/// Parses a number of bytes, with K, M or G for KiB, MiB or GiB.
fn size(text: &str) -> Result<u64, String> {
    let wrong = || format!("`{text}` is no size; write a number with K, M or G, as in 512M");
    let at = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    let shift = match unit {
        "" => 0,
        "K" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        _ => return Err(wrong()),
    };
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let bytes = number.checked_mul(1 << shift);
    bytes.filter(|bytes| *bytes > 0).ok_or_else(wrong)
}

/// Parses `SLOT=N`, both numbers.
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
    fn signals_have_names() {
        for text in ["QUIT", "SIGQUIT", "quit"] {
            assert_eq!(signal(text), Ok(Signal::SIGQUIT), "{text}");
        }
        for text in ["", "SIG", "3", "SIGSIGQUIT"] {
            assert!(signal(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("1", 1),
            ("4K", 4 << 10),
            ("512M", 512 << 20),
            ("2GiB", 2 << 30),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "M", "0", "1T", "-1", "1.5G", "99999999999G"] {
            assert!(size(text).is_err(), "{text}");
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
