//! Each feature of `wakeone` works on this kernel, unless the kernel is known to lack it. Without the programs
//! `wakeone run` still serves. `scripts/kernels` runs this test in each kernel, and collects the lines `feature …`
//! for docs/kernels.md. It needs root.

#[path = "support/mod.rs"]
mod support;

use rustix::process::Signal;
use serde_json::Value;
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Output};
use support::kept::{event_loops, until_disarmed};
use support::real::{Started, program};
use support::steered::{
    PREFORKED, isolated, number, said, signal_all, status, stop_all, wakeone, worker,
};
use support::{Clients, Ground, LAB, Run, WAKEONE, eventually, get};
use wakeone_bpf::Pinned;
use wakeone_bpf::probe::Probe;
use wakeone_control::control::change_policy;
use wakeone_control::paths::Paths;
use wakeone_control::policy::Policy;

const AT: &str = "127.0.0.1:8080";
const NAME: &str = "tested";

/// A policy for queues, which workers that share one cannot have.
const OF_QUEUES: [&str; 2] = ["--policy", "shortest-queue"];

/// A feature that this kernel lacks, by its name, and why.
type Lacking = &'static [(&'static str, &'static str)];

const NO_PROGRAMS: &str =
    "the kernel moves no connections from a closing listener: that came with Linux 5.14";
/// Before 5.17 there are only the classic programs, and the figures of /proc and sock_diag.
const BEFORE_5_17: Lacking = &[
    ("steering", NO_PROGRAMS),
    ("counting", NO_PROGRAMS),
    ("migration", NO_PROGRAMS),
    ("rescue", NO_PROGRAMS),
    ("queues-read-in-program", NO_PROGRAMS),
    ("lookup", NO_PROGRAMS),
    ("attach", NO_PROGRAMS),
    ("recount", NO_PROGRAMS),
    ("udp-steering", NO_PROGRAMS),
    ("quic", NO_PROGRAMS),
];

/// Some kernels have no trampolines, whatever their version.
const NO_TRAMPOLINES: Lacking = &[("exact-bursts", "the kernel has no trampolines")];

/// Features that this kernel is known to lack.
fn lacking() -> Vec<(&'static str, &'static str)> {
    let mut all = Vec::new();
    if release() < (5, 17) {
        all.extend(BEFORE_5_17);
    }
    // Linux 5.10 has no trampoline where the probe wants one, and has those at other functions.
    let without = Probe::attach(0).is_ok_and(|probe| probe.slows_system_calls());
    if without && release() >= (5, 17) {
        all.extend(NO_TRAMPOLINES);
    }
    all
}

/// The running kernel's version.
fn release() -> (u32, u32) {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("release");
    let mut numbers = text.split(|c: char| !c.is_ascii_digit());
    let mut next = || numbers.next().and_then(|n| n.parse().ok()).unwrap_or(0);
    (next(), next())
}

/// Prints whether a feature works, and compares that with what is known of the kernel.
fn feature(name: &str, there: bool) {
    let known = lacking().into_iter().find(|(missing, _)| *missing == name);
    let why = known.map_or("", |(_, why)| why);
    println!("feature {name} {} {why}", if there { "yes" } else { "no" });
    assert_eq!(there, known.is_none(), "{name} on {:?}", release());
}

/// A steered server with these options, in a network of its own.
struct Steered {
    ground: Ground,
    run: Run,
}

impl Steered {
    fn start(options: &[&str]) -> Option<Self> {
        let ground = isolated()?;
        let options = [&["--name", NAME], options].concat();
        let mut run = ground.run(&options, &PREFORKED);
        run.line("ready: ");
        Some(Self { ground, run })
    }

    fn status(&self) -> Value {
        status(&self.ground, NAME)
    }

    /// A program chooses between a queue for each worker.
    fn chooses(&self) -> bool {
        let group = self.status();
        group["steered"] == true && group["queued"].is_null()
    }

    /// The program reads the accept queues itself.
    fn reads_queues(&self) -> bool {
        let pins = Paths::of(&self.ground.runtime()).group_pins(NAME);
        Pinned::open(&pins).is_ok_and(|pinned| pinned.walks())
    }

    /// The warnings so far about missing features.
    fn warnings(&self) -> Vec<String> {
        let lines = self.run.lines();
        lines
            .into_iter()
            .filter(|line| line.contains("oing on with") || line.contains("share one queue"))
            .collect()
    }
}

fn address() -> SocketAddr {
    AT.parse().expect("address")
}

