//! A real nginx with a socket for each worker, in a network namespace of the test's thread.

use super::{WAKEONE, eventually, is_root, patience, runs, signal};
use rustix::process::Signal;
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

pub const PORT: u16 = 7300;

pub fn address() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], PORT))
}

/// An nginx with `reuseport`, in a network namespace of this test's thread.
pub struct Nginx {
    pub folder: tempfile::TempDir,
    /// The started process: the master itself unless it is a daemon.
    child: Child,
    /// Its master.
    pub master: u32,
}

impl Nginx {
    /// Returns None if the test cannot run here.
    pub fn start(workers: usize) -> Option<Self> {
        Self::start_as(workers, "daemon off;")
    }

    /// One in the background: only such a one takes USR2.
    pub fn start_daemon(workers: usize) -> Option<Self> {
        Self::start_as(workers, "daemon on;")
    }

    fn start_as(workers: usize, daemon: &str) -> Option<Self> {
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
        configure(folder.path(), workers, daemon);
        let child = launch(folder.path());
        let nginx = Self {
            master: pid_in(&folder.path().join("pid")),
            folder,
            child,
        };
        nginx.settled(workers);
        // The connections of the questions above are closed as well.
        eventually("nothing is open", || {
            use wakeone_kernel::socket::diag::{Which, sockets};
            let open = sockets(wakeone_model::listener::Protocol::Tcp, Which::Open, PORT);
            open.expect("sock_diag").is_empty()
        });
        Some(nginx)
    }

    pub fn runtime(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    pub fn reload(&self, workers: usize) {
        configure(self.folder.path(), workers, "daemon off;");
        signal(self.master, Signal::HUP);
        self.settled(workers);
    }

    /// Ends it, and waits for that.
    pub fn end(&mut self) {
        signal(self.master, Signal::TERM);
        self.child.wait().expect("wait");
    }

    /// After [`Nginx::end`].
    pub fn begin(&mut self) {
        self.child = launch(self.folder.path());
        self.master = pid_in(&self.folder.path().join("pid"));
    }

    /// Waits until exactly that many workers run, and none of them is shutting down.
    pub fn settled(&self, workers: usize) {
        super::slowly("nginx has its workers", || self.workers().len() == workers);
    }

    pub fn workers(&self) -> Vec<u32> {
        wakeone_kernel::proc::process::children(self.master)
            .into_iter()
            .filter(|pid| runs(*pid))
            .collect()
    }

    /// Which process holds which listener, under which number: this must be the same before and after. (The channels
    /// between nginx's workers appear at any time.)
    pub fn listeners(&self) -> Vec<(u32, Vec<(i32, u64)>)> {
        use wakeone_kernel::socket::diag::{Which, sockets};
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
            let mut held = wakeone_kernel::proc::process::sockets_of(pid).expect("sockets");
            held.retain(|(_, inode)| inodes.contains(inode));
            held.sort_unstable();
            (pid, held)
        };
        let mut pids = self.workers();
        pids.push(self.master);
        pids.sort_unstable();
        pids.into_iter().map(held).collect()
    }

    pub fn wakeone(&self, arguments: &[&str]) -> (i32, String) {
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

    pub fn attach(&self) {
        let (code, text) = self.wakeone(&["attach", &format!(":{PORT}"), "--rescue"]);
        assert_eq!(code, 0, "{text}");
    }

    pub fn detach(&self) {
        let (code, text) = self.wakeone(&["detach", &format!(":{PORT}")]);
        assert_eq!(code, 0, "{text}");
        assert!(!self.runtime().exists(), "something is left of the group");
    }

    pub fn group(&self) -> Value {
        let (code, text) = self.wakeone(&["status", "--json"]);
        assert_eq!(code, 0, "{text}");
        let status: Value = serde_json::from_str(&text).expect("JSON");
        status["groups"][0].clone()
    }

    /// Open connections of each slot that has a worker.
    pub fn active(&self) -> Vec<i64> {
        let group = self.group();
        let slots = group["slots"].as_array().expect("slots");
        let up = slots.iter().filter(|slot| slot["state"] != "down");
        up.map(|slot| slot["active"].as_i64().expect("active"))
            .collect()
    }

    /// Starts `wakeone agent` with a configuration.
    pub fn start_agent(&self, config: &std::path::Path) -> Child {
        Command::new(WAKEONE)
            .args(["agent", "--config"])
            .arg(config)
            .arg("--runtime-dir")
            .arg(self.runtime())
            .stderr(Stdio::null())
            .spawn()
            .expect("agent")
    }

    pub fn agent(&self) -> u32 {
        self.group()["supervisor_pid"].as_u64().expect("an agent") as u32
    }
}

/// The number in a pid file, once it is there.
pub fn pid_in(file: &std::path::Path) -> u32 {
    let mut pid = None;
    super::slowly("there is a pid file", || {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        pid = text.trim().parse().ok();
        pid.is_some()
    });
    pid.expect("a pid")
}

/// Starts nginx in a folder, and waits until it listens.
fn launch(folder: &std::path::Path) -> Child {
    // It starts itself again by the name that it was started with, without a search in PATH.
    let path = std::env::var_os("PATH").unwrap_or_default();
    let program = std::env::split_paths(&path)
        .map(|folder| folder.join("nginx"))
        .find(|program| program.exists())
        .expect("nginx");
    let master = Command::new(program)
        .arg("-c")
        .arg(folder.join("nginx.conf"))
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .expect("nginx");
    super::slowly("nginx listens", || TcpStream::connect(address()).is_ok());
    master
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let _ = self.wakeone(&["detach", "--all"]);
        // The launcher's group, and a daemon's own.
        for leader in [self.child.id(), self.master] {
            // After a binary upgrade the new master is still in the old one's group.
            let pid = rustix::process::Pid::from_raw(leader as i32);
            if let Ok(group) = rustix::process::getpgid(pid) {
                let _ = rustix::process::kill_process_group(group, Signal::KILL);
            }
        }
        let _ = self.child.wait();
    }
}

fn configure(folder: &std::path::Path, workers: usize, daemon: &str) {
    let here = folder.display();
    let text = format!(
        "{daemon} user root; worker_processes {workers}; pid {here}/pid; error_log {here}/log;
         events {{ worker_connections 512; }}
         http {{ access_log off; keepalive_timeout 300s; client_body_temp_path {here}/b; proxy_temp_path {here}/p;
                fastcgi_temp_path {here}/f; uwsgi_temp_path {here}/u; scgi_temp_path {here}/s;
                server {{ listen 127.0.0.1:{PORT} reuseport; add_header X-Worker $pid; location / {{ return 200 ok; }} }} }}"
    );
    std::fs::write(folder.join("nginx.conf"), text).expect("configuration");
}

/// A connection that stays open after its first answer.
pub fn held() -> TcpStream {
    let mut stream = TcpStream::connect(address()).expect("connect");
    stream.set_read_timeout(Some(patience())).expect("timeout");
    stream
        .write_all(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
        .expect("ask");
    stream.read_exact(&mut [0; 12]).expect("answer");
    stream
}
