//! UDP sockets on one address for a program of its own, a queue for each thread. They are steered as well as this
//! machine and our privileges allow, and take many datagrams with one system call.
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
use wakeone_kernel::cgroup;
use wakeone_kernel::socket::batch;
pub use wakeone_kernel::socket::batch::{Batch, Datagram};
use wakeone_kernel::socket::inherited;
use wakeone_kernel::socket::{self, ClassicChoice, cookie};

use crate::steered::{Origin, SteeredGroup};
use wakeone_control::paths::{Paths, plain_name};
use wakeone_control::policy::{Affinity, Policy};
use wakeone_control::state::{self, StateError};
use wakeone_kernel::socket::inode_of;
use wakeone_steering::agent::{AgentConfig, Rounds};
use wakeone_steering::dispatcher::{self, Dispatcher, Plan};
use wakeone_steering::slot_sockets::RemoteFd;
use wakeone_supervisor::listen::{self, Endpoint, ListenError};
use wakeone_supervisor::spawn::QUIC_ID;

/// The settings of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// How a socket is chosen; `None`: shortest-queue, or the best that works here.
    pub policy: Option<Policy>,
    /// How datagrams of one flow are kept together; `None`: flow, as far as that works here.
    pub affinity: Option<Affinity>,
    /// Have the kernel join datagrams of one sender (UDP_GRO). A [`Batch`] for it should have room for 65,535 bytes.
    pub join_datagrams: bool,
    /// How long a thread may leave datagrams waiting while another is idle.
    pub stuck_after: Duration,
    /// The folder for the group's state, which `wakeone status` reads.
    pub runtime_dir: PathBuf,
}

impl Options {
    /// The policy of our program, and what it keeps together.
    fn choice(&self) -> (Policy, Affinity) {
        let affinity = self.affinity.unwrap_or_default();
        let policy = self.policy.unwrap_or(Policy::for_datagrams(affinity));
        (policy, affinity)
    }
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
    /// The sockets cannot be opened.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// They cannot be steered as asked for.
    #[error(transparent)]
    Steering(#[from] dispatcher::Error),
    /// The group's state cannot be written.
    #[error(transparent)]
    State(#[from] StateError),
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    System {
        /// The attempt that failed.
        what: &'static str,
        /// The error of the system call.
        source: io::Error,
    },
    /// No UDP socket was handed over.
    #[error(
        "no UDP socket was handed over (LISTEN_FDS): start it with `wakeone run -l udp://ADDRESS -- COMMAND`, or open one"
    )]
    NotInherited,
}

/// The part that chooses a socket for a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// Our program.
    Program(Policy, Affinity),
    /// A classic program, which needs no privilege: random or cpu. It does not keep flows together.
    Classic(Policy),
    /// The kernel's hash of addresses and ports.
    Kernel,
    /// The program that handed the sockets over.
    Giver,
}

/// How a group is steered, and why it is not steered better.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Steering {
    /// The part that chooses.
    pub choice: Choice,
    /// Why our program does not choose, if it should have.
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
    /// Opens `sockets` sockets (at least 1, at most 256) on an address; port 0 lets the kernel choose one port for all.
    /// Fails if any other socket is on the address.
    ///
    /// # Errors
    /// See [`Error`]. Settings that were left open fall back to less instead, see [`UdpGroup::steering`].
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
                let (policy, affinity) = options.choice();
                let steering = Steering {
                    choice: Choice::Program(policy, affinity),
                    why_less: None,
                };
                (Some(Arc::new(steered)), steering)
            }
            Err(Error::Steering(error)) => (None, fallback(&sockets, options, error)?),
            Err(error) => return Err(error),
        };
        let member = |(slot, socket): (usize, OwnedFd)| GroupSocket {
            socket: UdpSocket::from(socket),
            quic_id: steered.as_ref().and_then(|one| one.quic_id(slot)),
            group: steered.clone(),
        };
        Ok(Self {
            sockets: sockets.into_iter().enumerate().map(member).collect(),
            steering,
        })
    }

    /// Returns the UDP sockets that were handed over to this process: by `wakeone run -l udp://…`, which steers them,
    /// or by systemd. It closes other descriptors that were handed over, so call it only if all are of UDP.
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
                quic_id: std::env::var(QUIC_ID).ok().and_then(|id| id.parse().ok()),
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

    /// Returns how it is steered.
    pub fn steering(&self) -> &Steering {
        &self.steering
    }

    /// Returns the address that its sockets are bound to.
    ///
    /// # Errors
    /// The error of getsockname.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        let first = self.sockets.first().ok_or(io::ErrorKind::NotFound)?;
        first.socket.local_addr()
    }

    /// Returns its sockets, one for each thread. Steering ends with the last of them.
    pub fn into_sockets(self) -> Vec<GroupSocket> {
        self.sockets
    }
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::System { what, source }
}

