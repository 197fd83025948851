//! The content of a state file. It is read as if an attacker had written it.

use std::collections::HashSet;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use wakeone_kernel::proc::process;
use wakeone_kernel::proc::stat::{Stat, TICK_NS};
use wakeone_model::address::{Address, UnixName};
use wakeone_model::listener::Protocol;
use wakeone_model::network::Network;

use crate::account::Account;

/// The version of the file's format.
pub const SCHEMA: u32 = 1;
/// Stands for the command of an attached server whose UDP queues were made by `wakeone run --split`.
pub const SPLIT: &str = "--split";
/// Most slots of a group.
pub const MOST_SLOTS: usize = 256;
/// Most addresses of a group.
pub const MOST_ADDRESSES: usize = 16;

/// A group as its supervisor last wrote it down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The group's name.
    pub name: String,
    /// The kernel's boot id: pids of another boot mean nothing.
    pub boot: String,
    /// The process that wrote it.
    pub supervisor: Identity,
    /// The addresses where it listens, in the order of the workers' descriptors.
    pub listen: Vec<ListenAt>,
    /// The listeners' backlog.
    pub backlog: i32,
    /// The command of its workers, and its account.
    pub task: Task,
    /// Its slots.
    pub slots: Vec<SlotRecord>,
    /// The server is not ours and is steered from outside: `supervisor` is the agent, and starts and ends no worker.
    #[serde(default)]
    pub attached: bool,
    /// All of its workers have the same TCP listeners, and not each its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub one_queue: bool,
    /// The private ports of the listeners, if they are on such: one entry for each of `listen`, or none at all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reserved: Vec<Option<Reserved>>,
    /// How many workers there are to be, in the first slots; 0: nobody says.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub workers: usize,
    /// How many of them serve; 0 while there are others than there are to be.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub serving: usize,
    /// Why that number cannot change while the supervisor runs, as the end of a sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fixed: Option<String>,
    /// The network namespace of its sockets, if that is not the one that its supervisor was started in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Network>,
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// An address whose listeners are on a private port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reserved {
    /// The listeners' port.
    pub private_port: u16,
    /// The inode of the socket that reserves the public address.
    pub inode: u64,
}

/// The command of workers and its account: two tasks that differ are different servers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Task {
    /// The command, placeholders not yet filled in.
    pub command: Vec<String>,
    /// The account that runs it.
    pub account: Option<Account>,
    /// Capabilities that it keeps.
    pub keep_caps: Vec<String>,
    /// Its listeners are non-blocking from the start.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub nonblocking: bool,
    /// Its listener is its standard input.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stdin: bool,
}

/// A slot as written down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlotRecord {
    /// Its worker, if one ran.
    pub worker: Option<Identity>,
    /// Whether that worker runs the task above, not an earlier one.
    pub current: bool,
    /// The inode of its listener at each address, by which it is found among the worker's descriptors.
    pub inodes: Vec<u64>,
    /// In a rolling restart: the second worker of the slot, which starts or ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside: Option<Beside>,
    /// Its worker has ended, and `worker` only keeps its listeners.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub orphaned: bool,
}

/// A second worker of a slot, with listeners of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Beside {
    /// The worker.
    pub worker: Identity,
    /// The inode of its listener at each address.
    pub inodes: Vec<u64>,
}

/// A process's permanent identity: a pid is used again, but a pid with its start time is not (until the next boot).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// The process id.
    pub pid: u32,
    /// Field 22 of /proc/PID/stat: clock ticks since boot.
    pub started: u64,
}

impl Identity {
    /// The identity of the process that has this pid now.
    ///
    /// # Errors
    /// There is none, or /proc cannot be read.
    pub fn of(pid: u32) -> io::Result<Self> {
        let started = Stat::of(pid)?.started;
        Ok(Self { pid, started })
    }

    /// How long it has run, or would have.
    pub fn age(&self) -> Duration {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let now = Duration::new(now.tv_sec as u64, now.tv_nsec as u32);
        now.saturating_sub(Duration::from_nanos(self.started.saturating_mul(TICK_NS)))
    }

    /// Whether this very process still runs (in this boot). A zombie does not. If process 1 never waits for children,
    /// orphans stay zombies for ever.
    pub fn lives(&self) -> bool {
        Self::of(self.pid).is_ok_and(|now| now == *self)
            && !matches!(process::state(self.pid), Some('Z' | 'X'))
    }
}

/// An address of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub enum ListenAt {
    /// IP.
    Inet(Endpoint),
    /// A UNIX socket, of a server that is attached to.
    Unix {
        /// Its name.
        address: UnixName,
    },
}

impl ListenAt {
    /// That of a listener.
    pub fn of(protocol: Protocol, address: Address) -> Self {
        match address {
            Address::Unix(address) => Self::Unix { address },
            Address::Inet(address) => Self::Inet(Endpoint {
                address,
                dual_stack: false,
                udp: protocol == Protocol::Udp,
            }),
        }
    }

    /// Returns the address.
    pub fn address(&self) -> Address {
        match self {
            Self::Inet(endpoint) => endpoint.address.into(),
            Self::Unix { address } => (*address).into(),
        }
    }

    /// Returns that of IP.
    pub fn endpoint(&self) -> Option<Endpoint> {
        match self {
            Self::Inet(endpoint) => Some(*endpoint),
            Self::Unix { .. } => None,
        }
    }

