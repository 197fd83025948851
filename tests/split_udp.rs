//! `wakeone run --split` on unchanged servers whose threads or processes read one UDP socket. Each gets a queue of its
//! own, and no datagram is lost or read twice.
//!
//! These tests need root. A message tells of it.

#[path = "support/mod.rs"]
mod support;

use rustix::process::Signal;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::time::Duration;
use support::real::installed;
use support::sessions::{self, Sessions};
use support::split::{PORT, Split, address, as_nobody, check, for_another_user};
use support::steered::{assert_nothing_left, soak, status, sum, wakeone};
use support::{Run, eventually, halt, server, signal, slowly};
use wakeone_kernel::socket::diag::{Which, sockets};
use wakeone_model::listener::Protocol;

/// Threads that receive from one UDP socket get a queue each. If a thread ends, others answer the datagrams in its
/// queue.
#[test]
fn python_threads_of_one_udp_socket() {
    let port = PORT.to_string();
    let script = server("datagrams.py");
    let Some(split) = Split::start(&[], &["python3", &script, &port, "4"]) else {
        return;
    };
    let client = || {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("bind");
        socket.connect(address()).expect("connect");
        socket
            .set_read_timeout(Some(Duration::from_millis(200)))
            .expect("timeout");
        socket
    };
    let ask = |socket: &std::net::UdpSocket, what: &str| {
        let mut answer = [0_u8; 100];
        socket.send(what.as_bytes())?;
        let length = socket.recv(&mut answer)?;
        let text = String::from_utf8_lossy(&answer[..length]).into_owned();
        Ok::<_, std::io::Error>(text)
    };
    eventually("it answers", || ask(&client(), "x").is_ok());
    // A client stays with the thread of its first datagram.
    eventually("each thread has a queue", || readers_up(&split).len() == 4);
    let clients: Vec<_> = (0..32).map(|_| client()).collect();
    let mut threads = BTreeSet::new();
    eventually("all four threads answer", || {
        for client in &clients {
            if let Ok(answer) = ask(client, "x") {
                threads.extend(answer.split(' ').next().map(str::to_owned));
            }
        }
        threads.len() >= 4
    });
    for round in 0..40 {
        clients[round % 32].send(b"end").expect("send");
        for (number, client) in clients.iter().enumerate() {
            let wish = format!("{round}-{number}");
            // A client asks again if it gets no answer. The answer to an earlier question may come late.
            let answered = (0..50).any(|_| {
                ask(client, &wish).is_ok_and(|answer| answer.ends_with(&format!(" {wish}")))
            });
            assert!(answered, "no answer to {wish}");
        }
    }
    let lines = split.ends_by(Signal::TERM);
    assert!(
        lines.iter().any(|line| line.contains("/udp is split")),
        "{lines:?}"
    );
}

const DATAGRAMS: &str = "at-udp-127-0-0-1-7400";
/// Each datagram is placed anew.
const EACH: [&str; 7] = [
    "--policy",
    "round-robin",
    "--no-rescue",
    "--stuck-after",
    "60s",
    "--affinity",
    "none",
];

/// How many answers came from each reader.
type Shares = BTreeMap<String, u32>;

/// One flow of numbers, from a client that has a few under way. Each must be answered exactly once.
struct Flow {
    socket: UdpSocket,
    next: u32,
    sent: u32,
}

