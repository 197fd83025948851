//! Listeners on a private port, which a lookup program finds. A move of their queue takes as long on a busy port as on
//! an empty one.

use std::net::Ipv4Addr;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use wakeone_bpf::BUILD;
use wakeone_bpf::table::flag;
use wakeone_control::policy::Policy;
use wakeone_kernel::socket::private::Place;
use wakeone_steering::dispatcher::{Dispatcher, Plan};

use crate::from::connect_from;
use crate::ground::*;
use crate::patience::slowness;

const SLOTS: usize = 2;

/// How many times the time on an empty port a move on a full one may take, where the listeners have a private port.
const BOUND: u32 = 3;

/// A group of two. Its connections come to [`V4`], wherever its listeners are.
struct Scene {
    ground: Ground,
    place: Option<Place>,
}

impl Scene {
    fn new(private: bool) -> Option<Self> {
        let mut port = 8080;
        let ground = Ground::new(|| {
            if private {
                // A listener that is bound to port 0 would lose its port in a move.
                let any = bind("127.0.0.1:0");
                port = any.local_addr().expect("address").port();
            }
            let address = format!("127.0.0.1:{port}");
            (0..SLOTS).map(|_| listen(&address, BACKLOG)).collect()
        })?;
        let place = private.then(|| Place {
            public: V4.parse().expect("address"),
            dual_stack: false,
            private_port: port,
        });
        Some(Self { ground, place })
    }

    fn start(&self) -> Dispatcher {
        let plan = Plan {
            lookup: self.place.as_slice(),
            ..self.ground.plan(Policy::RoundRobin)
        };
        self.ground.try_start(&plan).expect("dispatcher")
    }

    /// Returns the shortest time of several moves of one connection.
    fn move_time(&self, dispatcher: &Dispatcher) -> Duration {
        let measure = |_| {
            let clients = connect_many(V4, SLOTS);
            wait("they wait", || {
                self.ground.queues().iter().sum::<u32>() == SLOTS as u32
            });
            assert_eq!(
                self.ground.queues(),
                [1; SLOTS],
                "{:?}",
                exits(dispatcher.table())
            );
            let slot = dispatcher.table().slot(0);
            slot.mark(flag::STUCK, true);
            dispatcher.table().publish();
            let begun = Instant::now();
            let moved = dispatcher.move_queues(0).expect("move").connections;
            let took = begun.elapsed();
            assert_eq!((moved, self.ground.queues()), (1, vec![0, 2]));
            slot.mark(flag::STUCK, false);
            dispatcher.table().publish();
            drop(self.ground.accept_all());
            drop(clients);
            took
        };
        (0..9).map(measure).min().expect("some")
    }

    /// Leaves that many connections in TIME_WAIT, on the side of the server.
    fn fill(&self, count: usize) {
        const SOURCES: usize = 8;
        for ports in (0..count / SOURCES).collect::<Vec<_>>().chunks(32) {
            let sources =
                (0..SOURCES).flat_map(|source| ports.iter().map(move |port| (source, port)));
            let clients: Vec<_> = sources
                .map(|(source, port)| {
                    // The ports of one address do not suffice for so many in TIME_WAIT.
                    let host = Ipv4Addr::new(127, 0, 1, source as u8 + 1);
                    let from = (host, 10_000 + *port as u16).into();
                    connect_from(from, V4.parse().expect("address"))
                })
                .collect();
            let mut accepted = 0;
            wait("all are accepted", || {
                accepted += self.ground.accept_all().len();
                accepted == clients.len()
            });
        }
    }

    fn end(self, dispatcher: Dispatcher) {
        self.ground.end(dispatcher);
    }
}

/// Returns how long a move takes on an empty port, and on one with that many connections in TIME_WAIT.
fn empty_and_full(private: bool, count: usize) -> Option<(Duration, Duration)> {
    let scene = Scene::new(private)?;
    std::fs::write("/proc/sys/net/ipv4/tcp_max_tw_buckets", "200000").expect("sysctl");
    let dispatcher = scene.start();
    let empty = scene.move_time(&dispatcher);
    scene.fill(count);
    let mut full = scene.move_time(&dispatcher);
    // A busy machine may slow all moves of one series. The walk slows those of each.
    for _ in 0..4 {
        if full > empty * BOUND {
            full = full.min(scene.move_time(&dispatcher));
        }
    }
    scene.end(dispatcher);
    eprintln!("private {private}: {empty:?} on an empty port, {full:?} with {count} in TIME_WAIT");
    Some((empty, full))
}

#[test]
fn a_move_takes_as_long_with_many_connections_as_with_none() {
    // A long run measures the port of a busy server.
    let soak = std::env::var_os("WAKEONE_SOAK").is_some();
    let count = if soak { 100_000 } else { 60_000 } / slowness() as usize;
    let Some((empty, full)) = empty_and_full(true, count) else {
        return;
    };
    assert!(
        full <= empty * BOUND,
        "{full:?} is more than {BOUND} x {empty:?}"
    );
    let (_, plain) = empty_and_full(false, count).expect("as before");
    // With fewer connections the walk over all of them is short.
    if slowness() == 1 {
        assert!(
            plain >= full * 5,
            "without a private port {plain:?}, with it {full:?}"
        );
    }
}

