//! `wakeone attach` and `detach` on a real nginx with a socket for each worker: under load, reloads and kills nothing
//! fails that would not have failed without, the counts are exact, and what is left is what was before.
//!
//! Needs root and nginx; otherwise skipped, and said.

#[path = "support/mod.rs"]
mod support;

use rustix::process::Signal;
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use support::{Clients, WAKEONE, eventually, is_root, signal};

const PORT: u16 = 7300;

fn address() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], PORT))
}

/// An nginx with `reuseport`, in a network namespace of this test's thread.
struct Nginx {
    folder: tempfile::TempDir,
    master: Child,
}

impl Nginx {
    /// None where the test cannot be made here.
    fn start(workers: usize) -> Option<Self> {
        if !is_root() {
            eprintln!("skipped: steering from outside needs root");
            return None;
        }
        let there = Command::new("nginx").arg("-v").output();
        if !there.is_ok_and(|output| output.status.success()) {
            eprintln!("skipped: nginx is not installed");
            return None;
        }
        wakeone_kernel::netns::isolate().expect("network namespace");
        let folder = tempfile::tempdir().expect("folder");
        configure(folder.path(), workers);
        let master = master(folder.path());
        let nginx = Self { folder, master };
        nginx.settled(workers);
        // The connections of the questions above are closed as well.
        eventually("nothing is open", || {
            use wakeone_kernel::diag::{Which, sockets};
            let open = sockets(wakeone_model::listener::Protocol::Tcp, Which::Open, PORT);
            open.expect("sock_diag").is_empty()
        });
        Some(nginx)
    }

    fn runtime(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    fn reload(&self, workers: usize) {
        configure(self.folder.path(), workers);
        signal(self.master.id(), Signal::HUP);
        self.settled(workers);
    }

    /// Waits until as many workers as that run, and none that is shutting down.
    fn settled(&self, workers: usize) {
        eventually("nginx has its workers", || self.workers().len() == workers);
    }

    fn workers(&self) -> Vec<u32> {
        wakeone_kernel::process::children(self.master.id())
            .into_iter()
            .filter(|pid| support::runs(*pid))
            .collect()
    }

    /// Who holds which listener under which number: what must be the same before and after. (nginx's own channels
    /// between its workers arrive when they arrive.)
    fn listeners(&self) -> Vec<(u32, Vec<(i32, u64)>)> {
        use wakeone_kernel::diag::{Which, sockets};
        let listening = sockets(
            wakeone_model::listener::Protocol::Tcp,
            Which::Listening,
            PORT,
        );
        let inodes: Vec<u64> = listening
            .expect("sock_diag")
            .iter()
            .map(|entry| entry.socket.inode)
            .collect();
        let held = |pid| {
            let mut held = wakeone_kernel::process::sockets_of(pid).expect("sockets");
            held.retain(|(_, inode)| inodes.contains(inode));
            held.sort_unstable();
            (pid, held)
        };
        let mut pids = self.workers();
        pids.push(self.master.id());
        pids.sort_unstable();
        pids.into_iter().map(held).collect()
    }

    fn wakeone(&self, arguments: &[&str]) -> (i32, String) {
        let output = Command::new(WAKEONE)
            .args(arguments)
            .arg("--runtime-dir")
            .arg(self.runtime())
            .output()
            .expect("wakeone");
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        (output.status.code().unwrap_or(-1), text)
    }

    fn attach(&self) {
        let (code, text) = self.wakeone(&["attach", &format!(":{PORT}"), "--rescue"]);
        assert_eq!(code, 0, "{text}");
    }

    fn detach(&self) {
        let (code, text) = self.wakeone(&["detach", &format!(":{PORT}")]);
        assert_eq!(code, 0, "{text}");
        assert!(!self.runtime().exists(), "something is left of the group");
    }

    fn group(&self) -> Value {
        let (code, text) = self.wakeone(&["status", "--json"]);
        assert_eq!(code, 0, "{text}");
        let status: Value = serde_json::from_str(&text).expect("JSON");
        status["groups"][0].clone()
    }

    /// Open connections of each slot that has a worker.
    fn active(&self) -> Vec<i64> {
        let group = self.group();
        let slots = group["slots"].as_array().expect("slots");
        let up = slots.iter().filter(|slot| slot["state"] != "down");
        up.map(|slot| slot["active"].as_i64().expect("active"))
            .collect()
    }

    fn agent(&self) -> u32 {
        self.group()["supervisor_pid"].as_u64().expect("an agent") as u32
    }
}

/// Starts nginx in a folder, and waits until it listens.
fn master(folder: &std::path::Path) -> Child {
    let master = Command::new("nginx")
        .arg("-c")
        .arg(folder.join("nginx.conf"))
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .expect("nginx");
    eventually("nginx listens", || TcpStream::connect(address()).is_ok());
    master
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let _ = self.wakeone(&["detach", "--all"]);
        let group = rustix::process::Pid::from_child(&self.master);
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
        let _ = self.master.wait();
    }
}