impl Flow {
    fn start() -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("bind");
        socket.connect(address()).expect("connect");
        let patience = Duration::from_secs(5);
        socket.set_read_timeout(Some(patience)).expect("timeout");
        Self {
            socket,
            next: 0,
            sent: 0,
        }
    }

    /// Returns a flow that has had its first answer.
    fn served() -> Self {
        let mut flow = Self::start();
        eventually("it answers", || {
            flow.sent += 1;
            let _ = flow.socket.send(b"x");
            flow.socket.recv(&mut [0; 100]).is_ok()
        });
        flow
    }

    fn say(&mut self, what: &str) {
        self.socket.send(what.as_bytes()).expect("send");
        self.sent += 1;
    }

    /// Asks `count` times, ten at a time.
    fn ask(&mut self, count: u32) -> Shares {
        let mut shares = Shares::new();
        for _ in 0..count / 10 {
            self.ask_at_once(10, &mut shares);
        }
        shares
    }

    fn ask_at_once(&mut self, count: u32, shares: &mut Shares) {
        let mut wanted: BTreeSet<String> = (self.next..self.next + count)
            .map(|number| number.to_string())
            .collect();
        self.next += count;
        for number in &wanted {
            self.say(number);
        }
        self.answers(&mut wanted, shares);
    }

    fn answers(&self, wanted: &mut BTreeSet<String>, shares: &mut Shares) {
        while !wanted.is_empty() {
            let mut answer = [0_u8; 100];
            let length = match self.socket.recv(&mut answer) {
                Ok(length) => length,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => panic!("{wanted:?} of {} lost: {error}", self.next),
            };
            let text = String::from_utf8_lossy(&answer[..length]);
            let (who, number) = text.split_once(' ').expect("an answer");
            if number == "x" {
                continue; // of when it was looked whether anybody is there
            }
            assert!(wanted.remove(number), "{number} twice");
            *shares.entry(who.to_owned()).or_default() += 1;
        }
    }
}

fn assert_even(shares: &Shares, readers: usize) {
    let most = shares.values().max().copied().unwrap_or(0);
    let mean = f64::from(shares.values().sum::<u32>()) / readers as f64;
    assert!(
        shares.len() == readers && f64::from(most) <= 1.1 * mean,
        "{shares:?}"
    );
}

/// The readers that `status` shows.
fn readers_up(split: &Split) -> Vec<u32> {
    let group = split.status();
    let slots = group["slots"].as_array().cloned().unwrap_or_default();
    let up = slots.iter().filter(|slot| slot["state"] == "up");
    up.filter_map(|slot| slot["pid"].as_u64())
        .map(|pid| pid as u32)
        .collect()
}

/// One client sends, and each datagram is placed anew, so every thread reads its part. Threads come and go, and no
/// datagram bypasses the program: it placed as many as were sent, and one more for each thread that ended. (That empty
/// one only wakes another thread.)
#[test]
fn threads_of_one_udp_socket_are_steered() {
    let port = PORT.to_string();
    let script = server("datagrams.py");
    let Some(split) = Split::start(&EACH, &["python3", &script, &port, "4"]) else {
        return;
    };
    let mut flow = Flow::served();
    eventually("four threads have a slot each", || {
        flow.ask(10);
        readers_up(&split).len() == 4
    });
    let group = status(&split.ground, DATAGRAMS);
    assert_eq!(group["protocol"], "udp", "{group}");
    assert_eq!(group["policy"], "round-robin", "{group}");
    assert_even(&flow.ask(400), 4);
    let placed = || sum(&status(&split.ground, DATAGRAMS), "selected");
    let (before, sent) = (placed(), flow.sent);
    let ends = if soak() { 500 } else { 40 };
    for _ in 0..ends {
        flow.say("end");
        flow.ask(40);
    }
    eventually("four threads have a slot each again", || {
        flow.ask(10);
        readers_up(&split).len() == 4
    });
    assert_even(&flow.ask(400), 4);
    let (placed, sent) = (placed() - before, i64::from(flow.sent - sent));
    assert!(
        (sent..=sent + ends).contains(&placed),
        "{placed} placed, {sent} sent, {ends} woken"
    );
    assert_eq!(status(&split.ground, DATAGRAMS)["fallbacks"], 0);
    let lines = split.ends_by(Signal::TERM);
    let split = |line: &String| line.contains("/udp is split") && line.contains("round-robin");
    assert!(lines.iter().any(split), "{lines:?}");
}

