//! What one thread writes down, and how the threads' notes are put together.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use hdrhistogram::Histogram;

use crate::{ErrorKind, Outcome, PathOutcome, Phases, Plan};

/// Three significant digits up to an hour, in ns.
pub(crate) fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 3_600_000_000_000, 3).expect("these bounds are valid")
}

/// More different `X-Worker` values than this are counted as "other": a header of random text must not fill memory.
const WORKERS_MAX: usize = 4096;

/// The moments of one answered request, ns from the start of the load.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Moments {
    pub planned: u64,
    pub started: u64,
    /// The connection took the request.
    pub sent: u64,
    pub first_byte: u64,
    pub done: u64,
    /// False on a kept connection.
    pub fresh: bool,
}

/// One thread's notes.
pub(crate) struct Recorder {
    pub planned: u64,
    pub started: u64,
    pub completed: u64,
    pub cancelled: u64,
    pub connections: u64,
    pub bytes_received: u64,
    /// When the last request ended, ns from the start.
    pub last_end_ns: u64,
    latency: Histogram<u64>,
    service: Histogram<u64>,
    connect: Histogram<u64>,
    wait: Histogram<u64>,
    first_byte: Histogram<u64>,
    lateness: Histogram<u64>,
    paths: Vec<Histogram<u64>>,
    statuses: BTreeMap<u16, u64>,
    workers: HashMap<Vec<u8>, u64>,
    errors: HashMap<ErrorKind, u64>,
}

impl Recorder {
    pub(crate) fn new(paths: usize) -> Self {
        Self {
            planned: 0,
            started: 0,
            completed: 0,
            cancelled: 0,
            connections: 0,
            bytes_received: 0,
            last_end_ns: 0,
            latency: histogram(),
            service: histogram(),
            connect: histogram(),
            wait: histogram(),
            first_byte: histogram(),
            lateness: histogram(),
            // With one path its histogram would be `latency` again.
            paths: if paths > 1 {
                (0..paths).map(|_| histogram()).collect()
            } else {
                Vec::new()
            },
            statuses: BTreeMap::new(),
            workers: HashMap::new(),
            errors: HashMap::new(),
        }
    }

    pub(crate) fn begun(&mut self, planned_ns: u64, now_ns: u64) {
        self.started += 1;
        self.lateness
            .saturating_record(now_ns.saturating_sub(planned_ns));
    }

    /// A whole answer, of whatever status.
    pub(crate) fn answered(&mut self, entry: usize, status: u16, worker: &[u8], at: Moments) {
        *self.statuses.entry(status).or_default() += 1;
        self.attribute(worker);
        if !(200..300).contains(&status) {
            return self.failed(ErrorKind::Status, at.done);
        }
        self.completed += 1;
        self.last_end_ns = at.done;
        let latency = at.done.saturating_sub(at.planned);
        self.latency.saturating_record(latency);
        self.service.saturating_record(at.done - at.started);
        self.wait
            .saturating_record(at.first_byte.saturating_sub(at.sent));
        self.first_byte
            .saturating_record(at.first_byte - at.started);
        if at.fresh {
            self.connect.saturating_record(at.sent - at.started);
        }
        if let Some(path) = self.paths.get_mut(entry) {
            path.saturating_record(latency);
        }
    }

    pub(crate) fn failed(&mut self, kind: ErrorKind, now_ns: u64) {
        *self.errors.entry(kind).or_default() += 1;
        self.last_end_ns = now_ns;
    }

    pub(crate) fn error_count(&self) -> u64 {
        self.errors.values().sum()
    }

    fn attribute(&mut self, worker: &[u8]) {
        if worker.is_empty() {
            return;
        }
        // Looked up before inserted: no allocation for a worker already seen.
        if let Some(count) = self.workers.get_mut(worker) {
            *count += 1;
        } else {
            let name = if self.workers.len() < WORKERS_MAX {
                worker
            } else {
                b"other"
            };
            *self.workers.entry(name.to_vec()).or_default() += 1;
        }
    }

    fn add(&mut self, other: Self) {
        self.planned += other.planned;
        self.started += other.started;
        self.completed += other.completed;
        self.cancelled += other.cancelled;
        self.connections += other.connections;
        self.bytes_received += other.bytes_received;
        self.last_end_ns = self.last_end_ns.max(other.last_end_ns);
        let pairs = [
            (&mut self.latency, other.latency),
            (&mut self.service, other.service),
            (&mut self.connect, other.connect),
            (&mut self.wait, other.wait),
            (&mut self.first_byte, other.first_byte),
            (&mut self.lateness, other.lateness),
        ];
        for (into, from) in pairs
            .into_iter()
            .chain(self.paths.iter_mut().zip(other.paths))
        {
            into.add(from).expect("histograms of one shape");
        }
        other
            .statuses
            .into_iter()
            .for_each(|(status, n)| *self.statuses.entry(status).or_default() += n);
        other
            .workers
            .into_iter()
            .for_each(|(worker, n)| *self.workers.entry(worker).or_default() += n);
        other
            .errors
            .into_iter()
            .for_each(|(kind, n)| *self.errors.entry(kind).or_default() += n);
    }

    /// All threads' notes as one outcome.
    pub(crate) fn outcome(plan: &Plan, threads: Vec<Self>) -> Outcome {
        let mut all = Self::new(plan.mix.entries.len());
        threads.into_iter().for_each(|thread| all.add(thread));
        if all.paths.is_empty() {
            all.paths.push(all.latency.clone());
        }
        // Added up, not collected: two broken names may read the same.
        let mut by_worker = BTreeMap::new();
        for (worker, n) in all.workers {
            *by_worker
                .entry(String::from_utf8_lossy(&worker).into_owned())
                .or_default() += n;
        }
        let path = |(entry, latency): (&crate::MixEntry, Histogram<u64>)| PathOutcome {
            path: entry.path.clone(),
            completed: latency.len(),
            latency,
        };
        Outcome {
            elapsed: Duration::from_nanos(all.last_end_ns),
            planned: all.planned,
            started: all.started,
            completed: all.completed,
            cancelled: all.cancelled,
            latency: all.latency,
            service: all.service,
            phases: Phases {
                connect: all.connect,
                wait: all.wait,
                first_byte: all.first_byte,
            },
            lateness: all.lateness,
            by_worker,
            by_status: all.statuses,
            errors: all.errors.into_iter().collect(),
            by_path: plan.mix.entries.iter().zip(all.paths).map(path).collect(),
            connections: all.connections,
            bytes_received: all.bytes_received,
        }
    }
}