/// Returns the best steering without our program, if the settings allow that.
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
            listen: endpoint.into(),
            command: std::env::args().collect(),
            attached: false,
            network: None,
        };
        let mut group = SteeredGroup::take(&options.runtime_dir, &name, origin)?;
        let own_cgroup = cgroup::own();
        let (policy, affinity) = options.choice();
        let plan = Plan {
            cgroup: own_cgroup.as_deref().ok(),
            by_name: options.policy.is_some(),
            datagrams: Some(affinity),
            ..Plan::new(&name, &paths, policy)
        };
        let copy = |socket: &OwnedFd| Ok(vec![socket.try_clone()?]);
        let copies: io::Result<Vec<_>> = sockets.iter().map(copy).collect();
        let dispatcher = Dispatcher::start(&plan, copies.map_err(system("copy a socket"))?)?;
        let config = AgentConfig {
            rescue: false,
            stuck_after: options.stuck_after,
        };
        let own = std::process::id();
        let places = sockets.iter().filter_map(|socket| {
            let remote = RemoteFd {
                pid: own,
                fd: socket.as_raw_fd(),
                inode: inode_of(socket).ok()?,
            };
            Some((cookie(socket).ok()?, remote, Some(own)))
        });
        group.steer(dispatcher, config, &paths, &Rounds::new(), places);
        if let Err(error) = group.store() {
            group.end();
            return Err(error.into());
        }
        Ok(Self(Mutex::new(Some(group))))
    }

    /// Has packets of QUIC whose connection ID has a number, which this returns, go to a slot.
    fn quic_id(&self, slot: usize) -> Option<u16> {
        let group = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let agent = group.as_ref()?.agent()?;
        agent.with_dispatcher(|dispatcher| dispatcher.new_token(slot, false).ok())
    }

    /// Takes out a socket that is about to be closed: new datagrams go to others.
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

/// Returns the group's name. Several programs may have groups, one after the other, on one address.
fn name_of(endpoint: Endpoint) -> String {
    format!("udp-{}", plain_name(endpoint.address.into()))
}

/// A socket of a group.
///
/// Dropping it takes it out of the group first. Datagrams that still wait in it are lost. If each datagram counts, read
/// it empty before ([`GroupSocket::retire`]).
#[derive(Debug)]
pub struct GroupSocket {
    socket: UdpSocket,
    quic_id: Option<u16>,
    group: Option<Arc<Steered>>,
}

impl GroupSocket {
    /// Waits for datagrams, and takes as many as are there and fit. Returns how many.
    ///
    /// # Errors
    /// The error of recvmmsg.
    pub fn receive(&self, batch: &mut Batch) -> io::Result<usize> {
        batch.receive(&self.socket)
    }

    /// Sends datagrams, each to its address, with as few system calls as possible.
    ///
    /// # Errors
    /// The error of sendmmsg for the first datagram that cannot be sent; those before it were sent.
    pub fn send(&self, datagrams: &[(&[u8], SocketAddr)]) -> io::Result<()> {
        let mut rest = datagrams;
        while !rest.is_empty() {
            let sent = batch::send(&self.socket, rest)?;
            rest = &rest[sent..];
        }
        Ok(())
    }

    /// Returns the number of this socket for connection IDs of QUIC. A server may put it into the second and third byte of each
    /// ID that it makes, the high byte first. Packets whose ID has it come to this socket, from whatever address. `None`: the
    /// affinity is not [`Affinity::Quic`].
    pub fn quic_id(&self) -> Option<u16> {
        self.quic_id
    }

    /// Stops new datagrams to this socket, and returns it to be read empty and closed. Without our program the kernel
    /// goes on placing datagrams here until it is closed.
    pub fn retire(mut self) -> io::Result<UdpSocket> {
        self.leave();
        self.socket.try_clone()
    }

    /// Returns the socket itself.
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
