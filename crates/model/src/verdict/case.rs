//! The case that the rules look at, and the words that several of them use.

use super::time;
use crate::accept::{Means, Shape};
use crate::advice;
use crate::layout::connections;
use crate::listener::Protocol;
use crate::snapshot::{Queue, Row, Totals, Watch};

/// Fewer connections than this say nothing about their spread.
pub(super) const ENOUGH_CONNECTIONS: u64 = 50;
/// A queue whose connections all waited less than this was not blocked, however often it was seen filled, µs.
const BLOCKED_WAIT_US: f64 = 20_000.0;

/// The input of all rules.
pub(super) struct Case<'a> {
    pub watch: &'a Watch,
    pub rows: Vec<Row>,
    pub queues: Vec<Queue>,
    pub totals: Totals,
    pub address: String,
    pub name: String,
}

impl<'a> Case<'a> {
    pub fn of(watch: &'a Watch) -> Self {
        let name = watch.last.workers.values().next();
        Self {
            watch,
            rows: watch.rows(),
            queues: watch.queues(),
            totals: watch.totals(),
            address: watch.last.listener.address.to_string(),
            name: name.map_or_else(String::new, |worker| worker.name.clone()),
        }
    }
}

impl Case<'_> {
    pub fn serving(&self, pid: u32) -> bool {
        self.watch.model.workers.contains(&pid)
    }

    pub fn looks(&self) -> u64 {
        self.watch.sampled.looks
    }

    /// Whether each worker, process or thread, has a socket.
    pub fn has_own_sockets(&self) -> bool {
        matches!(
            self.watch.model.shape,
            Shape::SocketPerWorker | Shape::SocketPerThread
        )
    }

    /// Names a worker in a sentence.
    pub fn worker(&self, pid: u32) -> String {
        match self.watch.threads.get(&pid) {
            Some(process) => format!("thread {pid} of process {process}"),
            None => format!("process {pid}"),
        }
    }

    fn steerable(&self) -> bool {
        self.has_own_sockets()
            && self.watch.last.listener.protocol != Protocol::Mptcp
            && self.watch.steered != Some(true)
    }

    pub fn is_udp(&self) -> bool {
        self.watch.last.listener.protocol == Protocol::Udp
    }

    /// The name of one that comes to its sockets.
    pub fn thing(&self) -> &'static str {
        match self.is_udp() {
            true => "datagram",
            false => "connection",
        }
    }

    /// How much waits in a queue, as a clause: of UDP that is known in bytes.
    pub fn that_wait(&self, length: u32) -> String {
        match (self.is_udp(), length) {
            (true, bytes) => format!("{bytes} bytes of datagrams wait"),
            (false, 1) => "1 connection waits".into(),
            (false, length) => format!("{} wait", connections(length.into())),
        }
    }

    /// The next command for sockets of UDP.
    pub fn steer_datagrams(&self) -> String {
        let target = self.watch.last.listener.address.target();
        if self.watch.steered == Some(true) {
            "`wakeone status` shows whether its agent lives, and the queue of each worker".into()
        } else if self.has_own_sockets() {
            format!(
                "`wakeone attach udp://{target}` has new flows go to the workers whose queues are shortest"
            )
        } else {
            format!(
                "{}; or start it by `wakeone run --split -- COMMAND`",
                self.own_sockets()
            )
        }
    }

    pub fn steer(&self) -> String {
        let target = self.watch.last.listener.address.target();
        if self.is_udp() {
            return self.steer_datagrams();
        }
        if self.watch.steered == Some(true) {
            "`wakeone status` shows whether its agent lives and moves queues (`--rescue`)".into()
        } else if self.steerable() {
            format!(
                "`wakeone attach --rescue {target}` moves such a queue to the others while its worker is stuck"
            )
        } else if self.is_unix() {
            self.one_queue().unwrap_or_else(|| advice::EPOLL.into())
        } else {
            format!(
                "give each worker a socket ({}), then `wakeone attach --rescue {target}`",
                advice::own_sockets(&self.name, &self.address)
            )
        }
    }

    pub fn is_unix(&self) -> bool {
        self.watch.last.listener.protocol == Protocol::Unix
    }

    /// Returns how each worker gets a socket of its own; for a UNIX socket the way to share it.
    pub fn own_sockets(&self) -> String {
        match self.is_unix() {
            true => advice::EPOLL.into(),
            false => advice::own_sockets(&self.name, &self.address),
        }
    }

    /// The next command where workers wait for one listener in epoll.
    pub fn one_queue(&self) -> Option<String> {
        let epoll = matches!(
            self.watch.model.means,
            Means::EpollExclusive | Means::EpollEdge | Means::EpollWakeAll
        );
        let target = self.watch.last.listener.address.target();
        (epoll && self.shared() && self.watch.steered != Some(true)).then(|| {
            format!(
                "`wakeone attach {target}` has only those workers woken that have fewest connections; it restarts nothing"
            )
        })
    }

    /// The next command where each worker has a socket, and some have many connections.
    pub fn least_connections(&self) -> Option<String> {
        let target = self.watch.last.listener.address.target();
        self.steerable().then(|| {
            format!("`wakeone attach {target}` has new connections go to workers that have fewer")
        })
    }

    /// For how long a queue waited behind workers that were busy with something, and did not just lack a CPU, s.
    pub fn blocked_s(&self, queue: &Queue) -> f64 {
        let servers = || self.rows.iter().filter(|r| queue.pids.contains(&r.pid));
        let quick = queue.length == 0
            && servers().all(|r| r.wait_us_max.is_some_and(|us| us < BLOCKED_WAIT_US));
        if quick && !queue.pids.is_empty() {
            return 0.0;
        }
        let without_cpu: f64 = servers().map(|r| r.run_delay).fold(0.0, f64::max);
        (queue.blocked_s - without_cpu * self.totals.seconds).max(0.0)
    }

    /// The wait so far of the oldest waiting connection, as the end of a sentence; empty where none waits.
    pub fn oldest(&self) -> String {
        let oldest = self.totals.oldest_wait_us;
        oldest.map_or_else(String::new, |us| format!("; the oldest waits {}", time(us)))
    }

    pub fn shared(&self) -> bool {
        matches!(
            self.watch.model.shape,
            Shape::Shared | Shape::SharedByThreads
        )
    }
}

/// In how many looks the queue was not empty.
pub(super) fn filled(case: &Case<'_>, queue: &Queue) -> u64 {
    let sockets = &case.watch.last.listener.sockets;
    let socket = sockets.iter().find(|s| s.inode == queue.inode);
    let looks = socket.and_then(|s| case.watch.sampled.queue_filled.get(&s.cookie));
    looks.copied().unwrap_or(0)
}

/// Whether the queue was filled all the time, but for a few looks.
pub(super) fn is_always_filled(case: &Case<'_>, queue: &Queue) -> bool {
    filled(case, queue) * 10 > case.looks() * 9
}

pub(super) fn list(pids: &[u32]) -> String {
    let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
    pids.join(", ")
}
