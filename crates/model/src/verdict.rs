//! Finds what is wrong with a server, from a while of watching it: each finding with its cause, its numbers, and what
//! to do.
//!
//! The thresholds are of the kind that a healthy server under load stays clear of. Too little data is not judged.

use serde::{Deserialize, Serialize};

use crate::accept::{Means, Shape};
use crate::advice;
use crate::layout::{connections, count, counted};
use crate::listener::{Protocol, Ungrouped};
use crate::snapshot::{Queue, Row, Snapshot, Totals, Watch, WorkerLook};

/// Something to act on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// A stable name, for programs.
    pub code: String,
    /// The problem, in a few words.
    pub title: String,
    /// Why it is so.
    pub cause: String,
    /// The numbers that show it.
    pub evidence: Vec<String>,
    /// Steps to take, the best first.
    pub next: Vec<String>,
}

/// Fewer connections than this say nothing about their spread.
const ENOUGH_CONNECTIONS: u64 = 50;
/// Less CPU than this, of all workers together, says nothing about its spread.
const ENOUGH_CPU: f64 = 0.05;
/// The largest share over the mean one, from which on a spread is called uneven. Two workers reach 2 at most.
const UNEVEN: f64 = 1.5;
/// Share of the time that the busiest worker must be busy for its share to be a load: below, nobody waits for it.
const LOADED: f64 = 0.2;
/// Wake-ups a connection from which on it is a herd.
const HERD: f64 = 1.8;
/// Share of the time for which a queue may wait behind a busy worker while another is idle.
const BLOCKED_SHARE: f64 = 0.02;
/// That long at the least, s.
const BLOCKED_S: f64 = 0.1;
/// A queue whose connections all waited less than this was not blocked, however often it was seen filled, µs.
const BLOCKED_WAIT_US: f64 = 20_000.0;
/// A wait in the queue that a client notices, µs. It is the 99th percentile, where it is no moment's burst.
const LONG_WAIT_US: f64 = 100_000.0;
/// Fewer connections than this have no typical wait.
const SOME_CONNECTIONS: u64 = 5;
/// A connection that waits still has been forgotten from this age on, µs.
const FORGOTTEN_US: f64 = 1_000_000.0;
/// Part of the time from which on a worker counts as one that always waits for connections.
const IDLE: f64 = 0.9;
/// Part of their busy time that workers wait for a CPU, from which on the machine is slow.
const WITHOUT_CPU: f64 = 0.5;
/// CPU, with the time that it waits for one, from which on a worker does not sleep.
const SPIN_CPU: f64 = 0.9;
/// accept() calls a second that found nothing, from which on they are what the worker does.
const SPIN_CALLS: f64 = 1000.0;
/// Part of its CPU time in the kernel, from which on a worker makes calls, and does not only compute.
const SPIN_IN_KERNEL: f64 = 0.15;
/// Share of the backlog from which on the next burst overflows it.
const NEARLY_FULL: f64 = 0.8;
/// Share of the descriptors from which on they run out soon.
const DESCRIPTORS: f64 = 0.8;

/// The input of all rules.
struct Case<'a> {
    watch: &'a Watch,
    rows: Vec<Row>,
    queues: Vec<Queue>,
    totals: Totals,
    address: String,
    name: String,
}

