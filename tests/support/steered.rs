//! Code that the tests of steered groups share: network namespaces, the output of `status`, and the check that nothing
//! is left.

use super::{Ground, LAB, WAKEONE, eventually, get, has_stopped, is_root, patience, runs};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;
use wakeone_control::paths::Paths;
use wakeone_kernel::{cgroup, netns};

/// A ground in a new network namespace of this thread. Returns `None`, with a message, if the test does not run as
/// root.
pub fn isolated() -> Option<Ground> {
    if !is_root() {
        eprintln!("skipped: only root can make a network namespace and steer in it");
        return None;
    }
    netns::isolate().expect("a network namespace");
    Some(Ground::new())
}

/// Whether long, heavy loads are wanted: `WAKEONE_SOAK=1`, on an idle machine.
pub fn soak() -> bool {
    std::env::var_os("WAKEONE_SOAK").is_some_and(|value| value == "1")
}

/// The reference server, a blocking worker, under `wakeone run`.
pub const PREFORKED: [&str; 4] = [LAB, "serve", "--model", "preforked"];

/// Options of `wakeone run` for a group of two workers whose policy a test shows or changes.
pub const WEB_BY_HASH: [&str; 8] = [
    "-w",
    "2",
    "-l",
    "127.0.0.1:8080",
    "--name",
    "web",
    "--policy",
    "hash",
];

/// Runs another `wakeone` command on the groups of this ground.
pub fn wakeone(ground: &Ground, arguments: &[&str]) -> Output {
    let mut command = Command::new(WAKEONE);
    command
        .args(arguments)
        .arg("--runtime-dir")
        .arg(ground.runtime());
    command.output().expect("wakeone starts")
}

/// Returns the lines on standard error.
pub fn said(output: &Output) -> Vec<String> {
    let text = String::from_utf8_lossy(&output.stderr);
    text.lines().map(str::to_owned).collect()
}

/// Returns the entry of a group in `status --json`.
pub fn status(ground: &Ground, name: &str) -> Value {
    let output = wakeone(ground, &["status", name, "--json"]);
    assert!(output.status.success(), "{:?}", said(&output));
    let status: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    status["groups"][0].clone()
}

/// Makes connections until an agent dies in a move (`WAKEONE_TEST_DIE=moving`).
pub fn die_while_moving(agent: u32, address: SocketAddr) {
    have_moved(address, "the agent dies of moving a queue", || !runs(agent));
}

/// Makes connections until an agent is stopped in a move (`WAKEONE_TEST_DIE=stopped`).
pub fn stop_while_moving(agent: u32, address: SocketAddr) {
    have_moved(address, "the agent stops in a move", || has_stopped(agent));
}

/// One request after the other keeps a worker for long. Connections in its queue wait meanwhile, and others are idle.
fn have_moved(address: SocketAddr, what: &str, over: impl Fn() -> bool) {
    eventually(what, || {
        std::thread::spawn(move || get(address, "/work?us=200000&kind=sleep"));
        for _ in 0..8 {
            std::thread::spawn(move || get(address, "/work?us=1000&kind=sleep"));
        }
        std::thread::sleep(Duration::from_millis(90));
        over()
    });
}

/// A number of a slot.
pub fn number(group: &Value, slot: usize, what: &str) -> i64 {
    group["slots"][slot][what]
        .as_i64()
        .unwrap_or_else(|| panic!("no {what} in slot {slot} of {group}"))
}

/// A number, summed over the slots.
pub fn sum(group: &Value, what: &str) -> i64 {
    let slots = group["slots"].as_array().expect("slots").len();
    (0..slots).map(|slot| number(group, slot, what)).sum()
}

/// The process that `wakeone run` started in a slot; it leads a process group.
pub fn worker(group: &Value, slot: usize) -> Option<u32> {
    group["slots"][slot]["pid"].as_u64().map(|pid| pid as u32)
}

/// Sends a signal to all processes of a worker.
pub fn signal_all(worker: u32, signal: Signal) {
    let leader = Pid::from_raw(worker as i32).expect("pid");
    kill_process_group(leader, signal).expect("kill");
}

/// Stops all processes of a worker, and returns when all are stopped: a running one might accept another connection.
pub fn stop_all(worker: u32) {
    signal_all(worker, Signal::STOP);
    eventually("all of the worker stand", || {
        group_of(worker).into_iter().all(has_stopped)
    });
}

