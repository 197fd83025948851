//! The state of a listener and its workers at one moment, and the changes between two moments.
//!
//! A [`Snapshot`] holds states, and counters that only grow; a [`Watch`] holds the result of a period of watching.
//! Both can be written to a file, read again, judged and shown without a kernel.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::accept::AcceptModel;
use crate::listener::{Listener, Protocol, Ungrouped};
use crate::quic::Datagrams;
use crate::waits::Waits;

/// One worker at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerLook {
    /// Process name.
    pub name: String,
    /// CPU time so far, ns (/proc/PID/schedstat of its threads).
    pub cpu_ns: u64,
    /// The part of it in the kernel, ns, as the clock tick samples it (/proc/PID/stat).
    #[serde(default)]
    pub system_ns: u64,
    /// Time so far that its threads were ready and waited for a CPU, ns.
    pub run_delay_ns: u64,
    /// Voluntary switches so far: times that a thread went to sleep.
    pub switches_voluntary: u64,
    /// Switches so far that the scheduler forced.
    pub switches_forced: u64,
    /// State letter of /proc/PID/stat.
    pub state: char,
    /// Whether some thread waits for connections.
    pub waiting: bool,
    /// Connections of the listener that it holds open.
    pub active: u32,
    /// Descriptors that it has open.
    pub descriptors: u32,
    /// Descriptors that it may have open.
    pub descriptors_limit: u64,
    /// CPUs that it may run on.
    pub cpus: u32,
    /// The CPU, where that is only one.
    pub pinned_cpu: Option<u32>,
}

/// The probes' counters of one worker so far.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerTrace {
    /// Connections that accept() returned.
    pub accepted: u64,
    /// accept() calls that found nothing.
    pub accepted_empty: u64,
    /// Threads woken for a connection.
    pub woken: u64,
    /// Waits in the accept queue.
    pub waits: Waits,
    /// Connections accepted while another was open.
    #[serde(default)]
    pub overlapping: u64,
    /// Times from accept() to close(), of connections that a worker served one at a time.
    #[serde(default)]
    pub held: Waits,
}

/// Counts that are unknown, because the kernel has no probe for them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceGaps {
    /// Connections put into a queue.
    pub connections: bool,
    /// Connections that accept() returned. Waits in the queue are unknown with them.
    pub accepts: bool,
    /// Threads woken for a connection.
    pub wakeups: bool,
}

/// The probes' counters so far.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceLook {
    /// Connections put into a queue.
    pub connections: u64,
    /// Threads of the workers woken for them.
    pub wakeups: u64,
    /// By process id.
    pub workers: BTreeMap<u32, WorkerTrace>,
    /// Which of these numbers mean nothing.
    #[serde(default)]
    pub gaps: TraceGaps,
}

/// Counters of the whole network namespace (/proc/net/netstat, /proc/net/snmp).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostLook {
    /// Accept queues found full, by SYNs and by last steps of handshakes.
    pub listen_overflows: u64,
    /// Those, and other reasons to drop at a listener.
    pub listen_drops: u64,
    /// SYNs and SYN-ACKs sent again.
    pub syn_retransmissions: u64,
    /// Connections accepted by any listener of the namespace.
    pub passive_opens: u64,
    /// net.core.somaxconn: the most that a program may ask for.
    pub somaxconn: u32,
    /// Resets sent by any socket of the namespace.
    #[serde(default)]
    pub resets_sent: u64,
    /// Connections that the kernel moved from a listener that closed to another of its group.
    #[serde(default)]
    pub migrated: u64,
    /// CPUs that are online.
    #[serde(default)]
    pub cpus: u32,
}

