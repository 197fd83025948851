//! Connections that wait: for how long, behind whom, and how many are turned away.

use super::case::{Case, ENOUGH_CONNECTIONS, filled, is_always_filled};
use super::workers::{hangs, is_unserved};
use super::{Finding, finding, time};
use crate::layout::{connections, count};
use crate::snapshot::{Queue, Totals};
use crate::waits::Waits;

/// Share of the time for which a queue may wait behind a busy worker while another is idle.
const BLOCKED_SHARE: f64 = 0.02;
/// That long at the least, s.
const BLOCKED_S: f64 = 0.1;
/// A wait in the queue that a client notices, µs. It is the 99th percentile, where it is no moment's burst.
const LONG_WAIT_US: f64 = 100_000.0;
/// Fewer connections than this have no typical wait.
const SOME_CONNECTIONS: u64 = 5;
/// Of a UNIX socket it is not known how many did not wait. Its queue is filled so often where the waits are no moment's burst.
const OFTEN: f64 = 0.05;
/// A connection that waits still has been forgotten from this age on, µs.
const FORGOTTEN_US: f64 = 1_000_000.0;
/// Part of the time from which on a worker counts as one that always waits for connections.
const IDLE: f64 = 0.9;
/// Part of their busy time that workers wait for a CPU, from which on the machine is slow.
const WITHOUT_CPU: f64 = 0.5;
/// Less than that part of a CPU is no lack of one.
const SOME_CPU: f64 = 0.1;
/// Share of the backlog from which on the next burst overflows it.
const NEARLY_FULL: f64 = 0.8;

/// Connections behind a busy worker while another has nothing to do: the blind hash.
pub(super) fn blocked(case: &Case<'_>) -> Option<Finding> {
    if !case.has_own_sockets() {
        return None;
    }
    let seconds = case.totals.seconds;
    let (worst, blocked_s) = case
        .queues
        .iter()
        // Behind a stopped or hanging worker they would wait whatever chose the queue: that was reported.
        .filter(|queue| !hangs(case, queue) && !is_unserved(case, queue))
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
    let (of, its_worker) = match &workers[..] {
        [] => (
            format!("socket {}", worst.inode),
            "nobody was seen to wait for it",
        ),
        all => (all.join(", "), "its worker was busy"),
    };
    let idle: f64 = case.rows.iter().map(|r| r.idle_beside_queue_s).sum();
    let title = match case.is_udp() {
        true => "Datagrams wait behind a busy worker while others are idle",
        false => "Connections wait behind a busy worker while others are idle",
    };
    let mut found = finding("blind-hash", title, cause)
    .shown(format!(
        "the queue of {of} was not empty for {blocked_s:.2} s of {seconds:.1} s while {its_worker} and another waited; longest queue {}",
        worst.highest
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

/// The part of the time in which the queue that was filled most was.
fn filled_share(case: &Case<'_>) -> f64 {
    let filled = case.queues.iter().map(|queue| filled(case, queue)).max();
    filled.unwrap_or(0) as f64 / case.looks().max(1) as f64
}

/// How many of these were too long.
fn long_ones(waits: &Waits) -> u64 {
    let long = waits.times_us().filter(|(us, _)| *us >= LONG_WAIT_US);
    long.map(|(_, count)| u64::from(count)).sum()
}

/// How long connections wait, if that is too long.
pub(super) fn waits(case: &Case<'_>) -> Option<String> {
    // Those of a UNIX socket.
    let queued = &case.watch.sampled.queued;
    let long = long_ones(queued);
    if long >= SOME_CONNECTIONS && filled_share(case) >= OFTEN {
        return Some(format!(
            "{} {} or longer in the queue, the longest {}{}",
            count(long, "connection waited", "connections waited"),
            time(LONG_WAIT_US),
            time(queued.max_us as f64),
            case.oldest()
        ));
    }
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

/// Connections wait long. Judged where nothing else tells why: that the queue is long does not.
pub(super) fn long_waits(case: &Case<'_>) -> Option<Finding> {
    let waits = waits(case)?;
    let share = filled_share(case);
    let longest = case.queues.iter().map(|q| q.highest).max().unwrap_or(0);
    let queued = format!(
        "connections waited for {:.0} % of the time, {longest} of them at most",
        share * 100.0
    );
    let busy: f64 = case.rows.iter().map(|r| 1.0 - r.waiting).sum();
    let without_cpu: f64 = case.rows.iter().map(|r| r.run_delay).sum();
    let found = if without_cpu > busy * WITHOUT_CPU && without_cpu > SOME_CPU {
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
pub(super) fn waits_inside(case: &Case<'_>) -> Option<Finding> {
    let unread = &case.watch.sampled.unread;
    let long = long_ones(unread);
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

pub(super) fn overflow(case: &Case<'_>) -> Option<Finding> {
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
pub(super) fn datagrams_dropped(case: &Case<'_>) -> Option<Finding> {
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

pub(super) fn nearly_full(case: &Case<'_>) -> Option<Finding> {
    if overflow(case).is_some() || case.is_udp() {
        return None;
    }
    // The kernel admits one more than the limit.
    let fill = |q: &Queue| f64::from(q.highest) / (f64::from(q.limit) + 1.0);
    let worst = case
        .queues
        .iter()
        .filter(|q| !hangs(case, q))
        .max_by(|a, b| fill(a).total_cmp(&fill(b)))?;
    if worst.highest == 0 || fill(worst) < NEARLY_FULL {
        return None;
    }
    let always = is_always_filled(case, worst);
    let mut found = match always {
        false => finding(
            "backlog-too-small",
            "The backlog is too small for the bursts that come",
            "connections come faster, for a moment, than they are accepted",
        ),
        true => finding(
            "backlog-too-small",
            "The queue is filled all the time, and nearly full",
            "connections come as fast as they are accepted, or faster",
        ),
    };
    if case.is_unix() {
        found.cause.push_str(
            "; a full queue of a UNIX socket refuses clients that do not wait for it (EAGAIN), and nginx then answers 502",
        );
    }
    found = found
        .shown(format!(
            "the queue reached {} of {} in {:.1} s",
            worst.highest, worst.limit, case.totals.seconds
        ))
        .shown(cut(case, worst));
    if always {
        found = found
            .then("more workers, or quicker ones: in a longer queue connections only wait longer");
    }
    Some(found.then(longer(case, worst)))
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

pub(super) fn longer(case: &Case<'_>, queue: &Queue) -> String {
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
pub(super) fn reset(case: &Case<'_>) -> Option<Finding> {
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
