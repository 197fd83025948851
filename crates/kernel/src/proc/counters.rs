//! Counters of a process and of a network namespace, from /proc.

use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::{Pid, SysconfVar, sysconf};
use wakeone_model::snapshot::{HostLook, WorkerLook};

use crate::proc::netstat::Counters;
use crate::proc::process;
use crate::proc::reader;
use crate::proc::stat::{self, Stat, TICK_NS};
use crate::proc::waits;

/// The counters of a process; `None` where it is gone. `waiting` and `active` are not known here.
pub fn worker(pid: u32) -> Option<WorkerLook> {
    let name = waits::identity(pid)?.name;
    let (mut cpu_ns, mut run_delay_ns) = (0, 0);
    let (mut switches_voluntary, mut switches_forced) = (0, 0);
    // A thread that ends between the two takes its counters with it.
    let of_each = |file| {
        let threads = reader::file_of_each(pid, "task", file).unwrap_or_default();
        let texts = threads.into_iter().filter_map(|(_, read)| read.ok());
        texts.map(crate::proc::line::as_text)
    };
    for times in of_each("schedstat") {
        let (ran, waited) = parse_schedstat(&times);
        cpu_ns += ran;
        run_delay_ns += waited;
    }
    for status in of_each("status") {
        switches_voluntary += field(&status, "voluntary_ctxt_switches:");
        switches_forced += field(&status, "nonvoluntary_ctxt_switches:");
    }
    let (cpus, pinned_cpu) = affinity(pid);
    Some(WorkerLook {
        name,
        cpu_ns,
        system_ns: Stat::of(pid).map_or(0, |stat| stat.system_ticks) * TICK_NS,
        run_delay_ns,
        switches_voluntary,
        switches_forced,
        state: process::state(pid)?,
        descriptors: reader::numbers(pid, "fd")
            .map_or(0, |all| u32::try_from(all.len()).unwrap_or(u32::MAX)),
        descriptors_limit: stat::text_of(pid, "limits")
            .ok()
            .and_then(|limits| parse_descriptor_limit(&limits))
            .unwrap_or(u64::MAX),
        cpus,
        pinned_cpu,
        waiting: false,
        active: 0,
    })
}

/// The counters of a thread; `None` where it is gone. Its process has the descriptors.
pub fn thread(tid: u32) -> Option<WorkerLook> {
    let whole = worker(tid)?;
    let text = |file: &str| stat::text_of(tid, file).unwrap_or_default();
    let (cpu_ns, run_delay_ns) = parse_schedstat(&text("schedstat"));
    let status = text("status");
    let own = reader::file(tid, &format!("task/{tid}/stat")).ok();
    Some(WorkerLook {
        cpu_ns,
        run_delay_ns,
        system_ns: own
            .and_then(|line| Stat::parse(&line))
            .map_or(0, |stat| stat.system_ticks * TICK_NS),
        switches_voluntary: field(&status, "voluntary_ctxt_switches:"),
        switches_forced: field(&status, "nonvoluntary_ctxt_switches:"),
        ..whole
    })
}

/// The memory of a process that no file backs, in bytes, with what was swapped out; 0 where it is gone.
pub fn own_memory(pid: u32) -> u64 {
    let status = stat::text_of(pid, "status").unwrap_or_default();
    let kib = |name| {
        status.lines().find_map(|line| {
            line.strip_prefix(name)?
                .split_whitespace()
                .next()?
                .parse::<u64>()
                .ok()
        })
    };
    (kib("RssAnon:").unwrap_or(0) + kib("VmSwap:").unwrap_or(0)) * 1024
}

/// `RAN WAITED SLICES`, ns.
fn parse_schedstat(text: &str) -> (u64, u64) {
    let mut words = text.split_whitespace().map(|w| w.parse().unwrap_or(0));
    (words.next().unwrap_or(0), words.next().unwrap_or(0))
}