/// Everything about one listener at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// When, in ns of the monotonic clock.
    pub at_ns: u64,
    /// The listener with its queues.
    pub listener: Listener,
    /// Its workers by process id.
    pub workers: BTreeMap<u32, WorkerLook>,
    /// The probes' counters, where tracing is allowed.
    pub trace: Option<TraceLook>,
    /// The namespace's counters.
    pub host: HostLook,
    /// How long the connections that wait for accept() have waited by now; `None` where that is not known. Ages below
    /// [`SHORT_WAIT_US`] are left out: any queue has them, and the kernel's clock for them is coarse.
    #[serde(default)]
    pub waiting: Option<Waits>,
}

/// A connection that has waited less than this has just come, µs.
pub const SHORT_WAIT_US: u64 = 10_000;

/// The result of many quick looks, some milliseconds apart.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sampled {
    /// Looks taken.
    pub looks: u64,
    /// The longest queue seen, by cookie of the socket.
    pub queue_highest: BTreeMap<u64, u32>,
    /// Looks with something in the queue, by cookie.
    pub queue_filled: BTreeMap<u64, u64>,
    /// Looks in which the worker waited for connections, by process id.
    pub waiting: BTreeMap<u32, u64>,
    /// Looks in which the worker was stopped.
    pub stopped: BTreeMap<u32, u64>,
    /// Looks in which it waited while a queue that it does not serve was not empty.
    pub idle_beside_queue: BTreeMap<u32, u64>,
    /// Looks in which a socket had a queue and all its workers were busy while another worker waited, by cookie.
    pub blocked_queue: BTreeMap<u64, u64>,
    /// Samples of the processes.
    #[serde(default)]
    pub sights: u64,
    /// Those in which a thread waited in accept on a listener that its process also has in an epoll set, by process id.
    #[serde(default)]
    pub accepts_in_loop: BTreeMap<u32, u64>,
    /// Sockets that went away, and how many connections waited in them when last seen.
    pub gone: BTreeMap<u64, u32>,
    /// How long connections waited at a UNIX socket, where that was [`SHORT_WAIT_US`] or more.
    #[serde(default)]
    pub queued: Waits,
    /// How long requests were unread in connections that had been accepted, where that was [`SHORT_WAIT_US`] or more.
    #[serde(default)]
    pub unread: Waits,
    /// The datagrams to a UDP socket, as far as they were looked at.
    #[serde(default)]
    pub datagrams: Datagrams,
}

/// Which view figures are from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    /// The kernel's tracepoints were used, beside /proc and sock_diag.
    pub tracing: bool,
    /// A sentence for each thing that cannot be seen: why, and which figures are unknown because of it.
    pub missing: Vec<String>,
}

/// A listener watched for a while.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Watch {
    /// Its accept model.
    pub model: AcceptModel,
    /// The first look.
    pub first: Snapshot,
    /// The last look.
    pub last: Snapshot,
    /// The looks in between.
    pub sampled: Sampled,
    /// The processes that wait for each socket: process ids by cookie.
    pub serves: BTreeMap<u64, Vec<u32>>,
    /// The process of each worker that is a thread with a socket of its own.
    #[serde(default)]
    pub threads: BTreeMap<u32, u32>,
    /// The process that only holds a socket as a last resort and does not accept from it: its id by cookie.
    #[serde(default)]
    pub keeps: BTreeMap<u64, u32>,
    /// Workers have threads beside the one that accepts, which wait for work.
    #[serde(default)]
    pub pools: bool,
    /// Why its sockets are no group; `None` if they are one, or if that could not be told.
    #[serde(default)]
    pub ungrouped: Option<Ungrouped>,
    /// SO_REUSEPORT is set; `None` where it could not be read.
    pub reuseport: Option<bool>,
    /// A program chooses the socket; `None` where that is not known.
    pub steered: Option<bool>,
    /// Whether a program, whoever set it, chooses among several sockets of UDP; `None` where that is not known.
    #[serde(default)]
    pub has_program: Option<bool>,
    /// How we keep datagrams together, where we steer: `flow`, `quic` or `none`.
    #[serde(default)]
    pub affinity: Option<String>,
    /// Flows of UDP that have more datagrams than their worker can read while others are idle, as our agent sees them.
    #[serde(default)]
    pub heavy_flows: u32,
    /// The processes that keep a listener of our group after its worker has ended, and do not accept: their ids.
    #[serde(default)]
    pub orphans: Vec<u32>,
    /// Which view.
    pub view: View,
}

