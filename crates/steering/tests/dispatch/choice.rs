//! The program's choice, not luck with the kernel's hash: shown by its own counters, and by the queues themselves.

use std::sync::atomic::Ordering::Relaxed;

use wakeone_bpf::table::flag;
use wakeone_control::policy::Policy;
use wakeone_kernel::schedule;
use wakeone_steering::dispatcher::Dispatcher;
use wakeone_steering::dispatcher::Plan;

use crate::ground::*;

/// Runs every policy on one live group: each connection is selected, and waits where it was selected.
fn every_policy(address: &str, target: &str) {
    for slots in [1, 4, 256] {
        let Some(ground) = ground(slots, address) else {
            return;
        };
        let dispatcher = ground.start(Policy::Hash);
        let table = dispatcher.table();
        let count = slots.max(8);
        let mut before = (selected(table), established(table));
        for (round, policy) in (1..).zip(Policy::ALL) {
            dispatcher.set_policy(policy);
            let clients = connect_many(target, count);
            wait_for_established(table, round * count);
            let after = (selected(table), established(table));
            let chosen = difference(&after.0, &before.0);
            let what = format!("{policy}, {slots} slots at {address}");
            assert_eq!(chosen, difference(&after.1, &before.1), "{what}");
            let queues: Vec<u64> = ground.queues().into_iter().map(u64::from).collect();
            assert_eq!(chosen, queues, "{what}");
            assert_eq!(
                exits(table),
                [("selected", (round * count) as u64)],
                "{what}"
            );
            spread(policy, &chosen, &what);
            before = after;
            drop(clients);
            ground.settle();
        }
        ground.end(dispatcher);
    }
}

fn difference(after: &[u64], before: &[u64]) -> Vec<u64> {
    after.iter().zip(before).map(|(a, b)| a - b).collect()
}

/// Checks the promise of each policy for connections that all stay open.
fn spread(policy: Policy, chosen: &[u64], what: &str) {
    let count: u64 = chosen.iter().sum();
    let even = vec![count / chosen.len() as u64; chosen.len()];
    match policy {
        Policy::RoundRobin | Policy::LeastConnections => assert_eq!(chosen, even, "{what}"),
        Policy::ShortestQueue => assert_eq!(chosen, even, "{what}"),
        Policy::Cpu => {
            let cpus = std::thread::available_parallelism().expect("CPUs").get();
            let used = chosen.iter().filter(|chosen| **chosen > 0).count();
            assert!(used <= cpus, "{what}: {chosen:?}");
        }
        Policy::TwoChoices => {
            // Mitzenmacher: log log n / log 2 above the mean with high probability; hash would exceed this often.
            let most = *chosen.iter().max().expect("slots");
            assert!(most <= even[0] + 5, "{what}: {chosen:?}");
        }
        // The others promise nothing of that.
        _ => {}
    }
}

#[test]
fn every_policy_over_ipv4() {
    every_policy(V4, V4);
}

#[test]
fn every_policy_over_ipv6() {
    every_policy(V6, V6);
}

#[test]
fn every_policy_over_ipv4_into_a_dual_stack_group() {
    every_policy(DUAL, V4);
}

#[test]
fn both_families_share_a_dual_stack_groups_counts() {
    let Some(ground) = ground(4, DUAL) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let table = dispatcher.table();
    let clients: Vec<_> = (0..20).flat_map(|_| [connect(V4), connect(V6)]).collect();
    wait_for_actives(table, &[10; 4]);
    assert_eq!(exits(table), [("selected", 40)]);
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
}

/// Makes two slots, each with a listener at two addresses. The ground has those of the first address before the others.
fn two_addresses(policy: Policy) -> Option<(Ground, Dispatcher)> {
    let ground = Ground::new(|| {
        let at = |address| (0..2).map(move |_| listen(address, BACKLOG));
        at(V4).chain(at(V6)).collect()
    })?;
    let copy = |at: usize| ground.listeners[at].try_clone().expect("descriptor").into();
    let listeners = vec![vec![copy(0), copy(2)], vec![copy(1), copy(3)]];
    let dispatcher = Dispatcher::start(&ground.plan(policy), listeners).expect("dispatcher");
    Some((ground, dispatcher))
}

