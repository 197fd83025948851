//! One UDP socket that threads or processes of a server receive from: the queues that were made beside it, the
//! readers of each, and how datagrams are steered to them.
//!
//! The threads of one process have a queue each, and one of them keeps the socket that the process has. A process
//! that was forked since the socket was bound has a queue in its place. Unread datagrams cannot be moved to another
//! queue. So a duplicate of a forked process's queue is kept here, and another process can read it if its owner ends.
//! The queues of the process that bound the socket are not kept: they end with it, as the socket would.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use wakeone_kernel::cgroup;
use wakeone_kernel::proc::process;
use wakeone_kernel::proc::waits;
use wakeone_kernel::proc::waits::Processes;
use wakeone_kernel::socket;
use wakeone_kernel::socket::clone_socket;

use crate::config::SplitConfig;
use crate::left::{OrphanedQueues, WakeReply, is_readable};
use crate::queue_group::{self, NewQueue, QueueGroup};
use crate::reason::Reason;
use crate::worker::{LOOK_ROUND, Worker, unasked, unpolled};
use wakeone_control::paths::Paths;
use wakeone_control::policy::Affinity;
use wakeone_control::state::MOST_SLOTS;
use wakeone_kernel::socket::inode_of;
use wakeone_steering::dispatcher::Plan;
use wakeone_steering::slot_sockets::RemoteFd;

/// The owner of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A thread, beside the socket that its process has.
    Thread,
    /// A process, in the place of the socket that it inherited.
    Process,
}

/// A queue, and the process that receives from it.
#[derive(Debug)]
struct Queue {
    kind: Kind,
    remote: RemoteFd,
    cookie: u64,
    /// A duplicate, if other processes are to read the queue when its own ends.
    kept: Option<OwnedFd>,
}

impl Queue {
    /// Whether its process still has it, under whatever number; and whether that number has changed.
    fn look(&mut self) -> (bool, bool) {
        if self.remote.borrow().is_ok() {
            return (true, false);
        }
        let held = process::sockets_of(self.remote.pid).unwrap_or_default();
        let found = held.iter().find(|(_, inode)| *inode == self.remote.inode);
        if let Some((fd, _)) = found {
            self.remote.fd = *fd;
        }
        (found.is_some(), found.is_some())
    }
}

/// A queue that was made, and from which nobody receives yet.
#[derive(Debug)]
pub struct QueueGrant {
    /// The queue.
    pub new: NewQueue,
    kind: Kind,
}

/// The socket that the server opened.
#[derive(Debug)]
struct Original {
    remote: RemoteFd,
    cookie: u64,
    /// The processes that receive from it.
    readers: Vec<Worker>,
    /// A duplicate, once other processes have queues: they read it if nobody receives from it.
    kept: Option<OwnedFd>,
    /// No process has it any more.
    closed: bool,
}

/// A UDP socket with queues beside it.
pub struct Readers {
    group: QueueGroup,
    original: Original,
    queues: Vec<Queue>,
    left: OrphanedQueues,
    /// The kernel's hash chooses, whatever was configured.
    hash: bool,
    /// Nobody else can read what a process leaves unread: it is of connections that ended with it.
    ends_with_readers: bool,
    looked: Instant,
}

impl Readers {
    /// Makes the group of a socket that a process has.
    ///
    /// # Errors
    /// It has no address, or is gone.
    pub fn new(pid: u32, fd: i32, socket: BorrowedFd<'_>) -> io::Result<Self> {
        let group = QueueGroup::of(socket)?;
        let inode = inode_of(socket)?;
        Ok(Self {
            left: OrphanedQueues::at(group.address),
            group,
            original: Original {
                remote: RemoteFd { pid, fd, inode },
                cookie: socket::cookie(socket)?,
                readers: Vec::new(),
                kept: None,
                closed: false,
            },
            queues: Vec::new(),
            hash: false,
            ends_with_readers: false,
            looked: Instant::now(),
        })
    }

    /// How many queues there are beside the socket.
    pub fn queues(&self) -> usize {
        self.queues.len()
    }