/// One worker's row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Process id; that of a thread where threads have sockets of their own.
    pub pid: u32,
    /// The thread's process; `None` for a process.
    pub thread_of: Option<u32>,
    /// Process name.
    pub name: String,
    /// Connections taken; `None` without tracing.
    pub taken: Option<u64>,
    /// Its share of those, 0 to 1.
    pub share: Option<f64>,
    /// Connections open now; those of its process for a thread.
    pub active: u32,
    /// CPU used, 1 for one CPU all the time.
    pub cpu: f64,
    /// Time that it was ready and had no CPU, as `cpu`.
    pub run_delay: f64,
    /// Voluntary switches a second.
    pub switches_voluntary_per_s: f64,
    /// Threads woken for each connection of the whole listener.
    pub wakeups_per_connection: Option<f64>,
    /// accept() calls that found nothing, for each that found a connection of its own.
    pub empty_accepts: Option<u64>,
    /// Median wait in the queue of those that it took, µs.
    pub wait_us_p50: Option<f64>,
    /// 99th percentile, µs.
    pub wait_us_p99: Option<f64>,
    /// The longest, µs.
    pub wait_us_max: Option<f64>,
    /// Share of the looks in which it waited for connections, 0 to 1.
    pub waiting: f64,
    /// Seconds in which it waited while a queue that it does not serve was not empty.
    pub idle_beside_queue_s: f64,
    /// `waiting`, `busy`, `stopped`, at the last look.
    pub state: String,
}

/// One socket's queue.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Queue {
    /// Inode of the socket.
    pub inode: u64,
    /// The processes that wait for it.
    pub pids: Vec<u32>,
    /// The process that only holds it and does not accept.
    pub kept_by: Option<u32>,
    /// Connections waiting at the last look.
    pub length: u32,
    /// The longest seen.
    pub highest: u32,
    /// The backlog.
    pub limit: u32,
    /// Connections that this queue dropped meanwhile. The socket's own counter has other packets too: stray ones, and
    /// ACKs that TCP_DEFER_ACCEPT holds back (net/ipv4/tcp_ipv4.c, tcp_v4_rcv). The namespace counts connections alone.
    pub dropped: u32,
    /// Seconds in which it was not empty, all its workers were busy, and another worker waited.
    pub blocked_s: f64,
}

/// Sums over all workers and queues.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// For how long it was watched, s.
    pub seconds: f64,
    /// Connections; without tracing, those of the whole namespace.
    pub connections: u64,
    /// Connections a second.
    pub connections_per_s: f64,
    /// Threads woken a connection.
    pub wakeups_per_connection: Option<f64>,
    /// Wake-ups beyond one a connection.
    pub wasted_per_connection: Option<f64>,
    /// Wait in the queue: median, µs.
    pub wait_us_p50: Option<f64>,
    /// 99th percentile, µs.
    pub wait_us_p99: Option<f64>,
    /// The longest, µs.
    pub wait_us_max: Option<f64>,
    /// The wait so far of the oldest waiting connection, µs; `None` where none waits.
    pub oldest_wait_us: Option<f64>,
    /// Largest share over the mean one: of connections where they are known, otherwise of CPU.
    pub skew_max_over_mean: Option<f64>,
    /// Standard deviation of the shares over their mean.
    pub skew_cv: Option<f64>,
    /// CPU of all workers.
    pub cpu: f64,
    /// Dropped by these sockets.
    pub dropped: u64,
    /// Queues full, in the whole namespace.
    pub listen_overflows: u64,
    /// SYNs and SYN-ACKs sent again, in the whole namespace.
    pub syn_retransmissions: u64,
}

