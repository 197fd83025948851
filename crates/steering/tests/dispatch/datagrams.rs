//! Steered UDP sockets: each datagram is where the program's counters say, and none is lost.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use wakeone_bpf::BUILD;
use wakeone_bpf::run_stats::RunStats;
use wakeone_bpf::table::{flag, flow_clock};
use wakeone_control::control::change_policy;
use wakeone_control::policy::{Affinity, Policy};
use wakeone_kernel::socket::cookie;
use wakeone_kernel::socket::receive_queue::receive_queue;
use wakeone_model::listener::Protocol;
use wakeone_steering::dispatcher::{Dispatcher, Plan};
use wakeone_steering::slot_sockets::RemoteFd;

use crate::ground::*;

/// A ground whose sockets are of UDP.
struct Datagrams {
    ground: Ground,
    sockets: Vec<UdpSocket>,
    address: SocketAddr,
}

pub fn bind(address: SocketAddr) -> UdpSocket {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::DGRAM, flags, None).expect("socket");
    sockopt::set_socket_reuseport(&socket, true).expect("SO_REUSEPORT");
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, false).expect("IPV6_V6ONLY");
    }
    rustix::net::bind(&socket, &address).expect("bind");
    socket.into()
}

impl Datagrams {
    fn new(slots: usize, address: &str) -> Option<Self> {
        let ground = Ground::new(Vec::new)?;
        // Nothing is counted, so no socket is born in a cgroup.
        let _ = wakeone_kernel::cgroup::remove(&ground.cgroup);
        let address = address.parse().expect("address");
        Some(Self {
            sockets: (0..slots).map(|_| bind(address)).collect(),
            ground,
            address,
        })
    }

    fn plan(&self, policy: Policy, affinity: Affinity) -> Plan<'_> {
        Plan {
            datagrams: Some(affinity),
            cgroup: None,
            ..self.ground.plan(policy)
        }
    }

    fn start(&self, policy: Policy, affinity: Affinity) -> Dispatcher {
        self.start_by(&self.plan(policy, affinity))
    }

    fn start_by(&self, plan: &Plan<'_>) -> Dispatcher {
        let copies = self.sockets.iter().map(|one| {
            let copy = one.try_clone().expect("descriptor");
            vec![OwnedFd::from(copy)]
        });
        Dispatcher::start(plan, copies.collect()).expect("dispatcher")
    }

    /// Returns the ways out taken so far by a program whose dispatcher is gone.
    fn pinned_table_exits(&self) -> Vec<(&'static str, u64)> {
        exits(self.ground.pinned().table())
    }

    /// Reads all waiting datagrams. Returns how many there were, by slot.
    fn read(&self) -> Vec<u64> {
        self.sockets.iter().map(drained).collect()
    }

    /// Sends a datagram of a client, and returns the slot that gets it.
    fn slot_of(&self, client: &UdpSocket) -> usize {
        client.send(b"where").expect("send");
        let mut read = Vec::new();
        // A little later where ksoftirqd has to do it.
        wait("it is delivered", || {
            read = self.read();
            read.iter().any(|count| *count > 0)
        });
        assert_eq!(read.iter().sum::<u64>(), 1, "{read:?}");
        read.iter().position(|count| *count == 1).expect("a slot")
    }

    fn end(self, dispatcher: Dispatcher) {
        dispatcher.end(&self.ground.paths, None);
        self.ground.nothing_left();
    }
}

fn drained(socket: &UdpSocket) -> u64 {
    let mut count = 0;
    while socket.recv(&mut [0; 2048]).is_ok() {
        count += 1;
    }
    count
}

/// Makes clients. Each is a flow.
fn clients(count: usize, to: SocketAddr) -> Vec<UdpSocket> {
    let client = |_| {
        let own: SocketAddr = if to.is_ipv6() {
            "[::1]:0".parse().expect("address")
        } else {
            "127.0.0.1:0".parse().expect("address")
        };
        let client = UdpSocket::bind(own).expect("bind");
        client.connect(to).expect("connect");
        client
    };
    (0..count).map(client).collect()
}

