//! The points of the experiment: an architecture, a store and a number of clients; and how each is started.

use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use wakeone_kernel::capability;
use wakeone_serve::models::io_uring;
use wakeone_serve::store::{Call, Entry, Reply};
use wakeone_serve::{Model, Place};

use crate::error::Error;
use crate::launch::{Counted, Launch};
use crate::process::program;
use crate::scratch::Scratch;
use crate::server::{Server, free_address};
use crate::under_test::ServerUnderTest;

/// The source's numbers of simultaneous clients.
const CLIENTS: [usize; 24] = [
    20, 50, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1000, 1500, 2000, 2500, 3000, 5000, 8000,
    10_000, 11_000, 12_000, 13_000, 14_000, 15_000,
];
const CLIENTS_QUICK: [usize; 4] = [20, 200, 1000, 5000];
/// With `--quick`, the store in Redis is shown only with these clients and architectures.
const REDIS_QUICK: ([usize; 2], [Model; 3]) =
    ([20, 1000], [Model::Forking, Model::Preforked, Model::Epoll]);
/// The architectures of the source.
pub const PUBLISHED: [Model; 7] = [
    Model::Iterative,
    Model::Forking,
    Model::Preforked,
    Model::Threaded,
    Model::Prethreaded,
    Model::Poll,
    Model::Epoll,
];
/// What came after.
pub const LATER: [Model; 5] = [
    Model::EpollPrefork,
    Model::Reuseport,
    Model::Dispatched,
    Model::FdPassing,
    Model::IoUring,
];
/// Workers that each serve one connection at a time: as many as the source's server forks (its `PREFORK_CHILDREN`).
pub const BLOCKING_WORKERS: usize = 100;
/// The requested backlog. The kernel grants at most `net.core.somaxconn`.
pub const BACKLOG: usize = 16_384;
/// Descriptors of a process that are not connections.
const OTHER_DESCRIPTORS: u64 = 64;
/// Entries of the guest book, shown on each page.
const ENTRIES: u64 = 10;
const REDIS: &str = "redis-server";
/// How long Redis may take to start.
const PATIENCE: Duration = Duration::from_secs(10);

/// The store of the guest book.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The server's own files.
    Embedded,
    /// A Redis server, as the source's.
    Redis,
}

/// Both kinds.
pub const KINDS: [Kind; 2] = [Kind::Embedded, Kind::Redis];

impl Kind {
    /// First part of the variants' names.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Embedded => "embedded",
            Kind::Redis => "redis",
        }
    }
}

/// One point of the grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cell {
    /// The store.
    pub kind: Kind,
    /// Simultaneous clients.
    pub clients: usize,
    /// The architecture.
    pub model: Model,
}

impl Cell {
    /// The variant's name: `redis/1000/epoll`.
    pub fn name(self) -> String {
        format!(
            "{}/{}/{}",
            self.kind.name(),
            self.clients,
            self.model.name()
        )
    }

    /// The cell of a variant.
    pub fn parse(name: &str) -> Option<Self> {
        let mut parts = name.split('/');
        let kind = parts.next()?;
        let clients = parts.next()?.parse().ok()?;
        let model = parts.next()?;
        Some(Self {
            kind: KINDS.into_iter().find(|k| k.name() == kind)?,
            clients,
            model: Model::ALL.into_iter().find(|m| m.name() == model)?,
        })
    }
}

/// All points, store by store and from few clients to many.
pub fn grid(quick: bool) -> Vec<Cell> {
    let all = |kind, clients: &[usize], models: &[Model]| -> Vec<Cell> {
        let of = |clients: usize| {
            let cell = move |model: &Model| Cell {
                kind,
                clients,
                model: *model,
            };
            models.iter().map(cell).collect::<Vec<_>>()
        };
        clients.iter().copied().flat_map(of).collect()
    };
    let mut cells;
    if quick {
        cells = all(Kind::Embedded, &CLIENTS_QUICK, &Model::ALL);
        cells.extend(all(Kind::Redis, &REDIS_QUICK.0, &REDIS_QUICK.1));
    } else {
        cells = all(Kind::Embedded, &CLIENTS, &Model::ALL);
        cells.extend(all(Kind::Redis, &CLIENTS, &Model::ALL));
    }
    cells
}

