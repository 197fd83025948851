//! Packets of QUIC: each goes to the worker that has its connection, whatever address it comes from.
//!
//! Clients and servers here only write headers, with zeros for the encrypted part.

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Relaxed;

use wakeone_bpf::table::flag;
use wakeone_control::policy::{Affinity, Policy};
use wakeone_kernel::cgroup;
use wakeone_steering::dispatcher::quic::IN_USE;
use wakeone_steering::dispatcher::{Dispatcher, Plan};

use crate::datagrams::bind;
use crate::ground::*;

const V1: u32 = 1;
const V2: u32 = 0x6b33_43cf;
/// The types of long headers of version 1.
const INITIAL: u8 = 0;
const HANDSHAKE: u8 = 2;
/// The length of the IDs that the servers here make, unless a test says so.
const ID: usize = 8;

/// A packet with a long header. A client's first has to be long.
fn long(kind: u8, version: u32, to: &[u8], from: &[u8]) -> Vec<u8> {
    let mut packet = vec![0xc0 | kind << 4];
    packet.extend(version.to_be_bytes());
    for id in [to, from] {
        packet.push(id.len() as u8);
        packet.extend(id);
    }
    packet.resize(100, 0);
    packet
}

fn short(to: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x40];
    packet.extend(to);
    packet.resize(40, 0);
    packet
}

struct Scene {
    ground: Ground,
    address: SocketAddr,
    /// By slot; beyond those the sockets of workers that replace them.
    sockets: Vec<UdpSocket>,
    /// For IDs: no two are the same.
    random: u64,
}

impl Scene {
    fn new(slots: usize, address: &str) -> Option<Self> {
        let ground = Ground::new(Vec::new)?;
        let address: SocketAddr = address.parse().expect("address");
        let mut scene = Self {
            ground,
            address,
            sockets: Vec::new(),
            random: 15,
        };
        (0..slots).for_each(|_| scene.more());
        Some(scene)
    }

    /// Opens one socket more.
    fn more(&mut self) {
        let address = self.address;
        let made = cgroup::create_sockets_in(&self.ground.cgroup, || bind(address));
        self.sockets.push(made.expect("cgroup").1);
    }

    fn plan(&self, policy: Policy) -> Plan<'_> {
        Plan {
            datagrams: Some(Affinity::Quic),
            ..self.ground.plan(policy)
        }
    }

    fn start(&self) -> Dispatcher {
        self.start_by(&self.plan(Policy::LeastConnections))
    }

    fn start_by(&self, plan: &Plan<'_>) -> Dispatcher {
        let copies = self.sockets.iter().map(copy).collect();
        Dispatcher::start(plan, copies).expect("dispatcher")
    }

    fn client(&self) -> UdpSocket {
        let own = match self.address {
            SocketAddr::V4(_) => "127.0.0.1:0",
            SocketAddr::V6(_) => "[::1]:0",
        };
        let client = UdpSocket::bind(own).expect("bind");
        client.connect(self.address).expect("connect");
        client
    }

    fn id(&mut self, length: usize) -> Vec<u8> {
        let mut byte = || {
            // Knuth's MMIX generator.
            let next = self.random.wrapping_mul(6_364_136_223_846_793_005);
            self.random = next.wrapping_add(1_442_695_040_888_963_407);
            (self.random >> 56) as u8
        };
        (0..length).map(|_| byte()).collect()
    }

    /// Has a client send a packet. Returns the socket that gets it.
    fn arrives(&self, client: &UdpSocket, packet: &[u8]) -> usize {
        client.send(packet).expect("send");
        let mut got = Vec::new();
        wait("it is delivered", || {
            got = (0..self.sockets.len())
                .filter(|at| self.sockets[*at].recv(&mut [0; 2048]).is_ok())
                .collect();
            !got.is_empty()
        });
        assert_eq!(got.len(), 1, "{got:?}");
        got[0]
    }

    fn answer(&self, socket: usize, client: &UdpSocket, packet: &[u8]) {
        let to = client.local_addr().expect("address");
        self.sockets[socket].send_to(packet, to).expect("send");
        client.recv(&mut [0; 2048]).expect("the answer");
    }

    /// Begins a connection, whose server makes this ID for itself.
    fn connect_with(&mut self, client: &UdpSocket, id: &[u8]) -> usize {
        let first = self.id(8);
        let socket = self.arrives(client, &long(INITIAL, V1, &first, b"c"));
        self.answer(socket, client, &long(INITIAL, V1, b"c", id));
        let again = self.arrives(client, &long(HANDSHAKE, V1, id, b"c"));
        assert_eq!(again, socket, "the handshake goes on there");
        socket
    }

    fn connect(&mut self) -> Connection {
        let (client, id) = (self.client(), self.id(ID));
        let socket = self.connect_with(&client, &id);
        Connection { client, id, socket }
    }

    /// Whether a packet of a connection reaches its worker, from its own address and from another.
    fn is_kept(&self, one: &Connection) -> bool {
        let packet = short(&one.id);
        let from = [&one.client, &self.client()];
        let mut sockets = from.iter().map(|client| self.arrives(client, &packet));
        sockets.all(|socket| socket == one.socket)
    }

    fn end(self, dispatcher: Dispatcher) {
        dispatcher.end(&self.ground.paths, Some(&self.ground.cgroup));
        self.ground.nothing_left();
    }
}

