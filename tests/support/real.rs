//! Starts servers that know nothing of Wakeone, and ends them with all their processes.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

/// A command line.
pub fn program(words: &[&str]) -> Command {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    command
}

/// A server with all its processes; they end with it.
pub struct Started {
    child: Child,
}

impl Started {
    /// Starts it in a process group of its own, silent.
    pub fn spawn(mut command: Command) -> Self {
        let child = command
            .env("PATH", path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        Self { child }
    }

    /// Its first process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let group = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        let _ = self.child.wait();
    }
}

/// Whether a program can be started.
pub fn installed(program: &str) -> bool {
    let found = Command::new("sh")
        .args(["-c", &format!("command -v {program}")])
        .env("PATH", path())
        .output();
    found.is_ok_and(|output| output.status.success())
}

/// Debian installs servers in folders that only root has in PATH.
fn path() -> String {
    format!(
        "{}:/usr/sbin:/sbin",
        std::env::var("PATH").unwrap_or_default()
    )
}
