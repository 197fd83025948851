//! The three servers and how each is restarted.

use nix::sys::signal::Signal;
use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::answers::Answers;
use crate::experiment::Sample;
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

/// A server that can be restarted. Dropping it ends it and removes its files.
pub struct Restartable {
    kind: Kind,
    address: SocketAddr,
    server: Option<Server>,
    restarts: usize,
    directory: Option<PathBuf>,
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
            directory: None,
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
        let program = nginx::program().map_err(Error::Missing)?;
        let directory = std::env::temp_dir().join(format!(
            "wakeone-nginx-{}-{}",
            std::process::id(),
            self.address.port()
        ));
        fs::create_dir_all(&directory).map_err(|source| Error::File {
            action: "writing",
            path: directory.clone(),
            source,
        })?;
        self.directory = Some(directory.clone());
        self.configure_nginx(WORKERS)?;
        let mut command = Command::new(program);
        command
            .arg("-p")
            .arg(&directory)
            .args(["-c", "nginx.conf", "-e", "stderr"]);
        // At the level `notice` the master says when its workers have been started.
        Server::start("nginx", &mut command, "").and_then(|mut server| {
            server.wait_said("start worker processes", 1, PATIENCE)?;
            wait_listening(self.address)?;
            Ok(server)
        })
    }

    fn configure_nginx(&self, workers: usize) -> Result<(), Error> {
        let Some(directory) = &self.directory else {
            return Ok(());
        };
        let path = directory.join("nginx.conf");
        let text = format!(
            "daemon off;\nworker_processes {workers};\npid {0}/pid;\nerror_log stderr notice;\nevents {{ worker_connections 4096; }}\nhttp {{\n  access_log off;\n  client_body_temp_path {0}/b; proxy_temp_path {0}/p; fastcgi_temp_path {0}/f; uwsgi_temp_path {0}/u; scgi_temp_path {0}/s;\n  keepalive_timeout 0;\n  server {{ listen {1} reuseport backlog=4096; {2} location / {{ return 200 \"ok\\n\"; }} }}\n}}\n",
            directory.display(),
            self.address,
            nginx::location()
        );
        fs::write(&path, text).map_err(|source| Error::File {
            action: "writing",
            path,
            source,
        })
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
                self.configure_nginx(if self.restarts % 2 == 1 { 2 } else { WORKERS })?;
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

impl Drop for Restartable {
    fn drop(&mut self) {
        self.server = None;
        if let Some(directory) = &self.directory {
            let _ = fs::remove_dir_all(directory);
        }
    }
}

fn wait_listening(address: SocketAddr) -> Result<(), Error> {
    for _ in 0..500 {
        if std::net::TcpStream::connect_timeout(&address, Duration::from_millis(100)).is_ok() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Err(Error::Server(format!(
        "nobody listens on {address} after 5 s"
    )))
}