/// Sends one datagram from each client. Returns the slot that each one came to.
fn slots_of(scene: &Datagrams, clients: &[UdpSocket]) -> Vec<usize> {
    clients.iter().map(|one| scene.slot_of(one)).collect()
}

#[test]
fn one_flow_is_spread_by_every_policy_that_is_no_hash() {
    let Some(scene) = Datagrams::new(4, V4) else {
        return;
    };
    let dispatcher = scene.start(Policy::RoundRobin, Affinity::None);
    let client = clients(1, scene.address).remove(0);
    for policy in [Policy::RoundRobin, Policy::Random, Policy::ShortestQueue] {
        dispatcher.set_policy(policy);
        let before = selected(dispatcher.table());
        for _ in 0..50 {
            for _ in 0..8 {
                client.send(b"datagram").expect("send");
            }
            // Counters and queues must agree. Reads at once, so that no buffer is ever full.
            let so_far = selected(dispatcher.table());
            assert!(so_far.iter().sum::<u64>() >= before.iter().sum::<u64>() + 8);
        }
        let chosen: Vec<u64> = selected(dispatcher.table())
            .iter()
            .zip(&before)
            .map(|(now, then)| now - then)
            .collect();
        assert_eq!(scene.read(), chosen, "{policy}");
        assert_eq!(chosen.iter().sum::<u64>(), 400, "{policy}");
        match policy {
            // Nobody reads, so the queues grow evenly, to the datagram.
            Policy::RoundRobin | Policy::ShortestQueue => assert_eq!(chosen, [100; 4], "{policy}"),
            _ => assert!(
                chosen.iter().all(|count| (50..=150).contains(count)),
                "{chosen:?}"
            ),
        }
    }
    for policy in [Policy::Hash, Policy::Consistent] {
        dispatcher.set_policy(policy);
        for _ in 0..100 {
            client.send(b"datagram").expect("send");
        }
        let mut read = scene.read();
        read.sort_unstable();
        assert_eq!(read, [0, 0, 0, 100], "{policy}");
    }
    assert_eq!(exits(dispatcher.table()), [("selected", 1400)]);
    scene.end(dispatcher);
}

#[test]
fn the_shortest_queue_by_what_the_agent_publishes() {
    let Some(scene) = Datagrams::new(3, V4) else {
        return;
    };
    let plan = Plan {
        read_queues: false,
        ..scene.plan(Policy::ShortestQueue, Affinity::None)
    };
    let dispatcher = scene.start_by(&plan);
    assert!(!dispatcher.pinned().walks());
    let table = dispatcher.table();
    let limit = Duration::from_secs(3600).as_nanos() as u64;
    table.heartbeat_limit_ns().store(limit, Relaxed);
    let now = wakeone_kernel::schedule::coarse_ns();
    table.heartbeat_ns().store(now, Relaxed);
    table.slot(0).queued().store(5000, Relaxed);
    table.slot(2).queued().store(1, Relaxed);
    let client = clients(1, scene.address).remove(0);
    for _ in 0..20 {
        client.send(b"datagram").expect("send");
    }
    assert_eq!(scene.read(), [0, 20, 0]);
    scene.end(dispatcher);
}

/// Has an agent's heartbeat stay fresh, so that marks count.
fn as_if_looked_after(dispatcher: &Dispatcher) {
    let table = dispatcher.table();
    table.heartbeat_limit_ns().store(u64::MAX / 2, Relaxed);
    let now = wakeone_kernel::schedule::coarse_ns();
    table.heartbeat_ns().store(now, Relaxed);
}

