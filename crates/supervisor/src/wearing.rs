//! Replaces workers that have had what they may have, and those that hang.

use std::time::{Duration, Instant};

use wakeone_kernel::proc::doing::{WorkerState, cpu_ns, doing_below};
use wakeone_kernel::proc::process::tree;
use wakeone_kernel::proc::{counters, threads};

use super::report;
use super::slot;
use super::watch::Watch;
use super::wear::{Limits, Look, Seen, Wear, hanging};

/// How often to look.
const EVERY: Duration = Duration::from_secs(1);
/// If a new worker did not get ready, no other is tried for so long.
const LATER: Duration = Duration::from_secs(60);
/// The log has so many threads of it.
const THREADS: usize = 32;

impl Watch<'_> {
    /// The worker of a slot begins to serve: it has limits of its own, and gets its first connection after those that were
    /// counted until now.
    pub(super) fn begin_count(&mut self, slot: usize) {
        let before = self.steer.established(slot).unwrap_or(0);
        let limits = self.group.limits;
        if let Some(worker) = self.group.slots[slot].worker_mut() {
            worker.before = before;
            worker.limits = limits.of_worker(rand::random_range(0.0..=1.0));
        }
    }

    pub(super) fn wear_again_later(&mut self) {
        self.wear_due = Instant::now() + LATER;
    }

    /// Replaces one worker that is to be, unless another is being replaced.
    pub(super) fn replace_worn(&mut self) {
        let limits = self.group.limits;
        let now = Instant::now();
        if self.closing.is_some() || limits == Limits::default() {
            return;
        }
        if let Some(hook) = self.hook.take_if(|hook| hook.is_over(now)) {
            // It may have recovered, or ended.
            let pid = self.worker(hook.slot).map(|worker| worker.process.pid());
            if pid == Some(hook.about) && self.roll.is_none() {
                self.replace_one(hook.slot, hook.about, &hook.wear);
            }
        }
        if now < self.wear_due || self.hook.is_some() {
            return;
        }
        self.wear_due = now + EVERY;
        // These looks go on while another is replaced, or they would have a gap.
        let hangs = limits.hang.and_then(|limit| self.find_hanging(now, limit));
        if self.roll.is_some() {
            return;
        }
        let Some((slot, wear)) = hangs.or_else(|| self.find_worn()) else {
            return;
        };
        let pid = self.worker(slot).map_or(0, |worker| worker.process.pid());
        match wear {
            Wear::Hang(_) => self.replace_hanging(slot, pid, wear),
            _ => self.replace_one(slot, pid, &wear),
        }
    }

    fn replace_one(&mut self, slot: usize, pid: u32, wear: &Wear) {
        self.roll(&report::worn(slot, pid, wear), vec![slot]);
    }

    /// The slots whose workers serve.
    fn serving(&self) -> Vec<usize> {
        let serves = |slot: &usize| self.worker(*slot).is_some_and(|worker| worker.ready);
        (0..self.group.in_use).filter(serves).collect()
    }

    fn find_worn(&self) -> Option<(usize, Wear)> {
        let worn = self.serving().into_iter().filter_map(|slot| {
            let worker = self.worker(slot)?;
            let (pid, limits) = (worker.process.pid(), &worker.limits);
            let memory = limits
                .memory
                .map(|_| tree(pid).map(counters::own_memory).sum());
            let established = self.steer.established(slot);
            let seen = Seen {
                connections: established.map(|count| count.saturating_sub(worker.before)),
                age: worker.process.identity().age(),
                memory: memory.unwrap_or(0),
            };
            Some((seen.age, slot, limits.reached(&seen)?))
        });
        // Or the first slots would be served again and again.
        let (_, slot, wear) = worn.max_by_key(|(age, ..)| *age)?;
        Some((slot, wear))
    }

    fn find_hanging(&mut self, now: Instant, limit: Duration) -> Option<(usize, Wear)> {
        let serving = self.serving();
        let mut all = Vec::new();
        for slot in &serving {
            let look = self.look_at(*slot);
            let Some(worker) = self.group.slots[*slot].worker_mut() else {
                continue;
            };
            worker.progress.note(now, &look);
            all.push(worker.progress);
        }
        let (place, hang) = hanging(&all, now, limit)?;
        Some((serving[place], Wear::Hang(hang)))
    }

    fn look_at(&self, slot: usize) -> Look {
        let place = &self.group.slots[slot];
        let pid = place.worker().map_or(0, |worker| worker.process.pid());
        let waits = match doing_below(pid, &slot::inodes(&place.listeners)) {
            WorkerState::Waiting => Some(true),
            WorkerState::Unknown | WorkerState::Gone => None,
            WorkerState::Busy | WorkerState::Running { .. } | WorkerState::Stopped => Some(false),
        };
        Look {
            waits,
            accepted: self.steer.accepted(slot),
            open: self.steer.active(slot),
            behind: self.steer.is_behind(slot),
            cpu: Duration::from_nanos(tree(pid).filter_map(cpu_ns).sum()),
        }
    }

    /// Says where it hangs, and has it replaced, after the command that was given for that.
    fn replace_hanging(&mut self, slot: usize, pid: u32, wear: Wear) {
        for process in tree(pid) {
            report::threads(slot, process, &threads::of(process, THREADS));
        }
        match self.group.run_hook(slot, pid, wear) {
            Some(Ok(hook)) => return self.hook = Some(hook),
            Some(Err(error)) => report::no_hook(&error),
            None => {}
        }
        self.replace_one(slot, pid, &wear);
    }
}
