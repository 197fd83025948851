//! One listener that a server's processes share: the queues that were made beside it, the process that serves each,
//! and how connections are steered to them.

use std::collections::HashSet;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wakeone_kernel::procfs::Processes;
use wakeone_kernel::{capability, cgroup, clone_listener, diag, process, procfs, socket};
use wakeone_model::listener::{Protocol, Wait};
use wakeone_shim::protocol::How;

use super::{Steering, SteeringConfig};
use crate::agent::{Agent, AgentConfig};
use crate::attach::name_of;
use crate::dispatcher::{Dispatcher, Plan};
use crate::metrics::Source;
use crate::paths::Paths;
use crate::privileges::FOR_LOADING;
use crate::slot_sockets::RemoteFd;
use crate::slot_sockets::inode_of;
use crate::steer::SteerEvent;
use crate::steered::{Origin, SteeredGroup};
use crate::supervisor::listen::Endpoint;
use crate::supervisor::state::{self, MOST_SLOTS};

/// How often to look for processes that wait on the shared socket unknown to the library.
const LOOK_ROUND: Duration = Duration::from_secs(1);

/// Why a process stays with the listener that it has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// It opened the listener itself.
    #[error("it opened the listener and accepts from it itself")]
    Owner,
    /// Nobody else has the socket.
    #[error("no other process has the socket")]
    Alone,
    /// It has a queue already.
    #[error("it has a queue of its own already")]
    Has,
    /// One of its epoll sets has the shared socket, from before the fork.
    #[error(
        "one of its epoll sets has the shared socket already (registered before the fork, or by io_uring)"
    )]
    Registered,
    /// The same for a UDP socket, where threads would have queues.
    #[error("it is in an epoll set")]
    Polled,
    /// We may not read its descriptors.
    #[error("its descriptors may not be seen: {0}")]
    Hidden(String),
    /// There is nowhere to put another queue.
    #[error("there are {MOST_SLOTS} queues already")]
    Full,
    /// The kernel cannot make one.
    #[error("no second socket like it can be made: {0}")]
    Sibling(String),
    /// Without steering, one process must serve the shared socket itself.
    #[error(
        "it serves the shared socket itself: nothing keeps connections, or datagrams, from that"
    )]
    First,
    /// The group's folder cannot be had, or steering failed.
    #[error("{0}")]
    Steering(String),
}

/// A process that accepts from a queue.
#[derive(Debug)]
pub struct Worker {
    /// Its process id.
    pub pid: u32,
    pidfd: OwnedFd,
}

impl Worker {
    /// Makes one of a process that runs.
    pub fn of(pid: u32) -> Option<Self> {
        let raw = i32::try_from(pid)
            .ok()
            .and_then(rustix::process::Pid::from_raw)?;
        let pidfd = rustix::process::pidfd_open(raw, rustix::process::PidfdFlags::empty()).ok()?;
        Some(Self { pid, pidfd })
    }

    /// Whether it has not ended.
    pub fn lives(&self) -> bool {
        let mut ended = [PollFd::new(&self.pidfd, PollFlags::IN)];
        poll(&mut ended, Some(&Timespec::default())).is_ok_and(|ready| ready == 0)
    }
}

/// A listening socket of the group, and the processes that accept from it.
#[derive(Debug)]
struct Queue {
    remote: RemoteFd,
    cookie: u64,
    workers: Vec<Worker>,
}

impl Queue {
    /// Notes another process that accepts from it.
    fn serve(&mut self, pid: u32) {
        if !self.workers.iter().any(|worker| worker.pid == pid) {
            self.workers.extend(Worker::of(pid));
        }
    }

    fn first(&self) -> Option<u32> {
        self.workers.first().map(|worker| worker.pid)
    }

    /// Forgets workers that ended; returns whether another one comes first now.
    fn reap(&mut self) -> bool {
        let before = self.first();
        self.workers.retain(Worker::lives);
        self.first() != before
    }

