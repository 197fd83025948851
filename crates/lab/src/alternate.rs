//! Sends one load while setups take turns, and counts in slices. [`crate::slices`] evaluates the counts.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use wakeone_load::{Live, Plan};

use crate::error::Error;
use crate::experiment::Context;
use crate::process;
use crate::slices::{Count, Pair, Slices, Timing, of_each, sleeps, take_all};

/// The load before the first slice, so that connections come and go and the CPUs are awake.
const WARM_UP: Duration = Duration::from_millis(500);

/// The setups that take turns under one load.
pub struct Arms<'a> {
    /// Their names.
    pub names: &'a [&'a str],
    /// Which of them are compared.
    pub pairs: &'a [Pair],
    /// Switches to an arm. It is not called for the arm that is measured already, and it may be slow.
    pub switch: &'a mut dyn FnMut(usize, &Live) -> Result<(), Error>,
    /// The processes of the server; the load's own is counted as well.
    pub processes: &'a [u32],
}

/// A load in slices, when it is over.
pub struct Alternated {
    /// The whole load's.
    pub outcome: wakeone_load::Outcome,
    /// The counts.
    pub slices: Slices,
    /// For each arm, how often a process of the server went to sleep for a connection.
    pub sleeps: Vec<f64>,
}

/// Sends a load without end while the arms take turns, and counts the connections that complete in each slice.
///
/// # Errors
/// When the load fails, an arm cannot be switched to, or on Ctrl-C.
pub fn alternate(
    plan: &Plan,
    live: &Live,
    timing: Timing,
    arms: Arms<'_>,
    context: &mut Context<'_>,
) -> Result<Alternated, Error> {
    let over = AtomicBool::new(false);
    let failed = |source| Error::Load {
        target: plan.target.into(),
        source,
    };
    std::thread::scope(|scope| {
        let load = scope.spawn(|| wakeone_load::observe_live(plan, &over, None, live, &mut |_| {}));
        let counted = {
            // This runs on every way out, or the load would never end.
            let _end = EndOnDrop(&over);
            count(live, timing, arms, context, &|| load.is_finished())
        };
        let outcome = load
            .join()
            .unwrap_or_else(|_| Err(wakeone_load::Error::Plan("its thread panicked".to_owned())));
        // The reason why a load ended says more than the fact that it ended.
        let outcome = outcome.map_err(failed)?;
        let (slices, sleeps) = counted?;
        Ok(Alternated {
            outcome,
            slices,
            sleeps,
        })
    })
}

struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

fn count(
    live: &Live,
    timing: Timing,
    arms: Arms<'_>,
    context: &mut Context<'_>,
    ended: &dyn Fn() -> bool,
) -> Result<(Slices, Vec<f64>), Error> {
    let seed = context.seed;
    let all = (timing.blocks * arms.names.len() * 2) as f64;
    let (mut now, mut done) = (None, 0.0);
    std::thread::sleep(WARM_UP);
    let round = take_all(arms.names.len(), timing.blocks, seed, |arm| {
        context.check()?;
        if now != Some(arm) {
            (arms.switch)(arm, live)?;
            now = Some(arm);
            std::thread::sleep(timing.settling);
        }
        if ended() {
            return Err(Error::Server("the load ended before its time".into()));
        }
        let from = Reading::of(live, arms.processes);
        std::thread::sleep(timing.counted);
        let count = from.until(Reading::of(live, arms.processes));
        done += 1.0;
        (context.progress)(done / all);
        Ok(count)
    })?;
    let slices = Slices {
        arms: arms.names.iter().map(|name| (*name).to_owned()).collect(),
        pairs: arms.pairs.to_vec(),
        counted_ms: timing.counted.as_secs_f64() * 1000.0,
        settling_ms: timing.settling.as_secs_f64() * 1000.0,
        rounds: vec![of_each(&round, |count| count.per(count.seconds))],
        cpu_rounds: process::softirq_is_charged()
            .then(|| of_each(&round, |count| count.per(count.cpu_seconds)))
            .into_iter()
            .collect(),
    };
    Ok((slices, sleeps(&round)))
}

/// The count of a load at a moment.
#[derive(Debug, Clone, Copy)]
struct Reading {
    at: Instant,
    completed: u64,
    cpu_ns: u64,
    switches: u64,
}

impl Reading {
    /// Between a look at the clock and one at the count this thread may lose its CPU: then both are looked at again.
    const TOGETHER: Duration = Duration::from_micros(50);
    const TRIES: usize = 20;

    fn of(live: &Live, processes: &[u32]) -> Self {
        let mut reading = (Instant::now(), live.completed());
        for _ in 1..Self::TRIES {
            if reading.0.elapsed() < Self::TOGETHER {
                break;
            }
            reading = (Instant::now(), live.completed());
        }
        let own = std::process::id();
        let all = processes.iter().copied().chain([own]);
        let switches = |pid: &u32| process::Usage::of(*pid).voluntary_switches;
        Self {
            at: reading.0,
            completed: reading.1,
            cpu_ns: all.map(process::cpu_ns).sum(),
            switches: processes.iter().map(switches).sum(),
        }
    }

    fn until(self, end: Self) -> Count {
        Count {
            completed: end.completed.saturating_sub(self.completed) as f64,
            seconds: end.at.duration_since(self.at).as_secs_f64(),
            cpu_seconds: end.cpu_ns.saturating_sub(self.cpu_ns) as f64 / 1e9,
            switches: end.switches.saturating_sub(self.switches) as f64,
        }
    }
}
