//! A server of ours as a child process, and a client that speaks raw bytes.
#![allow(dead_code)] // each test file uses its part

pub mod redis;
pub mod ways;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Longer than anything here takes: a test that waits this long has failed.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// The command that has the server.
pub fn program() -> std::path::PathBuf {
    assert_cmd::cargo::cargo_bin("wakeone-lab")
}

/// A running server; killed when dropped.
pub struct Server {
    pub child: Child,
    pub address: SocketAddr,
    pub ready_line: String,
    stderr: BufReader<std::process::ChildStderr>,
}

impl Server {
    /// Starts `wakeone-lab serve` with these arguments on a port of its own.
    pub fn start(arguments: &[&str]) -> Self {
        let mut command = Command::new(program());
        command
            .args(["serve", "-l", "127.0.0.1:0"])
            .args(arguments)
            .env_remove("WAKEONE_SLOT")
            // The guest book of this test binary, not that of the user.
            .env("XDG_STATE_HOME", env!("CARGO_TARGET_TMPDIR"));
        Self::spawn(&mut command)
    }

    /// Starts a command that prints where it listens.
    pub fn spawn(command: &mut Command) -> Self {
        let mut child = command
            .stderr(Stdio::piped())
            .spawn()
            .expect("the server starts");
        let mut stderr = BufReader::new(child.stderr.take().expect("stderr is piped"));
        let mut line = String::new();
        stderr.read_line(&mut line).expect("stderr can be read");
        let address = line
            .strip_prefix("listening on ")
            .and_then(|rest| rest.split(' ').next())
            .and_then(|address| address.parse().ok());
        let Some(address) = address else {
            let _ = child.kill();
            panic!("not ready: {line}");
        };
        Self {
            child,
            address,
            ready_line: line.trim().to_owned(),
            stderr,
        }
    }

    pub fn connect(&self) -> Client {
        Client::connect(self.address)
    }

    /// Sends a request on a connection of its own.
    pub fn get(&self, path: &str) -> Response {
        let mut client = self.connect();
        client.send(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes());
        let response = client.response();
        client.expect_end();
        response
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).expect("the server can be signalled");
    }

    /// Waits for the next line on the server's standard error.
    pub fn next_line(&mut self) -> String {
        let mut line = String::new();
        self.stderr
            .read_line(&mut line)
            .expect("stderr can be read");
        line
    }

    /// Waits for the end; returns the exit status and the rest of the output.
    pub fn wait(&mut self) -> (ExitStatus, String) {
        let status = wait_for(&mut self.child);
        let mut said = String::new();
        let _ = self.stderr.read_to_string(&mut said);
        (status, said)
    }

    /// Stops it as a supervisor does and checks that it ends well.
    pub fn stop(mut self) {
        self.signal(Signal::SIGTERM);
        let (status, said) = self.wait();
        assert!(status.success(), "{status}: {said}");
        assert_eq!(said, "");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill(); // workers follow their master
            let _ = self.child.wait();
        }
    }
}

pub fn wait_for(child: &mut Child) -> ExitStatus {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            return status;
        }
        assert!(Instant::now() < end, "the process does not end");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// An answer as it was received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    pub status: u16,
    pub headers: BTreeMap<String, String>,
    pub body: Vec<u8>,
}

impl Response {
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }

    pub fn worker(&self) -> &str {
        self.header("x-worker")
    }

    pub fn pid(&self) -> &str {
        self.header("x-pid")
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// One connection.
pub struct Client {
    pub stream: TcpStream,
    reader: BufReader<TcpStream>,
}

impl Client {
    pub fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("the server is reached");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream.set_nodelay(true).expect("no delay");
        let reader = BufReader::new(stream.try_clone().expect("a copy"));
        Self { stream, reader }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("the server reads");
    }

    pub fn response(&mut self) -> Response {
        self.response_to("GET")
    }

    pub fn response_to(&mut self, method: &str) -> Response {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            self.reader.read_exact(&mut byte).unwrap_or_else(|error| {
                panic!("{error} after {:?}", String::from_utf8_lossy(&head))
            });
            head.push(byte[0]);
        }
        let head = String::from_utf8(head).expect("a head is text");
        let mut lines = head.lines();
        let status = lines
            .next()
            .and_then(|line| line.strip_prefix("HTTP/1.1 "))
            .and_then(|line| line.get(..3))
            .and_then(|code| code.parse().ok())
            .unwrap_or_else(|| panic!("no status line: {head}"));
        let headers: BTreeMap<_, _> = lines
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        let length = match method {
            "HEAD" => 0,
            _ => headers
                .get("content-length")
                .map_or(0, |length| length.parse().expect("a length")),
        };
        let mut body = vec![0; length];
        self.reader.read_exact(&mut body).expect("a whole body");
        Response {
            status,
            headers,
            body,
        }
    }

    /// Checks that the server closes, and sends nothing more.
    pub fn expect_end(&mut self) {
        let mut rest = Vec::new();
        self.reader
            .read_to_end(&mut rest)
            .expect("a close, not a reset");
        assert_eq!(rest, b"", "nothing after the last answer");
    }
}
