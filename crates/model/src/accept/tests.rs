use super::*;
use crate::listener::{Polled, Thread};

const IN: u32 = 1;

fn process(pid: u32, parent: u32, holds: &[u64]) -> Process {
    Process {
        pid,
        parent,
        name: "server".into(),
        holds: holds.to_vec(),
        descriptors: Vec::new(),
        polls: Vec::new(),
        rings: false,
        connections: 0,
        threads: Vec::new(),
    }
}

impl Process {
    fn thread(mut self, wait: Wait) -> Self {
        let tid = self.pid * 100 + self.threads.len() as u32;
        self.threads.push(Thread { tid, wait });
        self
    }

    fn epoll(mut self, epoll: i32, inode: u64, events: u32) -> Self {
        self.polls.push(Polled {
            epoll,
            inode,
            events,
        });
        self.thread(Wait::Epoll(epoll))
    }
}

fn named(snapshots: Vec<Vec<Process>>) -> (String, Confidence) {
    let snapshots: Vec<ProcessSnapshot> = snapshots
        .into_iter()
        .map(|processes| ProcessSnapshot { processes })
        .collect();
    let model = identify(Protocol::Tcp, &snapshots);
    assert!(!model.evidence.is_empty() && !model.describe().is_empty());
    (model.name(), model.confidence)
}

#[test]
fn shared_sockets_by_the_way_of_waiting() {
    let master = || process(1, 0, &[7]).thread(Wait::Other(34));
    let pair = |one: fn(Process) -> Process| {
        vec![vec![
            master(),
            one(process(2, 1, &[7])),
            one(process(3, 1, &[7])),
        ]]
    };
    for (name, way) in [
        (
            "shared-accept",
            (|p| p.thread(Wait::Accept(7))) as fn(Process) -> Process,
        ),
        ("shared-poll", |p| p.thread(Wait::Poll(vec![7]))),
        ("shared-poll", |p| p.thread(Wait::PollUnseen)),
        ("shared-epoll-wake-all", |p| p.epoll(4, 7, IN)),
        ("shared-epoll-edge", |p| p.epoll(4, 7, IN | EDGE)),
        ("shared-epoll-exclusive", |p| p.epoll(4, 7, IN | EXCLUSIVE)),
    ] {
        assert_eq!(
            named(pair(way)),
            (name.into(), Confidence::Certain),
            "{name}"
        );
    }
}

#[test]
fn who_inherited_the_epoll_set_of_its_parent_is_no_worker() {
    let busy = |one: Process| Process {
        threads: Vec::new(),
        ..one.epoll(4, 7, IN)
    };
    let worker = || process(2, 1, &[7]).epoll(4, 7, IN);
    let pool = || busy(process(3, 2, &[7])).thread(Wait::Futex);
    let seen = |processes: Vec<Process>| {
        let waiters = waiters(&[ProcessSnapshot { processes }]);
        waiters.get(&7).map(|pids| pids.iter().copied().collect())
    };
    assert_eq!(seen(vec![worker(), pool()]), Some(vec![2]));
    let computes = busy(process(2, 1, &[7])).thread(Wait::Running);
    assert_eq!(seen(vec![computes, pool()]), Some(vec![2]), "it is busy");
    // Of a set that a master made for its workers, each waits now and then.
    let child = process(3, 2, &[7]).epoll(4, 7, IN);
    assert_eq!(seen(vec![worker(), child]), Some(vec![2, 3]));
    let own = busy(process(3, 2, &[7])).epoll(5, 7, IN);
    assert_eq!(seen(vec![worker(), own]), Some(vec![2, 3]));
    let sibling = busy(process(3, 1, &[7])).thread(Wait::Running);
    assert_eq!(seen(vec![worker(), sibling]), Some(vec![2, 3]));
    let helped = vec![vec![process(1, 0, &[7]), worker(), pool()]];
    assert_eq!(
        named(helped).0,
        named(vec![vec![process(1, 0, &[7]), worker()]]).0
    );
}

#[test]
fn one_busy_worker_is_no_mutex() {
    let seen = vec![
        process(2, 1, &[7]).thread(Wait::Accept(7)),
        process(3, 1, &[7]).thread(Wait::Other(0)),
    ];
    assert_eq!(named(vec![seen]).0, "single-accept");
    let both = vec![
        process(2, 1, &[7]).thread(Wait::Accept(7)),
        process(3, 1, &[7]).thread(Wait::Running),
    ];
    let later = vec![
        process(2, 1, &[7]).thread(Wait::Running),
        process(3, 1, &[7]).thread(Wait::Accept(7)),
    ];
    assert_eq!(named(vec![both, later]).0, "shared-accept");
}

