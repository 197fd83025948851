//! `wakeone load`: sends an honest load and reports the result.

mod shards;

use std::fs;
use std::io::IsTerminal;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use anyhow::{Context, anyhow, bail};
use indicatif::{ProgressBar, ProgressStyle};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use wakeone_load::{
    Arrivals, Comparison, ErrorKind, Event, Form, Header, Mix, MixEntry, Outcome, Plan, Shard,
    Sources, Spacing, Stage, Stop, Summary, Tls, View,
};
use wakeone_model::address::{Address, SCHEME, UnixName};

use crate::duration;
use shards::{ShardArg, StartAt};
use wakeone_terminal::{print, print_wrapped};

/// Send an honest load: open or closed loop, a connection a request, which worker answered
#[derive(clap::Args, Debug)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "Examples:
  wakeone load -c 200 -n 100000 http://127.0.0.1:8080/
  wakeone load --rate 1000 --mix 99:/work?us=1000 --mix 1:/work?us=100000 :8080
  wakeone load --step 500:5s --ramp 500:5000:20s --json=a.json localhost:8080
  wakeone load --rate 2400 -c 64 --keep-alive --apart 4ms localhost:8080/work?us=1000
  wakeone load -c 20 -d 30 unix:/run/app.sock:/work
  wakeone load --body @order.json -H 'Content-Type: application/json' https://localhost/orders
  wakeone load --compare a.json b.json
  wakeone load --rate 2000 --shard 0/4 --start-at @1800000000 --part=0.part http://server:8080 --allow-remote
  wakeone load merge *.part

Without a rate the loop is closed: a client sends again when its last request is answered.
With one, requests are due at planned times, and latency counts from those."
)]
pub struct Args {
    #[command(subcommand)]
    command: Option<shards::Command>,
    /// Open loop: this many requests a second, whatever became of the ones before
    #[arg(long, value_name = "PER_S")]
    rate: Option<f64>,
    #[command(flatten)]
    stages: Stages,
    /// How the requests of an open loop are spaced
    #[arg(long, value_enum, default_value = "poisson")]
    spacing: SpacingArg,
    /// Closed loop: this many clients [default: 50]; open loop: at most this many requests at a time
    #[arg(short, long, value_name = "N")]
    connections: Option<usize>,
    /// Open the -c connections beforehand, this long after one another, and send over them in turn
    #[arg(long, value_name = "TIME", value_parser = duration::parse, requires_all = ["rate", "connections", "keep_alive"])]
    apart: Option<Duration>,
    /// Stop after this many requests
    #[arg(short = 'n', long, value_name = "N")]
    requests: Option<u64>,
    /// Stop after this time, as in 500ms, 10s, 2m; a bare number is seconds [default: 10s without -n]
    #[arg(short, long, value_name = "TIME", value_parser = duration::parse)]
    duration: Option<Duration>,
    /// Ask for PATH with this weight (repeat for a mix); instead of the URL's path
    #[arg(long, value_name = "WEIGHT:PATH")]
    mix: Vec<MixEntry>,
    /// Send requests of this method [default: GET, with --body POST]
    #[arg(short = 'X', long, value_name = "METHOD")]
    method: Option<String>,
    /// Send this header with each request (repeat for more)
    #[arg(short = 'H', long, value_name = "NAME: VALUE")]
    header: Vec<Header>,
    /// Send this body with each request; @FILE sends what is in a file
    #[arg(long, value_name = "TEXT|@FILE")]
    body: Option<String>,
    /// Take any certificate of an https server; otherwise it must be one that this machine trusts
    #[arg(short = 'k', long)]
    insecure: bool,
    /// Give up on a request after this time
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration::parse)]
    timeout: Duration,
    /// End with exit code 1 if more than this share of the requests failed, in percent
    #[arg(long, value_name = "PERCENT", default_value = "1%", value_parser = parse_percent)]
    max_errors: f64,
    /// Spread connections over N addresses in 127.0.0.0/8, so that ports do not run out; 0: the system's own address
    /// [default: 1000 for an IPv4 loopback target]
    #[arg(long, value_name = "N")]
    sources: Option<u32>,
    /// Use a connection for many requests
    #[arg(long)]
    keep_alive: bool,
    /// Send from this many threads
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: usize,
    /// Same seed, same arrival times and paths
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Send one of several shards of the plan, from 0: one from each machine; NUMBER/OF, /OF with the number from SLURM_PROCID or
    /// JOB_COMPLETION_INDEX, or `slurm`
    #[arg(long, value_name = "NUMBER/OF", requires = "part")]
    shard: Option<ShardArg>,
    /// Begin at this time: @SECONDS since 1970, as `date +%s` prints them
    #[arg(long, value_name = "TIME")]
    start_at: Option<StartAt>,
    /// Write the whole result of a shard to FILE, for `wakeone load merge`; `-` prints it and nothing else
    #[arg(long, value_name = "FILE", requires = "shard")]
    part: Option<PathBuf>,
    /// Allow a target that is not this machine's loopback
    #[arg(long)]
    allow_remote: bool,
    /// Print the result as JSON, or write it to FILE (--json=FILE)
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "-")]
    json: Option<PathBuf>,
    /// Write a histogram for each second to FILE, as HdrHistogram's log tools read it
    #[arg(long, value_name = "FILE")]
    hdr_log: Option<PathBuf>,
    /// Compare two results written with --json=FILE
    #[arg(long, num_args = 2, value_names = ["A", "B"], conflicts_with = "url")]
    compare: Option<Vec<PathBuf>>,
    /// Connect to this UNIX socket (@NAME: an abstract one) instead of the URL's host, whose name is still sent
    #[arg(long, value_name = "FILE")]
    unix_socket: Option<String>,
    /// http://HOST[:PORT][/PATH], https://…, :PORT[/PATH], or unix:FILE[:/PATH] (unix:@NAME) for HTTP over a UNIX socket
    #[arg(required_unless_present = "compare")]
    url: Option<Url>,
}

