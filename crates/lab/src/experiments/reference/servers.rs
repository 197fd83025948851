//! nginx and ours, serving the same directory with the same number of workers.

use std::net::SocketAddr;
use std::process::Command;

use crate::answers::Answers;
use crate::experiment::Sample;
use crate::process::{cpu_ns, leaves};
use crate::scratch::Scratch;
use crate::server::{Server, free_address};
use crate::{Error, nginx, probe, ways};

/// The file that all of them serve.
pub const FILE: &str = "page.html";
/// Its size.
pub const FILE_BYTES: usize = 1024;

/// A server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// nginx as it is: its workers share a listener in their epoll instances.
    Nginx,
    /// nginx with a listener for each worker.
    NginxReuseport,
    /// Ours; its workers share a listener likewise.
    EpollPrefork,
    /// Ours, with a listener for each worker, and the program that chooses.
    Dispatched,
}

/// All of them.
pub const ALL: [Kind; 4] = [
    Kind::Nginx,
    Kind::NginxReuseport,
    Kind::EpollPrefork,
    Kind::Dispatched,
];
/// Ours.
pub const OURS: [Kind; 2] = [Kind::EpollPrefork, Kind::Dispatched];
/// Those that ours are compared with.
pub const THEIRS: [Kind; 2] = [Kind::Nginx, Kind::NginxReuseport];

impl Kind {
    /// Last part of the variants' names.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Nginx => "nginx",
            Kind::NginxReuseport => "nginx-reuseport",
            Kind::EpollPrefork => "epoll-prefork",
            Kind::Dispatched => "dispatched",
        }
    }

    /// Why it cannot be measured here.
    pub fn lacks(self) -> Option<String> {
        match self {
            Kind::Nginx | Kind::NginxReuseport => nginx::program().err(),
            Kind::EpollPrefork => None,
            Kind::Dispatched => {
                let missing = wakeone_kernel::capability::missing();
                (!missing.is_empty()).then(|| format!("it needs {}", missing.join(", ")))
            }
        }
    }
}

/// A running server and the directory that it serves. Dropping it ends it and removes the directory.
pub struct Running {
    kind: Kind,
    server: Server,
    /// Where it listens.
    pub address: SocketAddr,
    /// Its books and its clients'.
    pub answers: Answers,
    /// Dropped after the server that uses it.
    _scratch: Scratch,
}

impl Running {
    /// Starts a server, and sees that it answers with the file.
    ///
    /// # Errors
    /// When it does not.
    pub fn start(kind: Kind, workers: usize) -> Result<Self, Error> {
        let scratch = Scratch::new("static")?;
        let content = page();
        scratch.write(FILE, &content)?;
        let address = free_address()?;
        let mut answers = Answers::new()?;
        let server = match kind {
            Kind::Nginx => theirs(&scratch, address, workers, "")?,
            Kind::NginxReuseport => theirs(&scratch, address, workers, "reuseport")?,
            Kind::EpollPrefork => ours(kind, "listening on", &scratch, address, workers, &answers)?,
            Kind::Dispatched => ours(kind, "ready:", &scratch, address, workers, &answers)?,
        };
        answers.client_counted(1, 0); // for the file, just below
        let running = Self {
            kind,
            server,
            address,
            answers,
            _scratch: scratch,
        };
        let answer = probe::body(address, &format!("/{FILE}"))?;
        if answer != content {
            return Err(Error::Server(format!(
                "{} answers with {} bytes that are not the file; nothing can be compared",
                kind.name(),
                answer.len()
            )));
        }
        Ok(running)
    }

    /// CPU time of all its processes so far, in ns.
    pub fn cpu_ns(&self) -> u64 {
        let root = self.server.pid();
        let below = leaves(root).into_iter().filter(|pid| *pid != root);
        cpu_ns(root) + below.map(cpu_ns).sum::<u64>()
    }

    /// Stops it in order and closes the books; the counts go into the sample.
    ///
    /// # Errors
    /// When it does not end well, or the counts contradict each other.
    pub fn stop(self, sample: &mut Sample) -> Result<(), Error> {
        let what = format!("the server {}", self.kind.name());
        if THEIRS.contains(&self.kind) {
            let made = nginx::requests(self.address)?;
            self.server.stop()?;
            self.answers.close_with(made, &what, sample)
        } else {
            self.server.stop()?;
            self.answers.close(&what, sample)
        }
    }
}

/// Text of the wanted length.
fn page() -> String {
    let line = "<p>A small static page, always the same.</p>\n";
    line.chars().cycle().take(FILE_BYTES).collect()
}

fn ours(
    kind: Kind,
    ready: &str,
    scratch: &Scratch,
    address: SocketAddr,
    workers: usize,
    answers: &Answers,
) -> Result<Server, Error> {
    let model = kind.name();
    let executable = crate::process::own_program()?;
    let mut command = Command::new(executable);
    command
        .args(["serve", "--model", model, "--backlog", ways::BACKLOG, "-w"])
        .arg(workers.to_string())
        .arg("-l")
        .arg(address.to_string())
        .arg("--files")
        .arg(scratch.path())
        .args(answers.arguments());
    Server::start(&format!("the {model} server"), &mut command, ready)
}

/// nginx as its packages ship it, without an end to a connection after a thousand requests.
fn theirs(
    scratch: &Scratch,
    address: SocketAddr,
    workers: usize,
    listen: &str,
) -> Result<Server, Error> {
    let setup = nginx::Setup {
        workers,
        listen,
        http: "sendfile on; tcp_nopush on; keepalive_requests 1000000000; types { text/html html; }",
        server: &format!("root {};", scratch.path().display()),
        ..nginx::Setup::default()
    };
    setup.start(scratch, address)
}
