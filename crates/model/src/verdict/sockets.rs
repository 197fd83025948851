//! Sockets, groups and descriptors that are not what their server means.

use super::case::{Case, list};
use super::queues::waits;
use super::spread::uneven;
use super::{Finding, finding};

use crate::layout::{count, counted};
use crate::listener::{Protocol, Ungrouped};
use crate::snapshot::WorkerLook;

/// Share of the descriptors from which on they run out soon.
const DESCRIPTORS: f64 = 0.8;

pub(super) fn group_of_one(case: &Case<'_>) -> Option<Finding> {
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
pub(super) fn ungrouped(case: &Case<'_>) -> Option<Finding> {
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

pub(super) fn mptcp(case: &Case<'_>) -> Option<Finding> {
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

pub(super) fn heavy_flow(case: &Case<'_>) -> Option<Finding> {
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

pub(super) fn orphan(case: &Case<'_>) -> Option<Finding> {
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

pub(super) fn pinned(case: &Case<'_>) -> Option<Finding> {
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

pub(super) fn descriptors(case: &Case<'_>) -> Option<Finding> {
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
