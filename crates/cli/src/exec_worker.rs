//! `wakeone __exec-worker`: the trampoline that `wakeone run` starts in place of a worker, and that becomes the
//! worker.

use std::process::ExitCode;
use wakeone_supervisor::spawn::Order;
use wakeone_supervisor::trampoline;

/// Becomes a worker (not for typing).
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to do, as JSON.
    order: Order,
}

/// Returns only if the command could not be run; the supervisor has been told why, and tells the user.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    trampoline::exec(&args.order);
    Ok(ExitCode::from(127))
}
