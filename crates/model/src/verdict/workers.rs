//! Workers that do not serve: stopped, stuck, gone, hanging in accept, or spinning.

use super::case::{Case, is_always_filled, list};
use super::{Finding, finding};
use crate::layout::connections;
use crate::listener::Protocol;
use crate::snapshot::{Queue, Row, Snapshot};

/// CPU, with the time that it waits for one, from which on a worker does not sleep.
const SPIN_CPU: f64 = 0.9;
/// accept() calls a second that found nothing, from which on they are what the worker does.
const SPIN_CALLS: f64 = 1000.0;
/// Part of its CPU time in the kernel, from which on a worker makes calls, and does not only compute.
const SPIN_IN_KERNEL: f64 = 0.15;

fn stopped_pids(case: &Case<'_>) -> Vec<u32> {
    let stopped = case.watch.sampled.stopped.iter();
    stopped
        .filter(|(pid, looks)| case.serving(**pid) && **looks * 2 > case.looks())
        .map(|(pid, _)| *pid)
        .collect()
}

pub(super) fn stopped(case: &Case<'_>) -> Option<Finding> {
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

pub(super) fn stuck(case: &Case<'_>) -> Option<Finding> {
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

/// Whether nothing is taken from a queue, and nobody was seen to wait for it.
pub(super) fn is_unserved(case: &Case<'_>, queue: &Queue) -> bool {
    let seconds = case.totals.seconds;
    // The oldest connection has waited all the time. Of a long queue of a UNIX socket the kernel does not tell.
    let is_untouched = match (case.totals.oldest_wait_us, &case.watch.last.waiting) {
        (Some(us), _) => us >= seconds * 0.9e6,
        (None, Some(_)) => false,
        (None, None) => case.is_unix() && queue.length == queue.highest,
    };
    queue.pids.is_empty()
        && queue.length > 0
        && seconds >= 1.0
        && is_always_filled(case, queue)
        && is_untouched
}

/// Queues from which nothing is taken, and for which nobody was seen to wait.
pub(super) fn unserved(case: &Case<'_>) -> Option<Finding> {
    let seconds = case.totals.seconds;
    let unserved = case.queues.iter();
    let unserved: Vec<&Queue> = unserved.filter(|queue| is_unserved(case, queue)).collect();
    if unserved.is_empty() {
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

/// Fewer connections than this may all last.
const SOME_TAKEN: u64 = 10;

/// Connections that a worker had at the beginning or took, and has no more.
fn ended(case: &Case<'_>, row: &Row) -> Option<u64> {
    let before = case.watch.first.workers.get(&row.pid)?.active;
    let had = u64::from(before) + row.taken?;
    Some(had.saturating_sub(row.active.into()))
}

/// A worker that takes connections and ends none of them, while the others end theirs: a thread of it accepts, and the one
/// that should answer hangs.
pub(super) fn answers_none(case: &Case<'_>) -> Option<Finding> {
    if !case.watch.threads.is_empty() {
        // Which of them has a connection is not known.
        return None;
    }
    let share =
        |row: &Row| Some(ended(case, row)? as f64 / row.taken.filter(|n| *n >= SOME_TAKEN)? as f64);
    let (keeps, ends): (Vec<&Row>, Vec<&Row>) = case
        .rows
        .iter()
        .partition(|row| share(row).is_some_and(|share| share < 0.1));
    let first = keeps.first()?;
    let shares: Vec<f64> = ends.iter().filter_map(|row| share(row)).collect();
    let others = shares.iter().sum::<f64>() / shares.len().max(1) as f64;
    if others < 0.5 {
        return None;
    }
    let mut found = finding(
        "stuck-worker",
        "A worker takes connections and ends none",
        "a thread of it accepts and reads, and the one that answers hangs or waits",
    );
    for row in &keeps {
        found = found.shown(format!(
            "{} took {} in {:.1} s, and has {} open; the others ended {:.0} % of as many as they took",
            case.worker(row.pid),
            connections(row.taken.unwrap_or(0)),
            case.totals.seconds,
            row.active,
            others * 100.0
        ));
    }
    found = found.then(format!(
        "look where it is: `cat /proc/{0}/task/*/stack`, `gdb -p {0}`",
        first.pid
    ));
    Some(
        match case.one_queue().or_else(|| case.least_connections()) {
            Some(attach) => found.then(attach),
            None => found,
        },
    )
}

/// Workers that hang in accept, in the middle of their event loop.
pub(super) fn blocking(case: &Case<'_>) -> Option<Finding> {
    let sampled = &case.watch.sampled;
    // Or other threads of it answer: Apache's.
    let is_heard = |row: &Row| {
        let is_tcp = case.watch.last.listener.protocol == Protocol::Tcp;
        is_tcp && sampled.unread.count == 0 && ended(case, row) != Some(0)
    };
    let hangs = |row: &&Row| {
        let sights = sampled.accepts_in_loop.get(&row.pid).copied().unwrap_or(0);
        // Apache's workers wait like that for the next connection, and have none that could wait for them.
        row.active > 0 && sights > 1 && sights * 2 > sampled.sights && !is_heard(row)
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
pub(super) fn spins(case: &Case<'_>) -> Option<Finding> {
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

/// Whether all workers of a queue are stopped, or hang: it is long because of them.
pub(super) fn hangs(case: &Case<'_>, queue: &Queue) -> bool {
    let stopped = stopped_pids(case);
    let stuck: Vec<u32> = stuck_rows(case).iter().map(|r| r.pid).collect();
    let serves_not = |pid: &u32| stopped.contains(pid) || stuck.contains(pid);
    !queue.pids.is_empty() && queue.pids.iter().all(serves_not)
}
