//! A snapshot of all that is known of steered groups.

use serde::Serialize;
use wakeone_kernel::proc::counters;
use wakeone_kernel::proc::doing;
use wakeone_model::judge::WorkerState;
use wakeone_model::snapshot::{HostLook, Snapshot, TraceGaps, TraceLook};
use wakeone_model::waits::Waits;

use wakeone_control::status::{self, Status};

/// All groups, or those of one agent.
#[derive(Debug, Clone, Serialize)]
pub struct Metrics {
    /// By name.
    pub groups: Vec<GroupMetrics>,
}

/// The status of a group, as `wakeone status` shows it, and the state of its workers.
#[derive(Debug, Clone, Serialize)]
pub struct GroupMetrics {
    /// As `wakeone status --json` has it.
    #[serde(flatten)]
    pub status: status::Group,
    /// The living workers, by slot.
    pub workers: Vec<WorkerMetrics>,
    /// Counts from the tracepoints; absent if nobody asked for them or they may not be used.
    pub traced: Option<Traced>,
    /// Counters of the network namespace; absent if the group is not watched.
    pub host: Option<HostLook>,
}

/// The process in a slot.
#[derive(Debug, Clone, Serialize)]
pub struct WorkerMetrics {
    /// Its slot.
    pub slot: usize,
    /// Whether one of its threads waits for connections, it is stopped, or it does something else.
    pub doing: &'static str,
    /// CPU used, in ns.
    pub cpu_ns: u64,
    /// Time that it was ready to run and had no CPU, in ns.
    pub run_delay_ns: u64,
    /// Times that it gave its CPU up.
    pub switches_voluntary: u64,
    /// Times that its CPU was taken from it.
    pub switches_forced: u64,
    /// Descriptors open.
    pub descriptors: u32,
    /// Descriptors that may be open.
    pub descriptors_limit: u64,
}

/// The values of [`WorkerMetrics::doing`].
pub const DOING: [&str; 3] = ["waiting", "busy", "stopped"];

/// Counts from tracepoints since the group is watched.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Traced {
    /// Handshakes that its listeners completed; None if the kernel has no probe for them.
    pub connections: Option<u64>,
    /// Threads of the workers woken for them; None if the kernel has no probe for that.
    pub wakeups: Option<u64>,
    /// Its workers, by slot.
    pub workers: Vec<TracedWorker>,
}

/// Counts from tracepoints for one worker.
#[derive(Debug, Clone, Default, Serialize)]
pub struct TracedWorker {
    /// Its slot.
    pub slot: usize,
    /// Connections that accept() returned; None if the kernel has no probe for that.
    pub accepted: Option<u64>,
    /// accept() calls that found nothing.
    pub accepted_empty: Option<u64>,
    /// Threads woken.
    pub woken: Option<u64>,
    /// Waits in the accept queue.
    pub waits: Option<Waits>,
}

impl From<Status> for Metrics {
    fn from(status: Status) -> Self {
        let groups = status.groups.into_iter();
        Self {
            groups: groups.map(|group| GroupMetrics::of(group, &[])).collect(),
        }
    }
}

impl GroupMetrics {
    /// Takes a group's status and looks at its workers too. `watched` holds the latest snapshot of each of its
    /// listeners.
    pub fn of(status: status::Group, watched: &[Snapshot]) -> Self {
        let workers = status.slots.iter().filter_map(worker).collect();
        Self {
            workers,
            traced: traced(&status, watched),
            host: watched.last().map(|watched| watched.host),
            status,
        }
    }
}

fn worker(slot: &status::Slot) -> Option<WorkerMetrics> {
    let pid = slot.pid?;
    let look = counters::worker(pid)?;
    Some(WorkerMetrics {
        slot: slot.slot,
        doing: match doing::doing(pid) {
            WorkerState::Waiting => "waiting",
            WorkerState::Stopped => "stopped",
            _ => "busy",
        },
        cpu_ns: look.cpu_ns,
        run_delay_ns: look.run_delay_ns,
        switches_voluntary: look.switches_voluntary,
        switches_forced: look.switches_forced,
        descriptors: look.descriptors,
        descriptors_limit: look.descriptors_limit,
    })
}

fn traced(status: &status::Group, watched: &[Snapshot]) -> Option<Traced> {
    let traces: Vec<&TraceLook> = watched
        .iter()
        .filter_map(|one| one.trace.as_ref())
        .collect();
    if traces.is_empty() {
        return None;
    }
    let lacks = |gap: fn(&TraceGaps) -> bool| traces.iter().any(|trace| gap(&trace.gaps));
    let connections = !lacks(|gaps| gaps.connections);
    let accepts = !lacks(|gaps| gaps.accepts);
    let wakeups = !lacks(|gaps| gaps.wakeups);
    let worker = |slot: &status::Slot| {
        let pid = slot.pid?;
        let seen = || traces.iter().filter_map(|trace| trace.workers.get(&pid));
        let waits = || {
            let mut waits = Waits::default();
            seen().for_each(|seen| waits.add(&seen.waits));
            waits
        };
        Some(TracedWorker {
            slot: slot.slot,
            accepted: accepts.then(|| seen().map(|seen| seen.accepted).sum()),
            accepted_empty: accepts.then(|| seen().map(|seen| seen.accepted_empty).sum()),
            woken: wakeups.then(|| seen().map(|seen| seen.woken).sum()),
            waits: accepts.then(waits),
        })
    };
    // Threads of one process are counted together, so only the first of its slots reports them.
    let first = |slot: &&status::Slot| {
        let mut same = status.slots.iter().filter(|other| other.pid == slot.pid);
        same.next().is_some_and(|first| first.slot == slot.slot)
    };
    Some(Traced {
        connections: connections.then(|| traces.iter().map(|trace| trace.connections).sum()),
        wakeups: wakeups.then(|| traces.iter().map(|trace| trace.wakeups).sum()),
        workers: status
            .slots
            .iter()
            .filter(first)
            .filter_map(worker)
            .collect(),
    })
}
