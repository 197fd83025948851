//! One listener that a server's processes share: the queues that were made beside it, the process that serves each,
//! and how connections are steered to them.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use wakeone_kernel::cgroup;
use wakeone_kernel::socket;
use wakeone_kernel::socket::clone_listener;
use wakeone_kernel::socket::diag;
use wakeone_kernel::socket::moving::{Holders, Unsafe};
use wakeone_kernel::socket::reopening::may_reopen;
use wakeone_model::listener::Protocol;

use crate::config::{SplitConfig, Steering};
use crate::queue_group::{self, NewQueue, QueueGroup, SharedSocket};
use crate::reason::Reason;
use crate::worker::{LOOK_ROUND, Worker, first_holder, unasked, unpolled};
use wakeone::steered::SteeredGroup;
use wakeone_control::state::MOST_SLOTS;
use wakeone_kernel::socket::inode_of;
use wakeone_steering::agent::Agent;
use wakeone_steering::dispatcher::Plan;
use wakeone_steering::slot_sockets::RemoteFd;

/// How long to wait after a failure before a move of the shared socket's queue is tried again.
const RETRY: Duration = Duration::from_secs(1);

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
        self.remote.borrow().ok()
    }
}

/// A queue that was made for a process and is not yet in its listener's place.
#[derive(Debug)]
pub struct QueueGrant {
    /// The queue.
    pub new: NewQueue,
    /// The process has the queue under another number already.
    again: bool,
}

/// A shared listener.
pub struct Shared {
    group: QueueGroup,
    backlog: i32,
    owner: Option<Worker>,
    original: Queue,
    siblings: Vec<Queue>,
    looked: Instant,
    /// Since when the shared socket is given no connections.
    unchosen: Option<Instant>,
    /// It was closed for good.
    closed: bool,
    /// A move of the shared socket's queue failed, and is tried again then.
    retry_at: Option<Instant>,
    /// Whether the log says so.
    told_stays: bool,
    /// The processes that hold the shared socket.
    holders: Holders,
}

impl Shared {
    /// A listener that a process has just opened.
    ///
    /// # Errors
    /// It is no listener that could be split, or it is gone.
    pub fn new(pid: u32, fd: i32, listener: &OwnedFd) -> io::Result<Self> {
        let group = QueueGroup::of(listener.as_fd(), Protocol::Tcp)?;
        let inode = inode_of(listener)?;
        let remote = RemoteFd { pid, fd, inode };
        Ok(Self {
            group,
            backlog: backlog(listener.as_fd()),
            owner: Worker::of(first_holder(pid, inode)),
            original: Queue {
                remote,
                cookie: socket::cookie(listener)?,
                workers: Vec::new(),
            },
            siblings: Vec::new(),
            looked: Instant::now(),
            unchosen: None,
            closed: false,
            retry_at: None,
            told_stays: false,
            holders: Holders::default(),
        })
    }

    /// The shared socket's inode, which identifies the listener.
    pub fn inode(&self) -> u64 {
        self.original.remote.inode
    }

    /// How many queues there are beside the shared socket.
    pub fn queues(&self) -> usize {
        self.siblings.len()
    }

    /// It listens again, perhaps with another backlog.
    pub fn listens_again(&mut self, listener: &OwnedFd) {
        self.backlog = backlog(listener.as_fd());
        if let Some(group) = &mut self.group.steered {
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
        unpolled(pid, inode, Reason::Registered)?;
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
            self.assign_original();
        }
        self.group.store();
    }

    /// Makes a queue for a process. The first one starts steering.
    ///
    /// # Errors
    /// Why no queue can be made.
    pub fn grant(
        &mut self,
        pid: u32,
        like: BorrowedFd<'_>,
        config: &SplitConfig,
        steering: &mut Steering,
    ) -> Result<QueueGrant, Reason> {
        if let Some(again) = self.again(pid) {
            return Ok(again);
        }
        let queue = clone_listener::clone_listener(like, pid)
            .map_err(|error| Reason::Sibling(error.to_string()))?;
        rustix::net::listen(&queue, self.backlog)
            .map_err(|errno| Reason::Sibling(io::Error::from(errno).to_string()))?;
        let new = NewQueue::of(self.inode(), queue)?;
        if self.group.steered.is_none() {
            self.begin(&new, config, steering)?;
        }
        self.group.know(new.inode);
        Ok(QueueGrant { new, again: false })
    }

    /// The queue that a process has, for another number of the same listener.
    fn again(&self, pid: u32) -> Option<QueueGrant> {
        let own = |queue: &&Queue| queue.workers.iter().any(|worker| worker.pid == pid);
        let has = self.siblings.iter().find(own)?;
        let new = NewQueue {
            original: self.inode(),
            queue: has.borrow()?,
            inode: has.remote.inode,
            cookie: has.cookie,
        };
        Some(QueueGrant { new, again: true })
    }

