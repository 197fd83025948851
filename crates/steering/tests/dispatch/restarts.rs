//! Workers that come and go for months, a program of another build, and other people's programs beside ours.

use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::Relaxed;

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use wakeone_bpf as bpf;
use wakeone_bpf::run_stats::RunStats;
use wakeone_bpf::table;
use wakeone_control::policy::Policy;
use wakeone_kernel::socket::cookie;
use wakeone_steering::dispatcher::{Dispatcher, Plan};
use wakeone_steering::slot_sockets::RemoteFd;

use crate::ground::*;

/// More than twice as many as the map of listeners has room for.
const CHANGES: usize = 20_000;

/// Treats a listener of ours as another process's.
fn lend(socket: &TcpListener) -> (u64, RemoteFd) {
    let remote = RemoteFd {
        pid: std::process::id(),
        fd: socket.as_raw_fd(),
        inode: rustix::fs::fstat(socket).expect("stat").st_ino,
    };
    (cookie(socket).expect("cookie"), remote)
}

/// Starts a dispatcher with one listener of ours that stays.
fn start_beside(ground: &Ground) -> Dispatcher {
    let remote = ground.listeners.iter().map(lend).collect();
    Dispatcher::start_beside(&ground.plan(Policy::RoundRobin), remote).expect("dispatcher")
}

#[test]
fn twenty_thousand_workers_come_and_go_and_the_next_one_is_steered() {
    let Some(mut ground) = ground(1, V4) else {
        return;
    };
    let mut dispatcher = start_beside(&ground);
    for change in 0..CHANGES {
        let socket = listen(V4, BACKLOG);
        let (key, remote) = lend(&socket);
        let slot = dispatcher
            .join(key, remote)
            .unwrap_or_else(|error| panic!("change {change}: {error}"));
        assert_eq!(slot, 1, "change {change}");
        drop(socket);
        dispatcher.leave(slot);
    }
    let last = listen(V4, BACKLOG);
    let (key, remote) = lend(&last);
    assert_eq!(dispatcher.join(key, remote).expect("join"), 1);
    dispatcher.table().publish();
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
    // The socket is bound and does not listen yet, so the array of sockets refuses it.
    let silent = bind(V4);
    let (key, remote) = lend(&silent);
    dispatcher
        .join(key, remote)
        .expect_err("it does not listen");
    assert!(!dispatcher.is_taken(1), "no slot is lost");
    assert_eq!(dispatcher.pinned().slot_of(key), None, "and no entry");
    let last = listen(V4, BACKLOG);
    let (key, remote) = lend(&last);
    assert_eq!(dispatcher.join(key, remote).expect("join"), 1);
    dispatcher.table().publish();
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
            let (key, remote) = lend(&socket);
            dispatcher.join(key, remote).expect("join");
            key
        })
        .collect();
    drop(dispatcher);
    let plan = Plan {
        adopt: true,
        ..ground.plan(Policy::RoundRobin)
    };
    let remote = ground.listeners.iter().map(lend).collect();
    let dispatcher = Dispatcher::start_beside(&plan, remote).expect("dispatcher");
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

/// Returns the inodes of two pins: the program that chooses for connections, and the one that counts them.
fn programs(ground: &Ground) -> Vec<u64> {
    use std::os::unix::fs::MetadataExt;
    let entries = std::fs::read_dir(ground.pins()).expect("pins").flatten();
    let mut programs: Vec<(String, u64)> = entries
        .map(|entry| (entry.file_name().into_string().expect("name"), entry))
        .filter(|(name, _)| name.starts_with("dispatch-") || name == "count")
        .map(|(name, entry)| (name, entry.metadata().expect("stat").ino()))
        .collect();
    programs.sort();
    assert_eq!(programs.len(), 2, "{programs:?}");
    programs.into_iter().map(|(_, inode)| inode).collect()
}

fn take_over(ground: &Ground) -> Dispatcher {
    let plan = Plan {
        adopt: true,
        ..ground.plan(Policy::LeastConnections)
    };
    let dispatcher = ground.try_start(&plan).expect("dispatcher");
    assert!(dispatcher.kept());
    dispatcher
}

