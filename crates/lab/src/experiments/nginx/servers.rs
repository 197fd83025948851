//! nginx in the ways that its users can have it, with a handler that blocks its worker.

use crate::error::Error;
use crate::launch::Launch;
use crate::nginx::Setup;

/// A way in which nginx hands out connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// nginx's default: one listener in the epoll instances of all workers, with EPOLLEXCLUSIVE.
    Default,
    /// One listener. The worker that holds the mutex has it in its epoll instance.
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

    /// The server.
    ///
    /// # Errors
    /// When nginx has no module whose handlers block.
    pub fn launch(self, workers: usize) -> Result<Launch, Error> {
        let setup = Setup {
            listen: match self {
                Kind::Default | Kind::AcceptMutex => "",
                _ => "reuseport",
            },
            events: match self {
                Kind::AcceptMutex => "accept_mutex on;",
                _ => "",
            },
            ..Setup::blocking(workers)?
        };
        Ok(Launch {
            attached: self.steered().then_some(self == Kind::AttachRescue),
            ..setup.launch(format!("nginx, {}", self.name()))
        })
    }
}
