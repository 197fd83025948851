//! `{port}` in the command of `wakeone run`: workers that take no descriptor open their own listeners at one address.

#[path = "support/mod.rs"]
mod support;

use std::collections::BTreeSet;
use std::net::SocketAddr;

use rustix::process::Signal;
use support::kept::{Kept, assert_even, keep_enough};
use support::split::{as_nobody, for_another_user};
use support::steered::{assert_nothing_left, isolated, said, status, wakeone};
use support::{Clients, Ground, Run, eventually, everyone, pid_of, server, signal, slowly};

const AT: &str = "127.0.0.1:7492";
const OWN: [&str; 2] = ["--at", "127.0.0.1:{port}"];

fn address() -> SocketAddr {
    AT.parse().expect("address")
}

fn start(ground: &Ground, options: &[&str]) -> Run {
    let options = [&["-l", AT, "--name", "web"], options].concat();
    let script = server("whoami.py");
    let mut run = ground.run(&options, &[&["python3", &script][..], &OWN].concat());
    run.ready();
    run
}

/// The workers in the slots; there must be so many, all are up, and all answer.
fn workers(ground: &Ground, count: usize) -> BTreeSet<u32> {
    slowly("all slots are up", || {
        let group = status(ground, "web");
        let slots = group["slots"].as_array().expect("slots");
        slots.len() == count && slots.iter().all(|slot| slot["state"] == "up")
    });
    ground.nobody_retires("web");
    let answer: BTreeSet<u32> = everyone(address(), count).iter().map(pid_of).collect();
    assert_eq!(answer.len(), count);
    answer
}

#[test]
fn they_are_restarted_replaced_and_scaled_and_lose_nothing() {
    let Some(ground) = isolated() else { return };
    let mut run = start(&ground, &["-w", "3"]);
    let first = workers(&ground, 3);
    let clients = Clients::start(address(), "/slow?ms=1", 4);
    run.signal(Signal::HUP);
    run.line("rolling restart done: 3 workers replaced");
    let second = workers(&ground, 3);
    assert!(second.is_disjoint(&first));
    for count in [4, 2, 1] {
        let output = wakeone(&ground, &["scale", "web", &count.to_string()]);
        assert!(output.status.success(), "{:?}", said(&output));
        workers(&ground, count);
    }
    // Its successor's listener joins it before it goes.
    run.signal(Signal::HUP);
    run.line("rolling restart done: 1 worker replaced");
    workers(&ground, 1);
    clients.lost_nothing();
    let group = status(&ground, "web");
    assert_eq!(group["policy"], "least-connections", "{group}");
    assert_eq!(group["fallbacks"], 0, "{group}");
    run.stop();
    assert_nothing_left(&ground);
}