#[test]
fn connections_are_steered_and_counted() {
    let Some(server) = Steered::start(&["-w", "3", "-l", AT]) else {
        return;
    };
    for _ in 0..12 {
        get(address(), "/").expect("an answer");
    }
    let chooses = server.chooses();
    feature("steering", chooses);
    feature("counting", chooses && server.status()["counting"] == true);
    feature("queues-read-in-program", server.reads_queues());
    server.run.stop();
}

#[test]
fn without_programs_a_sentence_is_said_and_the_server_serves() {
    let Some(server) = Steered::start(&["-w", "3", "-l", AT]) else {
        return;
    };
    for _ in 0..12 {
        get(address(), "/").expect("an answer");
    }
    let warnings = server.warnings();
    assert_eq!(server.status()["steered"], true);
    if server.chooses() {
        assert!(warnings.is_empty(), "{warnings:?}");
    } else {
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].contains("share one queue"), "{warnings:?}");
    }
    server.run.stop();
}

#[test]
fn what_was_asked_for_is_refused_where_it_is_not_to_be_had() {
    if lacking().iter().all(|(name, _)| *name != "steering") {
        return;
    }
    let Some(ground) = isolated() else { return };
    let (code, last) = ground.refused(
        &[&["-w", "2", "-l", AT], &OF_QUEUES[..]].concat(),
        &PREFORKED,
    );
    assert_eq!(code, 1, "{last}");
    assert!(last.starts_with("wakeone run: cannot steer"), "{last}");
    assert!(ground.groups().is_empty());
}

#[test]
fn a_stuck_workers_queue_is_moved() {
    let Some(server) = Steered::start(&["-w", "3", "-l", AT]) else {
        return;
    };
    let group = server.status();
    if !server.chooses() {
        feature("migration", false);
        feature("rescue", false);
        return drop(server.run.stop());
    }
    // Connections go round, so the stopped worker gets some too, until it is seen to be stuck.
    let paths = Paths::of(&server.ground.runtime());
    change_policy(&paths, NAME, Policy::RoundRobin).expect("another policy");
    let stuck = worker(&group, 0).expect("a worker");
    stop_all(stuck);
    let sum = |what| {
        (0..3)
            .map(|slot| number(&server.status(), slot, what))
            .sum::<i64>()
    };
    // All are answered; other workers answer those in its queue.
    eventually("some that waited for it are moved", || {
        get(address(), "/").expect("an answer");
        sum("migrated_in") > 0
    });
    feature("migration", sum("migrated_in") > 0);
    feature("rescue", sum("rescues") > 0);
    signal_all(stuck, Signal::CONT);
    server.run.stop();
}

#[test]
fn listeners_on_a_private_port_are_found() {
    let Some(ground) = isolated() else { return };
    let options = ["--name", NAME, "-w", "2", "-l", AT, "--lookup"];
    let there = lacking().iter().all(|(name, _)| *name != "lookup");
    if there {
        let mut run = ground.run(&options, &PREFORKED);
        run.line("ready: ");
        get(address(), "/").expect("an answer");
        run.stop();
    } else {
        let (code, last) = ground.refused(&options, &PREFORKED);
        assert_eq!(code, 1, "{last}");
        assert!(last.starts_with("wakeone run: cannot steer"), "{last}");
    }
    feature("lookup", there);
    assert!(ground.groups().is_empty());
}

#[test]
fn datagrams_are_steered() {
    let Some(ground) = isolated() else { return };
    let options = ["--name", NAME, "-w", "2", "-l", "udp://127.0.0.1:8080"];
    let mut run = ground.run(&options, &["sleep", "1000"]);
    run.line("ready: ");
    feature("udp-steering", status(&ground, NAME)["steered"] == true);
    run.stop();
}

#[test]
fn packets_of_quic_are_steered() {
    let Some(ground) = isolated() else { return };
    let address = "udp://127.0.0.1:8080";
    let options = [
        "--name",
        NAME,
        "-w",
        "2",
        "-l",
        address,
        "--affinity",
        "quic",
    ];
    let there = lacking().iter().all(|(name, _)| *name != "quic");
    if there {
        let mut run = ground.run(&options, &["sleep", "1000"]);
        run.line("ready: ");
        assert_eq!(status(&ground, NAME)["policy"], "least-connections");
        run.stop();
    } else {
        // Nothing else knows the connections.
        let (code, last) = ground.refused(&options, &["sleep", "1000"]);
        assert_eq!(code, 1, "{last}");
        assert!(last.starts_with("wakeone run: cannot steer"), "{last}");
    }
    feature("quic", there);
    assert!(ground.groups().is_empty());
}

