//! Real servers under `wakeone run`, unchanged: each starts, is rolled under load, and loses no request.
//!
//! A server that is not installed is skipped, with a message.

#[path = "support/mod.rs"]
mod support;

use rustix::process::Signal;
use std::collections::HashSet;
use std::process::Command;
use support::{Clients, Ground, everyone, is_root, pid_of, server};

/// Whether a program runs and ends well.
fn works(program: &[&str]) -> bool {
    let run = Command::new(program[0]).args(&program[1..]).output();
    run.is_ok_and(|output| output.status.success())
}

fn rolls_without_loss(command: &[&str]) {
    let ground = Ground::new();
    let mut run = ground.run(&["-w", "3", "-l", "127.0.0.1:0"], command);
    let address = run.ready();
    let before: HashSet<u32> = everyone(address, 3).iter().map(pid_of).collect();
    let clients = Clients::start(address, "/", 4);
    run.signal(Signal::HUP);
    run.line("rolling restart done: 3 workers replaced");
    let after: HashSet<u32> = everyone(address, 3).iter().map(pid_of).collect();
    let (answers, failures) = clients.stop();
    assert!(
        failures.is_empty(),
        "{} of {answers}: {failures:?}",
        failures.len()
    );
    assert!(answers > 0 && before.is_disjoint(&after));
    run.stop();
}

#[test]
fn asyncio() {
    rolls_without_loss(&["python3", &server("asyncio_server.py")]);
}

#[test]
fn node() {
    if !works(&["node", "--version"]) {
        return eprintln!("skipped: node is not installed");
    }
    rolls_without_loss(&["node", &server("node_server.js"), "{fd}"]);
}

#[test]
fn gunicorn() {
    if !works(&["gunicorn", "--version"]) {
        return eprintln!("skipped: gunicorn is not installed");
    }
    let app = server("app.py");
    let folder = app.trim_end_matches("app.py");
    let gunicorn = [
        "gunicorn",
        "-w",
        "1",
        "--log-level",
        "warning",
        "--chdir",
        folder,
    ];
    rolls_without_loss(&[&gunicorn[..], &["--bind", "fd://{fd}", "app:wsgi"]].concat());
    // Without --bind it takes what LISTEN_FDS names.
    rolls_without_loss(&[&gunicorn[..], &["-k", "gthread", "app:wsgi"]].concat());
}

#[test]
fn uvicorn() {
    if !works(&["uvicorn", "--version"]) {
        return eprintln!("skipped: uvicorn is not installed");
    }
    if !is_root() {
        return eprintln!(
            "skipped: uvicorn drops what it accepts while it closes; only steering, which needs root, keeps that from it"
        );
    }
    let app = server("app.py");
    let folder = app.trim_end_matches("app.py");
    rolls_without_loss(&[
        "uvicorn",
        "--fd",
        "{fd}",
        "--log-level",
        "warning",
        "--app-dir",
        folder,
        "app:asgi",
    ]);
}
