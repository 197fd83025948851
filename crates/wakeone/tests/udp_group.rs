//! `UdpGroup`: steered by our program as root, else by the best that works without; and its example.

#[path = "../../../tests/support/patience.rs"]
mod patience;

use patience::patience;
use std::net::UdpSocket;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use wakeone::udp_group::{Batch, Choice, Options, UdpGroup};
use wakeone_control::paths::Paths;
use wakeone_control::policy::{Affinity, Policy};
use wakeone_control::status;
use wakeone_kernel::{capability, netns};

fn isolated() -> bool {
    let root = rustix::process::geteuid().is_root() && capability::missing().is_empty();
    if root {
        netns::isolate().expect("a network namespace");
    } else {
        eprintln!("skipped: not root");
    }
    root
}

fn options(folder: &tempfile::TempDir) -> Options {
    Options {
        runtime_dir: folder.path().join("run"),
        ..Options::default()
    }
}

/// Packets of QUIC go to the socket whose number their connection ID has, from whatever address.
#[test]
fn sockets_for_quic_have_numbers_that_lead_to_them() {
    if !isolated() {
        return;
    }
    let folder = tempfile::tempdir().expect("folder");
    let options = Options {
        affinity: Some(Affinity::Quic),
        ..options(&folder)
    };
    let address = "127.0.0.1:0".parse().expect("address");
    let group = UdpGroup::open(address, 3, &options).expect("a group");
    let to = group.local_addr().expect("address");
    assert_eq!(
        group.steering().choice,
        Choice::Program(Policy::LeastConnections, Affinity::Quic)
    );
    let sockets = group.into_sockets();
    for socket in &sockets {
        let mut id = [7; 8];
        id[1..3].copy_from_slice(&socket.quic_id().expect("a number").to_be_bytes());
        let client = || {
            let client = UdpSocket::bind("127.0.0.1:0").expect("bind");
            client.connect(to).expect("connect");
            client.set_read_timeout(Some(patience())).expect("a limit");
            client
        };
        // Its server is seen to use it, in a packet with a long header of version 1.
        let mut answer = vec![0xc0, 0, 0, 0, 1, 1, b'c', 8];
        answer.extend(id);
        answer.resize(100, 0);
        let begun = client();
        let back = begun.local_addr().expect("address");
        socket.send(&[(&answer, back)]).expect("send");
        begun.recv(&mut [0; 200]).expect("the answer");
        let mut packet = vec![0x40];
        packet.extend(id);
        packet.resize(40, 1);
        client().send(&packet).expect("send");
        let timeout = Some(patience());
        socket.socket().set_read_timeout(timeout).expect("timeout");
        let mut batch = Batch::new(4, 2048);
        assert_eq!(socket.receive(&mut batch).expect("its packet"), 1);
    }
}

/// Echoes until told to stop, with one thread for each socket. Returns how many datagrams each one echoed.
fn echo(group: UdpGroup, stop: &AtomicBool, clients: impl FnOnce()) -> Vec<usize> {
    /// Ends the threads, even if the clients fail.
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Relaxed);
        }
    }
    std::thread::scope(|scope| {
        let stopping = Stop(stop);
        let threads: Vec<_> = group
            .into_sockets()
            .into_iter()
            .map(|socket| {
                scope.spawn(move || {
                    let timeout = Some(Duration::from_millis(20));
                    socket.socket().set_read_timeout(timeout).expect("timeout");
                    let (mut batch, mut echoed) = (Batch::new(16, 65_535), 0);
                    while !stop.load(Relaxed) {
                        if socket.receive(&mut batch).is_ok() {
                            let back: Vec<_> =
                                batch.datagrams().map(|one| (one.bytes, one.from)).collect();
                            echoed += back.len();
                            socket.send(&back).expect("send");
                        }
                    }
                    echoed
                })
            })
            .collect();
        clients();
        drop(stopping);
        threads
            .into_iter()
            .map(|thread| thread.join().expect("thread"))
            .collect()
    })
}