    /// Returns the protocol of its sockets.
    pub fn protocol(&self) -> Protocol {
        match self {
            Self::Inet(endpoint) => endpoint.protocol(),
            Self::Unix { .. } => Protocol::Unix,
        }
    }
}

impl From<Endpoint> for ListenAt {
    fn from(endpoint: Endpoint) -> Self {
        Self::Inet(endpoint)
    }
}

impl fmt::Display for ListenAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inet(endpoint) => endpoint.fmt(f),
            Self::Unix { .. } => self.address().fmt(f),
        }
    }
}

/// Where listeners are bound: an address, and whether an IPv6 wildcard takes IPv4 too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Endpoint {
    /// The address and port.
    pub address: SocketAddr,
    /// `[::]` that takes IPv4 connections too.
    pub dual_stack: bool,
    /// UDP sockets, which are bound and do not listen; else TCP.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub udp: bool,
}

impl Endpoint {
    /// Returns the protocol of its sockets.
    pub fn protocol(&self) -> Protocol {
        if self.udp {
            Protocol::Udp
        } else {
            Protocol::Tcp
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.udp {
            f.write_str("udp://")?;
        }
        self.address.fmt(f)?;
        if self.dual_stack {
            f.write_str(" (IPv6 and IPv4)")
        } else {
            Ok(())
        }
    }
}

impl State {
    /// Whether its queues were made beside a shared socket that nobody serves. Then the kernel's hash must not
    /// choose.
    pub fn is_split(&self) -> bool {
        self.attached
            && self
                .task
                .command
                .first()
                .is_some_and(|first| first == SPLIT)
    }

    /// Returns its addresses of IP.
    pub fn endpoints(&self) -> Vec<Endpoint> {
        self.listen.iter().filter_map(ListenAt::endpoint).collect()
    }

    /// Encodes the state as JSON.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).unwrap_or_default()
    }

    /// Decodes the state, and checks all that can be checked without looking at processes.
    ///
    /// # Errors
    /// The flaw, as part of a sentence.
    pub fn decode(bytes: &[u8], name: &str) -> Result<Self, String> {
        let state: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        let wrong = state.flaw(name);
        wrong.map_or(Ok(state), |flaw| Err(flaw.to_owned()))
    }

    fn flaw(&self, name: &str) -> Option<&'static str> {
        let mut seen = HashSet::new();
        let beside = || self.slots.iter().filter_map(|slot| slot.beside.as_ref());
        let inodes = self.slots.iter().flat_map(|slot| &slot.inodes);
        let inodes = inodes.chain(beside().flat_map(|beside| &beside.inodes));
        let workers = || {
            let first = self.slots.iter().filter_map(|slot| slot.worker);
            first.chain(beside().map(|beside| beside.worker))
        };
        let pids: HashSet<u32> = workers().map(|worker| worker.pid).collect();
        let checks = [
            (self.schema == SCHEMA, "its schema is of another version"),
            (self.name == name, "it names another group"),
            (
                (1..=MOST_ADDRESSES).contains(&self.listen.len()),
                "its number of addresses is impossible",
            ),
            (
                self.listen.iter().all(|at| at.address().port() != Some(0)),
                "an address has no port",
            ),
            (
                self.attached || self.listen.iter().all(|at| at.endpoint().is_some()),
                "a UNIX socket is not of a server that is attached to",
            ),
            (
                self.network.as_ref().is_none_or(Network::is_sound),
                "its network namespace is impossible",
            ),
            (
                (1..=MOST_SLOTS).contains(&self.slots.len()),
                "its number of slots is impossible",
            ),
            (
                self.serving <= self.workers && self.workers <= self.slots.len(),
                "its number of workers is impossible",
            ),
            (self.backlog >= 0, "its backlog is negative"),
            (
                self.reserved.is_empty() || self.reserved.len() == self.listen.len(),
                "its number of reserved addresses is impossible",
            ),
            (
                self.reserved
                    .iter()
                    .flatten()
                    .all(|one| one.private_port != 0),
                "a reserved address has no private port",
            ),
            (
                self.attached || !self.task.command.is_empty(),
                "it has no command",
            ),
            (
                self.slots.iter().all(|slot| {
                    slot.inodes.len() == self.listen.len()
                        || self.attached && slot.inodes.is_empty()
                }),
                "a slot lacks a listener",
            ),
            (
                beside().all(|beside| beside.inodes.len() == self.listen.len()),
                "a second worker lacks a listener",
            ),
            (
                // The workers of others may share one queue. 0: its worker has not opened its own yet.
                inodes
                    .into_iter()
                    .all(|inode| *inode == 0 || seen.insert(*inode))
                    || self.attached
                    || self.one_queue,
                "two slots have the same listener",
            ),
            (
                workers().all(|worker| worker.pid > 1 && i32::try_from(worker.pid).is_ok()),
                "a pid is impossible",
            ),
            (
                self.attached || pids.len() == workers().count(),
                "two slots have the same worker",
            ),
        ];
        checks
            .iter()
            .find(|(holds, _)| !holds)
            .map(|(_, flaw)| *flaw)
    }
}

/// Whether a text can name a group: it becomes a folder here and under bpffs, which forbids dots.
pub fn is_name(text: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    (1..=64).contains(&text.len()) && !text.starts_with('-') && text.bytes().all(fits)
}
