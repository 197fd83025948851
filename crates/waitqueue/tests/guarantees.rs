//! The guarantees of each policy, with threads that really sleep.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::Scope;
use std::time::{Duration, Instant};
use wakeone_waitqueue::{Acceptor, Kind, Policy, Refused, TimedOut, WaitQueue, Waiter};

const ALL: [Policy; 4] = [
    Policy::WakeAll,
    Policy::TaskExclusive,
    Policy::WakeOne,
    Policy::AlwaysWake,
];

/// A bound on everything that ought to happen soon; no test waits that long unless it fails.
const SOON: Duration = Duration::from_secs(20);

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !done() {
        assert!(
            Instant::now() < deadline,
            "not within {} s: {what}",
            SOON.as_secs()
        );
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Sleepers on one queue, which report their wake-ups and wait again.
struct Sleepers<'s> {
    queue: &'s WaitQueue,
    woken: mpsc::Receiver<usize>,
}

impl<'s> Sleepers<'s> {
    /// Lets one thread for each kind wait, enqueued one after another.
    fn start<'e>(
        scope: &'s Scope<'s, 'e>,
        queue: &'s WaitQueue,
        over: &'s AtomicBool,
        kinds: &[Kind],
    ) -> Self {
        let (tell, woken) = mpsc::channel();
        for (n, &kind) in kinds.iter().enumerate() {
            let tell = tell.clone();
            scope.spawn(move || {
                let mut waiter = Waiter::new();
                let mut waiting = queue.prepare(&mut waiter, kind);
                loop {
                    waiting.sleep();
                    if over.load(Ordering::SeqCst) {
                        return;
                    }
                    // Enqueues again before it tells, because the receiver may rely on that.
                    waiting.again();
                    let _ = tell.send(n);
                }
            });
            until("a thread waits", || queue.len() == n + 1);
        }
        Self { queue, woken }
    }

    /// Returns the woken threads, sorted: `count` of them, and no more in the next moments.
    fn woken(&self, count: usize) -> Vec<usize> {
        let mut woken: Vec<usize> = (0..count)
            .map(|_| self.woken.recv_timeout(SOON).expect("too few were woken"))
            .collect();
        if let Ok(surplus) = self.woken.recv_timeout(Duration::from_millis(5)) {
            panic!("{surplus} was woken beside {woken:?}");
        }
        woken.sort_unstable();
        woken
    }
}

fn with_sleepers(policy: Policy, kinds: &[Kind], test: impl FnOnce(&Sleepers<'_>)) {
    let queue = WaitQueue::new(policy);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // The threads end also when the test fails.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            test(&Sleepers::start(scope, &queue, &over, kinds));
        }));
        over.store(true, Ordering::SeqCst);
        queue.wake_abnormal();
        if let Err(panic) = result {
            std::panic::resume_unwind(panic);
        }
    });
}

const E: Kind = Kind::Exclusive;
const S: Kind = Kind::Select;

#[test]
fn exactly_one_exclusive_waiter_is_woken_each_time_and_in_the_order_of_waiting() {
    for policy in [Policy::TaskExclusive, Policy::WakeOne, Policy::AlwaysWake] {
        with_sleepers(policy, &[E; 8], |sleepers| {
            // A woken waiter waits again at the tail: round and round.
            for turn in 0..24 {
                assert_eq!(sleepers.queue.wake_one(), 1, "{policy:?}");
                assert_eq!(
                    sleepers.woken(1),
                    [turn % 8],
                    "{policy:?}: first in, first out"
                );
            }
        });
    }
}

#[test]
fn wake_all_wakes_all_each_time() {
    with_sleepers(Policy::WakeAll, &[E, S, E, E, S, E], |sleepers| {
        for _ in 0..10 {
            assert_eq!(sleepers.queue.wake_one(), 6);
            assert_eq!(sleepers.woken(6), [0, 1, 2, 3, 4, 5]);
        }
    });
}

#[test]
fn who_asked_to_be_always_woken_is_each_time_wherever_it_enqueued() {
    for policy in [Policy::AlwaysWake, Policy::TaskExclusive] {
        with_sleepers(policy, &[E, S, E, S, E, S], |sleepers| {
            for turn in 0..12 {
                assert_eq!(sleepers.queue.wake_one(), 4, "{policy:?}");
                let woken: BTreeSet<usize> = sleepers.woken(4).into_iter().collect();
                let expected = BTreeSet::from([1, 3, 5, [0, 2, 4][turn % 3]]);
                assert_eq!(woken, expected, "{policy:?}");
            }
        });
    }
}

#[test]
fn under_wake_one_select_is_not_woken_each_time_the_obstacle_of_section_3_2() {
    with_sleepers(Policy::WakeOne, &[E, S, E, S], |sleepers| {
        let mut heard = [0; 4];
        for _ in 0..8 {
            assert_eq!(sleepers.queue.wake_one(), 1);
            heard[sleepers.woken(1)[0]] += 1;
        }
        assert_eq!(
            heard, [2; 4],
            "each of two select()-like waiters heard of 2 of 8 events"
        );
    });
}

