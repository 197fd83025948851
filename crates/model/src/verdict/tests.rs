//! Each rule at its threshold and just below it, on a watch of a healthy group of four that has just that wrong.

use super::*;
use crate::accept::{AcceptModel, Confidence, Means};
use crate::listener::{Listener, Protocol, Socket, Ungrouped};
use crate::quic::Datagrams;
use crate::snapshot::{
    HostLook, Sampled, Snapshot, TraceGaps, TraceLook, View, WorkerLook, WorkerTrace,
};
use crate::waits::Waits;

const WORKERS: u32 = 4;
const SECONDS: u64 = 10;
const LOOKS: u64 = 1000;
/// Worker 10 serves the socket of inode 100 and cookie 1000, and so on.
const PIDS: [u32; 4] = [10, 11, 12, 13];

fn waits(us: &[u64]) -> Waits {
    let mut waits = Waits::of(us.iter().copied());
    waits.buckets.resize(512, 0);
    waits
}

fn socket(n: u32) -> Socket {
    Socket {
        inode: u64::from(100 + n),
        cookie: u64::from(1000 + n),
        protocol: Protocol::Tcp,
        uid: 0,
        queued: 0,
        queue_limit: 128,
        drops: 0,
        receive_buffer_bytes: 0,
    }
}

fn snapshot(sockets: u32, seconds: u64) -> Snapshot {
    let worker = |pid: u32| {
        let look = WorkerLook {
            name: "server".into(),
            cpu_ns: seconds * 100_000_000,
            switches_voluntary: seconds * 100,
            state: 'S',
            waiting: true,
            descriptors: 8,
            descriptors_limit: 100,
            cpus: 2,
            ..WorkerLook::default()
        };
        (pid, look)
    };
    let trace = |pid: u32| {
        let trace = WorkerTrace {
            accepted: seconds * 25,
            woken: seconds * 25,
            waits: waits(&[100].repeat(seconds as usize * 25)),
            ..WorkerTrace::default()
        };
        (pid, trace)
    };
    Snapshot {
        at_ns: 1 + seconds * 1_000_000_000,
        listener: Listener {
            address: "127.0.0.1:80".parse().expect("address"),
            interface: 0,
            protocol: Protocol::Tcp,
            sockets: (0..sockets).map(socket).collect(),
        },
        workers: PIDS.map(worker).into(),
        trace: Some(TraceLook {
            connections: seconds * 100,
            wakeups: seconds * 100,
            workers: PIDS.map(trace).into(),
            gaps: TraceGaps::default(),
        }),
        host: HostLook {
            somaxconn: 4096,
            cpus: 2,
            ..HostLook::default()
        },
        waiting: Some(Waits::default()),
    }
}

/// Four workers with a socket each, or with one for all, that share a thousand connections evenly.
fn healthy(shape: Shape, means: Means) -> Watch {
    let own = matches!(shape, Shape::SocketPerWorker);
    let sockets = if own { WORKERS } else { 1 };
    let serves = |n: u32| {
        let pids = if own {
            vec![PIDS[n as usize]]
        } else {
            PIDS.to_vec()
        };
        (u64::from(1000 + n), pids)
    };
    Watch {
        model: AcceptModel {
            shape,
            means,
            confidence: Confidence::Certain,
            evidence: Vec::new(),
            workers: PIDS.to_vec(),
        },
        first: snapshot(sockets, 0),
        last: snapshot(sockets, SECONDS),
        sampled: Sampled {
            looks: LOOKS,
            waiting: PIDS.map(|pid| (pid, LOOKS * 7 / 10)).into(),
            ..Sampled::default()
        },
        serves: (0..sockets).map(serves).collect(),
        keeps: std::collections::BTreeMap::new(),
        reuseport: Some(own),
        steered: None,
        has_program: None,
        affinity: None,
        heavy_flows: 0,
        threads: std::collections::BTreeMap::new(),
        pools: false,
        ungrouped: None,
        orphans: Vec::new(),
        view: View {
            tracing: true,
            missing: Vec::new(),
        },
    }
}

fn own() -> Watch {
    healthy(Shape::SocketPerWorker, Means::EpollWakeAll)
}

fn shared(means: Means) -> Watch {
    healthy(Shape::Shared, means)
}

fn codes(watch: &Watch) -> Vec<String> {
    let findings = judge(watch);
    for finding in &findings {
        let numbers = |text: &String| text.contains(|c: char| c.is_ascii_digit());
        assert!(
            finding.evidence.iter().any(numbers),
            "no number: {finding:?}"
        );
        assert!(
            !finding.next.is_empty() && !finding.cause.is_empty(),
            "no way out: {finding:?}"
        );
    }
    findings.into_iter().map(|f| f.code).collect()
}

/// Returns the findings in `watch` after this change.
fn found(mut watch: Watch, change: impl FnOnce(&mut Watch)) -> Vec<String> {
    change(&mut watch);
    codes(&watch)
}

fn trace(watch: &mut Watch) -> &mut TraceLook {
    watch.last.trace.as_mut().expect("traced")
}

/// Connections taken, by worker; the sum is what the listener was told of.
fn take(watch: &mut Watch, taken: [u64; 4]) {
    for (pid, n) in PIDS.iter().zip(taken) {
        let worker = trace(watch).workers.get_mut(pid).expect("worker");
        worker.accepted = n;
        worker.waits = waits(&[100].repeat(n as usize));
    }
    let sum = taken.iter().sum();
    trace(watch).connections = sum;
    trace(watch).wakeups = sum;
}

const NONE: [&str; 0] = [];

#[test]
fn healthy_servers_have_nothing() {
    for watch in [
        own(),
        shared(Means::Accept),
        shared(Means::EpollExclusive),
        shared(Means::EpollWakeAll),
        healthy(Shape::Mutex, Means::EpollWakeAll),
        healthy(Shape::Single, Means::EpollEdge),
    ] {
        assert_eq!(codes(&watch), NONE, "{}", watch.model.name());
        let untraced = |w: &mut Watch| (w.first.trace, w.last.trace) = (None, None);
        assert_eq!(found(watch.clone(), untraced), NONE);
        // Idle: nothing came at all.
        let idle = |w: &mut Watch| {
            let seconds = w.last.at_ns;
            w.last = w.first.clone();
            w.last.at_ns = seconds;
            w.sampled.waiting = PIDS.map(|pid| (pid, LOOKS)).into();
        };
        assert_eq!(found(watch, idle), NONE);
    }
    // Nobody may be seen, and nothing is there any more.
    let gone = |w: &mut Watch| {
        w.last.workers.clear();
        w.last.listener.sockets.clear();
        w.model.workers.clear();
    };
    assert_eq!(found(own(), gone), NONE);
}

