//! `wakeone policy`: how a running group chooses from now on.

use std::path::PathBuf;
use std::process::ExitCode;

use wakeone::dispatcher;
use wakeone::paths::Paths;
use wakeone::policy::Policy;
use wakeone::supervisor::state::default_runtime_dir;

/// Change how a running group chooses workers; open connections stay where they are
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: wakeone policy web two-choices")]
pub struct Args {
    /// The group, as `wakeone status` names it
    #[arg(value_name = "NAME")]
    name: String,

    /// hash, round-robin, random, least-connections, two-choices, shortest-queue, cpu or consistent
    #[arg(value_name = "POLICY")]
    policy: Policy,

    /// Where groups keep their state [default: $WAKEONE_RUNTIME_DIR, /run/wakeone]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
}

/// Changes it.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let paths = Paths::of(&args.runtime_dir.unwrap_or_else(default_runtime_dir));
    let before = dispatcher::change_policy(&paths, &args.name, args.policy)?;
    let before = before.map_or("an unknown policy".to_owned(), |policy| policy.to_string());
    crate::output::print(&format!(
        "{}: {} instead of {before}, from the next connection on\n",
        args.name, args.policy
    ))?;
    Ok(ExitCode::SUCCESS)
}