    /// The socket's inode.
    pub fn inode(&self) -> u64 {
        self.original.remote.inode
    }

    /// Whether a process can have a queue in the place of the socket that it inherited. `hash`: nothing will steer.
    ///
    /// # Errors
    /// The reason if it cannot.
    pub fn decide(&self, pid: u32, inode: u64, hash: bool) -> Result<(), Reason> {
        let own = |queue: &&Queue| queue.kind == Kind::Process && queue.remote.pid == pid;
        if self.queues.iter().any(|queue| own(&queue)) {
            return Err(Reason::Has);
        }
        unpolled(pid, inode, Reason::Registered)?;
        let ours = std::process::id();
        // A process above us, as a service manager, opened it for the server and does not read it.
        let another = |held: &waits::Held| {
            let is_other = held.inode == inode && held.pid != pid && held.pid != ours;
            is_other && !process::descends(ours, held.pid)
        };
        if !Processes::read().held.iter().any(another) {
            return Err(Reason::Alone);
        }
        self.has_room()?;
        let served = self.original.readers.iter().any(Worker::lives);
        if (hash || self.hash) && !served && !self.original.closed {
            return Err(Reason::First);
        }
        Ok(())
    }

    /// Whether a thread can have a queue of its own beside the socket of its process.
    ///
    /// # Errors
    /// The reason if it cannot.
    pub fn admits_thread(&self, pid: u32, socket: &OwnedFd) -> Result<(), Reason> {
        // In an epoll set, another thread may decide which one receives. The library sees most of these itself, but
        // not sockets that were registered before they were bound.
        let inode = inode_of(socket).map_err(|error| Reason::Hidden(error.to_string()))?;
        unpolled(pid, inode, Reason::Polled)?;
        self.has_room()
    }

    /// Whether another queue can be chosen. One that could not would leave its thread without work.
    fn has_room(&self) -> Result<(), Reason> {
        if self.queues.len() + 1 < MOST_SLOTS {
            Ok(())
        } else {
            Err(Reason::Full)
        }
    }

    /// Notes a process that receives from one of its sockets, and stays with it.
    pub fn stays(&mut self, pid: u32, fd: i32, inode: u64) {
        if inode != self.inode() {
            return;
        }
        if !self.original.readers.iter().any(|one| one.pid == pid) {
            self.original.readers.extend(Worker::of(pid));
            self.original.remote = RemoteFd { pid, fd, inode };
        }
        self.assign_original();
        self.group.store();
    }

    /// Makes a queue for a thread beside the socket of its process (`like`). Also returns why nothing steers, if that
    /// is new. `config`: `None` if nothing may steer.
    ///
    /// # Errors
    /// Why no queue can be made.
    pub fn for_thread(
        &mut self,
        pid: u32,
        like: &OwnedFd,
        config: Option<&SplitConfig>,
        paths: &Paths,
    ) -> Result<(QueueGrant, Option<Reason>), Reason> {
        let grant = self.grant(pid, like.as_fd(), Kind::Thread)?;
        let begun = self.begin(&grant.new, config, paths);
        Ok((grant, begun.err()))
    }

    /// Makes a queue for a process in the place of the socket that it inherited (`like`).
    ///
    /// # Errors
    /// Why no queue can be made.
    pub fn for_process(
        &mut self,
        pid: u32,
        like: BorrowedFd<'_>,
        config: Option<&SplitConfig>,
        paths: &Paths,
    ) -> Result<QueueGrant, Reason> {
        if self.original.kept.is_none() && inode_of(like).ok() == Some(self.inode()) {
            self.original.kept = like.try_clone_to_owned().ok();
        }
        let grant = self.grant(pid, like, Kind::Process)?;
        match self.begin(&grant.new, config, paths) {
            Ok(()) => Ok(grant),
            Err(reason) => {
                self.rejected(grant);
                Err(reason)
            }
        }
    }

