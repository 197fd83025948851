//! `wakeone scale`: changes how many workers a running group has.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::runtime_dir::RuntimeDir;
use wakeone_control::named;
use wakeone_control::paths::Paths;
use wakeone_control::scale::{scale, serving};
use wakeone_model::layout::counted;

/// Workers that start slowly are waited for so long.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(20);

/// Change how many workers a group of `wakeone run` has, and wait until they serve; no connection is lost
///
/// Workers that are too many get no new connections, and end once theirs are closed.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples: wakeone scale web 6\n          wakeone scale :8080 2")]
pub struct Args {
    #[arg(value_name = "GROUP", help = crate::target::FORMS)]
    group: String,

    /// How many, 1 to 256, as far as there is room (`wakeone run --max-workers`)
    #[arg(value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    workers: u16,

    #[command(flatten)]
    runtime: RuntimeDir,
}

/// Changes the number.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let paths = args.runtime.paths();
    let workers = usize::from(args.workers);
    for group in named::groups(&paths, &args.group).context("scale")? {
        let name = group.name;
        let before = scale(&paths, &name, workers)?;
        await_workers(&paths, &name, workers)?;
        let workers = counted(workers as u64, "workers");
        wakeone_terminal::print(&format!("{name}: {workers}, {before} before\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Waits until so many workers serve.
fn await_workers(paths: &Paths, name: &str, workers: usize) -> anyhow::Result<()> {
    let until = Instant::now() + PATIENCE;
    loop {
        let serve = serving(paths, name)?;
        if serve == workers {
            return Ok(());
        }
        if Instant::now() >= until {
            bail!("of {workers} workers of `{name}` {serve} serve by now; its log may say why");
        }
        std::thread::sleep(LOOK);
    }
}
