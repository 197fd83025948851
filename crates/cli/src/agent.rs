//! `wakeone agent`: keeps the servers of a configuration file steered, as a service.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use glob::Pattern;
use serde::Deserialize;
use wakeone::attach::{self, AttachConfig, AttachManager, Everywhere, Owners, Servers, Wanted};
use wakeone::group::check_weights;
use wakeone::metrics::{self, Monitor};
use wakeone_control::policy::{Affinity, Policy};
use wakeone_model::layout::{counted, printable};
use wakeone_observe::Target;
use wakeone_supervisor::notify::{self, Watchdog};

use crate::attach::follow;
use crate::doctor::stop_on_signals;
use crate::log;
use crate::runtime_dir::RuntimeDir;

/// Keep the servers of a configuration file steered, across their restarts and the machine's
#[derive(Debug, clap::Args)]
#[command(
    after_help = "SIGHUP reads the file again, SIGTERM detaches and ends.\nExample of a file:\n  [[target]]\n  listen = \":8080\"            # or unix:/run/app.sock\n  policy = \"least-connections\"\n  rescue = true\nExample: wakeone agent --config /etc/wakeone/agent.toml"
)]
pub struct Args {
    /// The configuration file (TOML)
    #[arg(long, value_name = "FILE", default_value = "/etc/wakeone/agent.toml")]
    config: PathBuf,

    /// Serve OpenMetrics on this address, at /metrics [default: as the file says, else not]
    #[arg(long, value_name = "ADDR:PORT", value_parser = crate::target::to_serve)]
    metrics: Option<SocketAddr>,

    /// Waits and wake-ups are among the metrics: of the kernel's tracepoints, which cost the servers some CPU time (`wakeone-lab run cost` measures it)
    #[arg(long)]
    metrics_tracing: bool,

    #[command(flatten)]
    log: crate::log::LogArgs,

    /// Check the file and end
    #[arg(long)]
    check: bool,

    #[command(flatten)]
    runtime: RuntimeDir,
}

/// The configuration file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    #[serde(default)]
    target: Vec<Entry>,
    #[serde(default)]
    metrics: Option<String>,
    #[serde(default)]
    metrics_tracing: bool,
    #[serde(default)]
    networks: Option<Networks>,
}

/// Where servers are looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Networks {
    /// In the agent's own network namespace.
    Own,
    /// In those of containers, too.
    All,
}

/// The checked content of the configuration file.
#[derive(Debug)]
struct Settings {
    wanted: Vec<Wanted>,
    metrics: Option<SocketAddr>,
    metrics_tracing: bool,
}

/// One target of the configuration file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    #[serde(default)]
    listen: Option<String>,
    #[serde(default)]
    exe: Option<String>,
    #[serde(default)]
    process: Option<String>,
    #[serde(default)]
    cgroup: Option<String>,
    #[serde(default)]
    user: Option<String>,
    #[serde(default)]
    opt_in: bool,
    #[serde(default)]
    networks: Option<Networks>,
    #[serde(default)]
    policy: Option<String>,
    #[serde(default)]
    affinity: Option<String>,
    #[serde(default)]
    rescue: bool,
    #[serde(default)]
    stuck_after: Option<String>,
    #[serde(default)]
    weights: BTreeMap<String, u32>,
    #[serde(default)]
    owners: Vec<String>,
}

/// A configuration is read whole into memory: no honest one is larger.
const MOST_BYTES: u64 = 1 << 20;

/// Runs until SIGTERM.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let settings = match read(&args.config) {
        Ok(settings) => settings,
        // The same error would come next time, as with bad arguments: a service manager need not try again.
        Err(error) => {
            crate::complain(&format!("{error:#}"));
            return Ok(ExitCode::from(2));
        }
    };
    if args.check {
        wakeone_terminal::print(&format!(
            "{}: {} targets\n",
            args.config.display(),
            settings.wanted.len()
        ))?;
        return Ok(ExitCode::SUCCESS);
    }
    args.log.start();
    crate::doctor::check_proc().context("agent")?;
    let stop = stop_on_signals()?;
    let reload = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGHUP, Arc::clone(&reload))
        .context("agent: cannot catch signals")?;
    let paths = args.runtime.paths();
    let address = args.metrics.or(settings.metrics);
    let http = address
        .map(metrics::bind)
        .transpose()
        .map_err(anyhow::Error::msg)?;
    let mut groups = Everywhere::new(AttachManager::new(paths));
    let monitor = Monitor::start(http).context("agent: cannot serve figures")?;
    groups.serve(monitor, settings.metrics_tracing || args.metrics_tracing);
    tracing::info!(
        event = "started",
        "{}: {} to be kept steered",
        args.config.display(),
        counted(settings.wanted.len() as u64, "targets")
    );
    groups.want(settings.wanted);
    groups.attach().iter().for_each(log::event);
    notify::ready();
    let mut watchdog = Watchdog::from_env();
    follow(&mut groups, &stop, &mut |groups| {
        watchdog.feed();
        if reload.swap(false, Ordering::Relaxed) {
            match read(&args.config) {
                Ok(new) => {
                    if args.metrics.is_none() && new.metrics != settings.metrics {
                        tracing::warn!(
                            event = "refused",
                            "metrics are served as before until the next start"
                        );
                    }
                    groups.want(new.wanted);
                    groups.attach().iter().for_each(log::event);
                    tracing::info!(event = "reloaded", "{} read again", args.config.display());
                }
                // The earlier configuration is better than none.
                Err(error) => tracing::warn!(
                    event = "refused",
                    "{} is not taken over, and all goes on as before: {error:#}",
                    args.config.display()
                ),
            }
        }
        Ok(())
    })?;
    groups.end();
    tracing::info!(event = "stopped", "stopped");
    Ok(ExitCode::SUCCESS)
}

