//! Asks the kernel whether sockets that have one address are a group.

use std::collections::HashSet;
use std::os::fd::OwnedFd;

use wakeone_bpf::group::is_in_group;
use wakeone_kernel::proc::process;
use wakeone_model::listener::{Protocol, Ungrouped};

use crate::Found;

/// Returns why several sockets of UDP are no reuseport group. Listeners of TCP can have an address in common only as one.
/// Asks duplicates of their descriptors, which are closed at once.
pub(crate) fn ungrouped(found: &Found) -> Option<Ungrouped> {
    let listener = &found.listener;
    if listener.protocol != Protocol::Udp || listener.sockets.len() < 2 {
        return None;
    }
    if listener
        .address
        .inet()
        .is_some_and(|at| at.ip().is_multicast())
    {
        return Some(Ungrouped::Multicast);
    }
    let users: HashSet<u32> = listener.sockets.iter().map(|socket| socket.uid).collect();
    let sockets = duplicates(found);
    let has_option = |socket: &OwnedFd| rustix::net::sockopt::socket_reuseport(socket).ok();
    let options: Vec<bool> = sockets.iter().filter_map(has_option).collect();
    match options.iter().filter(|has| **has).count() {
        0 if options.is_empty() => None,
        0 => Some(Ungrouped::AddressOnly),
        some if some < options.len() => Some(Ungrouped::Mixed),
        _ if users.len() > 1 => Some(Ungrouped::Users),
        // Without the privilege to ask, the option is believed.
        _ => sockets
            .iter()
            .any(|socket| is_in_group(socket).is_ok_and(|is_in| !is_in))
            .then_some(Ungrouped::AfterBind),
    }
}

/// Returns a descriptor of each socket that we may borrow.
fn duplicates(found: &Found) -> Vec<OwnedFd> {
    let mut wanted: HashSet<u64> = found.listener.sockets.iter().map(|s| s.inode).collect();
    let mut duplicates = Vec::new();
    for pid in &found.pids {
        for (fd, inode) in process::sockets_of(*pid).unwrap_or_default() {
            if wanted.contains(&inode)
                && let Ok(socket) = process::descriptor_of(*pid, fd)
            {
                wanted.remove(&inode);
                duplicates.push(socket);
            }
        }
    }
    duplicates
}