fn ask(client: &UdpSocket, count: usize) {
    client.set_read_timeout(Some(patience())).expect("timeout");
    for number in 0..count {
        let sent = number.to_be_bytes();
        client.send(&sent).expect("send");
        let mut got = [0; 64];
        let length = client.recv(&mut got).expect("an echo");
        assert_eq!(&got[..length], sent);
    }
}

fn client(to: std::net::SocketAddr) -> UdpSocket {
    let client = UdpSocket::bind("127.0.0.1:0").expect("bind");
    client.connect(to).expect("connect");
    client
}

#[test]
fn steered_written_down_and_taken_away() {
    if !isolated() {
        return;
    }
    let folder = tempfile::tempdir().expect("folder");
    let options = Options {
        policy: Some(Policy::RoundRobin),
        affinity: Some(Affinity::None),
        join_datagrams: true,
        // A thread that waits 5 ms for a CPU, as on an otherwise busy machine, would be passed over.
        stuck_after: Duration::from_secs(10),
        ..options(&folder)
    };
    let address = "127.0.0.1:0".parse().expect("address");
    let group = UdpGroup::open(address, 4, &options).expect("group");
    let steering = group.steering();
    assert_eq!(
        steering.choice,
        Choice::Program(Policy::RoundRobin, Affinity::None)
    );
    let to = group.local_addr().expect("address");
    assert_ne!(to.port(), 0);
    let paths = Paths::of(&options.runtime_dir);
    let echoed = echo(group, &AtomicBool::new(false), || {
        ask(&client(to), 400);
        let status = status::read(&paths).expect("status");
        let [one] = status.groups.as_slice() else {
            panic!("{status:?}");
        };
        assert_eq!((one.protocol, one.fallbacks), ("udp", 0));
        assert_eq!(one.listen, [format!("udp://{to}")]);
        assert_eq!(one.supervisor_pid, Some(std::process::id()));
        let selected: Vec<u64> = one.slots.iter().map(|slot| slot.selected).collect();
        assert_eq!(selected, [100; 4]);
    });
    assert_eq!(echoed, [100; 4]);
    assert!(!options.runtime_dir.exists() && !paths.pins.exists());
}

#[test]
fn a_socket_that_retires_is_read_empty_and_nothing_is_lost() {
    if !isolated() {
        return;
    }
    let folder = tempfile::tempdir().expect("folder");
    let options = Options {
        policy: Some(Policy::RoundRobin),
        ..options(&folder)
    };
    let address = "127.0.0.1:0".parse().expect("address");
    let group = UdpGroup::open(address, 3, &options).expect("group");
    let to = group.local_addr().expect("address");
    let clients: Vec<UdpSocket> = (0..9).map(|_| client(to)).collect();
    let send = || {
        for client in &clients {
            client.send(b"one").expect("send");
        }
    };
    let count = |socket: &UdpSocket| {
        socket.set_nonblocking(true).expect("nonblocking");
        std::iter::from_fn(|| socket.recv(&mut [0; 8]).ok()).count()
    };
    send();
    let mut sockets = group.into_sockets();
    let retired = sockets.remove(0).retire().expect("socket");
    send();
    assert_eq!(count(&retired), 3, "what had come before");
    drop(retired);
    send();
    let read: usize = sockets.iter().map(|one| count(one.socket())).sum();
    assert_eq!(read, 6 + 9 + 9);
}

