//! How `wakeone run` starts: everything is in place before the first listen. A program that cannot be loaded costs one
//! attempt and its own feature, and nothing else.

#[path = "support/mod.rs"]
mod support;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use support::split::{as_nobody, for_another_user};
use support::steered::{PREFORKED, assert_counts_are_exact, assert_nothing_left, isolated, status};
use support::{Ground, Run, everyone, get, server, whoami};
use wakeone_kernel::proc::netstat::Counters;

const AT: &str = "127.0.0.1:8080";

/// A client that connects without a pause while it is refused, and once in a while when it is not. Each connection asks
/// once.
struct Caller {
    thread: JoinHandle<Calls>,
}

#[derive(Default)]
struct Calls {
    refused: u64,
    refused_late: u64,
    connected: Vec<TcpStream>,
    failed: Vec<std::io::Error>,
    longest: Duration,
}

impl Caller {
    fn start(stop: &Arc<AtomicBool>) -> Self {
        let stop = Arc::clone(stop);
        let thread = std::thread::spawn(move || {
            let mut calls = Calls::default();
            while !stop.load(Relaxed) {
                calls.connect();
            }
            calls
        });
        Self { thread }
    }

    fn stop(self) -> Calls {
        self.thread.join().expect("caller")
    }
}

impl Calls {
    fn connect(&mut self) {
        let address: SocketAddr = AT.parse().expect("address");
        let before = Instant::now();
        let result = TcpStream::connect(address);
        self.longest = self.longest.max(before.elapsed());
        match result {
            Ok(mut stream) => {
                let asked =
                    stream.write_all(b"GET / HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
                match asked {
                    Ok(()) => self.connected.push(stream),
                    Err(error) => self.failed.push(error),
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                self.refused += 1;
                self.refused_late += u64::from(!self.connected.is_empty());
            }
            Err(error) => self.failed.push(error),
        }
    }

    /// Checks that every connection was answered. Returns how many there were.
    fn answered(&mut self) -> usize {
        for stream in &mut self.connected {
            stream
                .set_read_timeout(Some(support::patience()))
                .expect("timeout");
            let mut answer = String::new();
            stream.read_to_string(&mut answer).expect("an answer");
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        }
        self.connected.len()
    }
}

/// SYNs without an answer in this network namespace: dropped ones, and repeated ones.
fn unanswered() -> [u64; 3] {
    let counters = Counters::read(None);
    ["TCPSynRetrans", "ListenDrops", "ListenOverflows"].map(|name| counters.get("TcpExt", name))
}

/// Runs callers from before the start until it is ready. They see refusals, then answers, and nothing in between.
/// Returns how many were answered. The network namespace must be new: a SYN that meets TIME_WAIT and no listener is
/// repeated too.
fn call_while_it_starts(start: impl FnOnce() -> Run) -> (Run, usize) {
    let stop = Arc::new(AtomicBool::new(false));
    let callers = [Caller::start(&stop), Caller::start(&stop)];
    let mut run = start();
    run.ready();
    std::thread::sleep(Duration::from_millis(100));
    stop.store(true, Relaxed);
    let mut answered = 0;
    for caller in callers {
        let mut calls = caller.stop();
        assert!(calls.refused > 0, "it began before the server");
        assert_eq!(calls.refused_late, 0, "refused after the first connection");
        assert!(calls.failed.is_empty(), "{:?}", calls.failed);
        let connected = calls.answered();
        println!(
            "{} refused, {connected} answered, longest connect {:?}",
            calls.refused, calls.longest
        );
        assert!(connected > 0);
        answered += connected;
    }
    // A SYN that was dropped is sent again a second later.
    assert_eq!(unanswered(), [0; 3], "[sent again, dropped, overflowed]");
    (run, answered)
}

#[test]
fn who_connects_all_the_time_is_refused_and_then_answered_and_never_kept_waiting() {
    let Some(ground) = isolated() else { return };
    let options = ["-w", "4", "-l", AT, "--name", "web"];
    let (run, answered) = call_while_it_starts(|| ground.run(&options, &PREFORKED));
    let group = assert_counts_are_exact(&ground, "web", answered as u64);
    for exit in ["unknown_listener", "bad_tag", "no_slot", "select_failed"] {
        assert_eq!(group["exits"][exit], 0, "{group}");
    }
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn the_same_where_nothing_may_be_loaded() {
    let Some(ground) = isolated() else { return };
    let options = ["-w", "4", "-l", AT, "--name", "web"];
    let without = [
        "setpriv",
        "--bounding-set",
        "-bpf,-net_admin,-sys_admin,-perfmon",
    ];
    let (run, _) = call_while_it_starts(|| run_under(&ground, &without, &options, &PREFORKED));
    assert!(status(&ground, "web")["queued"].is_u64());
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn the_slot_of_a_worker_that_died_with_its_supervisor_is_filled_without_a_dropped_syn() {
    let Some(ground) = isolated() else { return };
    let options = ["-w", "3", "-l", AT, "--name", "web"];
    let command = ["python3", &server("whoami.py")];
    let mut first = ground.run(&options, &command);
    let address = first.ready();
    let before = everyone(address, 3);
    let dead = support::pid_of(&before[1]);
    let supervisor = first.pid();
    // Both die at once, so nothing moves the dead worker's queue or fills its slot.
    support::signal(supervisor, rustix::process::Signal::STOP);
    support::signal(dead, rustix::process::Signal::KILL);
    first.murder();
    let was = unanswered();
    let mut second = ground.run(&options, &command);
    assert_eq!(second.ready(), address);
    let after = everyone(address, 3);
    assert_ne!(support::pid_of(&after[1]), dead);
    assert_eq!(unanswered(), was);
    let exits = status(&ground, "web")["exits"].clone();
    assert_eq!(
        (&exits["unknown_listener"], &exits["bad_tag"]),
        (&0.into(), &0.into())
    );
    second.stop();
    assert_nothing_left(&ground);
}

fn run_under(ground: &Ground, under: &[&str], options: &[&str], command: &[&str]) -> Run {
    let plain = ground.command(options, command);
    let mut command = Command::new(under[0]);
    command
        .args(&under[1..])
        .arg(plain.get_program())
        .args(plain.get_args());
    Run::start(command)
}

/// Starts with programs that the verifier refuses, which only debug builds can have. Returns all lines of the log until
/// it is ready.
fn broken(ground: &Ground, programs: &str, options: &[&str]) -> Option<(Run, Vec<String>)> {
    if !cfg!(debug_assertions) {
        println!("skipped: a release build has no bad programs");
        return None;
    }
    let mut command = ground.command(options, &["python3", &server("whoami.py")]);
    command.env("WAKEONE_TEST_BROKEN", programs);
    let mut run = Run::start(command);
    run.ready();
    let lines = run.lines();
    Some((run, lines))
}

/// How many lines have all of these words.
fn count(lines: &[String], words: &[&str]) -> usize {
    let has = |line: &&String| words.iter().all(|word| line.contains(word));
    lines.iter().filter(has).count()
}

const ALL: &str =
    "wakeone_dispatch,wakeone_dispatch_walk,wakeone_count,wakeone_datagram,wakeone_datagram_walk";

#[test]
fn a_program_that_does_not_load_costs_one_attempt() {
    let Some(ground) = isolated() else { return };
    let debug = ["-w", "2", "-l", AT, "--name", "web", "--log-level", "debug"];
    let Some((run, lines)) = broken(&ground, ALL, &debug) else {
        return;
    };
    let begins = |lines: &[String], with: &str| {
        let begins = |line: &&String| line.starts_with(with);
        lines.iter().filter(begins).count()
    };
    assert_eq!(
        begins(&lines, "loading the program wakeone_dispatch"),
        1,
        "{lines:#?}"
    );
    let sentence = [
        "cannot steer `web`",
        "loading the program wakeone_dispatch failed",
        "the kernel's verifier refuses it: ",
        "The workers share one queue instead",
    ];
    assert_eq!(count(&lines, &sentence), 1, "{lines:#?}");
    // The verifier's last lines.
    let told = begins(&lines, "wakeone_dispatch: ");
    assert!((3..=20).contains(&told), "{lines:#?}");
    let group = status(&ground, "web");
    assert!(group["queued"].is_u64(), "{group}");
    run.stop();
    assert_nothing_left(&ground);
    // Without that level there is only the sentence.
    let (run, lines) = broken(&ground, ALL, &debug[..6]).expect("a run");
    assert_eq!(count(&lines, &sentence), 1, "{lines:#?}");
    assert_eq!(begins(&lines, "wakeone_dispatch: "), 0, "{lines:#?}");
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn a_feature_that_does_not_load_leaves_the_others_on() {
    let Some(ground) = isolated() else { return };
    let options = ["-w", "2", "-l", AT, "--name", "web"];
    let Some((run, lines)) = broken(&ground, "wakeone_dispatch_walk", &options) else {
        return;
    };
    let told = [
        "cannot read queue lengths",
        "wakeone_dispatch_walk",
        "refuses it",
    ];
    assert_eq!(count(&lines, &told), 1, "{lines:#?}");
    let group = status(&ground, "web");
    assert_eq!(
        (&group["steered"], &group["policy"]),
        (&true.into(), &"least-connections".into())
    );
    everyone(AT.parse().expect("address"), 2);
    run.stop();
    assert_nothing_left(&ground);

    let (run, lines) = broken(&ground, "wakeone_count", &options).expect("a run");
    let told = [
        "connections are not counted",
        "wakeone_count",
        "shortest-queue instead of least-connections",
    ];
    assert_eq!(count(&lines, &told), 1, "{lines:#?}");
    let group = status(&ground, "web");
    assert_eq!(
        (&group["steered"], &group["policy"]),
        (&true.into(), &"shortest-queue".into())
    );
    assert_eq!(group["fallbacks"], 0, "{group}");
    everyone(AT.parse().expect("address"), 2);
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn a_policy_that_was_asked_for_and_needs_what_does_not_load_is_refused() {
    let Some(ground) = isolated() else { return };
    if !cfg!(debug_assertions) {
        println!("skipped: a release build has no bad programs");
        return;
    }
    let options = [
        "-w",
        "2",
        "-l",
        AT,
        "--name",
        "web",
        "--policy",
        "two-choices",
    ];
    let mut command = ground.command(&options, &["sleep", "60"]);
    command.env("WAKEONE_TEST_BROKEN", "wakeone_count");
    let (status, lines) = Run::start(command).wait();
    assert_eq!(status.code(), Some(1), "{lines:#?}");
    let told = [
        "cannot steer `web` by two-choices",
        "wakeone_count",
        "shortest-queue",
    ];
    assert_eq!((lines.len(), count(&lines, &told)), (1, 1), "{lines:#?}");
    assert_nothing_left(&ground);
}

#[test]
fn datagrams_go_on_with_the_kernels_hash_after_one_attempt() {
    let Some(ground) = isolated() else { return };
    let at = "udp://127.0.0.1:8080";
    let options = ["-w", "2", "-l", AT, "-l", at, "--name", "web"];
    let Some((run, lines)) = broken(&ground, "wakeone_datagram", &options) else {
        return;
    };
    let told = [
        "cannot steer `web-udp`",
        "wakeone_datagram",
        "Going on with hash",
    ];
    assert_eq!(count(&lines, &told), 1, "{lines:#?}");
    assert_eq!(status(&ground, "web")["steered"], true);
    get(AT.parse().expect("address"), "/").expect("an answer");
    run.stop();
    assert_nothing_left(&ground);
}

/// User 0 of a user namespace is not the machine's root: nothing can be made in /run, and no program can be loaded.
#[test]
fn root_of_a_user_namespace_starts_as_an_ordinary_user() {
    for (variable, name) in [("TMPDIR", "wakeone-0"), ("XDG_RUNTIME_DIR", "wakeone")] {
        let Some((folder, binary, own)) = for_another_user("whoami.py") else {
            return;
        };
        let Some(mut command) = as_nobody(true) else {
            return;
        };
        command
            .env(variable, &own)
            .arg(binary)
            .args(["run", "-w", "2", "-l", AT, "--", "python3"])
            .arg(folder.path().join("whoami.py"));
        let mut run = Run::start(command);
        let address = run.ready();
        whoami(address);
        assert!(own.join(name).exists(), "{variable}");
        let lines = run.stop();
        assert!(lines[0].contains("one queue"), "{lines:?}");
        assert!(!own.join(name).exists(), "{variable}");
    }
}