#[test]
fn a_mutex_by_its_turns_and_by_its_lock() {
    // nginx accept_mutex: the others wait in epoll without the socket, and take turns under load.
    let turn = |holder: u32| {
        let worker = |pid: u32| {
            let worker = process(pid, 1, &[7]);
            if pid == holder {
                worker.epoll(4, 7, IN)
            } else {
                worker.thread(Wait::Epoll(4))
            }
        };
        vec![process(1, 0, &[7]), worker(2), worker(3)]
    };
    assert_eq!(
        named(vec![turn(2), turn(3)]),
        ("accept-mutex".into(), Confidence::Certain)
    );
    assert_eq!(
        named(vec![turn(2), turn(2)]),
        ("accept-mutex".into(), Confidence::Likely)
    );
    // Apache with two Listens: each has the sockets in its set, and waits for a mutex first.
    let queued = |pid: u32| {
        let worker = process(pid, 1, &[7]);
        Process {
            polls: vec![Polled {
                epoll: 4,
                inode: 7,
                events: IN,
            }],
            ..worker.thread(Wait::Futex)
        }
    };
    let first = process(2, 1, &[7]).epoll(4, 7, IN);
    assert_eq!(
        named(vec![vec![first, queued(3), queued(4)]]),
        ("accept-mutex".into(), Confidence::Likely)
    );
    // It was handed on between the readings of two workers, once.
    let both = vec![
        process(2, 1, &[7]).epoll(4, 7, IN),
        process(3, 1, &[7]).epoll(4, 7, IN),
    ];
    let looks = |torn: usize| {
        let turns = (0..5).flat_map(|_| [turn(2), turn(3)]);
        std::iter::repeat_n(both.clone(), torn)
            .chain(turns)
            .collect()
    };
    assert_eq!(named(looks(1)).0, "accept-mutex");
    assert_eq!(named(looks(2)).0, "shared-epoll-wake-all");
    let locked = vec![
        process(2, 1, &[7]).thread(Wait::Accept(7)),
        process(3, 1, &[7]).thread(Wait::Lock),
    ];
    assert_eq!(
        named(vec![locked]),
        ("accept-mutex".into(), Confidence::Certain)
    );
}

#[test]
fn a_socket_for_each() {
    let own = |pid: u32, inode: u64| process(pid, 1, &[7, 8]).epoll(4, inode, IN | EDGE);
    assert_eq!(
        named(vec![vec![own(2, 7), own(3, 8)]]).0,
        "socket-per-worker"
    );
    let threads = |pid: u32| process(pid, 1, &[7, 8]).epoll(4, 7, IN).epoll(5, 8, IN);
    assert_eq!(named(vec![vec![threads(2)]]).0, "socket-per-thread");
    assert_eq!(
        named(vec![vec![threads(2), threads(3)]]).0,
        "socket-per-thread"
    );
}

#[test]
fn threads_are_the_workers_where_they_wait_for_different_sockets() {
    let seen = |processes: Vec<Process>| threads(&[ProcessSnapshot { processes }]);
    let one = || process(2, 1, &[7, 8]);
    let loops = seen(vec![one().epoll(4, 7, IN).epoll(5, 8, IN)]).expect("threads");
    let waiters = BTreeMap::from([(7, BTreeSet::from([200])), (8, BTreeSet::from([201]))]);
    assert_eq!(loops.waiters, waiters);
    assert_eq!(loops.processes, BTreeMap::from([(200, 2), (201, 2)]));
    let blocking = one().thread(Wait::Accept(7)).thread(Wait::Accept(8));
    assert_eq!(seen(vec![blocking]).expect("threads").waiters, waiters);
    // They share one, or one loop has both, or each process has one.
    assert_eq!(seen(vec![one().epoll(4, 7, IN).epoll(5, 7, IN)]), None);
    assert_eq!(
        seen(vec![
            one().thread(Wait::Poll(vec![7, 8])).thread(Wait::Accept(8))
        ]),
        None
    );
    assert_eq!(
        seen(vec![
            one().epoll(4, 7, IN),
            process(3, 1, &[7, 8]).epoll(4, 8, IN)
        ]),
        None
    );
    // A helper waits for something else.
    assert_eq!(
        seen(vec![one().epoll(4, 7, IN).thread(Wait::Epoll(9))]),
        None
    );
}