fn read(path: &Path) -> anyhow::Result<Settings> {
    let told = || {
        format!(
            "agent: cannot read {}; it is TOML, with a [[target]] for each server, see `wakeone agent --help`",
            path.display()
        )
    };
    let size = std::fs::metadata(path).with_context(told)?.len();
    anyhow::ensure!(
        size <= MOST_BYTES,
        "agent: {} is no configuration: it has {size} bytes",
        path.display()
    );
    let text = std::fs::read_to_string(path).with_context(told)?;
    parse(&text).map_err(|why| anyhow::anyhow!("agent: {}: {why}", path.display()))
}

/// Parses a configuration; an error is one line, whatever it quotes.
fn parse(text: &str) -> Result<Settings, String> {
    parsed(text).map_err(|why| printable(&why))
}

fn parsed(text: &str) -> Result<Settings, String> {
    let config: Config = toml::from_str(text).map_err(|error| {
        let line = error.span().map_or(1, |span| {
            text[..span.start.min(text.len())].lines().count().max(1)
        });
        format!("line {line}: {}", error.message().replace('\n', ", "))
    })?;
    let metrics = config.metrics.as_deref().map(crate::target::to_serve);
    Ok(Settings {
        wanted: config
            .target
            .iter()
            .map(|entry| wanted(entry, config.networks))
            .collect::<Result<_, _>>()?,
        metrics: metrics.transpose()?,
        metrics_tracing: config.metrics_tracing,
    })
}

/// `{ 0 = 2 }`: the weights of slots.
fn weights(entry: &Entry) -> Result<Vec<(usize, u32)>, String> {
    let weight = |(slot, weight): (&String, &u32)| {
        let slot = slot.parse().map_err(|_| format!("`{slot}` is no slot"))?;
        Ok((slot, *weight))
    };
    let weights: Vec<(usize, u32)> = entry
        .weights
        .iter()
        .map(weight)
        .collect::<Result<_, String>>()?;
    check_weights(&weights)?;
    Ok(weights)
}

/// The marks of a target's servers. `networks`: where all targets are looked for.
fn servers(entry: &Entry, networks: Option<Networks>) -> Result<Servers, String> {
    let pattern = |text: &Option<String>| {
        let pattern = text.as_deref().map(Pattern::new).transpose();
        pattern.map_err(|error| format!("{}: {error}", text.as_deref().unwrap_or_default()))
    };
    Ok(Servers {
        exe: pattern(&entry.exe)?,
        process: pattern(&entry.process)?,
        cgroup: pattern(&entry.cgroup)?,
        user: entry.user.as_deref().map(attach::user).transpose()?,
        wishing: entry.opt_in,
        everywhere: entry.networks.or(networks) == Some(Networks::All),
    })
}

fn owners(entry: &Entry) -> Result<Owners, String> {
    if entry.owners == ["*"] {
        return Ok(Owners::Any);
    }
    let users = entry.owners.iter().map(|owner| attach::user(owner));
    Ok(Owners::These(users.collect::<Result<_, _>>()?))
}