    /// With the first queue: takes the group's folder, and has the group steered if that is allowed.
    fn begin(
        &mut self,
        queue: &NewQueue,
        config: &SplitConfig,
        steering: &mut Steering,
    ) -> Result<(), Reason> {
        let mut group = self.group.take(&config.paths, self.backlog)?;
        if let Steering::Full(policy) = *steering {
            // The shared socket was made in any cgroup: only the root one sees all of its connections.
            let root = cgroup::mount_point().ok();
            let name = self.group.name();
            let plan = Plan {
                cgroup: root.as_deref(),
                ..Plan::new(&name, &config.paths, policy)
            };
            queue_group::steer(&mut group, &plan, queue, config).inspect_err(|_| {
                // The next processes are told so before any queue is made for them.
                *steering = Steering::None;
            })?;
        }
        group.share(self.original.remote);
        self.group.steered = Some(group);
        self.assign_original();
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
            inode: grant.new.inode,
        };
        let mut queue = Queue {
            remote,
            cookie: grant.new.cookie,
            workers: Vec::new(),
        };
        queue.serve(pid);
        let there = queue.borrow().is_some() && !queue.workers.is_empty();
        if !there {
            return self.rejected(pid, grant);
        }
        self.leaves_original(pid);
        self.group.assign(grant.new.cookie, remote, pid);
        self.siblings.push(queue);
        drop(grant);
        self.sweep();
        self.group.store();
    }

    /// A queue was not accepted: it closes, and the kernel moves its connections.
    pub fn rejected(&mut self, pid: u32, grant: QueueGrant) {
        if let (Some(group), false) = (&mut self.group.steered, grant.again) {
            group.hand_over(grant.new.cookie);
        }
        drop(grant);
        let inode = self.inode();
        self.stays(pid, inode);
    }

    /// A process accepts from the shared socket itself: gives that socket a slot.
    fn assign_original(&mut self) {
        if let Some(worker) = self.original.first() {
            let (cookie, remote) = (self.original.cookie, self.original.remote);
            self.group.assign(cookie, remote, worker);
        }
    }

    /// A process that could not have its queue at first has stopped accepting from the shared socket.
    fn leaves_original(&mut self, pid: u32) {
        self.original.workers.retain(|worker| worker.pid != pid);
        if let (None, Some(group)) = (self.original.first(), &mut self.group.steered) {
            group.hand_over(self.original.cookie);
        }
    }

    /// Cookies of its sockets that listen. A socket does not listen for a moment while its queue is being moved. So
    /// if one is missing, this looks again between two looks of the agent.
    fn listening(&self) -> io::Result<HashSet<u64>> {
        let look = || -> io::Result<HashSet<u64>> {
            let which = diag::Which::Listening;
            let entries = diag::sockets_at(Protocol::Tcp, which, self.group.address)?;
            Ok(entries.iter().map(|entry| entry.socket.cookie).collect())
        };
        let there = look()?;
        let mut all = self.siblings.iter().chain([&self.original]);
        match &self.group.steered {
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
            if !there.contains(&queue.cookie) && !self.group.is_left_closed(queue.cookie) {
                changed = true;
                self.group.leave(queue.cookie);
                continue;
            }
            let Some(worker) = queue.first() else {
                self.orphaned(queue);
                continue;
            };
            if replaced {
                self.group.assign(queue.cookie, queue.remote, worker);
            }
            self.siblings.push(queue);
        }
        changed
    }

    /// Closes a queue that outlives its worker, in a process that does not accept from it (a child that the worker
    /// left behind). Its connections go to others.
    fn orphaned(&mut self, mut queue: Queue) {
        if let Some(holder) = RemoteFd::find(queue.remote.inode) {
            queue.remote = holder;
        }
        if let Some(group) = &mut self.group.steered {
            group.lend(queue.cookie, queue.remote);
            group.worker_gone(queue.cookie);
        }
        if let Some(listener) = queue.borrow() {
            let _ = rustix::net::shutdown(&listener, rustix::net::Shutdown::Read);
        }
        self.group.leave(queue.cookie);
    }

    fn follow_original(&mut self, there: &HashSet<u64>) -> bool {
        let replaced = self.original.reap();
        let cookie = self.original.cookie;
        let left_closed = self.is_moving() || self.group.is_left_closed(cookie);
        self.reopen_original();
        self.closed = !there.contains(&cookie) && !left_closed;
        let Some(group) = &mut self.group.steered else {
            return replaced;
        };
        match self.original.first() {
            None => group.hand_over(self.original.cookie),
            Some(worker) if replaced && group.place_of(self.original.cookie).is_some() => {
                group.assign_or_warn(self.original.cookie, self.original.remote, worker);
            }
            Some(_) => {}
        }
        replaced
    }

    /// Moves connections that wait on the shared socket, if nobody accepts from it, to the processes with queues of
    /// their own. They arrived before the first such queue was there, or their handshake began before that.
    fn sweep(&mut self) {
        let wait = self
            .group
            .steered
            .as_ref()
            .and_then(|group| self.sweep_wait(group));
        let Some(wait) = wait.filter(|_| !self.closed) else {
            self.unchosen = None;
            return;
        };
        // A handshake that ends while the socket is shut down is reset: so those under way end first.
        let unchosen = self.unchosen.get_or_insert_with(Instant::now).elapsed();
        if unchosen < wait || self.is_moving() || !self.may_retry() {
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
        let queues = self.siblings.iter().chain([&self.original]);
        let workers = queues.flat_map(|queue| queue.workers.iter().map(|worker| worker.pid));
        let workers: Vec<u32> = workers.collect();
        // It would stay closed, so it is not closed.
        if let Err(error) = may_reopen(&listener, workers.iter().copied()) {
            return self.retry_later(&format!("the shared socket's queue stays: {error}"));
        }
        let inode = self.inode();
        self.holders.search(|| vec![inode]);
        let look = match self.holders.look(inode, workers) {
            Ok(look) => look,
            // It accepts itself.
            Err(Unsafe::Waits(_)) => return,
            Err(why) => {
                return self.retry_later(&format!("the shared socket's queue stays: {why}"));
            }
        };
        let Some(group) = self.group.steered.as_mut() else {
            return;
        };
        match group.move_shared(inode, &listener, backlog, &look) {
            Ok(true) => self.retry_at = None,
            Ok(false) => return,
            Err(error) => {
                self.retry_later(&format!("the shared socket's queue stays: {error}"));
                self.reopened(&listener);
            }
        }
        for queue in &self.siblings {
            if let Some(listener) = queue.borrow() {
                socket::wake_waiters(&listener);
            }
        }
    }

    /// Whether a move has closed the shared socket, and not opened it again.
    fn is_moving(&self) -> bool {
        let group = self.group.steered.as_ref();
        group.is_some_and(SteeredGroup::moves_shared)
    }

    fn may_retry(&self) -> bool {
        self.retry_at.is_none_or(|at| at <= Instant::now())
    }

    fn retry_later(&mut self, why: &str) {
        self.retry_at = Some(Instant::now() + RETRY);
        if !std::mem::replace(&mut self.told_stays, true) {
            tracing::warn!(
                event = "degraded",
                "{}: {why} (next try each second)",
                self.group
            );
        }
    }

    /// Notes that a move is over if the shared socket listens.
    fn reopened(&mut self, listener: &OwnedFd) {
        if let (true, Some(group)) = (socket::listens(listener), &mut self.group.steered) {
            group.shared_is_open();
        }
    }

    /// Makes the shared socket listen again if a move left it closed.
    fn reopen_original(&mut self) {
        if !self.is_moving() || !self.may_retry() {
            return;
        }
        let Some(listener) = self.original.borrow().or_else(|| self.find_holder()) else {
            // The server has closed it meanwhile.
            if let Some(group) = &mut self.group.steered {
                group.shared_is_open();
            }
            return;
        };
        let open = socket::listens(&listener);
        let at = self.group.address;
        match (!open).then(|| socket::listen_again(&listener, at, self.backlog)) {
            Some(Err(error)) => {
                self.retry_later(&format!("the shared socket stays closed: {error}"));
            }
            _ => self.retry_at = None,
        }
        self.reopened(&listener);
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
        self.original.remote = RemoteFd::find(self.inode())?;
        self.original.borrow()
    }

    /// Finds processes that wait on the shared socket and never asked (io_uring, system calls of their own): they
    /// serve it.
    fn look_round(&mut self) -> bool {
        if self.siblings.is_empty() || self.closed {
            return false;
        }
        let workers = &self.original.workers;
        let found = unasked(self.inode(), |pid| workers.iter().any(|one| one.pid == pid));
        for RemoteFd { pid, .. } in &found {
            tracing::info!(
                "{}: process {pid} waits on the shared socket itself; it gets its part of the connections there",
                self.group
            );
            self.original.serve(*pid);
            self.assign_original();
        }
        !found.is_empty()
    }
}

impl SharedSocket for Shared {
    fn follow(&mut self) {
        let there = match self.listening() {
            Ok(there) => there,
            Err(error) => {
                tracing::debug!("{}: {error}", self.group);
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
            self.group.store();
        }
        self.group.catch_up();
    }

    fn is_over(&self) -> bool {
        self.closed && self.siblings.is_empty()
    }

    fn group(&self) -> &QueueGroup {
        &self.group
    }

    fn group_mut(&mut self) -> &mut QueueGroup {
        &mut self.group
    }

    fn end(self) {
        self.group.end();
    }
}

fn backlog(listener: BorrowedFd<'_>) -> i32 {
    let limit = socket::accept_queue(listener).unwrap_or_default().limit;
    i32::try_from(limit).unwrap_or(i32::MAX)
}
