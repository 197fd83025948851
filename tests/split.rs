//! `wakeone run --split` on real servers that share one listening socket among their workers, unchanged: each worker gets
//! a queue of its own, shares are even, and what dies takes nothing with it.
//!
//! Needs root; a server that is not installed is skipped. Both are said.

#[path = "support/mod.rs"]
mod support;

use rustix::process::Signal;
use serde_json::Value;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use support::real::installed;
use support::steered::{assert_nothing_left, isolated, number, soak, status, wakeone};
use support::{Clients, Ground, Run, eventually, server, signal};
use wakeone_kernel::diag::{Which, sockets};
use wakeone_kernel::peek::Processes;
use wakeone_model::listener::Protocol;

const PORT: u16 = 7400;
const GROUP: &str = "at-127-0-0-1-7400";

fn address() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], PORT))
}

/// A server under `--split`, in a network of its own.
struct Split {
    ground: Ground,
    run: Run,
}

impl Split {
    fn start(options: &[&str], command: &[&str]) -> Option<Self> {
        let ground = isolated()?;
        let mut run = ground.command(&[&["--split"], options].concat(), command);
        // What the applications of this folder want to know.
        run.env("WAKEONE_SLOT", "0");
        let run = Run::start(run);
        Some(Self { ground, run })
    }

    /// Waits until as many workers as that have a queue of their own, and returns their pids.
    fn settled(&self, workers: usize) -> BTreeSet<u32> {
        let mut pids = BTreeSet::new();
        eventually("every worker has a queue", || {
            pids = self.up();
            pids.len() == workers && pids.iter().all(|pid| support::runs(*pid))
        });
        self.assert_own_queues(&pids);
        pids
    }

    /// The workers of the slots that are up.
    fn up(&self) -> BTreeSet<u32> {
        let group = self.status();
        let slots = group["slots"].as_array().cloned().unwrap_or_default();
        let up = slots.iter().filter(|slot| slot["state"] != "down");
        up.filter_map(|slot| slot["pid"].as_u64())
            .map(|pid| pid as u32)
            .collect()
    }

    fn status(&self) -> Value {
        let output = wakeone(&self.ground, &["status", "--json"]);
        let status: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        status["groups"][0].clone()
    }

    /// Each of these processes holds a listening socket that nobody else holds.
    fn assert_own_queues(&self, pids: &BTreeSet<u32>) {
        let listening = sockets(Protocol::Tcp, Which::Listening, PORT).expect("sock_diag");
        let all = Processes::read();
        let mut alone = BTreeSet::new();
        for entry in &listening {
            let inode = entry.socket.inode;
            let holders: BTreeSet<u32> = all
                .held
                .iter()
                .filter(|held| held.inode == inode)
                .map(|held| held.pid)
                .collect();
            if holders.len() == 1 {
                alone.extend(holders);
            }
        }
        assert!(alone.is_superset(pids), "{alone:?} not of {pids:?}");
    }

    /// Times each slot was chosen.
    fn chosen(&self) -> Vec<i64> {
        let group = status(&self.ground, GROUP);
        let slots = group["slots"].as_array().expect("slots").len();
        (0..slots)
            .filter(|slot| group["slots"][*slot]["state"] == "up")
            .map(|slot| number(&group, slot, "selected"))
            .collect()
    }

    /// Asks for a while from several clients, and expects even shares.
    fn serves_evenly(&self) {
        let before: i64 = self.chosen().iter().sum();
        let clients = Clients::start(address(), "/", 4);
        eventually("300 connections", || {
            self.chosen().iter().sum::<i64>() - before >= 300
        });
        let (answers, failures) = clients.stop();
        assert_eq!(failures, Vec::<String>::new(), "of {answers}");
        let chosen = self.chosen();
        let mean = chosen.iter().sum::<i64>() as f64 / chosen.len() as f64;
        let highest = *chosen.iter().max().expect("slots") as f64;
        assert!(highest <= 1.1 * mean + 2.0, "{chosen:?}");
        assert_eq!(self.status()["fallbacks"], 0);
    }

