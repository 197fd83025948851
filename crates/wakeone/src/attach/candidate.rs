//! Listeners that can be steered: their sockets, and the workers of those.

use std::collections::HashSet;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use wakeone_arming::{self as arming, Shared, Unsteerable};
use wakeone_bpf::chooser::{Chooser, Choosers};
use wakeone_kernel::capability;
use wakeone_kernel::socket::arming::Waiter;
use wakeone_kernel::socket::diag;
use wakeone_model::accept::Shape;
use wakeone_model::address::Address;
use wakeone_model::advice;
use wakeone_model::listener::{Protocol, Socket};
use wakeone_model::network::Network;
use wakeone_observe::{Found, Watcher};

use super::error::Error;
use wakeone_control::paths::{joined_name, plain_name};
use wakeone_steering::slot_sockets::RemoteFd;

/// A socket of the group, and its worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// The socket's cookie.
    pub cookie: u64,
    /// The process to borrow it from.
    pub remote: RemoteFd,
    /// The workers that wait for it, as far as any were seen.
    pub workers: Vec<u32>,
    /// Whether they were seen waiting; else `workers` is the process that alone holds it.
    pub awaited: bool,
    /// The processes that hold it.
    pub holders: Vec<u32>,
}

impl Member {
    /// The worker that its slot shows.
    pub fn worker(&self) -> Option<u32> {
        self.workers.first().copied()
    }
}

/// A listener that can be steered.
pub struct AttachCandidate {
    /// The name that its group will have.
    pub name: String,
    /// The network namespace that it is in, if that is not ours.
    pub network: Option<Network>,
    /// Its sockets.
    pub members: Vec<Member>,
    /// Connections open now.
    pub open: usize,
    /// The workers that share its one socket; `None` if it has several.
    pub sharing: Option<Sharing>,
    pub(super) watcher: Watcher,
}

/// The workers that share one queue.
#[derive(Debug, Clone)]
pub struct Sharing {
    /// Their listener.
    pub shared: Shared,
    /// Each of them.
    pub workers: Vec<Waiter>,
}

impl AttachCandidate {
    /// The address that it listens on.
    pub fn address(&self) -> Address {
        self.watcher.listener().address
    }

    /// Its protocol.
    pub fn protocol(&self) -> Protocol {
        self.watcher.listener().protocol
    }
}

/// The group's name for an address: letters, digits and dashes only.
///
/// In another network namespace the same address is another group, named by its container too.
pub fn name_of(protocol: Protocol, address: Address, network: Option<&Network>) -> String {
    let protocol = match protocol {
        Protocol::Udp => "udp-",
        _ => "",
    };
    let name = format!("at-{protocol}{}", plain_name(address));
    match network {
        None => name,
        Some(network) => joined_name(&name, &format!("-in-{}", network.label())),
    }
}

/// Checks whether a listener can be steered, and finds its workers.
///
/// # Errors
/// [`Error::Unfit`] with the reason and the way out.
pub fn examine(found: &Found) -> Result<AttachCandidate, Error> {
    examine_watched(found, Watcher::start(found, false)?)
}

/// The same of one that has been watched for a moment.
pub(super) fn examine_watched(
    found: &Found,
    mut watcher: Watcher,
) -> Result<AttachCandidate, Error> {
    let address = found.listener.address;
    let unfit = |why: String| Error::Unfit {
        address: address.into(),
        why,
        advice: String::new(),
    };
    match found.listener.protocol {
        Protocol::Tcp | Protocol::Udp | Protocol::Unix => {}
        Protocol::Mptcp => {
            return Err(unfit(
                "it listens by Multipath TCP, for which the kernel lets no program choose; listen by plain TCP (Go: GODEBUG=multipathtcp=0)".into(),
            ));
        }
    }
    watcher.look()?;
    if let [socket] = &found.listener.sockets[..] {
        match sharing(found, socket, watcher.pids()) {
            Ok(sharing) => {
                return Ok(AttachCandidate {
                    name: name_of(found.listener.protocol, address, found.network.as_ref()),
                    network: found.network.clone(),
                    members: Vec::new(),
                    open: open_at(found.listener.protocol, address),
                    sharing: Some(sharing),
                    watcher,
                });
            }
            Err(why) if why.is_refused() => return Err(unfit(why.to_string())),
            Err(why) => refuse_one_socket(found, &watcher, &why)?,
        }
    }
    if let Some(why) = watcher.ungrouped() {
        return Err(unfit(format!(
            "{why}; set SO_REUSEPORT on each socket before bind(), as one user, on an address of one host"
        )));
    }
    let members = search_members(&mut watcher)?;
    let sockets = watcher.listener().sockets.len();
    if members.len() < sockets {
        return Err(unfit(format!(
            "of its {sockets} sockets {} are held by processes that may not be seen; it takes CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH, or root",
            sockets - members.len()
        )));
    }
    if members.is_empty() {
        return Err(unfit("nobody was seen to hold its socket".into()));
    }
    let open = if found.listener.protocol == Protocol::Udp {
        0
    } else {
        open_at(found.listener.protocol, address)
    };
    Ok(AttachCandidate {
        name: name_of(found.listener.protocol, address, found.network.as_ref()),
        network: found.network.clone(),
        members,
        open,
        sharing: None,
        watcher,
    })
}

