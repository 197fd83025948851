//! One request over one connection, and the worker that answered it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::error::Error;

/// How long an answer may take.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Connects, asks for `path` and reads the answer to its end. Returns the worker that its `X-Worker` header names.
///
/// # Errors
/// When there is no whole answer, or it names no worker.
pub fn who_answers(address: SocketAddr, path: &str) -> Result<u64, Error> {
    let failed = |why: String| Error::Server(format!("asking {address} for {path} failed: {why}"));
    let answer = exchange(address, path, TIMEOUT).map_err(|e| failed(e.to_string()))?;
    let line = answer.lines().find_map(|l| {
        l.to_ascii_lowercase()
            .strip_prefix("x-worker:")
            .map(str::to_owned)
    });
    let worker = line.ok_or_else(|| failed("the answer has no X-Worker header".into()))?;
    worker
        .trim()
        .parse()
        .map_err(|_| failed(format!("the worker {worker:?} is no number")))
}

/// Connects, asks for `path` and reads the answer to its end. Returns its body.
///
/// # Errors
/// When there is no whole answer, or not the status 200.
pub fn body(address: SocketAddr, path: &str) -> Result<String, Error> {
    body_within(address, path, TIMEOUT)
}

/// The same of an answer that may take longer.
///
/// # Errors
/// When there is no whole answer in time, or not the status 200.
pub fn body_within(address: SocketAddr, path: &str, timeout: Duration) -> Result<String, Error> {
    let failed = |why: &str| Error::Server(format!("asking {address} for {path} failed: {why}"));
    let answer = exchange(address, path, timeout).map_err(|e| failed(&e.to_string()))?;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .ok_or_else(|| failed("the answer has no end of its head"))?;
    match head.split(' ').nth(1) {
        Some("200") => Ok(body.to_owned()),
        status => Err(failed(&format!("the status is {status:?}"))),
    }
}

fn exchange(address: SocketAddr, path: &str, timeout: Duration) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}