fn copy(socket: &UdpSocket) -> Vec<OwnedFd> {
    vec![socket.try_clone().expect("descriptor").into()]
}

struct Connection {
    client: UdpSocket,
    id: Vec<u8>,
    socket: usize,
}

/// How often something was chosen.
fn counted(chosen: impl IntoIterator<Item = usize>) -> BTreeMap<usize, usize> {
    let mut counts = BTreeMap::new();
    for one in chosen {
        *counts.entry(one).or_default() += 1;
    }
    counts
}

fn exit(dispatcher: &Dispatcher, name: &str) -> u64 {
    let all = exits(dispatcher.table());
    all.iter()
        .find(|(one, _)| *one == name)
        .map_or(0, |(_, count)| *count)
}

#[test]
fn a_connection_stays_with_its_worker_from_whatever_address() {
    for address in [V4, V6] {
        let Some(mut scene) = Scene::new(4, address) else {
            return;
        };
        let dispatcher = scene.start();
        let all: Vec<Connection> = (0..40).map(|_| scene.connect()).collect();
        let counts = counted(all.iter().map(|one| one.socket));
        assert_eq!(counts, (0..4).map(|at| (at, 10)).collect(), "{address}");
        assert!(all.iter().all(|one| scene.is_kept(one)), "{address}");
        assert_eq!(exit(&dispatcher, "stray"), 0);
        // Each connection began once, and went on by its ID.
        assert_eq!(exit(&dispatcher, "selected"), 40);
        assert!(exit(&dispatcher, "by_id") >= 40);
        scene.end(dispatcher);
    }
}

#[test]
fn many_that_come_before_the_first_is_answered_are_spread_evenly() {
    let Some(mut scene) = Scene::new(4, V4) else {
        return;
    };
    let dispatcher = scene.start();
    let table = dispatcher.table();
    [8, 0, 8, 8]
        .into_iter()
        .enumerate()
        .for_each(|(slot, open)| table.slot(slot).active().store(open, Relaxed));
    let mut sockets = Vec::new();
    for _ in 0..28 {
        let (client, first) = (scene.client(), scene.id(8));
        sockets.push(scene.arrives(&client, &long(INITIAL, V1, &first, b"c")));
    }
    let counts = counted(sockets);
    assert_eq!(counts, BTreeMap::from([(0, 5), (1, 13), (2, 5), (3, 5)]));
    scene.end(dispatcher);
}