fn wanted(entry: &Entry, networks: Option<Networks>) -> Result<Wanted, String> {
    let servers = servers(entry, networks).map_err(|why| format!("target: {why}"))?;
    let target: Target = match &entry.listen {
        Some(listen) => listen.parse()?,
        None if servers.is_any() => {
            return Err(
                "a target needs `listen`, or one of `exe`, `process`, `cgroup`, `user` and `opt_in`"
                    .into(),
            );
        }
        None => Target::All,
    };
    let policy = match &entry.policy {
        None => None,
        Some(name) => {
            let policy: Policy = name
                .parse()
                .map_err(|error| format!("target {target}: {error}"))?;
            Some(policy)
        }
    };
    let affinity = match &entry.affinity {
        None => Affinity::default(),
        Some(name) => name
            .parse()
            .map_err(|error| format!("target {target}: {error}"))?,
    };
    let stuck_after = match &entry.stuck_after {
        None => Duration::from_millis(5),
        Some(time) => crate::duration::parse(time)
            .map_err(|error| format!("target {target}: stuck_after {error}"))?,
    };
    let weights = weights(entry).map_err(|why| format!("target {target}: weights {why}"))?;
    let owners = owners(entry).map_err(|why| format!("target {target}: owners: {why}"))?;
    Ok(Wanted {
        target,
        config: AttachConfig {
            policy,
            affinity,
            rescue: entry.rescue,
            stuck_after,
            weights,
        },
        owners,
        servers,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_survive_foreign_bytes() {
        crate::foreign::survives("agent-toml", &[], |bytes| {
            if let Err(why) = parse(&String::from_utf8_lossy(bytes)) {
                assert!(
                    !why.is_empty() && !why.contains(char::is_control),
                    "{why:?}"
                );
            }
        });
    }

    #[test]
    fn servers_are_meant_by_what_they_have_in_common() {
        let text = "networks = 'all'\n[[target]]\nprocess = 'nginx*'\nowners = ['*']\n[[target]]\nlisten = ':80'\nnetworks = 'own'\n[[target]]\nopt_in = true\n";
        let wanted = parse(text).expect("a good file").wanted;
        let [by_process, by_port, wishing] = &wanted[..] else {
            panic!("{wanted:?}");
        };
        assert_eq!(by_process.target, Target::All);
        assert_eq!(by_process.owners, Owners::Any);
        assert!(
            by_process
                .servers
                .process
                .as_ref()
                .is_some_and(|one| one.matches("nginx: x"))
        );
        assert!(by_process.servers.everywhere && !by_port.servers.everywhere);
        assert!(wishing.servers.wishing && wishing.servers.everywhere);
    }

    #[test]
    fn a_file_is_read_and_its_mistakes_are_told_in_a_line() {
        let good = "metrics = '127.0.0.1:9464'\n[[target]]\nlisten = ':80'\nweights = { 0 = 2, 3 = 1 }\n[[target]]\nlisten = 'nginx'\nowners = ['nobody', '33']\npolicy = 'two-choices'\nrescue = true\nstuck_after = '20ms'\n";
        let settings = parse(good).expect("a good file");
        assert_eq!(settings.metrics, Some(([127, 0, 0, 1], 9464).into()));
        assert!(!settings.metrics_tracing);
        let unix = parse("[[target]]\nlisten = 'unix:/run/app.sock'\n").expect("a good file");
        assert_eq!(unix.wanted[0].target.to_string(), "unix:/run/app.sock");
        let wanted = settings.wanted;
        assert_eq!(wanted[0].config.weights, [(0, 2), (3, 1)]);
        assert_eq!(wanted.len(), 2);
        assert_eq!(wanted[0].owners, Owners::default());
        assert_eq!(wanted[1].owners, Owners::These(vec![65534, 33]));
        assert!(wanted[0].servers.is_any() && !wanted[0].servers.everywhere);
        assert_eq!(wanted[0].target, Target::Port(80));
        assert!(wanted[1].config.rescue);
        assert_eq!(wanted[1].config.policy, Some(Policy::TwoChoices));
        assert_eq!(wanted[1].config.stuck_after, Duration::from_millis(20));
        assert!(parse("").expect("an empty file").wanted.is_empty());
        for (bad, told) in [
            ("[[target]]\n", "a target needs `listen`"),
            ("[[target]]\nnetworks = 'all'\n", "a target needs `listen`"),
            ("[[target]]\nlisten = ':1'\nnetworks = 'some'\n", "line 3"),
            ("[[target]]\nexe = '/a/***'\n", "/a/***"),
            ("[[target]]\nuser = 'no such user'\n", "no such user"),
            ("[[target]]\nlisten = 80\n", "line 2"),
            ("[[target]]\nlisten = ':0'\n", "no port"),
            ("[[target]]\nlisten = ':1'\npolicy = 'best'\n", "best"),
            (
                "[[target]]\nlisten = ':1'\naffinity = 'some'\n",
                "flow, none and quic",
            ),
            (
                "[[target]]\nlisten = ':1'\nstuck_after = '5 apples'\n",
                "stuck_after",
            ),
            ("[[target]]\nlisten = ':1'\nspeed = 'high'\n", "speed"),
            ("metrics = 'nowhere'\n", "`nowhere` is no address"),
            ("metrics = 9464\n", "line 1"),
            (
                "[[target]]\nlisten = ':1'\nweights = { 0 = 0 }\n",
                "0=0 cannot be: a weight is 1 to 65535",
            ),
            (
                "[[target]]\nlisten = ':1'\nweights = { 256 = 1 }\n",
                "slots are 0 to 255",
            ),
            (
                "[[target]]\nlisten = ':1'\nweights = { first = 1 }\n",
                "`first` is no slot",
            ),
            (
                "[[target]]\nlisten = ':1'\nowners = ['no such user']\n",
                "there is no user `no such user`",
            ),
            ("rubbish", "line 1"),
        ] {
            let error = parse(bad).expect_err(bad);
            assert!(error.contains(told) && !error.contains('\n'), "{error}");
        }
    }
}