#[test]
fn who_holds_a_socket_alone_and_is_busy_has_one_of_its_own() {
    let waits = || process(2, 1, &[7]).thread(Wait::Accept(7));
    let busy = || process(3, 1, &[8]).thread(Wait::Other(230));
    assert_eq!(
        named(vec![vec![waits(), busy()]]),
        ("socket-per-worker".into(), Confidence::Likely)
    );
    // A supervisor's own is none of a worker, and neither is one that both hold.
    let master = || process(1, 0, &[8]).thread(Wait::Other(61));
    assert_eq!(named(vec![vec![master(), waits()]]).0, "single-accept");
    let both = process(2, 1, &[7, 8]).thread(Wait::Accept(7));
    assert_eq!(named(vec![vec![both, busy()]]).0, "single-accept");
}

#[test]
fn one_acceptor_and_what_it_does_with_connections() {
    let acceptor = || process(1, 0, &[7]).epoll(4, 7, IN | EDGE);
    assert_eq!(
        named(vec![vec![acceptor()]]),
        ("single-epoll-edge".into(), Confidence::Certain)
    );
    let serving = Process {
        connections: 3,
        ..process(2, 1, &[])
    };
    assert_eq!(
        named(vec![vec![acceptor(), serving.thread(Wait::Epoll(9))]]),
        ("passes-descriptors".into(), Confidence::Certain)
    );
    let one = Process {
        connections: 1,
        ..process(2, 1, &[])
    };
    let snapshots = [ProcessSnapshot {
        processes: vec![acceptor(), one],
    }];
    let evidence = identify(Protocol::Tcp, &snapshots).evidence;
    let said = "1 process that does not hold the socket holds connections of it";
    assert!(evidence.iter().any(|line| line == said), "{evidence:?}");
    let waiting = process(2, 1, &[]).thread(Wait::Epoll(9));
    assert_eq!(
        named(vec![vec![acceptor(), waiting]]),
        ("passes-descriptors".into(), Confidence::Likely)
    );
    let threads = acceptor().thread(Wait::Epoll(5)).thread(Wait::Epoll(6));
    assert_eq!(named(vec![vec![threads]]).0, "hands-to-threads");
    let pool = acceptor().thread(Wait::Futex).thread(Wait::Futex);
    assert_eq!(
        named(vec![vec![pool]]),
        ("single-epoll-edge".into(), Confidence::Likely)
    );
    let several = process(1, 0, &[7])
        .thread(Wait::Accept(7))
        .thread(Wait::Accept(7));
    assert_eq!(named(vec![vec![several]]).0, "threads-accept");
}

#[test]
fn nobody_waits() {
    let ring = |pid| Process {
        rings: true,
        ..process(pid, 1, &[7]).thread(Wait::IoUring)
    };
    assert_eq!(
        named(vec![vec![ring(2), ring(3)]]),
        ("shared-io-uring".into(), Confidence::Likely)
    );
    assert_eq!(named(vec![vec![ring(2)]]).0, "single-io-uring");
    let four = Process {
        holds: vec![7, 8, 9, 10],
        ..ring(2)
    };
    assert_eq!(named(vec![vec![four]]).0, "socket-per-thread");
    let busy = process(2, 1, &[7]).thread(Wait::Running);
    assert_eq!(
        named(vec![vec![busy]]),
        ("unknown".into(), Confidence::Possible)
    );
    assert_eq!(named(Vec::new()).0, "unknown");
}

#[test]
fn a_parent_that_keeps_a_socket_beside_its_workers_is_no_worker() {
    let kept = |processes: Vec<Process>| fallback_holders(&[ProcessSnapshot { processes }]);
    let master = || process(1, 0, &[7]).thread(Wait::Other(61));
    let worker = |pid, inode| process(pid, 1, &[inode]).thread(Wait::Accept(inode));
    let split = || vec![master(), worker(2, 8), worker(3, 9)];
    assert_eq!(kept(split()), BTreeMap::from([(7, 1)]));
    // It accepts too, or has done so.
    let mut accepts = split();
    accepts[0] = process(1, 0, &[7]).thread(Wait::Accept(7));
    assert_eq!(kept(accepts), BTreeMap::new());
    let mut serves = split();
    serves[0].connections = 1;
    assert_eq!(kept(serves), BTreeMap::new());
    // A worker that hangs is the others' brother.
    let mut hangs = split();
    hangs.push(process(4, 1, &[10]).thread(Wait::Stopped));
    assert_eq!(kept(hangs), BTreeMap::from([(7, 1)]));
    let brothers = vec![process(4, 1, &[10]).thread(Wait::Stopped), worker(2, 8)];
    assert_eq!(kept(brothers), BTreeMap::new());
    // Nobody waits, or all share it.
    assert_eq!(kept(vec![master()]), BTreeMap::new());
    assert_eq!(kept(vec![master(), worker(2, 7)]), BTreeMap::new());
}
