//! How a listener that is looked at is steered, and changing that.

use wakeone::dispatcher;
use wakeone::metrics::socket;
use wakeone::paths::Paths;
use wakeone::policy::Policy;
use wakeone::status::{self, Group};
use wakeone_model::listener::Protocol;
use wakeone_model::snapshot::Watch;
use wakeone_top::{Action, SlotLook, Steering};

/// The groups steered here; none where they may not be seen.
pub fn groups(paths: &Paths) -> Vec<Group> {
    status::read(paths).map_or_else(|_| Vec::new(), |status| status.groups)
}

/// The group that a listener belongs to. Another network namespace may have a group on the same address: its workers
/// are others.
pub fn of(groups: &[Group], watch: &Watch) -> Option<Steering> {
    let address = watch.last.listener.address;
    let here = |group: &&Group| {
        let udp = watch.last.listener.protocol == Protocol::Udp;
        let listens = (group.protocol == "udp") == udp
            && group
                .listen
                .iter()
                .any(|at| at.strip_prefix("udp://").unwrap_or(at).parse() == Ok(address));
        let mut pids = group.slots.iter().filter_map(|slot| slot.pid).peekable();
        let unmanned = pids.peek().is_none() || watch.last.workers.is_empty();
        group.steered
            && listens
            && (unmanned || pids.any(|pid| watch.last.workers.contains_key(&pid)))
    };
    groups.iter().find(here).map(told)
}

fn told(group: &Group) -> Steering {
    let slot = |slot: &status::Slot| SlotLook {
        slot: u32::try_from(slot.slot).unwrap_or(u32::MAX),
        pid: slot.pid,
        state: slot.state.into(),
        selected: slot.selected,
        rescues: slot.rescues,
        rescued: slot.rescued,
    };
    Steering {
        group: group.name.clone(),
        policy: group.policy.map(|policy| policy.to_string()),
        agent: group.agent,
        fallbacks: group.fallbacks,
        slots: group.slots.iter().map(slot).collect(),
    }
}

/// A line for a report: the group, and what the program chose so far.
pub fn line(steering: &Steering) -> String {
    let all: u64 = steering.slots.iter().map(|slot| slot.selected).sum();
    let slots: Vec<String> = steering
        .slots
        .iter()
        .map(|slot| {
            let share = slot.selected as f64 / all.max(1) as f64 * 100.0;
            format!("slot {} {share:.0} %", slot.slot)
        })
        .collect();
    format!(
        "  steered as `{}` by {}; chosen so far: {all}, {}\n",
        steering.group,
        steering.policy.as_deref().unwrap_or("an unknown policy"),
        slots.join(", ")
    )
}

/// Does what a key asked for; what came of it, in a sentence.
pub fn act(paths: &Paths, action: &Action) -> String {
    match action {
        Action::Quit => String::new(),
        Action::ChangePolicy { group, from } => change_policy(paths, group, from.as_deref()),
        Action::Drain { group, slots, on } => drain(paths, group, slots, *on),
        Action::Rescue { group, slots } => rescue(paths, group, slots),
    }
}

/// The next policy that the group can have: those that go by counts are passed over where nobody counts.
fn change_policy(paths: &Paths, group: &str, from: Option<&str>) -> String {
    let at = Policy::ALL.iter().position(|p| Some(p.name()) == from);
    let others = Policy::ALL.iter().cycle().skip(at.map_or(0, |at| at + 1));
    let mut refused = String::new();
    for policy in others.take(Policy::ALL.len()) {
        match dispatcher::change_policy(paths, group, *policy) {
            Ok(_) => return format!("{group}: {policy} from the next connection on"),
            Err(
                error @ (dispatcher::PolicyError::Uncounted { .. }
                | dispatcher::PolicyError::Unfit { .. }),
            ) => refused = error.to_string(),
            Err(error) => return error.to_string(),
        }
    }
    refused
}

/// The agent does it: it alone may.
fn rescue(paths: &Paths, group: &str, slots: &[u32]) -> String {
    let mut moved = 0;
    for slot in slots {
        match socket::rescue(paths, group, *slot as usize) {
            Ok(more) => moved += more,
            Err(why) => return why,
        }
    }
    let names: Vec<String> = slots.iter().map(u32::to_string).collect();
    match moved {
        0 => format!("nothing waits in slot {}", names.join(", ")),
        moved => format!("{moved} connections moved from slot {}", names.join(", ")),
    }
}

fn drain(paths: &Paths, group: &str, slots: &[u32], on: bool) -> String {
    for slot in slots {
        if let Err(error) = dispatcher::change_drain(paths, group, *slot as usize, on) {
            return error.to_string();
        }
    }
    let names: Vec<String> = slots.iter().map(u32::to_string).collect();
    let names = names.join(", ");
    if on {
        format!("slot {names} drains: new connections go to others; d again ends it")
    } else {
        format!("slot {names} takes new connections again")
    }
}