#[test]
fn a_thread_that_does_not_read_gets_no_new_flows() {
    if !isolated() {
        return;
    }
    let folder = tempfile::tempdir().expect("folder");
    let options = Options {
        policy: Some(Policy::RoundRobin),
        ..options(&folder)
    };
    let address = "127.0.0.1:0".parse().expect("address");
    let group = UdpGroup::open(address, 2, &options).expect("group");
    let to = group.local_addr().expect("address");
    let mut sockets = group.into_sockets();
    // Nobody reads the second one.
    let idle = sockets.pop().expect("two");
    let read = sockets.pop().expect("one");
    let stop = AtomicBool::new(false);
    let timeout = Some(patience());
    read.socket().set_read_timeout(timeout).expect("timeout");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut batch = Batch::new(16, 100);
            while !stop.load(Relaxed) {
                let count = read.receive(&mut batch).unwrap_or(0);
                assert!(count > 0);
            }
        });
        let clients = || (0..8).map(|_| client(to)).collect::<Vec<UdpSocket>>();
        let send = |clients: &[UdpSocket]| clients.iter().for_each(|one| drop(one.send(b"one")));
        let known = clients();
        send(&known);
        let paths = Paths::of(&options.runtime_dir);
        let slot =
            |number: usize| status::read(&paths).expect("status").groups[0].slots[number].clone();
        let start = Instant::now();
        while slot(1).state != "stuck" {
            assert!(start.elapsed() < patience(), "never: {:?}", slot(1));
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!((slot(0).selected, slot(1).selected), (4, 4));
        // Its flows stay: no other worker knows their sessions.
        send(&known);
        assert_eq!((slot(0).selected, slot(1).selected), (8, 8));
        let new = clients();
        (0..10).for_each(|_| send(&new));
        assert_eq!((slot(0).selected, slot(1).selected), (88, 8));
        stop.store(true, Relaxed);
        send(&known);
    });
    // Its socket is read again, so it is well.
    idle.socket().set_nonblocking(true).expect("nonblocking");
    let mut batch = Batch::new(16, 100);
    assert_eq!(idle.receive(&mut batch).expect("what waited"), 12);
    let paths = Paths::of(&options.runtime_dir);
    let start = Instant::now();
    while status::read(&paths).expect("status").groups[0].slots[1].state == "stuck" {
        assert!(start.elapsed() < patience(), "stuck for ever");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The running example; it ends with the test.
struct Example(Child);

impl Drop for Example {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_example_answers() {
    let own = std::env::current_exe().expect("own path");
    let example = own
        .parent()
        .and_then(|deps| deps.parent())
        .expect("target folder")
        .join("examples/dns_responder");
    if !example.exists() {
        // Cargo builds it beside the tests, unless only some of them were asked for.
        let made = Command::new(env!("CARGO"))
            .args([
                "build",
                "--quiet",
                "--package",
                "wakeone",
                "--example",
                "dns_responder",
            ])
            .status();
        assert!(made.expect("cargo").success());
    }
    let folder = tempfile::tempdir().expect("folder");
    let port = {
        let free = UdpSocket::bind("127.0.0.1:0").expect("bind");
        free.local_addr().expect("address").port()
    };
    let to = format!("127.0.0.1:{port}");
    let _example = Example(
        Command::new(example)
            .args([&to, "2"])
            .env("WAKEONE_RUNTIME_DIR", folder.path().join("run"))
            .stderr(Stdio::null())
            .spawn()
            .expect("the example"),
    );
    let client = client(to.parse().expect("address"));
    client
        .set_read_timeout(Some(Duration::from_millis(200)))
        .expect("timeout");
    let query = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x01a\x07example\0\0\x01\0\x01";
    let mut answer = [0; 512];
    let start = Instant::now();
    let length = loop {
        let asked = client.send(query).and_then(|_| client.recv(&mut answer));
        if let Ok(length) = asked {
            break length;
        }
        assert!(start.elapsed() < patience(), "no answer");
    };
    let answer = &answer[..length];
    assert_eq!(answer[..4], [0x12, 0x34, 0x85, 0]);
    assert_eq!(answer[6..8], [0, 1], "one answer");
    assert_eq!(answer[answer.len() - 4..], [192, 0, 2, 1]);
    // Drops answers to queries that were sent too early, on a slow machine.
    let answer = answer.to_vec();
    while client.recv(&mut [0; 512]).is_ok() {}
    // A packet that is no query gets no answer, and does no harm.
    for rubbish in [&b""[..], b"x", &[0xff; 40], &query[..20], &answer] {
        client.send(rubbish).expect("send");
        assert!(client.recv(&mut [0; 512]).is_err(), "{rubbish:?}");
    }
    client.send(query).expect("send");
    client.recv(&mut [0; 512]).expect("an answer still");
}
