//! UDP sockets on one address for a program of its own, a queue for each thread, steered as well as this machine and
//! our privileges allow; with many datagrams to a system call.
//!
//! ```no_run
//! use wakeone::udp_group::{Batch, Options, UdpGroup};
//!
//! let group = UdpGroup::open("127.0.0.1:5353".parse().unwrap(), 4, &Options::default())?;
//! println!("{}", group.steering());
//! let threads: Vec<_> = group
//!     .into_sockets()
//!     .into_iter()
//!     .map(|socket| {
//!         std::thread::spawn(move || -> std::io::Result<()> {
//!             let mut batch = Batch::new(32, 2048);
//!             loop {
//!                 socket.receive(&mut batch)?;
//!                 let answers: Vec<_> = batch.datagrams().map(|one| (one.bytes, one.from)).collect();
//!                 socket.send(&answers)?;
//!             }
//!         })
//!     })
//!     .collect();
//! for thread in threads {
//!     thread.join().expect("a thread")?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::fmt;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::net::{SocketType, sockopt};
use wakeone_kernel::batch;
pub use wakeone_kernel::batch::{Batch, Datagram};
use wakeone_kernel::inherited;
use wakeone_kernel::socket::{self, ClassicChoice, cookie};

use crate::agent::AgentConfig;
use crate::dispatcher::{self, Dispatcher, Plan};
use crate::paths::Paths;
use crate::policy::{Affinity, Policy};
use crate::slot_sockets::RemoteFd;
use crate::steered::{Origin, SteeredGroup};
use crate::supervisor::adopt::inode_of;
use crate::supervisor::listen::{self, Endpoint, ListenError};
use crate::supervisor::state::{self, StateError};

/// What a group is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// How a socket is chosen; `None`: shortest-queue, or the best that may be had.
    pub policy: Option<Policy>,
    /// What keeps datagrams of one flow together; `None`: flow, as far as it can be had.
    pub affinity: Option<Affinity>,
    /// Have the kernel join datagrams of one sender (UDP_GRO). A [`Batch`] for it should have room for 65,535 bytes.
    pub join_datagrams: bool,
    /// How long a thread may leave datagrams waiting while another is idle.
    pub stuck_after: Duration,
    /// Where the group is written down, for `wakeone status`.
    pub runtime_dir: PathBuf,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            policy: None,
            affinity: None,
            join_datagrams: false,
            stuck_after: Duration::from_millis(5),
            runtime_dir: state::default_runtime_dir(),
        }
    }
}

/// Why there is no group, as one sentence.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The sockets cannot be had.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// They cannot be steered as was asked for.
    #[error(transparent)]
    Steering(#[from] dispatcher::Error),
    /// The group cannot be written down.
    #[error(transparent)]
    State(#[from] StateError),
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What it said.
        source: io::Error,
    },
    /// No UDP socket was handed over.
    #[error(
        "no UDP socket was handed over (LISTEN_FDS): start it with `wakeone run -l udp://ADDRESS -- COMMAND`, or open one"
    )]
    NotInherited,
}

/// Who chooses a socket for a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// Our program.
    Program(Policy, Affinity),
    /// A classic program, which needs no privilege: random or cpu. Flows are not kept together.
    Classic(Policy),
    /// The kernel's hash of addresses and ports.
    Kernel,
    /// Whoever handed the sockets over.
    Giver,
}

/// How a group is steered, and why not better.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Steering {
    /// Who chooses.
    pub choice: Choice,
    /// Why our program does not, where it should have.
    pub why_less: Option<String>,
}

impl fmt::Display for Steering {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.choice {
            Choice::Program(policy, affinity) => write!(f, "{policy}, affinity {affinity}")?,
            Choice::Classic(policy) => write!(f, "{policy}, by a classic program")?,
            Choice::Kernel => f.write_str("the kernel's hash")?,
            Choice::Giver => f.write_str("as whoever handed the sockets over does")?,
        }
        match &self.why_less {
            Some(why) => write!(f, " ({why})"),
            None => Ok(()),
        }
    }
}