#[test]
fn a_stuck_mark_turns_new_flows_away_and_keeps_known_ones() {
    let Some(scene) = Datagrams::new(4, V4) else {
        return;
    };
    for policy in [
        Policy::RoundRobin,
        Policy::ShortestQueue,
        Policy::Hash,
        Policy::Consistent,
    ] {
        let dispatcher = scene.start(policy, Affinity::Flow);
        as_if_looked_after(&dispatcher);
        let known = clients(40, scene.address);
        let homes = slots_of(&scene, &known);
        for stuck in [&[1][..], &[1, 2], &[0, 1, 2, 3]] {
            let mark = |on| {
                for slot in stuck {
                    dispatcher.table().slot(*slot).mark(flag::STUCK, on);
                }
            };
            mark(true);
            assert_eq!(slots_of(&scene, &known), homes, "{policy}: known flows");
            let new = slots_of(&scene, &clients(20, scene.address));
            let there = new.iter().filter(|slot| stuck.contains(slot)).count();
            // Once in a while a new flow shares the home of a known one.
            assert!(there <= 1 || stuck.len() == 4, "{policy}: {new:?}");
            mark(false);
        }
        assert_eq!(slots_of(&scene, &known), homes, "{policy}: well again");
        dispatcher.end(&scene.ground.paths, None);
    }
    scene.ground.nothing_left();
}

/// Checks that 40 flows were placed in turn. Once in a while two of them share a home.
fn assert_in_turn(slots: &[usize]) {
    for slot in 0..4 {
        let count = slots.iter().filter(|at| **at == slot).count();
        assert!((9..=11).contains(&count), "{slots:?}");
    }
}

