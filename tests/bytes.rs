//! Names and folders that others made: process names that are not UTF-8, and paths that another user could change.

#[path = "support/mod.rs"]
mod support;

use rustix::process::Signal;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use support::steered::{
    assert_nothing_left, isolated, number, said, signal_all, status, stop_all, wakeone, worker,
};
use support::{eventually, get, patience, server, signal};

/// A name in Cyrillic, cut by the kernel after seven letters and the first byte of the eighth.
const NAME: &str = "обработчик";

/// The command of a Python server of this folder under that name.
fn named<'a>(command: &[&'a str], into: &'a mut Vec<String>) -> Vec<&'a str> {
    let hex: String = NAME.bytes().map(|byte| format!("{byte:02x}")).collect();
    *into = vec!["python3".into(), server("named.py"), hex];
    into.extend(command.iter().map(|word| (*word).to_owned()));
    into.iter().map(String::as_str).collect()
}

/// Checks that the kernel cut its name to 15 bytes, which are not valid UTF-8.
fn assert_named(pid: u32) {
    let comm = std::fs::read(format!("/proc/{pid}/comm")).expect("its name");
    assert_eq!(comm.strip_suffix(b"\n"), Some(&NAME.as_bytes()[..15]));
    assert!(std::str::from_utf8(&comm).is_err());
}

#[test]
fn workers_whose_name_is_no_text_are_rescued_taken_over_and_detached() {
    let Some(ground) = isolated() else { return };
    let (script, mut words) = (server("whoami.py"), Vec::new());
    let command = named(&[&script], &mut words);
    let options = ["-w", "3", "-l", "127.0.0.1:8080", "--name", "web"];
    let options = [&options[..], &["--weight", "0=60000"]].concat();
    let mut run = ground.run(&options, &command);
    let address = run.ready();
    eventually("a worker answers", || get(address, "/").is_ok());
    let stopped = worker(&status(&ground, "web"), 0).expect("worker 0");
    eventually("it has its name", || {
        let comm = std::fs::read(format!("/proc/{stopped}/comm")).unwrap_or_default();
        !comm.starts_with(b"python")
    });
    assert_named(stopped);
    stop_all(stopped);
    for _ in 0..5 {
        get(address, "/").expect("answered by another");
    }
    let group = status(&ground, "web");
    assert!(number(&group, 0, "rescues") > 0, "{group}");
    signal_all(stopped, Signal::CONT);
    let workers = |group: &serde_json::Value| [0, 1, 2].map(|slot| worker(group, slot));
    let before = workers(&status(&ground, "web"));

    run.murder();
    let mut run = ground.run(&options, &command);
    assert_eq!(run.ready(), address);
    assert_eq!(workers(&status(&ground, "web")), before, "all taken over");
    run.murder();
    let output = wakeone(&ground, &["detach", "web", "--json"]);
    assert!(output.status.success(), "{:?}", said(&output));
    let reports: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let serving = &reports[0]["serving_pids"];
    assert_eq!(*serving, serde_json::json!(before), "{reports}");
    for pid in before.into_iter().flatten() {
        signal_all(pid, Signal::KILL);
    }
    assert_nothing_left(&ground);
}

/// A server that the test itself started, without Wakeone.
struct Prefork(Child);

impl Prefork {
    fn start(port: &str) -> Self {
        let (script, mut words) = (server("prefork.py"), Vec::new());
        let command = named(&[&script, "own", port, "3"], &mut words);
        let mut start = Command::new(command[0]);
        let child = start.args(&command[1..]).process_group(0).spawn();
        Self(child.expect("python3"))
    }
}

impl Drop for Prefork {
    fn drop(&mut self) {
        signal_all(self.0.id(), Signal::KILL);
        let _ = self.0.wait();
    }
}

