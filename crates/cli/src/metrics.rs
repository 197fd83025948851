//! `wakeone metrics`: the metrics of steered groups, for programs that store them.

use std::process::ExitCode;

use anyhow::Context;
use wakeone::metrics::{self, Metrics};
use wakeone_control::named;

use crate::runtime_dir::RuntimeDir;
use wakeone_terminal::{print, print_json};

/// Print the figures of all steered groups once, as OpenMetrics; --metrics of run, attach and agent serves them
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: wakeone metrics | grep active")]
pub struct Args {
    #[arg(value_name = "GROUP", help = crate::target::only_this(), conflicts_with = "help_all")]
    group: Option<String>,

    /// Explain every metric
    #[arg(long)]
    help_all: bool,

    /// As JSON
    #[arg(long, conflicts_with = "help_all")]
    json: bool,

    #[command(flatten)]
    runtime: RuntimeDir,
}

/// Prints them.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if args.help_all {
        print(&metrics::help())?;
        return Ok(ExitCode::SUCCESS);
    }
    let paths = args.runtime.paths();
    let mut status = named::all(&paths).context("metrics")?;
    if let Some(group) = &args.group {
        status.groups = named::groups(&paths, group).context("metrics")?;
    }
    let metrics = Metrics::from(status);
    if args.json {
        print_json(&metrics)?;
    } else {
        print(&metrics::exposition(metrics))?;
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use wakeone_top::table::{Column, FORMS};

    /// Each column that `wakeone top` shows of a worker is a metric, or a label of one.
    #[test]
    fn every_column_of_top_is_served() {
        let help = wakeone::metrics::help();
        for form in &FORMS {
            let names: &[&str] = match form.column {
                Column::Pid => &["wakeone_slot_worker_pid"],
                // The pid leads to it; as a label, it would start a new series for each worker.
                Column::Name | Column::Slot => continue,
                Column::Share => &[
                    "wakeone_worker_accepted_connections_total",
                    "wakeone_slot_selected_connections_total",
                ],
                Column::Active => &["wakeone_slot_active_connections"],
                Column::Queue => &[
                    "wakeone_slot_queued_connections",
                    "wakeone_slot_queue_limit_connections",
                ],
                Column::Wait => &["wakeone_worker_accept_wait_seconds"],
                Column::Wakes => &[
                    "wakeone_worker_wakeups_total",
                    "wakeone_group_announced_connections_total",
                ],
                Column::Cpu => &["wakeone_worker_cpu_seconds_total"],
                Column::Chosen => &["wakeone_slot_selected_share_ratio"],
                Column::Rescues => &["wakeone_slot_rescues_total"],
                Column::State => &["wakeone_worker_doing", "wakeone_slot_state"],
            };
            for name in names {
                assert!(help.contains(&format!("{name}{{")), "{name}");
            }
        }
    }
}