/// Waits until the clock of flows has gone on by this many ticks.
fn silence(ticks: u32) {
    let begun = flow_clock();
    while flow_clock() - begun < ticks {
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn flows_from_before_stay_where_the_kernels_hash_put_them() {
    let Some(scene) = Datagrams::new(4, V4) else {
        return;
    };
    let earlier = clients(40, scene.address);
    let homes = slots_of(&scene, &earlier);
    let plan = Plan {
        earlier_flows: true,
        ..scene.plan(Policy::RoundRobin, Affinity::Flow)
    };
    let dispatcher = scene.start_by(&plan);
    let table = dispatcher.table();
    as_if_looked_after(&dispatcher);
    assert_eq!(slots_of(&scene, &earlier), homes, "attached");
    table.slot(homes[0]).mark(flag::STUCK, true);
    assert_eq!(slots_of(&scene, &earlier), homes, "one is stuck");
    table.slot(homes[0]).mark(flag::STUCK, false);
    let meanwhile = clients(1, scene.address);
    let its = slots_of(&scene, &meanwhile);
    assert_eq!(exits(table), [("by_hash", 81)]);
    // Flows that come later are placed by the policy. Those seen until then stay.
    table.flows_until().store(flow_clock(), Relaxed);
    assert_in_turn(&slots_of(&scene, &clients(40, scene.address)));
    assert_eq!(slots_of(&scene, &earlier), homes, "later");
    assert_eq!(slots_of(&scene, &meanwhile), its);
    // A flow that was silent for long is a new one.
    table.flow_silence().store(1, Relaxed);
    silence(3);
    assert_in_turn(&slots_of(&scene, &earlier));
    scene.end(dispatcher);
}

#[test]
fn a_flow_in_use_is_not_forgotten_by_time() {
    let Some(scene) = Datagrams::new(4, V4) else {
        return;
    };
    let dispatcher = scene.start(Policy::RoundRobin, Affinity::Flow);
    dispatcher.table().flow_silence().store(1, Relaxed);
    let all = clients(8, scene.address);
    let homes = slots_of(&scene, &all);
    let begun = flow_clock();
    while flow_clock() - begun < 4 {
        assert_eq!(slots_of(&scene, &all), homes);
        std::thread::sleep(Duration::from_millis(20));
    }
    scene.end(dispatcher);
}

/// More flows than the map of earlier builds remembered (65,536).
#[test]
fn no_flow_is_forgotten_however_many_there_are() {
    const FLOWS: u32 = 70_000;
    let Some(scene) = Datagrams::new(4, V4) else {
        return;
    };
    let dispatcher = scene.start(Policy::RoundRobin, Affinity::Flow);
    let slot_of = |flow: u32| {
        let host = std::net::Ipv4Addr::from(0x7f00_0100 + flow / 10_000);
        let port = 20_000 + (flow % 10_000) as u16;
        let client = UdpSocket::bind((host, port)).expect("bind");
        client.connect(scene.address).expect("connect");
        scene.slot_of(&client)
    };
    let homes: Vec<usize> = (0..FLOWS).map(slot_of).collect();
    let moved = (0..FLOWS).filter(|flow| slot_of(*flow) != homes[*flow as usize]);
    assert_eq!(moved.count(), 0);
    scene.end(dispatcher);
}

#[test]
fn a_vote_finds_the_flow_that_has_most_and_it_can_be_spread() {
    let Some(scene) = Datagrams::new(4, V4) else {
        return;
    };
    let dispatcher = scene.start(Policy::RoundRobin, Affinity::Flow);
    let all = clients(8, scene.address);
    let homes = slots_of(&scene, &all);
    let beside = (1..8)
        .find(|other| homes[*other] == homes[0])
        .expect("two to each slot");
    for _ in 0..30 {
        slots_of(&scene, &all[..1]);
        slots_of(&scene, &all[..1]);
        slots_of(&scene, &all[beside..=beside]);
    }
    let place = dispatcher.table().slot(homes[0]);
    let (home, lead) = (
        place.heavy_home().load(Relaxed),
        place.heavy_lead().load(Relaxed),
    );
    assert!((28..=32).contains(&lead), "{lead}");
    let pinned = dispatcher.pinned();
    let elsewhere = (homes[0] + 1) % 4;
    assert!(!pinned.spread(elsewhere, home).expect("map") && !pinned.is_spread(home));
    assert!(pinned.spread(homes[0], home).expect("map") && pinned.is_spread(home));
    let mut spread: Vec<usize> = (0..4).flat_map(|_| slots_of(&scene, &all[..1])).collect();
    spread.sort_unstable();
    assert_eq!(spread, [0, 1, 2, 3]);
    assert_eq!(slots_of(&scene, &all[1..]), homes[1..], "the others stay");
    scene.end(dispatcher);
}

#[test]
fn flows_stay_until_their_worker_goes() {
    let Some(mut scene) = Datagrams::new(4, V4) else {
        return;
    };
    let dispatcher = scene.start(Policy::RoundRobin, Affinity::Flow);
    let table = dispatcher.table();
    as_if_looked_after(&dispatcher);
    let clients = clients(40, scene.address);
    let first = slots_of(&scene, &clients);
    assert_in_turn(&first);
    assert_eq!(slots_of(&scene, &clients), first, "the same again");
    for (flag, gone) in [(flag::DRAINING, true), (flag::UP, false)] {
        let before = slots_of(&scene, &clients);
        table.slot(1).mark(flag, gone);
        let after = slots_of(&scene, &clients);
        for (was, is) in before.iter().zip(&after) {
            assert!(*is != 1 && (was == is || *was == 1), "{was} -> {is}");
        }
        table.slot(1).mark(flag, !gone);
        assert_eq!(slots_of(&scene, &clients), after, "who moved, stays");
    }
    // All slots drain: no flow moves, and nothing is refused.
    let before = slots_of(&scene, &clients);
    (0..4).for_each(|slot| table.slot(slot).mark(flag::DRAINING, true));
    assert_eq!(slots_of(&scene, &clients), before);
    (0..4).for_each(|slot| table.slot(slot).mark(flag::DRAINING, false));
    assert_eq!(exits(table), [("selected", 40 * 10)]);
    // A worker took its socket along, and the dispatcher does not know: its flows are placed anew. The dispatcher's own
    // copy of the socket goes with the dispatcher, while the program stays.
    drop(dispatcher);
    let left = scene.pinned_table_exits();
    drop(scene.sockets.remove(0));
    for client in &clients {
        client.send(b"where").expect("send");
        assert_eq!(scene.read().iter().sum::<u64>(), 1, "each one comes");
    }
    let now = scene.pinned_table_exits();
    assert_ne!(left, now);
    assert!(
        now.iter()
            .all(|(way, _)| ["selected", "retried"].contains(way)),
        "{now:?}"
    );
    wakeone_bpf::remove_pins(&scene.ground.pins()).expect("pins");
    scene.ground.paths.tidy();
    scene.ground.nothing_left();
}

#[test]
fn a_consistent_hash_moves_the_flows_of_the_slot_that_goes_only() {
    let Some(scene) = Datagrams::new(4, V4) else {
        return;
    };
    let dispatcher = scene.start(Policy::Consistent, Affinity::None);
    let clients = clients(60, scene.address);
    let before = slots_of(&scene, &clients);
    dispatcher.table().slot(2).mark(flag::UP, false);
    let without = slots_of(&scene, &clients);
    for (was, is) in before.iter().zip(&without) {
        assert!(*is != 2 && (was == is || *was == 2), "{was} -> {is}");
    }
    assert_ne!(before, without);
    dispatcher.table().slot(2).mark(flag::UP, true);
    assert_eq!(slots_of(&scene, &clients), before, "and back");
    scene.end(dispatcher);
}

#[test]
fn both_families_of_a_dual_stack_socket_and_weights() {
    let Some(scene) = Datagrams::new(2, DUAL) else {
        return;
    };
    let plan = Plan {
        weights: &[(1, 3)],
        ..scene.plan(Policy::RoundRobin, Affinity::None)
    };
    let dispatcher = scene.start_by(&plan);
    for to in [V4, V6] {
        let client = clients(1, to.parse().expect("address")).remove(0);
        for _ in 0..40 {
            client.send(b"datagram").expect("send");
        }
        assert_eq!(scene.read(), [10, 30], "{to}");
    }
    scene.end(dispatcher);
}

#[test]
fn a_group_that_closes_refuses_what_comes_and_keeps_what_waits() {
    let Some(scene) = Datagrams::new(2, V4) else {
        return;
    };
    let dispatcher = scene.start(Policy::RoundRobin, Affinity::Flow);
    let client = clients(1, scene.address).remove(0);
    client.send(b"waits").expect("send");
    dispatcher.close().expect("close");
    client.send(b"refused").expect("send");
    let refused = client.recv(&mut [0; 8]).expect_err("as by a closed port");
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    assert_eq!(scene.read().iter().sum::<u64>(), 1);
    dispatcher.open();
    client.send(b"comes").expect("send");
    assert_eq!(scene.read().iter().sum::<u64>(), 1);
    assert_eq!(exits(dispatcher.table()), [("selected", 2), ("closing", 1)]);
    scene.end(dispatcher);
}

#[test]
fn sockets_of_others_join_and_leave() {
    let Some(mut scene) = Datagrams::new(1, V4) else {
        return;
    };
    let lend = |socket: &UdpSocket| {
        let remote = RemoteFd {
            pid: std::process::id(),
            fd: socket.as_raw_fd(),
            inode: rustix::fs::fstat(socket).expect("stat").st_ino,
        };
        (cookie(socket).expect("cookie"), remote)
    };
    let plan = scene.plan(Policy::RoundRobin, Affinity::None);
    let mut dispatcher =
        Dispatcher::start_beside(&plan, vec![lend(&scene.sockets[0])]).expect("start");
    let client = clients(1, scene.address).remove(0);
    let send = |count| {
        for _ in 0..count {
            client.send(b"datagram").expect("send");
        }
    };
    send(10);
    assert_eq!(scene.read(), [10]);
    let new = bind(scene.address);
    let (key, remote) = lend(&new);
    assert_eq!(dispatcher.join(key, remote).expect("join"), 1);
    dispatcher.table().publish();
    scene.sockets.push(new);
    send(10);
    assert_eq!(scene.read(), [5, 5]);
    assert!(dispatcher.receive_queue(1).limit_bytes > 0);
    dispatcher.leave(0);
    send(10);
    assert_eq!(scene.read(), [0, 10]);
    assert_eq!(exits(dispatcher.table()), [("selected", 30)]);
    scene.end(dispatcher);
}

#[test]
fn a_full_buffer_is_counted_and_a_policy_without_sense_refused() {
    let Some(scene) = Datagrams::new(1, V4) else {
        return;
    };
    for policy in [Policy::LeastConnections, Policy::TwoChoices] {
        let refused = Dispatcher::start(&scene.plan(policy, Affinity::Flow), Vec::new());
        let said = refused.expect_err("refused").to_string();
        assert!(
            said.contains("UDP has none of; shortest-queue") && matches!(said.lines().count(), 1),
            "{said}"
        );
    }
    sockopt::set_socket_recv_buffer_size(&scene.sockets[0], 4096).expect("SO_RCVBUF");
    let dispatcher = scene.start(Policy::ShortestQueue, Affinity::Flow);
    let client = clients(1, scene.address).remove(0);
    for _ in 0..100 {
        client.send(&[0; 400]).expect("send");
    }
    let queue = dispatcher.receive_queue(0);
    assert_eq!(queue, receive_queue(&scene.sockets[0]).expect("queue"));
    assert!(queue.waiting_bytes > 0 && queue.dropped > 0);
    assert_eq!(scene.read(), [100 - u64::from(queue.dropped)]);
    let refused = change_policy(&scene.ground.paths, NAME, Policy::LeastConnections);
    assert!(
        refused
            .expect_err("refused")
            .to_string()
            .contains("open connections")
    );
    change_policy(&scene.ground.paths, NAME, Policy::Cpu).expect("policy");
    scene.end(dispatcher);
}

#[test]
fn a_program_for_connections_is_not_taken_for_datagrams() {
    let Some(scene) = Datagrams::new(2, V4) else {
        return;
    };
    let dispatcher = scene.start(Policy::RoundRobin, Affinity::None);
    let client = clients(1, scene.address).remove(0);
    client.send(b"x").expect("send");
    drop(dispatcher);
    let again = scene.start_by(&Plan {
        adopt: true,
        ..scene.plan(Policy::RoundRobin, Affinity::Flow)
    });
    assert!(
        again.kept(),
        "of the same kind: taken over, with its counts"
    );
    assert_eq!(exits(again.table()), [("selected", 1)]);
    scene.read();
    drop(again);
    let listeners: Vec<Vec<OwnedFd>> = (0..2)
        .map(|_| vec![OwnedFd::from(listen(V4, BACKLOG))])
        .collect();
    let tcp = Dispatcher::start(
        &Plan {
            adopt: true,
            cgroup: None,
            ..scene.ground.plan(Policy::RoundRobin)
        },
        listeners,
    );
    let tcp = tcp.expect("a new one");
    assert!(!tcp.kept() && tcp.protocol() == Protocol::Tcp);
    scene.end(tcp);
}

/// Returns the inode of the pin of the program that chooses.
fn program(scene: &Datagrams) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = std::fs::read_dir(scene.ground.pins())
        .expect("pins")
        .flatten();
    let mut own = entries.filter(|entry| {
        let name = entry.file_name();
        name.to_string_lossy().starts_with("dispatch-")
    });
    let program = own.next().expect("a program");
    assert!(own.next().is_none(), "one program");
    program.metadata().expect("stat").ino()
}

#[test]
fn a_takeover_replaces_the_program_of_another_build_and_flows_stay_where_they_are() {
    let Some(scene) = Datagrams::new(2, V4) else {
        return;
    };
    let first = scene.start(Policy::RoundRobin, Affinity::Flow);
    let clients = clients(8, scene.address);
    let homes = slots_of(&scene, &clients);
    first.table().build().store(1, Relaxed);
    drop(first);
    let before = program(&scene);
    let again = scene.start_by(&Plan {
        adopt: true,
        ..scene.plan(Policy::RoundRobin, Affinity::Flow)
    });
    assert!(again.kept());
    assert_eq!(again.table().build().load(Relaxed), BUILD);
    assert_ne!(program(&scene), before);
    assert_eq!(slots_of(&scene, &clients), homes);
    assert_eq!(selected(again.table()).iter().sum::<u64>(), 16);
    // The kernel runs the pinned program.
    let _counting = RunStats::enable().expect("statistics");
    slots_of(&scene, &clients);
    let runs = again.pinned().run_statistics();
    assert!(runs.iter().all(|one| one.run_cnt >= 8), "{runs:?}");
    scene.end(again);
}