fn rate(difference: u64, seconds: f64) -> f64 {
    difference as f64 / seconds.max(1e-9)
}

impl Watch {
    /// For how long it was watched, s.
    pub fn seconds(&self) -> f64 {
        self.last.at_ns.saturating_sub(self.first.at_ns) as f64 / 1e9
    }

    /// A number of looks as a time, s.
    fn time_of(&self, looks: u64) -> f64 {
        self.seconds() * looks as f64 / self.sampled.looks.max(1) as f64
    }

    fn traced(&self, pid: u32) -> Option<WorkerTrace> {
        let last = self.last.trace.as_ref()?.workers.get(&pid)?;
        let first = self.first.trace.as_ref()?.workers.get(&pid);
        let first = first.cloned().unwrap_or_default();
        Some(WorkerTrace {
            accepted: last.accepted.saturating_sub(first.accepted),
            accepted_empty: last.accepted_empty.saturating_sub(first.accepted_empty),
            woken: last.woken.saturating_sub(first.woken),
            waits: last.waits.since(&first.waits),
            overlapping: last.overlapping.saturating_sub(first.overlapping),
            held: last.held.since(&first.held),
        })
    }

    /// How long the workers had the connections that they served one at a time, and how many they accepted while they
    /// had another.
    pub fn held(&self) -> (Waits, u64) {
        let mut held = (Waits::default(), 0);
        for traced in self.last.workers.keys().filter_map(|pid| self.traced(*pid)) {
            held.0.add(&traced.held);
            held.1 += traced.overlapping;
        }
        held
    }

    /// Connections of the listener that the probes saw, where they can.
    pub fn traced_connections(&self) -> Option<u64> {
        let (first, last) = (self.first.trace.as_ref()?, self.last.trace.as_ref()?);
        (!last.gaps.connections).then(|| last.connections.saturating_sub(first.connections))
    }

    /// A number of wake-ups for each of those connections, where the probes count wake-ups.
    fn for_each_connection(&self, wakeups: u64) -> Option<f64> {
        let connections = self.traced_connections().filter(|n| *n > 0)?;
        (!self.last.trace.as_ref()?.gaps.wakeups).then(|| wakeups as f64 / connections as f64)
    }

    /// Whether the probes count the connections of each worker, and how long those waited.
    fn takes_are_known(&self) -> bool {
        self.last.trace.as_ref().is_some_and(|t| !t.gaps.accepts)
    }

    /// Wake-ups for each connection, over all workers.
    fn wakeups_per_connection(&self) -> Option<f64> {
        let (first, last) = (self.first.trace.as_ref()?, self.last.trace.as_ref()?);
        self.for_each_connection(last.wakeups.saturating_sub(first.wakeups))
    }

    /// The ages of the connections that wait still.
    fn waiting(&self) -> Option<&Waits> {
        self.last.waiting.as_ref().filter(|waits| waits.count > 0)
    }

    /// The only worker of all waiting connections. It is not known which queue a connection waits in, so there must be
    /// one only.
    fn waited_for(&self) -> Option<u32> {
        let sockets = self.last.listener.sockets.iter();
        let mut filled = sockets.filter(|socket| socket.queued > 0);
        let (first, second) = (filled.next()?, filled.next());
        match (self.serves.get(&first.cookie).map(Vec::as_slice), second) {
            (Some([pid]), None) => Some(*pid),
            _ => None,
        }
    }

    /// The waits of a worker's connections, including those that still wait.
    fn waits_of(&self, pid: u32, taken: Option<&Waits>) -> Option<Waits> {
        let mut waits = taken?.clone();
        if let Some(waiting) = self.waiting().filter(|_| self.waited_for() == Some(pid)) {
            waits.add(waiting);
        }
        Some(waits)
    }

