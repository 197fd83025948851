//! `wakeone policy`: changes how a running group chooses.

use std::process::ExitCode;

use anyhow::Context;

use crate::runtime_dir::RuntimeDir;
use wakeone_control::control;
use wakeone_control::named;
use wakeone_control::policy::Policy;

/// Change how a running group chooses workers; open connections stay where they are
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples: wakeone policy web two-choices\n          wakeone policy :8080 least-connections"
)]
pub struct Args {
    #[arg(value_name = "GROUP", help = crate::target::FORMS)]
    group: String,

    /// hash, round-robin, random, least-connections, two-choices, shortest-queue, cpu, consistent, source or source-net
    #[arg(value_name = "POLICY")]
    policy: Policy,

    #[command(flatten)]
    runtime: RuntimeDir,
}

/// Changes the policy.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let paths = args.runtime.paths();
    for group in named::groups(&paths, &args.group).context("policy")? {
        let name = group.name;
        let before = control::change_policy(&paths, &name, args.policy)?;
        let before = before.map_or("an unknown policy".to_owned(), |policy| policy.to_string());
        wakeone_terminal::print(&format!(
            "{name}: {} instead of {before}, from the next connection on\n",
            args.policy
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
