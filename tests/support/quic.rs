//! Clients of QUIC servers, by `quinn_client` (tests/servers/quinn).

use super::support::slowness;
use std::collections::BTreeMap;
use std::process::{Child, Command, Stdio};

/// The address of each server.
pub const ADDRESS: &str = "127.0.0.1:4433";

/// Clients under way.
pub struct Clients(Child);

/// How many clients each worker answered, and why others failed.
#[derive(Debug, Default)]
pub struct Outcome {
    pub answered: BTreeMap<String, usize>,
    pub failures: Vec<String>,
}

/// Has so many clients get so many bytes over some time. Further words say what else they do (tests/servers/quinn).
pub fn clients(count: usize, (bytes, ms): (u64, u32), words: &[&str]) -> Clients {
    let child = Command::new("quinn_client")
        .args([ADDRESS, &count.to_string()])
        .args([format!("bytes={bytes}"), format!("ms={}", ms * slowness())])
        .args(words)
        .stdout(Stdio::piped())
        .spawn();
    Clients(child.expect("quinn_client"))
}

impl Clients {
    pub fn done(self) -> Outcome {
        let output = self.0.wait_with_output().expect("quinn_client");
        let mut outcome = Outcome::default();
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            match line.strip_prefix("failed: ") {
                Some(why) => outcome.failures.push(why.to_owned()),
                None => *outcome.answered.entry(line.to_owned()).or_default() += 1,
            }
        }
        outcome
    }

    /// Nobody failed. Returns how many connections each worker had.
    pub fn all_answered(self) -> Vec<usize> {
        let outcome = self.done();
        assert!(outcome.failures.is_empty(), "{outcome:?}");
        outcome.answered.into_values().collect()
    }
}
