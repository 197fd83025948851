//! `wakeone status`: shows the groups that are steered now.

use std::cell::LazyCell;
use std::process::ExitCode;

use crate::runtime_dir::RuntimeDir;
use anyhow::Context;
use wakeone_control::named;
use wakeone_control::policy::Affinity;
use wakeone_control::status::{Group, Slot};
use wakeone_kernel::proc::waits::Processes;
use wakeone_model::layout::{
    self, Cell, Column, Style, Tone, connections, count, number, pack, paint, words, wrap,
};
use wakeone_terminal::{print, print_json, print_wrapped, style};

/// Show the groups that are steered now, slot by slot
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Columns:\n  open: connections that the worker holds, those that wait included\n  queue: waiting/limit\n  chosen: times the policy chose the slot; share: its part of those\n  moved: connections that went to other workers while this one was stuck; moves: how often\n  restarts: workers started again\n  armed: whether the worker is woken for connections, of workers that share one queue\nA narrow terminal shows fewer of them; --json has all.\nExamples: wakeone status :8080\n          wakeone status --json | jq '.groups[].slots[].active'"
)]
pub struct Args {
    #[arg(value_name = "GROUP", help = crate::target::only_this())]
    group: Option<String>,

    /// Show the slots of attached and split servers too that have no worker any more
    #[arg(long)]
    all: bool,

    /// As JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    runtime: RuntimeDir,
}

