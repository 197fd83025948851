//! Servers of QUIC that know nothing of us, and clients by `quinn_client` (tests/servers/quinn).

#![allow(dead_code)] // not every test program starts its servers here

use super::support::real::{Started, program};
use super::support::{app, slowly, slowness};
use std::collections::BTreeMap;
use std::process::{Child, Command, Stdio};

/// The address of each server.
pub const ADDRESS: &str = "127.0.0.1:4433";

/// Four quinn servers, with a socket each (`udp`) or one for all (`udp-shared`). Returns when the sockets are there.
pub fn servers(kind: &str) -> Started {
    let (host, port) = ADDRESS.split_once(':').expect("an address");
    let each = ["python3", &app("each.py"), host, port, "4", kind];
    let started = Started::spawn(program(&[&each[..], &["quinn_server", "{fd}"]].concat()));
    let port: u16 = port.parse().expect("a port");
    let wanted = if kind == "udp" { 4 } else { 1 };
    slowly("its sockets are there", || {
        let table = std::fs::read_to_string("/proc/thread-self/net/udp").unwrap_or_default();
        table.matches(&format!(":{port:04X} ")).count() == wanted
    });
    started
}

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
