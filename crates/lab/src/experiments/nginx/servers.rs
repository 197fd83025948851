//! nginx in the ways that its users can have it, with a handler that blocks its worker.

use std::net::SocketAddr;

use crate::Error;
use crate::answers::Answers;
use crate::experiment::Sample;
use crate::nginx::{self, Blocking};
use crate::process::leaves;
use crate::scratch::Scratch;
use crate::server::{Server, free_address};
use crate::steered::Attached;

/// A way of having nginx hand out connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// As it is: one listener in the epoll instances of all workers, with EPOLLEXCLUSIVE.
    Default,
    /// One listener; who holds the mutex has it in its epoll instance.
    AcceptMutex,
    /// A listener a worker; the kernel's hash chooses.
    Reuseport,
    /// The same, and `wakeone attach`.
    Attach,
    /// The same, and `wakeone attach --rescue`.
    AttachRescue,
}

/// All of them, in the order of history.
pub const ALL: [Kind; 5] = [
    Kind::Default,
    Kind::AcceptMutex,
    Kind::Reuseport,
    Kind::Attach,
    Kind::AttachRescue,
];

impl Kind {
    /// Last part of the variants' names.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Default => "default",
            Kind::AcceptMutex => "accept-mutex",
            Kind::Reuseport => "reuseport",
            Kind::Attach => "reuseport+attach",
            Kind::AttachRescue => "reuseport+attach+rescue",
        }
    }

    /// Its place in the palette of the charts: that of the same way in the other experiments.
    pub fn colour(self) -> usize {
        match self {
            Kind::Default => 1,
            Kind::AcceptMutex => 0,
            Kind::Reuseport => 2,
            Kind::Attach => 3,
            Kind::AttachRescue => 4,
        }
    }

    /// Whether Wakeone chooses.
    pub fn steered(self) -> bool {
        matches!(self, Kind::Attach | Kind::AttachRescue)
    }

    fn setup(self, workers: usize) -> nginx::Setup<'static> {
        nginx::Setup {
            workers,
            listen: match self {
                Kind::Default | Kind::AcceptMutex => "",
                _ => "reuseport",
            },
            events: match self {
                Kind::AcceptMutex => "accept_mutex on;",
                _ => "",
            },
            ..nginx::Setup::default()
        }
    }
}

/// A running nginx, steered or not. Dropping it detaches, ends nginx and removes its files.
pub struct Running {
    kind: Kind,
    /// Where it listens.
    pub address: SocketAddr,
    /// Its books and its clients'.
    pub answers: Answers,
    /// Its workers, by process id, rising.
    pub workers: Vec<u32>,
    attached: Option<Attached>,
    server: Server,
    _scratch: Scratch,
}

impl Running {
    /// Starts it, and attaches where this is the way.
    ///
    /// # Errors
    /// When it does not become ready, or cannot be steered.
    pub fn start(kind: Kind, workers: usize) -> Result<Self, Error> {
        let (scratch, address) = (Scratch::new("nginx")?, free_address()?);
        let blocking = Blocking::new(&scratch)?;
        let server = blocking
            .setup(kind.setup(workers))
            .start(&scratch, address)?;
        let mut workers = leaves(server.pid());
        workers.sort_unstable();
        let attached = match kind {
            Kind::Attach => Some(Attached::to(address, false)?),
            Kind::AttachRescue => Some(Attached::to(address, true)?),
            _ => None,
        };
        Ok(Self {
            kind,
            address,
            answers: Answers::new()?,
            workers,
            attached,
            server,
            _scratch: scratch,
        })
    }

    /// Detaches, stops it in order and closes the books; the counts go into the sample.
    ///
    /// # Errors
    /// When it does not end well, or the counts contradict each other.
    pub fn stop(mut self, sample: &mut Sample) -> Result<(), Error> {
        if let Some(attached) = self.attached.take() {
            attached.end()?;
        }
        let made = nginx::requests(self.address)?;
        self.server.stop()?;
        let what = format!("nginx, {}", self.kind.name());
        self.answers.close_with(made, &what, sample)
    }
}