/// The kernel's hash knows one flow, and gives all of it to one reader, as it does without us.
#[test]
fn by_hash_one_flow_has_one_reader() {
    let port = PORT.to_string();
    let script = server("datagrams.py");
    let options = ["--policy", "hash"];
    let Some(split) = Split::start(&options, &["python3", &script, &port, "4"]) else {
        return;
    };
    let mut flow = Flow::served();
    // Threads get their queues when they first receive. The others follow soon.
    eventually("four threads have a slot each", || {
        readers_up(&split).len() == 4
    });
    let shares = flow.ask(200);
    assert_eq!(shares.len(), 1, "{shares:?}");
    split.ends_by(Signal::TERM);
}

/// The same server in C, with every way to receive. Threads come and go, and leave no descriptor.
#[test]
fn threads_in_c_receive_every_datagram_once_by_whatever_call() {
    let folder = tempfile::tempdir().expect("folder");
    let program = folder.path().join("datagrams");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../shim/tests/datagrams.c");
    let program = program.display().to_string();
    let compiled = std::process::Command::new("cc")
        .args(["-O1", "-pthread", "-o", &program, source])
        .status();
    if !compiled.is_ok_and(|status| status.success()) {
        panic!("{source} is not compiled");
    }
    for call in ["recv", "recvfrom", "recvmsg", "recvmmsg", "read"] {
        let Some(split) = Split::start(&EACH, &[&program, call, "5000"]) else {
            return;
        };
        let Split { ground, run } = split;
        let (code, lines) = run.wait();
        assert!(code.success(), "{call}: {lines:?}");
        assert_nothing_left(&ground);
    }
}

/// Processes that share one UDP socket have a queue each, however they wait for it. If one is killed, the others answer
/// the datagrams in its queue.
#[test]
fn processes_of_one_udp_socket_are_steered_and_killed() {
    for (wait, each) in [
        ("recv", 1),
        ("poll", 1),
        ("epoll", 1),
        ("asyncio", 1),
        ("threads", 2),
    ] {
        let port = PORT.to_string();
        let script = server("datagrams_prefork.py");
        let Some(split) = Split::start(&EACH, &["python3", &script, &port, "4", wait]) else {
            return;
        };
        let mut flow = Flow::served();
        eventually("four processes have their slots", || {
            flow.ask(10);
            readers_up(&split).len() == 4 * each
        });
        assert_even(&flow.ask(400), 4);
        for _ in 0..5 {
            if each > 1 {
                // The broker lets some process read the queue that the thread leaves.
                flow.say("end thread");
                flow.ask(100);
            }
            let victim = readers_up(&split)[0];
            // Datagrams wait unread in its queue when it dies: no more than our own buffer has room for answers.
            halt(victim);
            let mut wanted: BTreeSet<String> = (flow.next..flow.next + 200)
                .map(|number| number.to_string())
                .collect();
            flow.next += 200;
            for number in &wanted {
                flow.say(number);
            }
            signal(victim, Signal::KILL);
            flow.answers(&mut wanted, &mut Shares::new());
            eventually("it has a successor", || {
                let up = readers_up(&split);
                up.len() == 4 * each && !up.contains(&victim)
            });
        }
        assert_even(&flow.ask(400), 4);
        assert_eq!(status(&split.ground, DATAGRAMS)["fallbacks"], 0, "{wait}");
        split.ends();
    }
}

/// An epoll set from before the fork has the shared socket. Nothing is split, and the log says so once.
#[test]
fn a_udp_socket_that_was_polled_before_the_fork_is_left_alone() {
    let port = PORT.to_string();
    let script = server("datagrams_prefork.py");
    let Some(split) = Split::start(&EACH, &["python3", &script, &port, "3", "before"]) else {
        return;
    };
    Flow::served().ask(200);
    assert_eq!(split.status(), Value::Null);
    let lines = split.ends();
    let said = |line: &&String| line.contains("registered before the fork");
    assert_eq!(lines.iter().filter(said).count(), 1, "{lines:?}");
}

