//! The record of one thread, and how the threads' records are merged.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use hdrhistogram::Histogram;
use wakeone_model::layout::printable;

use crate::{
    ErrorKind, Interval, MixEntry, Outcome, PathOutcome, Phases, Plan, Stage, StageOutcome,
};

/// The longest time that is told from longer ones: an hour, in ns.
const LONGEST_NS: u64 = 3_600_000_000_000;

/// Three significant digits up to the longest time.
pub(crate) fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LONGEST_NS, 3).expect("these bounds are valid")
}

/// More different `X-Worker` values than this are counted as "other": a header of random text must not fill memory.
const WORKERS_MAX: usize = 4096;
/// Only this many bytes of an `X-Worker` value are kept, for the same reason.
const WORKER_BYTES: usize = 64;

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

/// The entry and the stage that a request belongs to.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Subject {
    /// Its entry in the mix.
    pub entry: usize,
    /// Its stage of the profile.
    pub stage: usize,
}

struct StageNotes {
    planned: u64,
    latency: Histogram<u64>,
    failed: Histogram<u64>,
}

/// An empty histogram that grows with its values: failures are few, and often there are none.
fn of_few() -> Histogram<u64> {
    Histogram::new(3).expect("this precision is valid")
}

/// One thread's notes.
pub(crate) struct Recorder {
    pub planned: u64,
    pub started: u64,
    pub completed: u64,
    pub cancelled: u64,
    pub connections: u64,
    /// Connections open when these notes end, and the most at a time since the load began.
    pub open: u64,
    pub open_max: u64,
    pub bytes_received: u64,
    /// When the last request ended, ns from the start.
    pub last_end_ns: u64,
    timeout_ns: u64,
    latency: Histogram<u64>,
    failed: Histogram<u64>,
    service: Histogram<u64>,
    connect: Histogram<u64>,
    wait: Histogram<u64>,
    first_byte: Histogram<u64>,
    receive: Histogram<u64>,
    lateness: Histogram<u64>,
    /// Of each path: latencies, and failures as waits.
    paths: Vec<[Histogram<u64>; 2]>,
    stages: Vec<StageNotes>,
    statuses: BTreeMap<u16, u64>,
    workers: HashMap<Vec<u8>, u64>,
    errors: HashMap<ErrorKind, u64>,
}

impl Recorder {
    pub(crate) fn new(plan: &Plan) -> Self {
        let (paths, stages) = (plan.mix.entries.len(), plan.stages().len());
        let stage = || StageNotes {
            planned: 0,
            latency: histogram(),
            failed: of_few(),
        };
        Self {
            planned: 0,
            started: 0,
            completed: 0,
            cancelled: 0,
            connections: 0,
            open: 0,
            open_max: 0,
            bytes_received: 0,
            last_end_ns: 0,
            timeout_ns: u64::try_from(plan.timeout.as_nanos()).unwrap_or(u64::MAX),
            latency: histogram(),
            failed: of_few(),
            service: histogram(),
            connect: histogram(),
            wait: histogram(),
            first_byte: histogram(),
            receive: histogram(),
            lateness: histogram(),
            // With one path its histograms would be the whole's again.
            paths: if paths > 1 {
                (0..paths).map(|_| [histogram(), of_few()]).collect()
            } else {
                Vec::new()
            },
            stages: (0..stages).map(|_| stage()).collect(),
            statuses: BTreeMap::new(),
            workers: HashMap::new(),
            errors: HashMap::new(),
        }
    }

    pub(crate) fn due(&mut self, stage: usize) {
        self.planned += 1;
        if let Some(stage) = self.stages.get_mut(stage) {
            stage.planned += 1;
        }
    }

    pub(crate) fn begun(&mut self, planned_ns: u64, now_ns: u64) {
        self.started += 1;
        self.lateness
            .saturating_record(now_ns.saturating_sub(planned_ns));
    }