/// Refuses one socket whose workers cannot be steered as they share it, unless it may be the first of several.
fn refuse_one_socket(found: &Found, watcher: &Watcher, why: &Unsteerable) -> Result<(), Error> {
    let address = found.listener.address;
    let is_unix = found.listener.protocol == Protocol::Unix;
    if is_unix && matches!(why, Unsteerable::Alone(1)) {
        return Err(Error::OneWorker {
            address: address.into(),
        });
    }
    let model = watcher.model();
    // One with SO_REUSEPORT may be followed by others.
    if !is_unix && model.shape == Shape::Unknown && watcher.has_reuseport() != Some(false) {
        return Ok(());
    }
    Err(Error::Unfit {
        address: address.into(),
        why: format!(
            "it is one socket ({}: {}), and {why}",
            model.name(),
            model.describe()
        ),
        advice: match is_unix {
            true => advice::EPOLL.into(),
            false => own_sockets(found),
        },
    })
}

/// How workers that share one socket get one each.
fn own_sockets(found: &Found) -> String {
    let by_hand = advice::own_sockets(&worker_name(found), &found.listener.address.to_string());
    match found.listener.protocol {
        Protocol::Udp => format!(
            "start the server by `wakeone run --split`, or give each worker its own: {by_hand}"
        ),
        _ => format!("give each worker its own: {by_hand}"),
    }
}

/// Finds the workers that share one socket.
fn sharing(found: &Found, socket: &Socket, pids: &[u32]) -> Result<Sharing, Unsteerable> {
    if found.listener.protocol == Protocol::Udp {
        return Err(Unsteerable::Datagrams);
    }
    let shared = Shared {
        address: found.listener.address,
        interface: found.listener.interface,
        inode: socket.inode,
        cookie: socket.cookie,
    };
    let workers = arming::examine(&shared, pids)?;
    Ok(Sharing { shared, workers })
}

/// Connections open at a listener's address. Of TCP, those too that wait to be accepted.
fn open_at(protocol: Protocol, address: Address) -> usize {
    let Address::Inet(address) = address else {
        return diag::accepted_at(protocol, address).map_or(0, |open| open.all().len());
    };
    diag::sockets(Protocol::Tcp, diag::Which::Open, address.port()).map_or(0, |open| {
        open.iter().filter(|e| belongs(e, address)).count()
    })
}

/// Whether a connection came in by this listener's address.
fn belongs(entry: &diag::Entry, address: SocketAddr) -> bool {
    entry.local.port() == address.port()
        && (address.ip().is_unspecified() || entry.local.ip() == address.ip())
}

fn worker_name(found: &Found) -> String {
    let name = found
        .pids
        .iter()
        .find_map(|pid| wakeone_kernel::proc::waits::identity(*pid));
    name.map_or_else(String::new, |identity| identity.name)
}

/// Refuses a group that another program steers: a QUIC or other server's own program must not be replaced. `is_ours`
/// tells one that an earlier agent left. Returns what shows the group's program from now on.
pub(super) fn refuse_foreign(
    candidate: &AttachCandidate,
    address: SocketAddr,
    is_ours: impl Fn(&[Chooser]) -> bool,
) -> Result<Choosers, Error> {
    let is_foreign = |choosers: Choosers| -> io::Result<(Choosers, bool)> {
        let seen = choosers.look(None)?;
        let member = |one: &&Chooser| candidate.members.iter().any(|m| m.cookie == one.cookie);
        let mut here = seen.iter().filter(member);
        let is_foreign = here.any(|one| one.program.is_some()) && !is_ours(&seen);
        Ok((choosers, is_foreign))
    };
    match Choosers::of(candidate.protocol(), address.port()).and_then(is_foreign) {
        Ok((choosers, false)) => Ok(choosers),
        Ok((_, true)) => Err(Error::Unfit {
            address: Address::from(address).into(),
            why: "another program chooses for its group already (a QUIC server's own, say), and is not replaced; where it is a leftover of ours, `wakeone detach --all` takes it away".into(),
            advice: String::new(),
        }),
        Err(error) => Err(Error::Unfit {
            address: Address::from(address).into(),
            why: format!(
                "whether another program chooses for it cannot be told: {error}{}",
                needed()
            ),
            advice: String::new(),
        }),
    }
}

