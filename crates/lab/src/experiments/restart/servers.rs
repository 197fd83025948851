//! The servers and how each is restarted.

use nix::sys::signal::Signal;
use std::net::SocketAddr;
use std::time::Duration;

use super::haproxy;
use crate::answers::Answers;
use crate::experiment::Sample;
use crate::scratch::Scratch;
use crate::server::Server;
use crate::steered::{self, Attached};
use crate::ways::Way;
use crate::{Error, nginx};

/// Workers of each, where nothing else is asked for.
pub const WORKERS: usize = 4;
/// Longer than any restart should take.
const PATIENCE: Duration = Duration::from_secs(20);

/// A kind of server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Our own server, its connections handed out in this way.
    Ours(Way),
    /// nginx with `reuseport`, reloaded with half of its workers and with all of them again.
    Nginx,
    /// The same, reloaded with one worker and with all of them again.
    NginxToOne,
    /// The same, attached to.
    NginxToOneAttached,
    /// HAProxy with a listener a thread.
    Haproxy,
    /// The same, attached to.
    HaproxyAttached,
}

/// Ours as a plain server with a listener a worker.
pub const REUSEPORT: Kind = Kind::Ours(Way::ReuseportHash);
/// Ours under `wakeone run`.
pub const WAKEONE: Kind = Kind::Ours(Way::LeastConnectionsRescue);

/// All kinds that the experiment compares under its loads.
pub const ALL: [Kind; 3] = [REUSEPORT, Kind::Nginx, WAKEONE];

impl Kind {
    /// Last part of the variants' names.
    pub fn name(self) -> &'static str {
        match self {
            REUSEPORT => "reuseport",
            WAKEONE => "wakeone",
            Kind::Ours(way) => way.name(),
            Kind::Nginx => "nginx-reload",
            Kind::NginxToOne => "nginx-to-one",
            Kind::NginxToOneAttached => "nginx-to-one+attach",
            Kind::Haproxy => "haproxy",
            Kind::HaproxyAttached => "haproxy+attach",
        }
    }

    /// Why it cannot be measured here.
    pub fn lacks(self) -> Option<String> {
        match self {
            Kind::Nginx | Kind::NginxToOne => nginx::program().err(),
            Kind::NginxToOneAttached => nginx::program().err().or_else(steered::lacks),
            Kind::Haproxy => haproxy::program().err(),
            Kind::HaproxyAttached => haproxy::program().err().or_else(steered::lacks),
            Kind::Ours(_) => None,
        }
    }

    /// What the load asks for: 200 µs of sleep where the server can, a fixed answer of the others.
    pub fn path(self) -> &'static str {
        match self {
            Kind::Ours(_) => "/work?us=200&kind=sleep",
            _ => "/",
        }
    }

    /// Whether it is attached to.
    fn attached(self) -> bool {
        matches!(self, Kind::NginxToOneAttached | Kind::HaproxyAttached)
    }
}

/// A server that can be restarted. Dropping it detaches, ends it, then removes its files.
pub struct Restartable {
    kind: Kind,
    workers: usize,
    address: SocketAddr,
    attached: Option<Attached>,
    server: Option<Server>,
    /// Those that were told to end by those that followed them.
    retired: Vec<Server>,
    restarts: usize,
    scratch: Scratch,
    /// The books of all its servers, one after the other.
    pub answers: Answers,
}

impl Restartable {
    /// Starts it.
    ///
    /// # Errors
    /// When it does not become ready, or cannot be attached to.
    pub fn start(kind: Kind, workers: usize, address: SocketAddr) -> Result<Self, Error> {
        let mut this = Self {
            kind,
            workers,
            address,
            attached: None,
            server: None,
            retired: Vec::new(),
            restarts: 0,
            scratch: Scratch::new("restart")?,
            answers: Answers::new()?,
        };
        this.server = Some(this.start_one()?);
        if kind.attached() {
            this.attached = Some(Attached::to(address, false)?);
        }
        Ok(this)
    }

    fn start_one(&self) -> Result<Server, Error> {
        match self.kind {
            Kind::Ours(way) => way.start(self.workers, self.address, &self.answers),
            Kind::Nginx | Kind::NginxToOne | Kind::NginxToOneAttached => {
                nginx_of(self.workers).start(&self.scratch, self.address)
            }
            Kind::Haproxy | Kind::HaproxyAttached => {
                let before = self.server.as_ref().map(Server::pid);
                haproxy::start(&self.scratch, self.workers, self.address, before)
            }
        }
    }

    /// Restarts it once, and returns when that is over.
    ///
    /// # Errors
    /// When the restart fails.
    pub fn restart(&mut self) -> Result<(), Error> {
        self.restarts += 1;
        match self.kind {
            Kind::Ours(way) if way.steered() => self.hang_up("rolling restart done", self.restarts),
            Kind::Ours(Way::ReuseportHash) => {
                let next = self.start_one()?;
                self.server.replace(next).map_or(Ok(()), Server::stop)
            }
            // The next one cannot have the address before this one has left it.
            Kind::Ours(_) => {
                self.server.take().map_or(Ok(()), Server::stop)?;
                self.server = Some(self.start_one()?);
                Ok(())
            }
            Kind::Nginx | Kind::NginxToOne | Kind::NginxToOneAttached => {
                // 4 workers, 2, 4, 2 (or 8, 1, 8, 1): both ways of changing their number.
                let few = if self.kind == Kind::Nginx {
                    self.workers / 2
                } else {
                    1
                };
                let workers = if self.restarts % 2 == 1 {
                    few
                } else {
                    self.workers
                };
                nginx_of(workers).write(&self.scratch, self.address)?;
                self.hang_up("start worker processes", self.restarts + 1)
            }
            Kind::Haproxy | Kind::HaproxyAttached => {
                let next = self.start_one()?;
                self.retired.extend(self.server.replace(next));
                Ok(())
            }
        }
    }

    fn hang_up(&mut self, done: &str, count: usize) -> Result<(), Error> {
        let Some(server) = &mut self.server else {
            return Ok(());
        };
        server.signal(Signal::SIGHUP)?;
        server.wait_said(done, count, PATIENCE)
    }

    /// Stops it in order and closes the books; the counts go into the sample. HAProxy keeps none across restarts.
    ///
    /// # Errors
    /// When it does not end well, or the counts contradict each other.
    pub fn stop(mut self, sample: &mut Sample) -> Result<(), Error> {
        let what = format!("the server {} and those that followed it", self.kind.name());
        if let Some(attached) = self.attached.take() {
            attached.end()?;
        }
        let by_itself = match self.kind {
            Kind::Nginx | Kind::NginxToOne | Kind::NginxToOneAttached => {
                Some(nginx::requests(self.address)?)
            }
            _ => None,
        };
        let server = self.server.take();
        if matches!(self.kind, Kind::Haproxy | Kind::HaproxyAttached) {
            return Ok(());
        }
        server.map_or(Ok(()), Server::stop)?;
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
