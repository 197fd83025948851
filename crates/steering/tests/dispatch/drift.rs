//! No count drifts, whatever way connections take: a connection that was never counted in is never counted out.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use wakeone_bpf::Pinned;
use wakeone_bpf::chooser::Choosers;
use wakeone_bpf::recount::CountIn;
use wakeone_bpf::table::{Table, flag};
use wakeone_control::policy::Policy;
use wakeone_kernel::socket;
use wakeone_model::listener::Protocol;
use wakeone_steering::agent::recount::Recounts;
use wakeone_steering::dispatcher::Dispatcher;

use crate::ground::*;
use crate::patience::slowness;

/// Has the program choose only this slot, or none.
fn only(table: &Table, slot: Option<usize>) {
    for other in 0..slots(table) {
        table.slot(other).mark(flag::UP, Some(other) == slot);
    }
}

/// Moves what waits at a listener to a slot, or to where the kernel likes.
fn move_to(ground: &Ground, pinned: &Pinned, from: usize, to: Option<usize>) {
    only(pinned.table(), to);
    let listener = &ground.listeners[from];
    rustix::net::shutdown(listener, rustix::net::Shutdown::Read).expect("shutdown");
    rustix::net::listen(listener, BACKLOG).expect("listen");
    pinned.put(0, from, listener).expect("put");
}

/// Makes that many slots, and `others`: listeners at the next indexes that the program may choose, but that have no slot.
fn with_others(slots: usize, others: usize) -> Option<(Ground, Dispatcher, Pinned)> {
    // All are made in the cgroup where connections are counted.
    let all = || (0..slots + others).map(|_| listen(V4, BACKLOG)).collect();
    let mut ground = Ground::new(all)?;
    let beside = ground.listeners.split_off(slots);
    let dispatcher = ground.start(Policy::LeastConnections);
    ground.listeners.extend(beside);
    let pinned = ground.pinned();
    for at in slots..slots + others {
        pinned.put(0, at, &ground.listeners[at]).expect("put");
        pinned.table().slot(at).weight().store(1, Relaxed);
    }
    let all = (slots + others) as u32;
    pinned.table().slots().store(all, Relaxed);
    Some((ground, dispatcher, pinned))
}

