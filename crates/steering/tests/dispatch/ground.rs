//! The environment of each test: a network, a folder, a cgroup and listeners of its own.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType, sockopt};
use tempfile::TempDir;
use wakeone_bpf::bpffs;
use wakeone_bpf::recount::{CountIn, Recounted};
use wakeone_bpf::table::{EXITS, Table};
use wakeone_bpf::{self as bpf, Pinned};
use wakeone_control::paths::Paths;
use wakeone_control::policy::Policy;
use wakeone_kernel::capability;
use wakeone_kernel::cgroup;
use wakeone_kernel::netns;
use wakeone_kernel::schedule;
use wakeone_kernel::socket::accept_queue;
use wakeone_steering::dispatcher::{Dispatcher, Error, Plan};

use crate::patience::{in_vain, patience};

/// The group's name in every test. Tests differ by their folders.
pub const NAME: &str = "tested";
pub const V4: &str = "127.0.0.1:8080";
pub const V6: &str = "[::1]:8080";
pub const DUAL: &str = "[::]:8080";
pub const BACKLOG: i32 = 1024;

/// Creating sockets in a cgroup moves the whole process there, so one test runs at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

pub struct Ground {
    pub paths: Paths,
    pub cgroup: PathBuf,
    /// Descriptors of the dispatcher's sockets, by slot.
    pub listeners: Vec<TcpListener>,
    folder: TempDir,
    _alone: MutexGuard<'static, ()>,
}

/// Makes `slots` listeners at one address. Returns `None`, and prints a line, if the kernel would not let us steer
/// them.
pub fn ground(slots: usize, address: &str) -> Option<Ground> {
    Ground::new(|| (0..slots).map(|_| listen(address, BACKLOG)).collect())
}

impl Ground {
    /// Uses the listeners that `make` makes.
    pub fn new(make: impl FnOnce() -> Vec<TcpListener>) -> Option<Self> {
        let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        if !rustix::process::geteuid().is_root() || !capability::missing().is_empty() {
            println!("skipped: not root");
            return None;
        }
        if let Err(error) = cgroup::own() {
            println!("skipped: {error}");
            return None;
        }
        netns::isolate().expect("a network namespace");
        many_descriptors();
        let folder = tempfile::tempdir().expect("folder");
        let paths = Paths::of(&folder.path().join("run"));
        let home = cgroup::own().expect("cgroup");
        let cgroup = home.join(paths.cgroup_name(NAME));
        let (made, listeners) = cgroup::create_sockets_in(&cgroup, make).expect("nursery");
        assert!(made);
        assert_eq!(cgroup::own().expect("cgroup"), home, "we are back");
        Some(Self {
            paths,
            cgroup,
            listeners,
            folder,
            _alone: alone,
        })
    }

    pub fn pins(&self) -> PathBuf {
        self.paths.group_pins(NAME)
    }

    /// Opens a table and maps beside the dispatcher's, found through the pins.
    pub fn pinned(&self) -> Pinned {
        Pinned::open(&self.pins()).expect("pins")
    }

    pub fn plan(&self, policy: Policy) -> Plan<'_> {
        Plan {
            name: NAME,
            paths: &self.paths,
            policy,
            by_name: false,
            weights: &[],
            cgroup: Some(&self.cgroup),
            no_cgroup: None,
            backlog: BACKLOG,
            adopt: false,
            read_queues: true,
            datagrams: None,
            earlier_flows: false,
            shared_socket: false,
            lookup: &[],
            joins: &[],
        }
    }

    pub fn try_start(&self, plan: &Plan<'_>) -> Result<Dispatcher, Error> {
        let copies = self.listeners.iter().map(|one| {
            let copy = one.try_clone().expect("descriptor");
            vec![OwnedFd::from(copy)]
        });
        Dispatcher::start(plan, copies.collect())
    }

    pub fn start(&self, policy: Policy) -> Dispatcher {
        self.try_start(&self.plan(policy)).expect("dispatcher")
    }

    /// Counts in what was open before. `held`: inodes of accepted connections, and their slots.
    pub fn count_in(&self, held: impl IntoIterator<Item = (u64, usize)>) -> Recounted {
        let program = CountIn::of(&self.pins(), &self.cgroup).expect("recount");
        let at = self.listeners[0].local_addr().expect("address");
        program
            .run(at, &held.into_iter().collect(), &self.listeners)
            .expect("recount")
    }

    /// Returns the number of waiting connections, by slot.
    pub fn queues(&self) -> Vec<u32> {
        let length = |one| accept_queue(one).expect("queue").length;
        self.listeners.iter().map(length).collect()
    }

    /// Accepts all connections that wait for a slot.
    pub fn accept(&self, slot: usize) -> Vec<TcpStream> {
        (0..self.queues()[slot])
            .map(|_| self.listeners[slot].accept().expect("accept").0)
            .collect()
    }

    /// Accepts all connections that wait for any slot.
    pub fn accept_all(&self) -> Vec<TcpStream> {
        (0..self.listeners.len())
            .flat_map(|slot| self.accept(slot))
            .collect()
    }

    /// Accepts and closes connections until every count is back at 0 and no move is remembered.
    pub fn settle(&self) {
        let pinned = self.pinned();
        let mut notes = pinned.notes();
        wait("all counts back at 0", || {
            drop(self.accept_all());
            if let Some(notes) = &mut notes {
                notes.tidy(pinned.table(), 0).expect("tidy");
            }
            actives(pinned.table()).iter().all(|active| *active == 0)
                && pinned.table().moved_live() == 0
        });
        assert_eq!(pinned.moved(), 0, "remembered moves");
        let total = |field: fn(&wakeone_bpf::table::Slot<'_>) -> u64| -> u64 {
            (0..slots(pinned.table()))
                .map(|slot| field(&pinned.table().slot(slot)))
                .sum()
        };
        assert_eq!(
            total(|slot| slot.established().load(Relaxed)),
            total(|slot| slot.closed().load(Relaxed)),
            "who came, went"
        );
        assert_eq!(
            total(|slot| slot.migrated_in().load(Relaxed)),
            total(|slot| slot.migrated_out().load(Relaxed)),
        );
    }

    /// Removes everything, and checks that it is gone.
    pub fn end(self, dispatcher: Dispatcher) {
        dispatcher.end(&self.paths, Some(&self.cgroup));
        self.nothing_left();
    }

    /// Checks that there are no pins, cgroup or mount.
    pub fn nothing_left(&self) {
        assert!(!self.paths.pins.exists(), "pins");
        assert!(!self.cgroup.exists(), "cgroup");
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("mounts");
        let folder = self.folder.path().to_str().expect("UTF-8");
        assert!(!mounts.contains(folder), "mount");
        assert!(!self.paths.runtime.exists(), "runtime folder");
    }
}