    fn borrow(&self) -> Option<OwnedFd> {
        let listener = process::descriptor_of(self.remote.pid, self.remote.fd).ok()?;
        (inode_of(&listener).ok()? == self.remote.inode).then_some(listener)
    }
}

/// A queue that was made for a process and is not yet in its listener's place.
#[derive(Debug)]
pub struct QueueGrant {
    /// The listener that it is for.
    pub original: u64,
    queue: OwnedFd,
    inode: u64,
    cookie: u64,
    /// The process has the queue under another number already.
    again: bool,
}

impl QueueGrant {
    /// The socket.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }
}

/// A shared listener.
pub struct Shared {
    address: SocketAddr,
    dual_stack: bool,
    backlog: i32,
    owner: Option<Worker>,
    original: Queue,
    siblings: Vec<Queue>,
    /// Inodes of all queues that there ever were: a descendant may still hold one.
    known: HashSet<u64>,
    /// None until there is a queue.
    group: Option<SteeredGroup>,
    looked: Instant,
    /// Since when the shared socket is given no connections.
    unchosen: Option<Instant>,
    /// It was closed for good.
    closed: bool,
}

impl Shared {
    /// A listener that a process has just opened.
    ///
    /// # Errors
    /// It is no listener that could be split, or it is gone.
    pub fn new(pid: u32, fd: i32, listener: &OwnedFd) -> io::Result<Self> {
        let address = clone_listener::address(listener).ok_or(io::ErrorKind::Unsupported)?;
        let inode = inode_of(listener)?;
        let remote = RemoteFd { pid, fd, inode };
        Ok(Self {
            address,
            dual_stack: clone_listener::is_dual_stack(listener),
            backlog: backlog(listener.as_fd()),
            owner: Worker::of(first_holder(pid, inode)),
            original: Queue {
                remote,
                cookie: socket::cookie(listener)?,
                workers: Vec::new(),
            },
            siblings: Vec::new(),
            known: HashSet::from([inode]),
            group: None,
            looked: Instant::now(),
            unchosen: None,
            closed: false,
        })
    }

    /// The address at which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The name of its group.
    pub fn name(&self) -> String {
        name_of(Protocol::Tcp, self.address)
    }

    /// The source of its metrics.
    pub fn source(&self, paths: &Paths, traced: bool) -> Option<Source> {
        let group = self.group.as_ref()?;
        Some(capability::with(&FOR_LOADING, || {
            group.source(paths, traced)
        }))
    }

    /// The shared socket's inode, which identifies the listener.
    pub fn inode(&self) -> u64 {
        self.original.remote.inode
    }

    /// Whether this is its socket, or one of its queues.
    pub fn knows(&self, inode: u64) -> bool {
        self.known.contains(&inode)
    }

    /// Whether no process has a socket of it any more.
    pub fn is_over(&self) -> bool {
        self.closed && self.siblings.is_empty()
    }

    /// How many queues there are beside the shared socket.
    pub fn queues(&self) -> usize {
        self.siblings.len()
    }

    /// It listens again, perhaps with another backlog.
    pub fn listens_again(&mut self, listener: &OwnedFd) {
        self.backlog = backlog(listener.as_fd());
        if let Some(group) = &mut self.group {
            group.set_backlog(self.backlog);
        }
        self.closed = false;
    }

    /// Whether a process can have a queue of its own in the place of the socket on which it is about to wait.
    ///
    /// # Errors
    /// The reason if it cannot.
    pub fn decide(&self, pid: u32, inode: u64, steering: &Steering) -> Result<(), Reason> {
        if self
            .owner
            .as_ref()
            .is_some_and(|o| o.pid == pid && o.lives())
        {
            return Err(Reason::Owner);
        }
        let own = |queue: &&Queue| queue.workers.iter().any(|worker| worker.pid == pid);
        if self
            .siblings
            .iter()
            .filter(own)
            .any(|q| q.remote.inode == inode)
        {
            return Err(Reason::Has);
        }
        match polls(pid, inode) {
            Ok(false) => {}
            Ok(true) => return Err(Reason::Registered),
            Err(error) => return Err(Reason::Hidden(error.to_string())),
        }
        if self.siblings.len() + 1 >= MOST_SLOTS {
            return Err(Reason::Full);
        }
        let served = self.original.workers.iter().any(Worker::lives);
        if matches!(steering, Steering::None) && !served && !self.closed {
            return Err(Reason::First);
        }
        Ok(())
    }

