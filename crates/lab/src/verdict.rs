//! Asks `wakeone doctor` about a server.

use std::net::SocketAddr;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::error::Error;
use crate::process;

/// Has doctor watch a listener for so long, as `4s`. Returns its JSON of that listener.
///
/// # Errors
/// When doctor says nothing.
pub fn doctor(address: SocketAddr, watched: &str) -> Result<Value, Error> {
    let failed = |why: String| Error::Server(format!("wakeone doctor {address}: {why}"));
    let mut command = Command::new(process::wakeone()?);
    command.args(["doctor", "--json", "--for", watched]);
    command.arg(address.to_string()).stdin(Stdio::null());
    let output = command.output().map_err(|e| failed(e.to_string()))?;
    let told: Option<Value> = serde_json::from_slice(&output.stdout).ok();
    let listener = told.and_then(|told| told["listeners"].get(0).cloned());
    listener.ok_or_else(|| failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}
