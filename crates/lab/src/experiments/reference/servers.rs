//! nginx and our own server, which serve the same directory with the same number of workers.

use crate::error::Error;
use crate::launch::Launch;
use crate::under_test::ServerUnderTest;
use crate::{nginx, probe, steered};

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
    /// Our server; its workers share a listener likewise.
    EpollPrefork,
    /// Our server, with a listener for each worker, and the program that chooses.
    Dispatched,
}

/// All of them.
pub const ALL: [Kind; 4] = [
    Kind::Nginx,
    Kind::NginxReuseport,
    Kind::EpollPrefork,
    Kind::Dispatched,
];
/// Our own servers.
pub const OURS: [Kind; 2] = [Kind::EpollPrefork, Kind::Dispatched];
/// The servers that ours are compared with.
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

    /// The reason why it cannot be measured here.
    pub fn lacks(self) -> Option<String> {
        match self {
            Kind::Nginx | Kind::NginxReuseport => nginx::program().err(),
            Kind::EpollPrefork => None,
            Kind::Dispatched => steered::lacks(),
        }
    }
}

impl Kind {
    /// Starts the server, and sees that it answers with the file.
    ///
    /// # Errors
    /// When it does not.
    pub fn start(self, workers: usize) -> Result<ServerUnderTest, Error> {
        let (what, content) = (format!("the server {}", self.name()), page());
        let mut launch = match self {
            Kind::Nginx => as_shipped(workers, "").launch(what),
            Kind::NginxReuseport => as_shipped(workers, "reuseport").launch(what),
            Kind::EpollPrefork | Kind::Dispatched => {
                let (model, rest) = (self.name(), "-l {address} --files {dir}");
                Launch::ours(
                    what,
                    format!(
                        "wakeone serve --model {model} --backlog {{backlog}} -w {workers} {rest}"
                    ),
                )
            }
        };
        launch.files.push((FILE, content.clone()));
        let mut server = ServerUnderTest::start(launch)?;
        server.answers.client_counted(1, 0); // for the file, just below
        let answer = probe::body(server.address, &format!("/{FILE}"))?;
        if answer == content {
            return Ok(server);
        }
        Err(Error::Server(format!(
            "{} answers with {} bytes that are not the file; nothing can be compared",
            self.name(),
            answer.len()
        )))
    }
}

/// Text of the wanted length.
fn page() -> String {
    let line = "<p>A small static page, always the same.</p>\n";
    line.chars().cycle().take(FILE_BYTES).collect()
}

/// nginx as its packages ship it, without an end to a connection after a thousand requests.
fn as_shipped(workers: usize, listen: &'static str) -> nginx::Setup {
    nginx::Setup {
        workers,
        listen,
        http: "sendfile on; tcp_nopush on; keepalive_requests 1000000000; types { text/html html; }",
        server: "root {dir};",
        ..nginx::Setup::default()
    }
}
