//! UNIX sockets with connections, as `sock_diag` shows them (net/unix/diag.c).
//!
//! A connection that was accepted has the name of its listener, and an inode. One that waits has no inode yet.

use std::collections::HashSet;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use netlink_packet_core::Nla as _;
use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_packet_sock_diag::unix::nlas::{Nla, UnixDiagName};
use netlink_packet_sock_diag::unix::{ShowFlags, StateFlags, UnixRequest, UnixResponse};
use nix::libc;
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use wakeone_model::address::UnixName;
use wakeone_model::listener::{Protocol, Socket};

use super::netlink::{connected, encoded, receive};

/// A socket that listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bound {
    /// Its name, as it was given to bind(2).
    pub name: UnixName,
    /// The file of a path, in the kernel's numbers.
    pub file: Option<File>,
    /// The socket.
    pub socket: Socket,
}

/// The identity of a socket's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct File {
    /// The device, as the kernel encodes it (`MKDEV`).
    device: u32,
    inode: u32,
}

/// The kind of file at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The file of a socket.
    Socket(File),
    /// Another file.
    Other,
    /// There is none, as far as we may see.
    None,
}

/// Returns what is at the path of a name.
pub fn file_of(name: UnixName) -> Kind {
    // A relative path is so to the folder of a server, which is not ours.
    let Some(path) = name.path().filter(|path| path.is_absolute()) else {
        return Kind::None;
    };
    match std::fs::metadata(path) {
        Ok(file) if file.file_type().is_socket() => {
            let device = file.dev();
            let numbers = (libc::major(device), libc::minor(device));
            let (major, minor) = device_of(path).unwrap_or(numbers);
            Kind::Socket(File {
                device: (major << 20) | minor,
                inode: file.ino() as u32,
            })
        }
        Ok(_) => Kind::Other,
        Err(_) => Kind::None,
    }
}

/// Returns the numbers of the device that a path is mounted from. For stat(2), overlayfs and btrfs have others: those of a
/// layer or of a subvolume.
fn device_of(path: &Path) -> Option<(u32, u32)> {
    // Linux 5.8.
    let mount = statx(CWD, path, AtFlags::empty(), StatxFlags::MNT_ID).ok()?;
    let mounts = std::fs::read("/proc/thread-self/mountinfo").ok()?;
    // 36 35 98:0 /root /mount …: the mount, its parent, major:minor. Mount points are any bytes.
    String::from_utf8_lossy(&mounts).lines().find_map(|line| {
        let mut words = line.split(' ');
        let is_it = words.next()?.parse() == Ok(mount.stx_mnt_id);
        let (major, minor) = words.nth(1).filter(|_| is_it)?.split_once(':')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    })
}

/// The kernel's flag for the user, which the library has no word for (Linux 5.3).
const SHOW_UID: u32 = 0x40;
const UNIX_DIAG_UID: u16 = 7;

/// Returns all sockets that listen in this thread's network namespace.
///
/// # Errors
/// The error of the netlink socket. `NotFound`: this kernel shows no UNIX sockets.
pub fn listening() -> io::Result<Vec<Bound>> {
    let mut found = Vec::new();
    let shown = ShowFlags::NAME | ShowFlags::VFS | ShowFlags::RQLEN;
    dump(StateFlags::LISTEN, shown, &mut |response| {
        let (name, socket) = entry(&response);
        // One without a name cannot be reached.
        if let Some(name) = name {
            let file = bound_file(&response);
            found.push(Bound { name, file, socket });
        }
    })?;
    Ok(found)
}

/// Whether a socket of this name is there that does not listen and has no connection: one of datagrams, or one that was
/// only bound.
///
/// # Errors
/// As [`listening`].
pub fn is_bound_otherwise(name: UnixName, file: Option<File>) -> io::Result<bool> {
    let mut is_there = false;
    // The state of such a socket is TCP_CLOSE.
    let states = StateFlags::from_bits_retain(1 << TCP_CLOSE);
    dump(states, ShowFlags::NAME | ShowFlags::VFS, &mut |response| {
        let of_file = file.is_some() && bound_file(&response) == file;
        is_there |= of_file || entry(&response).0 == Some(name);
    })?;
    Ok(is_there)
}

/// include/net/tcp_states.h
const TCP_CLOSE: u32 = 7;

