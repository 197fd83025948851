//! Listeners, and the processes around them.

use std::collections::{BTreeMap, HashSet};
use std::io;

use wakeone_kernel::netns;
use wakeone_kernel::proc::networks::Networks;
use wakeone_kernel::proc::sight;
use wakeone_kernel::proc::stat;
use wakeone_kernel::proc::waits::Processes;
use wakeone_kernel::socket::diag::{self, Entry, Which};
use wakeone_kernel::socket::unix_diag::{self, Bound, Kind};
use wakeone_model::address::{Address, UnixName};
use wakeone_model::listener::{Listener, Process, Protocol, Socket};
use wakeone_model::network::Network;

use crate::{Error, Target};

/// A listener, the processes that hold it, and their children.
#[derive(Debug, Clone)]
pub struct Found {
    /// The listener.
    pub listener: Listener,
    /// The processes' ids.
    pub pids: Vec<u32>,
    /// The number of processes whose descriptors we may not read: one of them may hold the listener as well.
    pub hidden: usize,
    /// The network namespace that it is in, if that is not ours: see [`Found::in_network`].
    pub network: Option<Network>,
}

impl Found {
    /// Notes that it was found in this network namespace, which is not ours, and in whose container it is.
    #[must_use]
    pub fn in_network(mut self, namespace: u64) -> Self {
        let cgroups = |pid: &u32| stat::text_of(*pid, "cgroup").ok();
        let theirs = self.pids.iter().find_map(cgroups).unwrap_or_default();
        let mut network = Network::of_cgroups(namespace, &theirs);
        // Where we are in the same container, that is nothing by which it differs.
        let own = Network::of_cgroups(0, &cgroups(&std::process::id()).unwrap_or_default());
        network
            .container
            .take_if(|id| own.container.as_ref() == Some(id));
        network.pod.take_if(|id| own.pod.as_ref() == Some(id));
        if network.pod.is_some() {
            let folders = std::fs::read_dir(POD_FOLDERS).into_iter().flatten();
            let mut names = folders.flatten().map(|folder| folder.file_name());
            names.find(|name| name.to_str().is_some_and(|name| network.see_folder(name)));
        }
        self.network = Some(network);
        self
    }
}

/// A kubelet keeps the logs of each pod in a folder here, by its name.
const POD_FOLDERS: &str = "/var/log/pods";

fn unanswered(source: io::Error) -> Error {
    Error::Kernel {
        what: "asking the kernel for its listening sockets",
        source,
    }
}

/// A look at this network namespace's listeners and at all processes. It serves to find the listeners of any target.
#[derive(Debug)]
pub struct Look {
    inet: Vec<Listener>,
    /// A kernel may lack `unix_diag`.
    unix: io::Result<Vec<Bound>>,
    processes: Processes,
}

impl Look {
    /// Asks for the sockets, and then reads /proc: some milliseconds. Where all sockets are held by `inhabitants`, processes of
    /// this network namespace, it reads these only.
    ///
    /// A server that starts goes on opening sockets. The process that opened one of these has its descriptor by the time that we
    /// read those.
    ///
    /// # Errors
    /// The sock_diag query fails.
    pub fn take(inhabitants: &[u32]) -> Result<Self, Error> {
        let inet = listeners()?;
        let unix = unix_diag::listening();
        let bound = unix.iter().flatten().map(|one| &one.socket);
        let sockets = inet.iter().flat_map(|one| &one.sockets).chain(bound);
        let inodes: HashSet<u64> = sockets.map(|socket| socket.inode).collect();
        let mut processes = Processes::of(inhabitants.iter().copied());
        if inhabitants.is_empty() || !processes.hold(&inodes) {
            processes = Processes::read();
        }
        Ok(Self {
            inet,
            unix,
            processes,
        })
    }

    fn unix(&self) -> Result<&[Bound], Error> {
        let again = |error: &io::Error| match error.raw_os_error() {
            Some(number) => io::Error::from_raw_os_error(number),
            None => io::Error::from(error.kind()),
        };
        let unix = self.unix.as_ref();
        unix.map(Vec::as_slice)
            .map_err(|error| unanswered(again(error)))
    }
}

