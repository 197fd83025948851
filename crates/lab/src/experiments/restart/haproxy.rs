//! HAProxy with a listener for each thread, restarted as its manual says: a new process tells the old one to finish (`-sf`).

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::scratch::Scratch;
use crate::server::Server;
use crate::{Error, probe, process, ways};

/// How long it may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a process that follows another takes to bind and to tell the old one, at most: nothing outside shows when.
const SETTLES: Duration = Duration::from_millis(150);

/// The executable, or why HAProxy cannot be measured here.
pub fn program() -> Result<PathBuf, String> {
    process::program("haproxy").ok_or_else(|| "haproxy is not installed".into())
}

/// Starts it with so many threads, each with its own listener; `before` is the process that it follows.
///
/// # Errors
/// When it does not answer.
pub fn start(
    scratch: &Scratch,
    threads: usize,
    address: SocketAddr,
    before: Option<u32>,
) -> Result<Server, Error> {
    let configuration = scratch.write("haproxy.cfg", text(threads, address))?;
    let mut command = Command::new(program().map_err(Error::Missing)?);
    command.args(["-V", "-db", "-f"]).arg(configuration);
    if let Some(pid) = before {
        command.args(["-sf", &pid.to_string()]);
    }
    let server = Server::start("haproxy", &mut command, "Using ")?;
    if before.is_some() {
        std::thread::sleep(SETTLES);
        return Ok(server);
    }
    let deadline = Instant::now() + PATIENCE;
    while let Err(error) = probe::body(address, "/") {
        if Instant::now() > deadline {
            return Err(error);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(server)
}

fn text(threads: usize, address: SocketAddr) -> String {
    let backlog = ways::BACKLOG;
    format!(
        "global
  nbthread {threads}
  maxconn 8192
defaults
  mode http
  timeout client 10s
  timeout server 10s
  timeout connect 10s
frontend all
  bind {address} shards by-thread backlog {backlog}
  http-after-response set-header Connection close
  http-request return status 200 content-type text/plain string ok
"
    )
}
