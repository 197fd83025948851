//! Supervisors that start, are killed and start again under difficult conditions: a full disk, a file that hangs.

#[path = "support/mod.rs"]
mod support;

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit};
use support::steered::{assert_nothing_left, isolated, status, sum};
use support::{Ground, Run, eventually, everyone, server, signal, slowly, slowness};

const AT: &str = "127.0.0.1:8080";

/// A tiny file system, taken away with the test.
struct Tmpfs(PathBuf);

impl Tmpfs {
    fn mount(at: &Path) -> Self {
        std::fs::create_dir(at).expect("folder");
        std::fs::set_permissions(at, std::fs::Permissions::from_mode(0o700)).expect("mode");
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs"])
            .arg(at)
            .status();
        assert!(mount.expect("mount").success());
        Self(at.to_owned())
    }

    /// Leaves no room for anything else.
    fn fill(&self) {
        let filler = std::fs::write(self.filler(), vec![0; 128 * 1024]);
        assert_eq!(
            filler.expect_err("it is full").kind(),
            std::io::ErrorKind::StorageFull
        );
    }

    fn empty(&self) {
        std::fs::remove_file(self.filler()).expect("remove");
    }

    fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// The workers that the state file names, by slot.
fn written(ground: &Ground) -> Vec<Option<u64>> {
    let text = std::fs::read(ground.runtime().join("web/state.json")).expect("state");
    let state: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    let slots = state["slots"].as_array().expect("slots").iter();
    let workers = state["workers"].as_u64().expect("workers") as usize;
    slots
        .take(workers)
        .map(|slot| slot["worker"]["pid"].as_u64())
        .collect()
}

fn pid(worker: &serde_json::Value) -> u32 {
    worker["pid"].as_u64().expect("pid") as u32
}

#[test]
fn a_state_that_found_no_room_is_written_once_there_is_some() {
    let Some(ground) = isolated() else { return };
    let disk = Tmpfs::mount(&ground.runtime());
    let options = ["-w", "2", "-l", AT, "--name", "web"];
    let mut first = ground.whoami(&options);
    let address = first.ready();
    let victim = pid(&everyone(address, 2)[0]);
    disk.fill();
    signal(victim, Signal::KILL);
    first.line("cannot write");
    first.line("worker 0 restarted");
    disk.empty();
    let now: Vec<Option<u64>> = everyone(address, 2)
        .iter()
        .map(|worker| worker["pid"].as_u64())
        .collect();
    eventually("the state names the new worker", || written(&ground) == now);
    let told = |lines: Vec<String>| {
        let about = lines.iter().filter(|line| line.contains("cannot write"));
        about.count()
    };
    assert_eq!(told(first.lines()), 1, "{:?}", first.lines());
    first.murder();

    let mut second = ground.whoami(&options);
    second.ready();
    let after: Vec<Option<u64>> = everyone(address, 2)
        .iter()
        .map(|worker| worker["pid"].as_u64())
        .collect();
    assert_eq!(after, now, "both were taken over");
    second.stop();
    drop(disk);
}

#[test]
fn of_two_supervisors_that_start_at_once_one_has_the_address() {
    let Some(ground) = isolated() else { return };
    for pair in 0..8 {
        let start = |name: &str| ground.whoami(&["-w", "2", "-l", AT, "--name", name]);
        let both = [start("one"), start("other")];
        let ready = |run: &Run| run.lines().iter().any(|line| line.contains("ready: "));
        eventually("one is ready", || both.iter().any(ready));
        let winner = usize::from(!ready(&both[0]));
        let [first, second] = both;
        let (winner, loser) = if winner == 0 {
            (first, second)
        } else {
            (second, first)
        };
        let (status, lines) = loser.wait();
        assert_eq!(status.code(), Some(1), "pair {pair}: {lines:?}");
        let last = lines.last().expect("a sentence");
        assert!(
            last.contains(&format!("cannot listen on {AT}")) && last.contains("in use"),
            "pair {pair}: {lines:?}"
        );
        everyone(AT.parse().expect("address"), 2);
        winner.stop();
    }
    assert_nothing_left(&ground);
}

/// Holds a lease on a file, so that any process that opens or executes it waits. The kernel takes the lease away after
/// 45 s (fs.lease-break-time).
struct Held(Child);

impl Held {
    fn hold(path: &Path) -> Self {
        const HOLD: &str = "import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
file = os.open(sys.argv[1], os.O_RDONLY)
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print('held', flush=True)
sys.stdin.read()";
        let mut holder = Command::new("python3")
            .args(["-c", HOLD])
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3");
        let mut line = String::new();
        BufReader::new(holder.stdout.as_mut().expect("stdout"))
            .read_line(&mut line)
            .expect("a line");
        assert_eq!(line, "held\n");
        Self(holder)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// A command of the test's own.
fn command(ground: &Ground) -> PathBuf {
    let path = ground.path().join("server");
    support::copy_program("/bin/sleep", &path);
    path
}

/// Much less than the time that the kernel leaves a lease.
fn soon() -> Duration {
    Duration::from_secs(20) * slowness()
}

#[test]
fn a_command_that_the_kernel_cannot_open_yet_keeps_nobody_from_ending() {
    let Some(ground) = isolated() else { return };
    let path = command(&ground);
    let held = Held::hold(&path);
    let text = path.to_str().expect("path");
    let run = ground.run(&["-w", "2", "-l", AT, "--name", "web"], &[text, "1000"]);
    eventually("a worker waits for its command", || {
        ground.groups().iter().any(|group| group.ends_with("web")) && opening(run.pid()).len() == 2
    });
    let start = Instant::now();
    run.signal(Signal::TERM);
    let (status, lines) = run.wait();
    assert!(start.elapsed() < soon(), "{lines:?}");
    assert_eq!(status.code(), Some(0), "{lines:?}");
    drop(held);
    assert_nothing_left(&ground);
}

/// The children of a process that wait for a file that another holds (fs/locks.c, __break_lease).
fn opening(parent: u32) -> Vec<u32> {
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"));
    let children = children.unwrap_or_default();
    let waits = |pid: &u32| {
        let wait = std::fs::read_to_string(format!("/proc/{pid}/wchan"));
        wait.is_ok_and(|wait| wait == "__break_lease")
    };
    let children = children.split_whitespace().flat_map(str::parse);
    children.filter(waits).collect()
}

/// A server of the test's own, whose file can be held.
fn whoami(ground: &Ground) -> PathBuf {
    let (draft, path) = (ground.path().join("draft"), ground.path().join("whoami"));
    let script = format!("#!/bin/sh\nexec python3 {}\n", server("whoami.py"));
    std::fs::write(&draft, script).expect("script");
    std::fs::set_permissions(&draft, std::fs::Permissions::from_mode(0o755)).expect("mode");
    support::copy_program(&draft, &path);
    path
}

const TWO: [&str; 6] = ["-w", "2", "-l", AT, "--name", "web"];

#[test]
fn workers_whose_supervisor_dies_while_it_starts_them_are_taken_over() {
    let Some(ground) = isolated() else { return };
    let path = whoami(&ground);
    let command = [path.to_str().expect("path")];
    let held = Held::hold(&path);
    let first = ground.run(&TWO, &command);
    eventually("both wait for their command", || {
        opening(first.pid()).len() == 2
    });
    let started = opening(first.pid());
    first.murder();
    drop(held);
    let mut second = ground.run(&TWO, &command);
    let address = second.ready();
    let now: Vec<u32> = everyone(address, 2).iter().map(pid).collect();
    assert_eq!(now, started);
    second.stop();
    assert_nothing_left(&ground);
}

/// Has the supervisor start a worker, kills it before that has begun its command, and starts the next one. Returns
/// that and the worker's pid.
fn dies_while_it_starts_another(ground: &Ground, cause: fn(&Run, &[u32])) -> (Run, u32) {
    let path = whoami(ground);
    let command = [path.to_str().expect("path")];
    let mut first = ground.run(&TWO, &command);
    let address = first.ready();
    let before: Vec<u32> = everyone(address, 2).iter().map(pid).collect();
    let held = Held::hold(&path);
    cause(&first, &before);
    eventually("a worker waits for its command", || {
        !opening(first.pid()).is_empty()
    });
    let started = opening(first.pid())[0];
    first.murder();
    drop(held);
    let mut second = ground.run(&TWO, &command);
    second.ready();
    (second, started)
}

#[test]
fn a_worker_whose_supervisor_dies_while_it_restarts_it_is_taken_over() {
    let Some(ground) = isolated() else { return };
    let kill_first = |_: &Run, workers: &[u32]| signal(workers[0], Signal::KILL);
    let (second, started) = dies_while_it_starts_another(&ground, kill_first);
    let now = everyone(AT.parse().expect("address"), 2);
    assert_eq!(pid(&now[0]), started);
    second.stop();
    assert!(!support::runs(started), "it ended with the others");
    assert_nothing_left(&ground);
}

#[test]
fn a_worker_whose_supervisor_dies_while_it_starts_it_beside_another_is_ended() {
    let Some(ground) = isolated() else { return };
    let roll = |run: &Run, _: &[u32]| run.signal(Signal::HUP);
    let (second, started) = dies_while_it_starts_another(&ground, roll);
    slowly("it is ended", || !support::runs(started));
    second.stop();
    assert_nothing_left(&ground);
}

#[test]
fn many_workers_that_wait_for_their_command_hold_the_loop_up_no_longer_than_one() {
    let Some(ground) = isolated() else { return };
    const WORKERS: usize = 24;
    let path = whoami(&ground);
    let number = WORKERS.to_string();
    let options = ["-w", &number, "-l", AT, "--name", "web"];
    let mut run = ground.run(&options, &[path.to_str().expect("path")]);
    run.ready();
    let workers = written(&ground).into_iter().flatten();
    let held = Held::hold(&path);
    // The supervisor finds all of them dead at once, so their restarts are due at about the same time.
    run.signal(Signal::STOP);
    workers.for_each(|pid| signal(pid as u32, Signal::KILL));
    run.signal(Signal::CONT);
    eventually("one waits for its command", || {
        !opening(run.pid()).is_empty()
    });
    // One after the other took 200 ms each.
    let begun = Instant::now();
    eventually("all wait for it", || opening(run.pid()).len() == WORKERS);
    let took = begun.elapsed();
    let serial = Duration::from_millis(200) * WORKERS as u32;
    assert!(took < serial / 2 * slowness(), "{took:?}");
    drop(held);
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn workers_of_a_supervisor_that_cannot_go_on_stay_steered_and_are_taken_over() {
    let Some(ground) = isolated() else { return };
    // Without its programs such a group could not be reached.
    let options = [&TWO[..], &["--lookup"]].concat();
    let mut first = ground.whoami(&options);
    let address = first.ready();
    let before: Vec<u32> = everyone(address, 2).iter().map(pid).collect();
    // poll(2) refuses more descriptors than the process may have.
    let supervisor = Pid::from_raw(first.pid() as i32);
    let limit = Rlimit {
        current: Some(1),
        ..getrlimit(Resource::Nofile)
    };
    prlimit(supervisor, Resource::Nofile, limit).expect("prlimit");
    first.line("cannot wait for workers");
    slowly("it ends", || !support::runs(first.pid()));
    let steered = sum(&status(&ground, "web"), "selected");
    let after: Vec<u32> = everyone(address, 2).iter().map(pid).collect();
    assert_eq!(after, before);
    let now = sum(&status(&ground, "web"), "selected");
    assert!(now >= steered + 2, "{now} after {steered}");
    let mut second = ground.whoami(&options);
    second.ready();
    let after: Vec<u32> = everyone(address, 2).iter().map(pid).collect();
    assert_eq!(after, before);
    second.stop();
    drop(first);
    assert_nothing_left(&ground);
}

#[test]
fn a_worker_begins_its_command_only_once_its_supervisor_has_written_it_down() {
    let folder = tempfile::tempdir().expect("folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("path").to_owned();
    let order = serde_json::json!({
        "slot": 0, "protocol": false, "names": [], "account": null, "keep_caps": [], "descriptors": null,
        "command": ["touch", path("begun")],
    });
    // Without listeners 3 is for the reason, and 4 is the gate.
    let trampoline = |gate: &str| {
        let line = format!(
            "exec \"$0\" __exec-worker \"$1\" 3>{} 4<{gate}",
            path("reason")
        );
        let mut shell = Command::new("sh");
        shell.args(["-c", &line, support::WAKEONE, &order.to_string()]);
        shell.status().expect("sh").success()
    };
    assert!(!trampoline("/dev/null"), "the supervisor died first");
    assert!(!folder.path().join("begun").exists());
    std::fs::write(path("open"), [0]).expect("file");
    assert!(trampoline(&path("open")));
    assert!(folder.path().join("begun").exists());
}
