//! `wakeone detach`: take away what a group left behind.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::output::print;
use wakeone::detach::{self, Report};
use wakeone::paths::Paths;
use wakeone::supervisor::listen::Endpoint;
use wakeone::supervisor::state::default_runtime_dir;
use wakeone_model::listener::Protocol;
use wakeone_observe::Target;

/// Stop steering a server that was attached, or take away what a group without a supervisor left behind
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: wakeone detach :8080")]
pub struct Args {
    /// The group, as `wakeone status` names it, or :PORT or ADDRESS:PORT where it listens, by udp:// or tcp:// say
    #[arg(value_name = "NAME|TARGET", required_unless_present = "all")]
    name: Option<String>,

    /// Every group without a living supervisor, and what half-finished starts left
    #[arg(long, conflicts_with = "name")]
    all: bool,

    /// As JSON
    #[arg(long)]
    json: bool,

    /// Where groups keep their state [default: $WAKEONE_RUNTIME_DIR, /run/wakeone]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
}

/// Detaches.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let paths = Paths::of(&args.runtime_dir.unwrap_or_else(default_runtime_dir));
    let reports = match &args.name {
        Some(name) => groups(&paths, name)
            .iter()
            .map(|name| detach::detach(&paths, name))
            .collect::<Result<_, _>>()?,
        None => detach::detach_all(&paths)?,
    };
    if args.json {
        print(&format!("{}\n", serde_json::to_string_pretty(&reports)?))?;
    } else if reports.is_empty() {
        print("nothing was left behind\n")?;
    } else {
        let sentences: Vec<String> = reports.iter().map(sentence).collect();
        print(&(sentences.join("\n") + "\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The groups that a name or a target means; what means none is taken for a name, so that the error names it.
fn groups(paths: &Paths, name: &str) -> Vec<String> {
    let target = name.parse().unwrap_or(Target::All);
    let (protocol, place) = target.parts();
    let fits = |at: &Endpoint| protocol.is_none_or(|one| (one == Protocol::Udp) == at.udp);
    let found = match place {
        Target::Port(port) => detach::groups_at(paths, |at| fits(at) && at.address.port() == *port),
        Target::Address(address) => {
            detach::groups_at(paths, |at| fits(at) && at.address == *address)
        }
        _ => Vec::new(),
    };
    if found.is_empty() {
        vec![name.to_owned()]
    } else {
        found
    }
}

fn sentence(report: &Report) -> String {
    let workers = match report.serving_pids.as_slice() {
        [] if report.attached => "the kernel's hash chooses again".to_owned(),
        [] => "no worker is left".to_owned(),
        pids => {
            let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
            format!(
                "workers {} go on serving by the kernel's own choice",
                pids.join(" ")
            )
        }
    };
    format!("{}: detached; {workers}", report.name)
}