/// Prints the snapshot.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let paths = args.runtime.paths();
    let mut status = named::all(&paths).context("status")?;
    if let Some(group) = &args.group {
        status.groups = named::groups(&paths, group).context("status")?;
    }
    // It reads all of /proc, so once for all groups.
    let processes = LazyCell::new(Processes::read);
    for group in &mut status.groups {
        group.orphans = group.find_orphans(&paths, &processes);
    }
    if args.json {
        print_json(&status)?;
    } else if status.groups.is_empty() {
        print_wrapped(
            "nothing is steered; start a server with `wakeone run`, or steer one that runs with `wakeone attach`",
        )?;
    } else {
        let shown = |group| text(group, args.all, style());
        let texts: Vec<String> = status.groups.iter().map(shown).collect();
        print(&texts.join("\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn text(group: &Group, all: bool, style: Style) -> String {
    let mut lines = headline(group, style);
    // The slots of an attached or split server follow its sockets. Those of `run` are workers that will come back.
    let is_dead =
        |slot: &&Slot| group.attached && !all && slot.pid.is_none() && slot.state == "down";
    let (dead, living): (Vec<&Slot>, Vec<&Slot>) = group.slots.iter().partition(is_dead);
    // Shares of the slots that are shown: with those of removed slots, they would not add up to 100 %.
    let chosen = living.iter().map(|slot| slot.selected).sum();
    if group.slots.iter().any(|slot| slot.waiting_bytes.is_some()) {
        let rows = living.iter().map(|slot| datagram_row(slot, chosen));
        let (mut columns, mut rows) = (DATAGRAMS.to_vec(), rows.collect::<Vec<_>>());
        // Only of QUIC connections are known.
        if group.affinity != Some(Affinity::Quic) {
            columns.remove(OPEN);
            rows.iter_mut().for_each(|row| drop(row.remove(OPEN)));
        }
        lines.extend(layout::table(&columns, &rows, 0, style));
    } else if group.queued.is_some() {
        let rows: Vec<Vec<Cell>> = living.iter().map(|slot| shared_row(slot)).collect();
        lines.extend(layout::table(&ONE_QUEUE, &rows, 0, style));
    } else {
        let rows: Vec<Vec<Cell>> = living.iter().map(|slot| row(slot, chosen)).collect();
        lines.extend(layout::table(&CONNECTIONS, &rows, 0, style));
    }
    if !dead.is_empty() && !is_awaited(group) {
        let slots = count(dead.len() as u64, "slot", "slots");
        let told = format!("{slots} of sockets that were closed not shown; --all shows them");
        lines.extend(
            wrap(&told, "", style)
                .iter()
                .map(|line| paint(line, Tone::Dim, style)),
        );
    }
    for orphan in &group.orphans {
        lines.extend(wrap(&orphan.told(), "", style));
    }
    lines.join("\n") + "\n"
}

/// Whether its server ended, and its agent waits for the next.
fn is_awaited(group: &Group) -> bool {
    let is_served = group.slots.iter().any(|slot| slot.pid.is_some());
    group.attached && group.policy.is_none() && !group.replaced && !is_served
}

fn headline(group: &Group, style: Style) -> Vec<String> {
    let policy = group
        .policy
        .map_or("the kernel's choice".to_owned(), |policy| {
            policy.to_string()
        });
    let listen = group.listen.join(", ");
    let mut words = vec![
        group.name.clone(),
        match &group.network {
            Some(network) => format!("{listen} in {network}"),
            None => listen,
        },
        policy,
        match group.supervisor_pid {
            Some(pid) if is_awaited(group) => {
                format!("agent {pid} waits for a server there; `wakeone detach` ends it")
            }
            Some(pid) if group.started => format!("started by process {pid}"),
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
    if group.replaced {
        words.push(
            "not steered: the server has set a program of its own, or taken ours away".to_owned(),
        );
    }
    if group.closing {
        words.push("closing".to_owned());
    }
    if let (Some(queued), Some(limit)) = (group.queued, group.queue_limit) {
        words.insert(3, format!("one queue, {queued}/{limit}"));
    }
    let rescues = group.queued.is_none();
    if group.steered
        && rescues
        && !group.agent
        && !(group.attached && group.supervisor_pid.is_none())
    {
        words.push("no agent, so no rescue".to_owned());
    }
    if let Some(affinity) = group.affinity {
        words.insert(3, format!("affinity {affinity}"));
    }
    if group.steered && !group.counting && group.protocol != "udp" {
        words.push("connections are not counted".to_owned());
    }
    if group.fallbacks > 0 {
        words.push(format!(
            "{} placed by the kernel, as no slot could be chosen",
            connections(group.fallbacks)
        ));
    }
    words.extend(crate::top::steering::heavy(group));
    words.retain(|word| !word.is_empty());
    let mut lines = pack(&words, " · ", "", style);
    if let Some(rest) = lines[0].strip_prefix(&group.name) {
        lines[0] = paint(&group.name, Tone::Bold, style) + rest;
    }
    lines
}

const CONNECTIONS: [Column; 10] = [
    number("slot", 0),
    number("pid", 0),
    words("state", 0),
    number("open", 1),
    number("queue", 0),
    number("chosen", 4),
    number("share", 2),
    number("moved", 3),
    number("moves", 6),
    number("restarts", 5),
];

/// The column of open connections.
const OPEN: usize = 3;

const DATAGRAMS: [Column; 10] = [
    number("slot", 0),
    number("pid", 0),
    words("state", 0),
    number("open", 0),
    number("waiting bytes", 0),
    number("dropped", 1),
    number("chosen", 3),
    number("share", 2),
    number("stuck ms", 4),
    number("restarts", 5),
];

const ONE_QUEUE: [Column; 6] = [
    number("slot", 0),
    number("pid", 0),
    words("state", 0),
    words("armed", 0),
    number("open", 0),
    number("weight", 1),
];

/// The first cells of every row: the slot, its worker and its state.
fn who(slot: &Slot) -> [Cell; 3] {
    [
        slot.slot.into(),
        slot.pid.map_or("-".into(), Cell::from),
        Cell::toned(slot.state, Tone::of_state(slot.state)),
    ]
}

/// Its share of the choices of all slots that are shown.
fn share(slot: &Slot, chosen: u64) -> Cell {
    let share = slot.selected as f64 / chosen.max(1) as f64;
    format!("{:.1}%", share * 100.0).into()
}

fn datagram_row(slot: &Slot, chosen: u64) -> Vec<Cell> {
    let waiting = slot.waiting_bytes.unwrap_or(0);
    let rest = [
        slot.active.into(),
        format!("{waiting}/{}", slot.buffer_bytes.unwrap_or(0)).into(),
        slot.dropped.unwrap_or(0).into(),
        slot.selected.into(),
        share(slot, chosen),
        slot.stuck_ms.into(),
        slot.restarts.into(),
    ];
    who(slot).into_iter().chain(rest).collect()
}

fn shared_row(slot: &Slot) -> Vec<Cell> {
    let armed = if slot.armed == Some(true) {
        "yes"
    } else {
        "no"
    };
    let rest = [armed.into(), slot.active.into(), slot.weight.into()];
    who(slot).into_iter().chain(rest).collect()
}

fn row(slot: &Slot, chosen: u64) -> Vec<Cell> {
    let rest = [
        slot.active.into(),
        format!("{}/{}", slot.queued, slot.queue_limit).into(),
        slot.selected.into(),
        share(slot, chosen),
        slot.rescued.into(),
        slot.rescues.into(),
        slot.restarts.into(),
    ];
    who(slot).into_iter().chain(rest).collect()
}