/// One that stands still gets nothing more, and what waits in its queue is moved. One that is killed has a successor.
#[test]
fn queues_of_stuck_and_dead_workers_are_moved() {
    let Some(ground) = isolated() else { return };
    let mut run = start(&ground, &["-w", "3"]);
    let before = workers(&ground, 3);
    let victim = *before.first().expect("a worker");
    support::halt(victim);
    // Some of these come before the agent sees it.
    let clients = Clients::start(address(), "/", 3);
    eventually("it is seen", || {
        let group = status(&ground, "web");
        let mut slots = group["slots"].as_array().expect("slots").iter();
        slots.any(|slot| slot["pid"] == victim && slot["state"] == "stuck")
    });
    signal(victim, Signal::KILL);
    run.line("worker ");
    let after = workers(&ground, 3);
    assert!(!after.contains(&victim) && after.intersection(&before).count() == 2);
    clients.lost_nothing();
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn the_next_supervisor_takes_them_over() {
    let Some(ground) = isolated() else { return };
    let run = start(&ground, &["-w", "3"]);
    let before = workers(&ground, 3);
    let clients = Clients::start(address(), "/slow?ms=1", 3);
    run.murder();
    let given = ["-w", "3", "-l", AT, "--name", "web"];
    let (code, line) = ground.refused(&given, &["python3", &server("whoami.py")]);
    assert!(
        code == 1 && line.contains("with {port} in the command"),
        "{line}"
    );
    let mut run = start(&ground, &["-w", "3"]);
    assert_eq!(workers(&ground, 3), before);
    run.signal(Signal::HUP);
    run.line("rolling restart done: 3 workers replaced");
    assert!(workers(&ground, 3).is_disjoint(&before));
    clients.lost_nothing();
    run.stop();
    assert_nothing_left(&ground);
}

/// Sockets share an address only if they have one owner.
#[test]
fn they_may_be_another_users() {
    let Some(ground) = isolated() else { return };
    // The user may have no access to the folder of the sources.
    let text = std::fs::read_to_string(server("whoami.py")).expect("script");
    let command = [&["python3", "-c", &text][..], &OWN].concat();
    let options = ["-w", "2", "-l", AT, "--name", "web", "--user", "nobody"];
    let mut run = ground.run(&options, &command);
    run.ready();
    let before = workers(&ground, 2);
    run.murder();
    let mut run = ground.run(&options, &command);
    run.ready();
    run.signal(Signal::HUP);
    run.line("rolling restart done: 2 workers replaced");
    assert!(workers(&ground, 2).is_disjoint(&before));
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn what_cannot_be_is_refused_or_named() {
    let Some(ground) = isolated() else { return };
    for (options, command, code, why) in [
        (
            &["-l", AT][..],
            &["a", "{port}", "{fd}"][..],
            2,
            "{fd} names one",
        ),
        (
            &["-l", AT, "--queue", "one"],
            &["a", "{port}"],
            2,
            "{port} in the command",
        ),
        (
            &["-l", AT, "--stdin"],
            &["a", "{port}"],
            2,
            "--stdin gives it one",
        ),
        (&["-l", AT, "--lookup"], &["a", "{port}"], 2, "--lookup"),
        (&["-l", "udp://:7492"], &["a", "{port}"], 2, "of UDP"),
        (
            &["-l", AT, "-l", "127.0.0.1:7493"],
            &["a", "{port}"],
            2,
            "{port2}",
        ),
        (&["-l", AT], &["a", "{port2}"], 2, "{port1} to {port1}"),
    ] {
        let (is, line) = ground.refused(options, command);
        assert!(is == code && line.contains(why), "{options:?}: {line}");
    }
    let script = server("whoami.py");
    let elsewhere = ["python3", &script, "--at", "127.0.0.2:{port}"];
    let mut run = ground.run(&["-w", "2", "-l", AT, "--name", "web"], &elsewhere);
    run.line("it listens on 127.0.0.2:7492, not on 127.0.0.1:7492");
    run.stop();
    let taken = std::net::TcpListener::bind(AT).expect("bind");
    let command = [&["python3", &script][..], &OWN].concat();
    let (code, line) = ground.refused(&["-w", "2", "-l", AT], &command);
    assert!(code == 1 && line.contains("in use"), "{line}");
    drop(taken);
    assert_nothing_left(&ground);
}

/// Real servers that take a port and nothing else.
#[test]
fn granian_and_go_keep_their_connections_even_through_restarts() {
    let Some(ground) = isolated() else { return };
    let port = "{port}";
    let app = support::server("app.py");
    let folder = std::path::Path::new(&app).parent().expect("folder");
    let folder = folder.to_str().expect("text");
    let granian = [
        "granian",
        "--interface",
        "asgi",
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "--workers",
        "1",
        "--working-dir",
        folder,
        "app:asgi",
    ];
    let go = [
        "env",
        "GODEBUG=multipathtcp=0",
        "go_server",
        "plain:127.0.0.1:{port}",
    ];
    for command in [&granian[..], &go] {
        let mut run = ground.run(&["-w", "4", "-l", AT, "--name", "web"], command);
        run.ready();
        let clients = Clients::start(address(), "/", 2);
        let (kept, counts) = keep_enough(|| Kept::open(address()));
        assert_even(&counts, 4);
        drop(kept);
        run.signal(Signal::HUP);
        run.line("rolling restart done: 4 workers replaced");
        clients.lost_nothing();
        run.stop();
        assert_nothing_left(&ground);
    }
}

/// Go listens by Multipath TCP unless told otherwise. No program chooses such a listener.
#[test]
fn what_hinders_a_worker_is_said() {
    let Some(ground) = isolated() else { return };
    let command = ["go_server", "plain:127.0.0.1:{port}"];
    let mut run = ground.run(&["-w", "2", "-l", AT], &command);
    run.line("GODEBUG=multipathtcp=0");
    run.stop();
    let Some((_folder, binary, runtime)) = for_another_user("whoami.py") else {
        return;
    };
    let mut command = as_nobody(false).expect("setpriv");
    command.arg(binary).args(["run", "-l", AT, "--runtime-dir"]);
    command.arg(runtime).args(["--", "a", "{port}"]);
    let output = command.output().expect("runs");
    let line = said(&output).last().cloned().expect("a sentence");
    assert!(
        line.contains("{port} in the command needs CAP_BPF"),
        "{line}"
    );
    assert_eq!(output.status.code(), Some(1));
}
