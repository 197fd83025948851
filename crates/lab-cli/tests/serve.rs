//! Every architecture of `wakeone-lab serve`, started as a user starts it and driven over loopback.

mod support;

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::process::Command;
use std::time::{Duration, Instant};

use command_fds::{CommandFdExt, FdMapping};
use nix::sys::signal::Signal;
use support::ways::{ways, with_each};
use support::{Client, Response, Server, wait_for};

fn request(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n").into_bytes()
}

#[test]
fn answers_and_says_who_did() {
    with_each("2", &[], |server, way| {
        let answer = server.get("/whoami");
        assert_eq!(answer.status, 200, "{way}");
        assert!(["0", "1"].contains(&answer.worker()), "{way}: {answer:?}");
        let who = answer.text();
        assert!(
            who.contains(&format!("\"worker\":\"{}\"", answer.worker())),
            "{way}: {who}"
        );
        assert!(
            who.contains(&format!("\"pid\":{}", answer.pid())),
            "{way}: {who}"
        );
        assert_eq!(server.get("/").status, 200, "{way}");
        assert_eq!(server.get("/nothing").status, 404, "{way}");
        assert_eq!(server.get("/work?us=100&kind=sleep").status, 200, "{way}");
        assert_eq!(server.get("/work?us=100&kind=cpu").status, 200, "{way}");
        assert_eq!(server.get("/work?us=x").status, 400, "{way}");
        let count = if way.contains("-w 2") {
            "2 workers)"
        } else {
            "1 worker)"
        };
        assert!(server.ready_line.ends_with(count), "{}", server.ready_line);
    });
}

#[test]
fn who_serves() {
    for way in ways() {
        let model = way.arguments[1];
        let pid_of = |workers| {
            let server = Server::start(&[way.arguments, &["-w", workers]].concat());
            let pid = server.get("/whoami").pid().to_owned();
            let itself = pid == server.child.id().to_string();
            server.stop();
            itself
        };
        let itself = !["forking", "fd-passing"].contains(&model);
        assert_eq!(
            pid_of("1"),
            itself,
            "{model}: one worker is the process itself"
        );
        if way.workers {
            assert_eq!(
                pid_of("2"),
                model == "prethreaded",
                "{model}: workers are processes"
            );
        }
    }
}

#[test]
fn work_takes_its_time() {
    with_each("1", &[], |server, way| {
        for kind in ["sleep", "cpu"] {
            let started = Instant::now();
            server.get(&format!("/work?us=20000&kind={kind}"));
            assert!(
                started.elapsed() >= Duration::from_millis(20),
                "{way} {kind}"
            );
        }
    });
}

