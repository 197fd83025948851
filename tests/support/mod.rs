//! Code that the end-to-end tests share: a `wakeone run` whose log lines can be waited for, requests, and cleaning up.

// Each test program uses its own part of this.
#![allow(dead_code, unused_imports)]

pub mod from;
pub mod kept;
pub mod nginx;
pub mod patience;
pub mod real;
pub mod sessions;
pub mod split;
pub mod steered;

#[allow(unused_imports)] // as above
pub use patience::{long_patience, patience, slowness};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use wakeone_lab::cpus;

/// The binary under test.
pub const WAKEONE: &str = env!("CARGO_BIN_EXE_wakeone");
/// The program beside it, which has the reference server. `cargo test --workspace` builds it; for one package alone,
/// `cargo build --package wakeone-lab-cli` does.
pub const LAB: &str = concat!(env!("CARGO_BIN_EXE_wakeone"), "-lab");

/// A server of this folder.
pub fn server(name: &str) -> String {
    format!("{}/../../tests/servers/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Returns the path of a program that the laboratory starts servers with.
pub fn app(name: &str) -> String {
    format!("{}/../lab/src/apps/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Copies a program that a test then starts.
///
/// `cp` has it open for writing, not this process: a child that another thread starts meanwhile would keep it open until
/// its exec, and the program could not be started (ETXTBSY).
pub fn copy_program(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    let mut copy = Command::new("cp");
    copy.arg("-p").arg(from.as_ref()).arg(to.as_ref());
    assert!(copy.status().expect("cp").success(), "cp");
}

/// Whether the tests run as root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Repeats a check until it is true.
pub fn eventually(what: &str, holds: impl FnMut() -> bool) {
    within(patience(), what, holds);
}

/// Does the same where that may take seconds: a server starts, or drains.
pub fn slowly(what: &str, holds: impl FnMut() -> bool) {
    within(long_patience(), what, holds);
}

fn within(most: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < most, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whether a process runs; one that has ended and is not yet waited for does not.
pub fn runs(pid: u32) -> bool {
    let stat = wakeone_kernel::proc::stat::text(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ")
        .is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// Whether all threads of a process are stopped.
pub fn has_stopped(pid: u32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
    tasks.into_iter().flatten().flatten().all(|task| {
        let stat = wakeone_kernel::proc::stat::text(task.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ")
            .is_none_or(|(_, rest)| rest.starts_with('T'))
    })
}

/// Sends a signal to a process of the test.
pub fn signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid as i32).expect("pid");
    kill_process(pid, signal).expect("kill");
}

/// Stops a process, and returns when all of its threads are stopped: a running thread might accept another connection,
/// which would get no answer.
pub fn halt(pid: u32) {
    signal(pid, Signal::STOP);
    eventually("it has stopped", || has_stopped(pid));
}

/// A folder for groups' state. When it is dropped, it ends every worker that the state names.
pub struct Ground {
    dir: tempfile::TempDir,
}

impl Ground {
    pub fn new() -> Self {
        Self {
            dir: tempfile::tempdir().expect("folder"),
        }
    }

    /// A folder for the test's own files.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The runtime folder; it is there only while a group is.
    pub fn runtime(&self) -> PathBuf {
        self.path().join("run")
    }

    /// A `wakeone run` with these options and `-- command`.
    pub fn command(&self, options: &[&str], command: &[&str]) -> Command {
        let mut run = Command::new(WAKEONE);
        run.arg("run")
            .args(options)
            .arg("--runtime-dir")
            .arg(self.runtime())
            .arg("--")
            .args(command);
        run
    }

    /// Starts one.
    pub fn run(&self, options: &[&str], command: &[&str]) -> Run {
        Run::start(self.command(options, command))
    }

    /// Starts one whose workers are `whoami.py`.
    pub fn whoami(&self, options: &[&str]) -> Run {
        self.run(options, &["python3", &server("whoami.py")])
    }

    /// Runs one that must fail. Returns its exit code and its last line.
    pub fn refused(&self, options: &[&str], command: &[&str]) -> (i32, String) {
        let run = self.run(options, command);
        let (status, lines) = run.wait();
        (
            status.code().expect("exit code"),
            lines.last().cloned().unwrap_or_default(),
        )
    }

    /// Waits until the workers of a group that were replaced, or are to leave, have ended.
    pub fn nobody_retires(&self, group: &str) {
        let state = self.runtime().join(group).join("state.json");
        slowly("those that retire have ended", || {
            let state = std::fs::read_to_string(&state).expect("state");
            !state.contains("\"beside\"")
        });
    }

    /// The groups that have a folder.
    pub fn groups(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.runtime());
        entries
            .into_iter()
            .flatten()
            .map(|entry| entry.expect("entry").path())
            .collect()
    }

    fn workers(&self) -> Vec<u32> {
        let states = self
            .groups()
            .into_iter()
            .filter_map(|group| std::fs::read(group.join("state.json")).ok());
        let states = states.filter_map(|bytes| serde_json::from_slice::<Value>(&bytes).ok());
        let pids = states.flat_map(|state| state["slots"].as_array().cloned().unwrap_or_default());
        pids.filter_map(|slot| slot["worker"]["pid"].as_u64())
            .map(|pid| pid as u32)
            .collect()
    }
}

impl Drop for Ground {
    /// Workers outlive a supervisor that was killed, and an agent outlives its command; they do not outlive the test.
    fn drop(&mut self) {
        for pid in self.workers() {
            if let Some(pid) =
                Pid::from_raw(pid as i32).filter(|pid| test_kill_process(*pid).is_ok())
            {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        for group in self.groups() {
            let mut detach = Command::new(WAKEONE);
            detach.arg("detach").args(group.file_name());
            let _ = detach.arg("--runtime-dir").arg(self.runtime()).output();
        }
    }
}

/// A supervisor that runs.
pub struct Run {
    child: Child,
    lines: Arc<Mutex<Vec<String>>>,
    reader: Option<std::thread::JoinHandle<()>>,
    read: usize,
}

impl Run {
    pub fn start(command: Command) -> Self {
        Self::start_heard_until(command, None)
    }

    /// Starts one whose standard error is no longer read after a line that contains `last`.
    pub fn start_heard_until(mut command: Command, last: Option<&'static str>) -> Self {
        let mut child = command
            .stderr(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("wakeone starts");
        let lines = Arc::new(Mutex::new(Vec::new()));
        let (out, stderr) = (lines.clone(), child.stderr.take().expect("stderr"));
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let last = last.is_some_and(|last| line.contains(last));
                out.lock().expect("lines").push(line);
                if last {
                    return;
                }
            }
        });
        Self {
            child,
            lines,
            reader: Some(reader),
            read: 0,
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, which: Signal) {
        signal(self.pid(), which);
    }

    /// All lines so far.
    pub fn lines(&self) -> Vec<String> {
        self.lines.lock().expect("lines").clone()
    }

    /// Waits for a line that contains `text`, after the last one waited for.
    pub fn line(&mut self, text: &str) -> String {
        let start = Instant::now();
        loop {
            let over = self
                .reader
                .as_ref()
                .is_none_or(|reader| reader.is_finished());
            let lines = self.lines();
            if let Some(at) = lines[self.read..]
                .iter()
                .position(|line| line.contains(text))
            {
                self.read += at + 1;
                return lines[self.read - 1].clone();
            }
            assert!(
                !over && start.elapsed() < long_patience(),
                "no line with `{text}` after line {} of:\n{}",
                self.read,
                lines.join("\n")
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for `ready:`, and returns the address.
    pub fn ready(&mut self) -> SocketAddr {
        let mut line = self.line("ready: ");
        // In a slow machine it warns of workers that take long.
        while line.contains("not ready: ") {
            line = self.line("ready: ");
        }
        let address = line
            .split_once(" on ")
            .and_then(|(_, rest)| rest.split([' ', ',']).next())
            .expect("an address");
        address
            .parse()
            .unwrap_or_else(|_| panic!("no address in {line}"))
    }

    /// Waits for its end. Returns its status and all its lines. The pipe stays open as long as workers live.
    pub fn wait(mut self) -> (ExitStatus, Vec<String>) {
        let mut status = None;
        slowly("the supervisor ends", || {
            status = self.child.try_wait().expect("wait");
            status.is_some()
        });
        let reader = self.reader.take().expect("reader");
        slowly("the workers close our standard error", || {
            reader.is_finished()
        });
        (status.expect("status"), self.lines())
    }

    /// SIGTERM, and the end.
    pub fn stop(self) -> Vec<String> {
        self.signal(Signal::TERM);
        let (status, lines) = self.wait();
        assert_eq!(status.code(), Some(0), "{lines:?}");
        lines
    }

    /// kill -9.
    pub fn murder(mut self) {
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
    }
}

impl Drop for Run {
    /// Interrupts it until it has ended. The second signal does not wait for workers. With `--split`, later ones reach
    /// the processes that outlived the server's first one.
    fn drop(&mut self) {
        let runs = |child: &mut Child| child.try_wait().is_ok_and(|status| status.is_none());
        let start = Instant::now();
        while runs(&mut self.child) {
            if start.elapsed() > patience() {
                let _ = self.child.kill();
                break;
            }
            self.signal(Signal::INT);
            // Each must have been read before the next comes.
            let next = Instant::now() + Duration::from_millis(200);
            while runs(&mut self.child) && Instant::now() < next {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let _ = self.child.wait();
    }
}

/// One request on a connection of its own; the body.
pub fn get(address: SocketAddr, path: &str) -> std::io::Result<String> {
    ask(address, path)?.answer()
}

/// A request that a worker has accepted: the answer has begun.
pub struct Asked {
    stream: TcpStream,
    begun: [u8; 1],
}

/// Asks, and waits until the answer begins.
pub fn ask(address: SocketAddr, path: &str) -> std::io::Result<Asked> {
    ask_on(TcpStream::connect_timeout(&address, patience())?, path)
}

fn ask_on(mut stream: TcpStream, path: &str) -> std::io::Result<Asked> {
    stream.set_read_timeout(Some(patience()))?;
    stream.write_all(
        format!("GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n").as_bytes(),
    )?;
    let mut begun = [0];
    stream.read_exact(&mut begun)?;
    Ok(Asked { stream, begun })
}

impl Asked {
    /// The body, to its last byte.
    pub fn answer(mut self) -> std::io::Result<String> {
        let mut answer = self.begun.to_vec();
        self.stream.read_to_end(&mut answer)?;
        let answer = String::from_utf8_lossy(&answer);
        let head_and_body = answer
            .split_once("\r\n\r\n")
            .filter(|(head, _)| head.starts_with("HTTP/1.1 200"));
        let whole = |(head, body): &(&str, &str)| {
            let length = format!("Content-Length: {}", body.len());
            head.lines().any(|line| line.eq_ignore_ascii_case(&length))
        };
        match head_and_body.filter(whole) {
            Some((_, body)) => Ok(body.to_owned()),
            None => Err(std::io::Error::other(format!(
                "no whole answer: {answer:?}"
            ))),
        }
    }
}

/// Returns the description that the worker of the next connection gives of itself.
pub fn whoami(address: SocketAddr) -> Value {
    serde_json::from_str(&get(address, "/").expect("an answer")).expect("JSON")
}

/// The same for a client that is a host of 127.0.0.0/8.
pub fn whoami_from(host: Ipv4Addr, address: SocketAddr) -> Value {
    let stream = from::connect_from((host, 0).into(), address);
    let answer = ask_on(stream, "/").and_then(Asked::answer);
    serde_json::from_str(&answer.expect("an answer")).expect("JSON")
}

/// Returns the description of each of `count` workers, by slot. Asks until all have answered, from each CPU in turn: a
/// program may choose by CPU.
pub fn everyone(address: SocketAddr, count: usize) -> Vec<Value> {
    let mut seen = vec![Value::Null; count];
    let mut cpus = cpus::mine().expect("CPUs").into_iter().cycle();
    let ask = || {
        slowly("every worker answers", || {
            cpus::pin(cpus.next().expect("a CPU")).expect("affinity");
            let me = whoami(address);
            let slot = me["slot"].as_u64().expect("slot") as usize;
            seen[slot] = me;
            seen.iter().all(|worker| !worker.is_null())
        })
    };
    // A thread of its own, so that the test's may go on to run anywhere.
    let asked = std::thread::scope(|scope| scope.spawn(ask).join());
    asked.unwrap_or_else(|why| std::panic::resume_unwind(why));
    seen
}

/// Returns the pid in a worker's description.
pub fn pid_of(worker: &Value) -> u32 {
    worker["pid"].as_u64().expect("pid") as u32
}

/// Clients that send one request after the other until told to stop. They count answers, and failures with their
/// reason.
pub struct Clients {
    stop: Arc<AtomicBool>,
    answers: Arc<AtomicU64>,
    threads: Vec<std::thread::JoinHandle<Vec<String>>>,
}

impl Clients {
    pub fn start(address: SocketAddr, path: &'static str, count: usize) -> Self {
        let (stop, answers) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU64::new(0)),
        );
        let client = |stop: Arc<AtomicBool>, answers: Arc<AtomicU64>| {
            move || {
                let mut failures = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    match get(address, path) {
                        Ok(_) => drop(answers.fetch_add(1, Ordering::Relaxed)),
                        Err(error) => failures.push(error.to_string()),
                    }
                }
                failures
            }
        };
        let threads = (0..count)
            .map(|_| std::thread::spawn(client(stop.clone(), answers.clone())))
            .collect();
        Self {
            stop,
            answers,
            threads,
        }
    }

    pub fn stop(self) -> (u64, Vec<String>) {
        self.stop.store(true, Ordering::Relaxed);
        let failures = self
            .threads
            .into_iter()
            .flat_map(|thread| thread.join().expect("client"))
            .collect();
        (self.answers.load(Ordering::Relaxed), failures)
    }

    /// Ends them, and checks that there were answers and no failures.
    #[track_caller]
    pub fn lost_nothing(self) {
        let (answers, failures) = self.stop();
        assert!(answers > 0);
        assert_eq!(failures, Vec::<String>::new());
    }
}
