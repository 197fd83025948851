//! Servers whose workers have helpers (process pools, child commands), which hold the worker's listener too and never
//! accept; and the processes that a worker leaves behind.

#[path = "support/mod.rs"]
mod support;

use rustix::process::Signal;
use serde_json::Value;
use std::net::SocketAddr;
use std::process::{Child, Command};
use std::time::{Duration, Instant};
use support::split::Split;
use support::steered::{assert_nothing_left, isolated, said, status, wakeone};
use support::{Clients, Ground, Run, WAKEONE, ask, eventually, get, runs, server};

const KINDS: [&str; 4] = ["pool", "child", "late", "master"];
const FOUR: [&str; 6] = ["-w", "4", "-l", "127.0.0.1:8080", "--name", "web"];

/// A server that opens its own sockets, and ends with the test.
struct Server(Child);

const AT: &str = "127.0.0.1:8080";

fn address() -> SocketAddr {
    AT.parse().expect("address")
}

impl Server {
    fn start(kind: &str, workers: usize) -> Self {
        use std::os::unix::process::CommandExt;
        let helped = server("helped.py");
        let mut command = Command::new("python3");
        command.args([&helped, kind, "port", "8080", &workers.to_string()]);
        let child = command.process_group(0).spawn().expect("python3");
        let this = Self(child);
        // Each of its workers has answered, so it has its socket.
        let mut seen = std::collections::HashSet::new();
        support::slowly("all workers serve", || {
            seen.extend(get(address(), "/").map(|body| whom(&body)));
            seen.len() == workers
        });
        this
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        support::steered::signal_all(self.0.id(), Signal::KILL);
        let _ = self.0.wait();
    }
}

fn whom(body: &str) -> u64 {
    let about: Value = serde_json::from_str(body).expect("JSON");
    about["pid"].as_u64().expect("pid")
}

fn states(ground: &Ground, group: &str) -> Vec<String> {
    let group = status(ground, group);
    let slots = group["slots"].as_array().expect("slots").iter();
    slots
        .map(|slot| slot["state"].as_str().expect("state").to_owned())
        .collect()
}

/// Loads a server for some seconds. Nobody may be lost, and no worker stay marked.
fn serves_well(ground: &Ground, group: &str) {
    let clients = Clients::start(address(), "/", 8);
    std::thread::sleep(Duration::from_secs(2));
    let (answers, failures) = clients.stop();
    assert!(
        failures.is_empty() && answers > 50,
        "{answers}: {failures:?}"
    );
    eventually("all are well", || {
        states(ground, group).iter().all(|state| state == "up")
    });
}

#[test]
fn a_worker_with_helpers_is_ready_when_it_accepts_and_serves_as_any_other() {
    let Some(ground) = isolated() else { return };
    for kind in KINDS {
        let mut run = ground.run(
            &FOUR,
            &["python3", &server("helped.py"), kind, "fd", "{fd}"],
        );
        run.ready();
        serves_well(&ground, "web");
        if kind == "pool" {
            run.signal(Signal::HUP);
            run.line("rolling restart done: 4 workers replaced");
        }
        let lines = run.stop();
        let unseen = lines.iter().find(|line| line.contains("never seen"));
        assert_eq!(unseen, None, "{kind}");
    }
    assert_nothing_left(&ground);
}

#[test]
fn a_running_server_whose_workers_have_helpers_is_steered_by_its_workers() {
    let Some(ground) = isolated() else { return };
    for kind in ["pool", "child", "late"] {
        let _server = Server::start(kind, 4);
        let attached = wakeone(&ground, &["attach", AT, "--rescue"]);
        assert!(attached.status.success(), "{kind}: {:?}", said(&attached));
        let group = "at-127-0-0-1-8080";
        serves_well(&ground, group);
        let slots = status(&ground, group)["slots"].clone();
        let slots = slots.as_array().expect("slots").iter();
        let mut pids: Vec<u64> = slots.filter_map(|slot| slot["pid"].as_u64()).collect();
        for _ in 0..100 {
            let worker = whom(&get(address(), "/").expect("an answer"));
            pids.retain(|pid| *pid != worker);
        }
        assert!(pids.is_empty(), "{kind}: {pids:?} are no workers");
        let detached = wakeone(&ground, &["detach", AT]);
        assert!(detached.status.success(), "{kind}: {:?}", said(&detached));
    }
    assert_nothing_left(&ground);
}

/// A worker that sleeps between two attempts to accept is never seen to wait for a connection. It was kept by one request
/// for long, and its mark must not stay.
#[test]
fn a_worker_that_nobody_sees_wait_gets_connections_again() {
    let Some(ground) = isolated() else { return };
    let server = Server::start("nap", 2);
    let attached = wakeone(&ground, &["attach", AT, "--rescue", "--weight", "0=60000"]);
    assert!(attached.status.success(), "{:?}", said(&attached));
    let group = "at-127-0-0-1-8080";
    let kept = ask_slow(3_000);
    eventually("it is stuck", || {
        get(address(), "/").expect("an answer");
        states(&ground, group)[0] == "stuck"
    });
    kept.join().expect("thread").expect("an answer");
    eventually("its mark lapses", || states(&ground, group)[0] == "up");
    let worker = status(&ground, group)["slots"][0]["pid"].as_u64();
    eventually("it serves again", || {
        Some(whom(&get(address(), "/").expect("an answer"))) == worker
    });
    let detached = wakeone(&ground, &["detach", AT]);
    assert!(detached.status.success(), "{:?}", said(&detached));
    drop(server);
    assert_nothing_left(&ground);
}