/// UDP sockets on one address.
#[derive(Debug)]
pub struct UdpGroup {
    sockets: Vec<GroupSocket>,
    steering: Steering,
}

impl UdpGroup {
    /// Opens `sockets` sockets (at least 1, at most 256) on an address; port 0 lets the kernel choose one for all. It
    /// is in use where anybody is there already.
    ///
    /// # Errors
    /// See [`Error`]; what was not asked for by name is had in a lesser way instead, see [`UdpGroup::steering`].
    pub fn open(address: SocketAddr, sockets: usize, options: &Options) -> Result<Self, Error> {
        let wanted = Endpoint {
            address,
            dual_stack: false,
            udp: true,
        };
        let count = sockets.clamp(1, state::MOST_SLOTS);
        let (endpoint, sockets) = listen::bind_group(wanted, count)?;
        if options.join_datagrams {
            sockets
                .iter()
                .try_for_each(batch::join_datagrams)
                .map_err(system("set UDP_GRO"))?;
        }
        let (steered, steering) = match Steered::start(endpoint, &sockets, options) {
            Ok(steered) => {
                let policy = options.policy.unwrap_or(Policy::FOR_DATAGRAMS);
                let affinity = options.affinity.unwrap_or_default();
                let steering = Steering {
                    choice: Choice::Program(policy, affinity),
                    why_less: None,
                };
                (Some(Arc::new(steered)), steering)
            }
            Err(Error::Steering(error)) => (None, fallback(&sockets, options, error)?),
            Err(error) => return Err(error),
        };
        let member = |socket: OwnedFd| GroupSocket {
            socket: UdpSocket::from(socket),
            group: steered.clone(),
        };
        Ok(Self {
            sockets: sockets.into_iter().map(member).collect(),
            steering,
        })
    }

    /// The UDP sockets that were handed over to this process: by `wakeone run -l udp://…`, which steers them, or by
    /// systemd. Other descriptors that were handed over are closed: call it where all are of UDP.
    ///
    /// # Errors
    /// There is none, or they were taken already.
    pub fn inherited() -> Result<Self, Error> {
        let given = inherited::take().map_err(system("take what was handed over"))?;
        let is_udp = |fd: &OwnedFd| sockopt::socket_type(fd) == Ok(SocketType::DGRAM);
        let sockets: Vec<GroupSocket> = given
            .into_iter()
            .filter(is_udp)
            .map(|fd| GroupSocket {
                socket: UdpSocket::from(fd),
                group: None,
            })
            .collect();
        if sockets.is_empty() {
            return Err(Error::NotInherited);
        }
        Ok(Self {
            sockets,
            steering: Steering {
                choice: Choice::Giver,
                why_less: None,
            },
        })
    }

    /// How it is steered.
    pub fn steering(&self) -> &Steering {
        &self.steering
    }

    /// Where its sockets are bound.
    ///
    /// # Errors
    /// What getsockname says.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        let first = self.sockets.first().ok_or(io::ErrorKind::NotFound)?;
        first.socket.local_addr()
    }

    /// Its sockets, one for each thread. Steering ends with the last of them.
    pub fn into_sockets(self) -> Vec<GroupSocket> {
        self.sockets
    }
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::System { what, source }
}

/// What can be had without our program, where that was not asked for.
fn fallback(
    sockets: &[OwnedFd],
    options: &Options,
    error: dispatcher::Error,
) -> Result<Steering, Error> {
    let Some(policy) = Policy::without_program(options.policy, options.affinity) else {
        return Err(error.into());
    };
    let classic = match policy {
        Policy::Random => Some(ClassicChoice::Random),
        Policy::Cpu => Some(ClassicChoice::Cpu),
        _ => None,
    };
    if let (Some(choice), Some(first)) = (classic, sockets.first()) {
        socket::attach_classic(first, choice, sockets.len() as u32)
            .map_err(system("attach a classic program"))?;
    }
    Ok(Steering {
        choice: match classic {
            Some(_) => Choice::Classic(policy),
            None => Choice::Kernel,
        },
        why_less: Some(error.to_string()),
    })
}