    /// A whole answer, of whatever status.
    pub(crate) fn answered(&mut self, of: Subject, status: u16, worker: &[u8], at: Moments) {
        *self.statuses.entry(status).or_default() += 1;
        self.attribute(worker);
        if !(200..300).contains(&status) {
            return self.failed(ErrorKind::Status, of, at.planned, at.done);
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
        self.receive.saturating_record(at.done - at.first_byte);
        if at.fresh {
            self.connect.saturating_record(at.sent - at.started);
        }
        if let Some([path, _]) = self.paths.get_mut(of.entry) {
            path.saturating_record(latency);
        }
        if let Some(stage) = self.stages.get_mut(of.stage) {
            stage.latency.saturating_record(latency);
        }
    }

    /// A request without a 2xx answer. Its client waits on, for as long as it has patience, so the time counts as no less
    /// than the timeout.
    pub(crate) fn failed(&mut self, kind: ErrorKind, of: Subject, planned_ns: u64, now_ns: u64) {
        let waited = now_ns.saturating_sub(planned_ns).max(self.timeout_ns);
        let waited = waited.min(LONGEST_NS);
        let path = self.paths.get_mut(of.entry).map(|[_, failed]| failed);
        let stage = self.stages.get_mut(of.stage);
        let stage = stage.map(|stage| &mut stage.failed);
        for failed in path.into_iter().chain(stage).chain([&mut self.failed]) {
            failed.record(waited).expect("it grows with its values");
        }
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
        let worker = cut(worker);
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

    /// Adds another thread's notes of the same time, or later notes; those need `open` and `open_max` set anew.
    pub(crate) fn add(&mut self, other: &Self) {
        self.planned += other.planned;
        self.started += other.started;
        self.completed += other.completed;
        self.cancelled += other.cancelled;
        self.connections += other.connections;
        self.open += other.open;
        self.open_max += other.open_max;
        self.bytes_received += other.bytes_received;
        self.last_end_ns = self.last_end_ns.max(other.last_end_ns);
        let pairs = [
            (&mut self.latency, &other.latency),
            (&mut self.failed, &other.failed),
            (&mut self.service, &other.service),
            (&mut self.connect, &other.connect),
            (&mut self.wait, &other.wait),
            (&mut self.first_byte, &other.first_byte),
            (&mut self.receive, &other.receive),
            (&mut self.lateness, &other.lateness),
        ];
        let paths = self.paths.iter_mut().flatten();
        let paths = paths.zip(other.paths.iter().flatten());
        for (into, from) in self.stages.iter_mut().zip(&other.stages) {
            into.planned += from.planned;
        }
        let stages = self.stages.iter_mut().zip(&other.stages);
        let stages = stages.flat_map(|(into, from)| {
            [
                (&mut into.latency, &from.latency),
                (&mut into.failed, &from.failed),
            ]
        });
        for (into, from) in pairs.into_iter().chain(paths).chain(stages) {
            into.add(from).expect("histograms of one shape");
        }
        other
            .statuses
            .iter()
            .for_each(|(status, n)| *self.statuses.entry(*status).or_default() += n);
        other
            .workers
            .iter()
            .for_each(|(worker, n)| *self.workers.entry(worker.clone()).or_default() += n);
        other
            .errors
            .iter()
            .for_each(|(kind, n)| *self.errors.entry(*kind).or_default() += n);
    }

    fn by_worker(workers: HashMap<Vec<u8>, u64>) -> BTreeMap<String, u64> {
        // The names are added up, because two broken ones may read the same.
        let mut by_worker = BTreeMap::new();
        for (worker, n) in workers {
            *by_worker
                .entry(printable(&String::from_utf8_lossy(&worker)))
                .or_default() += n;
        }
        by_worker
    }

    /// These notes as those of one interval.
    pub(crate) fn interval(&self, start: Duration, length: Duration) -> Interval {
        Interval {
            start,
            length,
            planned: self.planned,
            completed: self.completed,
            latency: self.latency.clone(),
            failed: self.failed.clone(),
            service: self.service.clone(),
            by_worker: Self::by_worker(self.workers.clone()),
            errors: self.errors.iter().map(|(kind, n)| (*kind, *n)).collect(),
            connections_open: self.open,
        }
    }

    /// These notes as an outcome.
    pub(crate) fn outcome(mut self, plan: &Plan) -> Outcome {
        if self.paths.is_empty() {
            self.paths.push([self.latency.clone(), self.failed.clone()]);
        }
        let path = |(entry, [latency, failed]): (&MixEntry, [Histogram<u64>; 2])| PathOutcome {
            path: entry.path.clone(),
            completed: latency.len(),
            latency,
            failed,
        };
        let stage = |(&stage, notes): (&Stage, StageNotes)| StageOutcome {
            stage,
            planned: notes.planned,
            completed: notes.latency.len(),
            errors: notes.failed.len(),
            latency: notes.latency,
            failed: notes.failed,
        };
        Outcome {
            elapsed: Duration::from_nanos(self.last_end_ns),
            planned: self.planned,
            started: self.started,
            completed: self.completed,
            cancelled: self.cancelled,
            latency: self.latency,
            failed: self.failed,
            service: self.service,
            phases: Phases {
                connect: self.connect,
                wait: self.wait,
                first_byte: self.first_byte,
                receive: self.receive,
            },
            lateness: self.lateness,
            by_worker: Self::by_worker(self.workers),
            by_status: self.statuses,
            errors: self.errors.into_iter().collect(),
            by_path: plan.mix.entries.iter().zip(self.paths).map(path).collect(),
            by_stage: plan.stages().iter().zip(self.stages).map(stage).collect(),
            connections: self.connections,
            connections_open_max: self.open_max,
            connections_open_end: self.open,
            bytes_received: self.bytes_received,
        }
    }
}

/// The head of a worker's name. It does not end within a character.
fn cut(worker: &[u8]) -> &[u8] {
    let within = |at: usize| worker.get(at).is_some_and(|byte| byte & 0xC0 == 0x80);
    let mut end = worker.len().min(WORKER_BYTES);
    while end + 3 > WORKER_BYTES && within(end) {
        end -= 1;
    }
    &worker[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_worker_names_are_cut_between_characters() {
        let long = vec![b'a'; 60_000];
        assert_eq!(cut(&long), &long[..WORKER_BYTES]);
        for short in [&b""[..], b"3", &long[..WORKER_BYTES]] {
            assert_eq!(cut(short), short);
        }
        for (before, kept) in [(61, 61), (62, 62), (63, 63), (60, 64)] {
            let name = format!("{}\u{1F99C}\u{1F99C}", "a".repeat(before));
            let head = std::str::from_utf8(cut(name.as_bytes())).expect("whole characters");
            assert_eq!(head.len(), kept, "{head}");
        }
        // Bytes that are no text are cut all the same.
        assert!(cut(&[0x80; 100]).len() <= WORKER_BYTES);
    }

    #[test]
    fn a_recorder_keeps_only_the_head_of_a_worker_name() {
        let mut recorder = Recorder::new(&crate::plan::tests::plan());
        for tail in ["x", "y"] {
            let name = format!("{}{tail}", "a".repeat(10_000));
            recorder.attribute(name.as_bytes());
        }
        let names: Vec<_> = recorder.workers.iter().collect();
        assert_eq!(names, [(&vec![b'a'; WORKER_BYTES], &2)]);
    }
}
