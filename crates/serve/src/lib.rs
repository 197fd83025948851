//! The reference server: one small HTTP application, served in each of the architectures in which servers for Linux
//! are written, a file an architecture. The lab measures it, and it is a worker to try things with.
//!
//! Every answer names the worker that gave it in `X-Worker` and `X-Pid`.

pub mod accept_lock;
pub mod app;
pub mod blocking;
pub mod connections;
pub mod files;
pub mod guestbook;
pub mod http;
pub mod listener;
mod master;
pub mod models;
pub mod options;
pub mod reactor;
pub mod sending;
pub mod session;
pub mod store;
pub mod system;
mod threads;
pub mod work;
pub mod worker;

use std::io;
use std::net::SocketAddr;

use crate::system::stop;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

pub use crate::files::Root;
pub use crate::listener::{Listen, Listener, parse_address};
pub use crate::options::{AcceptLock, EpollMode, Model, Options};
pub use crate::store::Place;

use crate::accept_lock::Lock;
use crate::worker::Worker;

/// Errors that keep the server from serving.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No listener on the address.
    #[error("cannot listen on {address}: {source}{}", listen_hint(.source, .address))]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The reason.
        source: io::Error,
    },
    /// The listeners handed over cannot be used.
    #[error("cannot serve inherited listeners: {0}")]
    Inherited(String),
    /// Options that exclude each other.
    #[error("{0}")]
    Options(String),
    /// A worker process cannot be made.
    #[error(
        "cannot fork worker {index} of {count}: {source}; try fewer workers, or raise `ulimit -u`"
    )]
    Fork {
        /// Its number.
        index: usize,
        /// The number of all workers.
        count: usize,
        /// The reason.
        source: io::Error,
    },
    /// The worker threads cannot be made.
    #[error("cannot start {count} threads: {source}; try fewer workers, or raise `ulimit -u`")]
    Threads {
        /// The number of threads.
        count: usize,
        /// The reason.
        source: io::Error,
    },
    /// The event loop cannot go on.
    #[error("the event loop failed: {0}; if descriptors have run out, raise `ulimit -n`")]
    EventLoop(Errno),
    /// io_uring cannot be used.
    #[error("cannot use io_uring: {source}{}", ring_hint(.source))]
    Ring {
        /// The reason.
        source: io::Error,
    },
    /// The accept lock cannot be made.
    #[error("cannot make the accept lock: {0}; try another kind with --accept-lock")]
    AcceptLock(io::Error),
    /// Signals cannot be handled.
    #[error("cannot handle signals: {0}")]
    Signals(io::Error),
    /// Workers ended that should not have.
    #[error("{count} of the workers ended before they were told to; their last words are above")]
    Workers {
        /// Their number.
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

fn ring_hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::PermissionDenied => {
            "; the kernel forbids it (sysctl kernel.io_uring_disabled, or the container's seccomp \
             profile), choose epoll-prefork or allow it"
        }
        io::ErrorKind::Unsupported => "; choose epoll-prefork or a newer kernel",
        io::ErrorKind::OutOfMemory => "; raise `ulimit -l`",
        _ => "",
    }
}

/// Serves until SIGTERM or SIGINT comes, and then finishes the accepted connections: in the blocking models the
/// connection in hand, in the event loops all that are open. Connections that wait in a listener's queue stay there;
/// they are lost unless another process holds the listener.
///
/// Prints `listening on ADDRESS (MODEL, N workers)` on stderr once connections are taken.
///
/// Must be called while the process has a single thread, because it forks.
///
/// # Errors
/// When serving cannot start, or workers end that should not.
pub fn serve(options: &Options) -> Result<(), Error> {
    options.check()?;
    if options.model == Model::IoUring {
        models::io_uring::probe().map_err(|source| Error::Ring { source })?;
    }
    stop::install().map_err(Error::Signals)?;
    raise_descriptor_limit();
    let listeners = listeners(options)?;
    let ready = ready_line(options, &listeners);
    let lock = Lock::new(options.accept_lock.unwrap_or(AcceptLock::None))?;
    match options.model {
        Model::FdPassing => {
            let acceptor = Worker::new(options, listeners, 0);
            models::fd_passing::serve(acceptor, options.workers, || eprintln!("{ready}"))
        }
        Model::Prethreaded => {
            eprintln!("{ready}");
            run_worker(options, Worker::new(options, listeners, 0), lock)
        }
        _ if options.workers == 1 => {
            eprintln!("{ready}");
            run_worker(
                options,
                Worker::new(options, listeners, 0),
                lock.for_worker()?,
            )
        }
        _ => serve_forked(options, listeners, lock, &ready),
    }
}

