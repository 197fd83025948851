//! `wakeone load`: sends an honest load and says what came of it.

use std::fs;
use std::io::{IsTerminal, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use indicatif::{ProgressBar, ProgressStyle};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use wakeone_load::{Arrivals, Mix, MixEntry, Plan, Progress, Sources, Spacing, Stop, Summary};

/// Send an honest load: open or closed loop, a connection a request, which worker answered
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  wakeone load -c 200 -n 100000 http://127.0.0.1:8080/
  wakeone load --rate 1000 -d 10s --mix 99:/work?us=1000 --mix 1:/work?us=100000 http://127.0.0.1:8080

Without --rate the loop is closed: each client sends its next request when its last one is answered.
With --rate requests are due at planned times, and latency counts from those.")]
pub struct Args {
    /// Open loop: this many requests a second, whatever became of the ones before
    #[arg(long, value_name = "PER_S", conflicts_with = "connections")]
    rate: Option<f64>,
    /// How the requests of an open loop are spaced
    #[arg(long, value_enum, default_value = "poisson", requires = "rate")]
    spacing: SpacingArg,
    /// Closed loop: this many clients [default: 50]
    #[arg(short, long, value_name = "N")]
    connections: Option<usize>,
    /// Stop after this many requests
    #[arg(short = 'n', long, value_name = "N")]
    requests: Option<u64>,
    /// Stop after this time, as in 500ms, 10s, 2m [default: 10s without -n]
    #[arg(short, long, value_name = "TIME", value_parser = parse_duration)]
    duration: Option<Duration>,
    /// Ask for PATH with this weight (repeat for a mix); instead of the URL's path
    #[arg(long, value_name = "WEIGHT:PATH")]
    mix: Vec<MixEntry>,
    /// Give up on a request after this time
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_duration)]
    timeout: Duration,
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
    /// Allow a target that is not this machine's loopback
    #[arg(long)]
    allow_remote: bool,
    /// Print the result as JSON, or write it to FILE (--json=FILE)
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "-")]
    json: Option<PathBuf>,
    /// http://HOST[:PORT][/PATH]
    url: Url,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug)]
enum SpacingArg {
    Poisson,
    Constant,
}

/// Sends the load. Exit code 1 if it was interrupted or not one request was answered.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let plan = plan(&args)?;
    // Checked here too, so that what the arguments cannot mean is said before anything starts.
    plan.check()?;
    let interrupts = Interrupts::catch()?;
    let cancel = AtomicBool::new(false);
    let bar = progress_bar(&plan);
    let outcome = wakeone_load::run(&plan, &cancel, &mut |progress| {
        show(&bar, &plan, progress);
        if interrupts.pending() {
            cancel.store(true, Relaxed);
        }
    })
    .with_context(|| format!("cannot send a load to {}", plan.target))?;
    bar.finish_and_clear();
    let summary = Summary::new(&plan, &outcome);
    match args.json.as_deref() {
        Some(path) if path.as_os_str() == "-" => {
            print(&(serde_json::to_string_pretty(&summary)? + "\n"))?
        }
        Some(path) => {
            let text = serde_json::to_string_pretty(&summary)? + "\n";
            fs::write(path, text)
                .with_context(|| format!("cannot write the result to {}", path.display()))?;
            print(&summary.to_string())?;
        }
        None => print(&summary.to_string())?,
    }
    if cancel.load(Relaxed) {
        bail!("the load was interrupted: what is shown is what it came to until then");
    }
    if outcome.completed == 0 {
        bail!(
            "not one of {} requests to {} was answered: is the right server running there?",
            outcome.planned,
            plan.target
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// A closed pipe (`| head`) ends the output in silence; any other failure is one.
fn print(text: &str) -> anyhow::Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(error).context("cannot print the result")
        }
        _ => Ok(()),
    }
}

fn plan(args: &Args) -> anyhow::Result<Plan> {
    let target = resolve(&args.url, args.allow_remote)?;
    let loopback = matches!(target, SocketAddr::V4(v4) if v4.ip().is_loopback());
    let sources = match args.sources.unwrap_or(if loopback { 1000 } else { 0 }) {
        0 => Sources::System,
        count => Sources::Loopback { count },
    };
    let mix = match (args.mix.as_slice(), args.url.path.as_str()) {
        ([], path) => Mix::one(path),
        (entries, "/") => Mix {
            entries: entries.to_vec(),
        },
        (_, path) => bail!(
            "the URL asks for {path} and --mix for something else: give the paths with --mix only"
        ),
    };
    let arrivals = match args.rate {
        Some(rate_per_s) => Arrivals::Open {
            rate_per_s,
            spacing: match args.spacing {
                SpacingArg::Poisson => Spacing::Poisson,
                SpacingArg::Constant => Spacing::Constant,
            },
        },
        None => Arrivals::Closed {
            concurrency: args.connections.unwrap_or(50),
        },
    };
    let default = args.requests.is_none().then_some(Duration::from_secs(10));
    Ok(Plan {
        target,
        host: args.url.host_header.clone(),
        arrivals,
        stop: Stop {
            requests: args.requests,
            duration: args.duration.or(default),
        },
        mix,
        sources,
        timeout: args.timeout,
        seed: args.seed,
        threads: args.threads,
        keep_alive: args.keep_alive,
    })
}