#[test]
fn stopped_for_more_than_half_the_time() {
    let stop = |looks| {
        move |w: &mut Watch| {
            w.sampled.stopped.insert(10, looks);
            w.last.listener.sockets[0].queued = 7;
        }
    };
    assert_eq!(found(own(), stop(LOOKS / 2)), NONE);
    assert_eq!(found(own(), stop(LOOKS / 2 + 1)), ["stopped-worker"]);
    // A process that is not one of the workers.
    let other = |w: &mut Watch| w.sampled.stopped.extend([(99, LOOKS)]);
    assert_eq!(found(own(), other), NONE);
}

/// Seven connections wait for worker 10, the oldest for 3.1 s, beside a thousand that were served at once.
fn wait_for_the_first(w: &mut Watch) {
    w.last.listener.sockets[0].queued = 7;
    let ages = [100_000, 500_000, 900_000, 1_400_000, 2_000_000, 2_500_000];
    w.last.waiting = Some(Waits::of(ages.into_iter().chain([3_100_000])));
}

#[test]
fn a_stopped_worker_is_reported_once_with_what_waits_for_it() {
    let mut watch = own();
    watch.sampled.stopped.insert(10, LOOKS);
    watch.sampled.blocked_queue.insert(1000, LOOKS);
    wait_for_the_first(&mut watch);
    let findings = judge(&watch);
    assert_eq!(findings.len(), 1, "{findings:#?}");
    assert_eq!(findings[0].code, "stopped-worker");
    assert_eq!(
        findings[0].evidence,
        [
            "process 10 was stopped for more than half of 10.0 s; 7 connections wait in its queue; the oldest waits 3.10 s"
        ]
    );
    // A stuck one, too.
    let stuck = |w: &mut Watch| {
        hang(w);
        w.sampled.blocked_queue.insert(1000, LOOKS);
    };
    assert_eq!(found(own(), stuck), ["stuck-worker"]);
    // Beside it another one's queue may be blocked: that is reported as well.
    let both = |w: &mut Watch| {
        stuck(w);
        w.sampled.blocked_queue.insert(1001, 50);
        let worker = trace(w).workers.get_mut(&11).expect("worker");
        worker.waits = waits(&[100, 50_000]);
    };
    assert_eq!(found(own(), both), ["stuck-worker", "blind-hash"]);
}

#[test]
fn those_that_wait_still_are_among_the_waits() {
    let mut watch = own();
    assert!(watch.totals().wait_us_max < Some(200.0));
    assert_eq!(watch.totals().oldest_wait_us, None);
    wait_for_the_first(&mut watch);
    let totals = watch.totals();
    assert_eq!(totals.oldest_wait_us, Some(3_100_000.0));
    assert_eq!(totals.wait_us_max, Some(3_100_000.0));
    // Of 1,007 waits seven are longer than 100 ms.
    assert!(totals.wait_us_p50 < Some(200.0));
    let ten_more = Waits::of([2_000_000; 10]);
    watch.last.waiting.as_mut().expect("waits").add(&ten_more);
    assert!(watch.totals().wait_us_p99 > Some(1_000_000.0));
    // One queue is filled, and it is known whose.
    let worst = |watch: &Watch| {
        watch
            .rows()
            .iter()
            .map(|r| r.wait_us_max)
            .collect::<Vec<_>>()
    };
    assert_eq!(worst(&watch)[0], Some(3_100_000.0));
    assert!(worst(&watch)[1] < Some(200.0));
    watch.last.listener.sockets[1].queued = 1;
    assert!(worst(&watch)[0] < Some(200.0), "they may be the other's");
    // Without tracing nothing is known of those that were served: only the age remains.
    (watch.first.trace, watch.last.trace) = (None, None);
    let totals = watch.totals();
    assert_eq!((totals.wait_us_p99, totals.wait_us_max), (None, None));
    assert_eq!(totals.oldest_wait_us, Some(3_100_000.0));
}

#[test]
fn shares_are_told_apart_only_where_there_was_enough_to_share() {
    let mut watch = own();
    assert_eq!(watch.unevenness(), Some((1.0, "connections")));
    take(&mut watch, [0; 4]);
    watch.last.workers.get_mut(&10).expect("worker").cpu_ns *= 4;
    assert_eq!(watch.unevenness(), None, "the CPU of housekeeping");
    (watch.first.trace, watch.last.trace) = (None, None);
    assert_eq!(watch.unevenness().map(|(_, of)| of), Some("CPU"));
    for worker in watch.last.workers.values_mut() {
        worker.cpu_ns = 1_000_000;
    }
    assert_eq!(watch.unevenness(), None);
}

/// A hundredth of what each worker took waited this long; connections waited in this many of a thousand looks.
fn wait_long(w: &mut Watch, us: u64, filled: u64) {
    let trace = w.last.trace.as_mut().expect("traced");
    for worker in trace.workers.values_mut() {
        worker.waits = waits(&[vec![100; 240], vec![us; 10]].concat());
    }
    w.sampled.queue_filled.insert(1000, filled);
    w.sampled.queue_highest.insert(1000, 9);
}