/// Returns the inodes of the accepted connections of a listener. The kernel shows all connections of the network
/// namespace for that, with both ends: of 2,000 in some 2 ms.
///
/// # Errors
/// As [`listening`].
pub fn accepted_at(listener: UnixName) -> io::Result<HashSet<u64>> {
    let mut found = HashSet::new();
    dump(StateFlags::ESTABLISHED, ShowFlags::NAME, &mut |response| {
        let (name, socket) = entry(&response);
        if name == Some(listener) && socket.inode != 0 {
            found.insert(socket.inode);
        }
    })?;
    Ok(found)
}

/// Returns the clients whose connections wait at listeners, by the inodes of their sockets: one that waits has none yet.
/// `None`: a queue is too long to be told, from some 900 connections on (`sk_diag_dump_icons`, `NLMSG_GOODSIZE`).
///
/// # Errors
/// As [`listening`].
pub fn waiting_at(listeners: &[Socket]) -> io::Result<Option<HashSet<u64>>> {
    let mut found = HashSet::new();
    let mut told = 0;
    dump(StateFlags::LISTEN, ShowFlags::ICONS, &mut |response| {
        let inode = u64::from(response.header.inode);
        if listeners.iter().any(|one| one.inode == inode) {
            told += 1;
            let clients = response.pending_connections().into_iter().flatten();
            found.extend(clients.copied().map(u64::from).filter(|inode| *inode != 0));
        }
    })?;
    Ok((told == listeners.len()).then_some(found))
}

fn dump(
    states: StateFlags,
    shown: ShowFlags,
    found: &mut dyn FnMut(UnixResponse),
) -> io::Result<()> {
    let request = UnixRequest {
        state_flags: states,
        inode: 0,
        show_flags: shown | ShowFlags::from_bits_retain(SHOW_UID),
        cookie: [0xff; 8],
    };
    let request = encoded(
        NLM_F_REQUEST | NLM_F_DUMP,
        SockDiagMessage::UnixRequest(request),
    );
    let netlink = connected()?;
    netlink.send(&request, 0)?;
    receive(&netlink, &mut |message| {
        if let SockDiagMessage::UnixResponse(response) = message {
            found(*response);
        }
    })
}

/// The request for one socket's accept queue.
pub(super) fn exact(inode: u64, cookie: u64) -> Vec<u8> {
    let request = UnixRequest {
        state_flags: StateFlags::LISTEN,
        inode: inode as u32,
        show_flags: ShowFlags::RQLEN,
        cookie: cookie.to_ne_bytes(),
    };
    encoded(NLM_F_REQUEST, SockDiagMessage::UnixRequest(request))
}

/// The file of a socket with a path.
fn bound_file(response: &UnixResponse) -> Option<File> {
    let file = response
        .nlas
        .iter()
        .find(|nla| matches!(nla, Nla::Vfs(_)))?;
    // The library keeps the fields of struct unix_diag_vfs to itself.
    let mut bytes = [0; 8];
    file.emit_value(&mut bytes);
    let [inode, device] = [&bytes[..4], &bytes[4..]].map(|half| {
        let half = half.try_into().unwrap_or_default();
        u32::from_ne_bytes(half)
    });
    Some(File { device, inode })
}