    /// Notes a process that waits on one of its sockets, and stays with it.
    pub fn stays(&mut self, pid: u32, inode: u64) {
        let queues = self.siblings.iter_mut().chain([&mut self.original]);
        let Some(queue) = queues.into_iter().find(|q| q.remote.inode == inode) else {
            return;
        };
        queue.serve(pid);
        if inode == self.original.remote.inode {
            self.seat_original();
        }
        self.store();
    }

    /// Makes a queue for a process. The first one starts steering.
    ///
    /// # Errors
    /// Why no queue can be made.
    pub fn grant(
        &mut self,
        pid: u32,
        like: BorrowedFd<'_>,
        wish: &SteeringConfig,
        steering: &mut Steering,
    ) -> Result<QueueGrant, Reason> {
        if let Some(again) = self.again(pid) {
            return Ok(again);
        }
        let queue = clone_listener::clone_listener(like, pid)
            .map_err(|error| Reason::Sibling(error.to_string()))?;
        let refused = |error: io::Error| Reason::Sibling(error.to_string());
        rustix::net::listen(&queue, self.backlog).map_err(|errno| refused(errno.into()))?;
        let grant = QueueGrant {
            original: self.inode(),
            inode: inode_of(&queue).map_err(refused)?,
            cookie: socket::cookie(&queue).map_err(refused)?,
            queue,
            again: false,
        };
        if self.group.is_none() {
            self.begin(&grant, wish, steering)?;
        }
        self.known.insert(grant.inode);
        Ok(grant)
    }

    /// The queue that a process has, for another number of the same listener.
    fn again(&self, pid: u32) -> Option<QueueGrant> {
        let own = |queue: &&Queue| queue.workers.iter().any(|worker| worker.pid == pid);
        let has = self.siblings.iter().find(own)?;
        Some(QueueGrant {
            original: self.inode(),
            queue: has.borrow()?,
            inode: has.remote.inode,
            cookie: has.cookie,
            again: true,
        })
    }

    /// With the first queue: takes the group's folder, and has the group steered if that is allowed.
    fn begin(
        &mut self,
        grant: &QueueGrant,
        wish: &SteeringConfig,
        steering: &mut Steering,
    ) -> Result<(), Reason> {
        let name = self.name();
        let origin = Origin {
            listen: Endpoint {
                address: self.address,
                dual_stack: self.dual_stack,
                udp: false,
            },
            backlog: self.backlog,
            command: vec![state::SPLIT.into()],
            attached: true,
        };
        let mut group = SteeredGroup::take(&wish.paths.runtime, &name, origin)
            .map_err(|error| Reason::Steering(error.to_string()))?;
        if let Steering::Full(policy) = *steering {
            let ours = RemoteFd {
                pid: std::process::id(),
                fd: grant.queue.as_raw_fd(),
                inode: grant.inode,
            };
            // The shared socket was made in any cgroup: only the root one sees all of its connections.
            let root = cgroup::mount_point().ok();
            let plan = Plan {
                cgroup: root.as_deref(),
                ..Plan::new(&name, &wish.paths, policy)
            };
            let loaded = capability::with(&FOR_LOADING, || {
                Dispatcher::start_beside(&plan, vec![(grant.cookie, ours)])
            });
            let dispatcher = loaded.map_err(|error| {
                // The next processes are told so before any queue is made for them.
                *steering = Steering::None;
                Reason::Steering(error.to_string())
            })?;
            let config = AgentConfig {
                rescue: wish.rescue,
                stuck_after: wish.stuck_after,
            };
            group.steer(
                dispatcher,
                config,
                &wish.paths,
                [(grant.cookie, ours, None)],
            );
        }
        self.group = Some(group);
        self.seat_original();
        Ok(())
    }