#[test]
fn the_waker_decides_under_wake_one_and_always_wake_but_not_under_task_exclusive() {
    for (policy, woken) in [
        (Policy::WakeAll, 4),
        (Policy::TaskExclusive, 2),
        (Policy::WakeOne, 4),
        (Policy::AlwaysWake, 4),
    ] {
        with_sleepers(policy, &[E, S, E, E], |sleepers| {
            assert_eq!(sleepers.queue.wake_all(), woken, "{policy:?}");
            sleepers.woken(woken);
        });
    }
}

#[test]
fn abnormal_close_wakes_everyone() {
    for policy in ALL {
        let acceptor = Acceptor::<u32>::new(policy, 10);
        std::thread::scope(|scope| {
            let accepting: Vec<_> = (0..6)
                .map(|_| scope.spawn(|| acceptor.accept(&mut Waiter::new())))
                .collect();
            let selecting: Vec<_> = (0..3)
                .map(|_| scope.spawn(|| acceptor.select(&mut Waiter::new(), 0)))
                .collect();
            until("all wait", || acceptor.waiting() == 9);
            assert_eq!(acceptor.close(), 9, "{policy:?}");
            for thread in accepting {
                assert_eq!(thread.join().unwrap(), None);
            }
            for thread in selecting {
                assert!(thread.join().unwrap().closed);
            }
        });
        assert_eq!(acceptor.connect(1), Err(Refused::Closed(1)));
        assert_eq!(
            acceptor.accept(&mut Waiter::new()),
            None,
            "nobody waits for a closed one"
        );
    }
}

#[test]
fn connections_are_accepted_in_order_and_the_backlog_holds() {
    let acceptor = Acceptor::new(Policy::AlwaysWake, 2);
    assert_eq!(acceptor.connect(1), Ok(0));
    assert_eq!(acceptor.connect(2), Ok(0));
    assert_eq!(acceptor.connect(3), Err(Refused::Full(3)));
    let waiter = &mut Waiter::new();
    assert_eq!(
        (acceptor.accept(waiter), acceptor.accept(waiter)),
        (Some(1), Some(2))
    );
    assert_eq!(
        acceptor.accept_within(waiter, Duration::from_millis(1)),
        Err(TimedOut)
    );
    assert_eq!(acceptor.waiting(), 0, "who gave up has left");
    assert_eq!(acceptor.arrivals().total, 2);
}

/// Connects `count` times, each after the last was accepted and all wait again. Returns how many arrivals each
/// select()-like thread saw, and whether all connections were accepted.
fn watched(policy: Policy, accepting: usize, selecting: usize, count: u64) -> (Vec<u64>, bool) {
    let acceptor = Acceptor::new(policy, 100);
    let told = Mutex::new(vec![0; selecting]);
    let all = std::thread::scope(|scope| {
        for n in 0..selecting {
            let (acceptor, told) = (&acceptor, &told);
            scope.spawn(move || {
                let waiter = &mut Waiter::new();
                let mut seen = 0;
                loop {
                    let now = acceptor.select(waiter, seen);
                    if now.closed {
                        return;
                    }
                    seen = now.total;
                    told.lock().unwrap()[n] += 1;
                }
            });
        }
        // Behind the others in line.
        until("select()-like threads wait", || {
            acceptor.waiting() == selecting
        });
        for _ in 0..accepting {
            scope.spawn(|| while acceptor.accept(&mut Waiter::new()).is_some() {});
        }
        // A woken waiter leaves the queue at once and comes back: all wait again only once it is over.
        let all_wait = || until("all wait", || acceptor.waiting() == accepting + selecting);
        for connection in 0..count {
            all_wait();
            acceptor.connect(connection).unwrap();
        }
        all_wait();
        let all = acceptor.arrivals().queued == 0;
        acceptor.close();
        all
    });
    (told.into_inner().unwrap(), all)
}

#[test]
fn select_hears_of_every_connection_under_always_wake() {
    let (told, all) = watched(Policy::AlwaysWake, 3, 2, 20);
    assert_eq!(told, [20, 20]);
    assert!(all, "and every connection is accepted");
}

#[test]
fn select_under_wake_one_misses_connections_and_swallows_the_wake_up_of_an_accept() {
    let (told, all) = watched(Policy::WakeOne, 1, 1, 1);
    assert_eq!(told, [1], "the select()-like thread stood first");
    assert!(!all, "the connection waits beside a sleeping accept()");
    let (told, _) = watched(Policy::WakeOne, 3, 2, 20);
    assert!(
        told.iter().sum::<u64>() < 40,
        "{told:?} of 20 connections each"
    );
}

#[test]
fn a_chosen_waiter_that_leaves_passes_the_wake_up_on() {
    for policy in [Policy::TaskExclusive, Policy::WakeOne, Policy::AlwaysWake] {
        let queue = WaitQueue::new(policy);
        let (mut a, mut b) = (Waiter::new(), Waiter::new());
        let first = queue.prepare(&mut a, E);
        let second = queue.prepare(&mut b, E);
        assert_eq!(queue.wake_one(), 1);
        assert!(first.is_woken() && !second.is_woken());
        drop(first);
        assert!(second.is_woken(), "{policy:?}");
    }
}

#[test]
fn a_wake_up_between_the_check_and_the_sleep_is_not_lost() {
    for policy in ALL {
        let queue = WaitQueue::new(policy);
        let mut waiter = Waiter::new();
        let mut waiting = queue.prepare(&mut waiter, E);
        assert_eq!(queue.wake_one(), 1);
        // Would sleep for ever.
        waiting.sleep();
    }
}
