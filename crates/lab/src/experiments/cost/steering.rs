//! A group under `wakeone run` whose parts can be switched off one by one while it serves: the agent, the counting, the
//! program that chooses. Without all three it is a server whose connections the kernel's hash hands out.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::net::sockopt;
use wakeone_bpf::Pinned;
use wakeone_bpf::count_switch::CountSwitch;
use wakeone_bpf::table::flag;
use wakeone_control::paths::Paths;
use wakeone_control::policy::Policy;
use wakeone_control::state::default_runtime_dir;
use wakeone_control::status;
use wakeone_kernel::proc::process;
use wakeone_kernel::socket;

use crate::error::Error;

/// Which parts run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parts {
    /// The program that chooses is attached, and has this policy.
    pub choosing: Option<Policy>,
    /// Connections are counted.
    pub counting: bool,
    /// The agent looks at the workers, and moves the queue of a stuck one.
    pub agent: bool,
}

/// No part of Wakeone: the kernel's hash.
pub const HASH: Parts = Parts {
    choosing: None,
    counting: false,
    agent: false,
};
/// All parts.
pub const STEERED: Parts = Parts {
    choosing: Some(Policy::LeastConnections),
    counting: true,
    agent: true,
};

/// How long the agent may be in the middle of an action.
const PATIENCE: Duration = Duration::from_secs(5);

/// The group. Dropping it switches everything on again.
pub struct Group {
    supervisor: Pid,
    pinned: Pinned,
    counting: CountSwitch,
    /// Shared with the supervisor: a listener outlives its server for as long as these are open.
    listeners: Vec<OwnedFd>,
    now: Parts,
}

fn failed(what: &str) -> impl FnOnce(std::io::Error) -> Error + '_ {
    move |e| Error::Server(format!("{what} failed: {e}"))
}

impl Group {
    /// The group on this address, which runs with all its parts.
    ///
    /// # Errors
    /// When it is not steered, or we may not touch its parts.
    pub fn on(address: SocketAddr) -> Result<Self, Error> {
        let paths = Paths::of(&default_runtime_dir());
        let all =
            status::read(&paths).map_err(|e| Error::Server(format!("reading the groups: {e}")))?;
        let here = |group: &status::Group| group.listen.contains(&address.to_string());
        let group = all.groups.into_iter().find(here);
        let steered = group.filter(|group| group.steered && group.counting);
        let (name, supervisor) = steered
            .and_then(|group| Some((group.name, group.supervisor_pid?)))
            .ok_or_else(|| {
                Error::Missing(format!(
                    "no group on {address} is steered and counted by Wakeone's programs, which are to be measured; `wakeone run` says on stderr what it lacks"
                ))
            })?;
        let pins = paths.group_pins(&name);
        let cgroups = paths.cgroups_of(&name);
        let cgroup = cgroups
            .first()
            .ok_or_else(|| Error::Server(format!("the group {name} has no cgroup")))?;
        Ok(Self {
            supervisor: Pid::from_raw(supervisor as i32),
            pinned: Pinned::open(&pins)
                .map_err(|e| Error::Server(format!("opening the group {name}: {e}")))?,
            counting: CountSwitch::of(&pins, cgroup).map_err(failed("finding the counting"))?,
            listeners: listeners(supervisor, address)?,
            now: STEERED,
        })
    }

    /// Lets these parts run, and no others.
    ///
    /// # Errors
    /// The kernel's.
    pub fn set(&mut self, parts: Parts) -> Result<(), Error> {
        // The agent stops first and continues last, because it watches the other parts.
        if self.now.agent && !parts.agent {
            self.stop_agent()?;
        }
        if self.now.choosing.is_some() && parts.choosing.is_none() {
            socket::detach_reuseport(&self.listeners[0])
                .map_err(failed("detaching the program"))?;
        }
        self.counting
            .set(parts.counting)
            .map_err(failed("switching the counting"))?;
        if parts.counting != self.now.counting {
            // The counts still hold connections that closed while nobody counted. The program must not choose by those.
            for slot in 0..self.slots() {
                self.pinned.table().slot(slot).active().store(0, Relaxed);
            }
        }
        if let Some(policy) = parts.choosing {
            self.pinned.table().policy().store(policy.number(), Relaxed);
        }
        if parts.choosing.is_some() && self.now.choosing.is_none() {
            self.pinned
                .attach(0, &self.listeners[0])
                .map_err(|e| Error::Server(e.to_string()))?;
        }
        if parts.agent && !self.now.agent {
            self.signal(Signal::SIGCONT)?;
        }
        self.now = parts;
        Ok(())
    }

