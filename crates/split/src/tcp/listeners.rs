//! The broker's decisions about listeners that several processes share.

use std::os::fd::OwnedFd;
use std::time::Instant;

use wakeone_kernel::socket;

use crate::broker::QueueRequest;
use crate::config::Steering;
use crate::queue_group::SharedSocket;
use crate::splitter::{MOST_LISTENERS, MOST_OPENED, Splitter};
use crate::tcp::shared::{QueueGrant, Shared};
use crate::unsplit;
use crate::worker::first_holder;
use wakeone_kernel::socket::inode_of;

impl Splitter {
    pub(crate) fn of_inode(&mut self, inode: u64) -> Option<usize> {
        self.shared
            .iter()
            .position(|shared| shared.group().knows(inode))
    }

    /// Whether the library put a socket into a reuseport group.
    pub(crate) fn has_opened(&self, socket: &OwnedFd) -> bool {
        socket::cookie(socket).is_ok_and(|cookie| self.opened.contains(&cookie))
    }

    /// Admits a listener that may be split. Returns its index in `shared`.
    pub(crate) fn admit(&mut self, pid: u32, fd: i32, socket: &OwnedFd) -> Option<usize> {
        if !socket::is_tcp_listener(socket) || self.shared.len() >= MOST_LISTENERS {
            return None;
        }
        match Shared::new(pid, fd, socket) {
            Ok(shared) => {
                self.news = Instant::now();
                tracing::debug!("{} is listened on by process {pid}", shared.group().address);
                self.shared.push(shared);
                Some(self.shared.len() - 1)
            }
            Err(error) => {
                tracing::debug!("a listener of process {pid} is left alone: {error}");
                None
            }
        }
    }

    /// Whether a socket with SO_REUSEPORT is shared by the server's processes all the same, as with hypercorn. Then
    /// the process that listens got it from its parent, and the address has no other socket.
    pub(crate) fn is_shared(&self, pid: u32, socket: &OwnedFd) -> bool {
        let cookie = socket::cookie(socket).unwrap_or_default();
        let inherited = inode_of(socket).is_ok_and(|inode| first_holder(pid, inode) != pid);
        !self.foreign.contains(&cookie)
            && inherited
            && socket::address(socket).is_some_and(|at| unsplit::sockets_at(at) == 1)
    }

    /// Notes a socket that belongs to a group of the server's own making.
    pub(crate) fn is_foreign(&mut self, socket: &OwnedFd) {
        if let Ok(cookie) = socket::cookie(socket) {
            if self.foreign.len() >= MOST_OPENED {
                self.foreign.pop_front();
            }
            self.foreign.push_back(cookie);
        }
    }

    /// A queue for a process that is about to wait for connections.
    pub(crate) fn queue_for_worker(&mut self, claim: &QueueRequest<'_>) -> Option<QueueGrant> {
        let inode = inode_of(claim.socket).ok()?;
        let at = match self.of_inode(inode) {
            Some(at) => at,
            // It listens already: by another process, whose message is still to come.
            None => {
                let socket = claim.socket.try_clone_to_owned().ok()?;
                let opened = self.has_opened(&socket) || self.is_shared(claim.pid, &socket);
                opened.then(|| self.admit(claim.pid, claim.fd, &socket))??
            }
        };
        let decision = self.shared[at].decide(claim.pid, inode, &self.steering);
        let address = self.shared[at].group().address;
        self.judged(&address, claim, &decision);
        let grant = match decision {
            Ok(()) if self.check => return None,
            Ok(()) => {
                let (config, steering) = (&self.config, &mut self.steering);
                self.shared[at].grant(claim.pid, claim.socket, config, steering)
            }
            Err(reason) => Err(reason),
        };
        match grant {
            Ok(grant) => Some(grant),
            Err(reason) => {
                if !self.check {
                    self.shared[at].stays(claim.pid, inode);
                }
                if reason.is_late() {
                    let address = self.shared[at].group().address;
                    self.once(format!(
                        "{address}: a worker stays with the shared socket: {reason}"
                    ));
                }
                None
            }
        }
    }

    pub(crate) fn listens_on_its_own(&mut self, pid: u32, fd: i32, grant: QueueGrant) {
        let Some(at) = self.of_inode(grant.new.original) else {
            return;
        };
        self.shared[at].accepted(pid, fd, grant);
        self.given += 1;
        let shared = &mut self.shared[at];
        let address = shared.group().address;
        if shared.queues() > 0 && shared.group_mut().is_news() {
            let source = shared.group().source(&self.config.paths, self.traced);
            if let (Some(monitor), Some(source)) = (&self.monitor, source) {
                monitor.add(source);
            }
            match self.steering {
                Steering::Full(policy) => {
                    tracing::info!(event = "split", %address, %policy, "ready: {address} is split: each worker gets a queue of its own, policy {policy}, group `{}`", shared.group().name())
                }
                Steering::None => {
                    tracing::info!(event = "split", %address, "ready: {address} is split: each worker gets a queue of its own, the kernel's hash chooses")
                }
            }
        }
        tracing::debug!("{address}: process {pid} has a queue of its own");
    }
}