/// A steered group that ends with the last of its sockets.
#[derive(Debug)]
struct Steered(Mutex<Option<SteeredGroup>>);

impl Steered {
    fn start(endpoint: Endpoint, sockets: &[OwnedFd], options: &Options) -> Result<Self, Error> {
        let name = name_of(endpoint);
        let paths = Paths::of(&options.runtime_dir);
        let origin = Origin {
            listen: endpoint,
            backlog: 0,
            command: std::env::args().collect(),
            attached: false,
        };
        let mut group = SteeredGroup::take(&options.runtime_dir, &name, origin)?;
        let plan = Plan {
            by_name: options.policy.is_some(),
            datagrams: Some(options.affinity.unwrap_or_default()),
            ..Plan::new(
                &name,
                &paths,
                options.policy.unwrap_or(Policy::FOR_DATAGRAMS),
            )
        };
        let copy = |socket: &OwnedFd| Ok(vec![socket.try_clone()?]);
        let copies: io::Result<Vec<_>> = sockets.iter().map(copy).collect();
        let dispatcher = Dispatcher::start(&plan, copies.map_err(system("copy a socket"))?)?;
        let config = AgentConfig {
            rescue: false,
            stuck_after: options.stuck_after,
        };
        let own = std::process::id();
        let seats = sockets.iter().filter_map(|socket| {
            let remote = RemoteFd {
                pid: own,
                fd: socket.as_raw_fd(),
                inode: inode_of(socket).ok()?,
            };
            Some((cookie(socket).ok()?, remote, Some(own)))
        });
        group.steer(dispatcher, config, &paths, seats);
        if let Err(error) = group.store() {
            group.end();
            return Err(error.into());
        }
        Ok(Self(Mutex::new(Some(group))))
    }

    /// A socket is about to be closed: what comes from now on goes to others.
    fn leave(&self, socket: &UdpSocket) {
        let mut group = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Some(group), Ok(cookie)) = (group.as_mut(), cookie(socket)) {
            group.leave(cookie);
        }
    }
}

impl Drop for Steered {
    fn drop(&mut self) {
        let group = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(group) = group.take() {
            group.end();
        }
    }
}

/// Several programs may have groups, one after the other, on one address.
fn name_of(endpoint: Endpoint) -> String {
    let address = endpoint.address.to_string();
    let plain = address.trim_start_matches('[').replace("]:", "-");
    format!("udp-{}", plain.replace(['.', ':', '%'], "-"))
}

/// A socket of a group.
///
/// Dropping it takes it out of the group first. What waits in it then is lost: read it empty before, where each
/// datagram counts ([`GroupSocket::retire`]).
#[derive(Debug)]
pub struct GroupSocket {
    socket: UdpSocket,
    group: Option<Arc<Steered>>,
}

impl GroupSocket {
    /// Waits until datagrams are there, and takes as many as are there and fit. Returns how many.
    ///
    /// # Errors
    /// What recvmmsg says.
    pub fn receive(&self, batch: &mut Batch) -> io::Result<usize> {
        batch.receive(&self.socket)
    }

    /// Sends datagrams, each to its address, by as few system calls as can be.
    ///
    /// # Errors
    /// What sendmmsg says of the first one that cannot be sent; those before it were.
    pub fn send(&self, datagrams: &[(&[u8], SocketAddr)]) -> io::Result<()> {
        let mut rest = datagrams;
        while !rest.is_empty() {
            let sent = batch::send(&self.socket, rest)?;
            rest = &rest[sent..];
        }
        Ok(())
    }

    /// Has nothing more placed here, and gives the socket, to be read empty and closed. Without our program the kernel
    /// goes on placing datagrams here until it is closed.
    pub fn retire(mut self) -> io::Result<UdpSocket> {
        self.leave();
        self.socket.try_clone()
    }

    /// The socket itself.
    pub fn socket(&self) -> &UdpSocket {
        &self.socket
    }

    fn leave(&mut self) {
        if let Some(group) = self.group.take() {
            group.leave(&self.socket);
        }
    }
}

impl AsFd for GroupSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for GroupSocket {
    fn drop(&mut self) {
        self.leave();
    }
}
