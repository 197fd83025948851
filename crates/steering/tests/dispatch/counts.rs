//! Active counts are exact while connections live, and back at 0 when they are gone, whatever way they went.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::process::Command;

use wakeone_bpf::recount::Recounted;
use wakeone_bpf::table::{MAX_SLOTS, flag};
use wakeone_control::policy::Policy;
use wakeone_kernel::socket;
use wakeone_steering::dispatcher::{Dispatcher, Plan};

use crate::ground::*;

/// Makes four slots by least-connections with 20 connections that wait, and runs `then` on them.
fn twenty(then: impl FnOnce(&Ground, &Dispatcher, Vec<TcpStream>)) {
    let Some(ground) = ground(4, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let clients = connect_many(V4, 20);
    wait_for_actives(dispatcher.table(), &[5; 4]);
    then(&ground, &dispatcher, clients);
    ground.settle();
    assert_eq!(exits(dispatcher.table()), [("selected", 20)]);
    ground.end(dispatcher);
}

#[test]
fn the_client_closes_first() {
    twenty(|ground, dispatcher, clients| {
        let mut served = ground.accept_all();
        drop(clients);
        for stream in &mut served {
            assert_eq!(stream.read(&mut [0; 1]).expect("end of stream"), 0);
        }
        // The worker has not closed yet: it may still work for them.
        assert_eq!(actives(dispatcher.table()), [5; 4]);
        drop(served);
        wait_for_actives(dispatcher.table(), &[0; 4]);
    });
}

#[test]
fn the_server_closes_first() {
    twenty(|ground, dispatcher, clients| {
        drop(ground.accept_all());
        wait_for_actives(dispatcher.table(), &[0; 4]);
        drop(clients);
    });
}

#[test]
fn half_closed_either_way() {
    twenty(|ground, dispatcher, mut clients| {
        let mut served = ground.accept_all();
        for client in &clients {
            client.shutdown(Shutdown::Write).expect("shutdown");
        }
        for stream in &mut served {
            assert_eq!(stream.read(&mut [0; 1]).expect("end of stream"), 0);
            stream.write_all(b"late").expect("answer");
        }
        assert_eq!(actives(dispatcher.table()), [5; 4]);
        for stream in &served {
            stream.shutdown(Shutdown::Write).expect("shutdown");
        }
        wait_for_actives(dispatcher.table(), &[0; 4]);
        for client in &mut clients {
            let mut answer = String::new();
            client.read_to_string(&mut answer).expect("answer");
            assert_eq!(answer, "late");
        }
    });
}

#[test]
fn reset_by_the_client_while_it_waits() {
    twenty(|ground, dispatcher, clients| {
        clients.into_iter().for_each(reset);
        wait_for_actives(dispatcher.table(), &[0; 4]);
        // The queue still holds them: the kernel leaves them to accept.
        assert_eq!(ground.queues(), [5; 4]);
    });
}

#[test]
fn reset_by_the_client_after_accept() {
    twenty(|ground, dispatcher, clients| {
        let served = ground.accept_all();
        clients.into_iter().for_each(reset);
        wait_for_actives(dispatcher.table(), &[0; 4]);
        drop(served);
    });
}

#[test]
fn reset_by_the_server() {
    twenty(|ground, dispatcher, clients| {
        ground.accept_all().into_iter().for_each(reset);
        wait_for_actives(dispatcher.table(), &[0; 4]);
        drop(clients);
    });
}

#[test]
fn more_than_the_queues_hold() {
    let Some(ground) = Ground::new(|| vec![listen(V4, 1), listen(V4, 1)]) else {
        return;
    };
    let plan = Plan {
        backlog: 1,
        ..ground.plan(Policy::LeastConnections)
    };
    let dispatcher = ground.try_start(&plan).expect("dispatcher");
    let table = dispatcher.table();
    // With cookies the kernel answers more SYNs than it admits, and forgets them.
    sysctl("tcp_syncookies", "0");
    // The kernel admits four retries at a time, and each retry comes twice as late as the last.
    let clients: Vec<_> = (0..10).map(|_| begin_connect(V4)).collect();
    // The kernel admits one more than the backlog.
    wait("full queues", || ground.queues() == [2, 2]);
    assert_eq!(
        actives(table),
        [2, 2],
        "what was not admitted does not count"
    );
    // The clients that were left out retry one second later, and find room.
    let mut served = Vec::new();
    wait("all are served", || {
        served.extend(ground.accept_all());
        served.len() == clients.len()
    });
    wait_for_established(table, 10);
    assert_eq!(actives(table).iter().sum::<i64>(), 10);
    drop((clients, served));
    ground.settle();
    ground.end(dispatcher);
}

fn sysctl(name: &str, value: &str) {
    // The setting of this thread's network namespace.
    std::fs::write(format!("/proc/sys/net/ipv4/{name}"), value).expect("sysctl");
}

#[test]
fn syn_cookies_run_the_program_twice_and_count_once() {
    let Some(ground) = ground(4, V4) else {
        return;
    };
    sysctl("tcp_syncookies", "2");
    let dispatcher = ground.start(Policy::LeastConnections);
    let table = dispatcher.table();
    let clients = connect_many(V4, 20);
    wait_for_actives(table, &[5; 4]);
    wait_for_established(table, 20);
    assert_eq!(selected(table).iter().sum::<u64>(), 40);
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
}

/// Connects with data in the SYN, `argv[2]` times; resets half of them.
const FAST_OPEN: &str = "
import socket, struct, sys, time
host, port = sys.argv[1].split(':')
held = []
for i in range(int(sys.argv[2])):
    s = socket.socket()
    s.sendto(b'hello', 0x20000000, (host, int(port)))
    if i % 2:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
    held.append(s)
print('sent', flush=True)
sys.stdin.read()
";

#[test]
fn fast_open_with_data_in_the_syn() {
    let Some(ground) = Ground::new(|| {
        // Enables client, server and data without a cookie, for every listener from now on (include/net/tcp.h, TFO_*).
        sysctl(
            "tcp_fastopen",
            &(0x1 | 0x2 | 0x4 | 0x200 | 0x400).to_string(),
        );
        (0..4).map(|_| listen(V4, BACKLOG)).collect()
    }) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let table = dispatcher.table();
    let mut client = Command::new("python3")
        .args(["-c", FAST_OPEN, V4, "20"])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("python3");
    let mut said = [0; 5];
    let output = client.stdout.as_mut().expect("stdout");
    output.read_exact(&mut said).expect("client");
    wait_for_actives(table, &[5; 4]);
    assert!(fast_opened() >= 20, "data came in SYNs");
    let mut served = ground.accept(0);
    let mut text = [0; 5];
    served[0].read_exact(&mut text).expect("data");
    assert_eq!(&text, b"hello");
    drop(client.stdin.take());
    assert!(client.wait().expect("client").success());
    drop(served);
    ground.settle();
    ground.end(dispatcher);
}

/// Returns TcpExt TCPFastOpenPassive of this thread's network namespace.
fn fast_opened() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/net/netstat").expect("netstat");
    let mut lines = text.lines().filter(|line| line.starts_with("TcpExt:"));
    let (names, values) = (lines.next().expect("names"), lines.next().expect("values"));
    let pair = names
        .split(' ')
        .zip(values.split(' '))
        .find(|(name, _)| *name == "TCPFastOpenPassive");
    pair.expect("TCPFastOpenPassive").1.parse().expect("number")
}