#[test]
fn what_was_born_without_a_tag_is_counted_out_of_no_slot() {
    let Some((ground, dispatcher, pinned)) = with_others(2, 1) else {
        return;
    };
    let table = pinned.table();
    only(table, Some(2));
    let clients = connect_many(V4, 5);
    wait("all wait there", || ground.queues() == [0, 0, 5]);
    // The first move comes off a listener that nobody knows; the others off known ones.
    for (from, to) in [(2, 0), (0, 1), (1, 0)] {
        move_to(&ground, &pinned, from, Some(to));
        assert_eq!(ground.queues()[to], 5);
        assert_eq!(actives(table), [0, 0, 0], "moved from {from} to {to}");
    }
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn what_our_program_does_not_see_is_taken_back_when_it_is_gone() {
    let Some(mut ground) = ground(2, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let pinned = ground.pinned();
    let table = pinned.table();
    // It was made in another cgroup: its connections have tags, and no program counts them.
    ground.listeners.push(listen(V4, BACKLOG));
    let other = &ground.listeners[2];
    pinned.put(0, 2, other).expect("put");
    table.slot(2).weight().store(1, Relaxed);
    table.slots().store(3, Relaxed);
    pinned.know_listener(2, other).expect("known");
    pinned.settle(socket::cookie(other).expect("cookie"));
    only(table, Some(2));
    let clients = connect_many(V4, 5);
    wait("all wait there", || ground.queues() == [0, 0, 5]);
    move_to(&ground, &pinned, 2, Some(0));
    move_to(&ground, &pinned, 0, Some(1));
    assert_eq!(actives(table), [0, 5, -5]);
    drop((clients, ground.accept_all()));
    let mut notes = pinned.notes().expect("notes");
    wait("their notes are gone", || {
        notes.tidy(table, 0).expect("tidy");
        table.moved_live() == 0
    });
    assert_eq!((actives(table), pinned.moved()), (vec![0; 3], 0));
    ground.end(dispatcher);
}

#[test]
fn what_the_kernel_moves_is_counted_where_it_was_until_our_program_moves_it() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let pinned = ground.pinned();
    let table = pinned.table();
    only(table, Some(0));
    let clients = connect_many(V4, 5);
    wait_for_actives(table, &[5, 0]);
    move_to(&ground, &pinned, 0, None);
    assert_eq!((ground.queues(), actives(table)), (vec![0, 5], vec![5, 0]));
    move_to(&ground, &pinned, 1, None);
    assert_eq!((ground.queues(), actives(table)), (vec![5, 0], vec![5, 0]));
    move_to(&ground, &pinned, 0, Some(1));
    assert_eq!((ground.queues(), actives(table)), (vec![0, 5], vec![0, 5]));
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn what_a_listener_had_before_it_joined_is_counted_in() {
    let Some((mut ground, dispatcher, pinned)) = with_others(2, 1) else {
        return;
    };
    let table = pinned.table();
    only(table, Some(2));
    let clients = connect_many(V4, 9);
    wait("all wait there", || ground.queues() == [0, 0, 9]);
    let accepted: Vec<TcpStream> = (0..4)
        .map(|_| ground.listeners[2].accept().expect("accept").0)
        .collect();
    pinned
        .know_listener(2, &ground.listeners[2])
        .expect("known");
    // Moved before they are counted in: no slot is charged.
    move_to(&ground, &pinned, 2, Some(1));
    assert_eq!(
        (ground.queues(), actives(table)),
        (vec![0, 5, 0], vec![0; 3])
    );
    let inode = |one: &TcpStream| rustix::fs::fstat(one).expect("stat").st_ino;
    let held = accepted.iter().map(|one| (inode(one), 2));
    let recounted = ground.count_in(held);
    assert_eq!((recounted.counted, recounted.unattributed), (9, 0));
    assert_eq!(actives(table), [0, 5, 4]);
    // Those that a client resets are counted until the server closes them, and no list of sockets shows them.
    let mut recounts = Recounts::of(&ground.pins(), 8080).expect("counts");
    let mut clients = clients.into_iter();
    clients.by_ref().take(3).for_each(reset);
    for _ in 0..3 {
        drop(connect(V4));
        recounts.recount().expect("recount");
        assert_eq!(
            (table.slot(2).active().load(Relaxed), mended(table)),
            (4, 0)
        );
    }
    drop((accepted, clients));
    ground.settle();
    recounts.recount().expect("recount");
    assert_eq!((actives(table), mended(table)), (vec![0; 3], 0));
    drop(ground.listeners.pop());
    ground.end(dispatcher);
}

#[test]
fn a_count_that_is_wrong_all_the_same_is_mended() {
    let Some(ground) = ground(3, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let pinned = ground.pinned();
    let table = pinned.table();
    let clients = connect_many(V4, 30);
    wait_for_actives(table, &[10; 3]);
    move_to(&ground, &pinned, 0, Some(1));
    assert_eq!(actives(table), [0, 20, 10]);
    let mut recounts = Recounts::of(&ground.pins(), 8080).expect("counts");
    recounts.recount().expect("recount");
    assert_eq!((actives(table), mended(table)), (vec![0, 20, 10], 0));
    table.slot(0).correct(7);
    table.slot(1).correct(-3);
    // Something must happen, or nothing is recounted.
    only(table, Some(2));
    let one_more = connect(V4);
    wait_for_actives(table, &[7, 17, 11]);
    recounts.recount().expect("recount");
    assert_eq!(actives(table), [7, 17, 11], "one recount may be wrong");
    recounts.recount().expect("recount");
    assert_eq!((actives(table), mended(table)), (vec![0, 20, 11], 10));
    drop((clients, one_more));
    ground.settle();
    ground.end(dispatcher);
}

/// The kernel's log, from now on.
struct KernelLog(File);

impl KernelLog {
    fn from_here() -> Self {
        let mut open = File::options();
        open.read(true)
            .custom_flags(OFlags::NONBLOCK.bits().cast_signed());
        let mut log = open.open("/dev/kmsg").expect("the kernel's log");
        log.seek(SeekFrom::End(0)).expect("its end");
        Self(log)
    }

    /// The warnings since then that concern TCP, or references.
    fn warnings(&mut self) -> Vec<String> {
        let mut record = [0; 8192];
        let mut warnings = Vec::new();
        while let Ok(length) = self.0.read(&mut record) {
            let text = String::from_utf8_lossy(&record[..length]).into_owned();
            if text.contains("WARNING")
                && ["tcp", "inet", "refcount"]
                    .iter()
                    .any(|of| text.contains(of))
            {
                warnings.push(text);
            }
        }
        warnings
    }
}

/// A walk over the kernel's table of connections would have it warn, and lose one of them now and then.
#[test]
fn recounts_beside_moves_and_ends_mend_nothing() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    let mut log = KernelLog::from_here();
    let dispatcher = ground.start(Policy::LeastConnections);
    let pinned = ground.pinned();
    let table = pinned.table();
    let mut recounts = Recounts::of(&ground.pins(), 8080).expect("counts");
    let count_in = CountIn::of(&ground.pins(), &ground.cgroup).expect("count in");
    let choosers = Choosers::of(Protocol::Tcp, 8080).expect("programs");
    let at = ground.listeners[0].local_addr().expect("address");
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let recounting = scope.spawn(|| {
            while !over.load(Relaxed) {
                recounts.recount().expect("recount");
                let found = count_in.run(at, &HashMap::new(), &ground.listeners);
                let found = found.expect("count in");
                assert_eq!((found.counted, found.unattributed), (0, 0));
                choosers.look(None).expect("programs");
                // The agent waits for a second. A program that an emulated CPU leaves in the middle is then done.
                std::thread::sleep(Duration::from_millis(4) * (slowness() - 1));
            }
        });
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(2) {
            only(table, Some(0));
            let _clients = connect_many(V4, 8);
            wait("all wait there", || ground.queues() == [8, 0]);
            move_to(&ground, &pinned, 0, Some(1));
            wait("all are moved", || ground.queues() == [0, 8]);
            drop(ground.accept(1));
        }
        over.store(true, Relaxed);
        recounting.join().expect("recounts");
    });
    assert_eq!((actives(table), mended(table)), (vec![0, 0], 0));
    assert_eq!(log.warnings(), Vec::<String>::new());
    ground.settle();
    ground.end(dispatcher);
}