/// Sessions stay with their workers, though these shared one socket, and one of them is always busy.
#[test]
fn sessions_stay_with_the_readers_of_one_udp_socket() {
    let port = PORT.to_string();
    let script = server("sessions.py");
    let Some(split) = Split::start(&[], &["python3", &script, &port, "shared", "4"]) else {
        return;
    };
    // The readers get their queues when they first receive.
    let early = Sessions::start(address(), 1);
    eventually("four processes have a queue", || {
        readers_up(&split).len() == 4
    });
    drop(early);
    let sessions = Sessions::start(address(), 12);
    assert!(sessions.workers().len() > 1);
    assert_eq!(sessions.strangers(), 0);
    assert_eq!(status(&split.ground, DATAGRAMS)["spread_flows"], 0);
    split.ends();
}

/// One client keeps several datagrams of 5 ms each under way. Returns which workers answered the last ones.
fn hurry(flow: &UdpSocket, count: u32) -> BTreeSet<u32> {
    const AT_ONCE: u32 = 24;
    let send = || flow.send(b"nap 5 on").expect("send");
    (0..AT_ONCE).for_each(|_| {
        send();
    });
    let mut workers = BTreeSet::new();
    for number in 0..count {
        let answer = sessions::answer(flow).expect("an answer");
        if number + AT_ONCE < count {
            send();
        } else {
            workers.insert(answer.worker);
        }
    }
    workers
}

/// One client that sends more than one reader can read must not leave the others idle: they shared the socket before. The
/// log says so once. `--affinity flow` keeps its flow together all the same.
#[test]
fn a_flow_that_is_too_much_for_one_reader_is_spread() {
    let port = PORT.to_string();
    let script = server("sessions.py");
    for (options, spread) in [(&[][..], true), (&["--affinity", "flow"], false)] {
        let Some(split) = Split::start(options, &["python3", &script, &port, "shared", "4"]) else {
            return;
        };
        let quiet = Sessions::start(address(), 1);
        eventually("four processes have a queue", || {
            readers_up(&split).len() == 4
        });
        let flow = sessions::client(address());
        let workers = hurry(&flow, 400);
        if spread {
            assert!(workers.len() > 1, "{workers:?}");
        } else {
            assert_eq!(workers.len(), 1);
        }
        hurry(&flow, 400);
        let group = status(&split.ground, DATAGRAMS);
        let counted = (group["spread_flows"].clone(), group["heavy_flows"].clone());
        let expected = if spread { (1, 0) } else { (0, 1) };
        assert_eq!(counted, (expected.0.into(), expected.1.into()), "{group}");
        drop(quiet);
        let lines = split.ends();
        let said = |line: &&String| line.contains("one client sends");
        assert_eq!(lines.iter().filter(said).count(), 1, "{lines:?}");
    }
}

/// For another user, without any privilege, the kernel's hash chooses, and the log says so. No datagram is lost then
/// either. The account of a service has neither a home nor a folder at run time, and may be root of a user namespace.
#[test]
fn without_privileges_udp_readers_get_queues_all_the_same() {
    for (root_of_a_namespace, has_a_folder) in [(false, true), (false, false), (true, false)] {
        let Some((folder, binary, runtime)) = for_another_user("datagrams_prefork.py") else {
            return;
        };
        let Some(mut command) = as_nobody(root_of_a_namespace) else {
            return;
        };
        command
            .arg(&binary)
            .args(["run", "--split", "--affinity", "none", "--runtime-dir"])
            .arg(&runtime)
            .args(["--", "/usr/bin/env", "python3"])
            .arg(folder.path().join("datagrams_prefork.py"))
            .args([&PORT.to_string(), "3", "recv"]);
        if has_a_folder {
            command.env("XDG_RUNTIME_DIR", &runtime);
        }
        let run = Run::start(command);
        let mut flow = Flow::served();
        eventually("two have queues, and one the shared socket", || {
            queues() == 3
        });
        let mut seen = BTreeSet::new();
        eventually("all three processes answer", || {
            let mut other = Flow::start();
            seen.extend(other.ask(10).into_keys());
            seen.len() == 3
        });
        for _ in 0..10 {
            flow.say("end");
            let mut other = Flow::start();
            other.ask(40);
        }
        let lines = run.stop();
        let told = |what: &str| lines.iter().any(|line| line.contains(what));
        assert!(told("nothing steers: that needs"), "{lines:?}");
        assert!(!told("ld.so"), "{lines:?}");
    }
}