/// The things that this machine lacks, looked up once for a whole grid.
pub struct Lacks {
    dispatched: Option<String>,
    io_uring: Option<String>,
    redis: Option<String>,
    descriptors: u64,
}

impl Lacks {
    /// Looks.
    pub fn look() -> Self {
        let missing = capability::missing();
        Self {
            dispatched: (!missing.is_empty()).then(|| format!("it needs {}", missing.join(", "))),
            io_uring: io_uring::probe()
                .err()
                .map(|e| format!("the kernel refuses io_uring: {e}")),
            redis: program(REDIS)
                .is_none()
                .then(|| "redis-server is not installed".into()),
            descriptors: wakeone_load::raise_descriptor_limit(),
        }
    }

    /// The reason why a point cannot be measured here, and the part of it that is concerned: `(what, why)`.
    pub fn of(&self, cell: &Cell) -> Option<(String, String)> {
        let because = |what: &str, why: &Option<String>| Some((what.to_owned(), why.clone()?));
        let of_store = match cell.kind {
            Kind::Redis => because("redis", &self.redis),
            Kind::Embedded => None,
        };
        let of_model = match cell.model {
            Model::Dispatched => because("dispatched", &self.dispatched),
            Model::IoUring => because("io-uring", &self.io_uring),
            _ => None,
        };
        let few = cell.clients as u64 + OTHER_DESCRIPTORS > self.descriptors;
        let of_clients = few.then(|| {
            (
                format!("{} clients", cell.clients),
                format!(
                    "a process may have only {} open files (ulimit -Hn)",
                    self.descriptors
                ),
            )
        });
        of_store.or(of_model).or(of_clients)
    }
}

/// How many workers an architecture gets; None where it has no such number.
pub fn workers(model: Model, cpus: usize) -> Option<usize> {
    match model {
        Model::Preforked | Model::Prethreaded => Some(BLOCKING_WORKERS),
        model if model.has_workers() => Some(cpus),
        _ => None,
    }
}

/// A guest book with entries in it, and what keeps it. Dropping it removes it.
pub struct Book {
    place: Place,
    text: String,
    /// Declared, and so dropped, before the directory in which it works.
    _redis: Option<Server>,
    _scratch: Scratch,
}

impl Book {
    /// A new one.
    ///
    /// # Errors
    /// When it cannot be made, or Redis does not start.
    pub fn new(kind: Kind) -> Result<Self, Error> {
        let scratch = Scratch::new("guestbook")?;
        let (redis, text) = match kind {
            Kind::Embedded => (None, scratch.path().display().to_string()),
            Kind::Redis => {
                let (server, address) = start_redis(&scratch)?;
                (Some(server), format!("redis://{address}"))
            }
        };
        let book = Self {
            place: Place::parse(&text).map_err(Error::Server)?,
            text,
            _redis: redis,
            _scratch: scratch,
        };
        for number in 0..ENTRIES {
            book.call(&Call::Add(Entry {
                at_unix_s: 1_555_000_000 + number,
                name: format!("Visitor {number}"),
                text: "A page with a few entries, as a guest book has.".into(),
            }))?;
        }
        Ok(book)
    }

    /// The argument of `--store`.
    pub fn argument(&self) -> &str {
        &self.text
    }

    /// How many visits the servers have counted.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn visits(&self) -> Result<u64, Error> {
        match self.call(&Call::Page { visit: false })? {
            Reply::Page { visits, .. } => Ok(visits),
            Reply::Added => Ok(0),
        }
    }

    fn call(&self, call: &Call) -> Result<Reply, Error> {
        let failed = |e: wakeone_serve::store::Failed| Error::Server(e.0);
        self.place
            .open()
            .map_err(failed)?
            .call(call)
            .map_err(failed)
    }
}

