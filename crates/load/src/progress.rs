//! What the threads of a load tell while it runs.

use std::time::Duration;

use crate::recorder::Recorder;
use crate::{Error, Interval};

/// The progress of a load.
#[derive(Debug, Clone, Copy, Default)]
pub struct Progress {
    /// Since the start.
    pub elapsed: Duration,
    /// Requests that have become due.
    pub planned: u64,
    /// Requests begun.
    pub started: u64,
    /// 2xx answers.
    pub completed: u64,
    /// Failures of all kinds.
    pub errors: u64,
    /// Requests under way.
    pub in_flight: u64,
}

/// A report to the caller while a load runs.
#[derive(Debug)]
pub enum Event<'a> {
    /// About ten times a second, and once at the end.
    Progress(&'a Progress),
    /// Once for each interval, in order, soon after its end.
    Interval(&'a Interval),
}

/// A message from a thread to the one that merges the notes.
pub(crate) enum Message {
    /// The notes of an interval that is over for this thread.
    Notes {
        thread: usize,
        interval: u64,
        notes: Box<Recorder>,
    },
    /// The notes since then; the thread is done.
    Done {
        thread: usize,
        result: Result<Box<Recorder>, Error>,
    },
}