#[test]
fn doctor_tells_what_this_kernel_allows() {
    let Some(_ground) = isolated() else { return };
    let output = Command::new(WAKEONE)
        .args(["doctor", "--self", "--json"])
        .output()
        .expect("doctor");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let features = report["features"].as_array().expect("features");
    let lacking = lacking();
    for one in features {
        let known = lacking.iter().any(|(name, _)| one["name"] == *name);
        assert_eq!(one["available"], !known, "{one} on {:?}", release());
        assert_eq!(one["why"].is_string(), known, "{one}");
    }
    let named = |name| features.iter().find(|one| one["name"] == name);
    for (name, _) in &lacking {
        assert!(named(*name).is_some(), "{name}");
    }
    for name in ["exact-bursts", "doctor-packets"] {
        feature(name, named(name).expect(name)["available"] == true);
    }
    assert_eq!(output.status.code(), Some(i32::from(!lacking.is_empty())));
}

#[test]
fn workers_of_one_queue_are_steered() {
    let Some(ground) = isolated() else { return };
    let server = [&[LAB], &event_loops(AT, "3")[..]].concat();
    let server = Started::spawn(program(&server));
    eventually("it answers", || get(address(), "/").is_ok());
    let output = wakeone(&ground, &["attach", AT]);
    println!("{:?}", said(&output));
    assert!(output.status.success());
    let disarmed = || {
        let group = status(&ground, "at-127-0-0-1-8080");
        (0..3)
            .filter(|slot| group["slots"][slot]["armed"] == false)
            .count()
    };
    let open = until_disarmed(address(), disarmed);
    feature("one-queue", true);
    let done = wakeone(&ground, &["detach", AT]);
    assert!(done.status.success(), "{:?}", said(&done));
    drop((open, server));
}

/// A server that Wakeone does not start, with a listener for each worker.
fn other() -> Started {
    let mut command = program(&[LAB, "serve", "-l", AT, "-w", "3"]);
    command.args(["--model", "preforked", "--reuseport"]);
    // In an emulated machine an attach takes longer than it usually waits for a request.
    command.args(["--header-timeout", "300"]);
    let server = Started::spawn(command);
    eventually("it listens", || TcpStream::connect(address()).is_ok());
    server
}

#[test]
fn a_running_server_is_attached_and_its_connections_counted_in() {
    let Some(ground) = isolated() else { return };
    let server = other();
    let open = TcpStream::connect(address()).expect("connect");
    let output = wakeone(&ground, &["attach", ":8080"]);
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}{:?}", said(&output));
    let attached = output.status.success();
    feature("attach", attached);
    feature("recount", text.contains("; 1 open connection counted in\n"));
    if attached {
        let groups = wakeone(&ground, &["status", "--json"]);
        let groups: Value = serde_json::from_slice(&groups.stdout).expect("JSON");
        assert_eq!(groups["groups"][0]["counting"], true, "{groups}");
        let done = wakeone(&ground, &["detach", ":8080"]);
        assert!(done.status.success(), "{:?}", said(&done));
    } else {
        assert_eq!(said(&output).len(), 1, "{:?}", said(&output));
        let named = said(&output)[0].contains("attach needs Linux 5.17");
        assert!(named, "{:?}", said(&output));
    }
    drop((open, server));
}

fn doctor() -> (Output, Value) {
    let output = Command::new(WAKEONE)
        .args(["doctor", ":8080", "--for", "2s", "--json"])
        .output()
        .expect("doctor");
    let report = serde_json::from_slice::<Value>(&output.stdout);
    let report = report.unwrap_or_else(|error| panic!("{error}: {:?}", said(&output)));
    (output, report["listeners"][0].clone())
}

#[test]
fn doctor_knows_waits_and_wake_ups() {
    let Some(_ground) = isolated() else { return };
    let server = other();
    let clients = Clients::start(address(), "/", 2);
    let (output, report) = doctor();
    let totals = &report["totals"];
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.is_empty(), "{told}");
    assert!(totals["connections"].as_u64() > Some(0), "{report:#}");
    println!("missing: {}", report["view"]["missing"]);
    feature("doctor-wait-times", totals["wait_us_p50"].is_number());
    feature(
        "doctor-wake-ups",
        totals["wakeups_per_connection"].is_number(),
    );
    let taken = |row: &Value| row["taken"].is_number();
    let workers = report["workers"].as_array().expect("workers");
    feature("doctor-accepts", workers.iter().all(taken));
    // For the page alone: whether it must not is told by no version.
    let probe = Probe::attach(0).expect("attach");
    match probe.slows_system_calls() {
        false => println!("feature doctor-by-function yes"),
        true => {
            println!("feature doctor-by-function no the kernel refuses a trampoline at accept()")
        }
    }
    clients.stop();
    drop(server);
}