#[test]
fn a_connection_is_kept_and_pipelined() {
    with_each("2", &[], |server, way| {
        let mut client = server.connect();
        client.send(&request("/whoami"));
        let first = client.response();
        assert_eq!(first.header("connection"), "keep-alive", "{way}");
        let many = [request("/whoami"), request("/no"), request("/whoami")].concat();
        client.send(&many);
        let statuses: Vec<u16> = (0..3)
            .map(|_| {
                let answer = client.response();
                assert_eq!(answer.pid(), first.pid(), "{way}: the same worker");
                answer.status
            })
            .collect();
        assert_eq!(statuses, [200, 404, 200], "{way}");
        client.send(b"HEAD /whoami HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
        let head = client.response_to("HEAD");
        assert!(head.header("content-length").len() > 1, "{way}: {head:?}");
        client.expect_end();
    });
}

#[test]
fn without_keep_alive_each_answer_closes() {
    with_each("1", &["--no-keep-alive"], |server, way| {
        let mut client = server.connect();
        client.send(&request("/"));
        let answer = client.response();
        assert_eq!(answer.header("connection"), "close", "{way}");
        client.expect_end();
    });
}

#[test]
fn http_1_0_closes_unless_asked_not_to() {
    with_each("1", &[], |server, way| {
        assert_eq!(server.get("/").header("connection"), "close", "{way}");
        let mut client = server.connect();
        for _ in 0..2 {
            client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
            assert_eq!(
                client.response().header("connection"),
                "keep-alive",
                "{way}"
            );
        }
    });
}

#[test]
fn a_byte_at_a_time() {
    with_each("1", &[], |server, way| {
        let mut client = server.connect();
        for _ in 0..2 {
            for byte in request("/whoami") {
                client.send(&[byte]);
            }
            assert_eq!(client.response().status, 200, "{way}");
        }
    });
}

#[test]
fn the_client_may_end_its_side_first() {
    with_each("1", &[], |server, way| {
        let mut client = server.connect();
        client.send(&request("/whoami"));
        client
            .stream
            .shutdown(std::net::Shutdown::Write)
            .expect("a half close");
        assert_eq!(client.response().status, 200, "{way}");
        client.expect_end();
    });
}

#[test]
fn bad_requests_are_refused_and_the_refusal_arrives() {
    let long = "x".repeat(100_000);
    with_each("1", &[], |server, way| {
        let refused = |bytes: &[u8]| {
            let mut client = server.connect();
            client.send(bytes);
            let answer = client.response();
            client.expect_end();
            answer.status
        };
        assert_eq!(refused(b"nonsense\r\n\r\n"), 400, "{way}");
        assert_eq!(refused(b"GET / HTTP/1.1\r\n\r\n"), 400, "{way}");
        assert_eq!(
            refused(format!("GET /{long} HTTP/1.0\r\n\r\n").as_bytes()),
            414,
            "{way}"
        );
        let header = format!("GET / HTTP/1.0\r\nA: {long}\r\n\r\n");
        assert_eq!(refused(header.as_bytes()), 431, "{way}");
        let body = format!("POST / HTTP/1.0\r\nContent-Length: 100000\r\n\r\n{long}");
        assert_eq!(refused(body.as_bytes()), 413, "{way}");
        assert_eq!(refused(b"DELETE / HTTP/1.0\r\n\r\n"), 405, "{way}");
    });
}

#[test]
fn a_slow_request_is_told_and_a_silent_client_is_not() {
    with_each("1", &["--header-timeout", "1"], |server, way| {
        let mut client = server.connect();
        client.send(b"GET / HTTP/1.1\r\nHo");
        assert_eq!(client.response().status, 408, "{way}");
        client.expect_end();
        server.connect().expect_end();
    });
}

/// Connections that are open at the same time reach all workers of a blocking model, which serve one each.
#[test]
fn all_preforked_workers_accept() {
    let server = Server::start(&["--model", "preforked", "-w", "4"]);
    let mut open: Vec<Client> = Vec::new();
    let (mut workers, mut pids) = (BTreeSet::new(), BTreeSet::new());
    for _ in 0..4 {
        let mut client = server.connect();
        client.send(&request("/whoami"));
        let answer = client.response();
        workers.insert(answer.worker().to_owned());
        pids.insert(answer.pid().to_owned());
        open.push(client);
    }
    assert_eq!(workers, ["0", "1", "2", "3"].map(str::to_owned).into());
    assert_eq!(pids.len(), 4);
    // A fifth connection waits until one of the workers is free.
    let mut fifth = server.connect();
    fifth.send(&request("/whoami"));
    let mut first = open.remove(0);
    first.send(b"GET /whoami HTTP/1.0\r\n\r\n");
    let freed = first.response();
    assert_eq!(fifth.response().worker(), freed.worker());
    drop((open, fifth));
    server.stop();
}

/// `--counter` counts each answer of each worker once, refusals and answers on one connection included. It continues
/// from the number in the file.
#[test]
fn every_answer_is_counted_once() {
    let directory = tempfile::tempdir().expect("a directory");
    for (turn, way) in ways().iter().enumerate() {
        let file = directory.path().join(turn.to_string());
        let counted = || {
            let bytes = std::fs::read(&file).expect("the counter's file");
            u64::from_ne_bytes(bytes.try_into().expect("8 bytes"))
        };
        let name = way.arguments.join(" ");
        let workers = if way.workers { "2" } else { "1" };
        let file_argument = file.to_str().expect("a plain path");
        let arguments = [way.arguments, &["-w", workers, "--counter", file_argument]].concat();
        for so_far in [0, 8] {
            let server = Server::start(&arguments);
            for path in ["/whoami", "/nothing", "/work?us=0", "/whoami", "/whoami"] {
                server.get(path);
            }
            let mut client = server.connect();
            for _ in 0..2 {
                client.send(&request("/whoami"));
                client.response();
            }
            client.send(b"nonsense\r\n\r\n");
            client.response();
            assert_eq!(counted(), so_far + 8, "{name}");
            drop(client);
            server.stop();
            assert_eq!(counted(), so_far + 8, "{name}");
        }
    }
}

/// With `rotate`, connections one after another go to the idle workers in turn.
#[test]
fn rotate_goes_round() {
    let server = Server::start(&["--model", "epoll-prefork", "--epoll", "rotate", "-w", "3"]);
    let answers: Vec<Response> = (0..12)
        .map(|_| {
            // Time for the last worker to wait again.
            std::thread::sleep(Duration::from_millis(20));
            server.get("/whoami")
        })
        .collect();
    for worker in ["0", "1", "2"] {
        let count = answers
            .iter()
            .filter(|answer| answer.worker() == worker)
            .count();
        assert!(
            (3..=5).contains(&count),
            "worker {worker} got {count} of 12"
        );
    }
    server.stop();
}

#[test]
fn each_worker_has_a_queue_with_reuseport() {
    for way in ways() {
        let model = way.arguments.join(" ");
        if !model.contains("reuseport") {
            continue;
        }
        let server = Server::start(&[way.arguments, &["-w", "2"]].concat());
        let workers: BTreeSet<String> = (0..40)
            .map(|_| server.get("/whoami").worker().to_owned())
            .collect();
        assert_eq!(workers.len(), 2, "{model}: the hash reaches both");
        server.stop();
    }
}

/// The stop comes while one connection has a request in work and another is idle. The first is answered, the other
/// closed, and all processes end well.
#[test]
fn a_stop_finishes_the_request_in_hand() {
    for way in ways() {
        let name = way.arguments.join(" ");
        let count = if way.workers { "2" } else { "1" };
        let mut server = Server::start(&[way.arguments, &["-w", count]].concat());
        // Only if a second connection is served beside the first. If each worker has a listener, the hash may put
        // both into the queue of the same worker.
        let beside = !way.one_at_a_time || (way.workers && !name.contains("--reuseport"));
        let idle = beside.then(|| {
            let mut idle = server.connect();
            idle.send(&request("/whoami"));
            idle.response();
            idle
        });
        let mut busy = server.connect();
        busy.send(&request("/whoami"));
        busy.response();
        busy.send(&request("/work?us=300000&kind=sleep"));
        std::thread::sleep(Duration::from_millis(100));
        server.signal(Signal::SIGTERM);
        let answer = busy.response();
        assert_eq!(answer.status, 200, "{name}");
        assert_eq!(answer.header("connection"), "close", "{name}");
        busy.expect_end();
        if let Some(mut idle) = idle {
            idle.expect_end();
        }
        let (status, said) = server.wait();
        assert!(status.success(), "{name}: {status}: {said}");
        assert_eq!(said, "", "{name}");
    }
}

/// A client has connected, and sends its request only after the stop. It is still answered if the connection has been
/// accepted.
#[test]
fn a_stop_waits_for_the_request_of_an_accepted_connection() {
    for way in ways() {
        let name = way.arguments.join(" ");
        let mut server = Server::start(way.arguments);
        let mut late = server.connect();
        late.send(b"GET /whoami HT");
        std::thread::sleep(Duration::from_millis(100));
        server.signal(Signal::SIGTERM);
        std::thread::sleep(Duration::from_millis(100));
        late.send(b"TP/1.1\r\nHost: a\r\n\r\n");
        let answer = late.response();
        assert_eq!(
            (answer.status, answer.header("connection")),
            (200, "close"),
            "{name}"
        );
        let (status, said) = server.wait();
        assert!(status.success(), "{name}: {status}: {said}");
    }
}

#[test]
fn a_stop_ends_idle_workers_at_once() {
    with_each("3", &[], |_, _| {}); // `stop` checks that it ends well
}

#[test]
fn the_workers_go_with_their_master() {
    let mut server = Server::start(&["--model", "preforked", "-w", "3"]);
    let pid = server.get("/whoami").pid().to_owned();
    server.signal(Signal::SIGKILL);
    assert!(!server.wait().0.success());
    let end = Instant::now() + support::PATIENCE;
    while std::path::Path::new(&format!("/proc/{pid}")).exists() {
        assert!(Instant::now() < end, "worker {pid} is still there");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_worker_that_dies_is_reported_and_the_others_go_on() {
    let mut server = Server::start(&["--model", "preforked", "-w", "2"]);
    let pid = server.get("/whoami").pid().to_owned();
    let victim = nix::unistd::Pid::from_raw(pid.parse().expect("a pid"));
    nix::sys::signal::kill(victim, Signal::SIGKILL).expect("a worker can be killed");
    let line = server.next_line();
    assert!(
        line.contains(&format!("(pid {pid}) ended by SIGKILL; 1 left")),
        "{line}"
    );
    // Only now, because a connection that it accepts while it dies is lost.
    let other = server.get("/whoami").pid().to_owned();
    assert_ne!(other, pid);
    server.signal(Signal::SIGTERM);
    let (status, said) = server.wait();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("1 of the workers ended before"), "{said}");
}

/// Starts the server with these listeners, handed over as sd_listen_fds(3) says.
fn start_with(listeners: &[TcpListener], arguments: &[&str]) -> Server {
    // The shell puts its own pid where the protocol expects the server's, then becomes it.
    let mut command = Command::new("sh");
    command
        .args(["-c", "LISTEN_PID=$$ exec \"$0\" serve \"$@\""])
        .arg(support::program())
        .args(arguments)
        .env("LISTEN_FDS", listeners.len().to_string())
        .env("WAKEONE_SLOT", "7");
    let mappings = listeners
        .iter()
        .enumerate()
        .map(|(index, listener)| FdMapping {
            parent_fd: listener.as_fd().try_clone_to_owned().expect("a copy"),
            child_fd: 3 + index as i32,
        })
        .collect();
    command.fd_mappings(mappings).expect("distinct numbers");
    Server::spawn(&mut command)
}

/// The models as a supervisor runs them, also the dispatched one.
fn supervised() -> Vec<&'static str> {
    let mut models = vec!["dispatched"];
    models.extend(ways().iter().map(|way| way.arguments[1]));
    models.dedup();
    models
}

#[test]
fn inherited_listeners_are_all_served() {
    for model in supervised() {
        for count in [1, 2] {
            let listeners: Vec<_> = (0..count)
                .map(|_| TcpListener::bind("127.0.0.1:0").expect("a port"))
                .collect();
            let server = start_with(&listeners, &["--model", model]);
            for _ in 0..3 {
                for listener in &listeners {
                    let mut client = Client::connect(listener.local_addr().expect("an address"));
                    client.send(b"GET /whoami HTTP/1.0\r\n\r\n");
                    let answer = client.response();
                    assert_eq!(answer.worker(), "7", "{model}: the slot is the name");
                }
            }
            server.stop();
            // Connections that were not accepted stay in the queue, which other processes hold.
            let _waits = Client::connect(listeners[0].local_addr().expect("an address"));
            assert!(listeners[0].accept().is_ok(), "{model}");
        }
    }
}

/// An inherited listener may already be non-blocking.
#[test]
fn an_inherited_listener_that_does_not_wait() {
    for model in supervised() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.set_nonblocking(true).expect("a flag");
        let server = start_with(std::slice::from_ref(&listener), &["--model", model]);
        for _ in 0..3 {
            assert_eq!(server.get("/whoami").status, 200, "{model}");
        }
        let ticks = cpu_ticks(server.child.id());
        std::thread::sleep(Duration::from_millis(300));
        assert!(
            cpu_ticks(server.child.id()) - ticks < 10,
            "{model} does not sleep"
        );
        server.stop();
    }
}

