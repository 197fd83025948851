//! How connections and load spread over the workers, and how many are woken for one.

use super::case::{Case, ENOUGH_CONNECTIONS};
use super::{Finding, finding};
use crate::accept::Means;
use crate::advice;
use crate::layout::{connections, count};
use crate::snapshot::Row;

/// Less CPU than this, of all workers together, says nothing about its spread.
const ENOUGH_CPU: f64 = 0.05;
/// The largest share over the mean one, from which on a spread is called uneven. Two workers reach 2 at most.
const UNEVEN: f64 = 1.5;
/// Share of the time that the busiest worker must be busy for its share to be a load: below, nobody waits for it.
const LOADED: f64 = 0.2;
/// Wake-ups a connection from which on it is a herd.
const HERD: f64 = 1.8;

pub(super) fn herd(case: &Case<'_>) -> Option<Finding> {
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

pub(super) fn lifo(case: &Case<'_>) -> Option<Finding> {
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
pub(super) fn uneven(case: &Case<'_>) -> Option<String> {
    uneven_load(case).or_else(|| uneven_open(case))
}

/// The largest share over the mean one, from which on so many workers are loaded unevenly. Of two workers one can have
/// twice the mean at most: all of it.
fn uneven_from(workers: usize) -> f64 {
    UNEVEN.min(1.0 + 0.4 * (workers as f64 - 1.0))
}

/// How uneven the open connections are. Kept ones stay where they are, and no new one need come.
fn uneven_open(case: &Case<'_>) -> Option<String> {
    let (uneven, busy) = open_spread(case)?;
    (busy >= LOADED).then(|| format!("{uneven}; it was busy {:.0} % of the time", busy * 100.0))
}

/// The same where the one that has most is idle.
pub(super) fn uneven_and_idle(case: &Case<'_>) -> Option<String> {
    let (uneven, busy) = open_spread(case)?;
    (busy < LOADED && case.shared()).then(|| {
        let idle = (1.0 - busy) * 100.0;
        format!("{uneven}; it was idle {idle:.0} % of the time, so that nobody waits for it yet")
    })
}

/// Names the worker with most of the open connections, where they are uneven. Returns how busy it is as well.
fn open_spread(case: &Case<'_>) -> Option<(String, f64)> {
    let open: u64 = case.rows.iter().map(|r| u64::from(r.active)).sum();
    let busiest = case.rows.iter().max_by_key(|r| r.active)?;
    let skew = f64::from(busiest.active) * case.rows.len() as f64 / open.max(1) as f64;
    if open < ENOUGH_CONNECTIONS
        || !case.watch.threads.is_empty()
        || skew < uneven_from(case.rows.len())
    {
        return None;
    }
    let uneven = format!(
        "process {} has {} of {open} open connections, {skew:.2} times the mean of {} workers",
        busiest.pid,
        busiest.active,
        case.rows.len(),
    );
    Some((uneven, 1.0 - busiest.waiting))
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