fn configure(folder: &std::path::Path, workers: usize) {
    let here = folder.display();
    let text = format!(
        "daemon off; user root; worker_processes {workers}; pid {here}/pid; error_log {here}/log;
         events {{ worker_connections 512; }}
         http {{ access_log off; keepalive_timeout 300s; client_body_temp_path {here}/b; proxy_temp_path {here}/p;
                fastcgi_temp_path {here}/f; uwsgi_temp_path {here}/u; scgi_temp_path {here}/s;
                server {{ listen 127.0.0.1:{PORT} reuseport; location / {{ return 200 ok; }} }} }}"
    );
    std::fs::write(folder.join("nginx.conf"), text).expect("configuration");
}

/// A connection that stays open after its first answer.
fn held() -> TcpStream {
    let mut stream = TcpStream::connect(address()).expect("connect");
    stream
        .set_read_timeout(Some(support::PATIENCE))
        .expect("timeout");
    stream
        .write_all(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
        .expect("ask");
    stream.read_exact(&mut [0; 12]).expect("answer");
    stream
}

#[test]
fn open_connections_are_counted_in_and_out_exactly() {
    let Some(nginx) = Nginx::start(4) else { return };
    let mut before: Vec<TcpStream> = (0..30).map(|_| held()).collect();
    // And some that no worker has accepted: one is stopped, and its queue fills.
    let stopped = nginx.workers()[0];
    signal(stopped, Signal::STOP);
    let waiting: Vec<TcpStream> = (0..20)
        .map(|_| TcpStream::connect(address()).expect("connect"))
        .collect();
    let (code, text) = nginx.wakeone(&["attach", &format!(":{PORT}"), "--dry-run"]);
    assert!(
        code == 0 && text.contains("4 sockets, 50 open connections"),
        "{text}"
    );
    assert!(!nginx.runtime().exists(), "--dry-run leaves nothing");
    let (code, text) = nginx.wakeone(&["attach", &format!(":{PORT}")]);
    assert!(
        code == 0 && text.contains("50 open connections counted in"),
        "{text}"
    );
    assert_eq!(nginx.active().iter().sum::<i64>(), 50);
    // One that is chosen for a stopped worker would wait for it: without --rescue nobody moves it.
    signal(stopped, Signal::CONT);
    let after: Vec<TcpStream> = (0..10).map(|_| held()).collect();
    assert_eq!(nginx.active().iter().sum::<i64>(), 60);
    before.truncate(7);
    eventually("closed ones are counted out", || {
        nginx.active().iter().sum::<i64>() == 7 + 20 + 10
    });
    drop((before, after, waiting));
    eventually("all are counted out", || nginx.active() == [0, 0, 0, 0]);
    nginx.detach();
}

#[test]
fn cycles_of_attach_and_detach_lose_nothing_and_leave_nothing() {
    let Some(nginx) = Nginx::start(4) else { return };
    let before = nginx.listeners();
    assert!(before.iter().all(|(_, held)| held.len() == 4), "{before:?}");
    let clients = Clients::start(address(), "/", 4);
    for _ in 0..if std::env::var_os("WAKEONE_SOAK").is_some() {
        20
    } else {
        5
    } {
        nginx.attach();
        std::thread::sleep(Duration::from_millis(50));
        nginx.detach();
    }
    let (answers, failures) = clients.stop();
    assert!(
        failures.is_empty(),
        "{} of {answers}: {failures:?}",
        failures.len()
    );
    assert!(answers > 100);
    eventually("nginx has what it had", || nginx.listeners() == before);
}

#[test]
fn a_group_is_followed_through_reloads_and_kills() {
    let Some(nginx) = Nginx::start(4) else { return };
    nginx.attach();
    let clients = Clients::start(address(), "/", 4);
    for workers in [6, 3, 4] {
        nginx.reload(workers);
        eventually("the group has as many slots as workers", || {
            nginx.active().len() == workers
        });
    }
    let (answers, failures) = clients.stop();
    assert!(
        failures.is_empty(),
        "{} of {answers}: {failures:?}",
        failures.len()
    );

    // A worker killed takes what it had in hand, nothing else; its successor has the same socket.
    let killed = nginx.workers()[0];
    signal(killed, Signal::KILL);
    eventually("another worker serves its slot", || {
        let slots = nginx.group()["slots"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        nginx.workers().len() == 4 && slots.iter().all(|slot| slot["pid"] != killed)
    });

    // The agent killed: steering goes on, and the next one takes over with the counts.
    let clients = Clients::start(address(), "/", 4);
    let open = held();
    signal(nginx.agent(), Signal::KILL);
    std::thread::sleep(Duration::from_millis(300));
    let selected = |group: &Value| -> u64 {
        let slots = group["slots"].as_array().expect("slots");
        slots
            .iter()
            .filter_map(|slot| slot["selected"].as_u64())
            .sum()
    };
    let before = selected(&nginx.group());
    eventually("connections are steered without an agent", || {
        selected(&nginx.group()) > before
    });
    nginx.attach();
    let (answers, failures) = clients.stop();
    assert!(
        failures.is_empty(),
        "{} of {answers}: {failures:?}",
        failures.len()
    );
    eventually("the counts are exact", || {
        nginx.active().iter().sum::<i64>() == 1
    });
    drop(open);
    eventually("and to the last", || nginx.active() == [0, 0, 0, 0]);
    nginx.detach();
}

#[test]
fn a_stopped_workers_queue_is_answered_by_others() {
    let Some(nginx) = Nginx::start(4) else { return };
    nginx.attach();
    let stopped = nginx.workers()[1];
    signal(stopped, Signal::STOP);
    let clients = Clients::start(address(), "/", 8);
    std::thread::sleep(Duration::from_secs(1));
    let (answers, failures) = clients.stop();
    assert!(
        failures.is_empty() && answers > 50,
        "{answers}: {failures:?}"
    );
    let rescued: u64 = nginx.group()["slots"]
        .as_array()
        .expect("slots")
        .iter()
        .filter_map(|slot| slot["rescued"].as_u64())
        .sum();
    assert!(rescued > 0, "its queue was moved");
    signal(stopped, Signal::CONT);
    eventually("it gets connections again", || {
        drop(support::get(address(), "/"));
        let group = nginx.group();
        let slots = group["slots"].as_array().expect("slots").clone();
        slots
            .iter()
            .any(|slot| slot["pid"] == stopped && slot["state"] == "up")
    });
    nginx.detach();
}

#[test]
fn what_cannot_be_steered_is_told_with_the_way_out() {
    let Some(nginx) = Nginx::start(2) else { return };
    let mut shared = Command::new("python3")
        .args([&support::server("prefork.py"), "accept", "7301", "2"])
        .process_group(0)
        .spawn()
        .expect("python3");
    eventually("it listens", || {
        TcpStream::connect(("127.0.0.1", 7301)).is_ok()
    });
    let (code, text) = nginx.wakeone(&["attach", ":7301"]);
    let group = rustix::process::Pid::from_child(&shared);
    rustix::process::kill_process_group(group, Signal::KILL).expect("kill");
    shared.wait().expect("wait");
    assert!(
        code == 1
            && text.contains("one socket (shared-accept")
            && text.contains("wakeone run -w N"),
        "{text}"
    );
    assert_eq!(text.trim().lines().count(), 1, "{text}");

    // Steered already: by us, under another runtime folder.
    nginx.attach();
    let other = tempfile::tempdir().expect("folder");
    let output = Command::new(WAKEONE)
        .args(["attach", &format!(":{PORT}"), "--runtime-dir"])
        .arg(other.path().join("run"))
        .output()
        .expect("wakeone");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("another program chooses"), "{text}");
    nginx.detach();
    let (code, text) = nginx.wakeone(&["attach", ":7999"]);
    assert!(
        code == 1 && text.contains("nothing listens on :7999"),
        "{text}"
    );
}

#[test]
fn a_service_keeps_a_server_steered_across_its_restart() {
    let Some(mut nginx) = Nginx::start(3) else {
        return;
    };
    let config = nginx.folder.path().join("agent.toml");
    let write = |policy: &str| {
        let text = format!("[[target]]\nlisten = ':{PORT}'\npolicy = '{policy}'\n");
        std::fs::write(&config, text).expect("configuration");
    };
    write("round-robin");
    let mut agent = Command::new(WAKEONE)
        .args(["agent", "--config"])
        .arg(&config)
        .arg("--runtime-dir")
        .arg(nginx.runtime())
        .stderr(Stdio::null())
        .spawn()
        .expect("agent");
    let steered = |nginx: &Nginx, policy: &str| {
        let group = nginx.group();
        group["policy"] == policy
            && group["agent"] == true
            && nginx.active().len() == 3
            && !group["supervisor_pid"].is_null()
    };
    eventually("it is steered", || steered(&nginx, "round-robin"));
    write("least-connections");
    signal(agent.id(), Signal::HUP);
    eventually("the new policy is in force", || {
        steered(&nginx, "least-connections")
    });

    // A file that is no configuration changes nothing.
    std::fs::write(&config, "rubbish").expect("configuration");
    signal(agent.id(), Signal::HUP);
    std::thread::sleep(Duration::from_millis(200));
    assert!(steered(&nginx, "least-connections"));
    write("least-connections");

    let before: Vec<u32> = nginx.workers();
    signal(nginx.master.id(), Signal::TERM);
    nginx.master.wait().expect("wait");
    eventually("nothing is steered", || nginx.group().is_null());
    nginx.master = master(nginx.folder.path());
    eventually("it is steered again", || {
        !nginx.group().is_null() && steered(&nginx, "least-connections")
    });
    assert!(nginx.workers().iter().all(|pid| !before.contains(pid)));
    signal(agent.id(), Signal::TERM);
    assert_eq!(agent.wait().expect("wait").code(), Some(0));
    assert!(!nginx.runtime().exists(), "something is left of the group");
}