/// Returns all problems of the watched server; none: healthy.
pub fn judge(watch: &Watch) -> Vec<Finding> {
    let case = Case {
        watch,
        rows: watch.rows(),
        queues: watch.queues(),
        totals: watch.totals(),
        address: watch.last.listener.address.to_string(),
        name: watch
            .last
            .workers
            .values()
            .next()
            .map_or_else(String::new, |w| w.name.clone()),
    };
    let rules: [fn(&Case<'_>) -> Option<Finding>; 19] = [
        stopped,
        blocking,
        spins,
        stuck,
        unserved,
        blocked,
        overflow,
        datagrams_dropped,
        nearly_full,
        reset,
        herd,
        lifo,
        group_of_one,
        ungrouped,
        mptcp,
        pinned,
        descriptors,
        heavy_flow,
        orphan,
    ];
    let mut found: Vec<Finding> = rules.iter().filter_map(|rule| rule(&case)).collect();
    // Whatever the workers seem to do: where connections wait long, something is wrong.
    if found.is_empty() {
        found.extend(long_waits(&case));
    }
    if !found.iter().any(|one| WAITS.contains(&one.code.as_str())) {
        found.extend(waits_inside(&case));
    }
    found
}

/// Findings that tell why requests wait, before accept() and after it.
const WAITS: [&str; 8] = [
    "stopped-worker",
    "blocking-listener",
    "stuck-worker",
    "nobody-accepts",
    "blind-hash",
    "cpu-missing",
    "long-waits",
    "workers-busy",
];

fn finding(code: &str, title: impl Into<String>, cause: impl Into<String>) -> Finding {
    Finding {
        code: code.into(),
        title: title.into(),
        cause: cause.into(),
        evidence: Vec::new(),
        next: Vec::new(),
    }
}

impl Finding {
    fn shown(mut self, evidence: impl Into<String>) -> Self {
        self.evidence.push(evidence.into());
        self
    }

    fn then(mut self, next: impl Into<String>) -> Self {
        self.next.push(next.into());
        self
    }
}

impl Case<'_> {
    fn serving(&self, pid: u32) -> bool {
        self.watch.model.workers.contains(&pid)
    }

    fn looks(&self) -> u64 {
        self.watch.sampled.looks
    }

    /// Whether each worker, process or thread, has a socket.
    fn has_own_sockets(&self) -> bool {
        matches!(
            self.watch.model.shape,
            Shape::SocketPerWorker | Shape::SocketPerThread
        )
    }

    /// Names a worker in a sentence.
    fn worker(&self, pid: u32) -> String {
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

    fn is_udp(&self) -> bool {
        self.watch.last.listener.protocol == Protocol::Udp
    }

    /// The name of one that comes to its sockets.
    fn thing(&self) -> &'static str {
        match self.is_udp() {
            true => "datagram",
            false => "connection",
        }
    }

    /// How much waits in a queue, as a clause: of UDP that is known in bytes.
    fn that_wait(&self, length: u32) -> String {
        match (self.is_udp(), length) {
            (true, bytes) => format!("{bytes} bytes of datagrams wait"),
            (false, 1) => "1 connection waits".into(),
            (false, length) => format!("{} wait", connections(length.into())),
        }
    }

    /// The next command for sockets of UDP.
    fn steer_datagrams(&self) -> String {
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

    fn steer(&self) -> String {
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

    fn is_unix(&self) -> bool {
        self.watch.last.listener.protocol == Protocol::Unix
    }

    /// Returns how each worker gets a socket of its own; for a UNIX socket the way to share it.
    fn own_sockets(&self) -> String {
        match self.is_unix() {
            true => advice::EPOLL.into(),
            false => advice::own_sockets(&self.name, &self.address),
        }
    }

    /// The next command where workers wait for one listener in epoll.
    fn one_queue(&self) -> Option<String> {
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

    /// For how long a queue waited behind workers that were busy with something, and did not just lack a CPU, s.
    fn blocked_s(&self, queue: &Queue) -> f64 {
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
    fn oldest(&self) -> String {
        let oldest = self.totals.oldest_wait_us;
        oldest.map_or_else(String::new, |us| format!("; the oldest waits {}", time(us)))
    }

    /// The workers of a queue that are stopped or hang: it is long because of them.
    fn hangs(&self, queue: &Queue) -> bool {
        let stopped = stopped_pids(self);
        let stuck: Vec<u32> = stuck_rows(self).iter().map(|r| r.pid).collect();
        !queue.pids.is_empty()
            && queue
                .pids
                .iter()
                .all(|pid| stopped.contains(pid) || stuck.contains(pid))
    }

    fn shared(&self) -> bool {
        matches!(
            self.watch.model.shape,
            Shape::Shared | Shape::SharedByThreads
        )
    }
}

/// In how many looks the queue was not empty.
fn filled(case: &Case<'_>, queue: &Queue) -> u64 {
    let sockets = &case.watch.last.listener.sockets;
    let socket = sockets.iter().find(|s| s.inode == queue.inode);
    let looks = socket.and_then(|s| case.watch.sampled.queue_filled.get(&s.cookie));
    looks.copied().unwrap_or(0)
}

/// Whether the queue was filled all the time, but for a few looks.
fn is_always_filled(case: &Case<'_>, queue: &Queue) -> bool {
    filled(case, queue) * 10 > case.looks() * 9
}

fn list(pids: &[u32]) -> String {
    let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
    pids.join(", ")
}

fn stopped_pids(case: &Case<'_>) -> Vec<u32> {
    let stopped = case.watch.sampled.stopped.iter();
    stopped
        .filter(|(pid, looks)| case.serving(**pid) && **looks * 2 > case.looks())
        .map(|(pid, _)| *pid)
        .collect()
}

fn stopped(case: &Case<'_>) -> Option<Finding> {
    let pids = stopped_pids(case);
    (!pids.is_empty()).then(|| {
        let queued: u32 = case
            .queues
            .iter()
            .filter(|q| q.pids.iter().any(|pid| pids.contains(pid)))
            .map(|q| q.length)
            .sum();
        finding(
            "stopped-worker",
            "A worker is stopped",
            "a signal (SIGSTOP, SIGTSTP) or a debugger keeps it from running",
        )
        .shown(format!(
            "{} {} stopped for more than half of {:.1} s; {} in {} queue{}",
            if pids.len() == 1 {
                "process"
            } else {
                "processes"
            },
            list(&pids) + if pids.len() == 1 { " was" } else { " were" },
            case.totals.seconds,
            case.that_wait(queued),
            if pids.len() == 1 { "its" } else { "their" },
            case.oldest()
        ))
        .then(format!("`kill -CONT {}`, or end it", pids[0]))
        .then(case.steer())
    })
}

/// Workers that took nothing all the time, although connections waited for them, and that are not stopped.
fn stuck_rows<'a>(case: &'a Case<'_>) -> Vec<&'a Row> {
    let is_stuck = |row: &&Row| {
        let mut own = case.queues.iter().filter(|q| q.pids == [row.pid]);
        let waited = own.any(|q| is_always_filled(case, q));
        // Without tracing only a worker that slept all the time is known to have taken nothing.
        let idle = row.taken.map_or_else(
            || row.switches_voluntary_per_s < 0.5 && row.cpu < 0.5,
            |taken| taken == 0,
        );
        waited && row.waiting < 0.01 && idle && row.state == "busy"
    };
    if case.totals.seconds < 1.0 {
        return Vec::new();
    }
    case.rows.iter().filter(is_stuck).collect()
}

fn does_not_serve(case: &Case<'_>) -> &'static str {
    match case.is_udp() {
        true => "A worker does not receive",
        false => "A worker does not accept",
    }
}

fn stuck(case: &Case<'_>) -> Option<Finding> {
    let stuck = stuck_rows(case);
    (!stuck.is_empty()).then(|| {
        let pids: Vec<u32> = stuck.iter().map(|r| r.pid).collect();
        let oldest = case.oldest();
        let mut found = finding(
            "stuck-worker",
            does_not_serve(case),
            "it is busy with one request, waits for something else, or hangs",
        );
        for row in &stuck {
            let queued: u32 = case
                .queues
                .iter()
                .filter(|q| q.pids == [row.pid])
                .map(|q| q.length)
                .sum();
            found = found.shown(format!(
                "{} took no {} in {:.1} s and was never seen waiting for one (CPU {:.0} %); {} for it{oldest}",
                case.worker(row.pid), case.thing(), case.totals.seconds, row.cpu * 100.0, case.that_wait(queued)
            ));
        }
        found
            .then(format!("look where it is: `cat /proc/{}/stack`, `gdb -p {}`", pids[0], pids[0]))
            .then(case.steer())
    })
}

/// Queues from which nothing is taken, and for which nobody was seen to wait.
fn unserved(case: &Case<'_>) -> Option<Finding> {
    let seconds = case.totals.seconds;
    // The oldest connection has waited all the time. The kernel does not tell that of a UNIX socket.
    let untouched = |queue: &Queue| match case.totals.oldest_wait_us {
        Some(us) => us >= seconds * 0.9e6,
        None => case.is_unix() && queue.length == queue.highest,
    };
    let is_unserved = |queue: &&Queue| {
        queue.pids.is_empty()
            && queue.length > 0
            && is_always_filled(case, queue)
            && untouched(queue)
    };
    let unserved: Vec<&Queue> = case.queues.iter().filter(is_unserved).collect();
    if unserved.is_empty() || seconds < 1.0 {
        return None;
    }
    let others_are_served = case.queues.iter().any(|queue| !queue.pids.is_empty());
    let mut found = match others_are_served {
        true => finding(
            "stuck-worker",
            does_not_serve(case),
            "nobody was seen to wait for one of the sockets: its worker hangs since before, or has ended",
        ),
        false => finding(
            "nobody-accepts",
            "Nobody accepts",
            "a process holds the listener, and none was seen to wait for it: its workers hang, or have ended and left it to one that inherited it",
        ),
    };
    for queue in unserved {
        found = found.shown(format!(
            "socket {}: {} in {seconds:.1} s, and none was taken{}",
            queue.inode,
            case.that_wait(queue.length),
            case.oldest()
        ));
    }
    let sockets = match (case.is_unix(), case.watch.last.listener.address.port()) {
        (false, Some(port)) if case.is_udp() => format!("`ss -lunp 'sport = :{port}'`"),
        (false, Some(port)) => format!("`ss -ltnp 'sport = :{port}'`"),
        _ => "`ss -xlp`".into(),
    };
    found = found.then(format!(
        "{sockets} shows who holds it; end the one that does not serve"
    ));
    Some(match others_are_served {
        true => found.then(case.steer()),
        false => found.then("restart the server"),
    })
}

/// Workers that hang in accept, in the middle of their event loop.
fn blocking(case: &Case<'_>) -> Option<Finding> {
    let sampled = &case.watch.sampled;
    let hangs = |row: &&Row| {
        let sights = sampled.accepts_in_loop.get(&row.pid).copied().unwrap_or(0);
        // Apache's workers wait like that for the next connection, and have none that could wait for them.
        row.active > 0 && sights > 1 && sights * 2 > sampled.sights
    };
    let hanging: Vec<&Row> = case.rows.iter().filter(hangs).collect();
    let first = hanging.first()?;
    let mut found = finding(
        "blocking-listener",
        "An event loop waits in accept, on a blocking listener",
        "it accepts until no connection is left, or another worker took the one that it was woken for: without O_NONBLOCK accept then waits for the next one, and those that it has are not answered meanwhile",
    );
    for row in &hanging {
        found = found.shown(format!(
            "process {} was in accept on a listener that it waits for by epoll, poll or select as well, in {} of {} looks; it has {} open",
            row.pid,
            sampled.accepts_in_loop[&row.pid],
            sampled.sights,
            connections(row.active.into())
        ));
    }
    Some(
        found
            .then("start it with `wakeone run --nonblocking`, or systemd's `NonBlocking=yes`")
            .then("have the server set it: tokio `set_nonblocking(true)`, C `fcntl(fd, F_SETFL, O_NONBLOCK)`")
            .then(format!("`cat /proc/{}/syscall` shows the call", first.pid)),
    )
}

/// Workers that use a whole CPU for calls that find nothing.
fn spins(case: &Case<'_>) -> Option<Finding> {
    let seconds = case.totals.seconds;
    let part_in_kernel = |row: &Row| {
        let of = |looks: &Snapshot| looks.workers.get(&row.pid).map_or(0, |w| w.system_ns);
        let since = of(&case.watch.last).saturating_sub(of(&case.watch.first));
        since as f64 / 1e9 / (row.cpu * seconds).max(1e-9)
    };
    let calls_per_s = |row: &Row| {
        row.empty_accepts
            .map(|calls| calls as f64 / seconds.max(1e-9))
    };
    let is_spinning = |row: &&Row| {
        let own = || {
            case.queues
                .iter()
                .filter(|queue| queue.pids.contains(&row.pid))
        };
        let in_vain = match calls_per_s(row) {
            Some(calls) if calls >= SPIN_CALLS => true,
            // A worker that computes for a request holds that connection open.
            _ => row.active == 0 && part_in_kernel(row) >= SPIN_IN_KERNEL,
        };
        row.cpu + row.run_delay >= SPIN_CPU
            && row.taken.unwrap_or(0) == 0
            && own().all(|queue| queue.highest == 0)
            && in_vain
    };
    if seconds < 1.0 {
        return None;
    }
    let spinning: Vec<&Row> = case.rows.iter().filter(is_spinning).collect();
    let first = spinning.first()?;
    let mut found = finding(
        "accept-spin",
        "A worker uses a whole CPU and accepts nothing",
        "its event loop takes the listener for ready again and again, and finds no connection: tokio, say, does not forget EPOLLHUP",
    );
    for row in &spinning {
        let calls = calls_per_s(row).map_or_else(String::new, |calls| {
            format!(", {calls:.0} accept() calls a second found nothing")
        });
        found = found.shown(format!(
            "process {}: CPU {:.0} %, {:.0} % of that in the kernel, no connection waited for it, none taken{calls}",
            row.pid,
            row.cpu * 100.0,
            part_in_kernel(row) * 100.0
        ));
    }
    Some(
        found
            .then(format!(
                "restart that worker: `kill {}`, if its supervisor starts another",
                first.pid
            ))
            .then(format!(
                "`timeout 1 strace -f -c -p {}` shows the calls",
                first.pid
            )),
    )
}

/// Connections behind a busy worker while another has nothing to do: the blind hash.
fn blocked(case: &Case<'_>) -> Option<Finding> {
    if !case.has_own_sockets() {
        return None;
    }
    let seconds = case.totals.seconds;
    let (worst, blocked_s) = case
        .queues
        .iter()
        // Behind a stopped or hanging worker they would wait whatever chose the queue: that was reported.
        .filter(|queue| !case.hangs(queue))
        .map(|queue| (queue, case.blocked_s(queue)))
        .max_by(|a, b| a.1.total_cmp(&b.1))?;
    if blocked_s < BLOCKED_S || blocked_s < seconds * BLOCKED_SHARE {
        return None;
    }
    let cause = if case.watch.steered == Some(true) {
        "a program chooses the socket, and still they wait behind a busy worker"
    } else {
        "the kernel chooses a socket by a hash of the addresses, whatever its worker is doing"
    };
    let workers: Vec<String> = worst.pids.iter().map(|pid| case.worker(*pid)).collect();
    let idle: f64 = case.rows.iter().map(|r| r.idle_beside_queue_s).sum();
    let title = match case.is_udp() {
        true => "Datagrams wait behind a busy worker while others are idle",
        false => "Connections wait behind a busy worker while others are idle",
    };
    let mut found = finding("blind-hash", title, cause)
    .shown(format!(
        "the queue of {} was not empty for {:.2} s of {seconds:.1} s while its worker was busy and another waited; longest queue {}",
        workers.join(", "), blocked_s, worst.highest
    ))
    .shown(format!("workers did nothing beside a filled queue for {idle:.2} s in all"));
    if let (Some(p50), Some(p99)) = (case.totals.wait_us_p50, case.totals.wait_us_p99) {
        found = found.shown(format!(
            "wait in the queue: median {}, 99 % within {}{}",
            time(p50),
            time(p99),
            case.oldest()
        ));
    }
    Some(found.then(case.steer()))
}

/// How long connections wait, if that is too long.
fn waits(case: &Case<'_>) -> Option<String> {
    let Totals {
        connections,
        wait_us_p50,
        wait_us_p99,
        oldest_wait_us,
        ..
    } = case.totals;
    let is_long = |us: Option<f64>, least| us.is_some_and(|us| us >= least);
    let few = connections >= SOME_CONNECTIONS && is_long(wait_us_p50, LONG_WAIT_US);
    let many = connections >= ENOUGH_CONNECTIONS && is_long(wait_us_p99, LONG_WAIT_US);
    if !few && !many && !is_long(oldest_wait_us, FORGOTTEN_US) {
        return None;
    }
    Some(match (wait_us_p50, wait_us_p99) {
        (Some(p50), Some(p99)) => format!(
            "wait in the queue: median {}, 99 % within {}{}",
            time(p50),
            time(p99),
            case.oldest()
        ),
        _ => format!("a connection waits for {} already", time(oldest_wait_us?)),
    })
}

/// Connections wait long. Judged where nothing else tells why.
fn long_waits(case: &Case<'_>) -> Option<Finding> {
    let waits = waits(case)?;
    let filled = case.queues.iter().map(|queue| filled(case, queue)).max();
    let share = filled.unwrap_or(0) as f64 / case.looks().max(1) as f64;
    let longest = case.queues.iter().map(|q| q.highest).max().unwrap_or(0);
    let queued = format!(
        "connections waited for {:.0} % of the time, {longest} of them at most",
        share * 100.0
    );
    let busy: f64 = case.rows.iter().map(|r| 1.0 - r.waiting).sum();
    let without_cpu: f64 = case.rows.iter().map(|r| r.run_delay).sum();
    let found = if without_cpu > busy * WITHOUT_CPU {
        finding(
            "cpu-missing",
            "Connections wait until their worker gets a CPU",
            "the workers are ready to run, and wait for a CPU most of that time",
        )
        .shown(format!(
            "the workers waited for a CPU {without_cpu:.2} s a second, all together"
        ))
        .then("`top` shows who uses the CPUs")
    } else if case.rows.iter().all(|row| row.waiting > IDLE) {
        finding(
            "long-waits",
            "Connections wait, and what the workers do does not tell why",
            "most of the time each worker was seen to wait for connections, and still they wait",
        )
        .then("`cat /proc/PID/task/*/syscall` shows what the threads of a worker are in meanwhile")
        .then("watch for longer: `--for 60s`")
    } else {
        finding(
            "workers-busy",
            "Connections wait until a worker is free",
            "at times each worker is busy with a request, and none is left to accept",
        )
        .then("start more workers, or find the requests that take long")
        .then("threads or an event loop let a worker serve others while one request takes long")
    };
    Some(found.shown(waits).shown(queued))
}

/// Requests wait long in connections that were accepted. The queue does not show them: an event loop accepts all that wait
/// whenever it gets round to it, and reads each when it is done with others.
fn waits_inside(case: &Case<'_>) -> Option<Finding> {
    let unread = &case.watch.sampled.unread;
    let long: u64 = unread
        .times_us()
        .filter(|(us, _)| *us >= LONG_WAIT_US)
        .map(|(_, count)| u64::from(count))
        .sum();
    // Of many connections, one in a hundred, as of those that wait before accept().
    if long < SOME_CONNECTIONS || long * 100 < case.totals.connections {
        return None;
    }
    let mut found = finding(
        "waits-inside",
        "Requests wait in workers that have accepted their connections",
        "a worker accepts at once, and reads a request when it is done with those before it",
    )
    .shown(format!(
        "{} not read for {} or longer, the longest for {}",
        count(long, "request was", "requests were"),
        time(LONG_WAIT_US),
        time(unread.max_us as f64),
    ))
    .then("start more workers, or find the requests that take long");
    if let Some(attach) = case.one_queue() {
        found = found.then(attach);
    }
    Some(found.then(
        "where the server can limit how many connections a worker takes, the others go to workers that are free",
    ))
}

fn overflow(case: &Case<'_>) -> Option<Finding> {
    // A listener's drops count stray packets as well: the queue was full only where the namespace counted that.
    if case.totals.dropped == 0 || case.totals.listen_overflows == 0 || case.is_udp() {
        return None;
    }
    let worst = case.queues.iter().max_by_key(|q| q.dropped)?;
    Some(
        finding(
            "accept-queue-overflow",
            "The accept queue overflows",
            "a full queue drops SYNs and the last step of handshakes; clients try again after 1 s, 2 s, 4 s …",
        )
        .shown(format!(
            "{} dropped in {:.1} s; the queue reached {} of {}",
            case.totals.dropped, case.totals.seconds, worst.highest, worst.limit
        ))
        .shown(format!(
            "in the whole network namespace: {} overflows, {} SYNs or SYN-ACKs sent again",
            case.totals.listen_overflows, case.totals.syn_retransmissions
        ))
        .shown(cut(case, worst))
        .then(longer(case, worst))
        .then("if it stays full, the workers are too slow or too few: `wakeone top` shows which"),
    )
}

/// Datagrams that a full receive buffer dropped.
fn datagrams_dropped(case: &Case<'_>) -> Option<Finding> {
    if case.totals.dropped == 0 || !case.is_udp() {
        return None;
    }
    let worst = case.queues.iter().max_by_key(|q| q.dropped)?;
    let served_by: Vec<String> = worst.pids.iter().map(|pid| case.worker(*pid)).collect();
    let of = match served_by.is_empty() {
        true => format!("socket {}", worst.inode),
        false => format!("the socket of {}", served_by.join(", ")),
    };
    Some(
        finding(
            "receive-buffer-overflow",
            "The receive buffer overflows",
            "a full receive buffer drops datagrams, and tells nobody",
        )
        .shown(format!(
            "{} dropped in {:.1} s, {} of them by {of}, whose buffer reached {} of {} bytes",
            case.totals.dropped, case.totals.seconds, worst.dropped, worst.highest, worst.limit
        ))
        .then("for bursts, a larger buffer: SO_RCVBUF, up to `sysctl net.core.rmem_max`")
        .then("if it stays full, its worker is too slow, or gets more than the others")
        .then(case.steer_datagrams()),
    )
}

fn nearly_full(case: &Case<'_>) -> Option<Finding> {
    if overflow(case).is_some() || case.is_udp() {
        return None;
    }
    // The kernel admits one more than the limit.
    let fill = |q: &Queue| f64::from(q.highest) / (f64::from(q.limit) + 1.0);
    let worst = case
        .queues
        .iter()
        .filter(|q| !case.hangs(q))
        .max_by(|a, b| fill(a).total_cmp(&fill(b)))?;
    (worst.highest > 0 && fill(worst) >= NEARLY_FULL).then(|| {
        finding(
            "backlog-too-small",
            "The backlog is too small for the bursts that come",
            "connections come faster, for a moment, than they are accepted",
        )
        .shown(format!(
            "the queue reached {} of {} in {:.1} s",
            worst.highest, worst.limit, case.totals.seconds
        ))
        .shown(cut(case, worst))
        .then(longer(case, worst))
    })
}

/// Which of the two limits it is.
fn cut(case: &Case<'_>, queue: &Queue) -> String {
    let most = case.watch.last.host.somaxconn;
    if queue.limit >= most {
        format!("net.core.somaxconn is {most}: it cut what the program asked for, or is just that")
    } else {
        format!(
            "the program asked listen() for {}; net.core.somaxconn would allow {most}",
            queue.limit
        )
    }
}

fn longer(case: &Case<'_>, queue: &Queue) -> String {
    let most = case.watch.last.host.somaxconn;
    if queue.limit >= most {
        format!(
            "`sysctl net.core.somaxconn={}`, then restart or reload the server so that it calls listen() again",
            (most * 8).max(4096)
        )
    } else {
        format!("give the server's `backlog` setting {most} or more, and restart it")
    }
}

/// A listener that went away with connections in its queue: they were reset.
fn reset(case: &Case<'_>) -> Option<Finding> {
    let gone = &case.watch.sampled.gone;
    let waited: u64 = gone.values().map(|n| u64::from(*n)).sum();
    let since = |of: fn(&crate::snapshot::HostLook) -> u64| {
        of(&case.watch.last.host).saturating_sub(of(&case.watch.first.host))
    };
    if case.is_unix() {
        // The kernel does not count those.
        return None;
    }
    // A server that accepts what waits before it closes loses nothing, and what the kernel moves is not lost either.
    let (resets, moved) = (since(|h| h.resets_sent), since(|h| h.migrated));
    let lost = waited.saturating_sub(moved).min(resets);
    (lost > 0).then(|| {
        finding(
            "reload-resets-queue",
            "A reload or restart reset connections that waited",
            "when a listening socket closes, the kernel resets what waits in its queue, unless it may move it to another of the group",
        )
        .shown(format!(
            "{} of the listener's sockets went away within {:.1} s; {} waited in them when last seen",
            gone.len(),
            case.totals.seconds,
            connections(waited)
        ))
        .shown(format!(
            "in the whole network namespace: {} sent, {} moved to another socket",
            count(resets, "reset", "resets"),
            connections(moved)
        ))
        .then("`sysctl net.ipv4.tcp_migrate_req=1` has the kernel move them by hash")
        .then(format!(
            "`wakeone attach {}` moves them to the least loaded worker",
            case.watch.last.listener.address.target()
        ))
    })
}

fn herd(case: &Case<'_>) -> Option<Finding> {
    let woken = case.totals.wakeups_per_connection?;
    if case.totals.connections < ENOUGH_CONNECTIONS || woken < HERD || case.rows.len() < 2 {
        return None;
    }
    let (code, cause) = match case.watch.model.means {
        Means::EpollWakeAll | Means::EpollEdge => (
            "epoll-exclusive-missing",
            "the listener is in every worker's epoll set without EPOLLEXCLUSIVE: each connection wakes all that wait",
        ),
        Means::Poll => (
            "thundering-herd",
            "every worker polls the same listener: each connection wakes all that wait",
        ),
        _ => (
            "thundering-herd",
            "several workers are woken for each connection",
        ),
    };
    let empty: Option<u64> = case.rows.iter().map(|r| r.empty_accepts).sum();
    let mut herd = finding(code, "Workers are woken for nothing", cause).shown(format!(
        "{woken:.2} wake-ups a connection among {} workers, over {}",
        case.rows.len(),
        connections(case.totals.connections)
    ));
    if let Some(empty) = empty {
        let calls = count(empty, "accept() call", "accept() calls");
        herd = herd.shown(format!("{calls} found nothing"));
    }
    if let Some(attach) = case.one_queue() {
        herd = herd.then(attach);
    }
    Some(
        herd.then(advice::wake_one(&case.name))
            .then(case.own_sockets()),
    )
}

fn lifo(case: &Case<'_>) -> Option<Finding> {
    let epoll = matches!(
        case.watch.model.means,
        Means::EpollExclusive | Means::EpollEdge | Means::EpollWakeAll
    );
    if !case.shared() || !epoll {
        return None;
    }
    uneven(case).map(|evidence| {
        finding(
            "lifo-imbalance",
            "One worker gets most of the load",
            "epoll wakes waiting workers always in one order: the same worker is the next one again and again",
        )
        .shown(evidence)
        .then(case.one_queue().unwrap_or_else(|| case.own_sockets()))
    })
}

/// How uneven the load is, by what came meanwhile or by the connections that are open, where there is enough of it to say
/// so.
fn uneven(case: &Case<'_>) -> Option<String> {
    uneven_load(case).or_else(|| uneven_open(case))
}

/// The largest share over the mean one, from which on so many workers are loaded unevenly. Of two workers one can have
/// twice the mean at most: all of it.
fn uneven_from(workers: usize) -> f64 {
    UNEVEN.min(1.0 + 0.4 * (workers as f64 - 1.0))
}

/// How uneven the open connections are. Kept ones stay where they are, and no new one need come.
fn uneven_open(case: &Case<'_>) -> Option<String> {
    let open: u64 = case.rows.iter().map(|r| u64::from(r.active)).sum();
    let busiest = case.rows.iter().max_by_key(|r| r.active)?;
    let skew = f64::from(busiest.active) * case.rows.len() as f64 / open.max(1) as f64;
    let busy = 1.0 - busiest.waiting;
    if open < ENOUGH_CONNECTIONS
        || !case.watch.threads.is_empty()
        || skew < uneven_from(case.rows.len())
        || busy < LOADED
    {
        return None;
    }
    Some(format!(
        "process {} has {} of {open} open connections, {skew:.2} times the mean of {} workers; it was busy {:.0} % of the time",
        busiest.pid,
        busiest.active,
        case.rows.len(),
        busy * 100.0
    ))
}

fn uneven_load(case: &Case<'_>) -> Option<String> {
    let skew = case.totals.skew_max_over_mean?;
    let by_connections = case.rows.iter().all(|r| r.taken.is_some());
    let enough = if by_connections {
        case.totals.connections >= ENOUGH_CONNECTIONS
    } else {
        case.totals.cpu >= ENOUGH_CPU
    };
    let uneven = uneven_from(case.rows.len());
    let busiest = case.rows.iter().max_by(|a, b| {
        let of = |r: &Row| (r.taken.unwrap_or(0), r.cpu);
        of(a)
            .partial_cmp(&of(b))
            .unwrap_or(std::cmp::Ordering::Equal)
    })?;
    let busy = 1.0 - busiest.waiting;
    if !enough || skew < uneven || busy < LOADED {
        return None;
    }
    let what = if by_connections { "connections" } else { "CPU" };
    let mut shares: Vec<f64> = case
        .rows
        .iter()
        .map(|r| {
            if by_connections {
                r.share.unwrap_or(0.0)
            } else {
                r.cpu / case.totals.cpu
            }
        })
        .collect();
    shares.sort_by(|a, b| b.total_cmp(a));
    let shown: Vec<String> = shares
        .iter()
        .take(8)
        .map(|s| format!("{:.0} %", s * 100.0))
        .collect();
    Some(format!(
        "the busiest of {} workers has {skew:.2} times the mean of the {what}: {}{}; it was busy {:.0} % of the time",
        case.rows.len(),
        shown.join(", "),
        if shares.len() > 8 { ", …" } else { "" },
        busy * 100.0
    ))
}

fn group_of_one(case: &Case<'_>) -> Option<Finding> {
    let one = case.watch.last.listener.sockets.len() == 1 && case.watch.reuseport == Some(true);
    // A server may set the option for its own restarts: it is a finding where the load is uneven, or where one process, be it
    // of many threads, does not keep up.
    let evidence = match case.rows.len() {
        1 => waits(case),
        _ if case.shared() => uneven(case),
        _ => None,
    };
    let evidence = evidence.filter(|_| one)?;
    Some(
        finding(
            "group-of-one",
            "SO_REUSEPORT is set, but there is one socket only",
            "the option spreads connections over sockets: each worker must open its own",
        )
        .shown(format!(
            "1 socket, {}",
            counted(case.rows.len() as u64, "workers")
        ))
        .shown(evidence)
        .then(case.own_sockets()),
    )
}

/// Sockets of UDP that have an address in common and are no group.
fn ungrouped(case: &Case<'_>) -> Option<Finding> {
    let why = case
        .watch
        .ungrouped
        .filter(|why| *why != Ungrouped::Multicast)?;
    let sockets = case.watch.last.listener.sockets.len();
    Some(
        finding(
            "no-group",
            "Only some of the sockets get datagrams",
            why.to_string(),
        )
        .shown(format!(
            "{sockets} sockets on {}: the kernel prefers the newest to those that are in no group with it",
            case.address
        ))
        .then("set SO_REUSEPORT on each socket before bind(), as one user")
        .then(case.own_sockets()),
    )
}

fn mptcp(case: &Case<'_>) -> Option<Finding> {
    let listener = &case.watch.last.listener;
    (listener.protocol == Protocol::Mptcp).then(|| {
        finding(
            "mptcp-listener",
            "It listens by Multipath TCP",
            "the kernel lets no program choose for an MPTCP listener, and groups of them are not steered",
        )
        .shown(format!("{} MPTCP socket(s) on {}", listener.sockets.len(), case.address))
        .then("Go: `GODEBUG=multipathtcp=0` in its environment; others: a plain TCP socket")
    })
}

fn heavy_flow(case: &Case<'_>) -> Option<Finding> {
    let flows = case.watch.heavy_flows;
    (flows > 0).then(|| {
        finding(
            "heavy-flow",
            "One sender's datagrams all go to one worker",
            "a flow stays with its worker, for the sake of sessions; this one has more datagrams than that worker can read, \
             while others are idle",
        )
        .shown(format!("{} on {}", count(flows.into(), "such flow", "such flows"), case.address))
        .then("if each datagram stands for itself (DNS, statsd, syslog): `--affinity none` of `wakeone run` or `wakeone attach`")
    })
}

fn orphan(case: &Case<'_>) -> Option<Finding> {
    let pids = &case.watch.orphans;
    let first = pids.first()?;
    let mut found = finding(
        "orphan",
        "A process keeps a listener and does not accept",
        "it inherited the listener from a worker that has ended, and the socket lives as long as it does",
    );
    for pid in pids {
        found = found.shown(format!(
            "process {pid} holds a listener on {}; no connection waits for it, as our program chooses another",
            case.address
        ));
    }
    Some(found.then(format!("end it: `kill {first}`")).then(
        "have helpers inherit no listener: FD_CLOEXEC, `close_fds=True` of Python's subprocess",
    ))
}

fn pinned(case: &Case<'_>) -> Option<Finding> {
    let mut by_cpu: std::collections::BTreeMap<u32, Vec<u32>> = std::collections::BTreeMap::new();
    for (pid, look) in &case.watch.last.workers {
        if let Some(cpu) = look.pinned_cpu {
            by_cpu.entry(cpu).or_default().push(*pid);
        }
    }
    let (cpu, pids) = by_cpu.into_iter().max_by_key(|(_, pids)| pids.len())?;
    // More workers than CPUs must share them. Workers that share one while another CPU has fewer need not.
    let cpus = case.watch.last.host.cpus.max(1) as usize;
    let fair = case.watch.last.workers.len().div_ceil(cpus);
    (pids.len() > fair).then(|| {
        finding(
            "pinned-to-one-cpu",
            "Several workers may run on one CPU only, the same",
            "their affinity (taskset, a cpuset, a setting of the server) names only that one",
        )
        .shown(format!(
            "{} of {} workers on CPU {cpu} of {cpus}: processes {}",
            pids.len(),
            case.watch.last.workers.len(),
            list(&pids)
        ))
        .then(format!(
            "`taskset -p {}` shows it; `taskset -ap MASK PID` changes it",
            pids[0]
        ))
        .then("nginx: `worker_cpu_affinity auto`")
    })
}

fn descriptors(case: &Case<'_>) -> Option<Finding> {
    let fill = |w: &WorkerLook| f64::from(w.descriptors) / w.descriptors_limit.max(1) as f64;
    let (pid, worst) = case
        .watch
        .last
        .workers
        .iter()
        .max_by(|a, b| fill(a.1).total_cmp(&fill(b.1)))?;
    (fill(worst) >= DESCRIPTORS).then(|| {
        finding(
            "descriptor-limit-near",
            "A worker runs out of descriptors",
            "at the limit accept() fails with EMFILE, and connections stay in the queue",
        )
        .shown(format!(
            "process {pid} has {} of {} open",
            worst.descriptors, worst.descriptors_limit
        ))
        .then("raise RLIMIT_NOFILE: systemd's `LimitNOFILE=`, nginx's `worker_rlimit_nofile`")
    })
}

/// Says what the figures of a server like this leave out, a sentence each.
pub fn blind_spots(watch: &Watch) -> Vec<String> {
    const HANDED: &str = "connections that were accepted wait to be taken up";
    let mut workers = watch.last.workers.values();
    let is_node = workers.any(|one| {
        ["node", "PM2"]
            .iter()
            .any(|name| one.name.starts_with(name))
    });
    let spot = match watch.model.shape {
        Shape::PassesDescriptors if is_node => format!(
            "{HANDED} by the process that they are passed to: those waits are not seen; with NODE_CLUSTER_SCHED_POLICY=none in the environment of node or pm2 its workers accept themselves"
        ),
        Shape::PassesDescriptors => {
            format!("{HANDED} by the process that they are passed to: those waits are not seen")
        }
        Shape::HandsToThreads => {
            format!("{HANDED} by the thread that they are handed to: those waits are not seen")
        }
        _ if watch.pools => format!(
            "threads of the workers wait for work: if {HANDED} by such a thread, those waits are not seen"
        ),
        _ => return Vec::new(),
    };
    vec![spot]
}

/// A time in µs as a person writes it.
pub fn time(us: f64) -> String {
    if us < 1000.0 {
        format!("{us:.0} µs")
    } else if us < 1_000_000.0 {
        format!("{:.1} ms", us / 1000.0)
    } else {
        format!("{:.2} s", us / 1e6)
    }
}

#[cfg(test)]
mod tests;