#[test]
fn workers_are_busy_where_connections_wait_long_and_nothing_else_tells_why() {
    let told = |shape, us, filled| found(shape, |w| wait_long(w, us, filled));
    assert_eq!(told(own(), 400_000, 60), ["workers-busy"]);
    assert_eq!(told(own(), 90_000, 60), NONE);
    assert_eq!(
        told(own(), 400_000, 0),
        ["workers-busy"],
        "however seldom seen"
    );
    // Whatever the states say.
    let idle = found(own(), |w| {
        wait_long(w, 400_000, 60);
        w.sampled.waiting = PIDS.map(|pid| (pid, LOOKS)).into();
    });
    assert_eq!(idle, ["long-waits"]);
    // Few connections, of which most wait long.
    let few = |taken: u64| {
        found(own(), |w| {
            take(w, [taken, 0, 0, 0]);
            let worker = trace(w).workers.get_mut(&10).expect("worker");
            worker.waits = waits(&[300_000].repeat(taken as usize));
        })
    };
    assert_eq!(few(5), ["workers-busy"]);
    assert_eq!(few(4), NONE);
    // The machine is slow, not the requests.
    let starved = found(own(), |w| {
        wait_long(w, 400_000, 60);
        for worker in w.last.workers.values_mut() {
            worker.run_delay_ns = SECONDS * 200_000_000;
        }
    });
    assert_eq!(starved, ["cpu-missing"]);
    // Idle ones that waited a little do not tell of a lack.
    let idle = found(own(), |w| {
        wait_long(w, 400_000, 60);
        w.sampled.waiting = PIDS.map(|pid| (pid, LOOKS)).into();
        for worker in w.last.workers.values_mut() {
            worker.run_delay_ns = SECONDS * 20_000_000;
        }
    });
    assert_eq!(idle, ["long-waits"]);
    // Another finding tells why.
    let stuck = found(own(), |w| {
        wait_long(w, 400_000, 60);
        hang(w);
    });
    assert_eq!(stuck, ["stuck-worker"]);
}

#[test]
fn requests_that_nobody_reads_are_told_where_nothing_else_tells_why() {
    let unread =
        |us: u64, times: usize| found(own(), |w| w.sampled.unread = waits(&[us].repeat(times)));
    // A hundredth of a thousand connections.
    assert_eq!(unread(200_000, 10), ["waits-inside"]);
    assert_eq!(unread(200_000, 9), NONE);
    assert_eq!(unread(90_000, 100), NONE);
    let few = |times: usize| {
        found(own(), |w| {
            take(w, [10, 10, 10, 10]);
            w.sampled.unread = waits(&[200_000].repeat(times));
        })
    };
    assert_eq!(few(5), ["waits-inside"]);
    assert_eq!(few(4), NONE);
    // They wait because of that.
    let stuck = found(own(), |w| {
        hang(w);
        w.sampled.unread = waits(&[200_000].repeat(100));
    });
    assert_eq!(stuck, ["stuck-worker"]);
}

#[test]
fn a_connection_that_waits_for_a_second_is_told_without_tracing_too() {
    let waits_for = |us| {
        move |w: &mut Watch| {
            (w.first.trace, w.last.trace) = (None, None);
            w.last.listener.sockets[0].queued = 1;
            w.last.waiting = Some(Waits::of([us]));
        }
    };
    assert_eq!(
        found(shared(Means::Poll), waits_for(1_000_000)),
        ["workers-busy"]
    );
    assert_eq!(found(shared(Means::Poll), waits_for(999_000)), NONE);
}

/// Three connections wait at the first socket all the time, and nobody was seen to wait for them.
fn forsake(w: &mut Watch) {
    w.serves.insert(1000, Vec::new());
    w.sampled.queue_filled.insert(1000, LOOKS);
    w.sampled.queue_highest.insert(1000, 3);
    w.last.listener.sockets[0].queued = 3;
    w.last.waiting = Some(Waits::of([10, 5_000_000, SECONDS * 1_000_000]));
}

#[test]
fn connections_that_nobody_takes() {
    assert_eq!(found(own(), forsake), ["stuck-worker"]);
    assert_eq!(found(shared(Means::Unseen), forsake), ["nobody-accepts"]);
    let but = |change: fn(&mut Watch)| {
        found(own(), |w| {
            forsake(w);
            change(w);
        })
    };
    // Another one is left: they wait long, and some are taken.
    let some_taken: fn(&mut Watch) = |w| w.last.waiting = Some(Waits::of([5_000_000]));
    assert_eq!(but(some_taken), ["workers-busy"]);
    assert_eq!(
        but(|w| w.sampled.queue_filled.extend([(1000, LOOKS * 9 / 10)])),
        ["workers-busy"]
    );
    assert_eq!(
        but(|w| w.serves.extend([(1000, vec![10])])),
        ["workers-busy"]
    );
    // Of a long queue of a UNIX socket nobody knows since when they wait.
    let unix = |highest: u32, waiting: Option<Waits>| {
        found(shared(Means::Unseen), |w| {
            forsake(w);
            (w.first.trace, w.last.trace) = (None, None);
            w.last.waiting = waiting.clone();
            w.last.listener.protocol = Protocol::Unix;
            w.sampled.queue_highest.insert(1000, highest);
        })
    };
    assert_eq!(unix(3, None), ["nobody-accepts"]);
    assert_eq!(unix(4, None), NONE);
    let ages = |us| Some(Waits::of([us]));
    assert_eq!(unix(3, ages(SECONDS * 1_000_000)), ["nobody-accepts"]);
    assert_eq!(unix(3, ages(200_000)), NONE);
}

#[test]
fn a_unix_socket_whose_queue_is_full() {
    let full = |filled, waited: &[u64]| {
        found(shared(Means::Accept), |w| {
            (w.first.trace, w.last.trace) = (None, None);
            w.last.listener.protocol = Protocol::Unix;
            w.last.listener.sockets[0].queue_limit = 16;
            w.sampled.queue_highest.insert(1000, 17);
            w.sampled.queue_filled.insert(1000, filled);
            w.sampled.queued = Waits::of(waited.iter().copied());
        })
    };
    assert_eq!(full(LOOKS / 50, &[120_000; 10]), ["backlog-too-small"]);
    let both = ["backlog-too-small", "workers-busy"];
    assert_eq!(full(LOOKS, &[170_000; 10]), both);
    assert_eq!(full(LOOKS, &[17_000; 10]), ["backlog-too-small"]);
}

#[test]
fn threads_with_sockets_of_their_own_are_named() {
    let mut watch = healthy(Shape::SocketPerWorker, Means::EpollWakeAll);
    watch.model.shape = Shape::SocketPerThread;
    watch.threads = PIDS.map(|tid| (tid, 9)).into();
    assert_eq!(codes(&watch), NONE);
    assert_eq!(watch.rows()[0].thread_of, Some(9));
    watch.sampled.blocked_queue.insert(1000, 50);
    let worker = trace(&mut watch).workers.get_mut(&10).expect("worker");
    worker.waits = waits(&[100, 50_000]);
    let findings = judge(&watch);
    assert_eq!(findings[0].code, "blind-hash");
    let evidence = &findings[0].evidence[0];
    assert!(evidence.contains("thread 10 of process 9"), "{evidence}");
    // One that is busy since before.
    let mut unseen = watch.clone();
    unseen.serves.insert(1000, Vec::new());
    let findings = judge(&unseen);
    assert_eq!(findings[0].code, "blind-hash");
    let evidence = &findings[0].evidence[0];
    assert!(evidence.contains("nobody was seen to wait"), "{evidence}");
    hang(&mut watch);
    assert_eq!(codes(&watch), ["stuck-worker"]);
}

