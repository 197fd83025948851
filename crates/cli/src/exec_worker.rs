//! `wakeone __exec-worker`: what `wakeone run` starts in place of a worker, and what becomes it.

use std::process::ExitCode;
use wakeone::supervisor::trampoline;

/// Becomes a worker (not for typing).
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to do, as JSON.
    order: String,
}

/// Returns only if the command could not be run; the supervisor has been told why.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let reason = trampoline::exec(&args.order);
    if std::env::var_os("WAKEONE_SLOT").is_none() && reason.contains("hidden part") {
        anyhow::bail!(reason);
    }
    Ok(ExitCode::from(127))
}
