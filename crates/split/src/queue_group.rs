//! The group of a shared UDP socket: the queues beside it are steered together.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use wakeone_bpf::chooser::{Chooser, Choosers};
use wakeone_kernel::capability;
use wakeone_kernel::socket;
use wakeone_kernel::socket::diag::{self, Entry, Which};
use wakeone_model::listener::Protocol;

use super::config::SplitConfig;
use super::known::{self, KnownSockets};
use super::reason::Reason;
use wakeone::attach::name_of;
use wakeone::metrics::Source;
use wakeone::steered::{Origin, SteeredGroup};
use wakeone_control::paths::Paths;
use wakeone_control::privileges::FOR_LOADING;
use wakeone_control::state;
use wakeone_control::state::{Endpoint, ListenAt};
use wakeone_control::steer::SteerEvent;
use wakeone_kernel::socket::inode_of;
use wakeone_steering::agent::AgentConfig;
use wakeone_steering::dispatcher::{Dispatcher, Plan};
use wakeone_steering::slot_sockets::RemoteFd;

/// A queue that was made and is not yet in its place.
#[derive(Debug)]
pub struct NewQueue {
    /// The inode of the shared socket that it is for.
    pub original: u64,
    /// The socket.
    pub queue: OwnedFd,
    /// Its inode.
    pub inode: u64,
    /// Its cookie.
    pub cookie: u64,
}

impl NewQueue {
    /// Wraps a socket that was just made.
    ///
    /// # Errors
    /// It cannot be identified.
    pub fn of(original: u64, queue: OwnedFd) -> Result<Self, Reason> {
        let refused = |error: io::Error| Reason::Sibling(error.to_string());
        Ok(Self {
            original,
            inode: inode_of(&queue).map_err(refused)?,
            cookie: socket::cookie(&queue).map_err(refused)?,
            queue,
        })
    }

    /// The socket.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }

    /// The place to borrow it from as long as only we hold it.
    fn ours(&self) -> RemoteFd {
        RemoteFd {
            pid: std::process::id(),
            fd: self.queue.as_raw_fd(),
            inode: self.inode,
        }
    }
}

/// The group of a shared socket.
#[derive(Debug)]
pub struct QueueGroup {
    /// The address that its sockets are bound to.
    pub address: SocketAddr,
    dual_stack: bool,
    known: KnownSockets,
    announced: bool,
    /// `None` until there is a queue.
    pub steered: Option<SteeredGroup>,
}

impl fmt::Display for QueueGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/udp", self.address)
    }
}

impl QueueGroup {
    /// Makes the group of a shared socket. It has no queue yet.
    ///
    /// # Errors
    /// The socket has no address, or is gone.
    pub fn of(socket: BorrowedFd<'_>) -> io::Result<Self> {
        Ok(Self {
            address: socket::address(socket).ok_or(io::ErrorKind::Unsupported)?,
            dual_stack: socket::is_dual_stack(socket),
            known: KnownSockets::of(inode_of(socket)?),
            announced: false,
            steered: None,
        })
    }

    /// Checks that the server has made no group of sockets at the address itself, nor set a program.
    ///
    /// # Errors
    /// It has.
    pub fn is_alone(&self, socket: BorrowedFd<'_>) -> Result<(), Reason> {
        let hidden = |error: io::Error| Reason::Hidden(error.to_string());
        let port = self.address.port();
        let all = diag::sockets(Protocol::Udp, Which::Listening, port).map_err(hidden)?;
        let inode = inode_of(socket).map_err(hidden)?;
        let sibling = |one: &Entry| one.local == self.address && one.socket.inode != inode;
        if all.iter().any(sibling) {
            return Err(Reason::Several);
        }
        let cookie = socket::cookie(socket).map_err(hidden)?;
        // Where it cannot be asked, no program of ours will choose either.
        let seen = capability::with(&FOR_LOADING, || {
            Choosers::of(Protocol::Udp, port)?.look(None)
        });
        let has_own = |one: &Chooser| one.cookie == cookie && one.program.is_some();
        match seen.is_ok_and(|seen| seen.iter().any(has_own)) {
            true => Err(Reason::Chooser),
            false => Ok(()),
        }
    }