/// Worker 10 was busy all the time and took nothing, with a filled queue.
fn hang(w: &mut Watch) {
    take(w, [0, 250, 250, 250]);
    w.sampled.waiting.insert(10, 0);
    w.sampled.queue_filled.insert(1000, LOOKS);
    w.sampled.queue_highest.insert(1000, 5);
    w.last.listener.sockets[0].queued = 5;
    w.last.workers.get_mut(&10).expect("worker").waiting = false;
}

#[test]
fn stuck_is_who_takes_nothing_while_connections_wait() {
    assert_eq!(found(own(), hang), ["stuck-worker"]);
    let but = |change: fn(&mut Watch)| {
        found(own(), |w| {
            hang(w);
            change(w);
        })
    };
    assert_eq!(but(|w| take(w, [1, 250, 250, 250])), NONE);
    assert_eq!(but(|w| w.sampled.waiting.extend([(10, 10)])), NONE);
    let nine_tenths = |w: &mut Watch| w.sampled.queue_filled.extend([(1000, LOOKS * 9 / 10)]);
    assert_eq!(but(nine_tenths), NONE);
    assert_eq!(but(|w| w.last.at_ns = 999_000_000), NONE);
    // Stopped is another thing.
    let stopped = |w: &mut Watch| {
        w.last.workers.get_mut(&10).expect("worker").state = 'T';
        w.sampled.stopped.insert(10, LOOKS);
    };
    assert_eq!(but(stopped), ["stopped-worker"]);
}

#[test]
fn without_tracing_only_who_sleeps_through_is_known_to_be_stuck() {
    let untraced = |cpu_ns, switches| {
        move |w: &mut Watch| {
            hang(w);
            (w.first.trace, w.last.trace) = (None, None);
            let worker = w.last.workers.get_mut(&10).expect("worker");
            (worker.cpu_ns, worker.switches_voluntary) = (cpu_ns, switches);
        }
    };
    assert_eq!(found(own(), untraced(0, 4)), ["stuck-worker"]);
    assert_eq!(found(own(), untraced(0, 5)), NONE);
    assert_eq!(found(own(), untraced(SECONDS * 500_000_000, 0)), NONE);
}

#[test]
fn a_full_queue_of_a_stuck_worker_is_not_the_backlogs_fault() {
    let full = |w: &mut Watch| {
        hang(w);
        w.sampled.queue_highest.insert(1000, 129);
    };
    assert_eq!(found(own(), full), ["stuck-worker"]);
}

#[test]
fn blocked_behind_a_busy_worker() {
    let block = |looks, longest_us| {
        move |w: &mut Watch| {
            w.sampled.blocked_queue.insert(1000, looks);
            w.sampled.queue_highest.insert(1000, 5);
            let worker = trace(w).workers.get_mut(&10).expect("worker");
            worker.waits = waits(&[100, longest_us]);
        }
    };
    // 2 % of 10 s.
    assert_eq!(found(own(), block(20, 50_000)), ["blind-hash"]);
    assert_eq!(found(own(), block(19, 50_000)), NONE);
    // Often seen filled, but nobody waited.
    assert_eq!(found(own(), block(500, 19_999)), NONE);
    // Somebody waits still, and that wait is not known yet.
    let waiting = |w: &mut Watch| {
        block(500, 19_999)(w);
        w.last.listener.sockets[0].queued = 1;
    };
    assert_eq!(found(own(), waiting), ["blind-hash"]);
    // Its worker had no CPU for that time.
    let starved = |ns| {
        move |w: &mut Watch| {
            block(50, 50_000)(w);
            w.last.workers.get_mut(&10).expect("worker").run_delay_ns = ns;
        }
    };
    assert_eq!(found(own(), starved(299_000_000)), ["blind-hash"]);
    assert_eq!(found(own(), starved(310_000_000)), NONE);
    // At least a tenth of a second, however short the time.
    let short = |looks| {
        move |w: &mut Watch| {
            block(looks, 50_000)(w);
            w.last.at_ns = 1_000_000_001;
        }
    };
    assert_eq!(found(own(), short(99)), NONE);
    assert_eq!(found(own(), short(100)), ["blind-hash"]);
    // With one socket for all nobody waits beside a queue.
    assert_eq!(found(shared(Means::Accept), block(500, 50_000)), NONE);
}

#[test]
fn a_queue_that_overflows_and_one_that_nearly_does() {
    let fill = |highest, drops, overflows| {
        move |w: &mut Watch| {
            w.sampled.queue_highest.insert(1000, highest);
            w.last.listener.sockets[0].drops = drops;
            w.last.host.listen_overflows = overflows;
            w.last.host.listen_drops = overflows;
        }
    };
    assert_eq!(found(own(), fill(129, 1, 1)), ["accept-queue-overflow"]);
    // The socket dropped a stray packet, or another's queue was full.
    assert_eq!(found(own(), fill(5, 1, 0)), NONE);
    assert_eq!(found(own(), fill(5, 0, 1)), NONE);
    // 80 % of the 129 that the kernel admits.
    assert_eq!(found(own(), fill(104, 0, 0)), ["backlog-too-small"]);
    assert_eq!(found(own(), fill(103, 0, 0)), NONE);
    // The advice depends on who set the limit.
    let advice = |limit: u32, somaxconn: u32| {
        let mut watch = own();
        fill(limit, 0, 0)(&mut watch);
        watch.last.listener.sockets[0].queue_limit = limit;
        watch.last.host.somaxconn = somaxconn;
        judge(&watch)[0].next[0].clone()
    };
    assert!(advice(128, 4096).contains("`backlog` setting 4096"));
    assert!(advice(128, 128).contains("net.core.somaxconn=4096"));
    // A UDP socket's drops are another matter.
    let udp = |w: &mut Watch| {
        fill(129, 9, 9)(w);
        w.last.listener.protocol = Protocol::Udp;
    };
    assert_eq!(found(own(), udp), ["receive-buffer-overflow"]);
}

