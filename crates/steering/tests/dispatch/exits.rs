//! Every way out of the program has its counter, and none of them loses a connection.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use rustix::net::Shutdown;
use wakeone_bpf::notices::Notices;
use wakeone_bpf::table::flag;
use wakeone_control::policy::Policy;
use wakeone_control::steer::{Steer, SteerEvent};
use wakeone_kernel::socket::accept_queue;
use wakeone_kernel::{cgroup, netns};
use wakeone_steering::agent::{Agent, AgentConfig, Rounds};
use wakeone_steering::dispatcher::Dispatcher;

use crate::ground::*;

/// Takes a listener out of the program's array, as a shutdown by its worker does.
fn stop_listening(listener: impl AsFd) {
    rustix::net::shutdown(listener, Shutdown::Read).expect("shutdown");
}

#[test]
fn selected_and_migrated() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let clients = connect_many(V4, 10);
    wait_for_actives(dispatcher.table(), &[5, 5]);
    assert_eq!(exits(dispatcher.table()), [("selected", 10)]);
    dispatcher.table().slot(0).mark(flag::DRAINING, true);
    dispatcher.move_queues(0).expect("move");
    let expected = [("selected", 10), ("migrated", 5)];
    assert_eq!(exits(dispatcher.table()), expected);
    let slot = |slot| dispatcher.table().slot(slot);
    assert_eq!(slot(0).migrated_out().load(Relaxed), 5);
    assert_eq!(slot(1).migrated_in().load(Relaxed), 5);
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn retried_where_the_chosen_slot_is_empty() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::RoundRobin);
    let table = dispatcher.table();
    stop_listening(&ground.listeners[0]);
    let clients = connect_many(V4, 20);
    wait_for_actives(table, &[0, 20]);
    assert_eq!(exits(table), [("selected", 10), ("retried", 10)]);
    // The socket listens again and is put back, so there is nothing more to retry.
    rustix::net::listen(&ground.listeners[0], BACKLOG).expect("listen");
    dispatcher.restore(0).expect("restore");
    let more = connect_many(V4, 20);
    wait_for_actives(table, &[10, 30]);
    assert_eq!(exits(table), [("selected", 30), ("retried", 10)]);
    drop((clients, more));
    ground.settle();
    ground.end(dispatcher);
}

/// Closes the first of a group's listeners, which nobody tells the agent: `count` connections are even over the others.
fn survivors_share(policy: Policy, (slots, closed): (usize, usize), count: usize) -> Vec<u32> {
    let Some(mut ground) = ground(slots, V4) else {
        return Vec::new();
    };
    let dispatcher = ground.start(policy);
    let held: Vec<_> = ground.listeners.drain(..closed).collect();
    held.iter().for_each(stop_listening);
    let clients = connect_many(V4, count);
    wait_for_established(dispatcher.table(), count);
    let queues = ground.queues();
    let lost = ["no_slot", "select_failed"].map(|name| exit(dispatcher.table(), name));
    assert_eq!(lost, [0, 0], "{policy}, {closed} of {slots} closed");
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
    queues
}

#[test]
fn the_living_share_evenly_what_the_dead_would_get() {
    for sizes in [(8, 4), (6, 2), (6, 5), (32, 7)] {
        for policy in [Policy::LeastConnections, Policy::ShortestQueue] {
            let living = sizes.0 - sizes.1;
            let queues = survivors_share(policy, sizes, 4 * living);
            assert!(
                queues.iter().all(|n| *n == 4),
                "{policy} {sizes:?}: {queues:?}"
            );
        }
    }
}

#[test]
fn the_living_of_a_large_group_share_almost_evenly() {
    let queues = survivors_share(Policy::LeastConnections, (60, 20), 400);
    assert!(queues.iter().all(|n| (7..=13).contains(n)), "{queues:?}");
}

#[test]
fn policies_without_load_give_no_neighbour_more() {
    for policy in [
        Policy::RoundRobin,
        Policy::Random,
        Policy::Hash,
        Policy::Consistent,
    ] {
        let queues = survivors_share(policy, (8, 4), 400);
        // With equal chances each gets 100, with a deviation of 9.
        assert!(
            queues.iter().all(|n| (45..=155).contains(n)),
            "{policy}: {queues:?}"
        );
    }
}

