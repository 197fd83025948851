//! Reconciles requests: the server's own count of its answers, held against the clients' count.
//!
//! `wakeone-lab serve --counter` counts an answer when it is made, before its first byte is sent, over all workers and across
//! restarts. When the server has ended, the count must lie between
//!
//! - the answers that the client got whole, whatever their status: each of them was made once; and
//! - these and the requests that were sent, as a whole or in part, and have no whole answer. They timed out, were reset,
//!   closed early or not understood, or were under way when the load was cancelled. Each of them may have been answered,
//!   once, or not.
//!
//! Without such requests the two counts are equal, or the measurement fails. A request was then lost after it was
//! answered, or counted twice, and no number of that run can be trusted. A request that never left (connection refused
//! or not set up in time, no port, no client free) cannot have been answered.
//!
//! nginx counts by itself ([`crate::nginx`]), when a request begins; the same must hold for its count.

use std::path::PathBuf;
use tempfile::TempDir;
use wakeone_load::{ErrorKind, Outcome};
use wakeone_serve::system::shared_counter::SharedCounter;

use crate::card::OWN_GOAL;
use crate::error::Error;
use crate::experiment::Sample;
use crate::result::{self, Expectation};
use crate::stats;

/// The metric of the server's count.
pub const BY_SERVER: &str = "server_requests";
/// The metric of the client's count of whole answers.
const BY_CLIENT: &str = "client_answers";
/// The metric of the requests that may have been answered without the client's having the answer.
const OPEN: &str = "client_unanswered";

/// The clients' counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Seen {
    /// Answers received whole.
    whole: u64,
    /// Requests sent, without a whole answer.
    open: u64,
}

/// Both counts of the answers of one measurement's servers: the servers' and the clients'.
#[derive(Debug)]
pub struct Answers {
    directory: TempDir,
    counter: SharedCounter,
    seen: Seen,
}

impl Answers {
    /// New counts, all at zero.
    ///
    /// # Errors
    /// When no file can be made in the directory for temporary files.
    pub fn new() -> Result<Self, Error> {
        let failed = |source| Error::File {
            action: "writing",
            path: std::env::temp_dir(),
            source,
        };
        let directory = tempfile::Builder::new()
            .prefix("wakeone-answers-")
            .tempdir()
            .map_err(failed)?;
        let counter = SharedCounter::open(&directory.path().join("count")).map_err(failed)?;
        Ok(Self {
            directory,
            counter,
            seen: Seen::default(),
        })
    }

    /// Arguments that make `wakeone-lab serve` count its answers in this file.
    pub fn arguments(&self) -> [PathBuf; 2] {
        ["--counter".into(), self.directory.path().join("count")]
    }

    /// Adds the counts of a load's client.
    pub fn client_saw(&mut self, load: &Outcome) {
        let seen = seen(load);
        self.seen.whole += seen.whole;
        self.seen.open += seen.open;
    }

    /// Adds answers that were received whole by other means, and requests that were sent without getting one.
    pub fn client_counted(&mut self, whole: u64, open: u64) {
        self.seen.whole += whole;
        self.seen.open += open;
    }

    /// Adds the client's counts from another server that the same load was sent to.
    pub fn merge(&mut self, other: &Self) {
        self.client_counted(other.seen.whole, other.seen.open);
    }

    /// How many answers were counted by servers that were started with [`Answers::arguments`].
    pub fn made(&self) -> u64 {
        self.counter.get()
    }

    /// Puts both counts into the sample, once the servers have ended: the client's, and the `made` answers of the
    /// servers.
    ///
    /// # Errors
    /// When the counts contradict each other.
    pub fn close_with(&self, made: u64, what: &str, sample: &mut Sample) -> Result<(), Error> {
        for (name, count) in [
            (BY_SERVER, made),
            (BY_CLIENT, self.seen.whole),
            (OPEN, self.seen.open),
        ] {
            sample.put(name, "count", count as f64);
        }
        self.seen.check(what, made)
    }
}

impl Seen {
    fn check(self, what: &str, made: u64) -> Result<(), Error> {
        if (self.whole..=self.whole + self.open).contains(&made) {
            return Ok(());
        }
        Err(Error::Counts {
            what: what.into(),
            made,
            whole: self.whole,
            open: self.open,
        })
    }
}

