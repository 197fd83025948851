//! The broker's decisions about UDP sockets that several threads or processes receive from.

use std::os::fd::{AsFd, OwnedFd};

use crate::broker::QueueRequest;
use crate::config::SplitConfig;
use crate::readers::{QueueGrant, Readers};
use crate::reason::Reason;
use crate::splitter::{MOST_SOCKETS, Splitter};
use crate::worker::name_in_brackets;
use wakeone_kernel::socket::inode_of;

impl Splitter {
    /// The group to which a UDP socket or queue belongs.
    pub(crate) fn readers_of(&self, socket: impl AsFd) -> Option<usize> {
        let inode = inode_of(socket).ok()?;
        self.readers.iter().position(|one| one.group().knows(inode))
    }

    /// The configuration of UDP groups; `None`: nothing steers.
    fn datagram_config(&self) -> Option<SplitConfig> {
        self.missing.is_none().then(|| self.config.clone())
    }

    /// The group of a socket, or a new one if it has none yet.
    fn group_of(&mut self, pid: u32, fd: i32, socket: impl AsFd) -> Option<(Readers, bool)> {
        if let Some(at) = self.readers_of(&socket) {
            return Some((self.readers.swap_remove(at), true));
        }
        if self.readers.len() >= MOST_SOCKETS {
            return None;
        }
        let readers = Readers::new(pid, fd, socket.as_fd()).ok()?;
        Some((readers, false))
    }

    /// A queue for a thread beside the socket that its process has.
    pub(crate) fn queue_for_thread(
        &mut self,
        pid: u32,
        fd: i32,
        socket: &OwnedFd,
    ) -> Option<QueueGrant> {
        let (config, paths) = (self.datagram_config(), self.config.paths.clone());
        let (mut readers, known) = self.group_of(pid, fd, socket)?;
        let address = readers.group().address;
        if self.check {
            let name = name_in_brackets(pid);
            self.note(format!(
                "{address}/udp: threads of process {pid}{name} would get queues of their own"
            ));
            return None;
        }
        let grant = readers
            .admits_thread(pid, socket)
            .and_then(|()| readers.for_thread(pid, socket, config.as_ref(), &paths));
        let given = match grant {
            Ok((grant, unsteered)) => {
                // Another thread of the process receives already.
                if let Ok(inode) = inode_of(socket) {
                    readers.stays(pid, fd, inode);
                }
                if let Some(why) = unsteered {
                    self.once(format!("{address}/udp is not steered: {why}"));
                }
                Some(grant)
            }
            Err(reason) => {
                let name = name_in_brackets(pid);
                self.once(format!(
                    "{address}/udp: threads of{name} share one socket: {reason}"
                ));
                None
            }
        };
        if known || given.is_some() {
            self.readers.push(readers);
        }
        given
    }

    /// A queue for a process, in the place of the UDP socket that it inherited.
    pub(crate) fn queue_for_process(&mut self, claim: &QueueRequest<'_>) -> Option<QueueGrant> {
        let inode = inode_of(claim.socket).ok()?;
        let (config, paths) = (self.datagram_config(), self.config.paths.clone());
        let (mut readers, known) = self.group_of(claim.pid, claim.fd, claim.socket)?;
        let address = format!("{}/udp", readers.group().address);
        let decision = readers.decide(claim.pid, inode, config.is_none());
        self.judged(&address, claim, &decision);
        if self.check {
            return None;
        }
        let grant = decision
            .and_then(|()| readers.for_process(claim.pid, claim.socket, config.as_ref(), &paths));
        match grant {
            Ok(grant) => {
                self.readers.push(readers);
                Some(grant)
            }
            Err(reason) => {
                readers.stays(claim.pid, claim.fd, inode);
                if reason.is_late() {
                    self.once(format!(
                        "{address}: a worker stays with the shared socket: {reason}"
                    ));
                }
                // Other processes may come, and need to know that this one receives from it.
                if known || matches!(reason, Reason::First | Reason::Registered) {
                    self.readers.push(readers);
                }
                None
            }
        }
    }

    /// A process or thread receives from its queue.
    pub(crate) fn reads_its_own(&mut self, pid: u32, fd: i32, grant: QueueGrant) {
        let inode = grant.new.original;
        let Some(at) = self.readers.iter().position(|one| one.inode() == inode) else {
            return;
        };
        self.readers[at].accepted(pid, fd, grant);
        self.given += 1;
        let readers = &mut self.readers[at];
        let (address, name) = (readers.group().address, readers.group().name());
        tracing::debug!("{address}/udp: process {pid} has a queue of its own at {fd}");
        if readers.queues() == 0 || !readers.group_mut().is_news() {
            return;
        }
        let source = readers.group().source(&self.config.paths);
        if let (Some(monitor), Some(source)) = (&self.monitor, source) {
            monitor.add(source);
        }
        if !readers.group().is_steered() {
            let why = self.missing.as_ref().map_or_else(String::new, |missing| {
                format!("; nothing steers: that needs {missing}")
            });
            return tracing::info!(event = "split", %address, "{address}/udp is split: each thread or process that receives gets a queue of its own, the kernel's hash chooses{why}");
        }
        let policy = self.config.datagrams;
        tracing::info!(event = "split", %address, %policy, "{address}/udp is split: each thread or process that receives gets a queue of its own, policy {policy}, group `{name}`");
        if let Some(why) = self.unfit.clone() {
            self.once(format!("{address}/udp is steered by {policy}: {why}"));
        }
    }

    /// Has orphaned queues read by others. Returns whether to call it again soon.
    pub(crate) fn drain_step(&mut self) -> bool {
        let drained = self.readers.iter_mut().map(Readers::drain_step);
        drained.fold(false, |any, one| any | one)
    }
}