    /// Kills workers under load. What a worker had accepted dies with it, by whatever server; nothing else may fail.
    fn survives_kills(&self, workers: usize, kills: usize) {
        const CLIENTS: usize = 4;
        let clients = Clients::start(address(), "/", CLIENTS);
        let until = Instant::now() + Duration::from_secs(if soak() { 60 } else { 0 });
        let mut killed = 0;
        while killed < kills || Instant::now() < until {
            let pids = self.settled(workers);
            let victim = *pids.iter().next().expect("a worker");
            std::thread::sleep(Duration::from_millis(100));
            signal(victim, Signal::KILL);
            eventually("it is gone", || !self.up().contains(&victim));
            killed += 1;
        }
        self.settled(workers);
        let (answers, failures) = clients.stop();
        assert!(answers > 100, "{answers}");
        assert!(
            failures.len() <= killed * CLIENTS,
            "{} of {answers} with {killed} kills: {failures:?}",
            failures.len()
        );
        for failure in &failures {
            let cut = failure.contains("reset") || failure.contains("failed to fill whole buffer");
            assert!(cut, "a wrong answer: {failure}");
        }
    }

    /// SIGTERM, and nothing left.
    fn ends(self) -> Vec<String> {
        let Self { ground, run } = self;
        let lines = run.stop();
        assert_nothing_left(&ground);
        lines
    }
}

/// Even, without rescue's help.
const EVEN: [&str; 3] = ["--policy", "round-robin", "--no-rescue"];

fn python(mode: &str, workers: &str) -> Option<Split> {
    let port = PORT.to_string();
    let script = server("shared.py");
    Split::start(&EVEN, &["python3", &script, mode, &port, workers])
}

fn whole(split: Split, workers: usize) {
    split.settled(workers);
    split.serves_evenly();
    split.survives_kills(workers, 2);
    split.ends();
}

#[test]
fn python_prefork_in_every_way_of_waiting() {
    for mode in ["accept", "epoll", "exclusive", "poll", "select"] {
        let Some(split) = python(mode, "3") else {
            return;
        };
        eprintln!("{mode}");
        whole(split, 3);
    }
}

#[test]
fn ways_that_are_easily_broken() {
    for mode in ["dup", "passed", "clone", "relisten"] {
        let Some(split) = python(mode, "3") else {
            return;
        };
        eprintln!("{mode}");
        whole(split, 3);
    }
}

#[test]
fn gunicorn() {
    if !installed("gunicorn") {
        return eprintln!("skipped: gunicorn is not installed");
    }
    let app = server("app.py");
    let folder = app.trim_end_matches("app.py");
    let bind = address().to_string();
    for class in ["sync", "gthread"] {
        let command = [
            "gunicorn",
            "-k",
            class,
            "-w",
            "3",
            "--bind",
            &bind,
            "--chdir",
            folder,
            "--log-level",
            "warning",
            "app:wsgi",
        ];
        let Some(split) = Split::start(&EVEN, &command) else {
            return;
        };
        eprintln!("{class}");
        whole(split, 3);
    }
}

fn configure(folder: &std::path::Path, workers: usize) -> String {
    let at = folder.display();
    let conf = format!(
        "daemon off; user root; worker_processes {workers}; pid {at}/nginx.pid; error_log {at}/error.log;\n\
         events {{ worker_connections 256; }}\n\
         http {{ access_log off; client_body_temp_path {at}/1; proxy_temp_path {at}/2; fastcgi_temp_path {at}/3;\n\
         uwsgi_temp_path {at}/4; scgi_temp_path {at}/5;\n\
         server {{ listen 127.0.0.1:{PORT}; location / {{ return 200 \"ok\"; }} }} }}\n"
    );
    let path = folder.join("nginx.conf");
    std::fs::write(&path, conf).expect("write");
    path.display().to_string()
}

#[test]
fn nginx_without_reuseport() {
    if !installed("nginx") {
        return eprintln!("skipped: nginx is not installed");
    }
    let folder = tempfile::tempdir().expect("folder");
    let conf = configure(folder.path(), 3);
    let Some(split) = Split::start(&EVEN, &["nginx", "-c", &conf]) else {
        return;
    };
    let first = split.settled(3);
    split.serves_evenly();
    // A reload replaces the workers; connections that wait in the old ones' queues go to the new ones'.
    let clients = Clients::start(address(), "/", 4);
    configure(folder.path(), 4);
    split.run.signal(Signal::HUP);
    let second = eventually_other(&split, &first, 4);
    let (answers, failures) = clients.stop();
    assert_eq!(failures, Vec::<String>::new(), "of {answers}");
    assert!(first.is_disjoint(&second));
    split.survives_kills(4, 2);
    split.ends();
}

/// Waits until as many workers as that, none of the former, have queues.
fn eventually_other(split: &Split, former: &BTreeSet<u32>, workers: usize) -> BTreeSet<u32> {
    let mut now = BTreeSet::new();
    eventually("new workers have queues", || {
        now = split.up();
        now.len() == workers && now.is_disjoint(former)
    });
    now
}