/// Returns what attaching needs and lacks here, as the end of a sentence.
pub(super) fn needed() -> String {
    match capability::missing().as_slice() {
        // We have every capability, so it is the kernel that lacks something.
        [] => {
            let kernel = rustix::system::uname();
            let release = kernel.release().to_string_lossy();
            format!("; attach needs Linux 5.17 or later, and this is {release}")
        }
        missing => format!(
            "; it needs {}: start as root or with these capabilities",
            missing.join(" and ")
        ),
    }
}

/// Every socket of the group.
pub(super) fn cookies(watcher: &Watcher) -> HashSet<u64> {
    let sockets = watcher.listener().sockets.iter();
    sockets.map(|socket| socket.cookie).collect()
}

/// Finds the members. A server that starts gives its sockets to workers that were not there when the search began, so
/// what was not found is searched again.
fn search_members(watcher: &mut Watcher) -> Result<Vec<Member>, Error> {
    let mut found = members(watcher);
    for _ in 0..SEARCHES {
        if found.len() >= watcher.listener().sockets.len() {
            break;
        }
        std::thread::sleep(SEARCH_AGAIN);
        watcher.search_holders();
        watcher.follow(Duration::ZERO, None)?;
        found = members(watcher);
    }
    Ok(found)
}

/// How often to search again, and when.
const SEARCHES: u32 = 5;
const SEARCH_AGAIN: Duration = Duration::from_millis(20);

/// Returns every socket of the group with a process to borrow it from, and its worker.
pub(super) fn members(watcher: &Watcher) -> Vec<Member> {
    let held: Vec<RemoteFd> = watcher.held().map(|held| (&held).into()).collect();
    let member = |socket: &Socket| {
        let mut holders = held.iter().filter(|remote| remote.inode == socket.inode);
        let pids: Vec<u32> = holders.clone().map(|remote| remote.pid).collect();
        let workers: Vec<u32> = watcher.serving(socket.cookie).collect();
        let first = holders.clone().next();
        // Prefers the worker itself, so that it need not change when the master ends.
        let own = holders.find(|remote| workers.first() == Some(&remote.pid));
        Some(Member {
            cookie: socket.cookie,
            remote: *own.or(first)?,
            awaited: watcher.is_awaited(socket.cookie),
            workers,
            holders: pids,
        })
    };
    let sockets = &watcher.listener().sockets;
    sockets.iter().filter_map(member).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use wakeone_control::state;

    #[test]
    fn names_can_be_those_of_groups() {
        for (address, name) in [
            ("127.0.0.1:80", "at-127-0-0-1-80"),
            ("[::]:443", "at----443"),
            ("[::1]:80", "at---1-80"),
            ("[::ffff:127.0.0.1]:80", "at-mapped-127-0-0-1-80"),
        ] {
            let of = name_of(Protocol::Tcp, address.parse().expect("address"), None);
            assert_eq!(of, name);
            assert!(state::is_name(&of));
        }
        let udp = name_of(Protocol::Udp, "[::]:53".parse().expect("address"), None);
        assert_eq!(udp, "at-udp----53");
    }

    #[test]
    fn an_address_has_a_name_in_each_network() {
        let mut network = Network::new(4_026_532_281);
        let address = "127.0.0.1:80".parse().expect("address");
        let name = |network: &Network| name_of(Protocol::Tcp, address, Some(network));
        assert_eq!(name(&network), "at-127-0-0-1-80-in-4026532281");
        network.container = Some("ab".repeat(32));
        assert_eq!(name(&network), "at-127-0-0-1-80-in-abababababab");
        let long = ["2001:db8:1234:5678:9abc:def0:1234:567", "8"].concat();
        let names = [6000, 60001, 60002].map(|port| {
            let address = format!("[{long}]:{port}").parse().expect("address");
            name_of(Protocol::Udp, address, Some(&network))
        });
        assert!(names.iter().all(|name| state::is_name(name)), "{names:?}");
        assert!(names[1] != names[2], "{names:?}");
    }
}