#[test]
fn two_addresses_share_one_table() {
    let Some((ground, dispatcher)) = two_addresses(Policy::LeastConnections) else {
        return;
    };
    // All IPv4 clients connect first: the IPv6 ones must go to the slot that has less.
    dispatcher.table().slot(1).mark(flag::DRAINING, true);
    let mut clients = connect_many(V4, 10);
    dispatcher.table().slot(1).mark(flag::DRAINING, false);
    clients.extend(connect_many(V6, 10));
    wait_for_actives(dispatcher.table(), &[10, 10]);
    assert_eq!(ground.queues(), [10, 0, 0, 10]);
    assert_eq!(dispatcher.queue(0).length, 10);
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn least_connections_respects_weights() {
    let Some(ground) = ground(3, V4) else {
        return;
    };
    let plan = Plan {
        weights: &[(1, 2), (2, 3)],
        ..ground.plan(Policy::LeastConnections)
    };
    let dispatcher = ground.try_start(&plan).expect("dispatcher");
    let clients = connect_many(V4, 60);
    wait_for_actives(dispatcher.table(), &[10, 20, 30]);
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn draining_and_down_slots_get_nothing() {
    let Some(ground) = ground(4, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::Hash);
    let table = dispatcher.table();
    table.slot(1).mark(flag::DRAINING, true);
    table.slot(2).mark(flag::UP, false);
    for (round, policy) in (1..).zip(Policy::ALL) {
        dispatcher.set_policy(policy);
        let clients = connect_many(V4, 20);
        wait_for_established(table, round * 20);
        let chosen = selected(table);
        assert_eq!((chosen[1], chosen[2]), (0, 0), "{policy}");
        assert_eq!(exits(table), [("selected", round as u64 * 20)], "{policy}");
        drop(clients);
    }
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn draining_slots_are_better_than_none() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let table = dispatcher.table();
    for slot in 0..2 {
        table.slot(slot).mark(flag::DRAINING, true);
    }
    let clients = connect_many(V4, 10);
    wait_for_actives(table, &[5, 5]);
    assert_eq!(exits(table), [("selected", 10)]);
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn stuck_marks_count_while_the_agent_lives() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let table = dispatcher.table();
    table.slot(0).mark(flag::STUCK, true);
    let mut clients = connect_many(V4, 10);
    wait_for_actives(table, &[5, 5]);
    beat(table);
    clients.extend(connect_many(V4, 10));
    wait_for_actives(table, &[5, 15]);
    // The clock is coarse, but half a minute ago is too old even at 10 ms a tick.
    table.heartbeat_limit_ns().store(1_000_000_000, Relaxed);
    table.heartbeat_ns().store(
        schedule::coarse_ns().saturating_sub(30_000_000_000),
        Relaxed,
    );
    clients.extend(connect_many(V4, 10));
    wait_for_actives(table, &[15, 15]);
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn another_policy_holds_from_the_next_connection_on() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let table = dispatcher.table();
    table.slot(1).mark(flag::UP, false);
    let mut clients = connect_many(V4, 10);
    wait_for_actives(table, &[10, 0]);
    table.slot(1).mark(flag::UP, true);
    // Slot 0 holds ten connections that were accepted; slot 1 holds fewer, which wait.
    let accepted = ground.accept(0);
    clients.push(connect(V4));
    wait_for_actives(table, &[10, 1]);
    for policy in [
        Policy::ShortestQueue,
        Policy::LeastConnections,
        Policy::ShortestQueue,
    ] {
        drop(ground.accept(0));
        wait_for_actives(table, &[10, actives(table)[1]]);
        let before = actives(table);
        dispatcher.set_policy(policy);
        clients.push(connect(V4));
        let mut expected = before;
        expected[usize::from(policy == Policy::LeastConnections)] += 1;
        wait_for_actives(table, &expected);
    }
    drop((clients, accepted));
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn shortest_queue_reads_the_queues_where_they_are() {
    let Some(ground) = ground(4, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::ShortestQueue);
    let table = dispatcher.table();
    if !ground.pinned().walks() {
        println!("skipped: this kernel does not let a program read accept queues");
        return ground.end(dispatcher);
    }
    let mut clients = connect_many(V4, 40);
    wait_for_established(table, 40);
    assert_eq!(ground.queues(), [10; 4]);
    // Nobody publishes lengths. Open connections do not count; waiting ones do.
    let held = ground.accept(2);
    clients.extend(connect_many(V4, 10));
    wait_for_established(table, 50);
    assert_eq!(ground.queues(), [10; 4]);
    assert_eq!(actives(table), [10, 10, 20, 10]);
    drop((clients, held));
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn shortest_queue_counts_what_waits_at_all_addresses_of_a_slot() {
    let Some((ground, dispatcher)) = two_addresses(Policy::ShortestQueue) else {
        return;
    };
    if !ground.pinned().walks() {
        println!("skipped: this kernel does not let a program read accept queues");
        return ground.end(dispatcher);
    }
    let table = dispatcher.table();
    table.slot(1).mark(flag::DRAINING, true);
    let mut clients = connect_many(V4, 10);
    table.slot(1).mark(flag::DRAINING, false);
    // Each address has a program of its own, which reads only its own queues.
    clients.extend(connect_many(V6, 8));
    wait_for_established(table, 18);
    assert_eq!(ground.queues(), [10, 0, 0, 8]);
    // The agent's look counts in the same way.
    drop(ground.accept(0));
    for slot in 0..2 {
        let _ = dispatcher.publish_queues(slot);
    }
    let queued = |slot| table.slot(slot).queued().load(Relaxed);
    assert_eq!([queued(0), queued(1)], [0, 8]);
    clients.extend(connect_many(V4, 4));
    wait_for_established(table, 22);
    assert_eq!(ground.queues(), [4, 0, 0, 8]);
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn shortest_queue_goes_by_published_lengths_where_it_cannot_read_them() {
    let Some(ground) = ground(4, V4) else {
        return;
    };
    let plan = Plan {
        read_queues: false,
        ..ground.plan(Policy::ShortestQueue)
    };
    let dispatcher = ground.try_start(&plan).expect("dispatcher");
    assert!(!ground.pinned().walks());
    let table = dispatcher.table();
    beat(table);
    let mut clients = Vec::new();
    for _ in 0..40 {
        for (slot, length) in ground.queues().into_iter().enumerate() {
            table.slot(slot).queued().store(length, Relaxed);
        }
        clients.push(connect(V4));
        wait_for_established(table, clients.len());
    }
    assert_eq!(ground.queues(), [10; 4]);
    // The program believes the published lengths, as it has nothing else to go by.
    for slot in 0..4 {
        let length = if slot == 3 { 0 } else { 99 };
        table.slot(slot).queued().store(length, Relaxed);
    }
    clients.extend(connect_many(V4, 4));
    wait_for_actives(table, &[10, 10, 10, 14]);
    // It does not believe them if their publisher is gone.
    table.heartbeat_ns().store(0, Relaxed);
    clients.extend(connect_many(V4, 12));
    wait_for_actives(table, &[14; 4]);
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
}