/// `--step` and `--ramp`, in the order given: each is a stage of the load.
#[derive(Debug, Default)]
struct Stages(Vec<Stage>);

impl clap::Args for Stages {
    fn augment_args(command: clap::Command) -> clap::Command {
        let arg = |name, form, help| {
            clap::Arg::new(name)
                .long(name)
                .value_name(form)
                .help(help)
                .action(clap::ArgAction::Append)
                .value_parser(parse_stage)
                .conflicts_with("rate")
        };
        command
            .arg(arg(
                "step",
                "PER_S:TIME",
                "Open loop: this rate for this time (repeat, also with --ramp)",
            ))
            .arg(arg(
                "ramp",
                "FROM:TO:TIME",
                "Open loop: a rate that grows or falls evenly",
            ))
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl clap::FromArgMatches for Stages {
    fn from_arg_matches(matches: &clap::ArgMatches) -> Result<Self, clap::Error> {
        let of = |name: &str| {
            let stages: Vec<Stage> = matches
                .get_many(name)
                .into_iter()
                .flatten()
                .copied()
                .collect();
            let places: Vec<usize> = matches.indices_of(name).into_iter().flatten().collect();
            places.into_iter().zip(stages)
        };
        let mut stages: Vec<_> = of("step").chain(of("ramp")).collect();
        stages.sort_by_key(|(place, _)| *place);
        Ok(Self(stages.into_iter().map(|(_, stage)| stage).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &clap::ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Parses `1000:10s` or `100:5000:30s`.
fn parse_stage(text: &str) -> Result<Stage, String> {
    let rate = |rate: &str| {
        rate.parse::<f64>()
            .map_err(|_| format!("'{rate}' in '{text}' is not a rate"))
    };
    match *text.split(':').collect::<Vec<_>>().as_slice() {
        [per_s, time] => Ok(Stage::step(rate(per_s)?, duration::parse(time)?)),
        [from, to, time] => Ok(Stage {
            from_per_s: rate(from)?,
            to_per_s: rate(to)?,
            length: duration::parse(time)?,
        }),
        _ => Err(format!(
            "'{text}' is not a stage: give PER_S:TIME, as in 1000:10s, or FROM:TO:TIME"
        )),
    }
}

/// Parses `1%` or `0.5` to a share from 0 to 1.
fn parse_percent(text: &str) -> Result<f64, String> {
    let percent = text.trim_end_matches('%').trim().parse::<f64>();
    match percent {
        Ok(percent) if (0.0..=100.0).contains(&percent) => Ok(percent / 100.0),
        _ => Err(format!("'{text}' is no share: give a number from 0 to 100")),
    }
}

#[derive(clap::ValueEnum, Clone, Copy, Debug)]
enum SpacingArg {
    Poisson,
    Constant,
}

/// How often notes are summed up for the view, the log and the JSON.
const INTERVAL: Duration = Duration::from_secs(1);

/// Sends the load. The exit code is 2 for arguments that make no load, and 1 if it was interrupted, no request was answered,
/// or more of them failed than may.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if let Some(shards::Command::Merge(merge)) = &args.command {
        return shards::merge(merge);
    }
    if let Some([a, b]) = args.compare.as_deref() {
        return compare(a, b, args.json.as_deref());
    }
    // Contradictory arguments are reported before anything starts, or a file is made.
    let plan = match plan(&args).and_then(|plan| plan.check().map(|()| plan).map_err(Into::into)) {
        Ok(plan) => plan,
        Err(error) => {
            crate::complain(&format!("{error:#}"));
            return Ok(ExitCode::from(2));
        }
    };
    let log = args.hdr_log.as_deref().map(create).transpose()?;
    let (interrupts, cancel) = (Interrupts::catch()?, AtomicBool::new(false));
    if let Some(at) = args.start_at {
        at.wait(&mut || interrupts.pending())?;
    }
    let started = SystemTime::now();
    let mut screen = Screen::new(&plan);
    let mut intervals = Vec::new();
    let outcome = wakeone_load::observe(&plan, &cancel, Some(INTERVAL), &mut |event| {
        screen.show(&event);
        if let Event::Interval(interval) = event {
            intervals.push(interval.clone());
        }
        if interrupts.pending() {
            cancel.store(true, Relaxed);
        }
    })
    .with_context(|| format!("cannot send a load to {}", plan.target))?;
    screen.clear();
    if let (Some(mut log), Some(path)) = (log, &args.hdr_log) {
        wakeone_load::write_hdr_log(&mut log, started, &intervals)
            .with_context(|| format!("cannot write the log to {}", path.display()))?;
    }
    if let Some(path) = &args.part {
        shards::write(path, &plan, args.start_at, started, &outcome, &intervals)?;
    }
    let summary = Summary::new(&plan, &outcome, &intervals);
    if args.part.as_deref() != Some(Path::new("-")) {
        give(&summary, args.json.as_deref())?;
    }
    if cancel.load(Relaxed) {
        bail!("the load was interrupted: what is shown is what it came to until then");
    }
    check_answers(&plan, &outcome)?;
    let (failed, most) = (summary.error_share(), args.max_errors);
    if failed > most {
        let (count, planned) = (outcome.error_count(), outcome.planned);
        bail!(
            "{count} of {planned} requests failed, which is {:.2} % and more than {} %: see what the server does with them, \
             or allow more with --max-errors",
            100.0 * failed,
            100.0 * most
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Checks that requests were answered at all.
fn check_answers(plan: &Plan, outcome: &Outcome) -> anyhow::Result<()> {
    if outcome.completed > 0 {
        return Ok(());
    }
    let (planned, target) = (outcome.planned, plan.target);
    let tls = plan.mix.form.tls.as_ref();
    if let (Some(tls), true) = (tls, outcome.errors.contains_key(&ErrorKind::Certificate)) {
        let name = &tls.name;
        bail!(
            "the certificate of {target} is not one for '{name}' that this machine trusts: name its authority's \
             file in SSL_CERT_FILE, or take any certificate with --insecure"
        );
    }
    bail!(
        "not one of {planned} requests to {target} was answered: is the right server running there?"
    )
}

/// Prints the result as text, as JSON, or as JSON in a file and text beside it.
fn give<T: serde::Serialize + std::fmt::Display>(
    result: &T,
    json: Option<&Path>,
) -> anyhow::Result<()> {
    let Some(path) = json else {
        return Ok(print_wrapped(&result.to_string())?);
    };
    let text = serde_json::to_string_pretty(result)? + "\n";
    if path.as_os_str() == "-" {
        return Ok(print(&text)?);
    }
    fs::write(path, text)
        .with_context(|| format!("cannot write the result to {}", path.display()))?;
    Ok(print_wrapped(&result.to_string())?)
}

/// Creates the log before the load starts, so that a log that cannot be written costs no load.
fn create(path: &Path) -> anyhow::Result<fs::File> {
    fs::File::create(path).with_context(|| format!("cannot write the log to {}", path.display()))
}

fn compare(a: &Path, b: &Path, json: Option<&Path>) -> anyhow::Result<ExitCode> {
    let (one, other) = (read(a)?, read(b)?);
    let (a, b) = (a.display().to_string(), b.display().to_string());
    give(&Comparison::new((&a, &one), (&b, &other)), json)?;
    Ok(ExitCode::SUCCESS)
}

fn read(path: &Path) -> anyhow::Result<Summary> {
    let text = fs::read_to_string(path)
        .with_context(|| format!("cannot read the result {}", path.display()))?;
    let wrong = || {
        format!(
            "{} is not a result of wakeone load: write one with --json=FILE",
            path.display()
        )
    };
    let summary: Summary = serde_json::from_str(&text).with_context(wrong)?;
    if summary.schema != wakeone_load::SCHEMA {
        let (found, known) = (summary.schema, wakeone_load::SCHEMA);
        bail!(
            "{} is of the form {found}, and {known} is known here: run that load again",
            path.display()
        );
    }
    Ok(summary)
}

fn plan(args: &Args) -> anyhow::Result<Plan> {
    let url = args
        .url
        .as_ref()
        .ok_or_else(|| anyhow!("there is no URL to send a load to"))?;
    let target = match &args.unix_socket {
        Some(name) => socket(name, url)?.into(),
        None => resolve(url, args.allow_remote)?,
    };
    let loopback = matches!(target, Address::Inet(SocketAddr::V4(v4)) if v4.ip().is_loopback());
    let sources = match args.sources.unwrap_or(if loopback { 1000 } else { 0 }) {
        0 => Sources::System,
        count => Sources::Loopback { count },
    };
    let mut mix = match (args.mix.as_slice(), url.path.as_str()) {
        ([], path) => Mix::one(path),
        (entries, "/") => Mix {
            entries: entries.to_vec(),
            ..Mix::default()
        },
        (_, path) => bail!(
            "the URL asks for {path} and --mix for something else: give the paths with --mix only"
        ),
    };
    mix.form = form(args, url)?;
    let arrivals = arrivals(args);
    let endless = args.requests.is_none() && args.stages.0.is_empty();
    Ok(Plan {
        target,
        host: url.host_header.clone(),
        arrivals,
        stop: Stop {
            requests: args.requests,
            duration: args.duration.or(endless.then_some(DURATION)),
        },
        mix,
        sources,
        timeout: args.timeout,
        seed: args.seed,
        threads: args.threads,
        keep_alive: args.keep_alive,
        shard: match args.shard {
            Some(shard) => shard.known().map_err(anyhow::Error::msg)?,
            None => Shard::default(),
        },
    })
}

/// The form that all requests have in common.
fn form(args: &Args, url: &Url) -> anyhow::Result<Form> {
    if args.insecure && !url.encrypted {
        bail!("--insecure is about certificates, and the URL is not https://");
    }
    let body = match args
        .body
        .as_deref()
        .map(|body| (body, body.strip_prefix('@')))
    {
        None => None,
        Some((_, Some(path))) => {
            Some(fs::read(path).with_context(|| format!("cannot read the body from '{path}'"))?)
        }
        Some((text, None)) => Some(text.as_bytes().to_vec()),
    };
    Ok(Form {
        method: args.method.clone(),
        headers: args.header.clone(),
        body,
        tls: url.encrypted.then(|| Tls {
            name: url.host.clone(),
            insecure: args.insecure,
        }),
    })
}

/// How long a load without another end takes.
const DURATION: Duration = Duration::from_secs(10);

fn arrivals(args: &Args) -> Arrivals {
    let spacing = match args.spacing {
        SpacingArg::Poisson => Spacing::Poisson,
        SpacingArg::Constant => Spacing::Constant,
    };
    match (args.rate, args.stages.0.as_slice(), args.connections) {
        (None, [], concurrency) => Arrivals::Closed {
            concurrency: concurrency.unwrap_or(50),
        },
        (Some(rate_per_s), _, None) => Arrivals::Open {
            rate_per_s,
            spacing,
        },
        (Some(rate_per_s), _, Some(connections)) if args.apart.is_some() => Arrivals::Kept {
            rate_per_s,
            spacing,
            connections,
            apart: args.apart.unwrap_or_default(),
        },
        (Some(rate_per_s), _, at_most) => {
            // It lasts as long as the load, whatever ends that.
            Arrivals::Profile {
                stages: vec![Stage::step(rate_per_s, Duration::MAX)],
                spacing,
                at_most,
            }
        }
        (None, stages, at_most) => Arrivals::Profile {
            stages: stages.to_vec(),
            spacing,
            at_most,
        },
    }
}

/// The parts of an `http://` or `https://` URL, or of `unix:NAME[:/PATH]`.
#[derive(Debug, Clone, PartialEq)]
struct Url {
    encrypted: bool,
    host: String,
    at: At,
    host_header: String,
    path: String,
}

/// Where a URL's server is.
#[derive(Debug, Clone, Copy, PartialEq)]
enum At {
    /// At this port of the host.
    Port(u16),
    /// At a UNIX socket.
    Unix(UnixName),
}

impl std::str::FromStr for Url {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(rest) = text.strip_prefix(SCHEME) {
            // As nginx writes it: http://unix:/run/app.sock:/path.
            let at = rest.find(":/").unwrap_or(rest.len());
            let (name, path) = rest.split_at(at);
            return Ok(Self {
                encrypted: false,
                host: "localhost".to_owned(),
                at: At::Unix(name.parse()?),
                host_header: "localhost".to_owned(),
                path: match path.strip_prefix(':') {
                    Some(path) => path.to_owned(),
                    None => "/".to_owned(),
                },
            });
        }
        let (encrypted, rest) = match text.split_once("://") {
            Some(("http", rest)) if rest.starts_with(SCHEME) => return rest.parse(),
            Some(("http", rest)) => (false, rest),
            Some(("https", rest)) => (true, rest),
            Some((scheme, _)) => {
                return Err(format!(
                    "'{scheme}' is not spoken here: give an http:// or https:// URL"
                ));
            }
            None => (false, text),
        };
        let at = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(at);
        let path = path.split('#').next().unwrap_or_default();
        let path = if path.starts_with('/') {
            path.to_owned()
        } else {
            format!("/{path}")
        };
        // A colon within brackets belongs to an IPv6 address.
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (
                host,
                port.parse()
                    .map_err(|_| format!("'{port}' is not a port"))?,
            ),
            _ => (authority, if encrypted { 443 } else { 80 }),
        };
        let (host, host_header) = match host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
            Some(host) => (host, authority.to_owned()),
            // As commands name a listener of this machine.
            None if host.is_empty() && !authority.is_empty() => {
                ("localhost", format!("localhost{authority}"))
            }
            None => (host, authority.to_owned()),
        };
        check_host(host, text)?;
        Ok(Self {
            encrypted,
            host: host.to_owned(),
            at: At::Port(port),
            host_header,
            path,
        })
    }
}

/// Checks that a host is a name or a whole address. To the resolver a number is an address, 22570 being 0.0.88.42, and so is
/// 127.1. A user who writes such a number means a port, or errs.
fn check_host(host: &str, text: &str) -> Result<(), String> {
    if host.is_empty() {
        return Err(format!(
            "'{text}' names no host: give http://HOST[:PORT][/PATH], or :PORT for one of this machine"
        ));
    }
    let last = host.trim_end_matches('.').rsplit('.').next();
    let last = last.unwrap_or_default();
    let number = last.bytes().all(|b| b.is_ascii_digit()) || last.starts_with("0x");
    match number && host.parse::<Ipv4Addr>().is_err() {
        false => Ok(()),
        true if host.parse::<u16>().is_ok() => Err(format!(
            "'{host}' is no host: to load the port {host} of this machine, give :{host}"
        )),
        true => Err(format!(
            "'{host}' is no address: give all four numbers, as in 127.0.0.1"
        )),
    }
}

/// The UNIX socket of this name, as `--unix-socket` has it: with or without `unix:`.
fn socket(name: &str, url: &Url) -> anyhow::Result<UnixName> {
    if let At::Unix(_) = url.at {
        bail!("the URL names a UNIX socket and --unix-socket another one: give one of them");
    }
    let name = name.strip_prefix(SCHEME).unwrap_or(name);
    let name = name.parse().map_err(anyhow::Error::msg)?;
    check_socket(name).map(|()| name)
}

/// The address to connect to: IPv4 first, since that is what "localhost" servers listen on.
fn resolve(url: &Url, allow_remote: bool) -> anyhow::Result<Address> {
    let port = match url.at {
        At::Port(port) => port,
        At::Unix(name) => return check_socket(name).map(|()| name.into()),
    };
    let found: Vec<_> = (url.host.as_str(), port)
        .to_socket_addrs()
        .with_context(|| format!("cannot find the address of '{}'", url.host))?
        .collect();
    let target = found
        .iter()
        .find(|a| a.is_ipv4())
        .or(found.first())
        .copied();
    let target = target.ok_or_else(|| anyhow!("'{}' has no address", url.host))?;
    // Connections to the address that stands for all of this machine's go to its loopback.
    let target = match target {
        SocketAddr::V4(v4) if v4.ip().is_unspecified() => (Ipv4Addr::LOCALHOST, v4.port()).into(),
        SocketAddr::V6(v6) if v6.ip().is_unspecified() => (Ipv6Addr::LOCALHOST, v6.port()).into(),
        other => other,
    };
    if !target.ip().to_canonical().is_loopback() && !allow_remote {
        bail!(
            "{target} is not this machine's loopback, and a load can harm what it is sent to: \
             add --allow-remote if that server is yours"
        );
    }
    Ok(target.into())
}

/// Checks that the path of a UNIX socket is one. Whether somebody listens only a connection can tell.
fn check_socket(name: UnixName) -> anyhow::Result<()> {
    let Some(path) = name.path() else {
        return Ok(());
    };
    let file = std::fs::metadata(path)
        .with_context(|| format!("cannot find the socket unix:{name}; is its server running?"))?;
    anyhow::ensure!(
        file.file_type().is_socket(),
        "unix:{name} is no socket but another file"
    );
    Ok(())
}

/// Catches Ctrl-C and SIGTERM while it lives: they end the load, and its result so far is still shown.
struct Interrupts(SignalFd);

impl Interrupts {
    /// Call it before any thread starts, so that none of them takes the signal.
    fn catch() -> anyhow::Result<Self> {
        let mut signals = SigSet::empty();
        signals.add(Signal::SIGINT);
        signals.add(Signal::SIGTERM);
        signals.thread_block().context("cannot catch Ctrl-C")?;
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        Ok(Self(
            SignalFd::with_flags(&signals, flags).context("cannot catch Ctrl-C")?,
        ))
    }

    fn pending(&self) -> bool {
        matches!(self.0.read_signal(), Ok(Some(_)))
    }
}

/// The live view on a terminal, nothing elsewhere.
struct Screen {
    bar: ProgressBar,
    view: View,
    /// Whether the bar shows a part of the planned time, in ms; else it shows a part of the number of requests.
    by_time: bool,
}

impl Screen {
    fn new(plan: &Plan) -> Self {
        let time = plan.length().map(|length| length.as_millis() as u64);
        let whole = time.or(plan.stop.requests).unwrap_or(0);
        let bar = match std::io::stderr().is_terminal() {
            true => ProgressBar::new(whole).with_style(bar_style()),
            false => ProgressBar::hidden(),
        };
        Self {
            bar,
            view: View::new(plan),
            by_time: time.is_some(),
        }
    }

    fn show(&mut self, event: &Event<'_>) {
        if self.bar.is_hidden() {
            return;
        }
        self.view.take(event);
        if let Event::Progress(now) = event {
            self.bar.set_position(match self.by_time {
                true => now.elapsed.as_millis() as u64,
                false => now.completed + now.errors,
            });
            let (_, columns) = console_size();
            self.bar.set_message(self.view.text(columns));
        }
    }

    fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

fn bar_style() -> ProgressStyle {
    let style = ProgressStyle::with_template("{msg}\n\n{bar:50.green/dim} {percent:>3} %");
    style
        .expect("this template is valid")
        .progress_chars("█▉▊▋▌▍▎▏ ")
}

/// Rows and columns of the terminal on stderr.
fn console_size() -> (usize, usize) {
    match rustix::termios::tcgetwinsize(std::io::stderr()) {
        Ok(size) if size.ws_col > 0 => (size.ws_row.into(), size.ws_col.into()),
        _ => (24, 80),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls() {
        let url = |text: &str| {
            text.parse::<Url>()
                .map(|u| (u.host, u.at, u.host_header, u.path))
        };
        let is = |host: &str, port, header: &str, path: &str| {
            Ok((host.into(), At::Port(port), header.into(), path.into()))
        };
        assert_eq!(
            url("http://127.0.0.1:8080/a?b=c#d"),
            is("127.0.0.1", 8080, "127.0.0.1:8080", "/a?b=c")
        );
        assert_eq!(url("localhost"), is("localhost", 80, "localhost", "/"));
        assert_eq!(url("localhost?x"), is("localhost", 80, "localhost", "/?x"));
        assert_eq!(url("http://[::1]:81/"), is("::1", 81, "[::1]:81", "/"));
        assert_eq!(url("[::1]"), is("::1", 80, "[::1]", "/"));
        assert_eq!(url("https://x/"), is("x", 443, "x", "/"));
        assert!("https://x".parse::<Url>().unwrap().encrypted);
        assert!(!"x:443".parse::<Url>().unwrap().encrypted);
        for (text, name, path) in [
            ("unix:/run/app.sock", "/run/app.sock", "/"),
            ("unix:/run/app.sock:/a?b=c", "/run/app.sock", "/a?b=c"),
            ("http://unix:/run/app.sock:/a", "/run/app.sock", "/a"),
            ("unix:@app", "@app", "/"),
        ] {
            let at = At::Unix(name.parse().expect(name));
            let is = ("localhost".into(), at, "localhost".into(), path.into());
            assert_eq!(url(text), Ok(is), "{text}");
        }
        assert!(url("unix:").is_err() && url("https://unix:/run/x").is_err());
        let here = |port, header: &str, path: &str| is("localhost", port, header, path);
        assert_eq!(url(":8080"), here(8080, "localhost:8080", "/"));
        assert_eq!(url(":8080/a?b"), here(8080, "localhost:8080", "/a?b"));
        assert_eq!(url("http://:80?b"), here(80, "localhost:80", "/?b"));
        assert!(url("https://:8443/").is_ok() && url(":x").is_err() && url(":").is_err());
    }

    #[test]
    fn a_number_is_no_host_but_may_be_a_port() {
        let refused = |text: &str| text.parse::<Url>().expect_err(text);
        for text in ["22570", "http://22570/", "22570/path"] {
            assert!(refused(text).contains("give :22570"), "{}", refused(text));
        }
        for text in [
            "22570:80",
            "127.1",
            "0x7f000001",
            "10.0.0.256",
            "1.2.3.4.5",
            "99999",
        ] {
            assert!(refused(text).contains("is no "), "{}", refused(text));
        }
        for text in [
            "127.0.0.1",
            "10.in-addr.example",
            "app2",
            "[::1]:80",
            "2fast",
        ] {
            assert!(text.parse::<Url>().is_ok(), "{text}");
        }
    }

    #[test]
    fn the_address_for_all_of_this_machine_is_its_loopback() {
        for (text, target) in [
            ("0.0.0.0:80", "127.0.0.1:80"),
            ("[::]:80", "[::1]:80"),
            (":80", "127.0.0.1:80"),
        ] {
            let found = resolve(&text.parse().unwrap(), false).unwrap();
            assert_eq!(found.to_string(), target, "{text}");
        }
    }

    #[test]
    fn shares_of_errors() {
        assert_eq!(parse_percent("1%"), Ok(0.01));
        assert_eq!(parse_percent("0.5"), Ok(0.005));
        assert_eq!(
            (parse_percent("0"), parse_percent("100 %")),
            (Ok(0.0), Ok(1.0))
        );
        for bad in ["", "%", "-1", "101", "nan", "one"] {
            assert!(parse_percent(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn schemes() {
        let url = |text: &str| text.parse::<Url>();
        assert!(url("ftp://x/").is_err() && url("http:///x").is_err() && url("x:port").is_err());
    }

    #[test]
    fn stages_keep_their_order() {
        #[derive(clap::Parser)]
        struct Command {
            #[command(flatten)]
            args: Args,
        }
        let parse =
            |line: &str| <Command as clap::Parser>::try_parse_from(line.split(' ')).map(|c| c.args);
        let args = parse("load --step 5:1s --ramp 5:50:2s --step 50:1s http://127.0.0.1/").unwrap();
        let rates: Vec<_> = args
            .stages
            .0
            .iter()
            .map(|s| (s.from_per_s, s.to_per_s))
            .collect();
        assert_eq!(rates, [(5.0, 5.0), (5.0, 50.0), (50.0, 50.0)]);
        let plan = plan(&args).unwrap();
        assert_eq!(plan.length(), Some(Duration::from_secs(4)));
        assert!(parse("load --rate 5 --step 5:1s http://127.0.0.1/").is_err());
        assert!(parse("load --step 5 http://127.0.0.1/").is_err());
        assert!(parse("load").is_err() && parse("load --compare a b").is_ok());
    }
}
