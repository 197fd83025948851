//! The same server while `wakeone doctor` watches it.

use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::Error;
use crate::experiment::Sample;
use crate::process;

/// Which view doctor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum View {
    /// The kernel's tracepoints, beside /proc and sock_diag.
    Tracing,
    /// /proc and sock_diag alone.
    Proc,
}

/// Both, as they are compared with a server that nobody watches.
pub const VIEWS: [View; 2] = [View::Tracing, View::Proc];

impl View {
    /// The variant's name.
    pub fn arm(self) -> &'static str {
        match self {
            View::Tracing => "cost/watched",
            View::Proc => "cost/watched-without-tracing",
        }
    }

    /// The view of a variant of this name.
    pub fn of(arm: &str) -> Option<Self> {
        VIEWS.into_iter().find(|view| view.arm() == arm)
    }

    /// Its name in tables and charts.
    pub fn title(self) -> &'static str {
        match self {
            View::Tracing => "reuseport-hash, watched",
            View::Proc => "reuseport-hash, watched without tracing",
        }
    }
}

/// The time that doctor takes to look around before it watches.
const AROUND: Duration = Duration::from_millis(800);

/// A `wakeone doctor` that watches until it is told to end.
pub struct Doctor {
    child: Option<Child>,
    view: View,
    cpu_ns: u64,
}

impl Doctor {
    /// Starts one on a server, and waits until it watches.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(view: View, address: SocketAddr) -> Result<Self, Error> {
        let failed = |e| Error::Server(format!("starting `wakeone doctor` failed: {e}"));
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.args(["doctor", &address.to_string(), "--for", "10m", "--json"]);
        if view == View::Proc {
            command.arg("--no-tracing");
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        std::thread::sleep(AROUND);
        Ok(Self {
            cpu_ns: process::cpu_ns(child.id()),
            child: Some(child),
            view,
        })
    }

    /// Ends it; the share of a CPU that it took in `seconds` goes into the sample.
    ///
    /// # Errors
    /// When it did not watch, or not in this way.
    pub fn end(mut self, seconds: f64, sample: &mut Sample) -> Result<(), Error> {
        let wrong = |why: &str| Error::Server(format!("`wakeone doctor` {why}"));
        let child = self.child.take().ok_or_else(|| wrong("is gone"))?;
        let used = process::cpu_ns(child.id()).saturating_sub(self.cpu_ns);
        let _ = kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM);
        let output = child
            .wait_with_output()
            .map_err(|e| wrong(&format!("could not be waited for: {e}")))?;
        let told: serde_json::Value = serde_json::from_slice(&output.stdout)
            .map_err(|_| wrong(&format!("ended with {} and no report", output.status)))?;
        let report = &told["listeners"][0];
        if report["view"]["tracing"] != (self.view == View::Tracing) {
            let missing = report["view"]["missing"].to_string();
            return Err(Error::Missing(format!(
                "`wakeone doctor` could not watch as it was asked to: {missing}"
            )));
        }
        sample.put("watcher_cpu_percent", "%", used as f64 / 1e7 / seconds);
        Ok(())
    }
}

impl Drop for Doctor {
    /// Where a load is broken off nobody waits for its report.
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_variants_go_both_ways() {
        for view in VIEWS {
            assert_eq!(View::of(view.arm()), Some(view));
        }
        assert_eq!(View::of("cost/reuseport-hash"), None);
    }
}