    /// A queue is in its listener's place: it is chosen from now on.
    pub fn accepted(&mut self, pid: u32, fd: i32, grant: QueueGrant) {
        if grant.again {
            return;
        }
        let remote = RemoteFd {
            pid,
            fd,
            inode: grant.inode,
        };
        let mut queue = Queue {
            remote,
            cookie: grant.cookie,
            workers: Vec::new(),
        };
        queue.serve(pid);
        let there = queue.borrow().is_some() && !queue.workers.is_empty();
        if !there {
            return self.rejected(pid, grant);
        }
        self.leaves_original(pid);
        if let Some(group) = &mut self.group {
            group.seat_or_tell(grant.cookie, remote, pid);
        }
        self.siblings.push(queue);
        drop(grant);
        self.sweep();
        self.store();
    }

    /// A queue was not accepted: it closes, and the kernel moves its connections.
    pub fn rejected(&mut self, pid: u32, grant: QueueGrant) {
        if let (Some(group), false) = (&mut self.group, grant.again) {
            group.hand_over(grant.cookie);
        }
        drop(grant);
        let inode = self.inode();
        self.stays(pid, inode);
    }

    /// A process accepts from the shared socket itself: gives that socket a slot.
    fn seat_original(&mut self) {
        if let (Some(group), Some(worker)) = (&mut self.group, self.original.first()) {
            group.seat_or_tell(self.original.cookie, self.original.remote, worker);
        }
    }

    /// A process that could not have its queue at first has stopped accepting from the shared socket.
    fn leaves_original(&mut self, pid: u32) {
        self.original.workers.retain(|worker| worker.pid != pid);
        if let (None, Some(group)) = (self.original.first(), &mut self.group) {
            group.hand_over(self.original.cookie);
        }
    }

    /// Checks what became of its sockets and processes. Call it some twenty times a second.
    pub fn follow(&mut self) {
        let there = match self.listening() {
            Ok(there) => there,
            Err(error) => {
                tracing::debug!("{}: {error}", self.address);
                return;
            }
        };
        if self.owner.as_ref().is_some_and(|owner| !owner.lives()) {
            self.owner = None;
        }
        let mut changed = self.follow_siblings(&there);
        changed |= self.follow_original(&there);
        self.sweep();
        if self.looked.elapsed() >= LOOK_ROUND {
            self.looked = Instant::now();
            changed |= self.look_round();
        }
        if changed {
            self.store();
        }
        if let Some(group) = &self.group {
            group.catch_up();
        }
    }

    /// Cookies of its sockets that listen. A socket does not listen for a moment while its queue is being moved. So
    /// if one is missing, this looks again between two looks of the agent.
    fn listening(&self) -> io::Result<HashSet<u64>> {
        let look = || -> io::Result<HashSet<u64>> {
            let which = diag::Which::Listening;
            let entries = diag::sockets_at(Protocol::Tcp, which, self.address)?;
            Ok(entries.iter().map(|entry| entry.socket.cookie).collect())
        };
        let there = look()?;
        let mut all = self.siblings.iter().chain([&self.original]);
        match &self.group {
            Some(group) if !all.all(|queue| there.contains(&queue.cookie)) => {
                group.between_looks(look)
            }
            _ => Ok(there),
        }
    }

    fn follow_siblings(&mut self, there: &HashSet<u64>) -> bool {
        let mut changed = false;
        for mut queue in std::mem::take(&mut self.siblings) {
            let replaced = queue.reap();
            changed |= replaced;
            if !there.contains(&queue.cookie) {
                changed = true;
                self.leave(queue.cookie);
                continue;
            }
            let Some(worker) = queue.first() else {
                self.orphaned(queue);
                continue;
            };
            if let (true, Some(group)) = (replaced, &mut self.group) {
                group.seat_or_tell(queue.cookie, queue.remote, worker);
            }
            self.siblings.push(queue);
        }
        changed
    }