    /// A row for each worker there at the end, by process id.
    pub fn rows(&self) -> Vec<Row> {
        let seconds = self.seconds();
        let taken_by_all: u64 = self
            .last
            .workers
            .keys()
            .filter_map(|pid| self.traced(*pid))
            .map(|t| t.accepted)
            // A watch from a file may hold any numbers.
            .fold(0, u64::saturating_add);
        let accepts = !self.last.trace.as_ref().is_some_and(|t| t.gaps.accepts);
        let row = |(pid, look): (&u32, &WorkerLook)| {
            let before = self.first.workers.get(pid);
            let zero = WorkerLook::default();
            // One that started meanwhile began with nothing.
            let before = before.unwrap_or(&zero);
            let traced = self.traced(*pid);
            let looks = |map: &BTreeMap<u32, u64>| map.get(pid).copied().unwrap_or(0);
            let taken = traced.as_ref().filter(|_| accepts).map(|t| t.accepted);
            let waits = self.waits_of(*pid, traced.as_ref().map(|t| &t.waits));
            let waits = waits.as_ref();
            Row {
                pid: *pid,
                thread_of: self.threads.get(pid).copied(),
                name: look.name.clone(),
                taken,
                share: taken
                    .filter(|_| taken_by_all > 0)
                    .map(|n| n as f64 / taken_by_all as f64),
                active: look.active,
                cpu: rate(look.cpu_ns.saturating_sub(before.cpu_ns), seconds) / 1e9,
                run_delay: rate(
                    look.run_delay_ns.saturating_sub(before.run_delay_ns),
                    seconds,
                ) / 1e9,
                switches_voluntary_per_s: rate(
                    look.switches_voluntary
                        .saturating_sub(before.switches_voluntary),
                    seconds,
                ),
                wakeups_per_connection: traced
                    .as_ref()
                    .and_then(|t| self.for_each_connection(t.woken)),
                empty_accepts: taken.and(traced.as_ref()).map(|t| t.accepted_empty),
                wait_us_p50: waits.and_then(|w| w.quantile_us(0.5)),
                wait_us_p99: waits.and_then(|w| w.quantile_us(0.99)),
                wait_us_max: waits.filter(|w| w.count > 0).map(|w| w.max_us as f64),
                waiting: looks(&self.sampled.waiting) as f64 / self.sampled.looks.max(1) as f64,
                idle_beside_queue_s: self.time_of(looks(&self.sampled.idle_beside_queue)),
                state: state(look).into(),
            }
        };
        self.last.workers.iter().map(row).collect()
    }

    /// A row for each socket there at the end.
    pub fn queues(&self) -> Vec<Queue> {
        let row = |socket: &crate::listener::Socket| {
            let before = self
                .first
                .listener
                .sockets
                .iter()
                .find(|s| s.cookie == socket.cookie);
            Queue {
                inode: socket.inode,
                pids: self.serves.get(&socket.cookie).cloned().unwrap_or_default(),
                kept_by: self.keeps.get(&socket.cookie).copied(),
                length: socket.queued,
                highest: self
                    .sampled
                    .queue_highest
                    .get(&socket.cookie)
                    .copied()
                    .unwrap_or(0)
                    .max(socket.queued),
                limit: socket.queue_limit,
                dropped: self.dropped_of(socket.drops.wrapping_sub(before.map_or(0, |s| s.drops))),
                blocked_s: self.time_of(
                    self.sampled
                        .blocked_queue
                        .get(&socket.cookie)
                        .copied()
                        .unwrap_or(0),
                ),
            }
        };
        self.last.listener.sockets.iter().map(row).collect()
    }

    /// As many of a socket's drops as can have been connections, or datagrams.
    fn dropped_of(&self, drops: u32) -> u32 {
        let most = match self.last.listener.protocol {
            Protocol::Udp => u32::MAX,
            _ => u32::try_from(self.listen_drops()).unwrap_or(u32::MAX),
        };
        drops.min(most)
    }

    fn listen_drops(&self) -> u64 {
        let (first, last) = (&self.first.host, &self.last.host);
        last.listen_drops.saturating_sub(first.listen_drops)
    }

