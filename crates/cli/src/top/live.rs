//! Listeners being watched, refresh by refresh.

use std::fs::File;
use std::time::{Duration, Instant};

use anyhow::Context;
use wakeone_control::paths::Paths;
use wakeone_observe::{Found, Watcher, watcher};
use wakeone_top::{Frame, Recorder};

use super::steering;

/// With more listeners than this, those not shown are looked at less often.
const MANY: usize = 8;
/// How many times less often.
const SELDOM: u64 = 10;

/// The watchers, and the recording of their observations.
pub struct Live {
    watchers: Vec<Watcher>,
    /// Where groups keep their state.
    pub paths: Paths,
    recorder: Option<Recorder<File>>,
    before: Vec<Frame>,
    last: Vec<Frame>,
    ticks: u64,
}

impl Live {
    /// Begins to watch.
    pub fn start(
        found: &[Found],
        tracing: bool,
        paths: Paths,
        recorder: Option<Recorder<File>>,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            watchers: watcher::start_all(found, tracing)?,
            paths,
            recorder,
            before: Vec::new(),
            last: Vec::new(),
            ticks: 0,
        })
    }

    /// Looks repeatedly for a while. `between` gets the time until the next look and returns whether to continue.
    /// `shown`: if there are many listeners, this one is looked at most often; `None`: all alike.
    pub fn look_for(
        &mut self,
        duration: Duration,
        shown: Option<usize>,
        between: &mut dyn FnMut(Duration) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        let end = Instant::now() + duration;
        let mut next = Instant::now();
        while Instant::now() < end {
            let all = self.watchers.len() <= MANY || self.ticks.is_multiple_of(SELDOM);
            for (number, watcher) in self.watchers.iter_mut().enumerate() {
                if all || shown == Some(number) {
                    watcher.look()?;
                }
            }
            self.ticks += 1;
            // If we cannot keep up, the missed looks are skipped.
            next = (next + watcher::LOOK_EVERY).max(Instant::now());
            if !between(next.min(end).saturating_duration_since(Instant::now()))? {
                break;
            }
        }
        Ok(())
    }

    /// Returns everything since the last refresh, and records it if that was requested.
    pub fn lap(&mut self) -> anyhow::Result<Vec<Frame>> {
        let groups = steering::groups(&self.paths);
        let mut frames = Vec::with_capacity(self.watchers.len());
        for watcher in &mut self.watchers {
            let watch = watcher.lap()?;
            let steering = steering::of(&groups, &watch);
            frames.push(Frame { watch, steering });
        }
        if let Some(recorder) = &mut self.recorder {
            recorder
                .write(&frames)
                .context("writing the recording failed")?;
        }
        self.before = std::mem::replace(&mut self.last, frames.clone());
        Ok(frames)
    }

    /// The refresh before the last.
    pub fn before(&self) -> &[Frame] {
        &self.before
    }
}
