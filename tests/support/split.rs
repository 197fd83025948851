//! A server under `wakeone run --split`, in a network of its own.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use wakeone_kernel::proc::waits::Processes;
use wakeone_kernel::socket::diag::{Which, sockets};
use wakeone_model::listener::Protocol;

use super::mixed::{Mixed, Speech};
use super::steered::{assert_nothing_left, isolated, number, soak, status, sum, wakeone};
use super::{Clients, Ground, Run, eventually, get, server, slowly};

/// The port of its listener.
pub const PORT: u16 = 7400;
/// The name of its group.
pub const GROUP: &str = "at-127-0-0-1-7400";

/// The address of its listener.
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
        let mut run = ground.command(&[&["--split"], options].concat(), command);
        // The applications of this folder expect this variable.
        run.env("WAKEONE_SLOT", "0");
        let run = Run::start(run);
        Some(Self { ground, run })
    }

    /// Waits until that many workers have a queue of their own, and returns their pids.
    pub fn settled(&self, workers: usize) -> BTreeSet<u32> {
        let mut pids = BTreeSet::new();
        // Some servers start a new interpreter for each.
        slowly("every worker has a queue", || {
            pids = self.up();
            pids.len() == workers && pids.iter().all(|pid| super::runs(*pid))
        });
        // A process that was just started may still hold descriptors of its parent.
        eventually("each queue is held by one", || self.own_queues(&pids));
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

    /// Checks that each of these processes holds a listening socket that no other process holds.
    pub fn own_queues(&self, pids: &BTreeSet<u32>) -> bool {
        let listening = sockets(Protocol::Tcp, Which::Listening, PORT).expect("sock_diag");
        let all = Processes::read();
        let mut alone = BTreeSet::new();
        for entry in &listening {
            let inode = entry.socket.inode;
            let holders: BTreeSet<u32> = all
                .held
                .iter()
                // The agent borrows listeners for a moment.
                .filter(|held| held.inode == inode && held.pid != self.run.pid())
                .map(|held| held.pid)
                .collect();
            if holders.len() == 1 {
                alone.extend(holders);
            }
        }
        alone.is_superset(pids)
    }

    /// How often each slot was chosen.
    pub fn chosen(&self) -> Vec<i64> {
        let group = status(&self.ground, GROUP);
        let slots = group["slots"].as_array().expect("slots").len();
        (0..slots)
            .filter(|slot| group["slots"][*slot]["state"] == "up")
            .map(|slot| number(&group, slot, "selected"))
            .collect()
    }

    /// Asks for a while from several clients, and expects even shares.
    pub fn serves_evenly(&self) {
        let before = self.chosen();
        let since = || -> Vec<i64> {
            let now = self.chosen();
            now.iter()
                .zip(&before)
                .map(|(now, then)| now - then)
                .collect()
        };
        let clients = Clients::start(address(), "/", 4);
        super::slowly("300 connections", || since().iter().sum::<i64>() >= 300);
        let (answers, failures) = clients.stop();
        assert_eq!(failures, Vec::<String>::new(), "of {answers}");
        let chosen = since();
        let mean = chosen.iter().sum::<i64>() as f64 / chosen.len() as f64;
        let highest = *chosen.iter().max().expect("slots") as f64;
        assert!(highest <= 1.1 * mean + 2.0, "{chosen:?}");
        assert_eq!(self.status()["fallbacks"], 0);
    }

    /// Kills workers under a mixed load, in a soak for as long as `soak_for`. A killed worker loses the connections
    /// that it had accepted, with any server; nothing else may fail.
    pub fn survives_kills(&self, workers: usize, speech: &Speech, soak_for: Duration) {
        self.settled(workers);
        let mut load = Mixed::start(address(), speech);
        let until = Instant::now() + if soak() { soak_for } else { Duration::ZERO };
        let mut kills = 0;
        while kills < 2 || Instant::now() < until {
            let pids = self.settled(workers);
            let asked = load.answers();
            super::slowly("there are answers", || load.answers() > asked + 50);
            let victim = *pids.iter().nth(kills % workers).expect("a worker");
            load.kill(victim);
            eventually("it is gone", || !self.up().contains(&victim));
            kills += 1;
        }
        self.settled(workers);
        let listening = || sockets(Protocol::Tcp, Which::Listening, PORT).expect("sock_diag");
        super::slowly("no queue of a dead worker is left", || {
            listening().len() == workers + 1
        });
        let outcome = load.stop();
        eprintln!(
            "{} answers, {} kills, {} lost with a worker, {} cut, {} wrong",
            outcome.answers,
            outcome.kills,
            outcome.lost,
            outcome.cut,
            outcome.wrong.len()
        );
        assert_eq!(
            outcome.wrong,
            Vec::<String>::new(),
            "{:#?}",
            self.run.lines()
        );
        // A connection can be cut in one microsecond of each kill and each rescue.
        assert!(outcome.cut <= 1 + outcome.kills / 20, "{outcome:?}");
        self.counts_are_exact();
    }

    /// Waits until nothing is open, and checks that the counts came to 0 by themselves.
    pub fn counts_are_exact(&self) {
        let mut group = Value::Null;
        super::slowly("each count is 0, and no move is remembered", || {
            group = self.status();
            let slots = group["slots"].as_array().cloned().unwrap_or_default();
            group["moved_live"] == 0 && slots.iter().all(|slot| slot["active"] == 0)
        });
        assert_eq!(sum(&group, "established"), sum(&group, "closed"), "{group}");
        assert_eq!(group["drift_mended"], 0, "{group}");
    }

    /// Checks that the server answers as without Wakeone, and that there is no group.
    pub fn serves_unsplit(&self, requests: usize) {
        let up = || std::net::TcpStream::connect(address()).is_ok();
        super::slowly("it listens", up);
        for _ in 0..requests {
            get(address(), "/").expect("an answer");
        }
        assert_eq!(self.status(), Value::Null);
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
    let output = command.env("WAKEONE_SLOT", "0").output().expect("wakeone");
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