/// Allows as many open files as may be allowed: the usual soft limit of 1,024 is there for programs that call
/// select(2), and an event loop has a descriptor for each client.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    // If this is refused, the server serves as many as it may.
    let _ = setrlimit(Resource::Nofile, raised);
}

/// Serves with a process for each worker.
fn serve_forked(
    options: &Options,
    listeners: Vec<Listener>,
    lock: Lock,
    ready: &str,
) -> Result<(), Error> {
    let each = options.each_its_own();
    master::run(
        options.workers,
        (listeners, lock),
        |(listeners, lock), index| {
            let kept = listeners
                .into_iter()
                .enumerate()
                .filter(|(owner, _)| !each || *owner == index)
                .map(|(_, listener)| listener)
                .collect();
            run_worker(
                options,
                Worker::new(options, kept, index),
                lock.for_worker()?,
            )
        },
        || eprintln!("{ready}"),
    )
}

/// The listeners of all workers.
fn listeners(options: &Options) -> Result<Vec<Listener>, Error> {
    let blocking = options.model.wants_blocking();
    let Listen::Address(address) = options.listen else {
        let inherited = Listener::inherited()?;
        let several = inherited.len() > 1 && options.model != Model::IoUring;
        if !blocking || several {
            inherited.iter().try_for_each(Listener::set_nonblocking)?;
        }
        return Ok(inherited);
    };
    let each = options.each_its_own();
    let bind = |address| Listener::bind(address, options.backlog, each, blocking);
    let first = bind(address)?;
    // The first one settles the port if it was 0.
    let address = first.address();
    let mut all = vec![first];
    for _ in 1..if each { options.workers } else { 1 } {
        all.push(bind(address)?);
    }
    Ok(all)
}

/// Returns the line for stderr once connections are taken.
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

fn run_worker(options: &Options, worker: Worker, lock: Lock) -> Result<(), Error> {
    let name = worker.app.worker.clone();
    let faults = worker.faults.clone();
    let done = match options.model {
        Model::Iterative => {
            models::iterative::serve(&worker);
            Ok(())
        }
        Model::Forking => models::forking::serve(worker).map_err(Error::Signals),
        Model::Preforked => {
            models::preforked::serve(&worker, &lock);
            Ok(())
        }
        Model::Threaded => {
            models::threaded::serve(&worker);
            Ok(())
        }
        Model::Prethreaded => {
            let locked = options.accept_lock != Some(AcceptLock::None);
            let count = options.workers;
            models::prethreaded::serve(worker, count, locked)
                .map_err(|source| Error::Threads { count, source })
        }
        Model::Poll => models::poll::serve(&worker).map_err(Error::EventLoop),
        Model::Epoll => models::epoll::serve(&worker).map_err(Error::EventLoop),
        Model::EpollPrefork => {
            models::epoll_prefork::serve(&worker, options.epoll).map_err(Error::EventLoop)
        }
        Model::Reuseport => models::reuseport::serve(&worker).map_err(Error::EventLoop),
        Model::Dispatched => models::dispatched::serve(&worker).map_err(Error::EventLoop),
        Model::IoUring => models::io_uring::serve(&worker).map_err(|source| Error::Ring { source }),
        Model::FdPassing => unreachable!("it makes its workers itself"),
    };
    faults.report(&name);
    done
}

#[cfg(test)]
#[path = "../../../tests/support/foreign.rs"]
mod foreign;
