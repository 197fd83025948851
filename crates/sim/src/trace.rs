//! The events of a part of a run, for a drawing.

/// A request, from its arrival to its end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// The worker that served it.
    pub worker: usize,
    /// When it came, in s.
    pub arrived_s: f64,
    /// When its worker began with it, in s.
    pub began_s: f64,
    /// When it was finished, in s.
    pub ended_s: f64,
}

/// An event of a worker.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mark {
    /// Its kind.
    pub what: What,
    /// The worker.
    pub worker: usize,
    /// When, in s.
    pub at_s: f64,
}

/// Kinds of [`Mark`]s.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// Its queue was moved to others.
    Moved,
    /// It does nothing from now on.
    Halted,
    /// It works again.
    WentOn,
    /// It crashed.
    Crashed,
    /// It was started again.
    Restarted,
    /// A SYN was dropped: its queue was full.
    Dropped,
}

/// The events of a part of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    /// From when on, in s.
    pub from_s: f64,
    /// Until when, in s.
    pub until_s: f64,
    /// The requests that ended within it.
    pub spans: Vec<Span>,
    /// Events of workers within it.
    pub marks: Vec<Mark>,
}

impl Trace {
    /// A trace of a part of this length, which begins when the first request is measured.
    pub(crate) fn of(length_s: f64) -> Self {
        Self {
            from_s: f64::INFINITY,
            until_s: length_s,
            spans: Vec::new(),
            marks: Vec::new(),
        }
    }

    /// The part begins now.
    pub(crate) fn begin(&mut self, now: f64) {
        self.from_s = now;
        self.until_s += now;
    }

    fn is_in(&self, at: f64) -> bool {
        (self.from_s..self.until_s).contains(&at)
    }

    pub(crate) fn span(&mut self, span: Span) {
        if self.is_in(span.ended_s) {
            self.spans.push(span);
        }
    }

    pub(crate) fn mark(&mut self, what: What, worker: usize, at_s: f64) {
        if self.is_in(at_s) {
            self.marks.push(Mark { what, worker, at_s });
        }
    }
}