/// How many UDP sockets take datagrams from anybody at the server's address.
fn queues() -> usize {
    let sockets = sockets(Protocol::Udp, Which::Listening, PORT).expect("sock_diag");
    sockets.iter().filter(|e| e.peer.port() == 0).count()
}

#[test]
fn a_check_changes_nothing_and_tells() {
    let (datagrams, port) = (server("datagrams_prefork.py"), PORT.to_string());
    let Some((code, told)) = check(&["python3", &datagrams, &port, "2", "recv"]) else {
        return;
    };
    assert_eq!(code, Some(0), "{told}");
    let own = told
        .lines()
        .filter(|line| line.contains("would get a queue of its own"));
    assert_eq!(own.count(), 2, "{told}");
    let command = ["python3", &server("prefork.py"), "epoll", &port, "2"];
    let (_, told) = check(&command).expect("root");
    let steered = "127.0.0.1:7400 would be steered: 2 workers share one queue";
    assert!(told.contains(steered), "{told}");
    let (_, told) = check(&["sleep", "3"]).expect("root");
    assert!(told.starts_with("nothing to split"), "{told}");
}

#[test]
fn go_is_left_as_it_is() {
    if !installed("go") {
        return eprintln!("skipped: go is not installed");
    }
    let folder = tempfile::tempdir().expect("folder");
    let binary = folder.path().join("server").display().to_string();
    let built = std::process::Command::new("go")
        .args(["build", "-o", &binary, &server("go/main.go")])
        .env("GO111MODULE", "off")
        .status();
    assert!(built.expect("go").success());
    let Some((code, told)) = check(&[&binary, "127.0.0.1:7400"]) else {
        return;
    };
    assert_eq!(code, Some(1));
    assert!(told.contains("is a Go program"), "{told}");
    let mut split = Split::start(&[], &[&binary, "127.0.0.1:7400"]).expect("root");
    split.run.line("no UDP socket is split: ");
    slowly("it listens", || {
        TcpStream::connect("127.0.0.1:7400").is_ok()
    });
    split.ends_by(Signal::TERM);
}

/// The listeners of a server are steered as without --split. This one opens its UDP socket, at a low port, after that: the
/// privileges that queues take are still there.
#[test]
fn listeners_are_steered_beside_udp_sockets() {
    let folder = tempfile::tempdir().expect("folder");
    let flag = folder.path().join("flag");
    let script = format!(
        "python3 {} epoll 7401 2 & while [ ! -e {} ]; do sleep .1; done; exec python3 {} 1000 2 recv",
        server("prefork.py"),
        flag.display(),
        server("datagrams_prefork.py")
    );
    let Some(mut split) = Split::start(&[], &["sh", "-c", &script]) else {
        return;
    };
    split.run.line("at-127-0-0-1-7401 is steered");
    std::fs::write(&flag, "").expect("flag");
    split.run.line("127.0.0.1:1000/udp is split");
    let up = |name: &str| {
        let group = status(&split.ground, name);
        let slots = group["slots"].as_array().cloned().unwrap_or_default();
        slots.iter().filter(|slot| slot["state"] == "up").count()
    };
    slowly("both processes read their own queues", || {
        up("at-udp-127-0-0-1-1000") == 2
    });
    assert_eq!(up("at-127-0-0-1-7401"), 2);
    for _ in 0..50 {
        let mut answer = String::new();
        let mut stream = TcpStream::connect("127.0.0.1:7401").expect("connect");
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n").expect("send");
        stream.read_to_string(&mut answer).expect("an answer");
        assert!(answer.ends_with("ok"), "{answer}");
    }
    split.ends();
}