    fn grant(&mut self, pid: u32, like: BorrowedFd<'_>, kind: Kind) -> Result<QueueGrant, Reason> {
        let known = self.group.has_had_queues();
        if !known && rustix::net::sockopt::socket_reuseport(like) == Ok(true) {
            self.group.is_alone(like)?;
        }
        let queue = clone_socket::reader(like, known, pid)
            .map_err(|error| Reason::Sibling(error.to_string()))?;
        let new = NewQueue::of(self.inode(), queue)?;
        self.group.know(new.inode);
        Ok(QueueGrant { new, kind })
    }

    /// With the first queue: takes the group's folder, and loads the program if `config` is given. After a failure the
    /// kernel's hash chooses.
    fn begin(
        &mut self,
        queue: &NewQueue,
        config: Option<&SplitConfig>,
        paths: &Paths,
    ) -> Result<(), Reason> {
        if self.group.steered.is_some() || self.hash {
            return Ok(());
        }
        self.hash = true;
        let group = self.group.take(paths)?;
        let name = self.group.name();
        let group = self.group.steered.insert(group);
        if let Some(config) = config {
            let root = cgroup::mount_point();
            let plan = Plan {
                // The server may have put its workers anywhere below.
                cgroup: root.as_deref().ok(),
                datagrams: Some(config.affinity.unwrap_or_default()),
                shared_socket: config.affinity.is_none(),
                ..Plan::new(&name, &config.paths, config.datagrams)
            };
            queue_group::steer(group, &plan, queue, config)?;
            self.hash = false;
            self.ends_with_readers = config.affinity == Some(Affinity::Quic);
        }
        self.assign_original();
        Ok(())
    }

    /// A process or thread receives from its queue: it is chosen from now on.
    pub fn accepted(&mut self, pid: u32, fd: i32, grant: QueueGrant) {
        let remote = RemoteFd {
            pid,
            fd,
            inode: grant.new.inode,
        };
        if remote.borrow().is_err() {
            return self.rejected(grant);
        }
        let forked = |queue: &Queue| queue.kind == Kind::Process && queue.remote.pid == pid;
        let keeps = grant.kind == Kind::Process || self.queues.iter().any(forked);
        if grant.kind == Kind::Process {
            // It could not have its queue at first, and received from the socket.
            self.original.readers.retain(|reader| reader.pid != pid);
        }
        self.group.assign(grant.new.cookie, remote, pid);
        self.queues.push(Queue {
            kind: grant.kind,
            remote,
            cookie: grant.new.cookie,
            kept: keeps.then_some(grant.new.queue),
        });
        if self.queues.len() == 1 && keeps {
            self.look_round();
        }
        self.drain_step();
        self.group.store();
    }

    /// A queue was not accepted. It may have unread datagrams.
    pub fn rejected(&mut self, grant: QueueGrant) {
        self.leave(grant.new.cookie);
        self.left.add(grant.new.queue);
    }

    fn leave(&mut self, cookie: u64) {
        if self.group.leave(cookie)
            && let Some(group) = &self.group.steered
        {
            // Threads may come and go without limit.
            group.forget(cookie);
        }
    }

    /// A thread has stopped receiving from its queue, which is chosen no more from now on. Returns whether other
    /// processes can read it. Otherwise its own process has to, being the only one.
    pub fn given_back(&mut self, pid: u32, queue: OwnedFd) -> bool {
        let inode = inode_of(&queue).unwrap_or(0);
        let its = |one: &Queue| one.remote.inode == inode && one.remote.pid == pid;
        if let Some(at) = self.queues.iter().position(its) {
            let gone = self.queues.swap_remove(at);
            self.leave(gone.cookie);
        }
        let shared = self.original.kept.is_some();
        if shared {
            self.left.add(queue);
            self.drain_step();
        } else if let Err(error) = clone_socket::leave_reuseport_group(&queue) {
            tracing::debug!("{}: {error}", self.group);
        }
        self.group.store();
        shared
    }

    /// A process got an empty datagram: tells it why.
    pub fn ask_left(&mut self, pid: u32) -> WakeReply {
        let also = self.unread().and_then(|one| one.try_clone().ok());
        self.left.ask(pid, also)
    }

    /// Returns the shared socket if it has unread datagrams and no reader.
    fn unread(&self) -> Option<&OwnedFd> {
        let kept = self.original.kept.as_ref()?;
        (self.original.readers.is_empty() && is_readable(kept)).then_some(kept)
    }