/// No sentence names connections, accept() or moved queues.
#[test]
fn udp_is_spoken_of_in_its_own_words() {
    let stopped = |w: &mut Watch| {
        w.sampled.stopped.insert(10, LOOKS);
        w.last.listener.sockets[0].queued = 832;
    };
    let dropped = |w: &mut Watch| w.last.listener.sockets[0].drops = 9;
    let blocked = |w: &mut Watch| {
        w.sampled.blocked_queue.insert(1000, LOOKS / 2);
        w.sampled.queue_filled.insert(1000, LOOKS / 2);
        w.last.listener.sockets[0].queued = 832;
    };
    type Change = fn(&mut Watch);
    let wrong = [
        (
            "stopped-worker",
            "832 bytes of datagrams wait in its queue",
            stopped as Change,
        ),
        (
            "receive-buffer-overflow",
            "9 of them by the socket of process 10",
            dropped,
        ),
        ("blind-hash", "Datagrams wait behind a busy worker", blocked),
    ];
    for (code, words, change) in wrong {
        let mut watch = own();
        watch.first.trace = None;
        watch.last.trace = None;
        watch.last.listener.protocol = Protocol::Udp;
        change(&mut watch);
        let findings = judge(&watch);
        assert_eq!(findings.len(), 1, "{findings:#?}");
        assert_eq!(findings[0].code, code);
        let text = format!("{:?}", findings[0]);
        assert!(
            text.contains(words) && text.contains("wakeone attach udp://:80"),
            "{text}"
        );
        for alien in ["onnection", "accept", "--rescue"] {
            assert!(!text.contains(alien), "{text}");
        }
    }
}

#[test]
fn a_listener_that_closes_on_connections_that_wait() {
    let close = |waited, resets, moved| {
        move |w: &mut Watch| {
            w.sampled.gone.insert(7, waited);
            w.last.host.resets_sent = resets;
            w.last.host.migrated = moved;
        }
    };
    assert_eq!(found(own(), close(1, 1, 0)), ["reload-resets-queue"]);
    assert_eq!(found(own(), close(0, 1, 0)), NONE);
    assert_eq!(found(own(), close(1, 0, 0)), NONE, "accepted before");
    assert_eq!(found(own(), close(3, 3, 3)), NONE, "moved");
    assert_eq!(found(own(), close(3, 3, 2)), ["reload-resets-queue"]);
}

#[test]
fn herds_by_the_way_they_wait() {
    let wake = |connections, wakeups| {
        move |w: &mut Watch| {
            trace(w).connections = connections;
            trace(w).wakeups = wakeups;
        }
    };
    for (means, code) in [
        (Means::EpollWakeAll, "epoll-exclusive-missing"),
        (Means::EpollEdge, "epoll-exclusive-missing"),
        (Means::Poll, "thundering-herd"),
        (Means::Accept, "thundering-herd"),
    ] {
        assert_eq!(found(shared(means), wake(100, 180)), [code]);
        assert_eq!(found(shared(means), wake(100, 179)), NONE);
        assert_eq!(found(shared(means), wake(50, 200)), [code]);
        assert_eq!(found(shared(means), wake(49, 200)), NONE);
    }
    // A kernel without the probe tells of no wake-ups, and a herd that nobody counted is none.
    let uncounted = |w: &mut Watch| {
        wake(100, 200)(w);
        trace(w).gaps.wakeups = true;
    };
    assert_eq!(found(shared(Means::Poll), uncounted), NONE);
    // Herds are found where accept() cannot be traced.
    let blind = |w: &mut Watch| {
        wake(100, 200)(w);
        trace(w).gaps.accepts = true;
    };
    assert_eq!(found(shared(Means::Poll), blind), ["thundering-herd"]);
    // One process alone is no herd.
    let alone = |w: &mut Watch| {
        wake(100, 200)(w);
        w.last.workers.retain(|pid, _| *pid == 10);
    };
    assert_eq!(found(shared(Means::Poll), alone), NONE);
}

/// Worker 10 got `taken` of 400 connections and was busy for this share of the looks.
fn favour(taken: u64, busy: f64) -> impl Fn(&mut Watch) {
    move |w| {
        let rest = (400 - taken) / 3;
        take(w, [taken, rest, rest, rest]);
        let waited = (LOOKS as f64 * (1.0 - busy)).round();
        w.sampled.waiting.insert(10, waited as u64);
    }
}

#[test]
fn the_last_to_sleep_gets_most() {
    let lifo = |means, taken, busy| found(shared(means), favour(taken, busy));
    assert_eq!(lifo(Means::EpollExclusive, 151, 0.21), ["lifo-imbalance"]);
    assert_eq!(lifo(Means::EpollExclusive, 148, 0.21), NONE, "1.48 of 1.5");
    assert_eq!(lifo(Means::EpollExclusive, 400, 0.19), NONE, "no load");
    assert_eq!(lifo(Means::Accept, 400, 0.5), NONE, "first in, first out");
    let few = |w: &mut Watch| {
        take(w, [49, 0, 0, 0]);
        w.sampled.waiting.insert(10, 0);
    };
    assert_eq!(found(shared(Means::EpollExclusive), few), NONE);
    // With a socket each it is not the order of sleeping.
    assert_eq!(found(own(), favour(400, 0.5)), NONE);
}

#[test]
fn two_workers_are_uneven_from_less_on() {
    let two = |taken: u64| {
        move |w: &mut Watch| {
            take(w, [taken, 100 - taken, 0, 0]);
            w.last.workers.retain(|pid, _| *pid < 12);
            w.sampled.waiting.insert(10, 0);
        }
    };
    let exclusive = || shared(Means::EpollExclusive);
    assert_eq!(found(exclusive(), two(70)), ["lifo-imbalance"]);
    assert_eq!(found(exclusive(), two(69)), NONE);
}

#[test]
fn connections_that_were_open_before_are_part_of_the_load() {
    let kept = |open: [u32; 4], busy: f64| {
        move |w: &mut Watch| {
            favour(100, busy)(w);
            take(w, [0; 4]);
            for (pid, open) in PIDS.iter().zip(open) {
                w.last.workers.get_mut(pid).expect("worker").active = open;
            }
        }
    };
    let exclusive = || shared(Means::EpollExclusive);
    assert_eq!(
        found(exclusive(), kept([30, 10, 10, 10], 0.5)),
        ["lifo-imbalance"]
    );
    assert_eq!(
        found(exclusive(), kept([22, 13, 13, 12], 0.5)),
        NONE,
        "1.47 of 1.5"
    );
    assert_eq!(
        found(exclusive(), kept([30, 10, 10, 10], 0.1)),
        NONE,
        "no load"
    );
    assert_eq!(
        found(exclusive(), kept([49, 0, 0, 0], 0.5)),
        NONE,
        "too few"
    );
}