    /// Largest share over the mean one and what of, where there was enough to share that it says something.
    pub fn unevenness(&self) -> Option<(f64, &'static str)> {
        /// So much CPU of all workers together is more than their housekeeping.
        const ENOUGH_CPU: f64 = 0.05;
        let totals = self.totals();
        let rows = self.rows();
        let mut taken = rows.iter().map(|row| row.taken);
        // A watch from a file may hold any numbers.
        let taken = taken.try_fold(0_u64, |sum, taken| Some(sum.saturating_add(taken?)));
        let (enough, of) = match taken {
            Some(taken) => (taken > rows.len() as u64, "connections"),
            None => (totals.cpu >= ENOUGH_CPU, "CPU"),
        };
        totals
            .skew_max_over_mean
            .filter(|_| enough)
            .map(|skew| (skew, of))
    }

    /// The sums.
    pub fn totals(&self) -> Totals {
        let seconds = self.seconds();
        let rows = self.rows();
        let host =
            |of: fn(&HostLook) -> u64| of(&self.last.host).saturating_sub(of(&self.first.host));
        let traced = self.traced_connections();
        let connections = traced.unwrap_or_else(|| match self.last.listener.protocol {
            // The kernel does not count those.
            Protocol::Unix => 0,
            _ => host(|h| h.passive_opens),
        });
        let per_connection = self.wakeups_per_connection();
        let mut waits = Waits::default();
        for traced in self.last.workers.keys().filter_map(|pid| self.traced(*pid)) {
            waits.add(&traced.waits);
        }
        // Without the connections that still wait, the longest waits would be missing.
        if let Some(waiting) = self.waiting().filter(|_| self.takes_are_known()) {
            waits.add(waiting);
        }
        let taken: Option<Vec<f64>> = rows.iter().map(|r| r.taken.map(|n| n as f64)).collect();
        let busy: Vec<f64> = rows.iter().map(|r| r.cpu).collect();
        let shares = taken
            .filter(|t| t.iter().sum::<f64>() > 0.0)
            .unwrap_or(busy);
        let (skew_max_over_mean, skew_cv) = skew(&shares);
        let dropped: u64 = self.queues().iter().map(|q| u64::from(q.dropped)).sum();
        let dropped = match self.last.listener.protocol {
            Protocol::Udp => dropped,
            _ => dropped.min(self.listen_drops()),
        };
        Totals {
            seconds,
            connections,
            connections_per_s: rate(connections, seconds),
            wakeups_per_connection: per_connection,
            wasted_per_connection: per_connection.map(|n| (n - 1.0).max(0.0)),
            wait_us_p50: waits.quantile_us(0.5),
            wait_us_p99: waits.quantile_us(0.99),
            wait_us_max: (waits.count > 0).then_some(waits.max_us as f64),
            oldest_wait_us: self.waiting().map(|waits| waits.max_us as f64),
            skew_max_over_mean,
            skew_cv,
            cpu: rows.iter().map(|r| r.cpu).sum(),
            dropped,
            listen_overflows: host(|h| h.listen_overflows),
            syn_retransmissions: host(|h| h.syn_retransmissions),
        }
    }
}

fn state(look: &WorkerLook) -> &'static str {
    match (look.state, look.waiting) {
        ('T' | 't', _) => "stopped",
        ('Z' | 'X', _) => "gone",
        (_, true) => "waiting",
        _ => "busy",
    }
}

/// Largest over mean, and standard deviation over mean, of two or more shares that are not all zero.
fn skew(shares: &[f64]) -> (Option<f64>, Option<f64>) {
    let n = shares.len() as f64;
    let mean = shares.iter().sum::<f64>() / n;
    if shares.len() < 2 || mean <= 0.0 {
        return (None, None);
    }
    let variance = shares.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / n;
    let largest = shares.iter().copied().fold(0.0, f64::max);
    (Some(largest / mean), Some(variance.sqrt() / mean))
}