/// All listening sockets of IP in this network namespace, grouped by address.
///
/// # Errors
/// The sock_diag query fails.
fn listeners() -> Result<Vec<Listener>, Error> {
    let ask = |protocol| diag::sockets(protocol, Which::Listening, 0).map_err(unanswered);
    // An MPTCP listener shows as TCP too, with the same inode.
    let multipath: HashSet<u64> = ask(Protocol::Mptcp)?
        .iter()
        .map(|e| e.socket.inode)
        .collect();
    let mut all = ask(Protocol::Tcp)?;
    for entry in &mut all {
        if multipath.contains(&entry.socket.inode) {
            entry.socket.protocol = Protocol::Mptcp;
        }
    }
    all.extend(ask(Protocol::Udp)?);
    Ok(group(all))
}

fn group(entries: Vec<Entry>) -> Vec<Listener> {
    let mut groups: BTreeMap<_, Vec<Socket>> = BTreeMap::new();
    for entry in entries {
        let key = (entry.socket.protocol, entry.local, entry.interface);
        groups.entry(key).or_default().push(entry.socket);
    }
    let listener = |((protocol, address, interface), mut sockets): (_, Vec<Socket>)| {
        sockets.sort_by_key(|s| s.cookie);
        Listener {
            address: Address::Inet(address),
            interface,
            protocol,
            sockets,
        }
    };
    groups.into_iter().map(listener).collect()
}

/// Each listening UNIX socket of this network namespace is a listener of its own. Two may have one name: the file of the
/// first may have been removed.
fn unix_listener(bound: &Bound) -> Listener {
    Listener {
        address: Address::Unix(bound.name),
        interface: 0,
        protocol: Protocol::Unix,
        sockets: vec![bound.socket.clone()],
    }
}

/// The UNIX sockets that listen by a user's name: that of the file at a path, else those that were bound to this name.
fn unix_listeners_at(look: &Look, name: UnixName) -> Result<Vec<Listener>, Error> {
    let all = look.unix()?;
    let at = unix_diag::file_of(name);
    let of_file = |one: &&Bound| matches!(at, Kind::Socket(file) if one.file == Some(file));
    let mut found: Vec<&Bound> = all.iter().filter(of_file).collect();
    if found.is_empty() && at != Kind::Other {
        found = all.iter().filter(|one| one.name == name).collect();
    }
    if found.is_empty() {
        return Err(Error::NotFound(why_not(name, at)?));
    }
    Ok(found.into_iter().map(unix_listener).collect())
}

/// Why nothing listens by a name.
fn why_not(name: UnixName, at: Kind) -> Result<String, Error> {
    let file = match at {
        Kind::Socket(file) => Some(file),
        Kind::Other => return Ok(format!("unix:{name} is no socket but another file")),
        Kind::None => None,
    };
    if unix_diag::is_bound_otherwise(name, file).map_err(unanswered)? {
        return Ok(format!(
            "unix:{name} does not listen: it is a socket for datagrams, or its server has not called listen() yet"
        ));
    }
    Ok(match at {
        Kind::Socket(_) => format!(
            "nobody listens on unix:{name}: the file is there, and its server has ended, or is in another network namespace (--netns looks into one)"
        ),
        _ => format!(
            "nothing listens on unix:{name} in this network namespace; `ss -xl` shows the UNIX sockets that listen"
        ),
    })
}

/// The listeners that a target may mean.
fn listeners_for(look: &Look, target: &Target) -> Result<Vec<Listener>, Error> {
    let unix = match target {
        Target::Address(Address::Unix(name)) => return unix_listeners_at(look, *name),
        Target::Pid(_) | Target::Name(_) => look.unix()?,
        // A kernel without `unix_diag` shows the others.
        Target::All => look.unix().unwrap_or_default(),
        _ => &[],
    };
    let unix = unix.iter().map(unix_listener);
    Ok(look.inet.iter().cloned().chain(unix).collect())
}

/// The listeners of a target, with their processes. [`Target::All`] means those of IP, and of the UNIX sockets those that
/// workers share or connections wait at.
///
/// # Errors
/// [`Error::NotFound`], with advice, if there is none, or if a number means two servers.
pub fn find(target: &Target) -> Result<Vec<Found>, Error> {
    find_in(&Look::take(&[])?, target)
}