#[test]
fn connections_of_a_private_port_are_counted_moved_and_counted_out() {
    let Some(scene) = Scene::new(true) else {
        return;
    };
    // Each SYN gets a cookie: the program is asked again when the handshake ends.
    std::fs::write("/proc/sys/net/ipv4/tcp_syncookies", "2").expect("sysctl");
    let dispatcher = scene.start();
    let clients = connect_many(V4, 20);
    wait_for_established(dispatcher.table(), 20);
    wait("all wait", || {
        scene.ground.queues().iter().sum::<u32>() == 20
    });
    // The program draws twice for each connection, so all of them may wait in one slot.
    let from = usize::from(scene.ground.queues()[0] == 0);
    dispatcher.table().slot(from).mark(flag::STUCK, true);
    dispatcher.table().publish();
    let moved = dispatcher.move_queues(from).expect("move").connections;
    assert!(moved > 0);
    let mut expected = [0; SLOTS];
    expected[1 - from] = 20;
    wait_for_actives(dispatcher.table(), &expected);
    drop(scene.ground.accept_all());
    drop(clients);
    scene.ground.settle();
    scene.end(dispatcher);
}

#[test]
fn a_listener_that_its_worker_shut_down_is_chosen_no_more() {
    let Some(scene) = Scene::new(true) else {
        return;
    };
    let dispatcher = scene.start();
    rustix::net::shutdown(&scene.ground.listeners[0], rustix::net::Shutdown::Read)
        .expect("shutdown");
    // As the agent does in each of its rounds.
    dispatcher.publish_queues(0);
    let clients = connect_many(V4, 10);
    assert_eq!(
        scene.ground.queues(),
        [0, 10],
        "{:?}",
        exits(dispatcher.table())
    );
    rustix::net::listen(&scene.ground.listeners[0], BACKLOG).expect("listen");
    dispatcher.restore(0).expect("restore");
    let more = connect_many(V4, 10);
    assert_eq!(
        scene.ground.queues(),
        [5, 15],
        "{:?}",
        exits(dispatcher.table())
    );
    drop((clients, more));
    scene.ground.settle();
    scene.end(dispatcher);
}

/// Whether a program can read which socket it chose, which came with Linux 6.2.
fn choices_can_be_read() -> bool {
    use libbpf_rs::btf::{Btf, types::Func};
    let btf = Btf::from_vmlinux().expect("the kernel's types");
    let cast = btf.type_by_name::<Func<'_>>("bpf_cast_to_kern_ctx");
    cast.is_some()
}

#[test]
fn one_that_its_worker_shut_down_is_passed_over_before_any_agent_sees_it() {
    let Some(scene) = Scene::new(true) else {
        return;
    };
    if !choices_can_be_read() {
        return eprintln!("skipped: this kernel has no bpf_cast_to_kern_ctx");
    }
    let dispatcher = scene.start();
    rustix::net::shutdown(&scene.ground.listeners[0], rustix::net::Shutdown::Read)
        .expect("shutdown");
    // The closed listener drops a SYN that it gets. The retry comes a second later, and half of the time to it again.
    let clients: Vec<_> = (0..10).map(|_| begin_connect(V4)).collect();
    wait("all are connected", || clients.iter().all(connected));
    assert_eq!(scene.ground.queues(), [0, 10]);
    assert_eq!(
        exits(dispatcher.table()),
        [("selected", 5), ("retried", 5)],
        "a SYN that was sent again would be one more"
    );
    drop(clients);
    scene.ground.settle();
    scene.end(dispatcher);
}

#[test]
fn of_two_programs_that_choose_for_an_address_the_first_has_the_last_word() {
    let Some(scene) = Scene::new(true) else {
        return;
    };
    let theirs = bind("127.0.0.1:0");
    let port = theirs.local_addr().expect("address").port();
    drop(theirs);
    let first = scene.start();
    let place = Place {
        private_port: port,
        ..scene.place.expect("private")
    };
    let listener = listen(&format!("127.0.0.1:{port}"), BACKLOG);
    let plan = Plan {
        name: "second",
        lookup: &[place],
        ..scene.ground.plan(Policy::RoundRobin)
    };
    let copy = listener.try_clone().expect("descriptor").into();
    let second = Dispatcher::start(&plan, vec![vec![copy]]).expect("dispatcher");
    let clients = connect_many(V4, 4);
    assert_eq!(scene.ground.queues(), [2, 2]);
    // Once it is gone the other program's choice counts.
    second.end(&scene.ground.paths, None);
    let more = connect_many(V4, 2);
    assert_eq!(scene.ground.queues(), [3, 3]);
    drop((clients, more, listener));
    scene.ground.settle();
    scene.end(first);
}

#[test]
fn the_programs_of_another_build_are_replaced_and_connections_go_on() {
    let Some(scene) = Scene::new(true) else {
        return;
    };
    let first = scene.start();
    first.table().build().store(1, Relaxed);
    drop(first);
    let plan = Plan {
        adopt: true,
        lookup: scene.place.as_slice(),
        ..scene.ground.plan(Policy::RoundRobin)
    };
    let second = scene.ground.try_start(&plan).expect("dispatcher");
    assert!(second.kept());
    assert_eq!(second.table().build().load(Relaxed), BUILD);
    let clients = connect_many(V4, 4);
    assert_eq!(scene.ground.queues(), [2, 2], "{:?}", exits(second.table()));
    drop(clients);
    scene.ground.settle();
    scene.end(second);
}