#[test]
fn a_listener_that_closes_hands_its_queue_on() {
    let Some(mut ground) = ground(3, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let mut clients = connect_many(V4, 30);
    wait_for_actives(dispatcher.table(), &[10; 3]);
    for client in &mut clients {
        client.write_all(b"hello").expect("request");
    }
    // Only the socket's last descriptor closes it, and the dispatcher has one.
    let pinned = ground.pinned();
    drop(dispatcher);
    drop(ground.listeners.remove(0));
    let table = pinned.table();
    wait("all were moved", || actives(table)[0] == 0);
    // The empty slot is still the least loaded one. The program asks others, beginning with a random one.
    assert_eq!(actives(table).iter().sum::<i64>(), 30);
    assert_eq!(exit(table, "migrated"), 10);
    assert_eq!((table.moved_live(), pinned.moved()), (10, 10));
    let queues = ground.queues().into_iter().map(i64::from);
    assert_eq!(actives(table)[1..], queues.collect::<Vec<_>>());
    answer_all(&ground, clients);
    ground.settle();
    let copies = ground.listeners.iter();
    let copies = copies.map(|one| vec![one.try_clone().expect("descriptor").into()]);
    let plan = ground.plan(Policy::Hash);
    let successor = Dispatcher::start(&plan, copies.collect()).expect("dispatcher");
    ground.end(successor);
}

/// Checks that every client sent `hello`, and gets an answer from whichever slot has it now.
fn answer_all(ground: &Ground, clients: Vec<TcpStream>) {
    for mut stream in ground.accept_all() {
        let mut text = [0; 5];
        stream.read_exact(&mut text).expect("request");
        assert_eq!(&text, b"hello");
        stream.write_all(b"bye").expect("answer");
    }
    for mut client in clients {
        let mut answer = String::new();
        client.read_to_string(&mut answer).expect("answer");
        assert_eq!(answer, "bye");
    }
}

#[test]
fn a_queue_that_is_moved_once_and_twice() {
    let Some(ground) = ground(3, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let table = dispatcher.table();
    let mut clients = connect_many(V4, 30);
    wait_for_actives(table, &[10; 3]);
    for client in &mut clients {
        client.write_all(b"hello").expect("request");
    }
    let move_from = |slot: usize| {
        table.slot(slot).mark(flag::DRAINING, true);
        let moved = dispatcher.move_queues(slot).expect("move").connections;
        table.slot(slot).mark(flag::DRAINING, false);
        moved
    };
    assert_eq!(move_from(0), 10);
    assert_eq!(actives(table), [0, 15, 15]);
    assert_eq!(ground.queues(), [0, 15, 15]);
    assert_eq!(table.moved_live(), 10);
    // Five of those are moved for the second time, and ten for the first time.
    assert_eq!(move_from(1), 15);
    assert_eq!(actives(table).iter().sum::<i64>(), 30);
    let queues = ground.queues().into_iter().map(i64::from);
    assert_eq!(actives(table), queues.collect::<Vec<_>>());
    assert_eq!(actives(table)[1], 0);
    assert_eq!((table.moved_live(), ground.pinned().moved()), (20, 20));
    assert_eq!(exits(table), [("selected", 30), ("migrated", 25)]);
    // The slots whose queues were moved get connections again.
    clients.extend(connect_many(V4, 6));
    wait_for_established(table, 36);
    assert!(actives(table)[1] > 0, "{:?}", actives(table));
    for client in &mut clients[30..] {
        client.write_all(b"hello").expect("request");
    }
    answer_all(&ground, clients);
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn moved_connections_that_are_reset() {
    let Some(ground) = ground(3, V4) else {
        return;
    };
    let dispatcher = ground.start(Policy::LeastConnections);
    let table = dispatcher.table();
    let mut clients = connect_many(V4, 30);
    wait_for_actives(table, &[10; 3]);
    // Some clients leave before the move. Their dead connections are in no count, and must not get into one.
    let (gone, moved): (Vec<_>, Vec<_>) = clients
        .drain(..)
        .zip(0..)
        .partition(|(_, number)| number % 2 == 0);
    gone.into_iter().for_each(|(client, _)| reset(client));
    wait("half of them gone", || {
        actives(table).iter().sum::<i64>() == 15
    });
    let alive_in_0 = actives(table)[0];
    table.slot(0).mark(flag::DRAINING, true);
    dispatcher.move_queues(0).expect("move");
    assert_eq!(actives(table)[0], 0);
    assert_eq!(actives(table).iter().sum::<i64>(), 15);
    assert_eq!(table.moved_live(), alive_in_0 as u64);
    moved.into_iter().for_each(|(client, _)| reset(client));
    wait_for_actives(table, &[0; 3]);
    assert_eq!(table.moved_live(), 0);
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn without_counting_a_move_counts_nothing() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    let plan = Plan {
        cgroup: None,
        ..ground.plan(Policy::ShortestQueue)
    };
    let dispatcher = ground.try_start(&plan).expect("dispatcher");
    let table = dispatcher.table();
    let clients = connect_many(V4, 20);
    wait("all wait", || ground.queues().iter().sum::<u32>() == 20);
    let waiting = ground.queues()[0];
    table.slot(0).mark(flag::DRAINING, true);
    assert_eq!(
        dispatcher.move_queues(0).expect("move").connections,
        waiting
    );
    assert_eq!(ground.queues(), [0, 20]);
    assert_eq!(exit(table, "migrated"), u64::from(waiting));
    // No later event would correct these counts.
    assert_eq!(actives(table), [0, 0]);
    assert_eq!((table.moved_live(), ground.pinned().moved()), (0, 0));
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
}

/// Makes two slots, with connections in their queues that came before the program, and that nobody can count: while they
/// should be, the listeners are those of no slot. Returns the result of that too.
fn came_before(ground: &Ground) -> (Dispatcher, Vec<TcpStream>, Recounted) {
    let clients = connect_many(V4, 20);
    wait("all wait", || ground.queues().iter().sum::<u32>() == 20);
    let dispatcher = ground.start(Policy::LeastConnections);
    let recounted = nobody_knows(ground);
    (dispatcher, clients, recounted)
}

/// Counts in while the listeners are those of no slot.
fn nobody_knows(ground: &Ground) -> Recounted {
    let pinned = ground.pinned();
    let give = |slot_of: fn(usize) -> usize| {
        for (slot, listener) in ground.listeners.iter().enumerate() {
            pinned
                .know_listener(slot_of(slot), listener)
                .expect("known");
        }
    };
    give(|_| MAX_SLOTS);
    let recounted = ground.count_in([]);
    give(|slot| slot);
    for listener in &ground.listeners {
        pinned.settle(socket::cookie(listener).expect("cookie"));
    }
    recounted
}

/// Moves a slot's queue to the other.
fn move_away(dispatcher: &Dispatcher, slot: usize) {
    let place = dispatcher.table().slot(slot);
    place.mark(flag::DRAINING, true);
    dispatcher.move_queues(slot).expect("move");
    place.mark(flag::DRAINING, false);
}

#[test]
fn no_move_is_counted_of_what_waited_before_and_nobody_could_count() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    let (dispatcher, mut clients, recounted) = came_before(&ground);
    assert_eq!((recounted.counted, recounted.unattributed), (0, 20));
    let table = dispatcher.table();
    let marks = || ground.pinned().moved();
    let mut notes = ground.pinned().notes().expect("notes");
    assert_eq!((marks(), table.moved_live()), (20, 20));

    // Moves them there and back, one of them gone meanwhile, and beside connections that are counted.
    move_away(&dispatcher, 0);
    assert_eq!((actives(table), table.moved_live()), (vec![0, 0], 20));
    reset(clients.remove(0));
    let counted = connect_many(V4, 6);
    wait_for_actives(table, &[3, 3]);
    move_away(&dispatcher, 1);
    assert_eq!((actives(table), table.moved_live()), (vec![6, 0], 23));

    // A mark stays as long as its connection waits, and is gone afterwards.
    wait("the reset is noticed", || {
        notes.tidy(table, 8080).expect("tidy");
        marks() == 19 + 3
    });
    // Another agent finds the same marks.
    let again = nobody_knows(&ground);
    assert_eq!(
        (again.counted, again.unattributed, marks()),
        (0, 19, 19 + 3)
    );
    let served = ground.accept_all();
    wait("all marks gone", || {
        notes.tidy(table, 8080).expect("tidy");
        marks() == 3
    });
    assert_eq!((actives(table), table.moved_live()), (vec![6, 0], 3));

    drop((served, clients, counted));
    ground.settle();
    ground.end(dispatcher);
}

#[test]
fn what_waited_before_is_counted() {
    let Some(ground) = ground(2, V4) else {
        return;
    };
    // The next agent counts connections that one before it could not count.
    let (dispatcher, clients, before) = came_before(&ground);
    assert_eq!((before.unattributed, ground.pinned().moved()), (20, 20));
    let recounted = ground.count_in([]);
    assert_eq!((recounted.counted, recounted.unattributed), (20, 0));
    assert_eq!(ground.pinned().moved(), 0);
    let queues: Vec<i64> = ground.queues().into_iter().map(i64::from).collect();
    assert_eq!(actives(dispatcher.table()), queues);
    move_away(&dispatcher, 0);
    assert_eq!(actives(dispatcher.table()), [0, 20]);
    drop(clients);
    ground.settle();
    ground.end(dispatcher);
}
