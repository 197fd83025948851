//! `wakeone status`: what is steered now.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::output::print;
use anyhow::Context;
use wakeone::paths::Paths;
use wakeone::status::{self, Group, Slot};
use wakeone::supervisor::state::default_runtime_dir;

/// Show the groups that are steered now, slot by slot
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: wakeone status --json | jq '.groups[].slots[].active'")]
pub struct Args {
    /// Show this group only
    #[arg(value_name = "NAME")]
    name: Option<String>,

    /// As JSON
    #[arg(long)]
    json: bool,

    /// Where groups keep their state [default: $WAKEONE_RUNTIME_DIR, /run/wakeone]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
}

/// Prints the snapshot.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let runtime = args.runtime_dir.unwrap_or_else(default_runtime_dir);
    let mut status = status::read(&Paths::of(&runtime)).with_context(|| {
        format!(
            "status: cannot read {}; groups that root started only root may see",
            runtime.display()
        )
    })?;
    if let Some(name) = &args.name {
        status.groups.retain(|group| group.name == *name);
        anyhow::ensure!(
            !status.groups.is_empty(),
            "status: there is no group `{name}`"
        );
    }
    if args.json {
        print(&format!("{}\n", serde_json::to_string_pretty(&status)?))?;
    } else if status.groups.is_empty() {
        print(
            "nothing is steered; start a server with `wakeone run`, or steer one that runs with `wakeone attach`\n",
        )?;
    } else {
        let texts: Vec<String> = status.groups.iter().map(text).collect();
        print(&texts.join("\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn text(group: &Group) -> String {
    let mut lines = vec![headline(group)];
    if group.protocol == "udp" && group.steered {
        lines.push(datagram_heads());
        lines.extend(group.slots.iter().map(datagram_row));
        return lines.join("\n") + "\n";
    }
    lines.push(format!(
        "{:>4} {:>8}  {:<8} {:>7} {:>12} {:>14} {:>7} {:>8} {:>8} {:>8}",
        "slot",
        "pid",
        "state",
        "active",
        "queued",
        "selected",
        "share",
        "rescues",
        "moved",
        "restarts"
    ));
    lines.extend(group.slots.iter().map(row));
    lines.join("\n") + "\n"
}

fn headline(group: &Group) -> String {
    let policy = group
        .policy
        .map_or("the kernel's choice".to_owned(), |policy| {
            policy.to_string()
        });
    let mut words = vec![
        group.name.clone(),
        group.listen.join(", "),
        policy,
        match group.supervisor_pid {
            Some(pid) if group.attached => format!("attached, agent {pid}"),
            None if group.attached => {
                "attached, no agent: `wakeone attach` takes over, `wakeone detach` takes away"
                    .to_owned()
            }
            Some(pid) => format!("supervisor {pid}"),
            None => {
                "no supervisor: `wakeone run` takes over, `wakeone detach` takes away".to_owned()
            }
        },
    ];
    if group.closing {
        words.push("closing".to_owned());
    }
    if group.steered && !group.agent && !(group.attached && group.supervisor_pid.is_none()) {
        words.push("no agent, so no rescue".to_owned());
    }
    if let Some(affinity) = group.affinity {
        words.insert(3, format!("affinity {affinity}"));
    }
    if group.steered && !group.counting && group.protocol != "udp" {
        words.push("connections are not counted".to_owned());
    }
    if group.steered {
        words.push(format!("{} fallbacks", group.fallbacks));
    }
    words.retain(|word| !word.is_empty());
    words.join(" · ")
}

fn datagram_heads() -> String {
    format!(
        "{:>4} {:>8}  {:<8} {:>18} {:>9} {:>14} {:>7} {:>9} {:>8}",
        "slot",
        "pid",
        "state",
        "waiting bytes",
        "dropped",
        "selected",
        "share",
        "stuck ms",
        "restarts"
    )
}

fn datagram_row(slot: &Slot) -> String {
    format!(
        "{:>4} {:>8}  {:<8} {:>18} {:>9} {:>14} {:>6.1}% {:>9} {:>8}",
        slot.slot,
        slot.pid.map_or("-".to_owned(), |pid| pid.to_string()),
        slot.state,
        format!(
            "{}/{}",
            slot.waiting_bytes.unwrap_or(0),
            slot.buffer_bytes.unwrap_or(0)
        ),
        slot.dropped.unwrap_or(0),
        slot.selected,
        slot.selected_share * 100.0,
        slot.stuck_ms,
        slot.restarts,
    )
}

fn row(slot: &Slot) -> String {
    format!(
        "{:>4} {:>8}  {:<8} {:>7} {:>12} {:>14} {:>6.1}% {:>8} {:>8} {:>8}",
        slot.slot,
        slot.pid.map_or("-".to_owned(), |pid| pid.to_string()),
        slot.state,
        slot.active,
        format!("{}/{}", slot.queued, slot.queue_limit),
        slot.selected,
        slot.selected_share * 100.0,
        slot.rescues,
        slot.rescued,
        slot.restarts,
    )
}