#[test]
fn sockets_of_udp_that_are_no_group() {
    let none = |why| {
        move |w: &mut Watch| {
            w.last.listener.protocol = Protocol::Udp;
            w.ungrouped = why;
        }
    };
    for why in [
        Ungrouped::AddressOnly,
        Ungrouped::Mixed,
        Ungrouped::AfterBind,
        Ungrouped::Users,
    ] {
        assert_eq!(found(own(), none(Some(why))), ["no-group"]);
    }
    assert_eq!(
        found(own(), none(Some(Ungrouped::Multicast))),
        NONE,
        "it is meant"
    );
    assert_eq!(found(own(), none(None)), NONE);
}

#[test]
fn what_the_figures_leave_out_is_said() {
    let said = |shape, name: &str, pools| {
        let mut watch = healthy(shape, Means::EpollWakeAll);
        watch.pools = pools;
        watch.last.workers.get_mut(&11).expect("worker").name = name.into();
        notes(&watch).join(" ")
    };
    let passes = said(Shape::PassesDescriptors, "node", false);
    assert!(
        passes.contains("NODE_CLUSTER_SCHED_POLICY=none"),
        "{passes}"
    );
    let passes = said(Shape::PassesDescriptors, "server", true);
    assert!(
        passes.contains("not seen") && !passes.contains("NODE"),
        "{passes}"
    );
    assert!(said(Shape::HandsToThreads, "server", false).contains("handed to"));
    assert!(said(Shape::Shared, "puma", true).contains("such a thread"));
    assert_eq!(said(Shape::Shared, "node", false), "");
}

#[test]
fn a_worker_that_answers_none_is_told_from_clients_that_stay() {
    let keep = |active: [u32; 4]| {
        move |w: &mut Watch| {
            take(w, [100; 4]);
            for (pid, active) in PIDS.iter().zip(active) {
                w.last.workers.get_mut(pid).expect("worker").active = active;
            }
        }
    };
    assert_eq!(found(own(), keep([0, 0, 100, 0])), ["stuck-worker"]);
    assert_eq!(found(own(), keep([0, 100, 95, 20])), ["stuck-worker"]);
    assert_eq!(found(own(), keep([0, 0, 80, 0])), NONE, "it answers some");
    assert_eq!(found(own(), keep([100; 4])), NONE, "all clients stay");
    let few = |w: &mut Watch| {
        keep([0, 0, 9, 0])(w);
        take(w, [100, 100, 9, 100]);
    };
    assert_eq!(found(own(), few), NONE);
    // Where attach takes the server, it is the next step.
    let next = |mut watch: Watch| {
        keep([0, 0, 100, 0])(&mut watch);
        judge(&watch)[0].next.join("; ")
    };
    assert!(next(own()).contains("wakeone attach"));
    assert!(next(shared(Means::EpollWakeAll)).contains("wakeone attach"));
    assert!(!next(shared(Means::Accept)).contains("wakeone attach"));
}

#[test]
fn connections_that_one_idle_worker_keeps_are_no_problem_yet() {
    let mut watch = healthy(Shape::Shared, Means::EpollWakeAll);
    watch.last.workers.get_mut(&11).expect("worker").active = 60;
    watch.sampled.waiting.insert(11, LOOKS * 97 / 100);
    assert_eq!(codes(&watch), NONE);
    let said = notes(&watch).join(" ");
    assert!(said.contains("process 11 has 60 of"), "{said}");
    assert!(said.contains("idle 97 %"), "{said}");
    watch.sampled.waiting.insert(11, LOOKS / 2);
    assert_eq!(codes(&watch), ["lifo-imbalance"]);
    assert_eq!(notes(&watch), [""; 0]);
}

/// Untraced, and each worker has used so many ms of CPU a second.
fn cpu(ms: [u64; 4]) -> impl Fn(&mut Watch) {
    move |w: &mut Watch| {
        (w.first.trace, w.last.trace) = (None, None);
        w.sampled.waiting.insert(10, LOOKS / 2);
        for (pid, ms) in PIDS.iter().zip(ms) {
            w.last.workers.get_mut(pid).expect("worker").cpu_ns = ms * SECONDS * 1_000_000;
        }
    }
}

#[test]
fn a_unix_socket_gets_the_advice_that_fits_it() {
    let unix = |means: Means, change: &dyn Fn(&mut Watch)| {
        let mut watch = shared(means);
        for looks in [&mut watch.first, &mut watch.last] {
            looks.listener.protocol = Protocol::Unix;
            looks.listener.address = "unix:/run/app.sock".parse().expect("address");
            looks.host.passive_opens = looks.at_ns;
        }
        change(&mut watch);
        assert_eq!(watch.totals().connections, 0, "those of TCP");
        judge(&watch)
    };
    let found = unix(Means::EpollExclusive, &cpu([400, 50, 50, 50]));
    assert_eq!(found[0].code, "lifo-imbalance");
    assert!(
        found[0].next[0].contains("`wakeone attach unix:/run/app.sock`"),
        "{found:?}"
    );
    // Nothing is told of SO_REUSEPORT, nor of moved queues.
    let stopped = |w: &mut Watch| {
        cpu([0; 4])(w);
        w.sampled.stopped = [(11, LOOKS)].into();
    };
    for (means, advice) in [
        (Means::EpollWakeAll, "wakeone attach unix:/run/app.sock"),
        (Means::Poll, "UNIX sockets have no SO_REUSEPORT"),
    ] {
        let found = unix(means, &stopped);
        assert_eq!(found[0].code, "stopped-worker");
        let next = found[0].next.join(" ");
        assert!(
            next.contains(advice) && !next.contains("--rescue"),
            "{next}"
        );
    }
}