    fn leave(&mut self, cookie: u64) {
        if let Some(group) = &mut self.group {
            group.leave(cookie);
        }
    }

    /// Closes a queue that outlives its worker, in a process that does not accept from it (a child that the worker
    /// left behind). Its connections go to others.
    fn orphaned(&mut self, mut queue: Queue) {
        let all = Processes::read();
        let holder = all
            .held
            .iter()
            .find(|held| held.inode == queue.remote.inode);
        if let Some(holder) = holder {
            queue.remote = RemoteFd {
                pid: holder.pid,
                fd: holder.fd,
                inode: holder.inode,
            };
        }
        if let Some(group) = &mut self.group {
            group.lend(queue.cookie, queue.remote);
            group.worker_gone(queue.cookie);
        }
        if let Some(listener) = queue.borrow() {
            let _ = rustix::net::shutdown(&listener, rustix::net::Shutdown::Read);
        }
        self.leave(queue.cookie);
    }

    fn follow_original(&mut self, there: &HashSet<u64>) -> bool {
        let replaced = self.original.reap();
        self.closed = !there.contains(&self.original.cookie);
        let Some(group) = &mut self.group else {
            return replaced;
        };
        match self.original.first() {
            None => group.hand_over(self.original.cookie),
            Some(worker) if replaced && group.seat_of(self.original.cookie).is_some() => {
                group.seat_or_tell(self.original.cookie, self.original.remote, worker);
            }
            Some(_) => {}
        }
        replaced
    }

    /// Moves connections that wait on the shared socket, if nobody accepts from it, to the processes with queues of
    /// their own. They arrived before the first such queue was there, or their handshake began before that.
    fn sweep(&mut self) {
        let wait = self.group.as_ref().and_then(|group| self.sweep_wait(group));
        let Some(wait) = wait.filter(|_| !self.closed) else {
            self.unchosen = None;
            return;
        };
        // A handshake that ends while the socket is shut down is reset: so those under way end first.
        let unchosen = self.unchosen.get_or_insert_with(Instant::now).elapsed();
        if unchosen < wait {
            return;
        }
        let Some(listener) = self.original.borrow().or_else(|| self.find_holder()) else {
            return;
        };
        let waiting = socket::accept_queue(&listener).unwrap_or_default();
        if waiting.length == 0 {
            return;
        }
        let backlog = i32::try_from(waiting.limit).unwrap_or(self.backlog);
        // Never moves two queues at once.
        let group = self.group.as_ref();
        let moved = group.map(|one| one.between_looks(|| socket::move_queue(&listener, backlog)));
        if let Some(Err(error)) = moved {
            tracing::warn!("{}: the shared socket's queue stays: {error}", self.address);
        }
        for queue in &self.siblings {
            if let Some(listener) = queue.borrow() {
                socket::wake_waiters(&listener);
            }
        }
    }

    /// Returns how long after its last SYN a handshake may still end on the shared socket. `None` unless our program
    /// chooses, others have queues, and nobody accepts from the shared socket.
    fn sweep_wait(&self, group: &SteeredGroup) -> Option<Duration> {
        let chosen = |queue: &Queue| group.slot_of(queue.cookie).is_some();
        let wanted = !chosen(&self.original) && self.siblings.iter().any(chosen);
        group.agent().filter(|_| wanted).map(Agent::handshake_wait)
    }

    /// The known holder of the shared socket is gone or has closed it: looks for another one.
    fn find_holder(&mut self) -> Option<OwnedFd> {
        let inode = self.inode();
        let all = Processes::read();
        let holder = all.held.iter().find(|held| held.inode == inode)?;
        self.original.remote = RemoteFd {
            pid: holder.pid,
            fd: holder.fd,
            inode,
        };
        self.original.borrow()
    }

