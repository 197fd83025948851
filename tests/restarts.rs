//! Supervisors that start, are killed and start again, where something is in their way.

#[path = "support/mod.rs"]
mod support;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;
use support::steered::{assert_nothing_left, isolated};
use support::{Ground, Run, eventually, everyone, signal};

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