/// The same by a look that serves for several targets.
///
/// # Errors
/// As there.
pub fn find_in(look: &Look, target: &Target) -> Result<Vec<Found>, Error> {
    let readings = target.readings();
    let [port, process] = readings.as_slice() else {
        return find_as(look, readings.first().unwrap_or(target));
    };
    match (find_as(look, port), find_as(look, process)) {
        (Ok(there), Ok(its)) if !its.iter().any(|one| is_among(one, &there)) => {
            Err(Error::NotFound(format!(
                "{target} is a port, and the id of a process that listens elsewhere; write :{target} or pid:{target}"
            )))
        }
        (Ok(found), _) | (_, Ok(found)) => Ok(found),
        (Err(Error::NotFound(_)), Err(Error::NotFound(why))) => Err(Error::NotFound(format!(
            "nothing listens on port {target}, and {why}"
        ))),
        (Err(error), Err(_)) => Err(error),
    }
}

/// As [`find`]. A process in another network namespace is looked for there, which takes CAP_SYS_ADMIN.
///
/// # Errors
/// As there.
pub fn find_anywhere(target: &Target) -> Result<Vec<Found>, Error> {
    let found = find(target);
    let (Err(_), Target::Pid(pid) | Target::Number(pid)) = (&found, target.parts().1) else {
        return found;
    };
    let Some(namespace) = netns::of(*pid).ok().filter(|_| !netns::is_ours(*pid)) else {
        return found;
    };
    let there = netns::within(namespace, &[*pid], || find(target)).unwrap_or(found)?;
    Ok(there
        .into_iter()
        .map(|one| one.in_network(namespace))
        .collect())
}

/// A process in another network namespace where something listens that a target's address means. It takes what [`find_anywhere`]
/// takes, and tells nothing where that is missing.
pub fn elsewhere(target: &Target) -> Option<u32> {
    let by_address = matches!(
        target.parts().1,
        Target::Port(_)
            | Target::Localhost(_)
            | Target::Address(Address::Inet(_))
            | Target::Number(_)
    );
    if !by_address {
        return None;
    }
    let all = Networks::new()
        .and_then(|mut networks| networks.look())
        .ok()?;
    let holder = |(namespace, pids): (u64, Vec<u32>)| {
        let found = netns::within(namespace, &pids, || find(target))
            .ok()?
            .ok()?;
        found.first()?.pids.first().copied()
    };
    all.into_iter().take(MOST_ELSEWHERE).find_map(holder)
}

/// As many namespaces are searched for a hint.
const MOST_ELSEWHERE: usize = 64;

fn is_among(one: &Found, others: &[Found]) -> bool {
    let is_same = |other: &Found| {
        let inodes = one.listener.sockets.iter().map(|socket| socket.inode);
        inodes.into_iter().any(|inode| other.listener.has(inode))
    };
    others.iter().any(is_same)
}

/// The listeners of a target that has one meaning.
fn find_as(look: &Look, target: &Target) -> Result<Vec<Found>, Error> {
    let inner = target.parts().1;
    let mut listeners = listeners_for(look, inner)?;
    listeners.retain(|listener| target.is_of(listener.protocol) && is_at(inner, listener));
    if let Target::Address(address @ Address::Inet(_)) = inner {
        let is_there = |one: &Listener| one.address.canonical() == address.canonical();
        if listeners.iter().any(is_there) {
            // One on all addresses gets nothing of what another at this address gets.
            listeners.retain(is_there);
        }
    }
    let processes = &look.processes;
    let wanted = processes_of(inner, processes)?;
    let unshared = match inner {
        Target::All => unshared(&listeners, processes),
        _ => HashSet::new(),
    };
    let found: Vec<Found> = listeners
        .into_iter()
        .filter(|listener| {
            let sockets = &listener.sockets;
            !sockets.iter().any(|one| unshared.contains(&one.inode))
        })
        .map(|listener| {
            let inodes = listener.sockets.iter().map(|s| s.inode).collect();
            Found {
                pids: processes.around(&inodes),
                hidden: processes.hidden,
                listener,
                network: None,
            }
        })
        .filter(|found| {
            wanted
                .as_ref()
                .is_none_or(|wanted| holds(processes, &found.listener, wanted))
        })
        .collect();
    if found.is_empty() && *inner != Target::All {
        return Err(Error::NotFound(format!(
            "nothing listens on {target} in this network namespace; `wakeone doctor` without a target shows what listens, --netns looks into another one"
        )));
    }
    Ok(found)
}