    /// Has orphaned queues read by others. Returns whether to call it again soon.
    pub fn drain_step(&mut self) -> bool {
        let somebody = !self.queues.is_empty() || !self.original.readers.is_empty();
        let unread = self.unread().is_some();
        somebody && self.left.drain_step(unread)
    }

    /// A process receives from the socket itself: gives that socket a slot.
    fn assign_original(&mut self) {
        if let Some(reader) = self.original.readers.first() {
            let (cookie, remote, pid) = (self.original.cookie, self.original.remote, reader.pid);
            self.group.assign(cookie, remote, pid);
        }
    }

    fn follow_queues(&mut self) -> bool {
        let mut changed = false;
        for mut queue in std::mem::take(&mut self.queues) {
            let (there, moved) = queue.look();
            if there {
                if let (true, Some(group)) = (moved, &mut self.group.steered) {
                    group.lend(queue.cookie, queue.remote);
                }
                self.queues.push(queue);
                continue;
            }
            changed = true;
            self.leave(queue.cookie);
            if let Some(kept) = queue.kept.filter(|_| !self.ends_with_readers) {
                self.left.add(kept);
            }
        }
        changed
    }

    fn follow_original(&mut self) -> bool {
        if self.original.closed {
            return false;
        }
        let before = self.original.readers.len();
        self.original.readers.retain(Worker::lives);
        let mut changed = self.original.readers.len() != before;
        if self.original.remote.borrow().is_err() && !self.find_holder() {
            self.original.closed = true;
            self.original.readers.clear();
            // The remaining processes read it.
            if let Some(kept) = self.original.kept.take() {
                self.left.add(kept);
            }
            changed = true;
        }
        if self.original.readers.is_empty() {
            self.leave(self.original.cookie);
        } else if changed {
            self.assign_original();
        }
        changed
    }

    /// The known holder of the socket is gone, or has it under another number: looks for a holder.
    fn find_holder(&mut self) -> bool {
        let (inode, ours) = (self.inode(), std::process::id());
        let all = Processes::read();
        let reads = |pid: u32| self.original.readers.iter().any(|one| one.pid == pid);
        let holders = || {
            all.held
                .iter()
                .filter(|held| held.inode == inode && held.pid != ours)
        };
        let Some(holder) = holders()
            .find(|held| reads(held.pid))
            .or_else(|| holders().next())
        else {
            return false;
        };
        let remote = RemoteFd::from(holder);
        self.original.remote = remote;
        if let Some(group) = &mut self.group.steered {
            group.lend(self.original.cookie, remote);
        }
        true
    }

    /// Finds processes that wait on the shared socket and never asked: the one that bound it, or one that makes
    /// system calls of its own.
    fn look_round(&mut self) -> bool {
        self.looked = Instant::now();
        let readers = &self.original.readers;
        let found = unasked(self.inode(), |pid| readers.iter().any(|one| one.pid == pid));
        for RemoteFd { pid, fd, inode } in &found {
            self.stays(*pid, *fd, *inode);
        }
        !found.is_empty()
    }

    /// Checks what became of its sockets and processes. Call it some twenty times a second.
    pub fn follow(&mut self) {
        let mut changed = self.follow_queues();
        changed |= self.follow_original();
        let forked = self.queues.iter().any(|queue| queue.kept.is_some());
        if forked && self.looked.elapsed() >= LOOK_ROUND {
            changed |= self.look_round();
        }
        self.drain_step();
        if changed {
            self.group.store();
        }
        self.group.catch_up();
    }

    /// Whether no process has a socket of it any more.
    pub fn is_over(&self) -> bool {
        self.original.closed && self.queues.is_empty()
    }

    /// Its group.
    pub fn group(&self) -> &QueueGroup {
        &self.group
    }

    /// The same, to be changed.
    pub fn group_mut(&mut self) -> &mut QueueGroup {
        &mut self.group
    }

    /// The server closed it, or has ended: removes program, pins and state.
    pub fn end(self) {
        self.group.end();
    }
}
