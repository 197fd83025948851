//! httperf, the source's own client, where it is installed.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use super::sweep::Step;
use crate::error::Error;

/// How long it waits for a reply, in s.
const PATIENCE: &str = "5";

/// Finds its executable.
pub fn find() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|p| p.join("httperf"))
        .find(|p| p.is_file())
}

/// The counts that httperf printed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Counted {
    /// Requests sent.
    pub requests: u64,
    /// Replies received whole.
    pub replies: u64,
    /// From its first connection to its last reply, in s.
    pub seconds: f64,
}

impl Counted {
    /// Converts it to a step of a sweep. httperf counts replies over the whole time, that after the last request
    /// included. It does not say how many came before.
    pub fn step(&self, offered: f64) -> Step {
        Step {
            offered,
            replied: self.replies as f64 / self.seconds,
        }
    }
}

/// Asks for `path` at a constant rate for a time, a connection a request.
///
/// # Errors
/// When it cannot be run, or does not print its counts.
pub fn drive(
    target: SocketAddr,
    path: &str,
    rate_per_s: f64,
    seconds: f64,
) -> Result<Counted, Error> {
    let failed = |why: String| Error::Server(format!("asking {target} with httperf failed: {why}"));
    let program = find().ok_or_else(|| failed("it is not installed".into()))?;
    let output = Command::new(program)
        .arg("--hog")
        .args(["--server", &target.ip().to_string()])
        .args(["--port", &target.port().to_string()])
        .args(["--uri", path])
        .args(["--rate", &format!("{rate_per_s:.1}")])
        .args(["--num-conns", &format!("{:.0}", rate_per_s * seconds)])
        .args(["--num-calls", "1"])
        .args(["--timeout", PATIENCE])
        .stdin(Stdio::null())
        .output()
        .map_err(|e| failed(e.to_string()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    parse(&text).ok_or_else(|| {
        let words = String::from_utf8_lossy(&output.stderr);
        let last = words.lines().last().unwrap_or("nothing").to_owned();
        failed(format!("it ended with {}; it said: {last}", output.status))
    })
}

/// `Total: connections 2000 requests 2000 replies 2000 test-duration 1.999 s`.
fn parse(text: &str) -> Option<Counted> {
    let line = text.lines().find_map(|l| l.strip_prefix("Total:"))?;
    let words: Vec<&str> = line.split_whitespace().collect();
    let after = |name: &str| {
        let at = words.iter().position(|w| *w == name)?;
        words.get(at + 1).copied()
    };
    Some(Counted {
        requests: after("requests")?.parse().ok()?,
        replies: after("replies")?.parse().ok()?,
        seconds: after("test-duration")?.parse().ok().filter(|s| *s > 0.0)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_totals() {
        let said = "httperf --hog\nMaximum connect burst length: 2\n\nTotal: connections 2000 requests 1990 replies 1980 test-duration 1.980 s\n\nConnection rate: 1 conn/s\n";
        let counted = parse(said).unwrap();
        assert_eq!((counted.requests, counted.replies), (1990, 1980));
        let step = counted.step(1010.0);
        assert!((step.replied - 1000.0).abs() < 1e-9, "{step:?}");
        assert_eq!(parse("Total: connections 1"), None);
        assert_eq!(
            parse("Total: connections 0 requests 0 replies 0 test-duration 0.000 s"),
            None
        );
    }
}
