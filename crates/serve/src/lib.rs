//! The reference server: one small HTTP application, served in each of the architectures in which
//! servers for Linux are written, a file an architecture. It is what the lab measures, and a
//! worker to try things with.
//!
//! Every answer says in `X-Worker` and `X-Pid` who gave it.

pub mod app;
pub mod blocking;
pub mod connections;
pub mod http;
pub mod listener;
mod master;
pub mod models;
pub mod session;
pub mod work;
pub mod worker;

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use rustix::io::Errno;
use wakeone_kernel::stop;

pub use crate::listener::{Listen, parse_address};

use crate::listener::Listener;
use crate::worker::Worker;

/// The architectures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Model {
    /// Processes that wait in a blocking accept; see [`models::preforked`].
    Preforked,
    /// Processes with an event loop each; see [`models::epoll_prefork`].
    EpollPrefork,
}

impl Model {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Preforked, Self::EpollPrefork];

    /// The name, as the command line has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Preforked => "preforked",
            Self::EpollPrefork => "epoll-prefork",
        }
    }

    /// What it is, in a line.
    pub fn about(self) -> &'static str {
        match self {
            Self::Preforked => "processes that wait in a blocking accept",
            Self::EpollPrefork => "processes with an event loop each, sharing a listener",
        }
    }

    /// Whether its workers wait in calls that block.
    fn is_blocking(self) -> bool {
        match self {
            Self::Preforked => true,
            Self::EpollPrefork => false,
        }
    }
}

/// Whom a connection wakes where event loops share a listener; see [`models::epoll_prefork`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EpollMode {
    /// Everyone who waits.
    WakeAll,
    /// One, always the first in the list.
    #[default]
    Exclusive,
    /// One, who then goes to the end of the list.
    Rotate,
}

/// What to serve and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// The architecture.
    pub model: Model,
    /// How many workers.
    pub workers: usize,
    /// Where to listen.
    pub listen: Listen,
    /// How many connections may wait to be accepted, in each listener. The kernel caps it at
    /// `net.core.somaxconn`.
    pub backlog: i32,
    /// Each worker has a listener of its own, and the kernel chooses among them by hash.
    pub reuseport: bool,
    /// For [`Model::EpollPrefork`]: whom a connection wakes.
    pub epoll: EpollMode,
    /// Whether a connection may stay open after an answer.
    pub keep_alive: bool,
    /// How long a client may take to send a request, and may be idle between two.
    pub header_timeout: Duration,
}

impl Options {
    /// The defaults for a model on an address: one worker, a backlog of 4,096, keep-alive, 10 s
    /// for a request.
    pub fn new(model: Model, listen: Listen) -> Self {
        Self {
            model,
            workers: 1,
            listen,
            backlog: 4096,
            reuseport: false,
            epoll: EpollMode::default(),
            keep_alive: true,
            header_timeout: Duration::from_secs(10),
        }
    }
}

/// Why the server does not serve.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No listener on the address.
    #[error("cannot listen on {address}: {source}{}", listen_hint(.source, .address))]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// The listeners handed over cannot be used.
    #[error("cannot serve inherited listeners: {0}")]
    Inherited(String),
    /// Options that do not go together.
    #[error("{0}")]
    Options(String),
    /// A worker process cannot be made.
    #[error(
        "cannot fork worker {index} of {count}: {source}; try fewer workers, or raise `ulimit -u`"
    )]
    Fork {
        /// Which one.
        index: usize,
        /// Of how many.
        count: usize,
        /// Why not.
        source: io::Error,
    },
    /// The event loop cannot go on.
    #[error("the event loop failed: {0}; if descriptors have run out, raise `ulimit -n`")]
    EventLoop(Errno),
    /// Signals cannot be handled.
    #[error("cannot handle signals: {0}")]
    Signals(io::Error),
    /// Workers ended that should not have.
    #[error("{count} workers ended before they were told to; their last words are above")]
    Workers {
        /// How many.
        count: usize,
    },
}

fn listen_hint(source: &io::Error, address: &SocketAddr) -> String {
    match source.kind() {
        io::ErrorKind::AddrInUse => format!(
            "; another server has the port (`ss -ltnp 'sport = :{}'` names it), choose another",
            address.port()
        ),
        io::ErrorKind::PermissionDenied => {
            "; ports below 1024 need CAP_NET_BIND_SERVICE, choose a higher one".to_owned()
        }
        io::ErrorKind::AddrNotAvailable => {
            "; no interface of this machine has the address (`ip address` lists them)".to_owned()
        }
        _ => String::new(),
    }
}

/// Serves until SIGTERM or SIGINT comes, and then finishes what has been accepted: in the
/// blocking models the connection in hand, in the event loops all that are open. Connections that
/// wait in a listener's queue stay there; they are lost unless somebody else holds the listener.
///
/// Must be called while the process has a single thread, because it forks.
///
/// # Errors
/// When serving cannot start, or workers end that should not.
pub fn serve(options: &Options) -> Result<(), Error> {
    if options.workers == 0 {
        return Err(Error::Options(
            "cannot serve with 0 workers; give 1 or more".to_owned(),
        ));
    }
    stop::install().map_err(Error::Signals)?;
    let listeners = listeners(options)?;
    let ready = ready_line(options, &listeners);
    let each = each_its_own(options);
    if options.workers == 1 {
        eprintln!("{ready}");
        return run_worker(options, Worker::new(options, listeners, 0));
    }
    master::run(
        options.workers,
        listeners,
        |listeners, index| {
            let kept = listeners
                .into_iter()
                .enumerate()
                .filter(|(owner, _)| !each || *owner == index)
                .map(|(_, listener)| listener)
                .collect();
            run_worker(options, Worker::new(options, kept, index))
        },
        || eprintln!("{ready}"),
    )
}

/// Whether each worker has a listener of its own.
fn each_its_own(options: &Options) -> bool {
    options.reuseport && options.listen != Listen::Inherited
}

/// The listeners of all workers.
fn listeners(options: &Options) -> Result<Vec<Listener>, Error> {
    let blocking = options.model.is_blocking();
    let Listen::Address(address) = options.listen else {
        let inherited = Listener::inherited()?;
        if !blocking || inherited.len() > 1 {
            inherited.iter().try_for_each(Listener::set_nonblocking)?;
        }
        return Ok(inherited);
    };
    let bind = |address| Listener::bind(address, options.backlog, options.reuseport, blocking);
    let first = bind(address)?;
    // The first one settles the port if it was 0.
    let address = first.address();
    let more = if each_its_own(options) {
        options.workers - 1
    } else {
        0
    };
    let mut all = vec![first];
    for _ in 0..more {
        all.push(bind(address)?);
    }
    Ok(all)
}

/// What is said on stderr once connections are taken.
fn ready_line(options: &Options, listeners: &[Listener]) -> String {
    let mut addresses: Vec<_> = listeners
        .iter()
        .map(|listener| listener.address().to_string())
        .collect();
    addresses.dedup();
    let plural = if options.workers == 1 { "" } else { "s" };
    format!(
        "listening on {} ({}, {} worker{plural})",
        addresses.join(" and "),
        options.model.name(),
        options.workers
    )
}

fn run_worker(options: &Options, worker: Worker) -> Result<(), Error> {
    let done = match options.model {
        Model::Preforked => {
            models::preforked::serve(&worker);
            Ok(())
        }
        Model::EpollPrefork => models::epoll_prefork::serve(&worker, options.epoll),
    };
    worker.faults.report(&worker.app.worker);
    done
}
