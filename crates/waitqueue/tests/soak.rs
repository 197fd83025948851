//! No wake-up is lost: a million random operations by several threads, where one lost wake-up stops them all.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use wakeone_waitqueue::{Acceptor, Kind, Policy, Refused, Slept, WaitQueue, Waiter};

/// Nothing may stand still for longer than this.
const STALL: Duration = Duration::from_secs(20);

/// Threads that connect and wait for room; accept; accept for a while only and then go away; stand in line and leave
/// without a look; watch. Few connections are under way at any time, so that threads sleep most of the time. A thread
/// that goes away stays away until something moves. So one lost wake-up stops everything.
struct Soak {
    acceptor: Acceptor<u64>,
    /// Where connecting threads wait for room.
    room: WaitQueue,
    operations: AtomicU64,
    accepted: AtomicU64,
    sum: AtomicU64,
}

impl Soak {
    fn new(policy: Policy, backlog: usize) -> Self {
        Self {
            acceptor: Acceptor::new(policy, backlog),
            room: WaitQueue::new(policy),
            operations: AtomicU64::new(0),
            accepted: AtomicU64::new(0),
            sum: AtomicU64::new(0),
        }
    }

    fn operation(&self) {
        self.operations.fetch_add(1, Ordering::Relaxed);
    }

    /// Connects `numbers`, each once, and waits for room.
    fn connect(&self, numbers: impl Iterator<Item = u64>) {
        let waiter = &mut Waiter::new();
        for number in numbers {
            self.operation();
            let connected = self.room.wait_until(waiter, Kind::Exclusive, || {
                match self.acceptor.connect(number) {
                    Ok(_) => Some(true),
                    Err(Refused::Full(_)) => None,
                    Err(Refused::Closed(_)) => Some(false),
                }
            });
            if !connected {
                return;
            }
        }
    }

    /// Accepts. A thread that is not `steady` does so for a while only, and then goes away until another has accepted.
    fn accept(&self, steady: bool, rng: &mut StdRng) {
        let waiter = &mut Waiter::new();
        loop {
            self.operation();
            let accepted = if steady {
                self.acceptor.accept(waiter)
            } else {
                let timeout = Duration::from_micros(rng.random_range(0..100));
                match self.acceptor.accept_within(waiter, timeout) {
                    Ok(accepted) => accepted,
                    Err(_) => {
                        self.stay_away();
                        continue;
                    }
                }
            };
            let Some(number) = accepted else { return };
            self.sum.fetch_add(number, Ordering::Relaxed);
            self.accepted.fetch_add(1, Ordering::Relaxed);
            self.room.wake_one();
        }
    }

    fn stay_away(&self) {
        let before = self.accepted.load(Ordering::Relaxed);
        while self.accepted.load(Ordering::Relaxed) == before && !self.acceptor.arrivals().closed {
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// Stands in line now and then, and leaves without a look.
    fn pass_by(&self, rng: &mut StdRng) {
        let waiter = &mut Waiter::new();
        while !self.acceptor.arrivals().closed {
            self.operation();
            let queue = if rng.random() {
                &self.room
            } else {
                self.acceptor.queue()
            };
            let mut waiting = queue.prepare(waiter, Kind::Exclusive);
            match rng.random_range(0..3) {
                0 => std::thread::yield_now(),
                1 => std::thread::sleep(Duration::from_micros(rng.random_range(0..50))),
                _ => {
                    let slept = waiting.sleep_for(Duration::from_micros(rng.random_range(0..50)));
                    // A woken waiter that does not want the event has to pass it on.
                    if slept == Slept::Woken {
                        queue.wake_one();
                    }
                }
            }
            waiting.finish();
        }
    }

    fn watch(&self) {
        let waiter = &mut Waiter::new();
        let mut seen = 0;
        loop {
            self.operation();
            let now = self.acceptor.select(waiter, seen);
            if now.closed {
                return;
            }
            assert!(now.total > seen);
            seen = now.total;
        }
    }

    /// Waits until all were accepted; closes everything when nothing moves any more, and reports that.
    fn guard(&self, connections: u64) -> bool {
        let (mut last, mut moved) = (0, Instant::now());
        loop {
            std::thread::sleep(Duration::from_millis(2));
            let now = self.accepted.load(Ordering::Relaxed);
            if now != last {
                (last, moved) = (now, Instant::now());
            }
            let stalled = moved.elapsed() > STALL;
            if now >= connections || stalled {
                self.acceptor.close();
                self.room.wake_abnormal();
                return !stalled;
            }
        }
    }
}

/// Runs until at least `operations` were done; returns how many.
fn soak(policy: Policy, seed: u64, operations: u64, watching: usize) -> u64 {
    const CONNECTING: u64 = 3;
    const ACCEPTING: u64 = 4;
    const STEADY: u64 = 2;
    const PASSING_BY: u64 = 2;
    let mut done = 0;
    let mut round = 0;
    while done < operations {
        let mut rng = StdRng::seed_from_u64(seed + round);
        let connections = 6000;
        let soak = Soak::new(policy, rng.random_range(1..=6));
        let whole = std::thread::scope(|scope| {
            for n in 0..CONNECTING {
                let (soak, numbers) = (
                    &soak,
                    (1..=connections).filter(move |i| i % CONNECTING == n),
                );
                scope.spawn(move || soak.connect(numbers));
            }
            for n in 0..ACCEPTING {
                let (soak, mut rng) = (&soak, StdRng::seed_from_u64(rng.random()));
                scope.spawn(move || soak.accept(n < STEADY, &mut rng));
            }
            for _ in 0..PASSING_BY {
                let (soak, mut rng) = (&soak, StdRng::seed_from_u64(rng.random()));
                scope.spawn(move || soak.pass_by(&mut rng));
            }
            for _ in 0..watching {
                scope.spawn(|| soak.watch());
            }
            soak.guard(connections)
        });
        assert!(
            whole,
            "{policy:?}, seed {}: everything stood still with {} of {connections} accepted, {} queued: a wake-up was lost",
            seed + round,
            soak.accepted.load(Ordering::Relaxed),
            soak.acceptor.arrivals().queued
        );
        assert_eq!(
            soak.sum.load(Ordering::Relaxed),
            connections * (connections + 1) / 2,
            "each once"
        );
        done += soak.operations.load(Ordering::Relaxed);
        round += 1;
    }
    done
}

/// A million over the four policies; ten under `WAKEONE_SOAK=1`.
fn operations() -> u64 {
    let long = std::env::var_os("WAKEONE_SOAK").is_some_and(|v| v == "1");
    if long { 2_500_000 } else { 250_000 }
}

#[test]
fn no_wake_up_is_lost_in_a_million_random_operations() {
    let started = Instant::now();
    let mut done = 0;
    for (policy, watching) in [
        (Policy::WakeAll, 2),
        (Policy::TaskExclusive, 2),
        // No thread watches here: they would swallow wake-ups, which is the paper's own objection and has its own
        // test.
        (Policy::WakeOne, 0),
        (Policy::AlwaysWake, 2),
    ] {
        done += soak(policy, 2000, operations(), watching);
    }
    assert!(done >= 4 * operations());
    eprintln!(
        "{done} operations in {:.1} s",
        started.elapsed().as_secs_f64()
    );
}