#[test]
fn a_slot_whose_socket_is_back_is_chosen_at_once() {
    let Some(ground) = ground(4, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let table = dispatcher.table();
    stop_listening(&ground.listeners[0]);
    let mut clients = connect_many(V4, 12);
    wait_for_actives(table, &[0, 4, 4, 4]);
    assert_eq!(
        [0, 1, 2, 3].map(|slot| table.slot(slot).gone().load(Relaxed)),
        [1, 0, 0, 0]
    );
    // A mark that came late, as by a choice on another CPU, does not keep a slot from being chosen.
    rustix::net::listen(&ground.listeners[0], BACKLOG).expect("listen");
    dispatcher.restore(0).expect("restore");
    table.slot(0).gone().store(1, Relaxed);
    clients.extend(connect_many(V4, 4));
    wait_for_actives(table, &[4, 4, 4, 4]);
    assert_eq!(table.slot(0).gone().load(Relaxed), 0);
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn a_socket_that_listens_is_noticed_and_one_that_is_gone_once() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let table = dispatcher.table();
    let notices = Notices::of(&ground.pins()).expect("notices");
    let listens_anew = |port: u32| {
        table.port().store(port, Relaxed);
        stop_listening(&ground.listeners[0]);
        rustix::net::listen(&ground.listeners[0], BACKLOG).expect("listen");
        notices.take()
    };
    assert!(!listens_anew(0), "nobody asked");
    assert!(!listens_anew(8081), "another port");
    assert!(listens_anew(8080));
    // It is not in the array: the first connection finds that out, and the others know.
    assert!(!notices.take());
    let first = connect_many(V4, 4);
    wait_for_established(table, 4);
    assert!(notices.take());
    let more = connect_many(V4, 4);
    wait_for_established(table, 8);
    assert!(!notices.take());
    assert_eq!(selected(table), [0, 8]);
    drop((first, more));
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn no_slot_and_the_kernel_chooses() {
    let Some(ground) = ground(4, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let table = dispatcher.table();
    for slot in 0..4 {
        table.slot(slot).mark(flag::UP, false);
    }
    for (round, policy) in (1..).zip(Policy::ALL) {
        dispatcher.set_policy(policy);
        let clients = connect_many(V4, 10);
        wait_for_established(table, round * 10);
        assert_eq!(exits(table), [("no_slot", round as u64 * 10)], "{policy}");
        assert_eq!(actives(table).iter().sum::<i64>(), 10, "they count");
        drop(clients);
        ground.settle();
    }
    ground.end(dispatcher);
}

/// A listener that nobody has given a slot yet has the kernel choose among all, as long as an agent lives that will.
#[test]
fn while_sockets_come_the_kernel_chooses() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let table = dispatcher.table();
    let port = ground.listeners[0].local_addr().expect("address").port();
    table.port().store(port.into(), Relaxed);
    beat(table);
    // One that has a slot listens anew after each move.
    stop_listening(&ground.listeners[0]);
    rustix::net::listen(&ground.listeners[0], BACKLOG).expect("listen");
    dispatcher.restore(0).expect("restored");
    // Made where connections are counted.
    let more = || {
        let made = cgroup::create_sockets_in(&ground.cgroup, || listen(V4, BACKLOG));
        made.expect("nursery").1
    };
    let elsewhere = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            netns::isolate().expect("network namespace");
            more()
        });
        other.join().expect("a listener of another network")
    });
    assert_eq!(table.changes().load(Relaxed), 0);
    drop(elsewhere);
    let new = more();
    assert_eq!(table.changes().load(Relaxed), 1);
    let mut clients = connect_many(V4, 60);
    let waiting = |one| accept_queue(one).expect("queue").length;
    wait("all wait", || {
        ground.queues().iter().sum::<u32>() + waiting(&new) == 60
    });
    assert_eq!(exits(table), [("by_hash", 60)]);
    assert!(waiting(&new) > 0, "the hash gave it none of 60");
    table.changes_seen().store(1, Relaxed);
    clients.extend(connect_many(V4, 10));
    wait("they were chosen for", || {
        exits(table) == [("selected", 10), ("by_hash", 60)]
    });
    // Nobody will look at this one.
    let _another = more();
    table.heartbeat_ns().store(0, Relaxed);
    clients.extend(connect_many(V4, 10));
    wait("they were chosen for", || {
        exits(table) == [("selected", 20), ("by_hash", 60)]
    });
    drop((clients, new));
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn weight_0_is_no_slot() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let table = dispatcher.table();
    table.slot(0).weight().store(0, Relaxed);
    table.publish();
    let mut clients = connect_many(V4, 10);
    wait_for_actives(table, &[0, 10]);
    table.slot(1).weight().store(0, Relaxed);
    table.publish();
    clients.extend(connect_many(V4, 10));
    wait_for_established(table, 20);
    assert_eq!(exits(table), [("selected", 10), ("no_slot", 10)]);
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn select_failed_where_no_socket_stands_in_the_array() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let table = dispatcher.table();
    for listener in &ground.listeners {
        // The listeners stop one after the other: a group that is never empty keeps its program.
        stop_listening(listener);
        rustix::net::listen(listener, BACKLOG).expect("listen");
    }
    let clients = connect_many(V4, 20);
    wait_for_established(table, 20);
    assert_eq!(exits(table), [("select_failed", 20)]);
    assert_eq!(selected(table), [0, 0]);
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn bad_policy_and_the_kernel_chooses() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let table = dispatcher.table();
    table.policy().store(99, Relaxed);
    let clients = connect_many(V4, 20);
    wait_for_established(table, 20);
    assert_eq!(exits(table), [("bad_policy", 20)]);
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn a_table_of_no_slots_and_one_of_too_many() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::RoundRobin);
    let table = dispatcher.table();
    table.slots().store(0, Relaxed);
    table.publish();
    let mut clients = connect_many(V4, 10);
    wait("all wait", || ground.queues().iter().sum::<u32>() == 10);
    assert_eq!(exits(table), [("no_slot", 10)]);
    // The number is larger than the table: slots that are not up must not matter.
    table.slots().store(u32::MAX, Relaxed);
    table.publish();
    clients.extend(connect_many(V4, 10));
    wait("all wait", || ground.queues().iter().sum::<u32>() == 20);
    assert_eq!(exits(table), [("selected", 10), ("no_slot", 10)]);
    table.slots().store(2, Relaxed);
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn closing_drops_syns_and_the_client_comes_again() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let table = dispatcher.table();
    let before = connect_many(V4, 4);
    wait_for_actives(table, &[2, 2]);
    dispatcher.close().expect("close");
    let client = begin_connect(V4);
    std::thread::sleep(Duration::from_millis(300));
    assert!(!connected(&client));
    assert!(client.take_error().expect("SO_ERROR").is_none(), "refused");
    assert!(exit(table, "closing") > 0);
    // Earlier connections are served, and can still be moved.
    table.slot(0).mark(flag::DRAINING, true);
    assert_eq!(dispatcher.move_queues(0).expect("move").connections, 2);
    table.slot(0).mark(flag::DRAINING, false);
    assert_eq!(ground.queues(), [0, 4]);
    dispatcher.open();
    wait("the client's SYN comes again", || connected(&client));
    wait_for_actives(table, &[1, 4]);
    drop((before, client));
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn unknown_listener() {
    let Some(mut ground) = ground(2, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let table = dispatcher.table();
    // A process put a listener into the array and told nobody: its connections are steered, not counted.
    let stranger = listen(V4, BACKLOG);
    let pinned = ground.pinned();
    pinned.put(0, 1, &stranger).expect("put");
    table.slot(0).mark(flag::DRAINING, true);
    let clients = connect_many(V4, 5);
    ground.listeners.push(stranger);
    wait("all wait there", || ground.queues() == [0, 0, 5]);
    assert_eq!(actives(table), [0, 0]);
    table.slot(0).mark(flag::DRAINING, false);
    table.slot(1).mark(flag::UP, false);
    drop(ground.listeners.pop());
    wait("all were moved", || ground.queues() == [5, 0]);
    let expected = [("selected", 5), ("migrated", 5), ("unknown_listener", 5)];
    assert_eq!(exits(table), expected);
    assert_eq!(actives(table), [0, 0]);
    assert_eq!((table.moved_live(), pinned.moved()), (5, 5));
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn bad_tag() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let table = dispatcher.table();
    let pinned = ground.pinned();
    pinned
        .know_listener(9999, &ground.listeners[0])
        .expect("tag");
    table.slot(1).mark(flag::DRAINING, true);
    let clients = connect_many(V4, 5);
    wait("all are seen", || exit(table, "bad_tag") == 5);
    assert_eq!(ground.queues(), [5, 0]);
    assert_eq!(actives(table), [0, 0]);
    // A move puts them in no count either, and notes that none is to.
    table.slot(1).mark(flag::DRAINING, false);
    table.slot(0).mark(flag::UP, false);
    assert_eq!(dispatcher.move_queues(0).expect("move").connections, 5);
    assert_eq!(ground.queues(), [0, 5]);
    assert_eq!(exit(table, "bad_tag"), 10);
    assert_eq!(actives(table), [0, 0]);
    assert_eq!((table.moved_live(), pinned.moved()), (5, 5));
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
}

/// Has an agent steer for some rounds that look at everything. Returns how often it logs that moves found no room.
fn notes_of_room(ground: &Ground, dispatcher: Dispatcher) -> usize {
    let tasks = AgentConfig {
        rescue: false,
        stuck_after: Duration::from_millis(5),
    };
    let cgroup = Some(ground.cgroup.clone());
    let mut agent = Agent::start(
        dispatcher,
        tasks,
        ground.paths.clone(),
        cgroup,
        &Rounds::new(),
    );
    let mut notes = 0;
    // An idle agent looks at everything some times a second.
    let start = std::time::Instant::now();
    while start.elapsed() < Duration::from_secs(2) {
        let events = agent.events();
        let room = |event: &&SteerEvent| format!("{event:?}").contains("no room to note");
        notes += events.iter().filter(room).count();
        std::thread::sleep(Duration::from_millis(10));
    }
    agent.end();
    notes
}

#[test]
fn moved_full_leaves_the_count_where_it_was() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let table = dispatcher.table();
    let clients = connect_many(V4, 4);
    wait_for_actives(table, &[2, 2]);
    let moved = MapHandle::from_pinned_path(ground.pins().join("moved")).expect("map");
    let mut fillers = 0_u64;
    // Cookies are small, so none has these keys.
    let key = |number: u64| (u64::MAX - number).to_ne_bytes();
    while moved
        .update(&key(fillers), &0_u64.to_ne_bytes(), MapFlags::ANY)
        .is_ok()
    {
        fillers += 1;
        assert!(fillers <= 1 << 20, "a map without an end");
    }
    table.slot(0).mark(flag::DRAINING, true);
    assert_eq!(dispatcher.move_queues(0).expect("move").connections, 2);
    assert_eq!(ground.queues(), [0, 4], "they are moved all the same");
    assert_eq!(exit(table, "moved_full"), 2);
    assert_eq!(exit(table, "migrated"), 2);
    assert_eq!(actives(table), [2, 2], "where they are counted out");
    for filler in 0..fillers {
        moved.delete(&key(filler)).expect("delete");
    }
    // Nobody knows now where those two were born. A move back counts them out of no slot.
    table.slot(1).mark(flag::DRAINING, true);
    table.slot(0).mark(flag::DRAINING, false);
    assert_eq!(dispatcher.move_queues(1).expect("move").connections, 4);
    assert_eq!((ground.queues(), actives(table)), (vec![4, 0], vec![2, 2]));
    assert_eq!(table.moved_live(), 4);
    drop(clients);
    ground.settle();
    assert_eq!(notes_of_room(&ground, dispatcher), 1);
    ground.nothing_left();
}