fn field(status: &str, name: &str) -> u64 {
    let value = status.lines().find_map(|line| line.strip_prefix(name));
    value.and_then(|v| v.trim().parse().ok()).unwrap_or(0)
}

/// The soft limit of `Max open files`.
fn parse_descriptor_limit(limits: &str) -> Option<u64> {
    let line = limits
        .lines()
        .find_map(|l| l.strip_prefix("Max open files"))?;
    let soft = line.split_whitespace().next()?;
    if soft == "unlimited" {
        Some(u64::MAX)
    } else {
        soft.parse().ok()
    }
}

/// How many CPUs the main thread may run on, and which where it is one of several that the machine has.
fn affinity(pid: u32) -> (u32, Option<u32>) {
    let Ok(set) = sched_getaffinity(Pid::from_raw(pid as i32)) else {
        return (0, None);
    };
    let mut allowed = (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap_or(false));
    let first = allowed.next();
    let more = allowed.count();
    let pinned = first.filter(|_| more == 0 && cpus_online() > 1);
    (
        u32::try_from(more + usize::from(first.is_some())).unwrap_or(0),
        pinned.and_then(|cpu| u32::try_from(cpu).ok()),
    )
}

/// The counters of the network namespace that this process, or another one, is in.
pub fn host(pid: Option<u32>) -> HostLook {
    let counters = Counters::read(pid);
    let extended = |name| counters.get("TcpExt", name);
    HostLook {
        listen_overflows: extended("ListenOverflows"),
        listen_drops: extended("ListenDrops"),
        syn_retransmissions: extended("TCPSynRetrans"),
        passive_opens: counters.get("Tcp", "PassiveOpens"),
        somaxconn: stat::text("/proc/sys/net/core/somaxconn")
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .unwrap_or(0),
        resets_sent: counters.get("Tcp", "OutRsts"),
        migrated: extended("TCPMigrateReqSuccess"),
        cpus: cpus_online(),
    }
}

fn cpus_online() -> u32 {
    let online = sysconf(SysconfVar::_NPROCESSORS_ONLN).ok().flatten();
    online.and_then(|n| u32::try_from(n).ok()).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn this_process_has_vitals() {
        let before = worker(std::process::id()).expect("own process");
        // It is counted in ticks, and on a busy machine a tick takes a while.
        let began = std::time::Instant::now();
        let patience = std::time::Duration::from_secs(20);
        let mut after = worker(std::process::id()).expect("own process");
        while after.cpu_ns <= before.cpu_ns && began.elapsed() < patience {
            after = worker(std::process::id()).expect("own process");
        }
        assert!(after.cpu_ns > before.cpu_ns);
        assert!(after.descriptors > 2 && u64::from(after.descriptors) < after.descriptors_limit);
        assert!(after.cpus > 0);
        assert!(worker(u32::MAX).is_none());
    }

    #[test]
    fn limits_and_host() {
        assert!(host(None).somaxconn > 0);
        assert_eq!(
            parse_descriptor_limit("Max open files  1024  524288  files\n"),
            Some(1024)
        );
        assert_eq!(
            parse_descriptor_limit("Max open files  unlimited unlimited files\n"),
            Some(u64::MAX)
        );
    }

    #[test]
    fn counters_survive_foreign_bytes() {
        crate::foreign::survives("proc", &[], |bytes| {
            let text = String::from_utf8_lossy(bytes);
            let _ = (parse_schedstat(&text), parse_descriptor_limit(&text));
            let _ = field(&text, "voluntary_ctxt_switches:");
            let _ = Counters::of(&text).get("TcpExt", "ListenDrops");
        });
    }

    proptest! {
        #[test]
        fn no_text_breaks_a_parser(text in "\\PC{0,200}") {
            let _ = (parse_schedstat(&text), parse_descriptor_limit(&text));
            let _ = field(&text, "a");
        }
    }
}