#[test]
fn without_tracing_the_cpu_tells_who_has_the_load() {
    let exclusive = || shared(Means::EpollExclusive);
    assert_eq!(
        found(exclusive(), cpu([400, 50, 50, 50])),
        ["lifo-imbalance"]
    );
    assert_eq!(found(exclusive(), cpu([100, 90, 90, 90])), NONE);
    assert_eq!(found(exclusive(), cpu([40, 1, 1, 1])), NONE, "too little");
}

#[test]
fn the_option_without_the_sockets() {
    let one = |reuseport, taken| {
        move |w: &mut Watch| {
            favour(taken, 0.5)(w);
            w.reuseport = reuseport;
        }
    };
    let accept = || shared(Means::Poll);
    assert_eq!(found(accept(), one(Some(true), 151)), ["group-of-one"]);
    assert_eq!(found(accept(), one(Some(true), 100)), NONE, "it is even");
    assert_eq!(found(accept(), one(Some(false), 400)), NONE);
    assert_eq!(found(accept(), one(None, 400)), NONE);
    // One process, of one thread or of many, does not keep up.
    let alone = |us, reuseport| {
        move |w: &mut Watch| {
            wait_long(w, us, 60);
            w.reuseport = Some(reuseport);
            w.last.workers.retain(|pid, _| *pid == 10);
        }
    };
    let threads = || healthy(Shape::SharedByThreads, Means::EpollWakeAll);
    let single = || healthy(Shape::Single, Means::EpollEdge);
    assert_eq!(found(threads(), alone(400_000, true)), ["group-of-one"]);
    assert_eq!(found(single(), alone(400_000, true)), ["group-of-one"]);
    assert_eq!(found(threads(), alone(400_000, false)), ["workers-busy"]);
    assert_eq!(found(threads(), alone(100, true)), NONE);
}

#[test]
fn multipath_tcp() {
    let mptcp = |w: &mut Watch| w.last.listener.protocol = Protocol::Mptcp;
    assert_eq!(found(own(), mptcp), ["mptcp-listener"]);
}

#[test]
fn a_flow_that_is_too_much_for_its_worker() {
    let flows = |count| move |w: &mut Watch| w.heavy_flows = count;
    assert_eq!(found(own(), flows(2)), ["heavy-flow"]);
    assert_eq!(found(own(), flows(0)), [""; 0]);
}

/// A watch of QUIC's datagrams.
fn quic(mut watch: Watch) -> Watch {
    watch.last.listener.protocol = Protocol::Udp;
    (watch.first.trace, watch.last.trace) = (None, None);
    watch.sampled.datagrams = Datagrams { long: 9, others: 0 };
    watch.has_program = Some(false);
    watch
}

#[test]
fn packets_of_quic_that_several_workers_read() {
    let one = || quic(shared(Means::EpollWakeAll));
    let found = judge(&one());
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(found[0].code, "quic-scattered");
    assert!(found[0].evidence[0].contains("4 processes read one socket on 127.0.0.1:80"));
    assert!(found[0].next[0].contains("`wakeone run --split --affinity quic -- COMMAND`"));
    assert!(
        found[0].next[1].contains("`wakeone attach udp://:80 --affinity quic`"),
        "{found:#?}"
    );
    // Others' datagrams, and a single worker's.
    let others = |w: &mut Watch| w.sampled.datagrams.others = 9;
    assert_eq!(self::found(one(), others), NONE);
    let alone = |w: &mut Watch| w.last.workers.retain(|pid, _| *pid == 10);
    assert_eq!(self::found(one(), alone), NONE);
    // Threads may have their connections in common.
    let threads = quic(healthy(Shape::SharedByThreads, Means::Receive));
    assert_eq!(codes(&threads), NONE);
    assert!(notes(&threads)[0].contains("unless these share their connections"));
}

#[test]
fn packets_of_quic_that_go_by_addresses() {
    let said = |affinity: Option<&str>, has_program| {
        let mut watch = quic(own());
        watch.affinity = affinity.map(str::to_owned);
        watch.has_program = has_program;
        (codes(&watch), notes(&watch).join(" "))
    };
    let (codes, note) = said(None, Some(false));
    assert_eq!(codes, NONE);
    assert!(
        note.contains("as in a reload; `wakeone attach udp://:80 --affinity quic`"),
        "{note}"
    );
    // A program chooses, or that may not be seen.
    for has_program in [Some(true), None] {
        assert_eq!(said(None, has_program), (Vec::new(), String::new()));
    }
    assert_eq!(said(Some("quic"), Some(true)), (Vec::new(), String::new()));
    let (codes, note) = said(Some("flow"), Some(true));
    assert_eq!(codes, NONE);
    assert!(
        note.contains("address changes; `--affinity quic` of"),
        "{note}"
    );
    let (codes, note) = said(Some("none"), Some(true));
    assert_eq!(
        (&codes[..], &*note),
        (&["quic-scattered".to_owned()][..], "")
    );
}

#[test]
fn who_keeps_a_listener_of_a_worker_that_has_ended() {
    let kept = |pids| move |w: &mut Watch| w.orphans = pids;
    assert_eq!(found(own(), kept(vec![77])), ["orphan"]);
    assert_eq!(found(own(), kept(vec![])), NONE);
}

#[test]
fn pinned_to_one_cpu_beside_others() {
    let pin = |cpus: [Option<u32>; 4], machine| {
        move |w: &mut Watch| {
            w.last.host.cpus = machine;
            for (pid, cpu) in PIDS.iter().zip(cpus) {
                w.last.workers.get_mut(pid).expect("worker").pinned_cpu = cpu;
            }
        }
    };
    let all = [Some(0); 4];
    assert_eq!(found(own(), pin(all, 2)), ["pinned-to-one-cpu"]);
    assert_eq!(found(own(), pin(all, 1)), NONE, "there is no other");
    let pairs = [Some(0), Some(1), Some(0), Some(1)];
    assert_eq!(found(own(), pin(pairs, 2)), NONE, "as even as can be");
    assert_eq!(found(own(), pin(pairs, 4)), ["pinned-to-one-cpu"]);
    let three = [Some(0), Some(0), Some(0), None];
    assert_eq!(found(own(), pin(three, 2)), ["pinned-to-one-cpu"]);
}

#[test]
fn descriptors_run_out() {
    let open = |n| {
        move |w: &mut Watch| {
            w.last.workers.get_mut(&12).expect("worker").descriptors = n;
        }
    };
    assert_eq!(found(own(), open(80)), ["descriptor-limit-near"]);
    assert_eq!(found(own(), open(79)), NONE);
}