/// CPU time of a process, in ticks of 10 ms.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it is there");
    let fields: Vec<&str> = stat
        .rsplit(") ")
        .next()
        .expect("fields")
        .split(' ')
        .collect();
    fields[11..13]
        .iter()
        .map(|field| field.parse::<u64>().expect("ticks"))
        .sum()
}

/// A worker's queue is moved away (shutdown), and the listener listens again, as in a rescue. The server neither ends
/// nor spins, and serves again.
#[test]
fn a_moved_queue_is_survived() {
    for model in supervised() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let server = start_with(std::slice::from_ref(&listener), &["--model", model]);
        for _ in 0..3 {
            server.get("/whoami");
            rustix::net::shutdown(&listener, rustix::net::Shutdown::Read).expect("a shutdown");
            std::thread::sleep(Duration::from_millis(200));
            let _ = rustix::net::bind(&listener, &address);
            rustix::net::listen(&listener, 16).expect("it listens again");
        }
        assert_eq!(server.get("/whoami").status, 200, "{model}");
        // 600 ms without a queue: a hot loop would have used about 60 ticks.
        let ticks = cpu_ticks(server.child.id());
        assert!(ticks <= 20, "{model} used {ticks} ticks of CPU time");
        server.stop();
    }
}

fn refused(arguments: &[&str]) -> (Option<i32>, String) {
    let mut child = Command::new(support::program())
        .arg("serve")
        .args(arguments)
        .env_remove("LISTEN_FDS")
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("it starts");
    let status = wait_for(&mut child);
    let mut said = String::new();
    let mut stderr = child.stderr.take().expect("stderr is piped");
    std::io::Read::read_to_string(&mut stderr, &mut said).expect("stderr can be read");
    (status.code(), said)
}