/// `wakeone run` is killed: the readers go on with their queues, and `detach` takes what was left.
#[test]
fn after_kill_9_the_readers_go_on_and_detach_takes_the_pins() {
    let (script, port) = (server("datagrams_prefork.py"), PORT.to_string());
    let Some(split) = Split::start(&EACH, &["python3", &script, &port, "3", "recv"]) else {
        return;
    };
    split.settled(3);
    let Split { ground, run } = split;
    let first = wakeone_kernel::proc::process::children(run.pid())[0];
    let library = library_of(first);
    let mut flow = Flow::served();
    run.murder();
    assert_even(&flow.ask(300), 3);
    let output = wakeone(&ground, &["detach", "--all"]);
    assert!(output.status.success(), "{output:?}");
    // The program stays on the sockets, and chooses by hash: not the one that nobody reads.
    for _ in 0..20 {
        Flow::start().ask(10);
    }
    signal(first, Signal::TERM);
    slowly("it ends", || !support::runs(first));
    std::fs::remove_dir_all(library).expect("the library's folder");
    assert_nothing_left(&ground);
}

/// The folder of the library that a process was started with; it stays when `wakeone run` is killed.
fn library_of(pid: u32) -> std::path::PathBuf {
    let variables = std::fs::read_to_string(format!("/proc/{pid}/environ")).expect("variables");
    let library = variables
        .split('\0')
        .find_map(|variable| variable.strip_prefix("LD_PRELOAD="))
        .expect("the library");
    let folder = std::path::Path::new(library).parent().expect("folder");
    folder.to_owned()
}

/// The broker gets foreign bytes, wrong tokens and silent connections, and still serves the others.
#[test]
fn hostile_clients_of_the_broker_are_survived() {
    use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
    let (script, port) = (server("datagrams_prefork.py"), PORT.to_string());
    let Some(split) = Split::start(&EACH, &["python3", &script, &port, "2", "recv"]) else {
        return;
    };
    split.settled(2);
    let names = std::fs::read_to_string("/proc/thread-self/net/unix").expect("sockets");
    let name = names
        .lines()
        .find_map(|line| Some(line.split_once("@wakeone-split-")?.1.trim().to_owned()))
        .expect("the broker's name");
    let name = format!("wakeone-split-{name}");
    let mut open = Vec::new();
    for round in 0_u32..300 {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let kind = SocketType::SEQPACKET;
        let client = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None);
        let client = client.expect("socket");
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("name");
        let _ = rustix::net::connect(&client, &address);
        let noise: Vec<u8> = (0..round % 80).map(|at| (at * 7 + round) as u8).collect();
        if round % 3 > 0 {
            let _ = rustix::net::send(&client, &noise, SendFlags::NOSIGNAL);
        }
        open.push(client);
    }
    // Silent connections delay others for as long as a conversation may take at most; their number is bounded.
    drop(open.split_off(200));
    let mut flow = Flow::served();
    for _ in 0..2 {
        let victim = *split.settled(2).first().expect("a reader");
        signal(victim, Signal::KILL);
        slowly("it has a successor with a queue", || {
            let up = split.up();
            up.len() == 2 && !up.contains(&victim)
        });
        assert_even(&flow.ask(200), 2);
    }
    drop(open);
    split.ends();
}

/// Threads wait on one epoll set. Any of them may be woken, and must find the datagram, so all share the socket.
#[test]
fn threads_that_poll_one_udp_socket_share_it() {
    for wait in ["epoll", "unbound"] {
        let port = PORT.to_string();
        let script = server("datagrams.py");
        let Some(split) = Split::start(&EACH, &["python3", &script, &port, "4", wait]) else {
            return;
        };
        let mut flow = Flow::served();
        for _ in 0..20 {
            flow.say("end");
            flow.ask(40);
        }
        assert_eq!(split.status(), Value::Null, "{wait}");
        split.ends_by(Signal::TERM);
    }
}
