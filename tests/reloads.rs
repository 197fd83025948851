//! Servers that replace their sockets while `wakeone attach` steers them: kept connections that the old workers close
//! come to the new ones, and to each as many as to the others.
//!
//! Each test has a network namespace of its own. They need root, and are skipped with a message otherwise.

#[path = "support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::Signal;
use support::nginx::Nginx;
use support::real::{Started, installed, program};
use support::steered::{isolated, soak, wakeone};
use support::{Ground, LAB, eventually, nginx, patience, runs, signal, slowly};
use wakeone_kernel::socket::diag::{Which, sockets};
use wakeone_model::listener::Protocol;

/// Divides by all numbers of workers here.
const CONNECTIONS: usize = 60;

fn address() -> SocketAddr {
    nginx::address()
}

/// Connections that clients keep. A client that loses one opens another at once, and asks who answers.
struct Kept {
    /// The worker that holds each client's connection.
    held: Arc<Mutex<BTreeMap<usize, String>>>,
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<()>>,
}

impl Kept {
    fn open() -> Self {
        let held = Arc::new(Mutex::new(BTreeMap::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let client = |number| {
            let (held, stop) = (Arc::clone(&held), Arc::clone(&stop));
            std::thread::spawn(move || keep(number, &held, &stop))
        };
        let clients = (0..CONNECTIONS).map(client).collect();
        let kept = Self {
            held,
            stop,
            clients,
        };
        slowly("all are open", || {
            kept.shares().iter().sum::<usize>() == CONNECTIONS
        });
        kept
    }

    /// How many connections each worker holds, the busiest first.
    fn shares(&self) -> Vec<usize> {
        let mut shares: BTreeMap<String, usize> = BTreeMap::new();
        for worker in self.held.lock().expect("lock").values() {
            *shares.entry(worker.clone()).or_default() += 1;
        }
        let mut shares: Vec<usize> = shares.into_values().collect();
        shares.sort_unstable_by(|a, b| b.cmp(a));
        shares
    }

    /// Waits until none of these holds one, and all are open again.
    fn have_left(&self, old: impl Fn(&str) -> bool) {
        slowly("all connections are those of new workers", || {
            let held = self.held.lock().expect("lock");
            held.len() == CONNECTIONS && !held.values().any(|worker| old(worker))
        });
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        for client in self.clients.drain(..) {
            let _ = client.join();
        }
    }
}

fn keep(number: usize, held: &Mutex<BTreeMap<usize, String>>, stop: &AtomicBool) {
    while !stop.load(Relaxed) {
        let Ok((mut stream, worker)) = ask() else {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        held.lock().expect("lock").insert(number, worker);
        let quiet = |error: &std::io::Error| {
            matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
        };
        let short = Some(Duration::from_millis(50));
        stream.set_read_timeout(short).expect("timeout");
        while !stop.load(Relaxed) && stream.read(&mut [0; 512]).is_err_and(|error| quiet(&error)) {}
        held.lock().expect("lock").remove(&number);
    }
}

/// Opens a connection. Returns it with the worker that answers, as the server names it.
fn ask() -> std::io::Result<(TcpStream, String)> {
    let mut stream = TcpStream::connect(address())?;
    stream.set_read_timeout(Some(patience()))?;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")?;
    let mut answer = String::new();
    while !answer.contains("\r\n\r\n") {
        let mut part = [0; 4096];
        let length = stream.read(&mut part)?;
        if length == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        answer += &String::from_utf8_lossy(&part[..length]);
    }
    let value = |line: &str| Some(line.split_once(": ")?.1.to_owned());
    let is_name = |line: &&str| line.starts_with("X-") || line.starts_with("x-");
    let names = answer.lines().filter(is_name);
    Ok((
        stream,
        names.filter_map(value).collect::<Vec<_>>().join(" "),
    ))
}

fn listening() -> usize {
    let listening = sockets(Protocol::Tcp, Which::Listening, address().port());
    listening.map_or(0, |all| all.len())
}

/// At most a tenth above the mean, with one more for two that came at the same time.
fn assert_even(shares: &[usize], workers: usize, what: &str) {
    let most = CONNECTIONS as f64 / workers as f64 * 1.1 + 1.0;
    assert!(
        shares.len() == workers && shares[0] as f64 <= most,
        "{what}: {shares:?}"
    );
}

#[test]
fn nginx_with_fewer_and_with_more_workers() {
    let Some(nginx) = Nginx::start(6) else { return };
    nginx.attach();
    let kept = Kept::open();
    // nginx ends its old workers 100 ms after new sockets listen. A busy machine may need longer to steer them.
    let numbers = if soak() {
        vec![4, 6, 3, 5]
    } else {
        vec![4, 3, 2]
    };
    for workers in numbers {
        let old: Vec<String> = nginx.workers().iter().map(u32::to_string).collect();
        nginx.reload(workers);
        kept.have_left(|worker| old.iter().any(|pid| pid == worker));
        assert_even(
            &kept.shares(),
            workers,
            &format!("{workers} workers of nginx"),
        );
    }
    drop(kept);
    nginx.detach();
}

/// The slots of the steered group.
fn slots(ground: &Ground) -> Vec<serde_json::Value> {
    let output = wakeone(ground, &["status", "--json"]);
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let slots = status["groups"][0]["slots"].as_array();
    slots.cloned().unwrap_or_default()
}

/// How many slots have a socket.
fn up(ground: &Ground) -> usize {
    let slots = slots(ground);
    slots.iter().filter(|slot| slot["state"] != "down").count()
}

/// The reference server with four sockets of its own, which other processes may share the port of.
fn four_sockets() -> Started {
    let before = listening();
    let at = address().to_string();
    let server = Started::spawn(program(&[
        LAB,
        "serve",
        "--model",
        "reuseport",
        "-w",
        "4",
        "-l",
        &at,
    ]));
    slowly("it listens", || listening() == before + 4);
    server
}

fn attach(ground: &Ground) {
    let output = wakeone(ground, &["attach", &address().to_string()]);
    assert!(output.status.success(), "{output:?}");
}

/// Also checks that it can be detached.
fn detach(ground: &Ground) {
    let output = wakeone(ground, &["detach", &address().to_string()]);
    assert!(output.status.success(), "{output:?}");
    assert!(!ground.runtime().exists(), "something is left of the group");
}

#[test]
fn new_processes_beside_the_old_ones() {
    let Some(ground) = isolated() else { return };
    let mut server = four_sockets();
    attach(&ground);
    let kept = Kept::open();
    for roll in 0..3 {
        let old = format!(" {}", server.pid());
        let new = four_sockets();
        slowly("the new sockets have slots", || up(&ground) == 8);
        signal(server.pid(), Signal::TERM);
        kept.have_left(|worker| worker.ends_with(&old));
        slowly("the old sockets are closed", || listening() == 4);
        slowly("all are open again", || {
            let shares = kept.shares();
            shares.len() == 4 && shares.iter().sum::<usize>() == CONNECTIONS
        });
        assert_even(&kept.shares(), 4, &format!("roll {roll}"));
        server = new;
    }
    drop(kept);
    detach(&ground);
}

/// The connections that are counted.
fn counted(ground: &Ground) -> u64 {
    let slots = slots(ground);
    slots
        .iter()
        .filter_map(|slot| slot["active"].as_u64())
        .sum()
}

/// It closes the old sockets and connections as soon as it has the new sockets, and clients are back within a millisecond.
/// Until the new ones have their slots the kernel's hash chooses, as without us. No slot may be chosen before all are.
#[test]
fn haproxy_that_lets_the_old_process_finish() {
    let Some(ground) = isolated() else { return };
    if !installed("haproxy") {
        return eprintln!("skipped: haproxy is not installed");
    }
    let text = format!(
        "global\n nbthread 4\n hard-stop-after 1s\ndefaults\n mode http\n timeout client 99s\n timeout server 99s\n timeout connect 9s\n\
         frontend all\n bind {} shards by-thread\n http-after-response set-header X-Thread %[thread]\n http-request return status 200\n",
        address()
    );
    let file = ground.path().join("haproxy.cfg");
    std::fs::write(&file, text).expect("configuration");
    let file = file.to_str().expect("UTF-8").to_owned();
    let start = |old: Option<u32>| {
        let mut command = program(&["haproxy", "-db", "-f", &file]);
        if let Some(old) = old {
            command.args(["-sf", &old.to_string()]);
        }
        Started::spawn(command)
    };
    let mut server = start(None);
    slowly("it listens", || listening() == 4);
    attach(&ground);
    let kept = Kept::open();
    for reload in 0..3 {
        let old = server.pid();
        let new = start(Some(old));
        slowly("the old process ends", || !runs(old));
        slowly("all are open again", || {
            kept.shares().iter().sum::<usize>() == CONNECTIONS
        });
        eventually("all are counted", || counted(&ground) == CONNECTIONS as u64);
        let shares = kept.shares();
        // The hash gives one of four more than half of 60 in one of 100,000 cases.
        assert!(
            shares.len() == 4 && shares[0] <= CONNECTIONS / 2,
            "reload {reload}: {shares:?}"
        );
        server = new;
    }
    drop(kept);
    eventually("none is counted", || counted(&ground) == 0);
    let kept = Kept::open();
    let told = format!("opened later, {}", serde_json::json!(slots(&ground)));
    assert_even(&kept.shares(), 4, &told);
    drop(kept);
    detach(&ground);
}
