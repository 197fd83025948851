//! `wakeone detach`: take away what a group left behind.

use std::process::ExitCode;

use crate::runtime_dir::RuntimeDir;
use wakeone::detach::{self, Report};
use wakeone_terminal::{print, print_json, print_wrapped};

/// Stop steering a server that was attached, or take away what a group without a supervisor left behind
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: wakeone detach :8080")]
pub struct Args {
    #[arg(value_name = "GROUP", help = crate::target::FORMS, required_unless_present = "all")]
    name: Option<String>,

    /// Every group without a living supervisor, and what half-finished starts left
    #[arg(long, conflicts_with = "name")]
    all: bool,

    /// As JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    runtime: RuntimeDir,
}

/// Detaches.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let paths = args.runtime.paths();
    let reports = match &args.name {
        Some(name) => detach::meant(&paths, name)?
            .iter()
            .map(|name| detach::detach(&paths, name))
            .collect::<Result<_, _>>()?,
        None => detach::detach_all(&paths)?,
    };
    wakeone_split::sweep();
    if args.json {
        print_json(&reports)?;
    } else if reports.is_empty() {
        print("nothing was left behind\n")?;
    } else {
        let sentences: Vec<String> = reports.iter().map(sentence).collect();
        print_wrapped(&sentences.join("\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn sentence(report: &Report) -> String {
    let workers = match report.serving_pids.as_slice() {
        _ if report.one_queue => "its workers are woken as before".to_owned(),
        [] if report.attached && !report.steered => "no server was there".to_owned(),
        [] if report.attached || report.detached > 0 => {
            "the kernel's hash chooses again".to_owned()
        }
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
