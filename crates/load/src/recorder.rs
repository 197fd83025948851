//! The record of one thread, and how the threads' records are merged.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use hdrhistogram::Histogram;

use crate::{
    ErrorKind, Interval, MixEntry, Outcome, PathOutcome, Phases, Plan, Stage, StageOutcome,
};

/// Three significant digits up to an hour, in ns.
pub(crate) fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 3_600_000_000_000, 3).expect("these bounds are valid")
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
    errors: u64,
    latency: Histogram<u64>,
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
    receive: Histogram<u64>,
    lateness: Histogram<u64>,
    paths: Vec<Histogram<u64>>,
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
            errors: 0,
            latency: histogram(),
        };
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
            receive: histogram(),
            lateness: histogram(),
            // With one path its histogram would be `latency` again.
            paths: if paths > 1 {
                (0..paths).map(|_| histogram()).collect()
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
            return self.failed(ErrorKind::Status, of.stage, at.done);
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
        if let Some(path) = self.paths.get_mut(of.entry) {
            path.saturating_record(latency);
        }
        if let Some(stage) = self.stages.get_mut(of.stage) {
            stage.latency.saturating_record(latency);
        }
    }

    pub(crate) fn failed(&mut self, kind: ErrorKind, stage: usize, now_ns: u64) {
        if let Some(stage) = self.stages.get_mut(stage) {
            stage.errors += 1;
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

    pub(crate) fn add(&mut self, other: &Self) {
        self.planned += other.planned;
        self.started += other.started;
        self.completed += other.completed;
        self.cancelled += other.cancelled;
        self.connections += other.connections;
        self.bytes_received += other.bytes_received;
        self.last_end_ns = self.last_end_ns.max(other.last_end_ns);
        let pairs = [
            (&mut self.latency, &other.latency),
            (&mut self.service, &other.service),
            (&mut self.connect, &other.connect),
            (&mut self.wait, &other.wait),
            (&mut self.first_byte, &other.first_byte),
            (&mut self.receive, &other.receive),
            (&mut self.lateness, &other.lateness),
        ];
        for (into, from) in pairs
            .into_iter()
            .chain(self.paths.iter_mut().zip(&other.paths))
        {
            into.add(from).expect("histograms of one shape");
        }
        for (into, from) in self.stages.iter_mut().zip(&other.stages) {
            into.planned += from.planned;
            into.errors += from.errors;
            into.latency
                .add(&from.latency)
                .expect("histograms of one shape");
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
            *by_worker.entry(printable(&worker)).or_default() += n;
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
            service: self.service.clone(),
            by_worker: Self::by_worker(self.workers.clone()),
            errors: self.errors.iter().map(|(kind, n)| (*kind, *n)).collect(),
        }
    }

    /// These notes as an outcome.
    pub(crate) fn outcome(mut self, plan: &Plan) -> Outcome {
        if self.paths.is_empty() {
            self.paths.push(self.latency.clone());
        }
        let path = |(entry, latency): (&MixEntry, Histogram<u64>)| PathOutcome {
            path: entry.path.clone(),
            completed: latency.len(),
            latency,
        };
        let stage = |(&stage, notes): (&Stage, StageNotes)| StageOutcome {
            stage,
            planned: notes.planned,
            completed: notes.latency.len(),
            errors: notes.errors,
            latency: notes.latency,
        };
        Outcome {
            elapsed: Duration::from_nanos(self.last_end_ns),
            planned: self.planned,
            started: self.started,
            completed: self.completed,
            cancelled: self.cancelled,
            latency: self.latency,
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
            bytes_received: self.bytes_received,
        }
    }
}

/// Returns a server's name for itself without terminal commands: U+009B begins one as ESC [ does.
fn printable(name: &[u8]) -> String {
    let name = String::from_utf8_lossy(name);
    name.chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
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