/// The processes of a process group.
fn group_of(leader: u32) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").expect("/proc").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid: &u32| {
        let stat =
            wakeone_kernel::proc::stat::text(format!("/proc/{pid}/stat")).unwrap_or_default();
        let fields = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
        fields.split(' ').nth(2) == Some(leader.to_string().as_str())
    })
    .collect()
}

/// Waits until no connection is open. Then checks that every counted connection was counted out, that their number is
/// `connections`, and that the program made every choice. Returns the status.
pub fn assert_counts_are_exact(ground: &Ground, name: &str, connections: u64) -> Value {
    eventually("every connection is counted out", || {
        let group = status(ground, name);
        sum(&group, "active") == 0 && sum(&group, "established") == sum(&group, "closed")
    });
    let group = status(ground, name);
    for slot in 0..group["slots"].as_array().expect("slots").len() {
        assert_eq!(number(&group, slot, "active"), 0, "slot {slot}: {group}");
    }
    assert_eq!(sum(&group, "established"), connections as i64, "{group}");
    assert_eq!(group["fallbacks"], 0, "{group}");
    assert_eq!(group["moved_live"], 0, "{group}");
    assert_eq!(group["drift_mended"], 0, "{group}");
    group
}

/// Returns the entries of a process's epoll sets, as the kernel shows them.
pub fn entries_of(pid: u32) -> Vec<String> {
    let files = std::fs::read_dir(format!("/proc/{pid}/fdinfo")).into_iter();
    let files = files.flatten().flatten();
    let texts = files.filter_map(|file| std::fs::read_to_string(file.path()).ok());
    let lines = texts.flat_map(|text| {
        let lines = text.lines().filter(|line| line.starts_with("tfd:"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    });
    let mut lines: Vec<String> = lines.collect();
    lines.sort();
    lines
}

/// Checks that no group of this ground left anything: pins, cgroups, mounts, files, processes.
///
/// It finds processes by their network namespace, which is that of the calling thread alone.
pub fn assert_nothing_left(ground: &Ground) {
    let paths = Paths::of(&ground.runtime());
    assert!(!paths.pins.exists(), "pins: {}", tree(&paths.pins));
    assert!(
        !ground.runtime().exists(),
        "files: {}",
        tree(&ground.runtime())
    );
    assert_eq!(cgroups(&paths), Vec::<PathBuf>::new());
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("mounts");
    let runtime = ground.runtime().display().to_string();
    assert!(!mounts.contains(&runtime), "mounted: {mounts}");
    let mut left = Vec::new();
    let start = std::time::Instant::now();
    while start.elapsed() < patience() {
        left = processes_here();
        if left.is_empty() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("processes: {left:?}");
}

fn tree(path: &Path) -> String {
    let output = Command::new("find").arg(path).output().expect("find");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Returns the cgroups of this runtime folder's groups, wherever they are.
pub fn cgroups(paths: &Paths) -> Vec<PathBuf> {
    let prefix = paths.cgroup_name("");
    let mut found = Vec::new();
    let mut folders = vec![cgroup::mount_point().expect("cgroup2")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            if entry.file_name().to_string_lossy().starts_with(&prefix) {
                found.push(entry.path());
            }
            folders.push(entry.path());
        }
    }
    found
}

/// Processes, other than this one, in the network namespace of this thread.
fn processes_here() -> Vec<(OsString, String)> {
    let here = std::fs::read_link("/proc/thread-self/ns/net").expect("namespace");
    let own = OsString::from(std::process::id().to_string());
    let all = std::fs::read_dir("/proc").expect("/proc").flatten();
    let pids = all
        .map(|entry| entry.file_name())
        .filter(|name| name.as_encoded_bytes()[0].is_ascii_digit() && *name != own);
    // A test that looks at other processes itself has a helper for that.
    let is_helper = |pid: &OsString| {
        let text = |file| std::fs::read_to_string(Path::new("/proc").join(pid).join(file));
        let parent = format!("\nPPid:\t{}\n", std::process::id());
        let names = ["wakeone-reader\n", "wakeone-mover\n"];
        text("comm").is_ok_and(|name| names.contains(&name.as_str()))
            && text("status").is_ok_and(|status| status.contains(&parent))
    };
    pids.filter(|pid| !is_helper(pid))
        .filter(|pid| {
            let namespace = Path::new("/proc").join(pid).join("ns/net");
            std::fs::read_link(namespace).is_ok_and(|namespace| namespace == here)
        })
        .map(|pid| {
            let line = std::fs::read(Path::new("/proc").join(&pid).join("cmdline"));
            let line = String::from_utf8_lossy(&line.unwrap_or_default()).replace('\0', " ");
            (pid, line)
        })
        .collect()
}