#[test]
fn ids_of_any_length_are_told_apart_and_versions_are_not() {
    let Some(mut scene) = Scene::new(3, V4) else {
        return;
    };
    let dispatcher = scene.start();
    // A server whose workers disagree.
    let lengths = [1, 4, 8, 20, 8, 4];
    let mut all = Vec::new();
    for length in lengths {
        let (client, id) = (scene.client(), scene.id(length));
        let socket = scene.connect_with(&client, &id);
        all.push(Connection { client, id, socket });
    }
    assert!(all.iter().all(|one| scene.is_kept(one)));
    // A connection of version 2, whose types have other numbers, and of a version to come.
    for (version, handshake) in [(V2, 3), (0xdead_beef, 2)] {
        let (client, first, id) = (scene.client(), scene.id(8), scene.id(ID));
        let socket = scene.arrives(&client, &long(1, version, &first, b""));
        let again = scene.arrives(&client, &long(1, version, &first, b""));
        assert_eq!(again, socket, "a packet that is sent again");
        scene.answer(socket, &client, &long(1, version, b"", &id));
        let other = scene.client();
        let kept = scene.arrives(&other, &long(handshake, version, &id, b""));
        assert_eq!(kept, socket, "{version:x}");
    }
    scene.end(dispatcher);
}

#[test]
fn a_marked_worker_keeps_its_connections_and_gets_no_new_ones() {
    for mark in [flag::STUCK, flag::DRAINING] {
        let Some(mut scene) = Scene::new(3, V4) else {
            return;
        };
        let dispatcher = scene.start();
        let all: Vec<Connection> = (0..12).map(|_| scene.connect()).collect();
        // An agent that lives refreshes its marks.
        let table = dispatcher.table();
        table.heartbeat_limit_ns().store(u64::MAX, Relaxed);
        table.heartbeat_ns().store(1, Relaxed);
        table.slot(0).mark(mark, true);
        let new: Vec<Connection> = (0..12).map(|_| scene.connect()).collect();
        assert!(new.iter().all(|one| one.socket != 0));
        assert!(all.iter().chain(&new).all(|one| scene.is_kept(one)));
        scene.end(dispatcher);
    }
}

#[test]
fn a_new_worker_gets_new_connections_and_the_old_one_keeps_its_own() {
    let Some(mut scene) = Scene::new(2, V4) else {
        return;
    };
    let mut dispatcher = scene.start();
    let (mut old, mut slots) = (Vec::new(), [0, 1]);
    // Twice: the second place is left again.
    for _ in 0..2 {
        old.extend((0..6).map(|_| scene.connect()));
        let new = scene.sockets.len();
        scene.more();
        dispatcher
            .replace(0, copy(&scene.sockets[new]))
            .expect("replaced");
        let before = std::mem::replace(&mut slots[0], new);
        let come: Vec<Connection> = (0..6).map(|_| scene.connect()).collect();
        assert!(come.iter().all(|one| slots.contains(&one.socket)));
        assert!(come.iter().any(|one| one.socket == new));
        assert!(old.iter().chain(&come).all(|one| scene.is_kept(one)));
        // The old worker ends: those who come from there are told so by another.
        dispatcher.forget_replaced(0);
        let (gone, left) = old.into_iter().partition(|one| one.socket == before);
        for one in Vec::<Connection>::into_iter(gone) {
            let at = scene.arrives(&scene.client(), &short(&one.id));
            assert!(slots.contains(&at));
        }
        assert!(exit(&dispatcher, "stray") > 0);
        old = left;
        old.extend(come);
        assert!(old.iter().all(|one| scene.is_kept(one)));
    }
    scene.end(dispatcher);
}

