//! Finds what is wrong with a server, from a while of watching it: each finding with its cause, its numbers, and what
//! to do.
//!
//! The thresholds are of the kind that a healthy server under load stays clear of. Too little data is not judged.

mod case;
mod queues;
mod quic;
mod sockets;
mod spread;
mod workers;

use serde::{Deserialize, Serialize};

use self::case::Case;
use crate::accept::Shape;
use crate::snapshot::Watch;

/// Something to act on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// A stable name, for programs.
    pub code: String,
    /// The problem, in a few words.
    pub title: String,
    /// Why it is so.
    pub cause: String,
    /// The numbers that show it.
    pub evidence: Vec<String>,
    /// Steps to take, the best first.
    pub next: Vec<String>,
}

/// Returns all problems of the watched server; none: healthy.
pub fn judge(watch: &Watch) -> Vec<Finding> {
    let case = Case::of(watch);
    let rules: [fn(&Case<'_>) -> Option<Finding>; 21] = [
        workers::stopped,
        workers::blocking,
        workers::spins,
        workers::stuck,
        workers::answers_none,
        workers::unserved,
        queues::blocked,
        queues::overflow,
        queues::datagrams_dropped,
        queues::nearly_full,
        queues::reset,
        spread::herd,
        spread::lifo,
        sockets::group_of_one,
        sockets::ungrouped,
        sockets::mptcp,
        sockets::pinned,
        sockets::descriptors,
        sockets::heavy_flow,
        sockets::orphan,
        quic::scattered,
    ];
    let mut found: Vec<Finding> = rules.iter().filter_map(|rule| rule(&case)).collect();
    // Whatever the workers seem to do: where connections wait long, something is wrong.
    if found.iter().all(|one| one.code == "backlog-too-small") {
        found.extend(queues::long_waits(&case));
    }
    if !found.iter().any(|one| WAITS.contains(&one.code.as_str())) {
        found.extend(queues::waits_inside(&case));
    }
    found
}

/// Findings that tell why requests wait, before accept() and after it.
const WAITS: [&str; 8] = [
    "stopped-worker",
    "blocking-listener",
    "stuck-worker",
    "nobody-accepts",
    "blind-hash",
    "cpu-missing",
    "long-waits",
    "workers-busy",
];

fn finding(code: &str, title: impl Into<String>, cause: impl Into<String>) -> Finding {
    Finding {
        code: code.into(),
        title: title.into(),
        cause: cause.into(),
        evidence: Vec::new(),
        next: Vec::new(),
    }
}

impl Finding {
    fn shown(mut self, evidence: impl Into<String>) -> Self {
        self.evidence.push(evidence.into());
        self
    }

    fn then(mut self, next: impl Into<String>) -> Self {
        self.next.push(next.into());
        self
    }
}

/// Says what is no problem and worth knowing, a sentence each. The figures of some servers leave something out, idle workers may have
/// unequal shares of the connections, and those of QUIC may break at times.
pub fn notes(watch: &Watch) -> Vec<String> {
    let uneven = spread::uneven_and_idle(&Case::of(watch));
    let notes = blind_spot(watch).into_iter().chain(uneven);
    notes.chain(quic::note(watch)).collect()
}

fn blind_spot(watch: &Watch) -> Option<String> {
    const HANDED: &str = "connections that were accepted wait to be taken up";
    let mut workers = watch.last.workers.values();
    let is_node = workers.any(|one| {
        ["node", "PM2"]
            .iter()
            .any(|name| one.name.starts_with(name))
    });
    Some(match watch.model.shape {
        Shape::PassesDescriptors if is_node => format!(
            "{HANDED} by the process that they are passed to: those waits are not seen; with NODE_CLUSTER_SCHED_POLICY=none in the environment of node or pm2 its workers accept themselves"
        ),
        Shape::PassesDescriptors => {
            format!("{HANDED} by the process that they are passed to: those waits are not seen")
        }
        Shape::HandsToThreads => {
            format!("{HANDED} by the thread that they are handed to: those waits are not seen")
        }
        _ if watch.pools => format!(
            "threads of the workers wait for work: if {HANDED} by such a thread, those waits are not seen"
        ),
        _ => return None,
    })
}

/// A time in µs as a person writes it.
pub fn time(us: f64) -> String {
    if us < 1000.0 {
        format!("{us:.0} µs")
    } else if us < 1_000_000.0 {
        format!("{:.1} ms", us / 1000.0)
    } else {
        format!("{:.2} s", us / 1e6)
    }
}

#[cfg(test)]
mod tests;
