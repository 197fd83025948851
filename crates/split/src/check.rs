//! The report of `--split=check`, and log lines about processes that stay with the shared socket.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use wakeone::started;

use super::broker::QueueRequest;
use super::reason::Reason;
use super::splitter::Splitter;
use super::worker::{in_words, name_in_brackets};

/// `--split=check`: it ends when nothing new has happened for this long, and after this long at the latest.
const QUIET: Duration = Duration::from_secs(1);
/// See [`QUIET`].
pub const LONGEST_CHECK: Duration = Duration::from_secs(15);

/// Prints a line on standard output.
pub fn tell(line: &str) {
    // The reader may be gone; we wait for the server's end all the same.
    let _ = writeln!(io::stdout(), "{line}");
}

impl Splitter {
    pub(super) fn note(&mut self, finding: String) {
        if !self.findings.contains(&finding) {
            self.findings.push(finding);
            self.news = Instant::now();
        }
    }

    /// Whether a check has seen all that it waits for. Returns true only once.
    pub(super) fn check_is_over(&mut self) -> bool {
        let late = self.started.elapsed() >= LONGEST_CHECK;
        if !self.check || self.ending || !(late || self.news.elapsed() >= QUIET) {
            return false;
        }
        let ways = started::ways();
        let is_any = !self.findings.is_empty() || !ways.is_empty();
        if !late && !(is_any && ways.iter().all(Result::is_ok)) {
            // Its workers may still start.
            self.news = Instant::now();
            return false;
        }
        let told = ways.into_iter().map(|way| way.unwrap_or_else(|why| why));
        self.findings.extend(told);
        self.ending = true;
        true
    }

    pub(super) fn report(&self) {
        if self.findings.is_empty() {
            tell(&format!(
                "nothing to split: no thread or process was seen to receive from a UDP socket that others receive from too, nor to listen by TCP, in {} s; if the server starts more slowly, look at the log of `wakeone run --split`",
                LONGEST_CHECK.as_secs()
            ));
        }
        for finding in &self.findings {
            tell(finding);
        }
    }

    /// Reports a decision about a process for `--split=check`, and logs why a process stays as it is.
    pub(super) fn judged(
        &mut self,
        address: &dyn std::fmt::Display,
        claim: &QueueRequest<'_>,
        decision: &Result<(), Reason>,
    ) {
        let who = format!("process {}{}", claim.pid, name_in_brackets(claim.pid));
        match decision {
            Ok(()) if self.check => self.note(format!(
                "{address}: {who} would get a queue of its own (it waits in {})",
                in_words(claim.how)
            )),
            Err(reason) if self.check => {
                self.note(format!(
                    "{address}: {who} stays with the shared socket: {reason}"
                ));
            }
            Err(Reason::Alone | Reason::Has | Reason::First) | Ok(()) => {}
            // A worker's successor has the same reason, which is logged once.
            Err(reason) => self.once(format!(
                "{address}: {} stays with the shared socket: {reason}",
                name_in_brackets(claim.pid).trim_matches([' ', '(', ')'])
            )),
        }
    }
}
