//! Listeners, and the processes around them.

use std::collections::{BTreeMap, HashSet};

use wakeone_kernel::proc::stat;
use wakeone_kernel::proc::waits::Processes;
use wakeone_kernel::socket::diag::{self, Entry, Which};
use wakeone_model::listener::{Listener, Protocol, Socket};

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
}

/// All listening sockets of this network namespace, grouped by address.
///
/// # Errors
/// The sock_diag query fails.
pub fn listeners() -> Result<Vec<Listener>, Error> {
    let ask = |protocol| {
        diag::sockets(protocol, Which::Listening, 0).map_err(|source| Error::Kernel {
            what: "asking the kernel for its listening sockets",
            source,
        })
    };
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
            address,
            interface,
            protocol,
            sockets,
        }
    };
    groups.into_iter().map(listener).collect()
}

/// The listeners of a target, with their processes.
///
/// # Errors
/// [`Error::NotFound`], with advice, if there is none.
pub fn find(target: &Target) -> Result<Vec<Found>, Error> {
    // A server that starts goes on opening sockets. The process that opened one of these has its descriptor by the time
    // that we read those.
    let listeners = listeners()?;
    let processes = Processes::read();
    let inner = target.parts().1;
    let wanted = processes_of(inner, &processes)?;
    let found: Vec<Found> = listeners
        .into_iter()
        .filter(|listener| target.is_of(listener.protocol))
        .filter(|listener| match inner {
            Target::Port(port) => listener.address.port() == *port,
            Target::Address(address) => listener.address == *address,
            _ => true,
        })
        .map(|listener| {
            let inodes = listener.sockets.iter().map(|s| s.inode).collect();
            Found {
                pids: processes.around(&inodes),
                hidden: processes.hidden,
                listener,
            }
        })
        .filter(|found| {
            wanted
                .as_ref()
                .is_none_or(|wanted| holds(&processes, &found.listener, wanted))
        })
        .collect();
    if found.is_empty() && *inner != Target::All {
        return Err(Error::NotFound(format!(
            "nothing listens on {target} in this network namespace; `wakeone doctor` without a target shows what listens, --netns looks into another one"
        )));
    }
    Ok(found)
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
                format!("there is no process {pid}; for a port write :{pid}")
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

/// Whether a process belongs to a systemd unit: the last component of its cgroup's path, with or without `.service`.
fn unit_of(pid: u32, name: &str) -> bool {
    let cgroups = stat::text_of(pid, "cgroup").unwrap_or_default();
    cgroups
        .lines()
        .filter_map(|line| line.rsplit('/').next())
        .any(|unit| unit == name || unit.strip_suffix(".service") == Some(name))
}
