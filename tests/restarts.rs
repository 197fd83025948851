//! Supervisors that start, are killed and start again under difficult conditions: a full disk, a file that hangs.

#[path = "support/mod.rs"]
mod support;

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::steered::{assert_nothing_left, isolated};
use support::{Ground, Run, eventually, everyone, signal, slowness};

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
    let slots = state["slots"].as_array().expect("slots");
    slots
        .iter()
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
        ground.groups().iter().any(|group| group.ends_with("web")) && opens(run.pid()) == 2
    });
    let start = Instant::now();
    run.signal(Signal::TERM);
    let (status, lines) = run.wait();
    assert!(start.elapsed() < soon(), "{lines:?}");
    assert_eq!(status.code(), Some(0), "{lines:?}");
    drop(held);
    assert_nothing_left(&ground);
}

/// How many children of a process wait for a file that another holds (fs/locks.c, __break_lease).
fn opens(parent: u32) -> usize {
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"));
    let children = children.unwrap_or_default();
    let waits = |pid: &&str| {
        let wait = std::fs::read_to_string(format!("/proc/{pid}/wchan"));
        wait.is_ok_and(|wait| wait == "__break_lease")
    };
    children.split_whitespace().filter(waits).count()
}
