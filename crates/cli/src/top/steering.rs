//! Reads and changes how a watched listener is steered.

use wakeone::metrics::socket;
use wakeone_control::control;
use wakeone_control::paths::Paths;
use wakeone_control::policy::{Affinity, Policy};
use wakeone_control::status::{self, Group};
use wakeone_model::layout::{connections, count};
use wakeone_model::listener::Protocol;
use wakeone_model::snapshot::Watch;
use wakeone_top::{Action, Change, SlotLook, Steering};

/// The groups steered here; empty if we may not read them.
pub fn groups(paths: &Paths) -> Vec<Group> {
    status::read(paths).map_or_else(|_| Vec::new(), |status| status.groups)
}

/// The group of a listener, while our program chooses there.
pub fn group_of<'a>(groups: &'a [Group], watch: &Watch) -> Option<&'a Group> {
    let mut here = groups.iter().filter(|group| is_of(group, watch));
    here.find(|group| group.steered)
}

/// How a listener is steered, while our program chooses there.
pub fn of(groups: &[Group], watch: &Watch) -> Option<Steering> {
    group_of(groups, watch).map(told)
}

/// Formats a line for a report on a listener where our program chose, until the server set another.
pub fn replaced(groups: &[Group], watch: &Watch) -> Option<String> {
    let mut here = groups.iter().filter(|group| is_of(group, watch));
    let group = here.find(|group| group.replaced)?;
    Some(format!(
        "not steered, though attached as `{}`: the server has set a program of its own, or taken ours away",
        group.name
    ))
}

/// Whether a group is that of a listener. Another network namespace may have a group on the same address, but its
/// workers differ.
fn is_of(group: &Group, watch: &Watch) -> bool {
    let address = watch.last.listener.address;
    let udp = watch.last.listener.protocol == Protocol::Udp;
    let listens = (group.protocol == "udp") == udp
        && group
            .listen
            .iter()
            .any(|at| at.strip_prefix("udp://").unwrap_or(at).parse() == Ok(address));
    let mut pids = group.slots.iter().filter_map(|slot| slot.pid).peekable();
    let unmanned = pids.peek().is_none() || watch.last.workers.is_empty();
    listens && (unmanned || pids.any(|pid| watch.last.workers.contains_key(&pid)))
}

fn told(group: &Group) -> Steering {
    let slot = |slot: &status::Slot| SlotLook {
        slot: u32::try_from(slot.slot).unwrap_or(u32::MAX),
        pid: slot.pid,
        state: slot.state.into(),
        open: (group.affinity == Some(Affinity::Quic)).then(|| slot.active.max(0).unsigned_abs()),
        selected: slot.selected,
        rescues: slot.rescues,
        rescued: slot.rescued,
    };
    Steering {
        group: group.name.clone(),
        policy: group.policy.map(|policy| policy.to_string()),
        agent: group.agent,
        fallbacks: group.fallbacks,
        heavy: heavy(group),
        slots: group.slots.iter().map(slot).collect(),
    }
}

/// Tells of flows that are too much for one worker, if there are any.
pub fn heavy(group: &Group) -> Option<String> {
    let flows = |number: Option<u32>| {
        let number = number.filter(|number| *number > 0)?;
        Some(count(number.into(), "flow", "flows"))
    };
    let kept = || {
        let flows = flows(group.heavy_flows)?;
        Some(format!(
            "{flows} too heavy for one worker (--affinity none spreads)"
        ))
    };
    flows(group.spread_flows)
        .map(|flows| format!("{flows} too heavy for one worker, spread over all"))
        .or_else(kept)
}

/// Formats a line for a report: the group, and the program's choices so far.
pub fn line(steering: &Steering) -> String {
    let all: u64 = steering.slots.iter().map(|slot| slot.selected).sum();
    let begin = format!(
        "steered as `{}` by {}",
        steering.group,
        steering.policy.as_deref().unwrap_or("an unknown policy")
    );
    if all == 0 {
        return format!("{begin}; it has chosen for no connection yet");
    }
    let share = |slot: &SlotLook| {
        let share = slot.selected as f64 / all as f64 * 100.0;
        format!("{share:.0}% to slot {}", slot.slot)
    };
    let slots: Vec<String> = steering.slots.iter().map(share).collect();
    format!("{begin}; of {all} choices so far {}", slots.join(", "))
}

/// Carries out the action of a key. Returns a sentence with the result, or with the reason for doing nothing.
pub fn act(paths: &Paths, action: &Action) -> Result<String, String> {
    match action {
        Action::Quit => Ok(String::new()),
        Action::ChangePolicy(change) => change_policy(paths, change),
        Action::Drain { group, slots, on } => drain(paths, group, slots, *on),
        Action::Rescue { group, slots } => rescue(paths, group, slots),
    }
}

fn change_policy(paths: &Paths, change: &Change) -> Result<String, String> {
    let policy: Policy = change.to.parse()?;
    control::change_policy(paths, &change.group, policy).map_err(|error| error.to_string())?;
    Ok(format!(
        "{}: {policy} from the next connection on",
        change.group
    ))
}

/// Asks the agent, which alone may move queues.
fn rescue(paths: &Paths, group: &str, slots: &[u32]) -> Result<String, String> {
    let mut moved = 0;
    for slot in slots {
        moved += socket::rescue(paths, group, *slot as usize)?;
    }
    let names: Vec<String> = slots.iter().map(u32::to_string).collect();
    let names = names.join(", ");
    Ok(match moved {
        0 => format!("nothing waits in slot {names}"),
        moved => format!("{} moved from slot {names}", connections(moved.into())),
    })
}

fn drain(paths: &Paths, group: &str, slots: &[u32], on: bool) -> Result<String, String> {
    for slot in slots {
        control::change_drain(paths, group, *slot as usize, on)
            .map_err(|error| error.to_string())?;
    }
    let names: Vec<String> = slots.iter().map(u32::to_string).collect();
    let names = names.join(", ");
    Ok(if on {
        format!("slot {names} drains: new connections go to others; d again ends it")
    } else {
        format!("slot {names} takes new connections again")
    })
}
