//! Servers under test: child processes that are there when asked for, and gone afterwards on every way out.

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use std::io::{BufRead, BufReader, PipeReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::error::Error;

/// How long a server may take to become ready.
const READY: Duration = Duration::from_secs(60);
/// How long a server may take to stop after SIGTERM.
const STOP: Duration = Duration::from_secs(15);

/// A running server in a process group of its own. Dropping it stops it: SIGTERM, then SIGKILL to the whole group.
#[derive(Debug)]
pub struct Server {
    child: Child,
    what: String,
    lines: Receiver<String>,
    seen: Vec<String>,
    ends_within: Duration,
    stopped: bool,
}

impl Server {
    /// Starts a command and waits for a line of its output, on stdout or stderr, that begins with `ready`.
    ///
    /// # Errors
    /// When it cannot be started, ends, or is not ready in time. The error has its last lines.
    pub fn start(what: &str, command: &mut Command, ready: &str) -> Result<Self, Error> {
        let failed = |e: std::io::Error| Error::Server(format!("starting {what} failed: {e}"));
        let (words, mouth) = std::io::pipe().map_err(failed)?;
        let child = command
            .stdin(Stdio::null())
            .stdout(mouth.try_clone().map_err(failed)?)
            .stderr(mouth)
            // Ctrl-C on the terminal is for us; the server is stopped in order by its guard.
            .process_group(0)
            .spawn()
            .map_err(failed);
        // The command keeps our ends of the pipe: without them the reader sees the server's end.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut server = Self {
            child: child?,
            what: what.into(),
            lines: listen(words),
            seen: Vec::new(),
            ends_within: STOP,
            stopped: false,
        };
        server.wait_ready(ready)?;
        Ok(server)
    }

    fn wait_ready(&mut self, ready: &str) -> Result<(), Error> {
        let deadline = Instant::now() + READY;
        loop {
            match self
                .lines
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                Ok(line) => {
                    let found = line.starts_with(ready);
                    self.seen.push(line);
                    if found {
                        return Ok(());
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    let words = self.last_words();
                    return Err(Error::Server(format!(
                        "{} was not ready within {} s{words}",
                        self.what,
                        READY.as_secs()
                    )));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let words = self.last_words();
                    return Err(Error::Server(format!(
                        "{} ended before it was ready{words}",
                        self.what
                    )));
                }
            }
        }
    }

    /// The server's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// All lines that it has printed so far.
    pub fn said(&mut self) -> &[String] {
        self.seen.extend(self.lines.try_iter());
        &self.seen
    }

    /// Sends a signal to the server's first process.
    ///
    /// # Errors
    /// When it is gone.
    pub fn signal(&self, signal: Signal) -> Result<(), Error> {
        kill(Pid::from_raw(self.child.id() as i32), signal)
            .map_err(|e| Error::Server(format!("sending {signal} to {} failed: {e}", self.what)))
    }

    /// Waits until it has printed a line with `part` in it for the `count`th time.
    ///
    /// # Errors
    /// When it does not print it in time.
    pub fn wait_said(&mut self, part: &str, count: usize, within: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + within;
        while self.said().iter().filter(|l| l.contains(part)).count() < count {
            self.still_runs()?;
            if Instant::now() >= deadline {
                let words = self.last_words();
                return Err(Error::Server(format!(
                    "{} did not say {part:?} in time{words}",
                    self.what
                )));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Returns an error once it has ended by itself.
    ///
    /// # Errors
    /// It has ended.
    pub fn still_runs(&mut self) -> Result<(), Error> {
        match self.child.try_wait() {
            Ok(Some(status)) => {
                let words = self.last_words();
                let what = &self.what;
                Err(Error::Server(format!("{what} ended with {status}{words}")))
            }
            _ => Ok(()),
        }
    }

    fn last_words(&mut self) -> String {
        self.said();
        match self.seen.last() {
            Some(line) => format!("; it said: {line}"),
            None => "; it said nothing".into(),
        }
    }

    /// SIGTERM, and waits for the end.
    ///
    /// # Errors
    /// When it does not end in time (it is killed then) or not with status 0.
    pub fn stop(mut self) -> Result<(), Error> {
        self.end()
    }

    /// The same of one that another will stand for.
    ///
    /// # Errors
    /// As those of [`Server::stop`].
    pub fn end(&mut self) -> Result<(), Error> {
        let status = self.terminate();
        let words = self.last_words();
        match status {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(Error::Server(format!(
                "{} ended with {status} at SIGTERM{words}",
                self.what
            ))),
            None => Err(Error::Server(format!(
                "{} did not end within {} s of SIGTERM and was killed{words}",
                self.what,
                self.ends_within.as_secs()
            ))),
        }
    }

    /// The same server, which may take this much longer to end.
    pub fn ends_later(mut self, by: Duration) -> Self {
        self.ends_within += by;
        self
    }

    /// Ends it by SIGTERM, and by SIGKILL if it must; None when it had to be killed.
    fn terminate(&mut self) -> Option<ExitStatus> {
        self.stopped = true;
        let pid = Pid::from_raw(self.child.id() as i32);
        let _ = kill(pid, Signal::SIGTERM);
        let deadline = Instant::now() + self.ends_within;
        while Instant::now() < deadline {
            if let Ok(Some(status)) = self.child.try_wait() {
                // Workers that outlived their parent would answer the next variant's requests.
                let _ = killpg(pid, Signal::SIGKILL);
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = killpg(pid, Signal::SIGKILL);
        let _ = self.child.wait();
        None
    }
}

/// Starts a thread that reads a server's output to its end, so that a talkative server never blocks on a full pipe.
fn listen(words: PipeReader) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(words).lines().map_while(Result::ok) {
            // The receiver is gone once the server is dropped; the pipe is drained all the same.
            let _ = sender.send(line);
        }
    });
    receiver
}

impl Drop for Server {
    fn drop(&mut self) {
        if !self.stopped {
            self.terminate();
        }
    }
}

/// An address on 127.0.0.1 that nobody listened on a moment ago.
///
/// # Errors
/// When the system has no port left.
pub fn free_address() -> Result<SocketAddr, Error> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .and_then(|l| l.local_addr())
        .map_err(|e| Error::Server(format!("finding a free port on 127.0.0.1 failed: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn alive(pid: u32) -> bool {
        kill(Pid::from_raw(pid as i32), None).is_ok()
    }

    #[test]
    fn ready_stop_and_gone() {
        let script = "trap 'exit 0' TERM; echo warming up >&2; echo ready: yes >&2; while :; do sleep 0.01; done";
        let mut server = Server::start("a shell", &mut shell(script), "ready:").unwrap();
        assert_eq!(server.said(), ["warming up", "ready: yes"]);
        let pid = server.pid();
        server.stop().unwrap();
        assert!(!alive(pid));
    }

    #[test]
    fn the_reason_of_an_early_end_is_told() {
        let error = Server::start(
            "a shell",
            &mut shell("echo no such port >&2; exit 1"),
            "ready:",
        )
        .unwrap_err();
        assert_eq!(
            error.to_string(),
            "a shell ended before it was ready; it said: no such port"
        );
    }

    #[test]
    fn dropping_takes_the_whole_group() {
        let script = "trap 'exit 0' TERM; sleep 300 & echo child $! >&2; echo ready: >&2; wait";
        let mut server = Server::start("a shell", &mut shell(script), "ready:").unwrap();
        let grandchild: u32 = server.said()[0]
            .trim_start_matches("child ")
            .parse()
            .unwrap();
        assert!(alive(grandchild));
        drop(server);
        // An orphan is reaped by init a moment later.
        let deadline = Instant::now() + Duration::from_secs(5);
        while alive(grandchild) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(!alive(grandchild));
    }

    #[test]
    fn a_bad_end_is_an_error() {
        let script =
            "trap 'echo broken >&2; exit 3' TERM; echo ready: >&2; while :; do sleep 0.01; done";
        let server = Server::start("a shell", &mut shell(script), "ready:").unwrap();
        let message = server.stop().unwrap_err().to_string();
        assert!(message.contains("exit status: 3"), "{message}");
    }
}