#[test]
fn what_cannot_be_served_is_said() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let (code, said) = refused(&["-l", &address]);
    assert_eq!(code, Some(1));
    assert!(
        said.contains(&format!("cannot listen on {address}")),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");

    let (code, said) = refused(&["-l", "192.0.2.1:0"]);
    assert_eq!(
        (code, said.contains("no interface")),
        (Some(1), true),
        "{said}"
    );
    for wrong in [
        &["-l", "here"][..],
        &["--model", "nosuch"],
        &["-w", "0"],
        &["-w", "x"],
        &["--epoll", "some"],
        &["--backlog", "-1"],
        &["--header-timeout", "0"],
        &["--store", ""],
        &["--store", "http://127.0.0.1/"],
    ] {
        let (code, said) = refused(wrong);
        assert_eq!(code, Some(2), "{wrong:?}: {said}");
    }
    for (wrong, why) in [
        (&["--model", "epoll", "-w", "2"][..], "choose epoll-prefork"),
        (&["--model", "epoll", "--reuseport"], "choose reuseport"),
        (
            &["--model", "epoll", "--accept-lock", "flock"],
            "preforked has all",
        ),
        (
            &["--model", "prethreaded", "--accept-lock", "fcntl"],
            "pthread and none",
        ),
        (&["--files", "/nothing/here"], "cannot serve the files"),
        (&["--store", "/dev/null/x"], "give another directory"),
        (&["--store", "redis://127.0.0.1:1"], "redis-cli ping"),
    ] {
        let (code, said) = refused(&[wrong, &["-l", "127.0.0.1:0"]].concat());
        assert_eq!(code, Some(1), "{wrong:?}: {said}");
        assert!(said.contains(why), "{wrong:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{wrong:?}: {said}");
    }
}

