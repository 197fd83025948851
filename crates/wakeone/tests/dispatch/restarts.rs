//! Workers that come and go for months, a program of another build, and programs of others beside ours.

use std::net::TcpListener;
use std::os::fd::AsRawFd;

use wakeone::dispatcher::Dispatcher;
use wakeone::policy::Policy;
use wakeone::seat::Lent;
use wakeone_kernel::socket::cookie;

use crate::ground::*;

/// More than the map of listeners has room for, twice over.
const CHANGES: usize = 10_000;

/// A listener of ours as if it were another's.
fn lend(socket: &TcpListener) -> (u64, Lent) {
    let lent = Lent {
        pid: std::process::id(),
        fd: socket.as_raw_fd(),
        inode: rustix::fs::fstat(socket).expect("stat").st_ino,
    };
    (cookie(socket).expect("cookie"), lent)
}

/// Starts with one listener of ours that stays.
fn start_beside(ground: &Ground) -> Dispatcher {
    let lent = ground.listeners.iter().map(lend).collect();
    Dispatcher::start_beside(&ground.plan(Policy::RoundRobin), lent).expect("dispatcher")
}

#[test]
fn ten_thousand_workers_come_and_go_and_the_next_one_is_steered() {
    let Some(mut ground) = ground(1, V4) else {
        return;
    };
    let mut dispatcher = start_beside(&ground);
    for change in 0..CHANGES {
        let socket = listen(V4, BACKLOG);
        let (key, lent) = lend(&socket);
        let slot = dispatcher
            .join(key, lent)
            .unwrap_or_else(|error| panic!("change {change}: {error}"));
        assert_eq!(slot, 1, "change {change}");
        drop(socket);
        dispatcher.leave(slot);
    }
    let last = listen(V4, BACKLOG);
    let (key, lent) = lend(&last);
    assert_eq!(dispatcher.join(key, lent).expect("join"), 1);
    ground.listeners.push(last);
    let clients = connect_many(V4, 20);
    assert_eq!(ground.queues(), [10, 10]);
    assert_eq!(exits(dispatcher.table()), [("selected", 20)]);
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn a_listener_that_cannot_join_leaves_its_slot_free() {
    let Some(mut ground) = ground(1, V4) else {
        return;
    };
    let mut dispatcher = start_beside(&ground);
    // Bound and yet to listen: the array of sockets refuses it.
    let silent = bind(V4);
    let (key, lent) = lend(&silent);
    dispatcher.join(key, lent).expect_err("it does not listen");
    assert!(!dispatcher.is_taken(1), "no slot is lost");
    assert_eq!(dispatcher.pinned().slot_of(key), None, "and no entry");
    let last = listen(V4, BACKLOG);
    let (key, lent) = lend(&last);
    assert_eq!(dispatcher.join(key, lent).expect("join"), 1);
    ground.listeners.push(last);
    let clients = connect_many(V4, 20);
    assert_eq!(ground.queues(), [10, 10]);
    assert_eq!(exits(dispatcher.table()), [("selected", 20)]);
    drop((clients, silent));
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn a_successor_forgets_the_listeners_that_closed_meanwhile() {
    let Some(ground) = ground(1, V4) else {
        return;
    };
    let mut dispatcher = start_beside(&ground);
    let gone: Vec<u64> = (0..8)
        .map(|_| {
            let socket = listen(V4, BACKLOG);
            let (key, lent) = lend(&socket);
            dispatcher.join(key, lent).expect("join");
            key
        })
        .collect();
    drop(dispatcher);
    let plan = wakeone::dispatcher::Plan {
        adopt: true,
        ..ground.plan(Policy::RoundRobin)
    };
    let lent = ground.listeners.iter().map(lend).collect();
    let dispatcher = Dispatcher::start_beside(&plan, lent).expect("dispatcher");
    assert!(dispatcher.kept());
    let known = |key: &u64| dispatcher.pinned().slot_of(*key).is_some();
    assert!(!gone.iter().any(known), "those are gone");
    assert_eq!(
        dispatcher.pinned().slot_of(lend(&ground.listeners[0]).0),
        Some(0),
        "this one lives"
    );
    ground.end(dispatcher);
}
