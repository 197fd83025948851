//! Clients of QUIC, by `quinn_client`.

use std::collections::BTreeMap;
use std::process::{Child, Stdio};

use super::{Asked, Situation};
use crate::error::Error;
use crate::under_test::ServerUnderTest;

/// Clients under way.
#[derive(Debug)]
pub struct Clients(Option<Child>);

/// How many connections each worker answered, and how many were lost.
#[derive(Debug, Default)]
pub struct Answered {
    /// By the worker's process.
    pub by_worker: BTreeMap<String, u64>,
    /// Connections that were not answered whole.
    pub lost: u64,
    /// The reason of one of them.
    pub why: Option<String>,
}

impl Clients {
    /// Starts those of a row.
    ///
    /// # Errors
    /// When their program is not installed.
    pub fn of(asked: &Asked, server: &ServerUnderTest) -> Result<Self, Error> {
        let Asked {
            bytes, ms, moves, ..
        } = asked;
        let mut more = format!("bytes={bytes} ms={ms} moves={moves}");
        if matches!(asked.situation, Situation::Rebind | Situation::Flood) {
            more += " rebind";
        }
        Self::start(asked, server, asked.connections, &more)
    }

    /// Starts clients with one small request each, so many milliseconds apart.
    ///
    /// # Errors
    /// When their program is not installed.
    pub fn small(
        asked: &Asked,
        server: &ServerUnderTest,
        connections: usize,
        apart_ms: u64,
    ) -> Result<Self, Error> {
        let more = format!("apart={apart_ms}");
        Self::start(asked, server, connections, &more)
    }

    fn start(
        asked: &Asked,
        server: &ServerUnderTest,
        connections: usize,
        more: &str,
    ) -> Result<Self, Error> {
        let mut line = format!("quinn_client {{address}} {connections} {more}");
        if !asked.path.is_empty() {
            line += &format!(" path={}", asked.path);
        }
        let mut command = server.client(&line, Vec::new())?;
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let failed = |e| Error::Server(format!("starting quinn_client failed: {e}"));
        child.map(|child| Self(Some(child))).map_err(failed)
    }

    /// Waits until each has an answer or none. Each has its own limit of time.
    ///
    /// # Errors
    /// When they cannot be waited for, or say nothing.
    pub fn done(mut self) -> Result<Answered, Error> {
        let failed = |why: String| Error::Server(format!("quinn_client failed: {why}"));
        let Some(child) = self.0.take() else {
            return Ok(Answered::default());
        };
        let output = child
            .wait_with_output()
            .map_err(|e| failed(e.to_string()))?;
        if !output.status.success() {
            return Err(failed(output.status.to_string()));
        }
        let mut all = Answered::default();
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            match line.strip_prefix("failed: ") {
                Some(why) => {
                    all.lost += 1;
                    all.why = Some(why.to_owned());
                }
                None => *all.by_worker.entry(line.to_owned()).or_default() += 1,
            }
        }
        Ok(all)
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Answered {
    /// How many were answered.
    pub fn answered(&self) -> u64 {
        self.by_worker.values().sum()
    }

    /// Adds others.
    pub fn merge(&mut self, other: Self) {
        for (worker, count) in other.by_worker {
            *self.by_worker.entry(worker).or_default() += count;
        }
        self.lost += other.lost;
        self.why = other.why.or(self.why.take());
    }
}