/// The name of a socket, and the socket.
pub(super) fn entry(response: &UnixResponse) -> (Option<UnixName>, Socket) {
    let mut name = None;
    let mut socket = Socket {
        inode: response.header.inode.into(),
        cookie: u64::from_ne_bytes(response.header.cookie),
        protocol: Protocol::Unix,
        // Nobody's, where the kernel does not tell.
        uid: u32::MAX,
        queued: 0,
        queue_limit: 0,
        drops: 0,
        receive_buffer_bytes: 0,
    };
    for nla in &response.nlas {
        match nla {
            Nla::Name(UnixDiagName::Pathname(path)) => name = UnixName::of_path(path.as_bytes()),
            Nla::Name(UnixDiagName::Abstract(bytes)) => name = UnixName::of_abstract(bytes),
            Nla::ReceiveQueueLength(queued, limit) => {
                (socket.queued, socket.queue_limit) = (*queued, *limit);
            }
            Nla::Other(other) if other.kind() == UNIX_DIAG_UID && other.value_len() == 4 => {
                let mut bytes = [0; 4];
                other.emit_value(&mut bytes);
                socket.uid = u32::from_ne_bytes(bytes);
            }
            _ => {}
        }
    }
    (name, socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::socket::queue_look::QueueLook;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};

    /// Listens at a path and at an abstract name of this test's own.
    fn listeners(
        folder: &std::path::Path,
        what: &str,
    ) -> Vec<(UnixListener, SocketAddr, UnixName)> {
        let path = folder.join(what);
        let name = format!("wakeone-{what}-{}", std::process::id());
        let at = [
            (
                SocketAddr::from_pathname(&path).expect("address"),
                UnixName::of_path(path.as_os_str().as_bytes()).expect("a name"),
            ),
            (
                SocketAddr::from_abstract_name(&name).expect("address"),
                UnixName::of_abstract(name.as_bytes()).expect("a name"),
            ),
        ];
        let listen = |(address, name)| {
            let listener = UnixListener::bind_addr(&address).expect("listens");
            (listener, address, name)
        };
        at.into_iter().map(listen).collect()
    }

    fn inode(socket: &dyn std::os::fd::AsFd) -> u64 {
        rustix::fs::fstat(socket.as_fd()).expect("stat").st_ino
    }

    fn bound_at(name: UnixName) -> Option<Bound> {
        listening()
            .expect("dump")
            .into_iter()
            .find(|one| one.name == name)
    }

    #[test]
    fn a_listener_is_seen_with_its_queue_and_its_connections() {
        let folder = tempfile::tempdir().expect("folder");
        for (listener, address, name) in listeners(folder.path(), "seen") {
            let connect = || UnixStream::connect_addr(&address).expect("connects");
            let clients: Vec<_> = (0..5).map(|_| connect()).collect();
            let (accepted, _) = listener.accept().expect("accepts");
            let waiting: HashSet<u64> = clients[1..].iter().map(|one| inode(one)).collect();
            let seen = bound_at(name).expect("the listener");
            assert_eq!(seen.socket.inode, inode(&listener));
            assert_eq!(
                waiting_at(std::slice::from_ref(&seen.socket)).expect("dump"),
                Some(waiting)
            );
            assert_eq!(
                seen.socket.cookie,
                crate::socket::cookie(&listener).expect("cookie")
            );
            assert_eq!(seen.socket.uid, rustix::process::geteuid().as_raw());
            assert_eq!(seen.socket.queued, 4);
            assert_eq!(accepted_at(name).expect("dump"), [inode(&accepted)].into());
            let (inode, cookie) = (seen.socket.inode, seen.socket.cookie);
            let look = QueueLook::at(name.into(), 0, inode, cookie).expect("netlink");
            let limit = seen.socket.queue_limit;
            assert_eq!(look.look().expect("an answer"), Some((4, limit)));
            drop(listener);
            assert_eq!(look.look().expect("an answer"), None);
            // A connection keeps the name.
            assert_eq!(accepted_at(name).expect("dump").len(), 1);
        }
    }

    #[test]
    fn a_path_means_the_socket_that_its_file_is_of() {
        let folder = tempfile::tempdir().expect("folder");
        let (_listener, _, name) = listeners(folder.path(), "file").remove(0);
        let bound = bound_at(name).expect("the listener");
        let file = bound.file.expect("a file");
        assert_eq!(file_of(name), Kind::Socket(file));
        assert_eq!(is_bound_otherwise(name, Some(file)).ok(), Some(false));
        let at = |text: &str| {
            let path = folder.path().join(text);
            UnixName::of_path(path.as_os_str().as_bytes()).expect("a name")
        };
        std::os::unix::fs::symlink("file", folder.path().join("link")).expect("link");
        assert_eq!(file_of(at("link")), Kind::Socket(file));
        std::fs::write(folder.path().join("text"), "").expect("written");
        assert_eq!(file_of(at("text")), Kind::Other);
        assert_eq!(file_of(at("none")), Kind::None);
        let _datagrams = UnixDatagram::bind(folder.path().join("datagrams")).expect("bound");
        assert_eq!(is_bound_otherwise(at("datagrams"), None).ok(), Some(true));
        assert_eq!(bound_at(at("datagrams")), None);
    }
}
