//! `wakeone agent`: keeps the servers of a configuration file steered, as a service.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use serde::Deserialize;
use wakeone::attach::Wish;
use wakeone::keeper::{Keeper, Wanted};
use wakeone::paths::Paths;
use wakeone::policy::Policy;
use wakeone::supervisor::state::default_runtime_dir;
use wakeone_observe::Target;

use crate::attach::{follow, log};
use crate::doctor::stop_on_signals;

/// Keep the servers of a configuration file steered, across their restarts and the machine's
#[derive(Debug, clap::Args)]
#[command(
    after_help = "SIGHUP reads the file again, SIGTERM detaches and ends.\nExample of a file:\n  [[target]]\n  listen = \":8080\"\n  policy = \"least-connections\"\n  rescue = true\nExample: wakeone agent --config /etc/wakeone/agent.toml"
)]
pub struct Args {
    /// The configuration file (TOML)
    #[arg(long, value_name = "FILE", default_value = "/etc/wakeone/agent.toml")]
    config: PathBuf,

    /// Check the file and end
    #[arg(long)]
    check: bool,

    /// Where groups keep their state [default: $WAKEONE_RUNTIME_DIR, /run/wakeone]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
}

/// The configuration file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    #[serde(default)]
    target: Vec<Entry>,
}

/// One target of it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    listen: String,
    #[serde(default)]
    policy: Option<String>,
    #[serde(default)]
    rescue: bool,
    #[serde(default)]
    stuck_after: Option<String>,
}

/// A configuration is read whole into memory: no honest one is larger.
const MOST_BYTES: u64 = 1 << 20;

/// Runs until SIGTERM.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let wanted = match read(&args.config) {
        Ok(wanted) => wanted,
        // As wrong as bad arguments, and as wrong the next time: a service manager need not try again.
        Err(error) => {
            eprintln!("wakeone: {error:#}");
            return Ok(ExitCode::from(2));
        }
    };
    if args.check {
        crate::output::print(&format!(
            "{}: {} targets\n",
            args.config.display(),
            wanted.len()
        ))?;
        return Ok(ExitCode::SUCCESS);
    }
    let stop = stop_on_signals()?;
    let reload = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGHUP, Arc::clone(&reload))
        .context("agent: cannot catch signals")?;
    let paths = Paths::of(&args.runtime_dir.unwrap_or_else(default_runtime_dir));
    let mut keeper = Keeper::new(paths);
    keeper.want(wanted);
    keeper.attach().iter().for_each(log);
    if let Err(error) = sd_notify::notify(&[sd_notify::NotifyState::Ready]) {
        tracing::debug!("the service manager was not told: {error}");
    }
    follow(&mut keeper, &stop, &mut |keeper| {
        if reload.swap(false, Ordering::Relaxed) {
            match read(&args.config) {
                Ok(wanted) => {
                    keeper.want(wanted);
                    keeper.attach().iter().for_each(log);
                    tracing::info!(event = "reloaded", "{} read again", args.config.display());
                }
                // What was wanted before is better than nothing.
                Err(error) => tracing::warn!(event = "refused", "{error:#}; going on as before"),
            }
        }
        Ok(())
    })?;
    keeper.end();
    Ok(ExitCode::SUCCESS)
}

fn read(path: &Path) -> anyhow::Result<Vec<Wanted>> {
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

/// The targets of a configuration; an error in one line.
fn parse(text: &str) -> Result<Vec<Wanted>, String> {
    let config: Config = toml::from_str(text).map_err(|error| {
        let line = error.span().map_or(1, |span| {
            text[..span.start.min(text.len())].lines().count().max(1)
        });
        format!("line {line}: {}", error.message().replace('\n', ", "))
    })?;
    config.target.iter().map(wanted).collect()
}

fn wanted(entry: &Entry) -> Result<Wanted, String> {
    let target: Target = entry.listen.parse()?;
    let policy = match &entry.policy {
        None => Policy::default(),
        Some(name) => name
            .parse()
            .map_err(|error| format!("target {target}: {error}"))?,
    };
    let stuck_after = match &entry.stuck_after {
        None => Duration::from_millis(5),
        Some(time) => crate::load::parse_duration(time)
            .map_err(|error| format!("target {target}: stuck_after {error}"))?,
    };
    Ok(Wanted {
        target,
        wish: Wish {
            policy,
            rescue: entry.rescue,
            stuck_after,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_and_its_mistakes_are_told_in_a_line() {
        let good = "[[target]]\nlisten = ':80'\n[[target]]\nlisten = 'nginx'\npolicy = 'two-choices'\nrescue = true\nstuck_after = '20ms'\n";
        let wanted = parse(good).expect("a good file");
        assert_eq!(wanted.len(), 2);
        assert_eq!(wanted[0].target, Target::Port(80));
        assert!(wanted[1].wish.rescue);
        assert_eq!(wanted[1].wish.policy, Policy::TwoChoices);
        assert_eq!(wanted[1].wish.stuck_after, Duration::from_millis(20));
        assert!(parse("").expect("an empty file").is_empty());
        for (bad, told) in [
            ("[[target]]\n", "missing field `listen`"),
            ("[[target]]\nlisten = 80\n", "line 2"),
            ("[[target]]\nlisten = ':0'\n", "no port"),
            ("[[target]]\nlisten = ':1'\npolicy = 'best'\n", "best"),
            (
                "[[target]]\nlisten = ':1'\nstuck_after = '5'\n",
                "stuck_after",
            ),
            ("[[target]]\nlisten = ':1'\nspeed = 'high'\n", "speed"),
            ("rubbish", "line 1"),
        ] {
            let error = parse(bad).expect_err(bad);
            assert!(error.contains(told) && !error.contains('\n'), "{error}");
        }
    }
}