/// Whether a listener is at a target's address. UNIX sockets were looked up by their files already.
fn is_at(target: &Target, listener: &Listener) -> bool {
    listener.protocol == Protocol::Unix || target.may_be_at(listener.address)
}

fn holds(processes: &Processes, listener: &Listener, wanted: &HashSet<u32>) -> bool {
    processes
        .held
        .iter()
        .any(|held| wanted.contains(&held.pid) && listener.has(held.inode))
}

/// The processes of a pid or a name; `None` for other targets.
fn processes_of(target: &Target, processes: &Processes) -> Result<Option<HashSet<u32>>, Error> {
    let mut wanted: HashSet<u32> = match target {
        Target::Pid(pid) => HashSet::from([*pid]),
        Target::Name(name) => processes
            .identities
            .iter()
            .filter(|(pid, identity)| identity.is_named(name) || unit_of(**pid, name))
            .map(|(pid, _)| *pid)
            .collect(),
        _ => return Ok(None),
    };
    wanted.retain(|pid| processes.identities.contains_key(pid));
    if wanted.is_empty() {
        return Err(Error::NotFound(match target {
            Target::Pid(pid) => {
                format!("there is no process {pid}")
            }
            _ => format!(
                "no process or unit is named {target}; `wakeone doctor` without a target shows what listens"
            ),
        }));
    }
    // Workers hold the listeners that their master opened, and the reverse. So this adds all children.
    loop {
        let children: Vec<u32> = processes
            .identities
            .iter()
            .filter(|(pid, identity)| wanted.contains(&identity.parent) && !wanted.contains(pid))
            .map(|(pid, _)| *pid)
            .collect();
        if children.is_empty() {
            return Ok(Some(wanted));
        }
        wanted.extend(children);
    }
}

/// Returns the UNIX sockets that nobody asks about: those that no workers share, and at which nothing waits. A machine has
/// dozens of them, of systemd, dbus and a container's runtime.
///
/// That several processes hold a socket is no sign of workers, as systemd keeps those that it passed on. Workers are several
/// processes or threads that wait for it, or several of one name that hold it: they may all be busy now. Where a connection
/// waits the server may be stuck, and its users want to know.
fn unshared(listeners: &[Listener], processes: &Processes) -> HashSet<u64> {
    let unix = listeners
        .iter()
        .filter(|one| one.protocol == Protocol::Unix);
    let quiet = unix
        .flat_map(|one| &one.sockets)
        .filter(|one| one.queued == 0);
    let mut unshared: HashSet<u64> = quiet.map(|one| one.inode).collect();
    let mut holders: BTreeMap<u32, HashSet<u64>> = BTreeMap::new();
    for held in processes
        .held
        .iter()
        .filter(|one| unshared.contains(&one.inode))
    {
        holders.entry(held.pid).or_default().insert(held.inode);
    }
    let mut namesakes: HashSet<(u64, &[u8])> = HashSet::new();
    let mut waits: BTreeMap<u64, usize> = BTreeMap::new();
    for (pid, inodes) in &holders {
        if let Some(identity) = processes.identities.get(pid) {
            let of_name = |inode: &u64| !namesakes.insert((*inode, identity.comm.as_slice()));
            let several: Vec<u64> = inodes.iter().copied().filter(of_name).collect();
            unshared.retain(|inode| !several.contains(inode));
        }
        let process = sight::look(*pid, inodes, &HashSet::new());
        for inode in process.iter().flat_map(Process::awaited) {
            *waits.entry(inode).or_default() += 1;
        }
    }
    unshared.retain(|inode| waits.get(inode).is_none_or(|waits| *waits < 2));
    unshared
}

/// Whether a process belongs to a systemd unit: the last component of its cgroup's path, with or without `.service`.
fn unit_of(pid: u32, name: &str) -> bool {
    let cgroups = stat::text_of(pid, "cgroup").unwrap_or_default();
    cgroups
        .lines()
        .filter_map(|line| line.rsplit('/').next())
        .any(|unit| unit == name || unit.strip_suffix(".service") == Some(name))
}
