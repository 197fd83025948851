//! Servers of HTTP/3 whose workers share a socket, as their users start them: hypercorn, and the nginx of Debian 13. As they
//! are, most connections fail.
//!
//! These tests need root and what `make test-deps` installs. Otherwise they are skipped, with a message.

#[path = "support/quic.rs"]
mod clients;
#[path = "support/mod.rs"]
mod support;

use clients::{ADDRESS, clients};
use std::fs;
use std::time::Duration;
use support::real::{Started, installed, program};
use support::steered::{assert_nothing_left, isolated, status, wakeone};
use support::{Ground, Run, app, signal, slowly};

const UDP: &str = "udp://127.0.0.1:4433";
const NAME: &str = "at-udp-127-0-0-1-4433";
const WORKERS: usize = 4;

fn ground(server: &str) -> Option<Ground> {
    for needed in [server, "quinn_client", "openssl"] {
        if !installed(needed) {
            eprintln!("skipped: {needed} is not installed");
            return None;
        }
    }
    let ground = isolated()?;
    for file in ["h3.sh", "h3.conf", "asgi.py"] {
        let text = fs::read_to_string(app(file)).expect("a file of the laboratory");
        let text = text.replace("{dir}", &ground.path().display().to_string());
        let text = text.replace("{address}", ADDRESS).replace("{workers}", "4");
        fs::write(ground.path().join(file), text).expect("write");
    }
    Some(ground)
}

fn file(ground: &Ground, name: &str) -> String {
    ground.path().join(name).display().to_string()
}

/// The command of nginx, which gets a certificate first.
fn nginx(ground: &Ground) -> Vec<String> {
    let folder = ground.path().display().to_string();
    let (start, conf) = (file(ground, "h3.sh"), file(ground, "h3.conf"));
    let words = ["sh", &start, "nginx_h3", "-p", &folder, "-c", &conf];
    words.map(String::from).to_vec()
}

fn hypercorn(ground: &Ground) -> Vec<String> {
    let [start, crt, key] = ["h3.sh", "h3.crt", "h3.key"].map(|name| file(ground, name));
    let (count, own) = (
        file(ground, "count"),
        format!("unix:{}", file(ground, "own")),
    );
    fs::write(&count, "").expect("write");
    let place = [
        format!("WAKEONE_COUNT={count}"),
        format!("PYTHONPATH={}", ground.path().display()),
    ];
    let words = [
        "sh",
        &start,
        "hypercorn",
        "-w",
        "4",
        "--quic-bind",
        ADDRESS,
        "--bind",
        &own,
    ];
    let more = ["--certfile", &crt, "--keyfile", &key, "asgi:app"];
    let words = words.iter().chain(&more).map(|word| (*word).to_owned());
    std::iter::once("env".to_owned())
        .chain(place)
        .chain(words)
        .collect()
}

/// Starts it with a socket for each worker.
fn split(ground: &Ground, server: &[String]) -> Run {
    let words: Vec<&str> = server.iter().map(String::as_str).collect();
    let options = ["--split", "--affinity", "quic", "--stuck-after", "60s"];
    let mut run = ground.run(&options, &words);
    run.line("is split");
    slowly("each worker has its own", || workers_up(ground) == WORKERS);
    run
}

fn workers_up(ground: &Ground) -> usize {
    let group = status(ground, NAME);
    let slots = group["slots"].as_array().into_iter().flatten();
    slots.filter(|slot| slot["state"] == "up").count()
}

/// Each is answered, and no worker has many more than the others.
fn all_are_answered(count: usize) {
    let counts = clients(count, (0, 0), &["path=/"]).all_answered();
    let most = counts.iter().max().copied().unwrap_or(0);
    assert!(
        counts.len() == WORKERS && most <= count * 3 / 10,
        "{counts:?}"
    );
}

#[test]
fn hypercorn_s_workers_get_a_socket_each() {
    let Some(ground) = ground("hypercorn") else {
        return;
    };
    let run = split(&ground, &hypercorn(&ground));
    all_are_answered(100);
    run.stop();
    assert_nothing_left(&ground);
}

/// Also those of a reload, while the old ones go on with their downloads.
#[test]
fn nginx_s_workers_get_a_socket_each() {
    let Some(ground) = ground("nginx_h3") else {
        return;
    };
    let run = split(&ground, &nginx(&ground));
    all_are_answered(100);
    let downloads = clients(40, (0, 15_000), &["path=/download"]);
    std::thread::sleep(Duration::from_secs(2));
    let master = fs::read_to_string(ground.path().join("h3.pid")).expect("a pid");
    signal(
        master.trim().parse().expect("a pid"),
        rustix::process::Signal::HUP,
    );
    clients(100, (0, 0), &["path=/", "apart=20"]).all_answered();
    downloads.all_answered();
    run.stop();
    assert_nothing_left(&ground);
}

#[test]
fn nginx_with_a_socket_for_each_worker_is_attached_to() {
    let Some(ground) = ground("nginx_h3") else {
        return;
    };
    let words = nginx(&ground);
    let words: Vec<&str> = ["env", "LISTEN=reuseport"]
        .into_iter()
        .chain(words.iter().map(String::as_str))
        .collect();
    let server = Started::spawn(program(&words));
    slowly("it serves", || {
        clients(1, (0, 0), &["path=/"]).done().failures.is_empty()
    });
    let attached = wakeone(
        &ground,
        &["attach", UDP, "--affinity", "quic", "--stuck-after", "60s"],
    );
    assert!(attached.status.success(), "{attached:?}");
    all_are_answered(100);
    // A NAT changes the ports of these in the middle.
    clients(40, (0, 15_000), &["path=/download", "rebind"]).all_answered();
    let detached = wakeone(&ground, &["detach", UDP]);
    assert!(detached.status.success(), "{detached:?}");
    drop(server);
    assert_nothing_left(&ground);
}