#[test]
fn what_happened_before_is_not_counted() {
    let mut watch = own();
    for snapshot in [&mut watch.first, &mut watch.last] {
        snapshot.listener.sockets[0].drops = 9;
        snapshot.host.listen_overflows = 9;
        snapshot.host.resets_sent = 9;
    }
    assert_eq!(codes(&watch), NONE);
    assert_eq!(watch.totals().connections, SECONDS * 100);
    let mut later = watch.clone();
    later.first = watch.last.clone();
    later.last.at_ns += 1_000_000_000;
    assert_eq!(later.totals().connections, 0);
    assert!(later.rows().iter().all(|row| row.cpu == 0.0));
}

#[test]
fn rows_and_totals_add_up() {
    let watch = own();
    let (rows, totals) = (watch.rows(), watch.totals());
    assert_eq!(rows.len(), 4);
    assert!((rows.iter().filter_map(|r| r.share).sum::<f64>() - 1.0).abs() < 1e-9);
    assert!(rows.iter().all(|r| (r.cpu - 0.1).abs() < 1e-9));
    assert_eq!(totals.wakeups_per_connection, Some(1.0));
    assert_eq!(totals.wasted_per_connection, Some(0.0));
    assert_eq!(totals.skew_max_over_mean, Some(1.0));
    assert_eq!(totals.skew_cv, Some(0.0));
    assert!((totals.connections_per_s - 100.0).abs() < 1e-9);
    // A watch is written to a file and read again.
    let text = serde_json::to_string(&watch).expect("JSON");
    let again: Watch = serde_json::from_str(&text).expect("a watch");
    assert_eq!(again, watch);
}

#[test]
fn packets_that_are_no_connections_are_not_dropped_ones() {
    let dropped = |drops: [u32; 2], of_the_namespace| {
        let mut watch = own();
        for (socket, drops) in watch.last.listener.sockets.iter_mut().zip(drops) {
            socket.drops = drops;
        }
        watch.last.host.listen_drops = of_the_namespace;
        let queues = watch.queues().iter().map(|q| q.dropped).take(2).collect();
        (watch.totals().dropped, queues)
    };
    // TCP_DEFER_ACCEPT holds ACKs back, and the socket counts them.
    assert_eq!(dropped([8288, 0], 0), (0, vec![0, 0]));
    assert_eq!(dropped([8288, 9], 5), (5, vec![5, 5]));
    assert_eq!(dropped([3, 1], 70), (4, vec![3, 1]));
}

#[test]
fn an_event_loop_that_hangs_in_accept() {
    let hang = |seen| {
        move |w: &mut Watch| {
            w.sampled.sights = 10;
            w.sampled.accepts_in_loop.insert(12, seen);
            w.sampled.unread = Waits::of([20_000]);
            w.last.workers.get_mut(&12).expect("worker").active = 1;
        }
    };
    assert_eq!(found(own(), hang(6)), ["blocking-listener"]);
    assert_eq!(
        found(shared(Means::EpollEdge), hang(10)),
        ["blocking-listener"]
    );
    // It takes one from time to time.
    assert_eq!(found(own(), hang(5)), NONE);
    // Other threads answer, as Apache's.
    let is_read = |w: &mut Watch| {
        hang(10)(w);
        w.sampled.unread = Waits::default();
    };
    assert_eq!(found(own(), is_read), NONE);
    // It has none that wait for an answer.
    let has_none = |w: &mut Watch| {
        hang(6)(w);
        w.last.workers.get_mut(&12).expect("worker").active = 0;
    };
    assert_eq!(found(own(), has_none), NONE);
    let single = |w: &mut Watch| {
        hang(1)(w);
        w.sampled.sights = 1;
    };
    assert_eq!(found(own(), single), NONE);
}

#[test]
fn a_worker_that_spins() {
    /// Worker 12 uses this part of a CPU, that part of it in the kernel, and accept() fails so often a second.
    fn spin(cpu: f64, kernel: f64, fails_per_s: u64) -> impl Fn(&mut Watch) {
        move |w| {
            let look = w.last.workers.get_mut(&12).expect("worker");
            (look.cpu_ns, look.waiting) = ((cpu * 1e9) as u64 * SECONDS, false);
            look.system_ns = (kernel * 1e9) as u64 * SECONDS;
            w.sampled.waiting.remove(&12);
            let worker = trace(w).workers.get_mut(&12).expect("worker");
            (worker.accepted, worker.waits) = (0, Waits::default());
            worker.accepted_empty = fails_per_s * SECONDS;
        }
    }
    assert_eq!(found(own(), spin(0.9, 0.5, 1000)), ["accept-spin"]);
    // In epoll_wait, say, without a call of accept.
    assert_eq!(found(own(), spin(1.0, 0.15, 0)), ["accept-spin"]);
    // It computes, and it sleeps now and then.
    assert_eq!(found(own(), spin(1.0, 0.1, 999)), NONE);
    assert_eq!(found(own(), spin(0.8, 0.5, 5000)), NONE);
    // A request that it works on makes many calls.
    let request = |w: &mut Watch| {
        spin(1.0, 0.9, 0)(w);
        w.last.workers.get_mut(&12).expect("worker").active = 1;
    };
    assert_eq!(found(own(), request), NONE);
    // It takes connections, or some wait for it.
    let takes = |w: &mut Watch| {
        spin(1.0, 0.5, 5000)(w);
        trace(w).workers.get_mut(&12).expect("worker").accepted = 1;
    };
    assert_eq!(found(own(), takes), NONE);
    let filled = |w: &mut Watch| {
        spin(1.0, 0.5, 5000)(w);
        w.sampled.queue_highest.insert(1002, 1);
    };
    assert_eq!(found(own(), filled), NONE);
    // It had a CPU for half of the time only.
    let waits_for_a_cpu = |w: &mut Watch| {
        spin(0.5, 0.3, 5000)(w);
        w.last.workers.get_mut(&12).expect("worker").run_delay_ns = SECONDS * 500_000_000;
    };
    assert_eq!(found(own(), waits_for_a_cpu), ["accept-spin"]);
    let untraced = |w: &mut Watch| {
        spin(1.0, 0.5, 0)(w);
        (w.first.trace, w.last.trace) = (None, None);
    };
    assert_eq!(found(own(), untraced), ["accept-spin"]);
}