/// The parts of an `http://` URL.
#[derive(Debug, Clone, PartialEq)]
struct Url {
    host: String,
    port: u16,
    host_header: String,
    path: String,
}

impl std::str::FromStr for Url {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rest = match text.split_once("://") {
            Some(("http", rest)) => rest,
            Some((scheme, _)) => {
                return Err(format!(
                    "'{scheme}' is not spoken here: give an http:// URL"
                ));
            }
            None => text,
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
            _ => (authority, 80),
        };
        let host = host
            .strip_prefix('[')
            .and_then(|h| h.strip_suffix(']'))
            .unwrap_or(host);
        if host.is_empty() {
            return Err(format!(
                "'{text}' names no host: give http://HOST[:PORT][/PATH]"
            ));
        }
        Ok(Self {
            host: host.to_owned(),
            port,
            host_header: authority.to_owned(),
            path,
        })
    }
}

/// The address to connect to: IPv4 first, since that is what "localhost" servers listen on.
fn resolve(url: &Url, allow_remote: bool) -> anyhow::Result<SocketAddr> {
    let found: Vec<_> = (url.host.as_str(), url.port)
        .to_socket_addrs()
        .with_context(|| format!("cannot find the address of '{}'", url.host))?
        .collect();
    let target = found
        .iter()
        .find(|a| a.is_ipv4())
        .or(found.first())
        .copied();
    let target = target.ok_or_else(|| anyhow!("'{}' has no address", url.host))?;
    if !target.ip().to_canonical().is_loopback() && !allow_remote {
        bail!(
            "{target} is not this machine's loopback, and a load can harm what it is sent to: \
             add --allow-remote if that server is yours"
        );
    }
    Ok(target)
}

/// `500ms`, `10s`, `1.5s`, `2m`, `1h`.
fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("'{text}' is not a time: give a number with ms, s, m or h, as in 10s");
    let at = text
        .find(|c: char| c.is_ascii_alphabetic())
        .ok_or_else(wrong)?;
    let unit = match &text[at..] {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err(wrong()),
    };
    let number: f64 = text[..at].parse().map_err(|_| wrong())?;
    Duration::try_from_secs_f64(number * unit).map_err(|_| wrong())
}

/// Ctrl-C and SIGTERM while they are caught: they end the load, and what it came to so far is still shown.
struct Interrupts(SignalFd);

impl Interrupts {
    /// Called before any thread starts, so that none of them takes the signal.
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

/// A bar on a terminal, nothing elsewhere.
fn progress_bar(plan: &Plan) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let length = match (plan.stop.duration, plan.stop.requests) {
        (Some(duration), _) => duration.as_millis() as u64,
        (None, requests) => requests.unwrap_or(0),
    };
    let style = ProgressStyle::with_template("{bar:30} {percent:>3} %  {msg}")
        .expect("this template is valid");
    ProgressBar::new(length).with_style(style.progress_chars("█▉▊▋▌▍▎▏ "))
}

fn show(bar: &ProgressBar, plan: &Plan, progress: &Progress) {
    let ended = progress.completed + progress.errors;
    bar.set_position(match plan.stop.duration {
        Some(_) => progress.elapsed.as_millis() as u64,
        None => ended,
    });
    let rate = ended as f64 / progress.elapsed.as_secs_f64();
    let errors = progress.errors;
    bar.set_message(format!(
        "{ended} answered  {rate:.0}/s  {errors} errors  {} under way",
        progress.in_flight
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls() {
        let url = |text: &str| {
            text.parse::<Url>()
                .map(|u| (u.host, u.port, u.host_header, u.path))
        };
        let is = |host: &str, port, header: &str, path: &str| {
            Ok((host.into(), port, header.into(), path.into()))
        };
        assert_eq!(
            url("http://127.0.0.1:8080/a?b=c#d"),
            is("127.0.0.1", 8080, "127.0.0.1:8080", "/a?b=c")
        );
        assert_eq!(url("localhost"), is("localhost", 80, "localhost", "/"));
        assert_eq!(url("localhost?x"), is("localhost", 80, "localhost", "/?x"));
        assert_eq!(url("http://[::1]:81/"), is("::1", 81, "[::1]:81", "/"));
        assert_eq!(url("[::1]"), is("::1", 80, "[::1]", "/"));
        assert!(url("https://x/").is_err() && url("http:///x").is_err() && url("x:port").is_err());
    }

    #[test]
    fn durations() {
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_duration("2m"), Ok(Duration::from_secs(120)));
        for bad in ["", "5", "s", "-1s", "5 parsecs", "NaNs", "1e999s"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }
}