#[test]
fn fd_passing_goes_round_and_survives_a_worker() {
    let mut server = Server::start(&["--model", "fd-passing", "-w", "3"]);
    let around: Vec<Response> = (0..6).map(|_| server.get("/whoami")).collect();
    let workers: Vec<&str> = around.iter().map(Response::worker).collect();
    assert_eq!(workers, ["0", "1", "2", "0", "1", "2"]);

    let pid = around[1].pid();
    let victim = nix::unistd::Pid::from_raw(pid.parse().expect("a pid"));
    nix::sys::signal::kill(victim, Signal::SIGKILL).expect("a worker can be killed");
    let end = Instant::now() + support::PATIENCE;
    while std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| !s.contains(") Z ")) {
        assert!(Instant::now() < end, "worker {pid} is still there");
    }
    for _ in 0..6 {
        assert_ne!(server.get("/whoami").pid(), pid);
    }
    server.signal(Signal::SIGTERM);
    let (status, said) = server.wait();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(
        said.contains(&format!("worker 1 (pid {pid}) ended")),
        "{said}"
    );
}

/// Each connection has a process of its own in the forking model, and none is left behind.
#[test]
fn forking_leaves_no_process_behind() {
    let server = Server::start(&["--model", "forking"]);
    let master = server.child.id();
    let pids: BTreeSet<String> = (0..5)
        .map(|_| server.get("/whoami").pid().to_owned())
        .collect();
    assert_eq!(pids.len(), 5);
    assert!(!pids.contains(&master.to_string()));
    let children = || {
        std::fs::read_to_string(format!("/proc/{master}/task/{master}/children"))
            .expect("it is there")
    };
    let end = Instant::now() + support::PATIENCE;
    while !children().is_empty() {
        assert!(Instant::now() < end, "left behind: {}", children());
        std::thread::sleep(Duration::from_millis(2));
    }
    server.stop();
}