    /// Its name.
    pub fn name(&self) -> String {
        name_of(Protocol::Udp, self.address.into(), None)
    }

    /// Whether this is the shared socket, or one of its queues.
    pub fn knows(&self, inode: u64) -> bool {
        self.known.contains(inode)
    }

    /// Whether a queue was ever made.
    pub fn has_had_queues(&self) -> bool {
        self.known.has_queues()
    }

    /// Notes a queue that was made.
    pub fn know(&mut self, queue: u64) {
        let port = self.address.port();
        self.known.insert(queue, || known::in_use(port));
    }

    /// Whether this is the first call, so that the log is to tell that the socket is split.
    pub fn is_news(&mut self) -> bool {
        !std::mem::replace(&mut self.announced, true)
    }

    /// Whether our program chooses among its queues.
    pub fn is_steered(&self) -> bool {
        self.steered
            .as_ref()
            .is_some_and(|one| one.agent().is_some())
    }

    /// The source of its metrics.
    pub fn source(&self, paths: &Paths) -> Option<Source> {
        let steered = self.steered.as_ref()?;
        let source = || steered.source(paths, false);
        Some(capability::with(&FOR_LOADING, source))
    }

    /// Takes the group's folder, for the first queue.
    ///
    /// # Errors
    /// The folder cannot be had.
    pub fn take(&self, paths: &Paths) -> Result<SteeredGroup, Reason> {
        let origin = Origin {
            listen: ListenAt::Inet(Endpoint {
                address: self.address,
                dual_stack: self.dual_stack,
                udp: true,
            }),
            command: vec![state::SPLIT.into()],
            attached: true,
            network: None,
        };
        SteeredGroup::take(&paths.runtime, &self.name(), origin)
            .map_err(|error| Reason::Steering(error.to_string()))
    }

    /// Gives a socket a slot, or notes who serves it now.
    pub fn assign(&mut self, cookie: u64, remote: RemoteFd, worker: u32) {
        if let Some(steered) = &mut self.steered {
            steered.assign_or_warn(cookie, remote, worker);
        }
    }

    /// Stops choosing a socket, and frees its slot. Returns whether it had one.
    pub fn leave(&mut self, cookie: u64) -> bool {
        self.steered.as_mut().is_some_and(|one| one.leave(cookie))
    }

    /// Writes down which process serves which socket.
    pub fn store(&self) {
        if let Some(steered) = &self.steered {
            steered.keep();
        }
    }

    /// Writes a state that could not be written before.
    pub fn catch_up(&self) {
        if let Some(steered) = &self.steered {
            steered.catch_up();
        }
    }

    /// The events that its agent saw.
    pub fn events(&mut self) -> Vec<SteerEvent> {
        let steered = self.steered.as_mut();
        steered.map(SteeredGroup::events).unwrap_or_default()
    }

    /// Removes program, pins and state.
    pub fn end(self) {
        if let Some(steered) = self.steered {
            steered.end();
        }
    }
}

/// Has our program choose from the first queue on, which only we hold as yet.
///
/// # Errors
/// The program cannot be loaded.
pub fn steer(
    group: &mut SteeredGroup,
    plan: &Plan<'_>,
    queue: &NewQueue,
    config: &SplitConfig,
) -> Result<(), Reason> {
    let ours = queue.ours();
    let start = || Dispatcher::start_beside(plan, vec![(queue.cookie, ours)]);
    let dispatcher = capability::with(&FOR_LOADING, start)
        .map_err(|error| Reason::Steering(error.to_string()))?;
    let tasks = AgentConfig {
        // Datagrams in UDP sockets cannot be moved.
        rescue: false,
        stuck_after: config.stuck_after,
    };
    group.steer(
        dispatcher,
        tasks,
        &config.paths,
        &config.rounds,
        [(queue.cookie, ours, None)],
    );
    Ok(())
}