/// Returns the counts that the client of a load has: whole answers, and requests sent without one.
fn seen(load: &Outcome) -> Seen {
    let sent = |kind: &ErrorKind| {
        !matches!(
            kind,
            // It has a whole answer.
            ErrorKind::Status
                // Not a byte of the request was sent.
                | ErrorKind::ConnectRefused
                | ErrorKind::ConnectTimeout
                | ErrorKind::NotSent
                | ErrorKind::AddressUnavailable
                | ErrorKind::TooManyFiles
                | ErrorKind::Unreachable
        )
    };
    let open = load.errors.iter().filter(|(kind, _)| sent(kind));
    Seen {
        whole: load.by_status.values().sum(),
        open: open.map(|(_, count)| count).sum::<u64>() + load.cancelled,
    }
}

/// The expectation of every experiment whose servers count: the two counts explain every answer of all variants and
/// rounds. A run with an unexplained answer fails, so a stored result has none. The report shows the expectation so
/// that a reader knows that it was checked. It does not hold where it was not checked.
pub fn agree(outcome: &result::Outcome) -> Expectation {
    let rounds = outcome.variants.iter().flat_map(|variant| {
        let of = |metric| outcome.values(&variant.name, metric).iter().copied();
        of(BY_SERVER)
            .zip(of(BY_CLIENT))
            .zip(of(OPEN))
            .map(|((made, whole), open)| (whole - made).max(made - whole - open).max(0.0))
    });
    let unexplained: Vec<f64> = rounds.collect();
    Expectation::new(
        "counts-agree",
        "No request is lost or counted twice: answers that the server's count and the client's do not both explain, all rounds",
        OWN_GOAL,
        stats::sum(&unexplained),
        |m| m == 0.0,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_may_have_answered_what_the_client_gave_up_and_nothing_else() {
        let seen = Seen { whole: 10, open: 2 };
        for made in [10, 11, 12] {
            assert!(seen.check("a server", made).is_ok(), "{made}");
        }
        let message = |made| seen.check("a server", made).unwrap_err().to_string();
        assert!(message(9).contains("9"), "{}", message(9));
        assert!(message(13).contains("10"), "{}", message(13));
    }

    #[test]
    fn both_counts_are_in_the_sample_and_lies_are_errors() {
        let count = |by: u64| {
            let answers = Answers::new().unwrap();
            let [flag, path] = answers.arguments();
            assert_eq!(flag.to_str(), Some("--counter"));
            let server = SharedCounter::open(&path).unwrap();
            for _ in 0..by {
                server.increment();
            }
            answers
        };
        let mut sample = Sample::default();
        let mut answers = count(7);
        answers.client_counted(6, 1);
        answers
            .close_with(answers.made(), "a server", &mut sample)
            .unwrap();
        assert_eq!(sample.metrics[BY_SERVER].1, 7.0);
        assert_eq!(sample.metrics[BY_CLIENT].1, 6.0);
        answers.close_with(6, "nginx", &mut sample).unwrap();
        assert_eq!(sample.metrics[BY_SERVER].1, 6.0);
        assert!(answers.close_with(8, "nginx", &mut sample).is_err());
        let mut answers = count(7);
        answers.client_counted(8, 0);
        assert!(matches!(
            answers.close_with(answers.made(), "a server", &mut sample),
            Err(Error::Counts {
                made: 7,
                whole: 8,
                ..
            })
        ));
    }

    /// Rounds of (server, client whole, client open).
    fn outcome(rounds: &[[f64; 3]]) -> result::Outcome {
        let of = |i: usize| rounds.iter().map(|r| r[i]).collect::<Vec<f64>>();
        let (made, whole, open) = (of(0), of(1), of(2));
        result::tests::outcome(&[(
            "a",
            &[(BY_SERVER, &made), (BY_CLIENT, &whole), (OPEN, &open)],
        )])
    }

    #[test]
    fn the_expectation_needs_counts_and_counts_what_is_not_explained() {
        assert!(agree(&outcome(&[[5.0, 5.0, 0.0], [6.0, 5.0, 1.0]])).holds);
        let bad = agree(&outcome(&[
            [5.0, 5.0, 0.0],
            [8.0, 5.0, 1.0],
            [4.0, 5.0, 3.0],
        ]));
        assert_eq!((bad.measured, bad.holds), (Some(3.0), false));
        assert!(!agree(&outcome(&[])).holds);
    }
}
