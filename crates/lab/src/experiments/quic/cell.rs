//! One server in one situation, in one way, once.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use wakeone_bpf::run_stats::{self, RunStats, Runs};

use super::clients::{Answered, Clients};
use super::{Asked, BUSIEST, LOST, RATE, Situation, TO_STOPPED, Variant, WORKERS, flood};
use crate::error::Error;
use crate::experiment::Sample;
use crate::stats;
use crate::trials::server::Who;
use crate::under_test::ServerUnderTest;

/// From the start of the downloads to what happens beside them.
const UNDER_WAY: Duration = Duration::from_secs(2);
/// Connections that are opened while workers are replaced, and before one is stopped.
const MEANWHILE: usize = 40;
/// From the stop of a worker to the first connection that must not go there.
const SEEN: Duration = Duration::from_millis(50);
/// How long a worker is stopped, and how many connections are opened, 10 ms apart.
const STOPPED: Duration = Duration::from_secs(2);
const OPENED: usize = 100;

/// Measures it.
///
/// # Errors
/// When the server or a client cannot be run.
pub fn measure(variant: &Variant) -> Result<Sample, Error> {
    let asked = variant.asked;
    let mut server = ServerUnderTest::start(variant.server.launch(WORKERS, &[])?)?;
    let mut sample = Sample::default();
    let counting = match asked.situation {
        Situation::Packets => Some(Counting::start()?),
        _ => None,
    };
    let start = Instant::now();
    let clients = Clients::of(asked, &server)?;
    let others = beside(variant, &mut server, &mut sample)?;
    let mut all = clients.done()?;
    let seconds = start.elapsed().as_secs_f64();
    if let Some(counting) = counting {
        counting.put(&mut sample)?;
    }
    all.merge(others);
    put(&mut sample, asked, &all, seconds);
    server.answers.client_counted(all.answered(), all.lost);
    server.stop(&mut sample)?;
    Ok(sample)
}

fn put(sample: &mut Sample, asked: &Asked, all: &Answered, seconds: f64) {
    sample.put("tried", "count", (all.answered() + all.lost) as f64);
    sample.put(LOST, "count", all.lost as f64);
    if let Some(why) = &all.why {
        sample.notes.insert("lost".into(), why.clone());
    }
    match asked.situation {
        Situation::New => {
            let mut counts: Vec<u64> = all.by_worker.values().copied().collect();
            counts.resize(counts.len().max(WORKERS), 0);
            sample.put(BUSIEST, "ratio", stats::max_over_mean(&counts));
        }
        Situation::Throughput => {
            let bytes = asked.bytes * all.answered();
            sample.put(RATE, "MB/s", bytes as f64 / 1e6 / seconds);
        }
        _ => {}
    }
}

/// Does what a situation has beside the clients. Returns what further clients were answered.
fn beside(
    variant: &Variant,
    server: &mut ServerUnderTest,
    sample: &mut Sample,
) -> Result<Answered, Error> {
    match variant.asked.situation {
        Situation::Restart => {
            std::thread::sleep(UNDER_WAY);
            restart(variant, server)
        }
        Situation::Stopped => {
            std::thread::sleep(UNDER_WAY);
            stop_one(variant.asked, server, sample)
        }
        Situation::Flood => {
            let failed = |e| Error::Server(format!("sending first packets failed: {e}"));
            let sent = flood::send(server.address, 1).map_err(failed)?;
            sample.put("flood", "count", sent as f64);
            Ok(Answered::default())
        }
        _ => Ok(Answered::default()),
    }
}

/// Replaces the workers, while new clients come.
fn restart(variant: &Variant, server: &mut ServerUnderTest) -> Result<Answered, Error> {
    let clients = Clients::small(variant.asked, server, MEANWHILE, 50)?;
    Who::Other(variant.server).restart(server, WORKERS, 1)?;
    clients.done()
}

/// Stops a worker for a while, and opens connections meanwhile.
fn stop_one(
    asked: &Asked,
    server: &ServerUnderTest,
    sample: &mut Sample,
) -> Result<Answered, Error> {
    // Not every process of the server is a worker: one that answers is.
    let mut all = Clients::small(asked, server, MEANWHILE, 0)?.done()?;
    let worker = all.by_worker.keys().next().and_then(|pid| pid.parse().ok());
    let worker = worker.ok_or_else(|| Error::Server("no worker answers".into()))?;
    let stopped = StoppedWorker::new(worker)?;
    std::thread::sleep(SEEN);
    let clients = Clients::small(asked, server, OPENED, 10)?;
    std::thread::sleep(STOPPED);
    drop(stopped);
    let opened = clients.done()?;
    let there = opened.by_worker.get(&worker.to_string()).copied();
    sample.put(TO_STOPPED, "count", there.unwrap_or(0) as f64);
    all.merge(opened);
    Ok(all)
}

/// A process that is stopped until this is dropped.
struct StoppedWorker(Pid);

impl StoppedWorker {
    fn new(worker: u32) -> Result<Self, Error> {
        let pid = Pid::from_raw(worker as i32);
        let failed = |e| Error::Server(format!("stopping worker {worker} failed: {e}"));
        kill(pid, Signal::SIGSTOP).map_err(failed)?;
        Ok(Self(pid))
    }
}

impl Drop for StoppedWorker {
    fn drop(&mut self) {
        let _ = kill(self.0, Signal::SIGCONT);
    }
}

/// The times of the programs since its start.
struct Counting {
    _statistics: RunStats,
    /// By the number that the kernel gives to each program.
    before: BTreeMap<u32, (String, Runs)>,
}

impl Counting {
    fn start() -> Result<Self, Error> {
        Ok(Self {
            _statistics: RunStats::enable().map_err(uncounted)?,
            before: programs()?,
        })
    }

    /// The mean time of a run: of the one that chooses, and of the one that learns.
    fn put(self, sample: &mut Sample) -> Result<(), Error> {
        let mut all = [
            ("choose_ns", Runs::default()),
            ("learn_ns", Runs::default()),
        ];
        for (id, (name, now)) in programs()? {
            let then = self.before.get(&id);
            let then = then.map_or_else(Runs::default, |(_, then)| *then);
            // The kernel keeps 15 characters of a name.
            let of = &mut all[usize::from(name.starts_with("wakeone_quic_le"))].1;
            of.count += now.count - then.count;
            of.ns += now.ns - then.ns;
        }
        for (metric, runs) in all {
            sample.put(metric, "ns", runs.ns as f64 / runs.count.max(1) as f64);
        }
        Ok(())
    }
}

fn programs() -> Result<BTreeMap<u32, (String, Runs)>, Error> {
    run_stats::named("wakeone_quic").map_err(uncounted)
}

fn uncounted(error: std::io::Error) -> Error {
    Error::Missing(format!("counting the runs of programs failed: {error}"))
}