/// A Redis server that keeps nothing on disk.
fn start_redis(scratch: &Scratch) -> Result<(Server, SocketAddr), Error> {
    let program =
        program(REDIS).ok_or_else(|| Error::Missing("redis-server is not installed".into()))?;
    let address = free_address()?;
    let mut command = Command::new(program);
    command
        .arg("--port")
        .arg(address.port().to_string())
        .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
        // A forking server makes a connection for each of its children.
        .args(["--maxclients", "16000", "--tcp-backlog", "16384"])
        .args(["--logfile", "/dev/stderr", "--dir"])
        .arg(scratch.path());
    let mut server = Server::start("redis-server", &mut command, "")?;
    server.wait_said("Ready to accept connections", 1, PATIENCE)?;
    Ok((server, address))
}

/// Starts a server of `model`, which waits for a request for as long as `patience`, and waits until it is ready.
///
/// # Errors
/// When it does not become ready.
pub fn start(
    model: Model,
    workers: Option<usize>,
    patience: Duration,
    book: &Book,
) -> Result<ServerUnderTest, Error> {
    let seconds = patience.as_secs();
    let name = model.name();
    let workers = workers.map_or_else(String::new, |n| format!("--workers {n}"));
    let line = format!(
        "wakeone-lab serve --model {name} --no-keep-alive -l {{address}} --backlog {BACKLOG} --header-timeout {seconds} --store {{store}} {workers}"
    );
    ServerUnderTest::start(Launch {
        values: vec![("store", book.argument().to_owned())],
        // The visits in the guest book are the count.
        counted: Counted::Elsewhere,
        patience,
        ..Launch::ours(format!("the {name} server"), line)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_of_variants_go_both_ways() {
        for cell in grid(false).into_iter().chain(grid(true)) {
            assert_eq!(Cell::parse(&cell.name()), Some(cell));
        }
        assert_eq!(Cell::parse("redis/x/epoll"), None);
    }

    #[test]
    fn the_quick_grid_has_every_architecture_and_both_stores() {
        let quick = grid(true);
        for model in Model::ALL {
            assert!(quick.iter().any(|cell| cell.model == model));
        }
        for kind in KINDS {
            assert!(quick.iter().any(|cell| cell.kind == kind));
        }
        assert_eq!(PUBLISHED.len() + LATER.len(), Model::ALL.len());
    }

    #[test]
    fn the_grid_is_that_of_the_source() {
        let published = crate::published::Published::parse(include_str!("published.csv"));
        let theirs: BTreeSet<usize> = published
            .0
            .iter()
            .filter_map(|f| Some(f.x? as usize))
            .collect();
        assert_eq!(theirs, CLIENTS.into_iter().collect());
        for figure in &published.0 {
            assert!(PUBLISHED.iter().any(|model| model.name() == figure.series));
            assert!(figure.value.is_some() != (figure.note == "wide variations"));
        }
    }

    #[test]
    fn what_cannot_be_measured_says_why() {
        let here = Lacks {
            dispatched: Some("it needs CAP_BPF".into()),
            io_uring: None,
            redis: Some("redis-server is not installed".into()),
            descriptors: 1024,
        };
        let why = |name: &str| here.of(&Cell::parse(name).unwrap()).map(|(what, _)| what);
        assert_eq!(why("embedded/20/epoll"), None);
        assert_eq!(why("embedded/20/dispatched").as_deref(), Some("dispatched"));
        assert_eq!(why("redis/20/epoll").as_deref(), Some("redis"));
        assert_eq!(why("embedded/1000/epoll").as_deref(), Some("1000 clients"));
    }

    #[test]
    fn an_embedded_book_counts_its_visits() {
        let book = Book::new(Kind::Embedded).unwrap();
        assert_eq!(book.visits().unwrap(), 0);
        book.call(&Call::Page { visit: true }).unwrap();
        assert_eq!(book.visits().unwrap(), 1);
    }
}
