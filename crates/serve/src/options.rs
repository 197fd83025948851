//! The options of a server: the architecture, and how it serves.

use std::sync::Arc;
use std::time::Duration;

use crate::system::shared_counter::SharedCounter;

use crate::Error;
use crate::files::Root;
use crate::listener::Listen;
use crate::store::Place;

/// The architectures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Model {
    /// [`crate::models::iterative`]
    Iterative,
    /// [`crate::models::forking`]
    Forking,
    /// [`crate::models::preforked`]
    Preforked,
    /// [`crate::models::threaded`]
    Threaded,
    /// [`crate::models::prethreaded`]
    Prethreaded,
    /// [`crate::models::poll`]
    Poll,
    /// [`crate::models::epoll`]
    Epoll,
    /// [`crate::models::epoll_prefork`]
    EpollPrefork,
    /// [`crate::models::reuseport`]
    Reuseport,
    /// [`crate::models::dispatched`]
    Dispatched,
    /// [`crate::models::fd_passing`]
    FdPassing,
    /// [`crate::models::io_uring`]
    IoUring,
}

impl Model {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::Iterative,
        Self::Forking,
        Self::Preforked,
        Self::Threaded,
        Self::Prethreaded,
        Self::Poll,
        Self::Epoll,
        Self::EpollPrefork,
        Self::Reuseport,
        Self::Dispatched,
        Self::FdPassing,
        Self::IoUring,
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Iterative => "iterative",
            Self::Forking => "forking",
            Self::Preforked => "preforked",
            Self::Threaded => "threaded",
            Self::Prethreaded => "prethreaded",
            Self::Poll => "poll",
            Self::Epoll => "epoll",
            Self::EpollPrefork => "epoll-prefork",
            Self::Reuseport => "reuseport",
            Self::Dispatched => "dispatched",
            Self::FdPassing => "fd-passing",
            Self::IoUring => "io-uring",
        }
    }

    /// Describes it in a line.
    pub fn about(self) -> &'static str {
        match self {
            Self::Iterative => "one process, one connection at a time",
            Self::Forking => "a process for each connection",
            Self::Preforked => "N processes that wait in a blocking accept",
            Self::Threaded => "a thread for each connection",
            Self::Prethreaded => "N threads, a mutex around accept",
            Self::Poll => "one process, an event loop around poll",
            Self::Epoll => "one process, an event loop around epoll",
            Self::EpollPrefork => "N event loops that share a listener",
            Self::Reuseport => "N event loops, a listener each; the kernel's hash chooses",
            Self::Dispatched => "N event loops, a listener each; Wakeone chooses",
            Self::FdPassing => "one process accepts and hands the connections to N event loops",
            Self::IoUring => "N event loops around io_uring, with multishot accept",
        }
    }

    /// Whether it may have more than one worker.
    pub fn has_workers(self) -> bool {
        !matches!(
            self,
            Self::Iterative | Self::Forking | Self::Threaded | Self::Poll | Self::Epoll
        )
    }

    /// Whether it needs listeners whose accept waits. io_uring does the waiting itself and returns an error for a
    /// listener that does not block.
    pub(crate) fn wants_blocking(self) -> bool {
        matches!(
            self,
            Self::Iterative
                | Self::Forking
                | Self::Preforked
                | Self::Threaded
                | Self::Prethreaded
                | Self::IoUring
        )
    }
}

/// Which event loops a connection wakes where they share a listener; see [`crate::models::epoll_prefork`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EpollMode {
    /// All that wait.
    WakeAll,
    /// One, always the first in the list.
    #[default]
    Exclusive,
    /// One, which then goes to the end of the list.
    Rotate,
}

/// The lock around accept; see [`crate::accept_lock`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AcceptLock {
    /// No lock: the kernel wakes one.
    None,
    /// flock(2).
    Flock,
    /// fcntl(2).
    Fcntl,
    /// A mutex in shared memory.
    Pthread,
}

/// The options of a server.
#[derive(Clone)]
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
    /// For [`Model::Preforked`], [`Model::EpollPrefork`] and [`Model::IoUring`]: each worker has
    /// a listener of its own, and the kernel chooses among them by hash.
    pub reuseport: bool,
    /// For [`Model::EpollPrefork`]: which workers a connection wakes.
    pub epoll: EpollMode,
    /// For [`Model::Preforked`] (default: none) and [`Model::Prethreaded`] (default: a mutex).
    pub accept_lock: Option<AcceptLock>,
    /// Whether a connection may stay open after an answer.
    pub keep_alive: bool,
    /// How long a client may take to send a request, and may be idle between two.
    pub header_timeout: Duration,
    /// Where the guest book is kept. Opened at its first use.
    pub place: Place,
    /// The files that are served.
    pub files: Option<Arc<Root>>,
    /// Counts the answers of all workers, so that they can be compared with the clients' counts.
    pub counter: Option<Arc<SharedCounter>>,
}

impl Options {
    /// The defaults for a model on an address: one worker, a backlog of 4,096, keep-alive, 10 s
    /// for a request, the guest book in the user's state directory, no files.
    pub fn new(model: Model, listen: Listen) -> Self {
        Self {
            model,
            workers: 1,
            listen,
            backlog: 4096,
            reuseport: false,
            epoll: EpollMode::default(),
            accept_lock: None,
            keep_alive: true,
            header_timeout: Duration::from_secs(10),
            place: Place::default_directory(),
            files: None,
            counter: None,
        }
    }

    /// Whether each worker has a listener of its own.
    pub(crate) fn each_its_own(&self) -> bool {
        self.listen != Listen::Inherited && (self.reuseport || self.model == Model::Reuseport)
    }

    /// Refuses options that exclude each other.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let name = self.model.name();
        let refuse = |why: String| Err(Error::Options(why));
        if self.workers == 0 {
            return refuse("cannot serve with 0 workers; give 1 or more".to_owned());
        }
        if self.workers > 1 && !self.model.has_workers() {
            return refuse(format!(
                "the {name} model has one worker, not {}; leave --workers out, or choose {}",
                self.workers,
                match self.model {
                    Model::Epoll | Model::Poll => "epoll-prefork",
                    Model::Threaded => "prethreaded",
                    _ => "preforked",
                }
            ));
        }
        let own = matches!(
            self.model,
            Model::Preforked | Model::EpollPrefork | Model::IoUring | Model::Reuseport
        );
        if self.reuseport && !own {
            return refuse(format!(
                "the {name} model does not share its listeners by --reuseport; leave it out, or choose reuseport"
            ));
        }
        let lockable = match self.accept_lock {
            None | Some(AcceptLock::None) => true,
            Some(AcceptLock::Pthread) => {
                matches!(self.model, Model::Preforked | Model::Prethreaded)
            }
            // Locks of files belong to processes or descriptions, not to threads.
            Some(AcceptLock::Flock | AcceptLock::Fcntl) => self.model == Model::Preforked,
        };
        if !lockable {
            return refuse(format!(
                "the {name} model has no such --accept-lock; preforked has all, prethreaded has pthread and none"
            ));
        }
        if self.model == Model::Dispatched && self.listen != Listen::Inherited {
            return refuse(
                "the dispatched model needs somebody who steers; start it as \
                 `wakeone run -w 4 -l ADDR -- wakeone-lab serve --model dispatched`"
                    .to_owned(),
            );
        }
        Ok(())
    }
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options")
            .field("model", &self.model)
            .field("workers", &self.workers)
            .field("listen", &self.listen)
            .finish_non_exhaustive()
    }
}
