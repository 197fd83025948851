//! A Redis server of the test's own.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A running Redis server; killed when dropped.
pub struct Redis {
    child: Child,
    pub url: String,
    _directory: tempfile::TempDir,
}

impl Redis {
    /// Starts one on a port that was free. Returns `None`, and prints that, if no redis-server is installed.
    pub fn start() -> Option<Self> {
        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .and_then(|socket| socket.local_addr())
            .expect("a port")
            .port();
        let directory = tempfile::tempdir().expect("a directory");
        let child = Command::new("redis-server")
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
            .args(["--save", "", "--appendonly", "no", "--dir"])
            .arg(directory.path())
            .stdout(Stdio::null())
            .spawn();
        let child = match child {
            Ok(child) => child,
            Err(error) => {
                eprintln!(
                    "not run: redis-server does not start ({error}); apt-get install redis-server"
                );
                return None;
            }
        };
        let new = Self {
            child,
            url: format!("redis://127.0.0.1:{port}"),
            _directory: directory,
        };
        let end = Instant::now() + Duration::from_secs(10);
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < end, "redis-server does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        Some(new)
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).expect("it can be signalled");
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