/// A helper outlives its worker, and the worker's socket with it. Nobody accepts there any more.
#[test]
fn who_keeps_the_listener_of_a_dead_worker_is_named_and_gets_no_connection() {
    let Some(ground) = isolated() else { return };
    let server = Server::start("orphan", 4);
    let mut attach = Command::new(WAKEONE);
    attach.args(["attach", AT, "--rescue", "--foreground", "--runtime-dir"]);
    attach.arg(ground.runtime());
    let mut attach = Run::start(attach);
    attach.line("is steered");
    let pid = |value: &Value| u32::try_from(value.as_u64().expect("pid")).expect("pid");
    let mut helpers = std::collections::BTreeMap::new();
    eventually("each worker has answered", || {
        let body = get(address(), "/").expect("an answer");
        let about: Value = serde_json::from_str(&body).expect("JSON");
        helpers.insert(pid(&about["pid"]), pid(&about["helpers"][0]));
        helpers.len() == 4
    });
    let (worker, helper) = helpers.pop_first().expect("a worker");
    support::signal(worker, Signal::KILL);
    attach.line(&format!("process {helper} holds the listener"));
    for _ in 0..100 {
        get(address(), "/").expect("an answer");
    }
    let orphans = || status(&ground, "at-127-0-0-1-8080")["orphans"].clone();
    assert_eq!(orphans()[0]["pid"], helper);
    let mut doctor = Command::new(WAKEONE);
    doctor.args(["doctor", AT, "--for", "500ms"]);
    doctor.env("WAKEONE_RUNTIME_DIR", ground.runtime());
    let doctor = doctor.output().expect("doctor");
    let told = String::from_utf8_lossy(&doctor.stdout);
    assert_eq!(doctor.status.code(), Some(3), "{told}");
    assert!(told.contains(&format!("kill {helper}")), "{told}");
    support::signal(helper, Signal::KILL);
    eventually("none is left", || {
        orphans().as_array().is_none_or(Vec::is_empty)
    });
    attach.signal(Signal::TERM);
    attach.wait();
    drop(server);
    for helper in helpers.into_values() {
        support::signal(helper, Signal::KILL);
    }
    assert_nothing_left(&ground);
}

fn ask_slow(ms: u32) -> std::thread::JoinHandle<std::io::Result<String>> {
    let asked = std::thread::spawn(move || get(address(), &format!("/slow?ms={ms}")));
    std::thread::sleep(Duration::from_millis(300));
    asked
}

#[test]
fn who_outlives_the_first_process_of_a_worker_has_the_grace() {
    let ground = Ground::new();
    let script = format!("python3 {}; true", server("whoami.py"));
    let mut run = ground.run(&["-w", "2", "-l", "127.0.0.1:0"], &["sh", "-c", &script]);
    let address = run.ready();
    let slow = ask(address, "/slow?ms=2500").expect("accepted");
    let lines = run.stop();
    slow.answer().expect("the whole answer");
    let told = lines
        .iter()
        .any(|line| line.contains("left processes in its group"));
    assert!(told, "{lines:?}");
}

#[test]
fn who_outlives_the_first_process_of_a_worker_and_is_deaf_is_killed_after_the_grace() {
    let ground = Ground::new();
    let script = format!("python3 {} --deaf; true", server("whoami.py"));
    let options = ["-w", "1", "-l", "127.0.0.1:0", "--grace", "2s"];
    let mut run = ground.run(&options, &["sh", "-c", &script]);
    run.ready();
    let begun = Instant::now();
    let lines = run.stop();
    assert!(
        begun.elapsed() >= Duration::from_secs(2),
        "it had its grace"
    );
    let killed = lines.iter().any(|line| line.contains("killed"));
    assert!(killed, "{lines:?}");
}

#[test]
fn a_split_server_ends_with_its_first_process_and_what_that_leaves() {
    let script = format!(
        "sleep 1000 & exec python3 {} 7400 2 recv",
        server("datagrams_prefork.py")
    );
    let Some(split) = Split::start(&[], &["sh", "-c", &script]) else {
        return;
    };
    split.settled(2);
    // The first process ends, and its status is ours.
    split.run.signal(Signal::TERM);
    let Split { ground, run } = split;
    let (status, lines) = run.wait();
    assert_eq!(status.code(), Some(0), "{lines:?}");
    assert_nothing_left(&ground);
    let told = lines
        .iter()
        .any(|line| line.contains("has ended and left process"));
    assert!(told, "{lines:?}");
}

#[test]
fn the_status_of_a_split_servers_first_process_is_ours() {
    let deaf = "(trap '' TERM; sleep 1000) & sleep 1; exit 3";
    for (script, least) in [("sleep 1000 & exit 3", 0), (deaf, 2)] {
        let begun = Instant::now();
        let Some(split) = Split::start(&["--grace", "2s"], &["sh", "-c", script]) else {
            return;
        };
        let (status, lines) = split.run.wait();
        assert_eq!(status.code(), Some(3), "{lines:?}");
        assert!(begun.elapsed() >= Duration::from_secs(least));
    }
}

#[test]
fn a_daemon_is_the_server_until_it_is_told_to_end() {
    let script = format!(
        "python3 {} 7400 2 recv & sleep 3; exit 0",
        server("datagrams_prefork.py")
    );
    let Some(split) = Split::start(&[], &["sh", "-c", &script]) else {
        return;
    };
    let workers = split.settled(2);
    let mut split = split;
    split.run.line("are waited for");
    assert!(workers.iter().all(|pid| runs(*pid)));
    split.ends();
    assert!(workers.iter().all(|pid| !runs(*pid)));
}