impl Drop for Ground {
    /// Cleans up after a failed test, too.
    fn drop(&mut self) {
        let own = self.paths.runtime.join(".bpf");
        let _ = bpf::remove_pins(&self.pins());
        if bpffs::is_bpffs(&own).unwrap_or(false) {
            let _ = rustix::mount::unmount(&own, rustix::mount::UnmountFlags::DETACH);
        }
        self.paths.tidy();
        let _ = cgroup::remove(&self.cgroup);
    }
}

fn many_descriptors() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).expect("descriptor limit");
}

/// Stands for an agent that looked just now and need not look again during the test.
pub fn beat(table: &Table) {
    table.heartbeat_ns().store(schedule::coarse_ns(), Relaxed);
    table.heartbeat_limit_ns().store(1_000_000_000_000, Relaxed);
}

/// Makes a listener whose port others may share.
pub fn listen(address: &str, backlog: i32) -> TcpListener {
    listen_by(address, backlog, None).expect("listener")
}

pub fn listen_by(
    address: &str,
    backlog: i32,
    protocol: Option<Protocol>,
) -> std::io::Result<TcpListener> {
    let socket = bind_by(address, protocol)?;
    rustix::net::listen(&socket, backlog)?;
    Ok(socket)
}

/// Makes a socket whose port others may share, and which does not listen yet.
pub fn bind(address: &str) -> TcpListener {
    bind_by(address, None).expect("socket")
}

fn bind_by(address: &str, protocol: Option<Protocol>) -> std::io::Result<TcpListener> {
    let address: SocketAddr = address.parse().expect("address");
    let family = if address.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let socket =
        rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, protocol)?;
    // Without it the socket that the program is attached to cannot listen while others are bound.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    sockopt::set_socket_reuseport(&socket, true)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, false)?;
    }
    rustix::net::bind(&socket, &address)?;
    Ok(socket.into())
}

pub fn connect(address: &str) -> TcpStream {
    TcpStream::connect(address).expect("connect")
}

/// Connects several times, one after the other: each connection is in its place before the next one comes.
pub fn connect_many(address: &str, count: usize) -> Vec<TcpStream> {
    (0..count).map(|_| connect(address)).collect()
}

/// Starts a connection, which may or may not complete.
pub fn begin_connect(address: &str) -> TcpStream {
    let address: SocketAddr = address.parse().expect("address");
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)
        .expect("socket");
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => socket.into(),
        Err(error) => panic!("connect: {error}"),
    }
}

/// Whether a connection that was started is complete.
pub fn connected(stream: &TcpStream) -> bool {
    stream.peer_addr().is_ok()
}

/// Closes with a reset.
pub fn reset(stream: TcpStream) {
    sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).expect("SO_LINGER");
}

/// Waits, for as long as a loaded machine may need.
pub fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        if start.elapsed() >= patience() {
            in_vain(what);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub fn slots(table: &Table) -> usize {
    table.slots().load(Relaxed) as usize
}

pub fn actives(table: &Table) -> Vec<i64> {
    (0..slots(table))
        .map(|slot| table.slot(slot).active().load(Relaxed))
        .collect()
}

pub fn established(table: &Table) -> Vec<u64> {
    (0..slots(table))
        .map(|slot| table.slot(slot).established().load(Relaxed))
        .collect()
}

pub fn selected(table: &Table) -> Vec<u64> {
    (0..slots(table))
        .map(|slot| table.slot(slot).selected().load(Relaxed))
        .collect()
}

/// Waits until that many connections are counted. A connect may return before its last step is counted.
pub fn wait_for_established(table: &Table, count: usize) {
    wait("as many established as connected", || {
        established(table).iter().sum::<u64>() >= count as u64
    });
    assert_eq!(established(table).iter().sum::<u64>(), count as u64);
}

/// Waits until the active counts are these.
pub fn wait_for_actives(table: &Table, expected: &[i64]) {
    let start = Instant::now();
    while actives(table) != expected {
        if start.elapsed() >= patience() {
            in_vain(&format!("{expected:?}, but {:?}", actives(table)));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Returns the counter of one way out.
pub fn exit(table: &Table, name: &str) -> u64 {
    let at = EXITS.iter().position(|exit| *exit == name);
    table.exits()[at.expect("a way out")]
}

/// Returns the ways out that were taken, and how often.
pub fn exits(table: &Table) -> Vec<(&'static str, u64)> {
    let taken = EXITS.into_iter().zip(table.exits());
    taken.filter(|(_, count)| *count > 0).collect()
}