fn mended(table: &Table) -> u64 {
    table.drift_mended().load(Relaxed)
}

/// A small generator, so that a failure can be repeated by its seed.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        // SplitMix64, Steele and others 2014.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}

/// A connection as the reference knows it.
struct Connection {
    client: Option<TcpStream>,
    address: SocketAddr,
    served: Option<TcpStream>,
    /// The slot that counts it.
    home: Option<usize>,
    /// Whether a move changes that; known from the first move on.
    follows: Option<bool>,
    open: bool,
}

/// A listener, as the reference knows it.
#[derive(Clone, Copy, PartialEq)]
struct Known {
    /// Where its connections are counted; none: nobody knows the listener.
    slot: Option<usize>,
    known: bool,
    settled: bool,
}

/// Slots 0 to 2, and a stranger.
const LISTENERS: usize = 4;
const STRANGER: usize = 3;

struct Reference<'a> {
    ground: &'a Ground,
    pinned: &'a Pinned,
    listeners: [Known; LISTENERS],
    /// The connections that wait at each listener, in order.
    queues: [Vec<Connection>; LISTENERS],
    accepted: Vec<Connection>,
}

impl Reference<'_> {
    fn table(&self) -> &Table {
        self.pinned.table()
    }

    fn birth(&mut self, at: usize) {
        only(self.table(), Some(at));
        let client = connect(V4);
        let address = client.local_addr().expect("address");
        let home = self.listeners[at].slot;
        self.queues[at].push(Connection {
            client: Some(client),
            address,
            served: None,
            home,
            follows: None,
            open: true,
        });
    }

    fn step(&mut self, from: usize, to: Option<usize>) {
        // Where the kernel puts a connection is only seen of a single one.
        if to.is_none() && self.queues[from].len() > 1 {
            return;
        }
        let before = self.ground.queues();
        move_to(self.ground, self.pinned, from, to);
        let after = self.ground.queues();
        let there = to.or_else(|| (0..LISTENERS).find(|at| after[*at] > before[*at]));
        let Known { known, settled, .. } = self.listeners[from];
        for mut one in std::mem::take(&mut self.queues[from]) {
            if one.open && *one.follows.get_or_insert(known && settled) && to.is_some() {
                one.home = to;
            }
            self.queues[there.expect("a listener")].push(one);
        }
    }

    /// Tags a listener for another slot.
    fn retag(&mut self, at: usize, slot: usize) {
        let listener = &self.ground.listeners[at];
        self.pinned.know_listener(slot, listener).expect("known");
        let before = self.listeners[at];
        let same = before.known && before.slot == Some(slot);
        let settled = same && before.settled || self.queues[at].is_empty();
        if self.queues[at].is_empty() {
            self.pinned
                .settle(socket::cookie(listener).expect("cookie"));
        }
        self.listeners[at] = Known {
            slot: Some(slot),
            known: true,
            settled,
        };
    }

    fn accept(&mut self, at: usize) {
        if self.queues[at].is_empty() {
            return;
        }
        let (served, peer) = self.ground.listeners[at].accept().expect("accept");
        let mut one = self.queues[at].remove(0);
        assert_eq!(peer, one.address, "the order of a queue");
        one.served = Some(served);
        self.accepted.push(one);
    }

    fn end_accepted(&mut self, random: &mut Random) {
        if self.accepted.is_empty() {
            return;
        }
        let at = random.below(self.accepted.len());
        let one = self.accepted.swap_remove(at);
        match random.below(3) {
            0 => drop((one.served, one.client)),
            1 => drop((one.client, one.served)),
            _ => {
                one.client.into_iter().for_each(reset);
                drop(one.served);
            }
        }
    }

    /// Resets what waits, or half-closes it, which changes nothing.
    fn end_waiting(&mut self, at: usize, random: &mut Random) {
        let waiting = self.queues[at].len();
        if waiting == 0 {
            return;
        }
        let one = &mut self.queues[at][random.below(waiting)];
        if random.below(3) == 0 {
            let client = one.client.iter();
            client.for_each(|one| drop(one.shutdown(std::net::Shutdown::Write)));
        } else if let Some(client) = one.client.take() {
            reset(client);
            one.open = false;
        }
    }

    fn expected(&self) -> Vec<i64> {
        let mut counts = vec![0; LISTENERS];
        let waiting = self.queues.iter().flatten();
        for one in waiting.chain(&self.accepted).filter(|one| one.open) {
            if let Some(home) = one.home {
                counts[home] += 1;
            }
        }
        counts
    }

    fn act(&mut self, random: &mut Random) {
        let at = random.below(LISTENERS);
        match random.below(12) {
            0..=3 => self.birth(at),
            4..=6 => {
                let to = random.below(STRANGER);
                if to != at {
                    self.step(at, Some(to));
                }
            }
            7 => self.step(at, None),
            8 if at < STRANGER => {
                let slot = random.below(STRANGER);
                self.retag(at, slot);
            }
            8 | 9 => self.accept(at),
            10 => self.end_accepted(random),
            _ => self.end_waiting(at, random),
        }
    }
}

#[test]
fn counts_are_those_of_a_reference_whatever_happens() {
    let Some((ground, dispatcher, pinned)) = with_others(STRANGER, 1) else {
        return;
    };
    let table = pinned.table();
    for seed in 0..24 {
        let mut reference = Reference {
            ground: &ground,
            pinned: &pinned,
            listeners: std::array::from_fn(|at| Known {
                slot: (at < STRANGER).then_some(at),
                known: at != STRANGER,
                settled: true,
            }),
            queues: Default::default(),
            accepted: Vec::new(),
        };
        for slot in 0..STRANGER {
            reference.retag(slot, slot);
        }
        let mut random = Random(seed);
        for step in 0..60 {
            reference.act(&mut random);
            let expected = reference.expected();
            wait(
                &format!("the reference's counts, seed {seed}, step {step}: {expected:?}"),
                || actives(table) == expected,
            );
        }
        drop(reference);
        ground.settle();
    }
    assert_eq!(mended(table), 0);
    ground.end(dispatcher);
}