/// There are more connections than descriptors. The server neither ends nor spins. It continues when there is room
/// again, and reports at the end.
#[test]
fn descriptors_run_out_and_come_back() {
    for way in ways() {
        let model = way.arguments[1];
        // The other models hold one connection at a time, or hold them in processes of their own.
        if ![
            "threaded",
            "poll",
            "epoll",
            "epoll-prefork",
            "reuseport",
            "io-uring",
        ]
        .contains(&model)
        {
            continue;
        }
        let mut command = Command::new("sh");
        command
            .args([
                "-c",
                "ulimit -n 40; exec \"$0\" serve -l 127.0.0.1:0 \"$@\"",
            ])
            .arg(support::program())
            .args(way.arguments)
            .env_remove("WAKEONE_SLOT");
        let mut server = Server::spawn(&mut command);
        let mut clients: Vec<Client> = (0..60).map(|_| server.connect()).collect();
        std::thread::sleep(Duration::from_millis(100));
        let ticks = cpu_ticks(server.child.id());
        std::thread::sleep(Duration::from_millis(400));
        let used = cpu_ticks(server.child.id()) - ticks;
        assert!(
            used <= 15,
            "{model} used {used} ticks of CPU time while it could not accept"
        );
        // The accepted connections are served all the time, and the others once there is room.
        for mut client in clients.drain(..) {
            client.send(b"GET /whoami HTTP/1.0\r\n\r\n");
            assert_eq!(client.response().status, 200, "{model}");
        }
        server.signal(Signal::SIGTERM);
        let (status, said) = server.wait();
        assert!(status.success(), "{model}: {status}: {said}");
        assert!(
            said.contains("worker 0: accept failed: "),
            "{model}: {said}"
        );
        assert!(said.contains("Too many open files"), "{model}: {said}");
    }
}