    fn slots(&self) -> usize {
        self.pinned.table().slots().load(Relaxed) as usize
    }

    /// How often queues were moved so far.
    pub fn rescues(&self) -> u64 {
        let of = |slot| self.pinned.table().slot(slot).rescues().load(Relaxed);
        (0..self.slots()).map(of).sum()
    }

    /// Stops the whole supervisor, whose thread the agent is. It does not stop it while it moves a queue or keeps a
    /// worker marked: that worker would get nothing until it continues.
    fn stop_agent(&self) -> Result<(), Error> {
        let end = Instant::now() + PATIENCE;
        loop {
            self.signal(Signal::SIGSTOP)?;
            while !stopped(self.supervisor) {
                std::thread::yield_now();
            }
            if self.is_whole() {
                return Ok(());
            }
            self.signal(Signal::SIGCONT)?;
            if Instant::now() > end {
                return Err(Error::Server(
                    "a worker stayed marked as stuck: the agent could not be stopped".into(),
                ));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether all listeners listen, and no worker is marked.
    fn is_whole(&self) -> bool {
        let listens = |one: &OwnedFd| sockopt::socket_acceptconn(one).unwrap_or(false);
        let marked = |slot| self.pinned.table().slot(slot).has(flag::STUCK);
        self.listeners.iter().all(listens) && !(0..self.slots()).any(marked)
    }

    fn signal(&self, signal: Signal) -> Result<(), Error> {
        kill(self.supervisor, signal)
            .map_err(|e| Error::Server(format!("sending {signal} to the supervisor failed: {e}")))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A stopped supervisor would not end.
        let _ = self.set(STEERED);
        let _ = self.signal(Signal::SIGCONT);
    }
}

/// A supervisor that is stopped while its server gets no load. Dropping this continues it.
pub struct Rest(pub u32);

impl Rest {
    /// Stops or continues the supervisor.
    ///
    /// # Errors
    /// When it is gone.
    pub fn set(&self, rests: bool) -> Result<(), Error> {
        let signal = if rests {
            Signal::SIGSTOP
        } else {
            Signal::SIGCONT
        };
        kill(Pid::from_raw(self.0 as i32), signal)
            .map_err(|e| Error::Server(format!("sending {signal} to the supervisor failed: {e}")))
    }
}

impl Drop for Rest {
    fn drop(&mut self) {
        let _ = self.set(false);
    }
}

/// Whether all threads of a process are stopped.
fn stopped(pid: Pid) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task"));
    let ids = threads
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|thread| thread.file_name().to_str()?.parse().ok());
    ids.filter_map(process::state)
        .all(|state| matches!(state, 'T' | 't' | 'Z' | 'X'))
}

/// The supervisor's listeners at an address.
fn listeners(supervisor: u32, address: SocketAddr) -> Result<Vec<OwnedFd>, Error> {
    let sockets = process::sockets_of(supervisor).map_err(failed("finding the listeners"))?;
    let mut found = Vec::new();
    for (number, _) in sockets {
        let Ok(socket) = process::descriptor_of(supervisor, number) else {
            continue;
        };
        let there = rustix::net::getsockname(socket.as_fd())
            .ok()
            .and_then(|name| SocketAddr::try_from(name).ok());
        if there == Some(address) && sockopt::socket_acceptconn(&socket).unwrap_or(false) {
            found.push(socket);
        }
    }
    if found.is_empty() {
        return Err(Error::Server(format!(
            "the supervisor has no listener on {address}"
        )));
    }
    Ok(found)
}