#[test]
fn a_supervisor_that_takes_over_finds_all_connections_again() {
    let Some(mut scene) = Scene::new(2, V4) else {
        return;
    };
    let mut dispatcher = scene.start();
    scene.more();
    dispatcher
        .replace(1, copy(&scene.sockets[2]))
        .expect("replaced");
    let all: Vec<Connection> = (0..8).map(|_| scene.connect()).collect();
    let token = dispatcher.new_token(0, false).expect("a token");
    let mut with_token = scene.id(ID);
    with_token[1..3].copy_from_slice(&token.to_be_bytes());
    drop(dispatcher);
    let plan = Plan {
        adopt: true,
        ..scene.plan(Policy::LeastConnections)
    };
    let now = [0, 2].map(|at| copy(&scene.sockets[at]));
    let dispatcher = Dispatcher::start(&plan, now.into()).expect("dispatcher");
    assert!(dispatcher.kept());
    assert!(all.iter().all(|one| scene.is_kept(one)));
    let come: Vec<Connection> = (0..8).map(|_| scene.connect()).collect();
    assert!(come.iter().all(|one| one.socket != 1), "it was replaced");
    // Its server is seen to use it.
    scene.answer(0, &scene.client(), &long(INITIAL, V1, b"c", &with_token));
    with_token[3..].fill(1);
    assert_eq!(scene.arrives(&scene.client(), &short(&with_token)), 0);
    scene.end(dispatcher);
}

#[test]
fn a_token_leads_to_its_worker_where_the_server_uses_it() {
    let Some(mut scene) = Scene::new(4, V4) else {
        return;
    };
    let mut dispatcher = scene.start();
    let mut id_of = |dispatcher: &Dispatcher, slot, beside| {
        let token = dispatcher.new_token(slot, beside).expect("a token");
        let mut id = scene.id(ID);
        id[1..3].copy_from_slice(&token.to_be_bytes());
        id
    };
    let ids: Vec<Vec<u8>> = (0..4).map(|slot| id_of(&dispatcher, slot, false)).collect();
    let beside = id_of(&dispatcher, 2, true);
    let another = |id: &[u8]| {
        let mut id = id.to_vec();
        id[3..].fill(7);
        id
    };
    // This server makes others.
    scene.connect();
    scene.arrives(&scene.client(), &short(&another(&ids[3])));
    assert_eq!(exit(&dispatcher, "stray"), 1);
    for (slot, id) in ids.iter().enumerate() {
        let client = scene.client();
        scene.answer(slot, &client, &long(INITIAL, V1, b"c", id));
        for packet in [short(&another(id)), long(HANDSHAKE, V1, &another(id), b"c")] {
            assert_eq!(scene.arrives(&scene.client(), &packet), slot);
        }
    }
    assert_eq!(exit(&dispatcher, "stray"), 1);
    assert_eq!(exit(&dispatcher, "by_token"), 8);
    // A worker that starts beside another has one of its own from the start.
    scene.more();
    dispatcher
        .replace(2, copy(&scene.sockets[4]))
        .expect("replaced");
    scene.answer(4, &scene.client(), &long(INITIAL, V1, b"c", &beside));
    for (id, at) in [(&beside, 4), (&ids[2], 2), (&ids[1], 1)] {
        assert_eq!(scene.arrives(&scene.client(), &short(&another(id))), at);
    }
    scene.end(dispatcher);
}

#[test]
fn an_id_that_was_given_under_encryption_is_learned_from_the_flow_of_a_client_that_is_answered() {
    let Some(mut scene) = Scene::new(4, V4) else {
        return;
    };
    let dispatcher = scene.start();
    let (one, other) = (scene.connect(), scene.connect());
    let (new, foreign) = (scene.id(ID), scene.id(ID));
    assert_eq!(scene.arrives(&one.client, &short(&new)), one.socket);
    let elsewhere = scene.client();
    assert_eq!(scene.arrives(&elsewhere, &short(&new)), one.socket);
    // In the same second it teaches no other: it could fill the map.
    let many: Vec<Vec<u8>> = (0..50).map(|_| scene.id(ID)).collect();
    for id in &many {
        assert_eq!(scene.arrives(&one.client, &short(id)), one.socket);
    }
    let ids = |dispatcher: &Dispatcher| -> u64 {
        let quic = dispatcher.quic().expect("quic");
        quic.in_use(IN_USE).expect("counts").iter().sum()
    };
    assert!((3..8).contains(&ids(&dispatcher)), "{}", ids(&dispatcher));
    // One that was never answered teaches nothing, whatever it claims.
    let before = ids(&dispatcher);
    let liar = scene.client();
    let first = scene.id(8);
    scene.arrives(&liar, &long(INITIAL, V1, &first, b"c"));
    scene.arrives(&liar, &long(INITIAL, V1, &first, b"c"));
    scene.arrives(&liar, &short(&foreign));
    assert_eq!(ids(&dispatcher), before);
    assert!(scene.is_kept(&other));
    scene.end(dispatcher);
}

