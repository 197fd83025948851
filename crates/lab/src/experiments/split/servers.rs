//! Three servers of others, each with one shared listener, with its own listener a worker, and split.

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::answers::Answers;
use crate::apps::{self, Count};
use crate::experiment::Sample;
use crate::nginx::{self, Blocking};
use crate::process::{self, leaves};
use crate::scratch::Scratch;
use crate::server::{Server, free_address};
use crate::{Error, probe};

/// Workers of each.
pub const WORKERS: usize = 4;
const PATIENCE: Duration = Duration::from_secs(15);

/// A server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// gunicorn's sync workers: select() and accept().
    Gunicorn,
    /// A small server in Python: blocking accept().
    Prefork,
    /// nginx: epoll with EPOLLEXCLUSIVE.
    Nginx,
}

/// All of them.
pub const ALL: [Kind; 3] = [Kind::Gunicorn, Kind::Prefork, Kind::Nginx];

/// Who has which listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// As it is: one for all workers.
    Shared,
    /// One a worker by the server's own setting; the kernel's hash.
    Hash,
    /// As it is, under `wakeone run --split`.
    Split,
}

/// All of them.
pub const WAYS: [Way; 3] = [Way::Shared, Way::Hash, Way::Split];

impl Kind {
    /// First part of the variants' names.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Gunicorn => "gunicorn",
            Kind::Prefork => "prefork",
            Kind::Nginx => "nginx",
        }
    }

    /// Requests a second of the stuck workload: what the machine serves easily.
    pub fn rate_per_s(self) -> f64 {
        match self {
            Kind::Gunicorn => 300.0,
            Kind::Prefork => 500.0,
            Kind::Nginx => 1000.0,
        }
    }

    /// Why it cannot be measured here.
    pub fn lacks(self) -> Option<String> {
        match self {
            Kind::Nginx => nginx::perl_module().err(),
            Kind::Gunicorn => process::program("gunicorn")
                .is_none()
                .then(|| "gunicorn is not installed".into()),
            Kind::Prefork => process::program("python3")
                .is_none()
                .then(|| "python3 is not installed".into()),
        }
    }
}

impl Way {
    /// Last part of the variants' names.
    pub fn name(self) -> &'static str {
        match self {
            Way::Shared => "shared",
            Way::Hash => "hash",
            Way::Split => "split",
        }
    }

    /// Its place in the palette.
    pub fn colour(self) -> usize {
        match self {
            Way::Shared => 1,
            Way::Hash => 2,
            Way::Split => 4,
        }
    }

    /// Has a server's command run this way.
    ///
    /// # Errors
    /// When this executable cannot be found.
    pub fn wrap(self, command: Command) -> Result<Command, Error> {
        if self != Way::Split {
            return Ok(command);
        }
        let executable = crate::process::own_program()?;
        let mut split = Command::new(executable);
        split.args(["run", "--split", "--"]);
        split.arg(command.get_program()).args(command.get_args());
        split.envs(command.get_envs().filter_map(|(k, v)| Some((k, v?))));
        if let Some(directory) = command.get_current_dir() {
            split.current_dir(directory);
        }
        Ok(split)
    }
}

/// Who counts the answers.
enum Book {
    File(Count),
    Nginx,
}

/// A running server. Dropping it ends it and removes its files.
pub struct Running {
    what: String,
    /// Where it listens.
    pub address: SocketAddr,
    /// Its books and its clients'.
    pub answers: Answers,
    /// Its workers, by process id, rising.
    pub workers: Vec<u32>,
    book: Book,
    server: Server,
    _scratch: Scratch,
}

