//! Clients stay with their slot, by their address or their network.

use std::net::{Ipv4Addr, TcpStream};
use std::sync::atomic::Ordering::Relaxed;

use wakeone_bpf::table::{Table, flag};
use wakeone_control::policy::Policy;

use crate::from::connect_from;
use crate::ground::*;

/// The clients, each in a network of its own.
fn hosts() -> impl Iterator<Item = Ipv4Addr> {
    (1..=40).map(|net| Ipv4Addr::new(127, 1, net, 7))
}

/// The slot that a client comes to, and its connection.
fn place(table: &Table, host: Ipv4Addr) -> (usize, TcpStream) {
    let before = selected(table);
    let to = V4.parse().expect("address");
    let connection = connect_from((host, 0).into(), to);
    let after = selected(table);
    let grown = before.iter().zip(&after).position(|(a, b)| b - a == 1);
    (grown.expect("selected"), connection)
}

fn homes(table: &Table) -> Vec<usize> {
    hosts().map(|host| place(table, host).0).collect()
}

/// The clients that are elsewhere now.
fn moved(before: &[usize], after: &[usize]) -> Vec<usize> {
    let all = before.iter().zip(after);
    all.filter(|(a, b)| a != b).map(|(a, _)| *a).collect()
}

fn clients_stay(address: &str) {
    let Some(ground) = ground(4, address) else {
        return;
    };
    let dispatcher = ground.start(Policy::Source);
    let table = dispatcher.table();
    let before = homes(table);
    for slot in 0..4 {
        let clients = before.iter().filter(|home| **home == slot).count();
        // Ten each with a deviation of 2.7.
        assert!((1..=20).contains(&clients), "slot {slot}: {before:?}");
    }
    assert_eq!(homes(table), before);
    // Also while its worker is stuck.
    beat(table);
    table.slot(1).mark(flag::STUCK, true);
    assert_eq!(homes(table), before);
    table.slot(1).mark(flag::STUCK, false);
    // Of a slot that drains only its own clients go, and come again.
    table.slot(2).mark(flag::DRAINING, true);
    let away = moved(&before, &homes(table));
    assert!(
        !away.is_empty() && away.iter().all(|home| *home == 2),
        "{away:?}"
    );
    table.slot(2).mark(flag::DRAINING, false);
    assert_eq!(homes(table), before);
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn a_client_stays_with_its_slot_while_that_is_there() {
    clients_stay(V4);
}

#[test]
fn a_client_of_ipv4_stays_at_a_listener_of_ipv6() {
    clients_stay(DUAL);
}

#[test]
fn what_waits_at_a_slot_that_goes_follows_its_client() {
    for address in [V4, DUAL] {
        let Some(ground) = ground(4, address) else {
            return;
        };
        let dispatcher = ground.start(Policy::Source);
        let table = dispatcher.table();
        let waiting: Vec<(usize, TcpStream)> = hosts().map(|host| place(table, host)).collect();
        let of_one = waiting.iter().filter(|(home, _)| *home == 1).count();
        let into = || {
            let all = (0..4).map(|slot| table.slot(slot).migrated_in().load(Relaxed));
            all.collect::<Vec<u64>>()
        };
        table.slot(1).mark(flag::DRAINING, true);
        dispatcher.move_queues(1).expect("move");
        let came = into();
        // Where a new connection of each of them goes now.
        let mut expected = vec![0; 4];
        for (host, (home, _)) in hosts().zip(&waiting) {
            if *home == 1 {
                expected[place(table, host).0] += 1;
            }
        }
        assert_eq!(came, expected, "{address}");
        assert_eq!(came.iter().sum::<u64>(), of_one as u64);
        drop(waiting);
        ground.settle();
        ground.end(dispatcher);
    }
}

#[test]
fn a_network_stays_together() {
    let Some(ground) = ground(4, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::SourceNet);
    let table = dispatcher.table();
    let homes = homes(table);
    for (net, home) in (1..).zip(&homes) {
        for host in [1, 100, 254] {
            assert_eq!(place(table, Ipv4Addr::new(127, 1, net, host)).0, *home);
        }
    }
    assert!((0..4).all(|slot| homes.contains(&slot)), "{homes:?}");
    ground.settle();
    ground.end(dispatcher);
}