#[test]
fn connections_that_nobody_goes_on_with_push_out_no_other() {
    let Some(mut scene) = Scene::new(2, V4) else {
        return;
    };
    let dispatcher = scene.start();
    let all: Vec<Connection> = (0..50).map(|_| scene.connect()).collect();
    let ids = || -> u64 {
        let quic = dispatcher.quic().expect("quic");
        quic.in_use(IN_USE).expect("counts").iter().sum()
    };
    assert_eq!(ids(), 50);
    let client = scene.client();
    for _ in 0..200_000 {
        let first = scene.id(8);
        client.send(&long(INITIAL, V1, &first, b"")).expect("send");
    }
    for socket in &scene.sockets {
        while socket.recv(&mut [0; 2048]).is_ok() {}
    }
    assert_eq!(ids(), 50);
    assert!(all.iter().all(|one| scene.is_kept(one)));
    scene.end(dispatcher);
}

#[test]
fn what_is_no_packet_of_quic_reaches_some_worker() {
    let Some(mut scene) = Scene::new(4, V4) else {
        return;
    };
    let dispatcher = scene.start();
    scene.connect();
    let client = scene.client();
    let mut all = vec![
        vec![],
        vec![0],
        vec![0xff; 5],
        vec![0xff; 7],
        vec![0x40; 20],
    ];
    // IDs that are too long, and longer than their packet.
    let mut too_long = long(INITIAL, 0xabad_1dea, &[1; 20], b"");
    too_long[5] = 255;
    all.push(too_long);
    all.extend((0..200).map(|length| scene.id(length)));
    let sockets = counted(all.iter().map(|bytes| scene.arrives(&client, bytes)));
    assert_eq!(sockets.values().sum::<usize>(), all.len());
    scene.end(dispatcher);
}

#[test]
fn a_group_that_closes_refuses_new_connections_only() {
    let Some(mut scene) = Scene::new(2, V4) else {
        return;
    };
    let dispatcher = scene.start();
    let one = scene.connect();
    dispatcher.close().expect("closed");
    let first = scene.id(8);
    scene
        .client()
        .send(&long(INITIAL, V1, &first, b"c"))
        .expect("send");
    wait("it is refused", || exit(&dispatcher, "closing") == 1);
    assert!(scene.is_kept(&one));
    scene.end(dispatcher);
}

#[test]
fn no_policy_but_those_for_single_packets_is_refused() {
    let Some(scene) = Scene::new(2, V4) else {
        return;
    };
    let plan = scene.plan(Policy::Source);
    let copies = scene.sockets.iter().map(copy).collect();
    let refused = Dispatcher::start(&plan, copies).expect_err("refused");
    assert!(refused.to_string().contains("two-choices"), "{refused}");
    let plan = Plan {
        cgroup: None,
        ..scene.plan(Policy::LeastConnections)
    };
    let copies = scene.sockets.iter().map(copy).collect();
    let refused = Dispatcher::start(&plan, copies).expect_err("refused");
    assert!(refused.to_string().contains("cgroup2"), "{refused}");
    drop(cgroup::remove(&scene.ground.cgroup));
    scene.ground.nothing_left();
}
