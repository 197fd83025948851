//! UDP: `wakeone run -l udp://` with the examples as workers, and `attach` on real DNS servers, under load by dnsperf.
//! The program's own counters tell how datagrams were distributed; the client tells how many were lost.
//!
//! These tests need root, dnsperf, and for attach knot and unbound. Otherwise they are skipped, with a message.

#[path = "support/mod.rs"]
mod support;

use rustix::process::Signal;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use support::real::{Started, installed, program};
use support::sessions::Sessions;
use support::steered::{assert_nothing_left, isolated, number, status, sum, wakeone};
use support::{Ground, eventually};

const PORT: u16 = 5353;
const ADDRESS: &str = "udp://127.0.0.1:5353";
const WORKERS: usize = 4;
/// A worker that waits for a CPU on a busy machine must not count as stuck: its flows would go elsewhere, even under
/// the hash.
const PATIENT: &str = "60s";

/// A ground with dnsperf.
fn ground() -> Option<Ground> {
    if !installed("dnsperf") {
        eprintln!("skipped: dnsperf is not installed");
        return None;
    }
    isolated()
}

fn example(name: &str) -> String {
    format!("{}/../../examples/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// The responder in C, compiled.
fn responder(folder: &Path) -> String {
    let binary = folder.join("dns_responder");
    let done = program(&["cc", "-O2", "-Wall", "-Werror", "-o"])
        .arg(&binary)
        .arg(example("dns_responder.c"))
        .status();
    assert!(done.expect("cc").success());
    binary.display().to_string()
}

/// The result of a client.
#[derive(Debug, PartialEq, Eq)]
struct Asked {
    sent: u64,
    completed: u64,
    lost: u64,
}

/// Runs a dnsperf with a few sockets, at this rate and for this time.
struct Asking(std::process::Child);

fn ask(ground: &Ground, sockets: u32, rate: u32, seconds: u32) -> Asking {
    let questions = ground.path().join("questions");
    std::fs::write(&questions, "a.example.org A\n").expect("questions");
    let child = Command::new("dnsperf")
        .args(["-s", "127.0.0.1", "-p", &PORT.to_string(), "-d"])
        .arg(questions)
        .args(["-c", &sockets.to_string(), "-Q", &rate.to_string()])
        .args(["-l", &seconds.to_string()])
        // It gives up an answer after 5 s otherwise.
        .args(["-t", &(5 * support::slowness()).to_string()])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    Asking(child.expect("dnsperf"))
}

impl Asking {
    fn done(self) -> Asked {
        let output = self.0.wait_with_output().expect("dnsperf");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let count = |what: &str| {
            let line = text.lines().find(|line| line.contains(what));
            let number = line.and_then(|line| line.split_whitespace().nth(2));
            number
                .and_then(|number| number.parse().ok())
                .unwrap_or_else(|| panic!("no {what}: {text}"))
        };
        Asked {
            sent: count("Queries sent:"),
            completed: count("Queries completed:"),
            lost: count("Queries lost:"),
        }
    }
}

/// The greatest share over the mean.
fn skew(group: &Value) -> f64 {
    let slots = group["slots"].as_array().expect("slots").len();
    let shares: Vec<i64> = (0..slots).map(|s| number(group, s, "selected")).collect();
    let most = shares.iter().max().copied().unwrap_or(0);
    most as f64 * slots as f64 / shares.iter().sum::<i64>() as f64
}

/// Checks that every question was answered, that the program placed every datagram, and that none was dropped.
fn assert_all_placed(asked: &Asked, group: &Value) {
    assert_eq!((asked.lost, asked.completed), (0, asked.sent), "{group}");
    assert_eq!(sum(group, "selected") as u64, asked.sent, "{group}");
    assert_eq!(sum(group, "dropped"), 0, "{group}");
    assert_eq!(
        group["exits"]["selected"].as_u64(),
        Some(asked.sent),
        "{group}"
    );
    assert_eq!(group["fallbacks"], 0, "{group}");
}

/// How uneven an even spread may be by shortest-queue: on a busy machine a worker that waits for a CPU has a queue, and
/// gets less.
const QUEUES_DIFFER: f64 = 1.6;

#[test]
fn two_client_sockets_are_spread_over_four_workers() {
    let Some(ground) = ground() else { return };
    let command = responder(ground.path());
    let mut skews = Vec::new();
    for policy in ["hash", "round-robin", "shortest-queue", "random"] {
        let options = [
            "-w",
            "4",
            "-l",
            ADDRESS,
            "--affinity",
            "none",
            "--policy",
            policy,
            "--stuck-after",
            PATIENT,
            "--name",
            "dns",
        ];
        let mut run = ground.run(&options, &[&command]);
        run.line("ready: ");
        let asked = ask(&ground, 2, 3000, 2 * support::slowness()).done();
        let group = status(&ground, "dns");
        assert_eq!(
            (&group["protocol"], &group["policy"]),
            (&"udp".into(), &policy.into())
        );
        assert_all_placed(&asked, &group);
        skews.push(skew(&group));
        run.stop();
        assert_nothing_left(&ground);
    }
    // Two flows in four queues: a hash leaves two of them empty at least.
    assert!(skews[0] >= 2.0, "{skews:?}");
    let limits = [1.1, QUEUES_DIFFER, 1.1];
    let within = skews[1..].iter().zip(limits);
    assert!(
        within.into_iter().all(|(skew, limit)| *skew <= limit),
        "{skews:?}"
    );
}

#[test]
fn workers_are_restarted_and_no_query_is_lost() {
    let Some(ground) = ground() else { return };
    let command = responder(ground.path());
    for affinity in ["none", "flow"] {
        let options = [
            "-w",
            "4",
            "-l",
            ADDRESS,
            "--affinity",
            affinity,
            "--name",
            "dns",
        ];
        let mut run = ground.run(&options, &[&command]);
        run.line("ready: ");
        let before = status(&ground, "dns");
        let asking = ask(&ground, 4, 5000, 5 * support::slowness());
        support::slowly("queries come", || {
            sum(&status(&ground, "dns"), "selected") > 1000
        });
        run.signal(Signal::HUP);
        run.line("rolling restart done");
        let still_asked = sum(&status(&ground, "dns"), "selected");
        let asked = asking.done();
        let after = status(&ground, "dns");
        assert_all_placed(&asked, &after);
        assert!(
            asked.sent as i64 > still_asked,
            "the restart was over before the load was"
        );
        for slot in 0..WORKERS {
            assert_ne!(before["slots"][slot]["pid"], after["slots"][slot]["pid"]);
            assert_eq!(number(&after, slot, "restarts"), 1);
        }
        run.stop();
        assert_nothing_left(&ground);
    }
}

#[test]
fn what_waits_for_a_worker_that_dies_is_read_by_its_successor() {
    let Some(ground) = ground() else { return };
    let options = ["-w", "1", "-l", ADDRESS, "--name", "dns"];
    let mut run = ground.run(&options, &["python3", &example("dns_responder.py")]);
    run.line("ready: ");
    let worker = support::steered::worker(&status(&ground, "dns"), 0).expect("a worker");
    // A stopped worker reads nothing, and a killed one never will.
    support::halt(worker);
    let asking = ask(&ground, 1, 50, 2);
    eventually("queries wait", || {
        number(&status(&ground, "dns"), 0, "waiting_bytes") > 0
    });
    support::signal(worker, Signal::KILL);
    let asked = asking.done();
    assert_all_placed(&asked, &status(&ground, "dns"));
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn tcp_and_udp_have_a_program_each() {
    let Some(ground) = ground() else { return };
    let options = [
        "-w",
        "2",
        "-l",
        ADDRESS,
        "-l",
        "tcp://127.0.0.1:5353",
        "--name",
        "both",
    ];
    let mut run = ground.run(&options, &["python3", &example("dns_responder.py")]);
    run.line("policy shortest-queue");
    run.line("policy least-connections");
    run.line("ready: ");
    let asked = ask(&ground, 2, 200, 1).done();
    let (tcp, udp) = (status(&ground, "both"), status(&ground, "both-udp"));
    assert_eq!(
        (&tcp["protocol"], &tcp["listen"][0]),
        (&"tcp".into(), &"127.0.0.1:5353".into())
    );
    assert_eq!(udp["listen"][0], ADDRESS);
    assert_eq!(tcp["supervisor_pid"], udp["supervisor_pid"]);
    assert!(tcp["slots"][0].get("waiting_bytes").is_none());
    assert_all_placed(&asked, &udp);
    run.stop();
    assert_nothing_left(&ground);
}

/// A worker that is busy for longer than `--stuck-after` keeps its sessions. Each of these workers is busy again and again.
#[test]
fn sessions_stay_with_their_workers_under_run() {
    let Some(ground) = isolated() else { return };
    let script = support::server("sessions.py");
    for policy in ["shortest-queue", "consistent"] {
        let options = [
            "-w", "4", "-l", ADDRESS, "--name", "sip", "--policy", policy,
        ];
        let mut run = ground.run(&options, &["python3", &script, "{fd}", "given"]);
        run.line("ready: ");
        let sessions = Sessions::start(server_address(), 12);
        assert_eq!(sessions.strangers(), 0, "{policy}");
        let group = status(&ground, "sip");
        assert!(sum(&group, "stuck_ms") > 0, "none was stuck: {group}");
        run.stop();
        assert_nothing_left(&ground);
    }
}

fn server_address() -> std::net::SocketAddr {
    std::net::SocketAddr::from(([127, 0, 0, 1], PORT))
}

/// Sessions of before stay where the kernel's hash put them when Wakeone attaches. Those that begin later stay too.
#[test]
fn sessions_of_before_stay_with_their_workers_when_attached() {
    let Some(ground) = isolated() else { return };
    let script = support::server("sessions.py");
    let port = PORT.to_string();
    let _server = Started::spawn(program(&["python3", &script, &port, "own", "4"]));
    support::slowly("it has its sockets", || sockets() == 4);
    let before = Sessions::start(server_address(), 12);
    for policy in [&[][..], &["--policy", "consistent"]] {
        let (code, text) = attach(&ground, policy);
        assert_eq!(code, Some(0), "{text}");
        assert_eq!(before.strangers(), 0, "{policy:?}");
        let later = Sessions::start(server_address(), 6);
        assert_eq!(later.strangers(), 0, "{policy:?}");
        let group = status(&ground, GROUP);
        assert!(group["exits"]["by_hash"].as_i64() > Some(0), "{group}");
        assert_eq!(group["fallbacks"], 0, "{group}");
        detach(&ground);
        assert_eq!(before.strangers(), 0, "{policy:?}, detached");
    }
}

#[test]
fn what_cannot_be_is_refused_in_a_sentence() {
    let ground = Ground::new();
    for (options, said) in [
        (
            &["-l", ADDRESS, "--policy", "least-connections"][..],
            "which UDP has none of",
        ),
        (&["-l", ADDRESS, "--rescue"], "cannot be moved"),
        (
            &["-l", "127.0.0.1:5353", "--affinity", "flow"],
            "no -l is a udp:// address",
        ),
    ] {
        let (code, line) = ground.refused(options, &["true"]);
        assert_eq!(code, 2, "{line}");
        assert!(line.contains(said), "{line}");
    }
}

// ---- servers of others ------------------------------------------------------

fn knot(folder: &Path, workers: usize) -> Command {
    let here = folder.display();
    let zone = "$ORIGIN example.org.\n$TTL 60\n@ SOA ns root 1 3600 600 86400 60\n@ NS ns\nns A 192.0.2.1\na A 192.0.2.2\n";
    std::fs::write(folder.join("zone"), zone).expect("zone");
    let text = format!(
        "server:\n rundir: \"{here}\"\n listen: [ 127.0.0.1@{PORT} ]\n udp-workers: {workers}\n tcp-workers: 1\n \
         background-workers: 1\ndatabase:\n storage: \"{here}\"\nlog:\n - target: stderr\n   any: error\nzone:\n \
         - domain: example.org\n   file: \"{here}/zone\"\n"
    );
    configured(folder, "knotd", "knot.conf", &text)
}

fn unbound(folder: &Path, threads: usize) -> Command {
    let here = folder.display();
    let text = format!(
        "server:\n num-threads: {threads}\n interface: 127.0.0.1@{PORT}\n so-reuseport: yes\n do-daemonize: no\n \
         chroot: \"\"\n username: \"\"\n directory: \"{here}\"\n pidfile: \"{here}/pid\"\n use-syslog: no\n \
         logfile: \"{here}/log\"\n local-data: \"a.example.org. A 192.0.2.2\"\nremote-control:\n control-enable: no\n"
    );
    configured(folder, "unbound", "unbound.conf", &text)
}

fn configured(folder: &Path, server: &str, name: &str, text: &str) -> Command {
    let file: PathBuf = folder.join(name);
    std::fs::write(&file, text).expect("configuration");
    program(&[server, "-c", &file.display().to_string()])
}

/// UDP sockets that are bound to the port.
fn sockets() -> usize {
    use wakeone_kernel::socket::diag::{Which, sockets};
    let all = sockets(
        wakeone_model::listener::Protocol::Udp,
        Which::Listening,
        PORT,
    );
    all.expect("sock_diag").len()
}

fn attach(ground: &Ground, options: &[&str]) -> (Option<i32>, String) {
    let mut arguments = vec!["attach", "udp://:5353"];
    arguments.extend(options);
    let output = wakeone(ground, &arguments);
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    (output.status.code(), text)
}

fn detach(ground: &Ground) {
    let output = wakeone(ground, &["detach", "udp://:5353"]);
    assert!(output.status.success(), "{output:?}");
}

const GROUP: &str = "at-udp-127-0-0-1-5353";

#[test]
fn servers_of_others_are_steered_and_left_as_they_were() {
    let Some(ground) = ground() else { return };
    for (name, server) in [
        ("knotd", knot as fn(&Path, usize) -> Command),
        ("unbound", unbound),
    ] {
        if !installed(name) {
            eprintln!("skipped: {name} is not installed");
            continue;
        }
        let started = Started::spawn(server(ground.path(), WORKERS));
        support::slowly("it has its sockets", || sockets() == WORKERS);
        // It reads its zone before it answers.
        std::thread::sleep(Duration::from_millis(500));
        let mut skews = Vec::new();
        for policy in ["hash", "shortest-queue"] {
            let (code, text) = attach(
                &ground,
                &[
                    "--affinity",
                    "none",
                    "--policy",
                    policy,
                    "--stuck-after",
                    PATIENT,
                ],
            );
            assert_eq!(code, Some(0), "{name}: {text}");
            let asked = ask(&ground, 2, 3000, 2 * support::slowness()).done();
            let group = status(&ground, GROUP);
            assert_all_placed(&asked, &group);
            assert_eq!(
                (&group["attached"], &group["agent"]),
                (&true.into(), &true.into())
            );
            skews.push(skew(&group));
            detach(&ground);
            assert!(!ground.runtime().exists());
        }
        assert!(
            skews[0] >= 2.0 && skews[1] <= QUEUES_DIFFER,
            "{name}: {skews:?}"
        );
        // It is attached and detached under load. A program that is attached already is not replaced.
        let asking = ask(&ground, 4, 2000, 4);
        for _ in 0..3 {
            let (code, text) = attach(&ground, &[]);
            assert_eq!(code, Some(0), "{name}: {text}");
            let elsewhere = Ground::new();
            let (code, text) = attach(&elsewhere, &[]);
            assert!(
                code == Some(1) && text.contains("is not replaced"),
                "{name}: {text}"
            );
            detach(&ground);
        }
        let asked = asking.done();
        assert_eq!((asked.lost, asked.completed), (0, asked.sent), "{name}");
        assert_eq!(sockets(), WORKERS);
        drop(started);
        support::slowly("its sockets are gone", || sockets() == 0);
    }
}

#[test]
fn one_shared_socket_is_refused_with_the_servers_own_setting() {
    let Some(ground) = ground() else { return };
    for (name, server, setting) in [
        ("knotd", knot as fn(&Path, usize) -> Command, "udp-workers"),
        ("unbound", unbound, "so-reuseport: yes"),
    ] {
        if !installed(name) {
            eprintln!("skipped: {name} is not installed");
            continue;
        }
        let _started = Started::spawn(server(ground.path(), 1));
        support::slowly("it has its socket", || sockets() == 1);
        std::thread::sleep(Duration::from_millis(300));
        let (code, text) = attach(&ground, &[]);
        assert!(code == Some(1) && text.contains(setting), "{name}: {text}");
        let (code, text) = attach(&ground, &["--policy", "least-connections"]);
        assert!(
            code == Some(1) && text.lines().count() == 1,
            "{name}: {text}"
        );
    }
    support::slowly("the last one's socket is gone", || sockets() == 0);
}

#[test]
fn a_server_that_restarts_is_steered_again() {
    let Some(ground) = ground() else { return };
    if !installed("knotd") {
        return eprintln!("skipped: knot is not installed");
    }
    let started = Started::spawn(knot(ground.path(), 2));
    support::slowly("it has its sockets", || sockets() == 2);
    let (code, text) = attach(&ground, &["--affinity", "none", "--policy", "round-robin"]);
    assert_eq!(code, Some(0), "{text}");
    drop(started);
    support::slowly("nothing is steered", || {
        let output = wakeone(&ground, &["status", "--json"]);
        let status: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let groups = status["groups"].as_array();
        groups.is_some_and(|all| all.iter().all(|group| group["steered"] == false))
    });
    let _started = Started::spawn(knot(ground.path(), 3));
    support::slowly("it is steered again", || {
        let output = wakeone(&ground, &["status", "--json"]);
        let status: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let slots = status["groups"][0]["slots"].as_array();
        slots.is_some_and(|slots| slots.len() == 3)
    });
    std::thread::sleep(Duration::from_millis(300));
    let asked = ask(&ground, 2, 500, 1).done();
    let group = status(&ground, GROUP);
    assert_all_placed(&asked, &group);
    assert!(skew(&group) <= 1.1, "{group}");
    detach(&ground);
}
