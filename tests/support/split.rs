//! A server under `wakeone run --split`, in a network of its own.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use rustix::process::Signal;
use serde_json::Value;

use super::steered::{assert_nothing_left, isolated, wakeone};
use super::{Ground, Run, server, slowly};

/// The port of its UDP socket.
pub const PORT: u16 = 7400;
/// The address of its UDP socket.
pub fn address() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], PORT))
}

/// A server under `--split`, in a network of its own.
pub struct Split {
    pub ground: Ground,
    pub run: Run,
}

impl Split {
    pub fn start(options: &[&str], command: &[&str]) -> Option<Self> {
        let ground = isolated()?;
        let run = ground.command(&[&["--split"], options].concat(), command);
        Some(Self {
            run: Run::start(run),
            ground,
        })
    }

    /// Waits until that many workers have a queue of their own, and returns their pids.
    pub fn settled(&self, workers: usize) -> BTreeSet<u32> {
        let mut pids = BTreeSet::new();
        // Some servers start a new interpreter for each.
        slowly("every worker has a queue", || {
            pids = self.up();
            pids.len() == workers && pids.iter().all(|pid| super::runs(*pid))
        });
        pids
    }

    /// The workers of the slots that are up.
    pub fn up(&self) -> BTreeSet<u32> {
        let group = self.status();
        let slots = group["slots"].as_array().cloned().unwrap_or_default();
        let up = slots.iter().filter(|slot| slot["state"] != "down");
        up.filter_map(|slot| slot["pid"].as_u64())
            .map(|pid| pid as u32)
            .collect()
    }

    pub fn status(&self) -> Value {
        let output = wakeone(&self.ground, &["status", "--json"]);
        let status: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        status["groups"][0].clone()
    }

    /// Ends it by SIGTERM, and checks that nothing is left.
    pub fn ends(self) -> Vec<String> {
        let Self { ground, run } = self;
        let lines = run.stop();
        assert_nothing_left(&ground);
        lines
    }

    /// Does the same with another signal, by which a server may die.
    pub fn ends_by(self, which: Signal) -> Vec<String> {
        let Self { ground, run } = self;
        run.signal(which);
        let (_, lines) = run.wait();
        assert_nothing_left(&ground);
        lines
    }
}

/// Runs `--split=check`. Returns its exit code and its output.
pub fn check(command: &[&str]) -> Option<(Option<i32>, String)> {
    let ground = isolated()?;
    let mut command = ground.command(&["--split=check"], command);
    let output = command.output().expect("wakeone");
    assert_nothing_left(&ground);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Some((output.status.code(), text))
}

/// Makes a folder with `wakeone` and a script that another user may run. It has that user's folder for state and for
/// the library, which nobody else can write to. Enters a new network namespace; returns `None` where that takes root.
pub fn for_another_user(
    name: &str,
) -> Option<(tempfile::TempDir, std::path::PathBuf, std::path::PathBuf)> {
    isolated()?;
    let folder = tempfile::tempdir_in("/var/lib").expect("folder");
    // Other users may have no access to the folder of the sources.
    let binary = folder.path().join("wakeone");
    super::copy_program(super::WAKEONE, &binary);
    std::fs::copy(server(name), folder.path().join(name)).expect("copy");
    let runtime = folder.path().join("run");
    std::fs::create_dir(&runtime).expect("folder");
    std::os::unix::fs::chown(&runtime, Some(65534), Some(65534)).expect("chown");
    use std::os::unix::fs::PermissionsExt;
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(folder.path(), open).expect("mode");
    Some((folder, binary, runtime))
}

/// The beginning of a command that user 65534 runs, without an environment; `root_of_a_namespace`: as user 0 of a user
/// namespace. Returns `None`, with a message, where that cannot be made.
pub fn as_nobody(root_of_a_namespace: bool) -> Option<std::process::Command> {
    let start = || {
        let mut command = std::process::Command::new("setpriv");
        let path = std::env::var_os("PATH").unwrap_or_default();
        command.env_clear().env("PATH", path);
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]);
        if root_of_a_namespace {
            command.args(["unshare", "-Ur", "--"]);
        }
        command
    };
    if !start().arg("true").status().is_ok_and(|it| it.success()) {
        eprintln!("skipped: no user namespace can be made");
        return None;
    }
    Some(start())
}