    /// Finds processes that wait on the shared socket and never asked (io_uring, system calls of their own): they
    /// serve it.
    fn look_round(&mut self) -> bool {
        if self.siblings.is_empty() || self.closed {
            return false;
        }
        let inode = self.inode();
        let inodes = HashSet::from([inode]);
        let all = Processes::read();
        let holders: HashSet<u32> = all
            .held
            .iter()
            .filter(|held| held.inode == inode)
            .map(|held| held.pid)
            .collect();
        let own = std::process::id();
        let mut changed = false;
        for pid in holders.into_iter().filter(|pid| *pid != own) {
            let known = self.original.workers.iter().any(|w| w.pid == pid);
            let look = || procfs::look(pid, &inodes, &HashSet::new());
            if !known && look().is_some_and(|process| waits(&process, inode)) {
                tracing::info!(
                    "{}: process {pid} waits on the shared socket itself; it gets its part of the connections there",
                    self.address
                );
                self.original.serve(pid);
                self.seat_original();
                changed = true;
            }
        }
        changed
    }

    /// Writes down which process serves which socket.
    fn store(&self) {
        if let Some(group) = &self.group {
            group.keep();
        }
    }

    /// The events that its agent saw.
    pub fn events(&mut self) -> Vec<SteerEvent> {
        self.group
            .as_mut()
            .map(SteeredGroup::events)
            .unwrap_or_default()
    }

    /// The server closed it, or has ended: removes program, pins and state.
    pub fn end(self) {
        if let Some(group) = self.group {
            group.end();
        }
    }
}

/// The process that opened a listener: the one that has begun to listen on it, or an ancestor that holds it too.
/// (Some servers bind in the first process and listen in the workers.)
pub fn first_holder(pid: u32, inode: u64) -> u32 {
    let mut first = pid;
    let own = std::process::id();
    let above = |pid| procfs::identity(pid).map(|identity| identity.parent);
    while let Some(parent) = above(first).filter(|parent| *parent > 1 && *parent != own) {
        let held = process::sockets_of(parent).unwrap_or_default();
        if !held.iter().any(|(_, at)| *at == inode) {
            break;
        }
        first = parent;
    }
    first
}

fn backlog(listener: BorrowedFd<'_>) -> i32 {
    let limit = socket::accept_queue(listener).unwrap_or_default().limit;
    i32::try_from(limit).unwrap_or(i32::MAX)
}

/// Whether an epoll set of a process has this socket, under whatever number.
pub fn polls(pid: u32, inode: u64) -> io::Result<bool> {
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        let Ok(target) = std::fs::read_link(entry.path()) else {
            continue; // closed meanwhile
        };
        if target.as_os_str() != "anon_inode:[eventpoll]" {
            continue;
        }
        let number = entry.file_name();
        let about = std::path::Path::new("/proc")
            .join(pid.to_string())
            .join("fdinfo")
            .join(number);
        let text = wakeone_kernel::stat::text(about).unwrap_or_default();
        if text
            .lines()
            .filter_map(procfs::parse_tfd)
            .any(|(at, _)| at == inode)
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether a process, as it was just seen, waits for connections, or datagrams, on this socket.
pub fn waits(process: &wakeone_model::listener::Process, inode: u64) -> bool {
    process.polls.iter().any(|polled| polled.inode == inode)
        || process.threads.iter().any(|thread| match &thread.wait {
            Wait::Accept(at) | Wait::Receive(at) => *at == inode,
            Wait::Poll(set) => set.contains(&inode),
            Wait::IoUring => true,
            _ => false,
        })
}

/// How a process came to wait, in words.
pub fn in_words(how: How) -> &'static str {
    match how {
        How::Accept => "accept",
        How::Epoll => "epoll",
        How::Poll => "poll",
        How::Receive => "a receive call",
    }
}