impl Running {
    /// Starts it, and returns when it answers and all its workers are there.
    ///
    /// # Errors
    /// When it does not become ready.
    pub fn start(kind: Kind, way: Way) -> Result<Self, Error> {
        let (scratch, address) = (Scratch::new("split")?, free_address()?);
        let (server, book) = match kind {
            Kind::Nginx => {
                let blocking = Blocking::new(&scratch)?;
                let setup = blocking.setup(nginx::Setup {
                    workers: WORKERS,
                    listen: if way == Way::Hash { "reuseport" } else { "" },
                    ..nginx::Setup::default()
                });
                let server = setup.start_as(&scratch, address, |nginx| way.wrap(nginx))?;
                (server, Book::Nginx)
            }
            Kind::Gunicorn | Kind::Prefork => {
                let count = Count::new(&scratch)?;
                let mut command = python(kind, way, &scratch, address)?;
                count.tell(&mut command);
                command.current_dir(scratch.path());
                let server = Server::start(kind.name(), &mut way.wrap(command)?, "")?;
                (server, Book::File(count))
            }
        };
        let what = format!("{}/{}", kind.name(), way.name());
        let mut workers = await_workers(&server, &what, address)?;
        workers.sort_unstable();
        let mut answers = Answers::new()?;
        answers.client_counted(book.made(address)? + book.asking(), 0);
        Ok(Self {
            what,
            address,
            answers,
            workers,
            book,
            server,
            _scratch: scratch,
        })
    }

    /// Stops it and closes the books; the counts go into the sample.
    ///
    /// # Errors
    /// When the counts contradict each other.
    pub fn stop(self, sample: &mut Sample) -> Result<(), Error> {
        let made = self.book.made(self.address)?;
        drop(self.server);
        self.answers.close_with(made, &self.what, sample)
    }

    /// The process that was started first: of a split server `wakeone run`.
    pub fn supervisor(&self) -> u32 {
        self.server.pid()
    }

    /// All its processes.
    pub fn processes(&self) -> Vec<u32> {
        process::tree(self.server.pid())
    }

    /// [`Running::stop`] of two that one load was sent to by turns.
    ///
    /// # Errors
    /// When the counts contradict each other.
    pub fn stop_both(mut self, other: Self, sample: &mut Sample) -> Result<(), Error> {
        let made = self.book.made(self.address)? + other.book.made(other.address)?;
        self.answers.merge(&other.answers);
        drop((self.server, other.server));
        let what = format!("{} and {}", self.what, other.what);
        self.answers.close_with(made, &what, sample)
    }
}

impl Book {
    /// How many answers asking for their number takes: those, too, are counted from then on.
    fn asking(&self) -> u64 {
        u64::from(matches!(self, Book::Nginx))
    }

    fn made(&self, address: SocketAddr) -> Result<u64, Error> {
        match self {
            Book::File(count) => count.made(),
            Book::Nginx => nginx::requests(address),
        }
    }
}

fn python(kind: Kind, way: Way, scratch: &Scratch, address: SocketAddr) -> Result<Command, Error> {
    let workers = WORKERS.to_string();
    if kind == Kind::Prefork {
        let mut command = Command::new("python3");
        command.arg(scratch.write("prefork.py", apps::PREFORK)?);
        command.args([
            &address.ip().to_string(),
            &address.port().to_string(),
            &workers,
        ]);
        command.args((way == Way::Hash).then_some("reuseport"));
        return Ok(command);
    }
    scratch.write("wsgi.py", apps::WSGI)?;
    let mut command = Command::new("gunicorn");
    command.args(["--workers", &workers, "--backlog", crate::ways::BACKLOG]);
    command.args(["--pythonpath", &scratch.path().display().to_string()]);
    command.args((way == Way::Hash).then_some("--reuse-port"));
    command.args(["--bind", &address.to_string(), "wsgi:app"]);
    Ok(command)
}

/// The workers, once all are there and one answers.
fn await_workers(server: &Server, what: &str, address: SocketAddr) -> Result<Vec<u32>, Error> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let workers = leaves(server.pid());
        if workers.len() >= WORKERS && probe::body(address, "/work?us=0").is_ok() {
            // Each has come to wait for connections, and so been given its queue.
            std::thread::sleep(Duration::from_millis(300));
            return Ok(workers);
        }
        if Instant::now() > deadline {
            return Err(Error::Server(format!("{what} does not answer")));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
