//! The three servers and how each is restarted.

use nix::sys::signal::Signal;
use std::net::SocketAddr;
use std::time::Duration;

use crate::answers::Answers;
use crate::experiment::Sample;
use crate::scratch::Scratch;
use crate::server::Server;
use crate::ways::Way;
use crate::{Error, nginx};

const WORKERS: usize = 4;
/// Longer than any restart should take.
const PATIENCE: Duration = Duration::from_secs(20);

/// A kind of server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Ours as a plain server with a listener a worker.
    Reuseport,
    /// nginx with `reuseport`.
    Nginx,
    /// Under `wakeone run`.
    Wakeone,
}

/// All kinds.
pub const ALL: [Kind; 3] = [Kind::Reuseport, Kind::Nginx, Kind::Wakeone];

impl Kind {
    /// Last part of the variants' names.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Reuseport => "reuseport",
            Kind::Nginx => "nginx-reload",
            Kind::Wakeone => "wakeone",
        }
    }

    /// Why it cannot be measured here.
    pub fn lacks(self) -> Option<String> {
        match self {
            Kind::Nginx => nginx::program().err(),
            Kind::Reuseport | Kind::Wakeone => None,
        }
    }

    /// What the load asks for: 200 µs of sleep where the server can, a fixed answer of nginx.
    pub fn path(self) -> &'static str {
        if self == Kind::Nginx {
            "/"
        } else {
            "/work?us=200&kind=sleep"
        }
    }
}

/// A server that can be restarted. Dropping it ends it, then removes its files.
pub struct Restartable {
    kind: Kind,
    address: SocketAddr,
    server: Option<Server>,
    restarts: usize,
    scratch: Option<Scratch>,
    /// The books of all its servers, one after the other.
    pub answers: Answers,
}

impl Restartable {
    /// Starts it.
    ///
    /// # Errors
    /// When it does not become ready.
    pub fn start(kind: Kind, address: SocketAddr) -> Result<Self, Error> {
        let mut this = Self {
            kind,
            address,
            server: None,
            restarts: 0,
            scratch: None,
            answers: Answers::new()?,
        };
        this.server = Some(match kind {
            Kind::Reuseport => Way::ReuseportHash.start(WORKERS, address, &this.answers)?,
            Kind::Wakeone => Way::LeastConnectionsRescue.start(WORKERS, address, &this.answers)?,
            Kind::Nginx => this.start_nginx()?,
        });
        Ok(this)
    }

    fn start_nginx(&mut self) -> Result<Server, Error> {
        let scratch = Scratch::new("nginx")?;
        let server = nginx_of(WORKERS).start(&scratch, self.address)?;
        self.scratch = Some(scratch);
        Ok(server)
    }

    /// Restarts it once, and returns when that is over.
    ///
    /// # Errors
    /// When the restart fails.
    pub fn restart(&mut self) -> Result<(), Error> {
        self.restarts += 1;
        match self.kind {
            Kind::Reuseport => {
                let next = Way::ReuseportHash.start(WORKERS, self.address, &self.answers)?;
                self.server.replace(next).map_or(Ok(()), Server::stop)
            }
            Kind::Nginx => {
                // 4 workers, 2, 4, 2: both ways of changing their number.
                let workers = if self.restarts % 2 == 1 { 2 } else { WORKERS };
                if let Some(scratch) = &self.scratch {
                    nginx_of(workers).write(scratch, self.address)?;
                }
                self.hang_up("start worker processes", self.restarts + 1)
            }
            Kind::Wakeone => self.hang_up("rolling restart done", self.restarts),
        }
    }

    fn hang_up(&mut self, done: &str, count: usize) -> Result<(), Error> {
        let Some(server) = &mut self.server else {
            return Ok(());
        };
        server.signal(Signal::SIGHUP)?;
        server.wait_said(done, count, PATIENCE)
    }

    /// Stops it in order and closes the books; the counts go into the sample.
    ///
    /// # Errors
    /// When it does not end well, or the counts contradict each other.
    pub fn stop(mut self, sample: &mut Sample) -> Result<(), Error> {
        let what = format!("the server {} and those that followed it", self.kind.name());
        let by_itself = match self.kind {
            Kind::Nginx => Some(nginx::requests(self.address)?),
            Kind::Reuseport | Kind::Wakeone => None,
        };
        self.server.take().map_or(Ok(()), Server::stop)?;
        match by_itself {
            Some(made) => self.answers.close_with(made, &what, sample),
            None => self.answers.close(&what, sample),
        }
    }
}

fn nginx_of(workers: usize) -> nginx::Setup<'static> {
    nginx::Setup {
        workers,
        listen: "reuseport",
        http: "keepalive_timeout 0;",
        server: "location / { return 200 \"ok\\n\"; }",
        ..nginx::Setup::default()
    }
}