#[test]
fn a_takeover_replaces_the_programs_of_another_build_and_keeps_all_counts() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    let first = ground.start(Policy::LeastConnections);
    let build = first.table().build().load(Relaxed);
    assert_ne!(build, 0);
    let clients = connect_many(V4, 10);
    wait_for_actives(first.table(), &[5, 5]);
    drop(first);
    let before = programs(&ground);

    let same = take_over(&ground);
    assert_eq!(programs(&ground), before, "its own programs stay");
    same.table().build().store(build ^ 1, Relaxed);
    // Builds before it had no notices.
    let notices = ground.pins().join("notices");
    std::fs::remove_file(&notices).expect("notices");
    drop(same);

    let other = take_over(&ground);
    assert_eq!(other.table().build().load(Relaxed), build);
    assert!(notices.exists());
    let after = programs(&ground);
    assert!(after.iter().all(|one| !before.contains(one)), "{after:?}");
    wait_for_actives(other.table(), &[5, 5]);
    // The kernel runs the pinned program.
    let _counting = RunStats::enable().expect("statistics");
    let more = connect_many(V4, 10);
    wait_for_actives(other.table(), &[10, 10]);
    assert_eq!(exits(other.table()), [("selected", 20)]);
    let runs = other.pinned().run_statistics();
    assert_eq!(runs.len(), 2, "{runs:?}");
    assert!(runs.iter().all(|one| one.run_cnt >= 10), "{runs:?}");
    drop((clients, more));
    ground.settle();
    ground.end(other);
}

#[test]
fn programs_that_cannot_be_replaced_go_on() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    let first = ground.start(Policy::LeastConnections);
    first.table().build().store(1, Relaxed);
    drop(first);
    let before = programs(&ground);
    // A half-made replacement of ours stands in the way.
    let half = format!("{}{}-{NAME}", bpf::TEMPORARY, std::process::id());
    std::fs::create_dir(ground.paths.pins.join(&half)).expect("folder");
    let kept = take_over(&ground);
    assert_eq!(programs(&ground), before);
    assert_eq!(kept.table().build().load(Relaxed), 1, "still another build");
    let clients = connect_many(V4, 10);
    wait_for_actives(kept.table(), &[5, 5]);
    drop((clients, kept));
    std::fs::remove_dir(ground.paths.pins.join(&half)).expect("remove");
    let replaced = take_over(&ground);
    assert!(programs(&ground).iter().all(|one| !before.contains(one)));
    ground.settle();
    ground.end(replaced);
}

#[test]
fn a_group_of_all_slots_changes_the_listeners_of_one() {
    let Some(mut ground) = ground(table::MAX_SLOTS, V4) else {
        return;
    };
    let mut dispatcher = ground.start(Policy::RoundRobin);
    let last = table::MAX_SLOTS - 1;
    let new = listen(V4, BACKLOG);
    let copy = new.try_clone().expect("descriptor").into();
    dispatcher.replace(last, vec![copy]).expect("replace");
    let old = std::mem::replace(&mut ground.listeners[last], new);
    let clients = connect_many(V4, table::MAX_SLOTS);
    assert_eq!(ground.queues(), vec![1; table::MAX_SLOTS]);
    // It was made outside of the counting cgroup, so its connection is not counted.
    assert_eq!(
        exits(dispatcher.table()),
        [("selected", table::MAX_SLOTS as u64)]
    );
    drop((clients, old));
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn a_full_map_of_listeners_forgets_those_that_are_gone_before_it_refuses_a_new_one() {
    let Some(mut ground) = ground(2, V4) else {
        return;
    };
    let mut dispatcher = ground.start(Policy::RoundRobin);
    // Each slot has two listeners at each address while all workers are replaced.
    let limit = dispatcher.pinned().listener_limit();
    assert!(
        limit >= 2 * table::MAX_SLOTS * table::MAX_ADDRESSES,
        "{limit}"
    );
    let known = MapHandle::from_pinned_path(ground.pins().join("listeners")).expect("the map");
    let fill = |cookie: u64| known.update(&cookie.to_ne_bytes(), &[0; 4], MapFlags::ANY);
    // No socket has such a cookie.
    let refused = (1 << 60..).take(limit).find_map(|gone| fill(gone).err());
    assert!(refused.is_some(), "it is full");
    let new = listen(V4, BACKLOG);
    let copy = new.try_clone().expect("descriptor").into();
    dispatcher.replace(1, vec![copy]).expect("replace");
    let old = std::mem::replace(&mut ground.listeners[1], new);
    let clients = connect_many(V4, 2);
    assert_eq!(ground.queues(), [1, 1]);
    drop((clients, old));
    ground.settle();
    ground.end(dispatcher);
}