#[test]
fn a_server_whose_name_is_no_text_is_found_attached_rescued_and_detached() {
    let Some(ground) = isolated() else { return };
    let server = Prefork::start("7300");
    let workers = || wakeone_kernel::proc::process::children(server.0.id());
    let sockets = || {
        let found = wakeone_observe::find(&wakeone_observe::Target::Port(7300));
        found.map_or(0, |found| found[0].listener.sockets.len())
    };
    eventually("all listen", || sockets() == 3);
    assert_named(server.0.id());
    let address = "127.0.0.1:7300";
    let output = wakeone_alone(&["doctor", NAME, "--for", "200ms"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains(":7300"), "{text} {:?}", said(&output));
    let output = wakeone(&ground, &["attach", ":7300", "--rescue"]);
    assert!(output.status.success(), "{:?}", said(&output));
    let group = || {
        let output = wakeone(&ground, &["status", "--json"]);
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        status["groups"][0].clone()
    };
    assert!(group()["supervisor_pid"].is_u64(), "{}", group());
    let stopped = workers()[0];
    support::halt(stopped);
    eventually("the queue of the stopped one is moved", || {
        ask(address);
        let group = group();
        (0..3).any(|slot| number(&group, slot, "rescued") > 0)
    });
    signal(stopped, Signal::CONT);
    let output = wakeone(&ground, &["detach", ":7300"]);
    assert!(output.status.success(), "{:?}", said(&output));
    assert!(!ground.runtime().exists(), "something is left of the group");
    ask(address);
    drop(server);
    assert_nothing_left(&ground);
}

/// Sends a request, and checks that some worker answers it whole.
fn ask(address: &str) {
    let mut stream = TcpStream::connect(address).expect("connects");
    stream.set_read_timeout(Some(patience())).expect("timeout");
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n").expect("asks");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("answered");
    assert!(answer.ends_with("\r\n\r\nok"), "{answer:?}");
}

/// Runs a `wakeone` command without a runtime folder.
fn wakeone_alone(arguments: &[&str]) -> std::process::Output {
    let mut command = Command::new(support::WAKEONE);
    command.args(arguments).output().expect("wakeone starts")
}

/// A user who owns none of Wakeone's files.
const NOBODY: u32 = 65534;

/// Returns the error of a command for such a runtime folder: it must fail with one sentence.
fn refused(runtime: &Path, arguments: &[&str]) -> String {
    let output = Command::new(support::WAKEONE)
        .arg(arguments[0])
        .arg("--runtime-dir")
        .arg(runtime)
        .args(&arguments[1..])
        .output()
        .expect("wakeone starts");
    let lines = said(&output);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {lines:?}");
    assert_eq!(lines.len(), 1, "{lines:?}");
    lines[0].clone()
}

#[test]
fn a_folder_that_others_can_exchange_is_neither_used_nor_emptied() {
    let Some(ground) = isolated() else { return };
    let open = ground.path().join("open");
    // A group's folder as an ended one leaves it, to which others have only planted links.
    let victim = ground.path().join("victim");
    std::fs::create_dir_all(victim.join("web")).expect("folder");
    std::fs::create_dir(&open).expect("folder");
    let sticky = std::fs::Permissions::from_mode(0o1777);
    std::fs::set_permissions(&open, sticky).expect("mode");
    let link = open.join("wakeone");
    symlink(&victim, &link).expect("link");
    std::os::unix::fs::lchown(&link, Some(NOBODY), None).expect("chown");
    // A folder of another user with a folder of ours in it: that user can replace it at any time.
    let theirs = ground.path().join("theirs");
    std::fs::create_dir_all(theirs.join("run/web")).expect("folder");
    std::os::unix::fs::chown(&theirs, Some(NOBODY), None).expect("chown");
    for (runtime, named) in [(&link, &link), (&theirs.join("run"), &theirs)] {
        for command in [
            &["detach", "--all"][..],
            &["detach", "web"],
            &[
                "run",
                "-l",
                "127.0.0.1:8080",
                "--name",
                "web",
                "--",
                "false",
            ],
        ] {
            let line = refused(runtime, command);
            let named = format!("{} ", named.display());
            assert!(
                line.contains(&named) && line.contains("--runtime-dir"),
                "{line}"
            );
        }
    }
    assert!(victim.join("web").exists() && theirs.join("run/web").exists());
}
