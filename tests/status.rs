//! `wakeone status`: the queues' limits, the slots in use, groups by any of their names, in 80 columns.

#[path = "support/mod.rs"]
mod support;

use serde_json::Value;
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use support::nginx::{Nginx, PORT};
use support::steered::{PREFORKED, WEB_BY_HASH, isolated, number, said, status, wakeone, worker};
use support::{Ground, WAKEONE, eventually};

/// A worker that calls listen() itself on the listener that it was given, with a backlog of its own.
const LISTENS_AGAIN: [&str; 3] = [
    "python3",
    "-c",
    "import os, socket
listener = socket.socket(fileno=3)
listener.listen(77)
while True:
    listener.accept()[0].close()",
];

fn text(ground: &Ground, arguments: &[&str], columns: usize) -> String {
    let mut command = Command::new(WAKEONE);
    command
        .args(arguments)
        .args(["--runtime-dir".as_ref(), ground.runtime().as_os_str()])
        .env("COLUMNS", columns.to_string());
    let output = command.output().expect("wakeone starts");
    assert!(output.status.success(), "{:?}", said(&output));
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn the_limit_of_a_queue_is_the_one_that_it_has() {
    let Some(ground) = isolated() else { return };
    let options = ["-w", "2", "-l", "127.0.0.1:8080", "--name", "web"];
    let mut run = ground.run(&options, &LISTENS_AGAIN);
    run.ready();
    // The agent notices the worker's listen() although no connection comes.
    eventually("the limit is the worker's", || {
        let group = status(&ground, "web");
        (0..2).all(|slot| number(&group, slot, "queue_limit") == 77)
    });
    let text = text(&ground, &["status"], 80);
    assert!(text.contains(" 0/77 "), "{text}");
    run.stop();
}

#[test]
fn a_group_has_many_names_and_fits_the_screen() {
    let Some(ground) = isolated() else { return };
    let mut run = ground.run(&WEB_BY_HASH, &PREFORKED);
    let address: SocketAddr = run.ready();
    drop(TcpStream::connect(address).expect("connects"));
    let pid = worker(&status(&ground, "web"), 0)
        .expect("a worker")
        .to_string();
    let by_pid = format!("pid:{pid}");
    for name in [
        "web",
        ":8080",
        "8080",
        "localhost:8080",
        "127.0.0.1:8080",
        "tcp://:8080",
        "tcp://8080",
        &pid,
        &by_pid,
    ] {
        assert_eq!(status(&ground, name)["name"], "web", "{name}");
        let output = wakeone(&ground, &["metrics", name, "--json"]);
        let figures: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(figures["groups"][0]["name"], "web", "{name}");
        let output = wakeone(&ground, &["policy", name, "random"]);
        assert!(output.status.success(), "{name}: {:?}", said(&output));
        let once = ["top", name, "--once", "--interval", "100ms", "--no-tracing"];
        let output = wakeone(&ground, &once);
        assert!(output.status.success(), "{name}: {:?}", said(&output));
    }
    for other in [":8081", "udp://:8080", "nobody"] {
        for command in [
            &["status", other][..],
            &["metrics", other],
            &["policy", other, "hash"],
        ] {
            let output = wakeone(&ground, command);
            assert_eq!(output.status.code(), Some(1), "{command:?}");
            let told = format!("there is no group `{other}`; there are web");
            assert!(said(&output)[0].contains(&told), "{:?}", said(&output));
        }
    }
    for columns in [80, 100, 160] {
        let text = text(&ground, &["status"], columns);
        assert!(text.starts_with("web · 127.0.0.1:8080 · random"), "{text}");
        assert!(text.contains(&pid) && text.contains(" up "), "{text}");
        for line in text.lines() {
            assert!(line.chars().count() <= columns, "{columns}: {line:?}");
        }
    }
    run.stop();
}

#[test]
fn slots_that_a_reload_left_behind_are_shown_on_request() {
    let Some(nginx) = Nginx::start(4) else { return };
    nginx.attach();
    nginx.reload(2);
    eventually("two sockets are gone", || {
        let (_, text) = nginx.wakeone(&["status"]);
        text.contains("2 slots of sockets that were closed not shown")
    });
    let rows = |arguments: &[&str]| {
        let (code, text) = nginx.wakeone(arguments);
        assert_eq!(code, 0, "{text}");
        let state = |line: &&str| line.contains(" up ") || line.contains(" down ");
        text.lines().filter(state).count()
    };
    let address = format!(":{PORT}");
    assert_eq!(rows(&["status", &address]), 2);
    assert_eq!(rows(&["status", &address, "--all"]), 4);
    // The master's process id selects its group, too.
    assert_eq!(rows(&["status", &nginx.master.to_string()]), 2);
    let (code, text) = nginx.wakeone(&["detach", &nginx.workers()[0].to_string()]);
    assert_eq!(code, 0, "{text}");
    assert!(!nginx.runtime().exists(), "something is left of the group");
}
